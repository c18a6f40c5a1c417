"""What is measured: the systems, each at one setting, and the sizes of the GPT that all of them train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.models import GPTShape

EAGER, COMPILE, REMAT = "eager", "torch.compile", "remat"
KNOB, CHECKPOINT, LOOP = "activation_memory_budget", "checkpoint per block", "Python loop"

PERCENTS = (100, 80, 60, 50, 40, 30, 20)  # budgets, of what torch.compile was measured to need
RATIOS = (0.7, 0.4, 0.1)  # of PyTorch's own knob
LOOPS = (4, 16)
SLICES = (1, 2, 4, 8, 16, 32)

# GPT-2 medium (Radford et al., 2019) with a vocabulary that is a multiple of 128: 354 million parameters, head tied.
MEDIUM = GPTShape(num_layers=24, width=1024, num_heads=16, vocabulary=50304, batch=32, tokens=1024)
TINY = GPTShape(num_layers=2, width=32, num_heads=2, vocabulary=64, batch=8, tokens=16)

# What eager holds of one token of bf16 in one layer, in widths: about 17 activations of one width (each norm, q, k and
# v, the attended, the residual sums; the GELU's two of four widths), counted by hand. Of the logits: themselves, their
# log-softmax and two gradients.
WIDTHS_PER_LAYER, COPIES_OF_LOGITS = 17, 4
SHARE_OF_MEMORY = 0.7  # of what is free: the estimate is rough, and other systems' weights lie beside


@dataclass(frozen=True, slots=True)
class Setting:
    """One system at one setting: a row of the table."""

    family: str
    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    ratio: float | None = None  # of the knob
    num_slices: int = 1
    budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how everything runs; the eager lowering and CPU are for trying the script out."""

    device: str = "cuda"
    lowering: str = "inductor"
    device_spec: str | None = None  # where the device's own name is not known


def plain() -> tuple[Setting, ...]:
    """The yardsticks."""
    return Setting(COMPILE, COMPILE), Setting(EAGER, EAGER)


def rivals(most_slices: int) -> tuple[Setting, ...]:
    """Other ways to less memory; the loops have at most so many slices."""
    return (
        Setting(CHECKPOINT, CHECKPOINT),
        *(Setting(KNOB, f"{KNOB} {ratio}", ratio=ratio) for ratio in RATIOS),
        *(Setting(LOOP, f"{LOOP} x{n}", num_slices=n) for n in LOOPS if n <= most_slices),
    )


def under_budget(budget_bytes: int, label: str) -> Setting:
    """remat under one budget; how many slices it takes is its own choice."""
    return Setting(REMAT, f"{REMAT}, {label}", {"memory_budget": budget_bytes}, budget_bytes=budget_bytes)


def in_slices(num_slices: int) -> Setting:
    """remat without a budget, in a given number of slices."""
    return Setting(REMAT, f"{REMAT} x{num_slices}", {"num_microbatches": num_slices}, num_slices=num_slices)


def eager_bytes(shape: GPTShape) -> int:
    """About what eager needs for a step in bf16: weights and their gradients, activations, logits."""
    tokens = shape.batch * shape.tokens
    activations = WIDTHS_PER_LAYER * shape.num_layers * shape.width + COPIES_OF_LOGITS * shape.vocabulary
    return 2 * (2 * shape.num_parameters + tokens * activations)


def that_fits(shape: GPTShape, free_bytes: int) -> GPTShape:
    """The shape with a batch, and where that is not enough as many layers, that eager has room for."""
    while eager_bytes(shape) > SHARE_OF_MEMORY * free_bytes and shape.batch > 1:
        shape = replace(shape, batch=shape.batch // 2)
    while eager_bytes(shape) > SHARE_OF_MEMORY * free_bytes and shape.num_layers > 1:
        shape = replace(shape, num_layers=shape.num_layers // 2)
    return shape
