"""What a user would pick instead of remat, each way alone and the ways that people put together.

A loop over slices counts every slice by its share of the samples. That is the step itself where the loss is a mean over
samples that count alike; where it is not, the gradient is off, and so the table says.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import System
from benchmarks.microbatch.systems import chunkers
from benchmarks.microbatch.table import CHUNKER, LOOP
from benchmarks.peak.models import checkpoint_blocks
from benchmarks.peak.systems import Contender, own_knob, plain
from benchmarks.peak.systems import rivals as ways_to_recompute
from benchmarks.suite.table import EAGER_TOGETHER, FIXED, FUSED, TOGETHER

MAX_SLICES = 64  # of a loop: each number of slices is compiled, and smaller slices than that are overhead alone
KNOB_IN_LOOP = (0.4, 0.1)  # ratios of activation_memory_budget that loops are tried with too


def slices_of(num_samples: int) -> tuple[int, ...]:
    """The numbers of slices of one size: 2, 4, 8 and so on up to one sample a slice."""
    powers = (2**power for power in range(1, MAX_SLICES.bit_length()))
    return tuple(n for n in powers if num_samples % n == 0)


def in_loop(contender: Contender, num_slices: int, family: str) -> Contender:
    """The same system on one slice after the other."""
    name = f"{LOOP} x{num_slices}" + ("" if family == LOOP else f", {contender.system.name}")
    return replace(contender, family=family, system=replace(contender.system, name=name), num_slices=num_slices)


def loops(num_samples: int) -> Iterator[Contender]:
    """Loops around torch.compile in each number of slices: alone, with a checkpoint per block, and with the knob."""
    (_, compiled), blocks = plain(), _blocks("checkpoint per block", "inductor")
    for n in slices_of(num_samples):
        yield in_loop(compiled, n, LOOP)
        for other in (blocks, *(own_knob(ratio) for ratio in KNOB_IN_LOOP)):
            yield in_loop(other, n, TOGETHER)


def in_eager(num_samples: int) -> Iterator[Contender]:
    """What takes no compiler: a checkpoint per block, whole and on one slice after the other."""
    blocks = _blocks("eager, checkpoint per block", None)
    yield blocks
    yield from (in_loop(blocks, n, EAGER_TOGETHER) for n in slices_of(num_samples))


def _blocks(name: str, backend: str | None) -> Contender:
    return Contender(EAGER_TOGETHER, System(name, backend), prepare=checkpoint_blocks)


# -- losses that never hold all logits


class Deferred(nn.Module):
    """A head that hands its input on, because the loss multiplies by the head's weight itself."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x


def has_linear_head(model: nn.Module) -> bool:
    """Whether ``model`` ends with a linear layer, its ``head``: that and cross entropy can be one function."""
    return isinstance(getattr(model, "head", None), nn.Linear)


def with_fused_loss(name: str, backend: str | None, loss: Callable[[Tensor, nn.Linear, Tensor], Tensor]) -> Contender:
    """A model whose head and cross entropy are ``loss``, which takes what the head took, the head and the targets."""
    heads: list[nn.Linear] = []

    def prepare(model: nn.Module) -> None:
        head = model.head
        assert isinstance(head, nn.Linear)
        heads[:] = [head]
        model.head = Deferred(head)

    def cross_entropy(hidden: Tensor, target: Tensor) -> Tensor:
        return loss(hidden, heads[0], target)

    def around() -> AbstractContextManager[object]:
        return mock.patch.object(F, "cross_entropy", cross_entropy)

    return Contender(FUSED, System(name, backend), prepare=prepare, around=around)


def _of_torch(hidden: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
    options: Any = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, head.weight, target, linear_bias=head.bias, options=options)


def _of_liger(hidden: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
    liger: Any = importlib.import_module("liger_kernel.transformers")  # has no types, and is not remat's to install
    loss: Tensor = liger.LigerFusedLinearCrossEntropyLoss()(head.weight, hidden, target, head.bias)
    return loss


def fused_losses(model: nn.Module) -> tuple[list[Contender], list[str]]:
    """torch's own chunked linear cross entropy and Liger's, and why one of them is not measured."""
    if not has_linear_head(model):
        return [], ["Fused linear cross entropy: not measured, the model does not end with a linear head."]
    found, skipped = [], []
    if hasattr(F, "linear_cross_entropy"):
        found += [with_fused_loss(f"linear_cross_entropy, {n}", b, _of_torch) for n, b in _BACKENDS]
    else:
        skipped.append(f"torch's linear_cross_entropy: skipped, torch {torch.__version__} has none.")
    if importlib.util.find_spec("liger_kernel"):
        found.append(with_fused_loss("Liger's linear cross entropy", "inductor", _of_liger))
    else:
        skipped.append("Liger's fused linear cross entropy: skipped, liger-kernel is not installed (it needs a GPU).")
    return found, skipped


_BACKENDS = (("eager", None), ("torch.compile", "inductor"))


# -- all of them


def rivals(model: nn.Module, num_samples: int) -> tuple[list[Contender], list[str]]:
    """Every rival of one model but eager and torch.compile as they are, and why some are not measured."""
    fused, skipped = fused_losses(model)
    chunked = [Contender(CHUNKER, chunker.system) for chunker in chunkers()]
    return [*ways_to_recompute(), *in_eager(num_samples), *chunked, *fused, *loops(num_samples)], skipped


def one_a_family(contenders: Sequence[Contender]) -> list[Contender]:
    """The middle one of each family: enough to see that everything runs."""
    families = dict.fromkeys(contender.family for contender in contenders)
    kept = ([c for c in contenders if c.family == family] for family in families)
    return [of_family[len(of_family) // 2] for of_family in kept]


def in_fixed_numbers(budget_bytes: int, full_bytes: int, num_samples: int) -> Iterator[Contender]:
    """remat under one budget in each number of micro-batches, one among them: was the number that it chose the best?"""
    for n in (1, *slices_of(num_samples)):
        name = f"{FIXED}, {100 * budget_bytes / full_bytes:.2f} %, N={n}"
        options = {"memory_budget": budget_bytes, "num_microbatches": n}
        yield Contender(FIXED, System(name, "remat", options), budget_bytes=budget_bytes)
