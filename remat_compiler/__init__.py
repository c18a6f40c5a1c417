"""remat: the same training step, inside the memory you have.

``torch.compile(model, backend="remat", options={"memory_budget": "8GiB"})`` needs no import of this package. What is
here is for looking at what was decided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat_passes.errors import (
    BudgetInfeasibleError,
    CannotPartitionError,
    CannotSplitError,
    ConfigError,
    PlanFileError,
    RematError,
)

if TYPE_CHECKING:
    import os

    from remat_passes.plan import RematPlan

__version__ = "0.1.0"

__all__ = [
    "BudgetInfeasibleError",
    "CannotPartitionError",
    "CannotSplitError",
    "ConfigError",
    "PlanFileError",
    "RematError",
    "export_cost_table",
    "fallbacks",
    "planning_seconds",
    "plans",
]


def plans() -> tuple[RematPlan, ...]:
    """The plans made in this process, one a captured training graph, in the order of their compilation."""
    from .plan_log import recorded

    return tuple(entry.plan for entry in recorded())


def fallbacks() -> tuple[str, ...]:
    """Why graphs of this process were compiled as plain Inductor would (``fallback="inductor"``), one sentence each."""
    from .plan_log import fallbacks as recorded_fallbacks

    return recorded_fallbacks()


def export_cost_table(path: str | os.PathLike[str], device_type: str | None = None) -> int:
    """Write the kernel times measured on the device at hand to ``path``, a ``.json`` file; how many it holds.

    Another process or machine reads them with ``options={"cost_model": path}`` (docs/cost-model.md).
    """
    from .measured_costs import export_cost_table as export

    return export(path, device_type)


def planning_seconds() -> tuple[float, ...]:
    """How long each plan of ``plans()`` took to make, in seconds."""
    from .plan_log import recorded

    return tuple(entry.planning_seconds for entry in recorded())
