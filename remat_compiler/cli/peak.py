"""What is alive at the peak: by module, which says where to look, and the largest values one by one.

Sixteen layers hold the same values sixteen times, so modules whose paths differ only in their numbers count as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from remat_passes.plan import PeakValue, RematPlan, ValuePlan
from remat_passes.units import format_bytes

from .groups import fold_paths
from .headline import count, percent
from .tables import DIM, Column, Row, clean, fitted_table, heading, paragraph

NUM_VALUES = 10
NUM_MODULES = 8
AT_THE_PEAK = {"save": "saved", "recompute": "recomputed", "free": "free"}
BEFORE = "parameters, buffers and inputs"  # the memory model's name for what was allocated before the step
OTHER = "other"


@dataclass(frozen=True, slots=True)
class PeakGroup:
    """The values of some modules that are alive at the peak."""

    label: str
    bytes: int
    num_values: int


def peak_groups(values: Sequence[PeakValue], most: int) -> tuple[PeakGroup, ...]:
    """The values by module, the largest group first; what is beyond ``most`` groups is one more, ``other``.

    What was allocated before the step is a group of its own.
    """
    label_of = {path: label for label, paths in fold_paths(value.module for value in values) for path in paths}
    held: dict[str, list[int]] = {}
    for value in values:
        label = BEFORE if value.name == BEFORE else label_of[value.module]
        held.setdefault(label, []).append(value.bytes)
    groups = [PeakGroup(label, sum(sizes), len(sizes)) for label, sizes in held.items()]
    groups.sort(key=lambda group: (-group.bytes, group.label))
    rest = groups[most:]
    if len(rest) < 2:
        return tuple(groups)
    sums = (sum(group.bytes for group in rest), sum(group.num_values for group in rest))
    return (*groups[:most], PeakGroup(OTHER, *sums))


def peak_section(plan: RematPlan, width: int) -> list[Text]:
    """Both tables, under one heading."""
    if not plan.peak_values:
        return []
    title = f"Alive at the projected peak of {format_bytes(plan.predicted_peak_bytes)}, by module"
    parts = [heading(title, width)]
    if format_bytes(plan.predicted_peak_bytes) != format_bytes(plan.projected_peak_bytes):
        parts.append(paragraph(Text(_other_peak(plan), DIM), width))
    return [*parts, Text(), _by_module(plan, width), *_largest(plan, width)]


def _other_peak(plan: RematPlan) -> str:
    return (
        f"As the memory model has it; the code that Inductor wrote allocates {format_bytes(plan.projected_peak_bytes)}."
    )


def _by_module(plan: RematPlan, width: int) -> Text:
    groups = peak_groups(plan.peak_values, NUM_MODULES)
    rows: list[Row] = [
        (
            format_bytes(group.bytes),
            percent(group.bytes, plan.predicted_peak_bytes),
            "-" if group.label == BEFORE else str(group.num_values),
            clean(group.label),
        )
        for group in groups
    ]
    columns = [
        Column("bytes", "right"),
        Column("of peak", "right"),
        Column("values", "right"),
        Column("module", flexible=True),
    ]
    return fitted_table(columns, rows, width)


def _largest(plan: RematPlan, width: int) -> list[Text]:
    known = {value.name: _what_it_is(value) for value in plan.values}
    largest = plan.peak_values[:NUM_VALUES]
    rows: list[Row] = [
        (
            format_bytes(value.bytes),
            percent(value.bytes, plan.predicted_peak_bytes),
            clean(value.name),
            known.get(value.name) or _where_it_is(value),
        )
        for value in largest
    ]
    columns = [
        Column("bytes", "right"),
        Column("of peak", "right"),
        Column("value", flexible=True),
        Column("what it is", flexible=True),
    ]
    title = f"The {len(largest)} largest of {count(len(plan.peak_values), 'value')} at the peak"
    return [heading(title, width), Text(), fitted_table(columns, rows, width)]


def _what_it_is(value: ValuePlan) -> str:
    return clean(f"{AT_THE_PEAK[value.decision]}: {value.op} in {value.module or 'the top level'}")


def _where_it_is(value: PeakValue) -> str:
    """Of a value that nothing was decided about, as a gradient: its module, if it has one."""
    return clean(f"in {value.module}") if value.module else ""
