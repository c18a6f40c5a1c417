"""The first promise: the same step in the bytes that were asked for.

A 4-layer GPT on CPU with eager, ``torch.compile``, remat without a budget, and remat under budgets from 90 % down to
50 % of what ``torch.compile`` was measured to need. Each row holds what was asked for, projected and measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import click
import torch
from rich.console import Console

from benchmarks.harness import (
    Batch,
    StepTimes,
    System,
    Trial,
    gradient_error,
    interleaved_times,
    measured_total_bytes,
    reference_gradients,
    start,
    warm_inductor_up,
)
from benchmarks.models import GPTShape, build_gpt, random_batch
from benchmarks.report import Report, console_for_output, format_mib, machine_notes, publish
from remat_passes.errors import RematError

SHAPE = GPTShape(num_layers=4, width=256, num_heads=4, vocabulary=2048, batch=16, tokens=256)
PERCENTAGES = (90, 80, 70, 60, 50)
SEED = 0
EAGER = System("eager")
COMPILE = System("torch.compile", "inductor")
FASTEST = System("remat", "remat")

COLUMNS = (
    "system",
    "budget MiB",
    "projected MiB",
    "measured MiB",
    "projected - measured",
    "verdict",
    "step / torch.compile",
    "fastest step ms",
    "compile s",
    "planning s",
    "gradient error",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one system: a trial with its measurements, or why it was refused."""

    system: System
    budget_bytes: int | None
    trial: Trial | None
    measured_bytes: int | None = None
    gradient_error: float | None = None
    refusal: str = ""


def try_system(
    system: System, model: torch.nn.Module, batch: Batch, gradients: dict[str, torch.Tensor], budget_bytes: int | None
) -> Outcome:
    """Compile, run and measure one system, all but its step time."""
    try:
        trial = start(system, model, batch)
    except RematError as error:
        return Outcome(system, budget_bytes, None, refusal=f"{system.name}: {error}")
    return Outcome(system, budget_bytes, trial, measured_total_bytes(trial), gradient_error(trial, gradients))


def try_all(shape: GPTShape, console: Console) -> list[Outcome]:
    """Every system on the same weights and batch; budgets are shares of what torch.compile was measured to need."""
    model, batch = build_gpt(shape, SEED), random_batch(shape, SEED)
    gradients = reference_gradients(model, batch)
    warm_inductor_up()
    outcomes = []
    for system in (EAGER, COMPILE, FASTEST):
        console.print(f"compiling and measuring {system.name}", highlight=False)
        outcomes.append(try_system(system, model, batch, gradients, None))
    full_bytes = outcomes[1].measured_bytes
    assert full_bytes is not None
    for percentage in PERCENTAGES:
        budget_bytes = full_bytes * percentage // 100
        system = System(f"remat, {percentage} %", "remat", {"memory_budget": budget_bytes})
        console.print(f"compiling and measuring {system.name}", highlight=False)
        outcomes.append(try_system(system, model, batch, gradients, budget_bytes))
    return outcomes


def verdict(outcome: Outcome) -> str:
    """Whether the promise was kept."""
    if outcome.measured_bytes is None:
        return "refused"
    if outcome.budget_bytes is None:
        return "-"
    return "fits" if outcome.measured_bytes <= outcome.budget_bytes else "OVER"


def row(outcome: Outcome, times: StepTimes | None) -> tuple[str, ...]:
    """One line of the table."""
    trial = outcome.trial
    plan = trial.plan if trial else None
    projected_bytes = plan.projected_peak_bytes if plan else None
    return (
        outcome.system.name,
        format_mib(outcome.budget_bytes),
        format_mib(projected_bytes),
        format_mib(outcome.measured_bytes),
        _difference(projected_bytes, outcome.measured_bytes),
        verdict(outcome),
        f"{times.ratio:.3f}" if times else "-",
        f"{times.min_ms:.0f}" if times else "-",
        f"{trial.compile_s:.1f}" if trial and trial.system.backend else "-",
        f"{trial.planning_s:.2f}" if trial and trial.planning_s is not None else "-",
        f"{outcome.gradient_error:.1e}" if outcome.gradient_error is not None else "-",
    )


def _difference(projected_bytes: int | None, measured_bytes: int | None) -> str:
    if projected_bytes is None or measured_bytes is None:
        return "-"
    return f"{(projected_bytes / measured_bytes - 1) * 100:+.1f} %"


def report(outcomes: list[Outcome], num_rounds: int) -> Report:
    """The table, after the interleaved steps of every system that was not refused."""
    trials = [outcome.trial for outcome in outcomes if outcome.trial]
    reference = next(trial for trial in trials if trial.system is COMPILE)
    found = interleaved_times(trials, reference, num_rounds)
    times = {trial.system.name: times for trial, times in zip(trials, found, strict=True)}
    refusals = tuple(outcome.refusal for outcome in outcomes if outcome.refusal)
    return Report(
        f"GPT on CPU: {SHAPE.num_layers} layers, width {SHAPE.width}, vocabulary {SHAPE.vocabulary}, "
        f"batch {SHAPE.batch} x {SHAPE.tokens}, float32",
        COLUMNS,
        tuple(row(outcome, times.get(outcome.system.name)) for outcome in outcomes),
        (
            *machine_notes(),
            "Totals: parameters, buffers and inputs, and the measured peak of one forward and backward above them.",
            f"Step: median of {num_rounds} ratios within interleaved rounds.",
            "Gradient error: the largest relative error of one parameter's gradient against eager float64.",
            *refusals,
        ),
    )


@click.command()
@click.option("--rounds", "num_rounds", default=15, show_default=True, help="Steps of each system.")
@click.option("--record", is_flag=True, help="Keep the result under benchmarks/results/.")
def main(num_rounds: int, record: bool) -> None:
    """Measure remat under falling budgets beside eager and torch.compile."""
    console = console_for_output()
    outcomes = try_all(SHAPE, console)
    publish(report(outcomes, num_rounds), "first", console, record=record)


if __name__ == "__main__":
    main()
