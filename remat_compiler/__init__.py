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
    RematWarning,
    VerificationError,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from remat_passes.plan import RematPlan

__version__ = "0.1.0"

__all__ = [
    "BudgetInfeasibleError",
    "CannotPartitionError",
    "CannotSplitError",
    "ConfigError",
    "PlanFileError",
    "RematError",
    "RematWarning",
    "VerificationError",
    "export_cost_table",
    "fallbacks",
    "mark_batch",
    "measured_peaks",
    "optimizer_state_bytes",
    "planning_seconds",
    "plans",
    "register_batch_rule",
    "verifications",
]


def plans() -> tuple[RematPlan, ...]:
    """The plans made in this process, one a captured training graph, in the order of their compilation."""
    from .plan_log import recorded

    return tuple(entry.plan for entry in recorded())


def measured_peaks() -> tuple[int | None, ...]:
    """The peak of the first real step of each plan of ``plans()`` in bytes, everything counted that its budget counts.

    ``None`` where no step has been measured (docs/memory-model.md, "After the first step").
    """
    from .plan_log import measured_peaks as recorded_peaks

    return recorded_peaks()


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


def mark_batch(tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Say that ``tensor`` carries the batch at ``axis``, before the step is compiled with it; gives it back.

    Where an input is marked, the others follow from how ops meet it; where none is, all are found by themselves.

    Raises:
        ConfigError: the tensor has no such axis.
    """
    from .step_inputs import mark_batch as mark

    return mark(tensor, axis)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes that the state of ``optimizer`` takes once it has made a step, on the devices of its parameters.

    It is worked out on a copy that has no memory: the optimizer does not step, and what it already has is counted as
    it is. Every parameter that requires a gradient is taken to get one. Made for option ``reserve``:

        options = {"memory_budget": "auto", "reserve": remat_compiler.optimizer_state_bytes(optimizer)}

    Raises:
        ConfigError: it is no optimizer, or its state cannot be worked out without running it (LBFGS).
    """
    from .optimizer_state import optimizer_state_bytes as state_bytes

    return state_bytes(optimizer)


def register_batch_rule(op: object, rule: Callable[..., Iterable[tuple[Sequence[object], Sequence[object]]]]) -> None:
    """Say how a custom op carries the batch, so that steps that use it can be split into micro-batches.

    Args:
        op: ``torch.ops.mylib.op``, an overload of it, or what ``torch.library.custom_op`` gave.
        rule: called as the op is, with tensors that have shapes and no contents. It gives a pair for each loop along
            which the op can be computed in parts: the axis of each tensor operand along it (``None``: the operand is
            needed whole), and that of each result (``"partial"``: the parts are to be added up).

    Example: a matrix product gives ``((0, None), (0,))`` for its rows, ``((None, 1), (1,))`` for its columns and
    ``((1, 0), ("partial",))`` for the sum. A later rule for the same op takes the place of the earlier one.

    Raises:
        ConfigError: ``op`` is no op, or one of PyTorch's that remat has its own rule for, or ``rule`` cannot be called.
    """
    from remat_passes.batch_rules import register

    register(op, rule)


def verifications() -> tuple[str, ...]:
    """What came of each first step that ran both ways (``verify=True``), one sentence each."""
    from .plan_log import verifications as recorded_verifications

    return recorded_verifications()
