"""How true the cost model is about slices: the projected step in N slices, as a multiple of the step in one, beside the
measured one; and under a budget, how near the chosen number is to the fastest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click
import torch

from benchmarks.harness import (
    CLOCKS,
    Clock,
    System,
    Trial,
    clear_gradients,
    interleaved_s,
    median_ratio,
    start,
    warm_inductor_up,
)
from benchmarks.peak.models import MODELS, Model
from benchmarks.peak.systems import MANY_VERSIONS
from benchmarks.report import Report, console_for_output, machine_notes, publish
from remat_passes.errors import RematError

DEFAULT_MODELS = ("gpt-sdpa", "llama", "mlp-64", "vit")
DEFAULT_SLICES = (1, 2, 4, 8)
NUM_ROUNDS = 20
WARM_UP_ROUNDS = 2
AUTO = "auto"
COLUMNS = ("model", "budget", "asked for", "slices", "projected ms", "fastest ms", "projected", "measured", "error")


@dataclass(frozen=True, slots=True)
class Step:
    """One compiled step: what was asked for, what was projected and what was measured."""

    asked: int | str
    num_slices: int
    projected_us: float
    fastest_us: float
    ratio: float  # to the first step of the same model and budget, the median within a round


def compiled(model: Model, slices: Sequence[int], budget: str | None) -> list[tuple[int | str, Trial]]:
    """The step in each of these numbers of slices, and under a budget in the number that remat chooses; those that
    cannot be had are left out."""
    module, batch = model.make()
    options = {} if budget is None else {"memory_budget": budget}
    found: list[tuple[int | str, Trial]] = []
    for asked in (*slices, *([] if budget is None else [AUTO])):
        try:
            system = System(f"{asked} slices", "remat", {**options, "num_microbatches": asked})
            found.append((asked, start(system, module, batch)))
        except RematError:
            continue
    return found


def measured(trials: Sequence[tuple[int | str, Trial]], num_rounds: int, clock: Clock) -> list[Step]:
    """All of them in turn, round after round."""
    steps = [trial.step for _, trial in trials]
    interleaved_s(steps, WARM_UP_ROUNDS, clock)
    times_s = interleaved_s(steps, num_rounds, clock)
    found = []
    for (asked, trial), own_s in zip(trials, times_s, strict=True):
        clear_gradients(trial.model)
        if trial.plan is not None:
            ratio = median_ratio(own_s, times_s[0])
            found.append(Step(asked, trial.plan.num_microbatches, trial.plan.step_us, min(own_s) * 1e6, ratio))
    return found


def rows(model: Model, budget: str | None, steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """Ratios are to the first step."""
    found = []
    for step in steps:
        projected = step.projected_us / steps[0].projected_us
        times = (f"{step.projected_us / 1e3:.2f}", f"{step.fastest_us / 1e3:.2f}")
        ratios = (f"{projected:.3f}", f"{step.ratio:.3f}", f"{100 * (projected / step.ratio - 1):+.1f} %")
        found.append((model.key, budget or "none", str(step.asked), str(step.num_slices), *times, *ratios))
    return found


def rank(model: Model, budget: str, steps: Sequence[Step]) -> str:
    """Where the chosen number stands among the fixed ones, by the time of the same number as a fixed one."""
    fixed = sorted((step for step in steps if step.asked != AUTO), key=lambda step: step.ratio)
    chosen = next((step for step in steps if step.asked == AUTO), None)
    if chosen is None or not fixed:
        return f"{model.key}, {budget}: no plan is within the budget."
    same = next((step for step in fixed if step.num_slices == chosen.num_slices), chosen)
    place = 1 + sum(step.ratio < same.ratio for step in fixed)
    return (
        f"{model.key}, {budget}: {chosen.num_slices} slices chosen, place {place} of {len(fixed)};"
        f" {fixed[0].num_slices} is the fastest, and the chosen step takes {same.ratio / fixed[0].ratio:.3f} of it."
    )


@click.command(help=__doc__)
@click.option("--model", "keys", multiple=True, type=click.Choice(list(MODELS)), help="Only this model; repeatable.")
@click.option("--slices", multiple=True, type=int, help="Only this number of slices; repeatable.")
@click.option("--budget", "budgets", multiple=True, help="Under this budget, such as 60%; repeatable.")
@click.option("--rounds", "num_rounds", default=NUM_ROUNDS, show_default=True, help="Timed steps of each.")
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="cpu", show_default=True, help="What is counted.")
@click.option("--record", is_flag=True, help="Keep the table under benchmarks/results/ too.")
def main(
    keys: tuple[str, ...],
    slices: tuple[int, ...],
    budgets: tuple[str, ...],
    num_rounds: int,
    clock: str,
    record: bool,
) -> None:
    console = console_for_output()
    found: list[tuple[str, ...]] = []
    notes: list[str] = []
    warm_inductor_up()
    for model in (MODELS[key] for key in keys or DEFAULT_MODELS):
        for budget in budgets or (None,):
            torch.compiler.reset()
            console.print(f"measuring {model.key}, budget {budget or 'none'}", highlight=False)
            with torch._dynamo.config.patch(MANY_VERSIONS):
                trials = compiled(model, slices or DEFAULT_SLICES, budget)
                steps = measured(trials, num_rounds, CLOCKS[clock]) if trials else []
            found += rows(model, budget, steps)
            notes += [rank(model, budget, steps)] if budget is not None else []
    how = "Ratios are to the first row of the same model and budget; measured is the median within interleaved rounds."
    title = f"Steps in slices, projected and measured ({clock} clock)"
    publish(Report(title, COLUMNS, tuple(found), (*notes, how, *machine_notes())), "slices", console, record=record)


if __name__ == "__main__":
    main()
