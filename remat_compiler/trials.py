"""Trials: compile, read back what Inductor allocates, and plan again where that is more than the budget.

The memory model predicts Inductor, and a prediction can be off by a buffer. The code that Inductor has written cannot
be (readback.py). A plan that turns out too large is planned again, under a limit that is lower by as much as the
prediction was; and no budget is refused before the smallest plan was compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from torch import fx

from remat_passes.device import DeviceSpec
from remat_passes.errors import BudgetInfeasibleError
from remat_passes.plan import RematPlan
from remat_passes.search import refusal
from remat_passes.units import format_bytes

from . import torch_private
from .options import Options
from .partitioner import RematPartitioner

# How often a graph is planned for its budget. The error of the prediction is nearly the same for all plans of a graph,
# so the second trial mostly fits; kernels that stay the same come out of Inductor's cache.
MAX_TRIALS = 3


def compile_within_budget(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    inductor_options: Mapping[str, object],
    options: Options,
    spec: DeviceSpec,
) -> tuple[Callable[..., Any], RematPartitioner]:
    """Compile with Inductor; the compiled module and the partitioner that cut its graphs.

    Raises:
        BudgetInfeasibleError: the smallest plan's code, too, allocates more than the budget.
    """

    def trial(limit_bytes: int | None) -> tuple[Callable[..., Any], RematPartitioner]:
        partitioner = RematPartitioner(options, spec, limit_bytes, correction)
        own = module if options.memory_budget is None else torch_private.copy_of(module)
        seen = partitioner.compiled
        return torch_private.compile_with_inductor(own, inputs, inductor_options, partitioner, seen), partitioner

    limit_bytes: int | None = None
    correction: str | None = None
    try:
        for _ in range(MAX_TRIALS):
            compiled, partitioner = trial(limit_bytes)
            plan = _too_large(partitioner)
            if plan is None:
                return compiled, partitioner
            correction = correction or _correction(plan)
            ratio = Fraction(plan.budget_bytes or 0, plan.projected_peak_bytes)
            limit_bytes = min(math.floor(plan.predicted_peak_bytes * ratio), plan.predicted_peak_bytes - 1)
        trial(0)
    except BudgetInfeasibleError as refused:
        smallest_bytes = refused.smallest_bytes
    compiled, partitioner = trial(smallest_bytes)
    plan = _too_large(partitioner)
    if plan is None:
        return compiled, partitioner
    parts = [(value.name, value.bytes) for value in plan.peak_values]
    raise refusal(plan.budget_bytes or 0, plan.projected_peak_bytes, parts, plan.gradient_bytes)


def _correction(first: RematPlan) -> str:
    """What the user reads of a plan that is not the first one."""
    predicted, read = format_bytes(first.predicted_peak_bytes), format_bytes(first.projected_peak_bytes)
    return f"planned again: the code of the first plan, predicted to need {predicted}, allocates {read}"


def _too_large(partitioner: RematPartitioner) -> RematPlan | None:
    """The plan whose code allocates more than the budget, if that is so. With several joint graphs in one module
    nothing was read back, and the predictions stand."""
    if len(partitioner.made) != 1:
        return None
    plan = partitioner.made[0].final_plan
    return plan if plan.budget_bytes is not None and plan.projected_peak_bytes > plan.budget_bytes else None
