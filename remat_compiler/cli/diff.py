"""``remat diff``: two plans, or two folders of them, side by side."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType
from rich.text import Text

from remat_passes.plan import ValuePlan
from remat_passes.units import format_bytes, format_us

from .comparison import Change, Pairing, PlanDiff, compare, pair_up
from .groups import Group, KeyOf, decision_key, group_record, group_values
from .headline import count, time_text
from .plan_files import WrongUse, read_plans
from .tables import (
    BOLD,
    DIM,
    Block,
    Column,
    Row,
    clean,
    draw_blocks,
    fitted_table,
    heading,
    page_width,
    paragraph,
    print_parts,
    wrapped,
    write,
)
from .value_table import COLUMNS, Line, group_title, legend, lines_of, source_root, value_cells, value_row

Kind = Literal["bytes", "us", "count", "text"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the comparison: a field of the plan, how users call it and how it is written."""

    label: str
    field: str
    kind: Kind


FIGURES = (
    Figure("budget", "budget_bytes", "bytes"),
    Figure("micro-batches", "num_microbatches", "count"),
    Figure("projected peak", "projected_peak_bytes", "bytes"),
    Figure("plain Inductor's peak", "inductor_peak_bytes", "bytes"),
    Figure("step time", "step_us", "us"),
    Figure("plain Inductor's step", "inductor_step_us", "us"),
    Figure("lower bound", "lower_bound_us", "us"),
    Figure("saved", "saved_bytes", "bytes"),
    Figure("recompute", "recompute_us", "us"),
    Figure("before the step", "baseline_bytes", "bytes"),
    Figure("gradients", "gradient_bytes", "bytes"),
    Figure("device", "device", "text"),
    Figure("cost model", "cost_model", "text"),
    Figure("lowering", "lowering", "text"),
    Figure("torch", "torch_version", "text"),
)
LISTS = ("symbols", "frontier", "peak_values", "notes")  # only said to differ

CHANGE_COLUMNS = [
    Column("A -> B"),
    Column("bytes", "right"),
    Column("recompute", "right"),
    Column("value", flexible=True),
    Column("why in B, and where", flexible=True),
]


def diff_plans(path_a: Path, path_b: Path, form: str) -> None:
    """Show on stdout how the plans at ``path_b`` differ from those at ``path_a``.

    Raises:
        WrongUse: there is nothing at a path, or one is a file and the other a folder.
        PlanFileError: there is no plan at a path, or a damaged one.
    """
    plans_a, plans_b = read_plans(path_a), read_plans(path_b)
    if path_a.is_dir() != path_b.is_dir():
        raise WrongUse("One of the two is a file and the other a folder: give two plan files or two folders.")
    pairing = pair_up(plans_a, plans_b)
    if path_a.is_file():
        pairing = Pairing(((plans_a[0], plans_b[0], "given"),), (), ())
    diffs = [compare(a, b, match) for a, b, match in pairing.pairs]
    if form == "json":
        write(json.dumps(diff_record(diffs, pairing), sort_keys=True, indent=1) + "\n", sys.stdout)
    else:
        title = f"A is {path_a}, B is {path_b}"
        print_parts(report(title, diffs, pairing, page_width(sys.stdout)), sys.stdout)


def report(title: str, diffs: Sequence[PlanDiff], pairing: Pairing, width: int) -> list[RenderableType]:
    """The comparison for people."""
    parts: list[RenderableType] = [wrapped(Text(clean(title)), width)]
    if all(entry.same for entry in diffs) and not pairing.only_in_a and not pairing.only_in_b:
        return [*parts, Text("the plans are the same")]
    for entry in diffs:
        parts += _pair_section(entry, width)
    for name, plans in (("A", pairing.only_in_a), ("B", pairing.only_in_b)):
        graphs = ", ".join(clean(plan.graph_id) for plan in plans)
        parts += [heading(f"Only in {name}: {graphs}", width)] if plans else []
    return parts


def _pair_section(entry: PlanDiff, width: int) -> list[RenderableType]:
    ids = dict.fromkeys((entry.a.graph_id, entry.b.graph_id))
    by_order = "  (graphs changed, compared by their order)" if entry.match == "order" else ""
    parts: list[RenderableType] = [heading(clean(" -> ".join(ids)) + by_order, width)]
    if entry.same:
        return [*parts, paragraph("the plans are the same", width, indent=2)]
    parts += [Text(), _figure_table(entry, width), *_change_section(entry, width)]
    parts += _only_section("A", entry.only_in_a, width) + _only_section("B", entry.only_in_b, width)
    return parts + _rest(entry, width)


def _figure_table(entry: PlanDiff, width: int) -> RenderableType:
    shown = [figure for figure in FIGURES if figure.kind != "text" or _moved(entry, figure)]
    columns = [
        Column(""),
        Column("A", "right", flexible=True),
        Column("B", "right", flexible=True),
        Column("difference", "right"),
    ]
    return fitted_table(columns, [_figure_row(entry, figure) for figure in shown], width)


def _pair(entry: PlanDiff, figure: Figure) -> tuple[Any, Any]:
    return getattr(entry.a, figure.field), getattr(entry.b, figure.field)


def _moved(entry: PlanDiff, figure: Figure) -> bool:
    a, b = _pair(entry, figure)
    return bool(a != b)


def _figure_row(entry: PlanDiff, figure: Figure) -> Row:
    a, b = _pair(entry, figure)
    changed = difference_text(a, b, figure.kind)
    return (figure.label, _written(a, figure.kind), _written(b, figure.kind), Text(changed, BOLD if a != b else DIM))


def _written(figure: Any, kind: Kind) -> str:
    if figure is None:
        return "none"
    if kind == "bytes":
        return format_bytes(figure)
    return time_text(figure) if kind == "us" else clean(str(figure))


def difference_text(a: Any, b: Any, kind: Kind) -> str:
    """``b`` minus ``a`` with its sign, and as a part of ``a``."""
    if a == b:
        return "same"
    if kind == "text" or a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return "differs"
    sign, size = ("+" if b > a else "-"), abs(b - a)
    if kind == "count":
        return f"{sign}{size}"
    written = format_bytes(size) if kind == "bytes" else format_us(size)
    return f"{sign}{written} ({sign}{100 * size / a:.0f}%)" if a > 0 else f"{sign}{written}"


def _change_section(entry: PlanDiff, width: int) -> list[RenderableType]:
    if not entry.changes:
        same = "Every value that both have is decided in the same way."
        return [Text(), paragraph(same, width)]
    groups, before = _change_groups(entry.changes)
    root = source_root([change.after for change in entry.changes])
    blocks = [
        Block(
            group_title(group, _moves(before, group.values)),
            [_change_row(before, line, root) for line in lines_of(group.folded, change_key(before))],
        )
        for group in groups
    ]
    moves = _moves(before, [change.after for change in entry.changes])
    title = f"{count(len(entry.changes), 'value')} decided differently: {moves}"
    return [heading(title, width), *legend(groups, root, width), Text(), *draw_blocks(CHANGE_COLUMNS, blocks, width)]


def change_key(before: dict[str, ValuePlan]) -> KeyOf:
    """What must agree for two changed values to be shown as one; ``before`` has them as they were in A, by name."""
    return lambda value: (*decision_key(value), before[value.name].decision)


def _change_groups(changes: Sequence[Change]) -> tuple[tuple[Group, ...], dict[str, ValuePlan]]:
    """The changed values as ``b`` has them, folded when they changed in the same way, and as ``a`` had them by name."""
    before = {change.before.name: change.before for change in changes}
    return group_values([change.after for change in changes], change_key(before)), before


def _moves(before: dict[str, ValuePlan], after: Sequence[ValuePlan]) -> str:
    """``save -> recompute 64.0 MiB``, the largest move first."""
    moved: Counter[str] = Counter()
    for value in after:
        moved[f"{before[value.name].decision} -> {value.decision}"] += value.bytes
    return ", ".join(f"{move} {format_bytes(num_bytes)}" for move, num_bytes in moved.most_common())


def _change_row(before: dict[str, ValuePlan], line: Line, root: str) -> Row:
    return (f"{before[line[0].name].decision} -> {line[0].decision}", *value_cells(line, root))


def _only_section(name: str, values: Sequence[ValuePlan], width: int) -> list[RenderableType]:
    if not values:
        return []
    groups, root = group_values(values), source_root(values)
    blocks = [
        Block(
            group_title(group, format_bytes(sum(value.bytes for value in group.values))),
            [value_row(line, root) for line in lines_of(group.folded)],
        )
        for group in groups
    ]
    title = f"{count(len(values), 'value')} only in {name}"
    return [heading(title, width), *legend(groups, root, width), Text(), *draw_blocks(COLUMNS, blocks, width)]


def _rest(entry: PlanDiff, width: int) -> list[RenderableType]:
    """What differs beyond figures and decisions, so that nothing is passed over in silence."""
    found = [f"{name} of {count(num, 'value')}" for name, num in entry.other_fields] + _lists_that_differ(entry)
    return [Text(), paragraph(f"Also different: {', '.join(found)}.", width)] if found else []


def _lists_that_differ(entry: PlanDiff) -> list[str]:
    return [name for name in LISTS if getattr(entry.a, name) != getattr(entry.b, name)]


def diff_record(diffs: Sequence[PlanDiff], pairing: Pairing) -> dict[str, Any]:
    """The comparison for JSON."""
    alone = {"only_in_a": pairing.only_in_a, "only_in_b": pairing.only_in_b}
    return {
        "same": all(entry.same for entry in diffs) and not any(alone.values()),
        "plans": [_pair_record(entry) for entry in diffs],
        **{side: [plan.graph_id for plan in plans] for side, plans in alone.items()},
    }


def _pair_record(entry: PlanDiff) -> dict[str, Any]:
    return {
        "a": entry.a.graph_id,
        "b": entry.b.graph_id,
        "matched_by": entry.match,
        "same": entry.same,
        "figures": {figure.field: _figure_record(entry, figure) for figure in FIGURES},
        "decisions_changed": [_change_record(change) for change in entry.changes],
        "groups_changed": [group_record(group) for group in _change_groups(entry.changes)[0]],
        "only_in_a": [value.name for value in entry.only_in_a],
        "only_in_b": [value.name for value in entry.only_in_b],
        "also_different": {"values": dict(entry.other_fields), "plan": _lists_that_differ(entry)},
    }


def _figure_record(entry: PlanDiff, figure: Figure) -> dict[str, Any]:
    a, b = _pair(entry, figure)
    known = figure.kind != "text" and a is not None and b is not None
    return {"a": a, "b": b, "difference": b - a if known else None}


def _change_record(change: Change) -> dict[str, Any]:
    after = change.after
    return {
        "name": after.name,
        "module": after.module,
        "bytes": after.bytes,
        "a": change.before.decision,
        "b": after.decision,
        "reason_a": change.before.reason,
        "reason_b": after.reason,
    }
