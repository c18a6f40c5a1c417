"""How a step was split: its slices and loops, the inputs that carry the batch, what runs outside of the loops, and why.

A step that splits well has a long list of values inside and a short one outside. What is outside is mostly there
because of a few ops that couple the samples, so those come first, and what merely follows from them is cut short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from remat_passes.plan import BatchInput, BatchValue, Microbatches, RematPlan
from remat_passes.units import format_bytes

from .groups import FX_NUMBER
from .tables import BOLD, DIM, INDENT, Column, Row, clean, fitted_table, heading, labelled, paragraph, stacked

NUM_SHOWN = 10  # lines of what needs the whole batch; `dump --all` has the rest
MOST_LENGTHS = 6  # more slices than this are counted
MOST_NAMES = 3

# The words of ``remat_passes.batch.Dependence``, which imports torch.
SAME, SPLIT, PARTIAL, WHOLE = "same in every slice", "split", "partial sum", "whole batch"
OUTSIDE, NOWHERE = "outside", "not computed"
TAIL = "tail"  # what runs in slices, where that is not the whole step

# Why something that depends on the batch is outside where no op of its own asks for that, most telling first.
FOLLOWS = {
    WHOLE: "computed from inputs, or from what is outside",
    SPLIT: "cheap, and needed for all slices at once",
    PARTIAL: "a sum over the batch, or a view of one",
}

WHAT_IT_IS = {
    SAME: "the same in every slice: it does not depend on the batch",
    SPLIT: "split: each slice of the batch has its own part of it",
    PARTIAL: "a partial sum: what the slices give is added up",
    WHOLE: "whole: it depends on all samples at once, so no slice of it is computed by itself",
}


def slices_text(lengths: Sequence[int]) -> str:
    """``4 slices of 2``, ``4 slices of 3, 3, 2, 2``, and ``13 slices, 3 of 5 and 10 of 4`` where there are many."""
    num = f"{len(lengths)} slices" if len(lengths) != 1 else "1 slice"
    if len(set(lengths)) <= 1:
        return f"{num} of {lengths[0]}" if lengths else num
    if len(lengths) <= MOST_LENGTHS:
        return f"{num} of {', '.join(map(str, lengths))}"
    return f"{num}, {' and '.join(f'{count} of {length}' for length, count in Counter(lengths).items())}"


def loops_text(split: Microbatches) -> str:
    """``1 loop in forward``, ``2 loops in forward and backward``."""
    if not split.num_loops:
        return "no loop"
    return f"{split.num_loops} loop{'' if split.num_loops == 1 else 's'} in {split.runs_in}"


def input_text(given: BatchInput) -> str:
    """``tokens (axis 0)``."""
    return f"{clean(given.name)} (axis {given.axis})"


def is_coupled(value: BatchValue) -> bool:
    """Whether its own op asks for the whole batch."""
    return bool(value.why)


def whole_values(split: Microbatches) -> list[BatchValue]:
    """What depends on the batch and is not computed in the loops alone: coupled values first, then the largest."""
    found = [v for v in split.values if is_coupled(v) or (OUTSIDE in places(v) and v.dependence != SAME)]
    order = {dependence: rank for rank, dependence in enumerate(FOLLOWS)}
    return sorted(
        found, key=lambda value: (not is_coupled(value), -value.bytes, order.get(value.dependence, len(order)))
    )


def places(value: BatchValue) -> list[str]:
    """Where a value is computed: ``["loop 0", "outside"]``."""
    return [] if value.where == NOWHERE else value.where.split(" and ")


def reason_outside(value: BatchValue) -> str:
    """Why a value of ``whole_values`` is among them."""
    return value.why or FOLLOWS.get(value.dependence, "")


def split_section(plan: RematPlan, width: int, every_value: bool, root: str) -> list[Text]:
    """The part of ``remat dump`` that a step in micro-batches has; sources are shown without ``root``."""
    split = plan.microbatches
    if split is None:
        return []
    return [
        heading("How the batch is split", width),
        Text(),
        _figures(split, width),
        *_whole(split, width, every_value, root),
    ]


def _figures(split: Microbatches, width: int) -> Text:
    only = "; the last product and the loss, and all before them whole" if split.part == TAIL else ""
    rows: list[Row] = [
        ("slices", f"{slices_of(split)}, one after another{only}"),
        ("loops", _loops(split)),
        ("inputs", ", ".join(map(input_text, split.inputs)) or "none carries the batch"),
        ("inside", _inside(split.values)),
        ("outside", _outside(split)),
    ]
    return labelled(rows, width)


def _loops(split: Microbatches) -> str:
    twice = sum(sum(place != OUTSIDE for place in places(value)) > 1 for value in split.values)
    text = loops_text(split)
    if not split.num_loops:
        return f"{text}: nothing of this graph has to be computed slice by slice"
    if split.runs_in == "forward":
        text += "; the gradients are computed there as well, and backward multiplies them by that of the loss"
    if twice:
        text += f". {_values(twice)} of a loop are computed again in a later one"
    return text


def _values(num: int) -> str:
    return f"{num} value" if num == 1 else f"{num} values"


def _inside(values: Iterable[BatchValue]) -> str:
    inside = Counter(value.dependence for value in values if set(places(value)) - {OUTSIDE})
    parts = [
        (inside[SPLIT], "split"),
        (inside[PARTIAL], "added up over the slices"),
        (inside[SAME], "the same in each"),
    ]
    kinds = ", ".join(f"{num} {what}" for num, what in parts if num)
    return f"{_values(sum(inside.values()))}: {kinds}" if kinds else "nothing"


def _outside(split: Microbatches) -> str:
    outside = Counter(value.dependence for value in split.values if OUTSIDE in places(value))
    coupled = sum(map(is_coupled, split.values))
    parts = [
        (outside[SAME], "without the batch"),
        (outside[WHOLE] + outside[SPLIT], "with all of it"),
        (outside[PARTIAL], "of sums over it"),
    ]
    kinds = ", ".join(f"{num} {what}" for num, what in parts if num)
    text = f"{_values(sum(outside.values()))}: {kinds}" if kinds else "nothing"
    return f"{text}; {coupled} op{' couples' if coupled == 1 else 's couple'} the samples" if coupled else text


COLUMNS = [
    Column("bytes", "right"),
    Column("value", flexible=True),
    Column("runs in"),
    Column("why, and where", flexible=True),
]


def _whole(split: Microbatches, width: int, every_value: bool, root: str) -> list[Text]:
    lines = _folded(whole_values(split))
    if not lines:
        return []
    shown = lines if every_value else lines[:NUM_SHOWN]
    parts = [Text(), fitted_table(COLUMNS, [_row(line, root) for line in shown], width)]
    more = sum(map(len, lines[len(shown) :]))
    if more:
        rest = Text(f"and {_values(more)} more, which 'remat dump --all' lists", DIM)
        parts.append(paragraph(rest, width, indent=INDENT))
    return parts


def _folded(values: Iterable[BatchValue]) -> list[list[BatchValue]]:
    """Values that differ in nothing but FX's numbers are one line; coupled ones first, then the largest."""
    lines: dict[tuple[str, ...], list[BatchValue]] = {}
    for value in values:
        reason = FX_NUMBER.sub("", reason_outside(value))
        lines.setdefault((value.op, value.where, value.dependence, reason, value.source), []).append(value)
    return sorted(lines.values(), key=lambda line: (not is_coupled(line[0]), -sum(value.bytes for value in line)))


def _row(line: Sequence[BatchValue], root: str) -> Row:
    first = line[0]
    more = f" and {len(line) - MOST_NAMES} more" if len(line) > MOST_NAMES else ""
    names = ", ".join(value.name for value in line[:MOST_NAMES]) + more
    source = f" ({clean(first.source.removeprefix(root))})" if first.source else ""
    op = ".".join(first.op.split(".")[:2])
    return (
        format_bytes(sum(value.bytes for value in line)) if any(value.bytes for value in line) else "-",
        stacked((names, BOLD), (op, "")),
        clean(first.where),
        Text.assemble(clean(reason_outside(first)), (source, DIM)),
    )


# -- two plans


def split_changes(a: Microbatches | None, b: Microbatches | None) -> list[tuple[str, str]]:
    """What is different in how the batch is split: a label, and ``A -> B``."""
    if a == b:
        return []
    pairs = {
        "slices": [slices_of(each) for each in (a, b)],
        "loops": [_loops_of(each) for each in (a, b)],
        "inputs": [_inputs_of(each) for each in (a, b)],
    }
    rows = [(label, " -> ".join(pair)) for label, pair in pairs.items() if pair[0] != pair[1]]
    moved = len(moved_values(a, b))
    return [*rows, ("values", f"{_values(moved)} computed elsewhere, or of another kind")] if moved else rows


def slices_of(split: Microbatches | None) -> str:
    """``14 samples in 4 slices of 4, 4, 3, 3``."""
    if split is None:
        return "not split"
    what = "rows of the tail" if split.part == TAIL else "samples"
    return f"{split.batch} {what} in {slices_text(split.lengths)}"


def _loops_of(split: Microbatches | None) -> str:
    return "no loop" if split is None else loops_text(split)


def _inputs_of(split: Microbatches | None) -> str:
    return ", ".join(map(input_text, split.inputs)) or "none" if split is not None else "none"


def moved_values(a: Microbatches | None, b: Microbatches | None) -> list[str]:
    """Values that both steps have and that are computed elsewhere, or depend on the batch in another way."""
    if a is None or b is None:
        return []
    before = {value.name: value for value in a.values}
    return [value.name for value in b.values if value.name in before and before[value.name] != value]


def split_record(split: Microbatches | None) -> dict[str, Any] | None:
    """How the batch is split for JSON, without the values."""
    return None if split is None else {name: entry for name, entry in asdict(split).items() if name != "values"}


def split_sections(a: Microbatches | None, b: Microbatches | None, width: int) -> list[Text]:
    """The part of ``remat diff`` about micro-batches."""
    rows = split_changes(a, b)
    return [heading("How the batch is split", width), Text(), labelled(rows, width)] if rows else []


# -- one value


def batch_rows(value: BatchValue) -> list[Row]:
    """What ``remat explain`` says of a value of a step that is split."""
    at = f", at axis {value.axis}" if value.axis is not None and value.dependence == SPLIT else ""
    rows: list[Row] = [("in slices", WHAT_IT_IS.get(value.dependence, clean(value.dependence)) + at)]
    rows.append(("runs", runs_text(value)))
    if is_coupled(value):
        rows.append(("coupled", clean(value.why)))
    elif OUTSIDE in places(value) and value.dependence != SAME:
        rows.append(("outside", f"it is {FOLLOWS.get(value.dependence, 'needed there')}"))
    return rows


def runs_text(value: BatchValue) -> str:
    """``in loop 0, once for each slice``."""
    loops = [clean(place) for place in places(value) if place != OUTSIDE]
    parts = [f"in {' and in '.join(loops)}, once for each slice"] if loops else []
    parts += ["outside of the loops, once"] if OUTSIDE in places(value) else []
    return ", and ".join(parts) or "nowhere: nothing needs it in this step"
