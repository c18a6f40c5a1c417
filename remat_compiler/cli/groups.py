"""Groups: the values of a plan by module, with identical layers folded into one.

A transformer of 16 layers holds 16 times the same decisions. Listing them hides the one layer that differs; folding by
name alone hides it as well. So modules fold when their paths differ only in integer components *and* they hold the same
multiset of values: ``blocks.0-14`` and ``blocks.15`` stay apart when the last one was planned differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remat_passes.plan import DECISIONS, Decision, ValuePlan

Key = tuple[str, ...]
KeyOf = Callable[[ValuePlan], Key]
Indices = tuple[int, ...]
Pattern = tuple[str | None, ...]  # a module path whose integer components are None

FX_NUMBER = re.compile(r"(?<=\w)_[0-9]+\b")
TOP_LEVEL = "(top level)"


@dataclass(frozen=True, slots=True)
class Total:
    """What several values add up to."""

    num_values: int
    bytes: int
    cost_us: float


@dataclass(frozen=True, slots=True)
class FoldedValue:
    """One value of a group: the same one in each of its modules, in the order of the modules."""

    values: tuple[ValuePlan, ...]

    @property
    def first(self) -> ValuePlan:
        """The one in the group's first module, which lends the line its name, source and cost."""
        return self.values[0]


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that hold the same values: ``blocks.0-15`` and its 16 paths."""

    label: str
    modules: tuple[str, ...]
    folded: tuple[FoldedValue, ...]  # largest first

    @property
    def values(self) -> tuple[ValuePlan, ...]:
        """Every value of every module of the group."""
        return tuple(value for folded in self.folded for value in folded.values)

    @property
    def title(self) -> str:
        """The label and how many modules it stands for."""
        return self.label if len(self.modules) == 1 else f"{self.label} x{len(self.modules)}"

    def with_decision(self, *decisions: Decision) -> tuple[FoldedValue, ...]:
        """The folded values that were decided so."""
        return tuple(folded for folded in self.folded if folded.first.decision in decisions)


def shape_text(value: ValuePlan) -> str:
    """Element type and shape in Inductor's notation: ``float32[2,1024,256]``."""
    return f"{value.dtype.removeprefix('torch.')}[{','.join(str(size) for size in value.shape)}]"


def decision_key(value: ValuePlan) -> Key:
    """What must agree for two values to be shown as one.

    A reason may name a neighbour. Layer 3 has "a view of addmm_12" where layer 0 has "a view of addmm", so FX's
    numbers do not count.
    """
    return (value.op, shape_text(value), value.decision, FX_NUMBER.sub("", value.reason))


def total(values: Iterable[ValuePlan], *decisions: Decision) -> Total:
    """The sum over the values that were decided so."""
    chosen = [value for value in values if value.decision in decisions]
    return Total(len(chosen), sum(value.bytes for value in chosen), sum((value.cost_us for value in chosen), 0.0))


def group_values(values: Iterable[ValuePlan], key_of: KeyOf = decision_key) -> tuple[Group, ...]:
    """The values by module, equal modules folded, the group with the most bytes first.

    A group's bytes are those of its saved and recomputed values; free ones cost nothing and only break ties.
    """
    by_module: dict[str, list[ValuePlan]] = {}
    for value in values:
        by_module.setdefault(value.module, []).append(value)
    alike: dict[Hashable, dict[Indices, str]] = {}
    for module, held in by_module.items():
        pattern, indices = _split_path(module)
        signature = tuple(sorted(key_of(value) for value in held))
        alike.setdefault((pattern, signature), {})[indices] = module
    groups = [group for paths in alike.values() for group in _groups_of(paths, by_module, key_of)]
    return tuple(sorted(groups, key=_by_bytes))


def group_record(group: Group) -> dict[str, Any]:
    """The group for JSON: bytes and times of a value are those of one module, totals those of all."""
    totals = {decision: total(group.values, decision) for decision in DECISIONS}
    return {
        "label": group.label,
        "modules": list(group.modules),
        "num_modules": len(group.modules),
        "saved_bytes": totals["save"].bytes,
        "recomputed_bytes": totals["recompute"].bytes,
        "free_bytes": totals["free"].bytes,
        "recompute_us": totals["recompute"].cost_us,
        "values": [_folded_record(folded) for folded in group.folded],
    }


def _folded_record(folded: FoldedValue) -> dict[str, Any]:
    first = folded.first
    return {
        "names": [value.name for value in folded.values],
        "op": first.op,
        "shape": list(first.shape),
        "dtype": first.dtype,
        "bytes": first.bytes,
        "decision": first.decision,
        "reason": first.reason,
        "cost_us": first.cost_us,
    }


def _by_bytes(group: Group) -> tuple[int, int]:
    """Sort key; groups with equal bytes keep the order in which forward meets them."""
    return (-total(group.values, "save", "recompute").bytes, -total(group.values, "free").bytes)


def _groups_of(paths: dict[Indices, str], by_module: dict[str, list[ValuePlan]], key_of: KeyOf) -> list[Group]:
    """The groups of modules whose paths share one pattern and whose values agree."""
    pattern, _ = _split_path(next(iter(paths.values())))
    groups = []
    for box in _boxes(set(paths)):
        modules = tuple(paths[indices] for indices in _members(box))
        in_step = (sorted(by_module[module], key=key_of) for module in modules)  # equal keys keep forward's order
        folded = [FoldedValue(values) for values in zip(*in_step, strict=True)]
        place = {value.name: at for at, value in enumerate(by_module[modules[0]])}
        folded.sort(key=lambda entry: (-entry.first.bytes, place[entry.first.name]))
        groups.append(Group(_label(pattern, box), modules, tuple(folded)))
    return groups


def fold_paths(modules: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Module paths by a label, those together that differ in integer components only: ``blocks.0-15.mlp``."""
    alike: dict[Pattern, dict[Indices, str]] = {}
    for module in modules:
        pattern, indices = _split_path(module)
        alike.setdefault(pattern, {})[indices] = module
    return tuple(
        (_label(pattern, box), tuple(paths[indices] for indices in _members(box)))
        for pattern, paths in alike.items()
        for box in _boxes(set(paths))
    )


def _split_path(module: str) -> tuple[Pattern, Indices]:
    """``blocks.3.mlp`` as the pattern ``blocks.*.mlp`` and the indices ``(3,)``."""
    components = module.split(".")
    pattern = tuple(None if _is_index(component) else component for component in components)
    return pattern, tuple(int(component) for component in components if _is_index(component))


def _is_index(component: str) -> bool:
    """Whether the component is an integer as PyTorch writes it; ``00`` is a name of its own."""
    return component.isascii() and component.isdigit() and str(int(component)) == component


def _boxes(indices: set[Indices]) -> list[tuple[Indices, ...]]:
    """Products of index sets that together are exactly ``indices``: 16 layers of 8 experts are one product."""
    if () in indices:
        return [()]
    tails: dict[int, set[Indices]] = {}
    for head, *tail in sorted(indices):
        tails.setdefault(head, set()).add(tuple(tail))
    heads_of: dict[frozenset[Indices], list[int]] = {}
    for head, tail_set in tails.items():
        heads_of.setdefault(frozenset(tail_set), []).append(head)
    return [(tuple(heads), *box) for tail_set, heads in heads_of.items() for box in _boxes(set(tail_set))]


def _members(box: Sequence[Indices]) -> list[Indices]:
    members: list[Indices] = [()]
    for choices in box:
        members = [(*member, index) for member in members for index in choices]
    return members


def _label(pattern: Pattern, box: Sequence[Indices]) -> str:
    spans = iter(box)
    return ".".join(_spans(next(spans)) if part is None else part for part in pattern) or TOP_LEVEL


def _spans(indices: Indices) -> str:
    """``0-3,7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
