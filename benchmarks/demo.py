"""What ``make demo`` runs: one model trained in three ways, and a picture of their memory.

A byte-level GPT of 5 million parameters learns the text of Python's own help topics, which every Python ships. Eager,
``torch.compile``, and remat with 60 % of the bytes that ``torch.compile``'s plan needs see the same batches from the
same weights. So the loss curves must be one curve, and the demo fails where they are not.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import remat_compiler
from benchmarks.harness import Batch, Forward, System, clear_gradients, compiled, refusals, seconds
from benchmarks.models import GPT, GPTShape, build_gpt
from benchmarks.picture import draw_memory
from benchmarks.report import ROOT, Report, console_for_output, format_mib
from remat_compiler.measure import MemoryTrace, measure_peak, tensor_bytes
from remat_passes.errors import RematError
from remat_passes.plan import RematPlan

SHAPE = GPTShape(num_layers=6, width=256, num_heads=8, vocabulary=256, batch=12, tokens=256)
NUM_STEPS = 30
SEED = 0
LEARNING_RATE = 1e-3
BUDGET = "60%"
SYSTEMS = (
    System("eager"),
    System("torch.compile", "inductor"),
    System(f"remat, {BUDGET}", "remat", {"memory_budget": BUDGET}),
)
OUTPUT = ROOT / "build" / "demo"

# How far the losses of two float32 trainings may be apart, as a share of the loss. After 40 steps of this demo eager,
# torch.compile, remat, eager in 12 micro-batches and eager in float64 were 3.2e-7 apart at most: three roundings. The
# rest is for machines that add in another order.
LOSS_TOLERANCE = 100 * torch.finfo(torch.float32).eps

NUM_TRACES = 3  # of which the fastest is drawn: a busy machine stretches a curve, it does not change the bytes


@dataclass(slots=True)
class Way:
    """One system in training: its model, its optimizer, and what was seen so far."""

    system: System
    model: GPT
    optimizer: torch.optim.Optimizer
    forward: Forward
    losses: list[float] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)

    def train(self, batch: Batch) -> None:
        """One step of training; the first one compiles."""
        self.times_ms.append(seconds(lambda: self._train(batch)) * 1e3)

    def _train(self, batch: Batch) -> None:
        loss = self.forward_backward(batch)
        self.optimizer.step()
        self.losses.append(loss.item())

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Loss and gradients of one batch."""
        clear_gradients(self.model)
        loss = self.forward(self.model, *batch)
        loss.backward()
        return loss.detach()


@dataclass(frozen=True, slots=True)
class Training:
    """What one way came to."""

    name: str
    losses: tuple[float, ...]
    step_ms: float  # the median, without the steps that compile
    memory: MemoryTrace  # of one forward and backward
    plan: RematPlan | None


def help_text() -> bytes:
    """The text of ``help("topics")``, in the order of the topics' names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def batches(text: bytes, shape: GPTShape, num_steps: int, seed: int) -> Iterator[Batch]:
    """Pieces of ``text`` from places drawn by ``seed``; the targets are the same bytes, one later."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for _ in range(num_steps):
        starts = torch.randint(len(tokens) - shape.tokens, (shape.batch, 1), generator=generator)
        pieces = tokens[starts + torch.arange(shape.tokens + 1)]
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def begin(system: System, shape: GPTShape) -> Way:
    """``system`` with the first weights; it compiles at its first step."""
    model = build_gpt(shape, SEED)
    return Way(system, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), compiled(system))


def train(
    systems: Sequence[System], shape: GPTShape, num_steps: int, advance: Callable[[Way], None] = lambda way: None
) -> list[Training]:
    """Train every system on the same batches, one step of each in turn, so that a busy machine slows all of them.

    Raises:
        RematError: remat refused the step.
    """
    ways = [begin(system, shape) for system in systems]
    num_plans = len(remat_compiler.plans())
    for batch in batches(help_text(), shape, num_steps, SEED):
        for way in ways:
            with refusals():
                way.train(batch)
            advance(way)
    plans = remat_compiler.plans()[num_plans:]
    traces = zip(*([memory_of_one_step(way, batch) for way in ways] for _ in range(NUM_TRACES)), strict=True)
    return [training_of(way, own, plans) for way, own in zip(ways, traces, strict=True)]


def training_of(way: Way, traces: Sequence[MemoryTrace], plans: Sequence[RematPlan]) -> Training:
    """The outcome of ``way``, with the fastest of its traces."""
    fastest = min(traces, key=lambda trace: trace.duration_us)
    plan = plans[-1] if way.system.backend == "remat" and plans else None
    warm_ms = way.times_ms[1:] or way.times_ms
    return Training(way.system.name, tuple(way.losses), statistics.median(warm_ms), fastest, plan)


def memory_of_one_step(way: Way, batch: Batch) -> MemoryTrace:
    """The memory of one forward and backward, gradients included, on top of parameters, buffers and inputs."""
    clear_gradients(way.model)
    baseline_bytes = tensor_bytes(way.model, batch)
    return measure_peak(lambda: way.forward_backward(batch), baseline_bytes=baseline_bytes)


def loss_difference(trainings: Sequence[Training]) -> float:
    """The largest distance of a loss from the first training's loss at the same step, as a share of it."""
    first, *others = (training.losses for training in trainings)
    pairs = ((a, b) for losses in others for a, b in zip(first, losses, strict=True))
    return max(abs(a - b) / abs(a) for a, b in pairs)


def table(trainings: Sequence[Training], shape: GPTShape) -> Report:
    """The one table of the demo."""
    plan = next((training.plan for training in trainings if training.plan), None)
    compile_bytes = plan.inductor_peak_bytes if plan else None  # what remat projects for torch.compile's plan
    projected = {"torch.compile": compile_bytes} | {t.name: t.plan.projected_peak_bytes for t in trainings if t.plan}
    rows = tuple(
        (
            training.name,
            f"{training.losses[-1]:.4f}",
            f"{training.step_ms:.0f}",
            format_mib(training.memory.peak_bytes),
            format_mib(projected.get(training.name)),
        )
        for training in trainings
    )
    columns = ("", "last loss", "ms a step", "measured peak MiB", "projected peak MiB")
    return Report(
        f"GPT of {shape.num_parameters / 1e6:.1f} million parameters, {shape.batch} texts a step", columns, rows
    )


def conclusions(trainings: Sequence[Training]) -> tuple[bool, list[str]]:
    """Whether the promises were kept, and a sentence on each."""
    difference = loss_difference(trainings)
    agree = difference <= LOSS_TOLERANCE
    sentences = [
        f"The loss curves {'agree' if agree else 'DO NOT AGREE'}: they are {difference:.1e} of the loss apart at most, "
        f"and {LOSS_TOLERANCE:.0e} is what float32 can explain."
    ]
    kept = True
    for training in trainings:
        if training.plan is None or training.plan.budget_bytes is None:
            continue
        budget_bytes, peak_bytes = training.plan.budget_bytes, training.memory.peak_bytes
        kept = kept and peak_bytes <= budget_bytes
        sentences.append(
            f"The budget was {format_mib(budget_bytes)} MiB and the measured peak is {format_mib(peak_bytes)} MiB: "
            f"{'kept' if peak_bytes <= budget_bytes else 'BROKEN'}."
        )
    return agree and kept, sentences


def draw(trainings: Sequence[Training], path: Path) -> None:
    """The memory of one step, a curve a way, with the budget."""
    budgets = [training.plan.budget_bytes for training in trainings if training.plan]
    curves = {training.name: training.memory for training in trainings}
    draw_memory(curves, budgets[0] if budgets else None, path)


def train_with_progress(console: Console, num_steps: int) -> list[Training]:
    """Train with a bar on a terminal, and a line every ten steps elsewhere."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("compiling", total=num_steps * len(SYSTEMS))

        def advance(way: Way) -> None:
            num_done = len(way.losses)
            progress.update(bar, advance=1, description="training" if num_done > 1 else f"compiled {way.system.name}")
            if not console.is_terminal and num_done % 10 == 1:
                console.print(f"step {num_done:2} of {num_steps}  {way.system.name:<14} loss {way.losses[-1]:.4f}")

        return train(SYSTEMS, SHAPE, num_steps, advance)


@click.command()
@click.option("--steps", "num_steps", default=NUM_STEPS, show_default=True, help="Steps of training, each way.")
def main(num_steps: int) -> None:
    """Train one model with eager, torch.compile and remat, and draw their memory."""
    console = console_for_output()
    console.print(f"Training the same GPT in {len(SYSTEMS)} ways; the first step of two of them compiles.")
    try:
        trainings = train_with_progress(console, num_steps)
    except RematError as error:
        sys.exit(f"remat refused the step: {error}")
    console.print(table(trainings, SHAPE).to_table())
    succeeded, sentences = conclusions(trainings)
    for sentence in sentences:
        console.print(sentence, highlight=False)
    picture = OUTPUT / "memory.png"
    draw(trainings, picture)
    console.print(f"The memory over the step is drawn in {picture.relative_to(ROOT)}.", highlight=False)
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
