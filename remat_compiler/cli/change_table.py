"""The values in which two plans differ: decided differently, or only in one of the two; by module, as in a dump."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from remat_passes.plan import ValuePlan
from remat_passes.units import format_bytes

from .comparison import PlanDiff
from .groups import Group, Key, decision_key, group_values
from .headline import count
from .tables import Block, Column, Row, draw_blocks, heading, paragraph
from .value_table import COLUMNS, Line, group_title, legend, lines_of, source_root, value_cells, value_row

CHANGE_COLUMNS = [
    Column("A -> B"),
    Column("bytes", "right"),
    Column("recompute", "right"),
    Column("value", flexible=True),
    Column("why in B, and where", flexible=True),
]


@dataclass(frozen=True, slots=True)
class Changes:
    """The values that were decided differently: as B has them, and by name as A had them."""

    after: tuple[ValuePlan, ...]
    before: Mapping[str, ValuePlan]

    @staticmethod
    def of(entry: PlanDiff) -> Changes:
        """The changes of one comparison."""
        before = {change.before.name: change.before for change in entry.changes}
        return Changes(tuple(change.after for change in entry.changes), before)

    def move(self, value: ValuePlan) -> str:
        """``save -> recompute``."""
        return f"{self.before[value.name].decision} -> {value.decision}"

    def key(self, value: ValuePlan) -> Key:
        """What must agree for two changes to be shown as one."""
        return (*decision_key(value), self.move(value))

    def groups(self) -> tuple[Group, ...]:
        """The changes by module."""
        return group_values(self.after, self.key)

    def sums(self, values: Sequence[ValuePlan]) -> str:
        """``save -> recompute 64.0 MiB``, the largest move first."""
        moved: Counter[str] = Counter()
        for value in values:
            moved[self.move(value)] += value.bytes
        return ", ".join(f"{move} {format_bytes(num_bytes)}" for move, num_bytes in moved.most_common())


def change_sections(entry: PlanDiff, width: int) -> list[Text]:
    """Every value that differs, under one legend."""
    changes = Changes.of(entry)
    changed, only_in_a, only_in_b = changes.groups(), group_values(entry.only_in_a), group_values(entry.only_in_b)
    groups = (*changed, *only_in_a, *only_in_b)
    if not groups:
        return _changed_section(changes, changed, "", width)
    root = source_root(value for group in groups for value in group.values)
    return [
        Text(),
        *legend(groups, root, width),
        *_changed_section(changes, changed, root, width),
        *_only_section("A", only_in_a, root, width),
        *_only_section("B", only_in_b, root, width),
    ]


def _changed_section(changes: Changes, groups: Sequence[Group], root: str, width: int) -> list[Text]:
    if not groups:
        return [Text(), paragraph("Every value that both have is decided in the same way.", width)]
    title = f"{count(len(changes.after), 'value')} decided differently: {changes.sums(changes.after)}"
    blocks = [
        Block(
            group_title(group, changes.sums(group.values)),
            [_change_row(changes, line, root) for line in lines_of(group.folded, changes.key)],
        )
        for group in groups
    ]
    return [heading(title, width), Text(), *draw_blocks(CHANGE_COLUMNS, blocks, width)]


def _change_row(changes: Changes, line: Line, root: str) -> Row:
    return (changes.move(line[0]), *value_cells(line, root))


def _only_section(name: str, groups: Sequence[Group], root: str, width: int) -> list[Text]:
    if not groups:
        return []
    title = f"{count(sum(len(group.values) for group in groups), 'value')} only in {name}"
    blocks = [
        Block(
            group_title(group, format_bytes(sum(value.bytes for value in group.values))),
            [value_row(line, root) for line in lines_of(group.folded)],
        )
        for group in groups
    ]
    return [heading(title, width), Text(), *draw_blocks(COLUMNS, blocks, width)]
