"""``remat diff``: two plans, or two folders of them, side by side."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from remat_passes.units import format_bytes, format_us

from .change_table import Changes, change_sections
from .comparison import Change, Pairing, PlanDiff, compare, pair_up
from .groups import group_record
from .headline import count, time_text
from .plan_files import WrongUse, read_plans
from .slices import moved_values, split_record, split_sections
from .tables import (
    BOLD,
    DIM,
    Column,
    Row,
    clean,
    fitted_table,
    heading,
    page_width,
    paragraph,
    print_parts,
    wrapped,
    write,
)

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
# Only said to differ.
LISTS = ("predicted_peak_bytes", "schedule_class", "symbols", "frontier", "timeline", "peak_values", "notes")


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


def report(title: str, diffs: Sequence[PlanDiff], pairing: Pairing, width: int) -> list[Text]:
    """The comparison for people."""
    parts: list[Text] = [wrapped(Text(clean(title)), width)]
    if all(entry.same for entry in diffs) and not pairing.only_in_a and not pairing.only_in_b:
        return [*parts, Text("the plans are the same")]
    for entry in diffs:
        parts += _pair_section(entry, width)
    for name, plans in (("A", pairing.only_in_a), ("B", pairing.only_in_b)):
        graphs = ", ".join(clean(plan.graph_id) for plan in plans)
        parts += [heading(f"Only in {name}: {graphs}", width)] if plans else []
    return parts


def _pair_section(entry: PlanDiff, width: int) -> list[Text]:
    ids = dict.fromkeys((entry.a.graph_id, entry.b.graph_id))
    by_order = "  (graphs changed, compared by their order)" if entry.match == "order" else ""
    parts: list[Text] = [heading(clean(" -> ".join(ids)) + by_order, width)]
    if entry.same:
        return [*parts, paragraph("the plans are the same", width, indent=2)]
    parts += [Text(), _figure_table(entry, width)]
    parts += split_sections(entry.a.microbatches, entry.b.microbatches, width)
    parts += change_sections(entry, width)
    return parts + _rest(entry, width)


def _figure_table(entry: PlanDiff, width: int) -> Text:
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
    if a <= 0:
        return f"{sign}{written}"
    share = f"{b / a:.0f}x" if b >= 10 * a else f"{sign}{100 * size / a:.0f}%"
    return f"{sign}{written} ({share})"


def _rest(entry: PlanDiff, width: int) -> list[Text]:
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
        "microbatches": {
            "a": split_record(entry.a.microbatches),
            "b": split_record(entry.b.microbatches),
            "values_changed": moved_values(entry.a.microbatches, entry.b.microbatches),
        },
        "decisions_changed": [_change_record(change) for change in entry.changes],
        "groups_changed": [group_record(group) for group in Changes.of(entry).groups()],
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
