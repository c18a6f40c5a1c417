"""The table of values: what was decided for each, by module, with the reason and the source line beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from rich.text import Text

from remat_passes.plan import RematPlan, ValuePlan
from remat_passes.units import format_bytes

from .groups import FoldedValue, Group, Key, KeyOf, decision_key, group_values, shape_text, total
from .headline import count, time_text
from .tables import (
    BOLD,
    DECISION_STYLES,
    DIM,
    Block,
    Column,
    Row,
    clean,
    draw_blocks,
    heading,
    paragraph,
    stacked,
)

MIN_ROOT = 12  # a shorter common folder is left in the table

MOST_NAMES = 3  # of values that differ in nothing but their name

Line = tuple[ValuePlan, ...]

COLUMNS = [
    Column("decision"),
    Column("bytes", "right"),
    Column("recompute", "right"),
    Column("value", flexible=True),
    Column("why, and where", flexible=True),
]


def value_section(plan: RematPlan, width: int, every_value: bool) -> list[Text]:
    """Every group with its values; free ones are counted only, unless ``every_value``."""
    if not plan.values:
        return []
    groups = group_values(plan.values)
    each = "" if plan.microbatches is None else " in each slice"
    title = f"What happens to the {count(len(plan.values), 'forward value')} that backward needs{each}, by module"
    root = source_root(plan.values)
    blocks = [_block(group, root, every_value) for group in groups]
    return [heading(title, width), *legend(groups, root, width), Text(), *draw_blocks(COLUMNS, blocks, width)]


def source_root(values: Iterable[ValuePlan]) -> str:
    """The folder that all source lines share, with its slash; empty when leaving it out would save little."""
    folders = [value.source.split("/")[:-1] for value in values if "/" in value.source]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    root = "".join(f"{parts[0]}/" for parts in shared)
    return root if len(root) >= MIN_ROOT else ""


def legend(groups: Sequence[Group], root: str, width: int) -> list[Text]:
    """What a reader must know about the columns, and about folded groups when there are any."""
    text = "recompute: what computing the value again costs, whatever was decided."
    most = max(len(group.modules) for group in groups)
    if most > 1:
        text += f" x{most}: so many modules were planned alike; the title adds them up, the lines show the first."
    if root:
        text += f" Sources are below {clean(root)}"
    return [paragraph(Text(text, DIM), width)]


def group_title(group: Group, what: str) -> Text:
    """The group's name, how many modules it stands for, and what they come to."""
    return Text.assemble((clean(group.title), BOLD), "  ", what)


def lines_of(listed: Iterable[FoldedValue], key_of: KeyOf = decision_key) -> list[Line]:
    """The values of a group's first module, those together that differ in nothing but their name."""
    lines: dict[tuple[Key, str, str, int, float], list[ValuePlan]] = {}
    for folded in listed:
        value = folded.first
        shown = (key_of(value), value.reason, value.source, value.bytes, value.cost_us)
        lines.setdefault(shown, []).append(value)
    return [tuple(line) for line in lines.values()]


def value_cells(line: Line, root: str, most_names: int = MOST_NAMES) -> Row:
    """Bytes and cost of each, the names over op and shape, and the reason with its source line, without ``root``."""
    value, times = line[0], f"{len(line)} x " if len(line) > 1 else ""
    names = ", ".join(entry.name for entry in line[:most_names])
    more = f" and {len(line) - most_names} more" if len(line) > most_names else ""
    op = ".".join(value.op.split(".")[:2])  # the overload says little: `explain` has it
    source = f" ({clean(value.source.removeprefix(root))})" if value.source else ""
    return (
        f"{times}{format_bytes(value.bytes)}",
        f"{times}{time_text(value.cost_us)}",
        stacked((names + more, BOLD), (f"{op} {shape_text(value)}", "")),
        Text.assemble(clean(value.reason), (source, DIM)),
    )


def value_row(line: Line, root: str, most_names: int = MOST_NAMES) -> Row:
    """One line of the table."""
    decision = line[0].decision
    return (Text(decision, DECISION_STYLES[decision]), *value_cells(line, root, most_names))


def _block(group: Group, root: str, every_value: bool) -> Block:
    most_names = len(group.folded) if every_value else MOST_NAMES
    listed = group.folded if every_value else group.with_decision("save", "recompute")
    return Block(
        title=group_title(group, _sums(group)),
        rows=[value_row(line, root, most_names) for line in lines_of(listed)],
        footer="" if every_value or not listed else _free(group),
    )


def _sums(group: Group) -> str:
    saved, dropped = total(group.values, "save"), total(group.values, "recompute")
    sums = [f"{format_bytes(saved.bytes)} saved"] if saved.num_values else []
    if dropped.num_values:
        sums.append(f"{format_bytes(dropped.bytes)} recomputed in {time_text(dropped.cost_us)}")
    return ", ".join(sums) or _free(group)


def _free(group: Group) -> str:
    free = total(group.values, "free")
    if not free.num_values:
        return ""
    there = f" ({format_bytes(free.bytes)}, there anyway)" if free.bytes else ""
    return f"free: {count(free.num_values, 'value')} without memory of their own{there}"
