"""Two plans compared: which figures moved, and which values were decided differently. Data only; ``diff`` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from remat_passes.plan import RematPlan, ValuePlan

Match = Literal["given", "hash", "order"]


@dataclass(frozen=True, slots=True)
class Change:
    """A value that both plans have and decide differently."""

    before: ValuePlan
    after: ValuePlan


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """What is different between plan ``a`` and plan ``b``."""

    a: RematPlan
    b: RematPlan
    match: Match  # why these two were compared
    changes: tuple[Change, ...]
    only_in_a: tuple[ValuePlan, ...]
    only_in_b: tuple[ValuePlan, ...]
    other_fields: tuple[tuple[str, int], ...]  # fields of values with equal decision that differ, and in how many

    @property
    def same(self) -> bool:
        """Whether nothing differs but the order in which the graphs were compiled."""
        return replace(self.a, graph_id=self.b.graph_id) == self.b and graph_hash(self.a) == graph_hash(self.b)


@dataclass(frozen=True, slots=True)
class Pairing:
    """The plans of two folders: which belong together, and which have no partner."""

    pairs: tuple[tuple[RematPlan, RematPlan, Match], ...]
    only_in_a: tuple[RematPlan, ...]
    only_in_b: tuple[RematPlan, ...]


def graph_hash(plan: RematPlan) -> str:
    """What names the graph itself: ``1a2b3c4d`` of ``g00-1a2b3c4d``."""
    _, _, digest = plan.graph_id.partition("-")
    return digest or plan.graph_id


def compare(a: RematPlan, b: RematPlan, match: Match) -> PlanDiff:
    """Everything that differs, values in the order in which forward makes them."""
    in_a = {value.name: value for value in a.values}
    in_b = {value.name: value for value in b.values}
    both = [Change(value, in_b[name]) for name, value in in_a.items() if name in in_b]
    return PlanDiff(
        a=a,
        b=b,
        match=match,
        changes=tuple(change for change in both if change.before.decision != change.after.decision),
        only_in_a=tuple(value for name, value in in_a.items() if name not in in_b),
        only_in_b=tuple(value for name, value in in_b.items() if name not in in_a),
        other_fields=_other_fields([change for change in both if change.before.decision == change.after.decision]),
    )


def _other_fields(kept: Sequence[Change]) -> tuple[tuple[str, int], ...]:
    names = [field.name for field in fields(ValuePlan)]
    nums = [sum(getattr(pair.before, name) != getattr(pair.after, name) for pair in kept) for name in names]
    return tuple((name, num) for name, num in zip(names, nums, strict=True) if num)


def pair_up(a: Sequence[RematPlan], b: Sequence[RematPlan]) -> Pairing:
    """Plans of the same graph belong together; those whose graph changed are taken in order."""
    left_b = list(b)
    pairs: list[tuple[RematPlan, RematPlan, Match]] = []
    left_a = []
    for plan in a:
        partner = next((other for other in left_b if graph_hash(other) == graph_hash(plan)), None)
        if partner is None:
            left_a.append(plan)
            continue
        left_b.remove(partner)
        pairs.append((plan, partner, "hash"))
    num = min(len(left_a), len(left_b))
    pairs += [(plan, other, "order") for plan, other in zip(left_a, left_b, strict=False)]
    return Pairing(tuple(pairs), tuple(left_a[num:]), tuple(left_b[num:]))
