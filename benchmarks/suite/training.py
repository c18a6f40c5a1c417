"""Training to a set loss: whether a step under a budget learns what the step without one learns, and how fast.

Every system starts from the same weights and sees the same passages in the same order, so the curves of loss by step
have to lie on each other, and what differs is the time that a step takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import Clock, measured_total_bytes
from benchmarks.microbatch.table import share
from benchmarks.peak.models import SEED, Model
from benchmarks.peak.picture import STYLES
from benchmarks.peak.systems import Contender, start
from benchmarks.peak.table import EAGER
from benchmarks.report import Report, format_mib
from benchmarks.suite.models import passages

TARGET = 1.5  # nats a character, the mean of the last steps; the letters alone, without what is before them, give 3.1
WINDOW = 10  # steps whose mean is held against the target: a single batch's loss jumps by a tenth
LEARNING_RATE = 1e-3  # of AdamW, as in nanoGPT's config/train_shakespeare_char.py
MAX_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses of one system, step by step, and how long each step took with its optimizer."""

    system: str
    family: str
    budget_bytes: int | None
    measured_bytes: int
    compile_s: float
    losses: tuple[float, ...]
    steps_s: tuple[float, ...]

    @property
    def num_steps(self) -> int | None:
        """After how many steps the target was reached; ``None`` if it was not."""
        return steps_to_target(self.losses)

    @property
    def to_target_s(self) -> float | None:
        """How long the steps to the target took, without compiling."""
        return None if self.num_steps is None else sum(self.steps_s[: self.num_steps])


def steps_to_target(losses: Sequence[float], target: float = TARGET) -> int | None:
    """After how many steps the mean of the last ones is at most ``target``; ``None`` if it never is."""
    ends = range(WINDOW, len(losses) + 1)
    return next((end for end in ends if sum(losses[end - WINDOW : end]) <= WINDOW * target), None)


def train(
    contender: Contender, model: Model, clock: Clock, *, max_steps: int = MAX_STEPS, target: float = TARGET
) -> Curve:
    """Train ``model`` until the target is reached, or for ``max_steps``.

    Raises:
        RematError: remat refused the step.
    """
    trial = start(contender, *model.make(), clock=clock, with_cache=False)
    measured_bytes = measured_total_bytes(trial)
    optimizer = torch.optim.AdamW(trial.model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(SEED)
    losses: list[float] = []
    steps_s: list[float] = []

    def step() -> None:
        losses.append(trial.step().item())
        optimizer.step()

    while len(losses) < max_steps and steps_to_target(losses[-WINDOW:], target) is None:
        for held, drawn in zip(trial.batch, passages(generator), strict=True):
            held.copy_(drawn)
        steps_s.append(clock(step))
    return Curve(
        contender.system.name,
        contender.family,
        contender.budget_bytes,
        measured_bytes,
        trial.compile_s,
        tuple(losses),
        tuple(steps_s),
    )


# -- curves as a file


def write_curves(path: Path, curves: Mapping[str, Curve]) -> None:
    """Write the curves by the names of their systems."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps({name: asdict(c) for name, c in curves.items()}) + "\n", encoding="utf-8")
    partial.replace(path)


def read_curves(path: Path) -> dict[str, Curve]:
    """The curves in ``path``; none where there is no such file."""
    if not path.exists():
        return {}
    return {name: _curve(entry) for name, entry in json.loads(path.read_text(encoding="utf-8")).items()}


def _curve(entry: Mapping[str, Any]) -> Curve:
    return Curve(**{**entry, "losses": tuple(entry["losses"]), "steps_s": tuple(entry["steps_s"])})


# -- what follows

COLUMNS = ("system", "budget MiB", "measured MiB", "steps", "seconds", "of eager's", "compile s", "off eager's loss")


def largest_difference(curve: Curve, reference: Curve) -> float:
    """The largest difference of two losses of the same step, as a share of the reference's."""
    pairs = zip(curve.losses, reference.losses, strict=False)
    return max((abs(own - other) / other for own, other in pairs), default=0.0)


def training_report(curves: Sequence[Curve], notes: Sequence[str]) -> Report:
    """Each system's way to the target."""
    eager = next((curve for curve in curves if curve.family == EAGER), None)
    rows = tuple(_row(curve, eager) for curve in curves)
    reading = (
        f"AdamW, learning rate {LEARNING_RATE}; until the mean of the last {WINDOW} losses is at most {TARGET}.",
        "Seconds are those of the steps with their optimizer, without compiling. Off eager's loss: the largest"
        " difference of the two losses of one step, as a share of eager's; it grows from rounding.",
    )
    title = f"Training to a loss of {TARGET} on the characters of the licence"
    return Report(title, COLUMNS, rows, (*reading, *notes))


def _row(curve: Curve, eager: Curve | None) -> tuple[str, ...]:
    of_eager = share(curve.to_target_s, eager.to_target_s if eager else None)
    return (
        curve.system,
        format_mib(curve.budget_bytes),
        format_mib(curve.measured_bytes),
        "not reached" if curve.num_steps is None else str(curve.num_steps),
        "-" if curve.to_target_s is None else f"{curve.to_target_s:.1f}",
        "-" if of_eager is None else f"{of_eager:.3f}",
        f"{curve.compile_s:.1f}",
        "-" if eager is None else f"{100 * largest_difference(curve, eager):.2f} %",
    )


def draw_curves(curves: Sequence[Curve], path: Path) -> None:
    """Write loss against steps and against time into ``path``."""
    figure = Figure(figsize=(11, 4), layout="constrained")  # without pyplot nothing asks for a screen
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for curve in curves:
        _draw(by_step, curve, [float(number) for number in range(1, len(curve.losses) + 1)])
        _draw(by_time, curve, list(accumulate(curve.steps_s)))
    by_step.set_title("Loss of one step", loc="left")
    by_step.set_xlabel("steps")
    by_time.set_xlabel("seconds, without compiling")
    by_step.set_ylabel("nats a character")
    by_step.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw(axes: Axes, curve: Curve, at: Sequence[float]) -> None:
    colour, _ = STYLES[curve.family]
    axes.plot(at, curve.losses, color=colour, linewidth=1, label=curve.system)
    axes.axhline(TARGET, color="black", linestyle="--", linewidth=0.5)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
