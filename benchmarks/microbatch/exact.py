"""Exactness: small networks of each kind, split, against eager PyTorch in float64.

The graphs run as they are, without Inductor (``lowering="eager"``): what is checked is the split, and an Inductor
compile for each of hundreds of rows would take an hour. Weights and inputs are rounded to the dtype first, so that the
float64 step is the same step and what differs is the rounding inside of it alone. An error is the mean over several
batches: one batch holds one draw of roundings against another, and that ratio is 1.4 by chance.
"""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
import torch
from torch import Tensor, nn

from benchmarks.harness import (
    Batch,
    System,
    by_slices,
    clear_gradients,
    compiled,
    gradient_errors,
    named_gradients,
    reference_gradients,
    refusals,
)
from benchmarks.microbatch.systems import SEED
from benchmarks.microbatch.table import REMAT, Exactness, share
from benchmarks.models import GPT, GPTShape
from benchmarks.networks import (
    EncoderDecoder,
    EqualLayers,
    ExplicitAttention,
    LanguageModel,
    LlamaBlock,
    MaskedLM,
    ResNet,
    UNet,
    VisionTransformer,
)
from benchmarks.peak.systems import MANY_VERSIONS
from remat_passes.errors import CannotSplitError

SAMPLES = 8
SLICES = (2, 3, 4, 8)  # three do not divide the batch; eight are one sample each
HALF_SAMPLES = HALF_SLICES = 64  # where sums in bfloat16 would lose 1.6 %
NUM_BATCHES = 8
# As many tokens as a vector of bfloat16 has lanes at most: ``rsqrt`` of the elements that are left over rounds twice
# (torch 2.13 on CPU, 2.4e-3 instead of 1.7e-3), and in slices of one sample all would be.
TOKENS = 32
WORDS, WIDTH, IMAGE = 64, 32, 16
MASKED_SHARE = 0.15  # of the tokens, as in BERT (Devlin et al., 2018, section 3.1)


@dataclass(frozen=True, slots=True)
class Case:
    """How to build a network, and a batch of so many samples."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


class CastLlamaBlock(LlamaBlock):
    """A llama block that takes its rotary tables in its own dtype, so that it runs in bfloat16 too."""

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        return super().forward(x, cosine.to(x.dtype), sine.to(x.dtype))


def _language(samples: int) -> Batch:
    return torch.randint(WORDS, (samples, TOKENS)), torch.randint(WORDS, (samples, TOKENS))


def _masked_language(samples: int) -> Batch:
    """As many targets as there happen to be in each sample: the mean is over all of them."""
    words = torch.randint(1, WORDS, (samples, TOKENS))
    is_token = torch.arange(TOKENS) < torch.randint(TOKENS // 2, TOKENS + 1, (samples, 1))
    is_target = (torch.rand(samples, TOKENS) < MASKED_SHARE) & is_token
    is_target[0, 0] = True  # a mean over no target at all is not a number
    return words.masked_fill(is_target, 0), is_token, words.masked_fill(~is_target, -100)


def _features(samples: int) -> Batch:
    """Rows enough that the error is not that of a few roundings, which differs by 7 % from seed to seed at 8 rows."""
    return torch.randn(samples, TOKENS, WIDTH), torch.randn(samples, TOKENS, WIDTH)


def _images(samples: int) -> Batch:
    return torch.randn(samples, 3, IMAGE, IMAGE), torch.randint(10, (samples,))


def _pixels(samples: int) -> Batch:
    return torch.randn(samples, 3, IMAGE, IMAGE), torch.randint(5, (samples, IMAGE, IMAGE))


def _causal(block: Callable[[], nn.Module], rotary_size: int | None = None) -> nn.Module:
    return LanguageModel([block() for _ in range(2)], WIDTH, WORDS, rotary_size)


CASES = (
    Case("MLP", lambda: EqualLayers(WIDTH, 4), _features),
    Case("GPT, SDPA", lambda: GPT(GPTShape(2, WIDTH, 2, WORDS, SAMPLES, TOKENS)), _language),
    Case("GPT, explicit softmax", lambda: _causal(lambda: ExplicitAttention(WIDTH, 2, 0.0)), _language),
    Case("llama-style", lambda: _causal(lambda: CastLlamaBlock(WIDTH, 2, 1), WIDTH // 2), _language),
    Case("BERT-style masked LM", lambda: MaskedLM(WIDTH, 2, 2, WORDS, TOKENS), _masked_language),
    Case(
        "encoder-decoder",
        lambda: EncoderDecoder(WIDTH, 2, 1, WORDS, TOKENS),
        lambda samples: (torch.randint(WORDS, (samples, TOKENS)), *_language(samples)),
    ),
    Case("ViT", lambda: VisionTransformer(WIDTH, 2, 2, IMAGE, 4, 10), _images),
    Case("U-Net, group norm", lambda: UNet(8), _pixels),
    Case("ResNet, eval", lambda: ResNet(8, 2).eval(), _images),
    Case("ResNet, batch norm", lambda: ResNet(8, 2), _images),  # couples the samples: refused
)


def made(case: Case, samples: int, dtype: torch.dtype) -> tuple[nn.Module, list[Batch]]:
    """The network and its batches in ``dtype``: the same weights and inputs each time."""
    torch.manual_seed(SEED)
    model = case.build().to(dtype)
    return model, [tuple(_in_dtype(tensor, dtype) for tensor in case.batch(samples)) for _ in range(NUM_BATCHES)]


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def mean_errors(
    num_slices: int, model: nn.Module, batches: Sequence[Batch], truths: Sequence[Mapping[str, Tensor]]
) -> dict[str, float]:
    """The error of each gradient of remat in so many slices, its graphs run as they are: the mean over the batches.

    Raises:
        RematError: remat refused the step.
    """
    system = System(f"{REMAT} x{num_slices}", "remat", {"num_microbatches": num_slices, "lowering": "eager"})
    model, forward = copy.deepcopy(model), compiled(system)
    means: dict[str, float] = defaultdict(float)
    for batch, truth in zip(batches, truths, strict=True):
        clear_gradients(model)
        with refusals():
            by_slices(forward, model, [batch])
        for name, error in gradient_errors(named_gradients(model), truth).items():
            means[name] += error / len(batches)
    return means


def exactness(case: Case, dtype: torch.dtype, samples: int, slices: Sequence[int]) -> Iterator[Exactness]:
    """The errors of each split beside those of the unsplit step; a step that cannot be split is asked for once."""
    model, batches = made(case, samples, dtype)
    truths = [reference_gradients(model, batch) for batch in batches]
    unsplit = mean_errors(1, model, batches, truths)
    for num_slices in slices:
        where = (case.name, str(dtype).removeprefix("torch."), samples, num_slices)
        try:
            errors = mean_errors(num_slices, model, batches, truths)
        except CannotSplitError as error:
            yield Exactness(*where, refusal=f"refused: {error}")
            return
        except Exception as error:  # a crash is a row of its own
            yield Exactness(*where, refusal=f"failed: {type(error).__name__}: {error}".partition("\n")[0])
            continue
        ratios = [share(error, unsplit[name]) for name, error in errors.items()]
        largest = max((ratio for ratio in ratios if ratio is not None), default=None)
        yield Exactness(*where, max(errors.values()), max(unsplit.values()), largest)
        torch.compiler.reset()
        gc.collect()


def measure_all(cases: Sequence[Case] = CASES) -> list[Exactness]:
    """Every case in float64 and float32 in each number of slices, and in bfloat16 in one sample a slice."""
    plans: tuple[tuple[torch.dtype, int, Sequence[int]], ...] = (
        (torch.float64, SAMPLES, SLICES),
        (torch.float32, SAMPLES, SLICES),
        (torch.bfloat16, HALF_SAMPLES, (HALF_SLICES,)),
    )
    found: list[Exactness] = []
    with torch._dynamo.config.patch(MANY_VERSIONS):
        for case in cases:
            for dtype, samples, slices in plans:
                for entry in exactness(case, dtype, samples, slices):
                    error = "-" if entry.error is None else f"{entry.error:.1e}"
                    line = f"    {case.name:24} {entry.dtype:9} x{entry.num_slices:<3} {error:8} {entry.verdict}"
                    click.echo(line)
                    found.append(entry)
    return found
