"""Trials: compile, read back what Inductor allocates, and plan again where another plan suits the budget better.

The memory model predicts Inductor, and a prediction can be off by a buffer. The code that Inductor has written cannot
be (readback.py). A plan that turns out too large is planned again, under a limit that is lower by what it is too large.
One that turns out smaller than predicted is planned again under a limit that is higher by the difference, but only
where the first search has already seen a clearly faster plan that would then fit. No budget is refused before the
smallest plan was compiled, and where its code takes more than predicted, some that recompute less: their code may take
less. No plan is returned whose code allocates more than the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from remat_passes.candidates import RESOLUTION
from remat_passes.device import DeviceSpec
from remat_passes.errors import BudgetInfeasibleError
from remat_passes.plan import RematPlan
from remat_passes.search import refusal
from remat_passes.units import format_bytes

from . import torch_private
from .options import Options
from .partitioner import RematPartitioner
from .step_inputs import StepInputs
from .weighing import Answers, Way

# How often a graph is planned for its budget. The error of the prediction is nearly the same for all plans of a graph,
# so the second trial mostly fits; kernels that stay the same come out of Inductor's cache.
MAX_TRIALS = 3

# How much more than predicted the code of the smallest plan may take before others are compiled to see whether they
# take less. Mostly it takes what was predicted, to the byte (benchmarks/results/peak.md).
SMALLEST_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class _Trial:
    """One compiled plan. ``plan`` has the peak that was read back; it is ``None`` without a budget, and with several
    joint graphs in one module, of which nothing is read back: there the predictions stand."""

    code: Callable[..., Any]
    partitioner: RematPartitioner
    plan: RematPlan | None
    is_smallest: bool

    @property
    def way(self) -> Way:
        """How the step runs."""
        return self.partitioner.made[0].way

    @property
    def excess_bytes(self) -> int:
        """How much more than the budget the code allocates; below 0 where it fits."""
        plan = self.plan
        return 0 if plan is None or plan.budget_bytes is None else plan.projected_peak_bytes - plan.budget_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be compiled, and how."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    inductor_options: Mapping[str, object]
    options: Options
    spec: DeviceSpec
    known: StepInputs


def compile_within_budget(work: Work) -> tuple[Callable[..., Any], RematPartitioner]:
    """Compile with Inductor; the compiled module and the partitioner that cut its graphs.

    Raises:
        BudgetInfeasibleError: the smallest plan's code, too, allocates more than the budget.
    """
    correction: str | None = None
    limits: dict[Way, int] = {}  # the error of the prediction is that of a way to run the step
    answers: dict[str, Answers] = {}  # what was found out about each graph

    def compiled(limit_bytes: int | None, *, is_smallest: bool = False) -> _Trial:
        own_limits = {} if is_smallest else limits
        partitioner = RematPartitioner(
            work.options, work.spec, limit_bytes, correction, work.known, limits=own_limits, answers=answers
        )
        own = work.module if work.options.memory_budget is None else torch_private.copy_of(work.module)
        seen = partitioner.compiled
        code = torch_private.compile_with_inductor(own, work.inputs, work.inductor_options, partitioner, seen)
        return _Trial(code, partitioner, _read_plan(partitioner), is_smallest)

    def trial(limit_bytes: int | None) -> _Trial:
        """The fastest plan within the limits; the smallest one where there is none."""
        try:
            return compiled(limit_bytes)
        except BudgetInfeasibleError as refused:
            return compiled(refused.smallest_bytes, is_smallest=True)

    fitting: _Trial | None = None
    tried: list[_Trial] = []
    while len(tried) < MAX_TRIALS:
        tried.append(trial(None))
        last = tried[-1]
        if last.plan is None:
            return last.code, last.partitioner
        correction = correction or _correction(last.plan)
        if last.excess_bytes <= 0 and (fitting is None or _is_faster(last, fitting)):
            fitting = last
        elif fitting is not None or last.is_smallest:
            break
        limits[last.way] = _next_limit_bytes(last.plan, [t for t in tried if t.way == last.way])
        if limits[last.way] == 0:
            break
    if fitting is None:
        last = tried[-1] if tried[-1].is_smallest else _last_resort(trial, limits, tried)
        if last.excess_bytes > 0:
            last = _least(trial, limits, last)
        if last.excess_bytes > 0:
            raise _refusal(last)
        fitting = last
    return fitting.code, fitting.partitioner


def _last_resort(trial: Callable[[int | None], _Trial], limits: dict[Way, int], tried: Sequence[_Trial]) -> _Trial:
    """A plan that leaves twice the largest error seen; the smallest one where that is still too large."""
    budget_bytes = (tried[-1].plan.budget_bytes if tried[-1].plan else None) or 0
    limits.clear()
    last = trial(max(0, budget_bytes - 2 * max(t.excess_bytes for t in tried)))
    return last if last.is_smallest or last.excess_bytes <= 0 else trial(0)


def _least(trial: Callable[[int | None], _Trial], limits: dict[Way, int], smallest: _Trial) -> _Trial:
    """The trial whose code takes the least, of the smallest plan and of two others. Which those are does not depend on
    the budget, so what a refusal names can be had."""
    limits.clear()
    predicted_bytes, read_bytes = _predicted_bytes(smallest), _read_bytes(smallest)
    tried = [smallest]
    if read_bytes > (1 + SMALLEST_ERROR) * predicted_bytes:
        tried += [trial(limit_bytes) for limit_bytes in ((predicted_bytes + read_bytes) // 2, read_bytes)]
    return min(tried, key=_read_bytes)


def _predicted_bytes(trial: _Trial) -> int:
    return 0 if trial.plan is None else trial.plan.predicted_peak_bytes


def _read_bytes(trial: _Trial) -> int:
    return 0 if trial.plan is None else trial.plan.projected_peak_bytes


def _next_limit_bytes(plan: RematPlan, tried: Sequence[_Trial]) -> int:
    """The predicted peak to try next: the one that reads as the budget, if it is off by as much; 0 for no more."""
    budget_bytes = plan.budget_bytes or 0
    limit_bytes = plan.predicted_peak_bytes + budget_bytes - plan.projected_peak_bytes
    if plan.projected_peak_bytes > budget_bytes:
        # Each trial that was still too large goes further down: the smallest plan is much slower than one in between.
        excess_bytes = (plan.projected_peak_bytes - budget_bytes) * len(tried)
        return max(0, min(plan.predicted_peak_bytes - excess_bytes, plan.predicted_peak_bytes - 1))
    too_large = [t.plan.predicted_peak_bytes - 1 for t in tried if t.plan is not None and t.excess_bytes > 0]
    limit_bytes = min(limit_bytes, plan.inductor_peak_bytes, *too_large)  # never more than plain Inductor needs
    worth_us = (1 - RESOLUTION) * plan.step_us
    faster = (point for point in plan.own_frontier if point.step_us < worth_us)
    fits_now = any(plan.predicted_peak_bytes < point.peak_bytes <= limit_bytes for point in faster)
    return limit_bytes if fits_now else 0


def _is_faster(trial: _Trial, than: _Trial) -> bool:
    return trial.plan is not None and than.plan is not None and trial.plan.step_us < than.plan.step_us


def _read_plan(partitioner: RematPartitioner) -> RematPlan | None:
    if len(partitioner.made) != 1:
        return None
    plan = partitioner.made[0].final_plan
    return None if plan.budget_bytes is None else plan


def _correction(first: RematPlan) -> str:
    """What the user reads of a plan that is not the first one."""
    predicted, read = format_bytes(first.predicted_peak_bytes), format_bytes(first.projected_peak_bytes)
    return f"planned again: the code of the first plan, predicted to need {predicted}, allocates {read}"


def _refusal(smallest: _Trial) -> BudgetInfeasibleError:
    """The error for a budget that is below what the code of the smallest plan allocates, with what that is."""
    (made,) = smallest.partitioner.made
    plan = made.final_plan
    parts = made.reader.peak_values(plan.baseline_bytes) or [(value.name, value.bytes) for value in plan.peak_values]
    refused = refusal(plan.budget_bytes or 0, plan.projected_peak_bytes, parts, plan.gradient_bytes)
    why_not = f" {smallest.partitioner.why_not}" if smallest.partitioner.why_not else ""
    return BudgetInfeasibleError(f"{refused}{why_not}{_ONE_GRAPH}", refused.budget_bytes, refused.smallest_bytes)


_ONE_GRAPH = (
    " Where torch.compile breaks a step into several graphs, each is held against the whole budget by itself, and this"
    " is about one of them: TORCH_LOGS=graph_breaks shows where, and fullgraph=True refuses to break it."
)
