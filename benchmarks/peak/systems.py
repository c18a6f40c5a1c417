"""The systems at one model: eager, torch.compile, its rivals' ways to save memory, and remat under falling budgets.

Run as a program it measures one model and writes the record after every point, so that a crash loses one point.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import remat_compiler
from benchmarks.harness import (
    Batch,
    Clock,
    System,
    Trial,
    by_slices,
    clear_gradients,
    compiled,
    empty_cache,
    gradient_error,
    interleaved_times,
    measured_total_bytes,
    pieces,
    reference_gradients,
    seconds,
    warmed_up,
)
from benchmarks.peak.models import MODELS, Model, checkpoint_blocks, checkpointed_attention
from benchmarks.peak.table import COMPILE, EAGER, REMAT, Point, Record, read_off_bytes, write_records
from benchmarks.report import format_mib, machine_notes
from remat_compiler.measure import tensor_bytes
from remat_passes.errors import BudgetInfeasibleError, RematError

NUM_BUDGETS = 12
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)  # twelve, with the two of the public reports
NUM_ROUNDS = 7  # of interleaved steps; the median of fewer ratios moves by more than the 3 % that are to be seen

# Every system's steps go through versions of the same code, and Dynamo gives up at eight versions of one.
MANY_VERSIONS = {"recompile_limit": 256, "accumulated_recompile_limit": 1024}

# What counts as a product: the kernels whose number tells how much was recomputed. Those of one call do not nest.
PRODUCTS = frozenset(f"aten::{op}" for op in "mm addmm bmm baddbmm convolution convolution_backward".split())
_BACKWARD = "benchmarks.peak.backward"  # the range that marks backward among the profiler's events


@dataclass(frozen=True, slots=True)
class Contender:
    """One system at one setting: what it does to the model, and what is switched on around each of its steps."""

    family: str
    system: System
    prepare: Callable[[nn.Module], None] = lambda model: None
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    budget_bytes: int | None = None
    num_slices: int = 1  # of a loop in Python


def own_knob(ratio: float) -> Contender:
    """PyTorch's own knob at one ratio of saved bytes."""
    system = System(f"activation_memory_budget {ratio}", "inductor")
    return Contender(
        "activation_memory_budget",
        system,
        around=lambda: torch._functorch.config.patch(activation_memory_budget=ratio),
    )


def plain() -> tuple[Contender, ...]:
    """What everyone has: eager, and torch.compile as it is."""
    return Contender(EAGER, System(EAGER)), Contender(COMPILE, System(COMPILE, "inductor"))


def rivals() -> tuple[Contender, ...]:
    """Other ways to less memory under torch.compile."""
    blocks = System("checkpoint per block", "inductor")
    attention = System("checkpoint of attention", "inductor")
    return (
        *(own_knob(ratio) for ratio in RATIOS),
        Contender("checkpoint per block", blocks, prepare=checkpoint_blocks),
        Contender("checkpoint of attention", attention, around=checkpointed_attention),
    )


def under_budgets(budgets_bytes: Sequence[int], full_bytes: int) -> tuple[Contender, ...]:
    """remat under each budget, named by its share of what torch.compile was measured to need."""
    systems = [
        System(f"remat, {100 * budget_bytes / full_bytes:.2f} %", "remat", {"memory_budget": budget_bytes})
        for budget_bytes in budgets_bytes
    ]
    return tuple(Contender(REMAT, s, budget_bytes=b) for s, b in zip(systems, budgets_bytes, strict=True))


def falling_budgets(full_bytes: int, smallest_bytes: int, num_budgets: int) -> list[int]:
    """Budgets at equal distances, from ``full_bytes`` down to ``smallest_bytes``, both among them."""
    if num_budgets == 1 or smallest_bytes >= full_bytes:
        return [full_bytes]
    span_bytes = full_bytes - smallest_bytes
    return [full_bytes - span_bytes * i // (num_budgets - 1) for i in range(num_budgets)]


def with_read_off(budgets_bytes: Sequence[int], more_bytes: Iterable[int]) -> list[int]:
    """``budgets_bytes``, falling, with those of ``more_bytes`` that lie between its ends; none twice."""
    inside = [more for more in more_bytes if budgets_bytes[-1] < more < budgets_bytes[0]]
    return sorted({*budgets_bytes, *inside}, reverse=True)


def start(
    contender: Contender, model: nn.Module, batch: Batch, *, clock: Clock = seconds, with_cache: bool = True
) -> Trial:
    """Compile and warm up ``model`` itself; with Inductor's cache, so compile times need ``with_cache=False``.

    Raises:
        RematError: remat refused the step.
        ValueError: a loop's slices are not of one size.
    """
    contender.prepare(model)
    forward, parts = compiled(contender.system), pieces(batch, contender.num_slices)

    def step() -> torch.Tensor:
        clear_gradients(model)
        with contender.around():
            return by_slices(forward, model, parts, _BACKWARD)

    cache = nullcontext if with_cache else empty_cache
    return warmed_up(contender.system, model, batch, step, clock=clock, cache=cache)


def num_products_in_backward(trial: Trial) -> int:
    """How many matrix products and convolutions one backward runs, recomputed ones among them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trial.step()
    events = profiler.events() or []
    spans = [event.time_range for event in events if event.name == _BACKWARD]
    starts = [event.time_range.start for event in events if event.name in PRODUCTS]
    return sum(any(span.start <= start <= span.end for span in spans) for start in starts)


def measure(contender: Contender, trial: Trial, num_graphs: int, truth: Mapping[str, torch.Tensor] | None) -> Point:
    """Everything about one point but its step time."""
    plan = trial.plan
    is_ours = contender.family == REMAT
    return Point(
        contender.family,
        contender.system.name,
        contender.budget_bytes,
        measured_bytes=measured_total_bytes(trial),
        projected_bytes=plan.projected_peak_bytes if plan else None,
        predicted_bytes=plan.predicted_peak_bytes if plan else None,
        step_us=plan.step_us if plan else None,
        lower_bound_us=plan.lower_bound_us if plan else None,
        num_products=num_products_in_backward(trial),
        gradient_error=gradient_error(trial, truth) if truth is not None else None,
        planning_s=trial.planning_s,
        num_graphs=num_graphs if is_ours else None,
    )


def smallest_feasible_bytes(model: Model) -> int:
    """The smallest peak that remat says it can reach: asked for by a budget that nothing meets.

    Raises:
        AssertionError: such a budget was not refused.
    """
    module, batch = model.make()
    budget_bytes = tensor_bytes(module, batch) + 1
    contender = Contender(REMAT, System("remat, too little", "remat", {"memory_budget": budget_bytes}))
    try:
        start(contender, module, batch)
    except BudgetInfeasibleError as error:
        return error.smallest_bytes
    raise AssertionError(f"a budget of {budget_bytes} bytes, one above parameters and inputs, was not refused")


@dataclass(slots=True)
class Bench:
    """The measurement of one model: its record grows by a point at a time and is written after each."""

    model: Model
    path: Path
    keep_trials: bool  # for step times, all systems must be alive at the same time
    record: Record
    trials: list[Trial]

    def add(self, contender: Contender, truth: Mapping[str, torch.Tensor] | None) -> Point:
        """Measure one more point; a failure is a point too."""
        if not self.keep_trials:
            torch.compiler.reset()
            gc.collect()
        module, batch = self.model.make()
        num_plans = len(remat_compiler.plans())
        try:
            trial = start(contender, module, batch)
            point = measure(contender, trial, len(remat_compiler.plans()) - num_plans, truth)
            if self.keep_trials:
                self.trials.append(trial)
        except RematError as error:
            point = failed(contender, f"refused: {error}")
        except Exception as error:  # one system's crash is its own row, not the end of the table
            traceback.print_exc()
            point = failed(contender, f"failed: {first_line(error)}")
        click.echo(line(point))
        self.update(points=(*self.record.points, point))
        return point

    def update(self, **changes: object) -> None:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        write_records(self.path, [self.record])


def failed(contender: Contender, failure: str) -> Point:
    """The point of a system that was refused or that failed."""
    return Point(contender.family, contender.system.name, contender.budget_bytes, failure=failure)


def first_line(error: Exception) -> str:
    """What kind of error it is, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]


def line(point: Point) -> str:
    """One point for the log."""
    if point.failure:
        return f"    {point.name:32} {point.failure}"
    difference = "" if point.difference is None else f", projected {100 * point.difference:+.1f} %"
    gap = "" if point.gap is None else f", gap {100 * point.gap:.1f} %"
    budget = "" if point.budget_bytes is None else f" of {format_mib(point.budget_bytes)}"
    over = " OVER" if point.budget_bytes is not None and (point.measured_bytes or 0) > point.budget_bytes else ""
    products = f", {point.num_products} products"
    return f"    {point.name:32} {format_mib(point.measured_bytes)}{budget} MiB{over}{difference}{gap}{products}"


def timed(record: Record, trials: Sequence[Trial], num_rounds: int) -> Iterator[Point]:
    """The points of ``record`` with their step times, from interleaved rounds."""
    reference = next(trial for trial in trials if trial.system.name == COMPILE)
    found = interleaved_times(trials, reference, num_rounds)
    times = {trial.system.name: time for trial, time in zip(trials, found, strict=True)}
    for point in record.points:
        own = times.get(point.name)
        yield point if own is None else replace(point, measured_ms=own.min_ms, step_ratio=own.ratio)


def measure_model(
    model: Model,
    path: Path,
    num_budgets: int,
    listed: Sequence[Contender],
    *,
    num_rounds: int,
    asked: Sequence[int] = (),
) -> Record:
    """``listed`` rivals and remat at one model; ``num_rounds`` is 0 without step times.

    The budgets are those ``asked`` for in bytes, or ``num_budgets`` evenly spaced ones and those read off the rivals.
    """
    module, batch = model.make()
    truth = reference_gradients(module, batch) if model.is_exact else None
    own_bytes, gradient_bytes = tensor_bytes(module, batch), tensor_bytes(list(module.parameters()))
    record = Record(model.key, model.title, own_bytes, gradient_bytes, notes=machine_notes())
    bench = Bench(model, path, num_rounds > 0, record, [])
    del module

    full = None
    for contender in plain():
        full = bench.add(contender, truth)
    if full is None or full.measured_bytes is None:
        bench.update(failure="torch.compile could not be measured, so there is nothing to take shares of")
        return bench.record
    for contender in listed:
        bench.add(contender, truth)
    try:
        smallest_bytes = smallest_feasible_bytes(model)
    except Exception as error:
        traceback.print_exc()
        bench.update(failure=f"the smallest peak is not known: {first_line(error)}")
        return bench.record
    click.echo(f"    the smallest peak that can be reached is {format_mib(smallest_bytes)} MiB")
    bench.update(smallest_bytes=smallest_bytes)
    even = falling_budgets(full.measured_bytes, smallest_bytes, num_budgets)
    budgets = sorted(asked, reverse=True) or with_read_off(even, read_off_bytes(bench.record))
    for contender in under_budgets(budgets, full.measured_bytes):
        bench.add(contender, truth)
    if num_rounds:
        bench.update(points=tuple(timed(bench.record, bench.trials, num_rounds)))
    return bench.record


@click.command(help="Measure one model into a file.")
@click.argument("key", type=click.Choice(list(MODELS)))
@click.option("--into", "path", type=click.Path(path_type=Path), required=True, help="The JSON file to write.")
@click.option("--budgets", "num_budgets", default=NUM_BUDGETS)
@click.option("--budget", "asked", multiple=True, type=int)
@click.option("--rivals/--no-rivals", "with_rivals", default=True)
@click.option("--rival", "families", multiple=True)
@click.option("--rounds", "num_rounds", default=0)
def main(
    key: str,
    path: Path,
    num_budgets: int,
    asked: tuple[int, ...],
    with_rivals: bool,
    families: tuple[str, ...],
    num_rounds: int,
) -> None:
    listed = [c for c in rivals() if with_rivals and (not families or c.family in families)]
    with torch._dynamo.config.patch(MANY_VERSIONS):
        measure_model(MODELS[key], path, num_budgets, listed, num_rounds=num_rounds, asked=asked)


if __name__ == "__main__":
    main()
