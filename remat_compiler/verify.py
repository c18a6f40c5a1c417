"""Verified: the first step run both ways, split and unsplit, and every gradient compared.

The proof that a step may be split is in the rules (remat_passes/batch_rules.py) and in the tests. This is for whoever
wants to see it on the own model: with ``options={"verify": True}`` the first step that is called with gradients runs on
copies of its inputs through both compiled forms, from the same random state, and each output, each gradient and each
input that is changed in place is held against the other.

The reference is the step with one micro-batch and no budget, compiled in the same way, so that it draws the same random
numbers. Where there is not the memory for that, it is the unsplit step that recomputes as much as the free memory asks
for. A smaller batch would be another graph: the sizes of the batch are in this one, and only Dynamo, which is behind us
when a backend is called, makes one for others. So it is taken where the step is called with one, as each size is
compiled and verified by itself (docs/decisions/0012).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat_passes.errors import BudgetInfeasibleError, VerificationError
from remat_passes.units import format_bytes

from .plan_log import record_verification

# What two orders of summation may differ by, of the largest element of a gradient: some hundred units in the last place
# (2.2e-16, 1.2e-7, 9.8e-4, 7.8e-3), as sums over a batch of thousands of tokens showed (benchmarks/microbatch).
RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}

# A gradient that is zero but for rounding (of a bias in front of a norm) is noise next to the others: so many units in
# the last place of the largest gradient of the step.
NOISE_UNITS = 1000


@dataclass(frozen=True, slots=True)
class _Step:
    """What one run of the step gives: named tensors."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    inputs: dict[str, torch.Tensor]  # after the step


class Verified:
    """A compiled step that is held against its reference when it is first called with gradients."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        make_reference: Callable[[int | None], Callable[..., Any]],
        names: Sequence[str],
        needed_bytes: int,
        described: str,
        coarsest: torch.dtype | None,
    ) -> None:
        self.compiled, self.make_reference, self.names = compiled, make_reference, tuple(names)
        self.needed_bytes, self.described = needed_bytes, described
        self.coarsest = coarsest  # what some of the step is computed in, whatever its results are (autocast)
        self.is_done = False

    def __call__(self, *arguments: Any) -> Any:
        trains = torch.is_grad_enabled() and any(_requires_grad(argument) for argument in arguments)
        if trains and not self.is_done:
            self.is_done = True
            self._verify(arguments)
        return self.compiled(*arguments)

    def _verify(self, arguments: Sequence[Any]) -> None:
        free = _free_bytes(arguments)
        try:
            with torch.random.fork_rng(devices=_cuda_devices(arguments)):
                reference = self.make_reference(free if free is not None and free < self.needed_bytes else None)
        except BudgetInfeasibleError as refused:
            record_verification(
                f"{self.described}: not verified, because the unsplit step needs {format_bytes(refused.smallest_bytes)}"
                f" at least and {format_bytes(free or 0)} are free. Call the step once with a smaller batch: each size"
                " is compiled and verified by itself."
            )
            return
        with torch.random.fork_rng(devices=_cuda_devices(arguments)):
            state = torch.random.get_rng_state()
            states = [torch.cuda.get_rng_state(device) for device in _cuda_devices(arguments)]
            expected = self._run(reference, arguments)
            torch.random.set_rng_state(state)
            for device, cuda_state in zip(_cuda_devices(arguments), states, strict=True):
                torch.cuda.set_rng_state(cuda_state, device)
            found = self._run(self.compiled, arguments)
        errors = list(_differences(expected, found, self.coarsest))
        wrong = [f"{what}: {text}" for what, is_right, _, text in errors if not is_right]
        if wrong:
            failed = f"{self.described}: the split step is not the same as the unsplit one. {'; '.join(wrong[:5])}."
            record_verification(failed)
            raise VerificationError(
                f"{failed} Please report this with the model; num_microbatches=1 computes the step unsplit."
            )
        largest = max((error for _, _, error, _ in errors), default=0.0)
        record_verification(
            f"{self.described}: verified, {len(errors)} tensors, largest relative difference {largest:.1e}"
        )

    def _run(self, step: Callable[..., Any], arguments: Sequence[Any]) -> _Step:
        copies = [_copy(argument) for argument in arguments]
        outputs = step(*copies)
        listed = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        tensors = {f"output {at}": out for at, out in enumerate(listed) if isinstance(out, torch.Tensor)}
        ends = [out for out in tensors.values() if out.requires_grad]
        named = dict(zip(self._input_names(arguments), copies, strict=True))
        leaves = {name: copy for name, copy in named.items() if _requires_grad(copy)}
        found = torch.autograd.grad(ends, list(leaves.values()), [_direction(end) for end in ends], allow_unused=True)
        return _Step(
            {name: out.detach() for name, out in tensors.items()},
            dict(zip((f"gradient of {name}" for name in leaves), found, strict=True)),
            {f"input {name}": copy.detach() for name, copy in named.items() if isinstance(copy, torch.Tensor)},
        )

    def _input_names(self, arguments: Sequence[Any]) -> list[str]:
        return [self.names[at] if at < len(self.names) else f"{at}" for at in range(len(arguments))]


def _requires_grad(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _copy(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    copy = argument.detach().clone(memory_format=torch.preserve_format)
    return copy.requires_grad_() if argument.requires_grad else copy


def _direction(output: torch.Tensor) -> torch.Tensor:
    """What backward starts with: 1 for a loss, else numbers that no symmetry of a loss can hide behind."""
    if not output.dim():
        return torch.ones_like(output)
    numbers = torch.arange(output.numel(), dtype=torch.float64).mul_(0.7).sin_()
    return numbers.to(output.dtype).to(output.device).reshape(output.shape)


def _differences(expected: _Step, found: _Step, coarsest: torch.dtype | None) -> Iterator[tuple[str, bool, float, str]]:
    """For each tensor: its name, whether it is right, its relative difference, and both in words."""
    gradients = [g for g in expected.gradients.values() if g is not None]
    scale = max((_largest(gradient) for gradient in gradients), default=0.0)
    for a, b in (
        (expected.outputs, found.outputs),
        (expected.gradients, found.gradients),
        (expected.inputs, found.inputs),
    ):
        for name, wanted in a.items():
            got = b.get(name)
            if wanted is None or got is None:
                yield name, wanted is got, 0.0, "one of them is None"
                continue
            yield (name, *_difference(wanted, got, scale if a is expected.gradients else 0.0, coarsest))


def _difference(
    wanted: torch.Tensor, got: torch.Tensor, scale: float, coarsest: torch.dtype | None
) -> tuple[bool, float, str]:
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return False, float("inf"), f"{tuple(wanted.shape)} {wanted.dtype} and {tuple(got.shape)} {got.dtype}"
    if wanted.dtype.is_complex:
        wanted, got = torch.view_as_real(wanted.resolve_conj()), torch.view_as_real(got.resolve_conj())
    if not wanted.dtype.is_floating_point:
        return bool(torch.equal(wanted, got)), 0.0, "they differ"
    both = torch.isfinite(wanted) & torch.isfinite(got)
    same_rest = torch.equal(torch.nan_to_num(wanted[~both]), torch.nan_to_num(got[~both]))
    largest, apart = _largest(wanted[both]), _largest(wanted[both].double() - got[both].double())
    dtype = wanted.dtype if coarsest is None else coarsest
    noise = NOISE_UNITS * torch.finfo(wanted.dtype).eps * scale
    is_right = same_rest and apart <= max(RELATIVE.get(wanted.dtype, 0.0), RELATIVE.get(dtype, 0.0)) * largest + noise
    relative = apart / largest if largest > noise else 0.0
    return is_right, relative, f"they differ by {apart:.3g}, of {largest:.3g} at most"


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _cuda_devices(arguments: Sequence[Any]) -> list[torch.device]:
    tensors = (argument for argument in arguments if isinstance(argument, torch.Tensor))
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type == "cuda"))


def _free_bytes(arguments: Sequence[Any]) -> int | None:
    """What can be allocated where the step runs; ``None`` where the system does not say."""
    devices = _cuda_devices(arguments)
    if devices:
        return int(torch.cuda.mem_get_info(devices[0])[0])
    names = getattr(os, "sysconf_names", {})
    if "SC_AVPHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
