"""Bound: the least time of any plan whose peak is within a limit, from what must be alive while one kernel runs.

What is allocated while a kernel of backward runs is what it reads and writes, and what waits for later kernels: saved
values, what was recomputed early and is read late, and gradients on their way. Which values wait is a decision. Let t
be a kernel of its own in backward. The problem of the cut (cut.py) gets two more booleans for each value v:

    late(v)    a kernel after t reads v
    later(v)   v is computed by a kernel after t

    (1) late(v)                   where an op that runs after t for certain reads v, or the step returns it
    (2) late(v) -> need(v)        of forward's values
    (3) later(v) -> redo(v)       of forward's values
    (4) later(v) -> late(u)       for each input u of v
    (5) late(v), not later(v)     v is allocated at t: its bytes

Why it is a bound: take any plan, also one that computes values more than once. Set need and redo as it has them,
late(v) where a kernel after t reads v, and later(v) where such a kernel computes v (a fused value, while it runs). What
a kernel after t reads is either computed after t as well or has been in memory since before t. So (1) to (4) hold, and
what (5) counts is allocated at t in that plan. Besides, what t reads and writes is, and what forward returns. So the
plan's time and its bytes at t are at least those of a cut, and the dual of the hull of these cuts bounds its time. What
is recomputed both before and after t is paid for once: that makes the bound lower, not wrong.

It is taken that kernels of their own run in the order that autograd gave them.

The five conditions are a problem of the cut again, with up to four values for one: ``redo``, which may not be saved;
``need``, which is saved or computed from ``redo``; ``later``, whose saving takes its bytes at t; and ``late``, which is
computed from ``need`` and ``later``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .cut import CutProblem, CutValue, Sweep, coarse_sweep
from .joint import JointGraph, Role, Side, Value
from .memory import MemoryModel, Projection
from .ops import OpKind

MAX_CUTS = 8  # of each hull; fewer make a lower bound that is lower, not wrong


def lower_bound_ps(
    joint: JointGraph, problem: CutProblem, model: MemoryModel, limit_bytes: int, replays: Sequence[Projection]
) -> int | None:
    """The least time of all saves and recomputes of any plan within the limit; ``None`` where nothing is known.

    Args:
        joint: the graph, without repetitions.
        problem: its prices.
        model: for the bytes of storages.
        limit_bytes: of the peak.
        replays: of plans; the fullest instant of each is looked at, or the next one where it was already.
    """
    return highest_bound_ps(instants(joint, problem, model, replays), limit_bytes)


@dataclass(frozen=True, slots=True)
class InstantHull:
    """The hull of the cuts of one instant."""

    fixed_bytes: int  # allocated then in any plan
    hull: Sweep

    def lower_bound_ps(self, limit_bytes: int) -> int | None:
        """The least time of all saves and recomputes of any plan within the limit; ``None`` where nothing is known."""
        return self.hull.lower_bound_ps(max(0, limit_bytes - self.fixed_bytes))


def highest_bound_ps(hulls: Sequence[InstantHull], limit_bytes: int) -> int | None:
    """The highest of what several instants say; ``None`` where nothing is known."""
    found = (hull.lower_bound_ps(limit_bytes) for hull in hulls)
    return max((bound_ps for bound_ps in found if bound_ps is not None), default=None)


def instants(
    joint: JointGraph, problem: CutProblem, model: MemoryModel, replays: Sequence[Projection]
) -> list[InstantHull]:
    """The hulls of the fullest instants of some plans; the arguments are those of ``lower_bound_ps``."""
    found = []
    for index in _fullest(joint, model, replays):
        instant = _Instant(joint, problem, model, index)
        hull = coarse_sweep(instant.problem(), MAX_CUTS)
        found.append(InstantHull(model.baseline_bytes + instant.fixed_bytes, hull))
    return found


def _fullest(joint: JointGraph, model: MemoryModel, replays: Sequence[Projection]) -> list[int]:
    """The kernels of their own in backward during which most is allocated, one of each replay."""
    own = {joint.values[i].name: i for i in joint.backward_values if _is_own_kernel(model, i)}
    picked: list[int] = []
    for replay in replays:
        found = {own[at.name]: at.bytes for at in replay.timeline if at.is_backward and at.name in own}
        others = sorted(found.keys() - set(picked), key=lambda index: (-found[index], index))
        picked.extend(others[:1])
    return picked


def _is_own_kernel(model: MemoryModel, index: int) -> bool:
    """Whether an op runs in a kernel that nothing else can run in; a product may run with the sum that it goes into."""
    return model.kinds[index] is OpKind.EXTERN and index not in model.products_of_sums


class _Instant:
    """The problem of one instant."""

    def __init__(self, joint: JointGraph, problem: CutProblem, model: MemoryModel, index: int) -> None:
        self.joint, self.old, self.model, self.index = joint, problem, model, index
        values = joint.values
        outputs = {values[i].base for i in joint.forward_outputs} - model.inputs
        operands = {values[i].base for i in values[index].inputs} - model.inputs - outputs
        results = {index, *(i for i in values[index].users if values[i].kind is OpKind.PART)}
        self.fixed = outputs | operands | results
        self.fixed_bytes = sum(model.sizes[i] for i in self.fixed) + model.workspaces[index]
        self.before, self.after = self._certain()
        self.is_late = self._certainly_late()

    def _certain(self) -> tuple[frozenset[int], frozenset[int]]:
        """The ops of backward that run before, and after, the instant in any plan."""
        before, after = set(), {self.index}
        for i in self.joint.backward_values:
            value = self.joint.values[i]
            has_own = not self.model.fuses or _is_own_kernel(self.model, i)
            if i < self.index and (has_own or (value.kind is OpKind.PART and value.inputs[0] in before)):
                before.add(i)
            elif i > self.index and (has_own or not after.isdisjoint(value.inputs)):
                after.add(i)
        return frozenset(before), frozenset(after - {self.index})

    def _certainly_late(self) -> frozenset[int]:
        """(1) What ops after the instant read, what the step returns, and what changes something outside."""
        effects = {i for i in self.joint.backward_values if self.model.kinds[i] is OpKind.EFFECT}
        read = {i for reader in self.after for i in self.joint.values[reader].inputs}
        return frozenset(read | set(self.joint.backward_outputs) | (effects - self.before))

    def problem(self) -> CutProblem:
        """The values in an order in which each stands behind those that it is computed from."""
        made: list[CutValue] = []
        redo: dict[int, int] = {}
        need: dict[int, int] = {}
        late: dict[int, int] = {}  # absent: there without being counted
        for value in self.joint.values:
            for place, entry in self._entries(value, redo, need, late):
                place[value.index] = len(made)
                made.append(entry)
        return tuple(made)

    def _entries(
        self, value: Value, redo: dict[int, int], need: dict[int, int], late: dict[int, int]
    ) -> Iterator[tuple[dict[int, int], CutValue]]:
        index, old, name = value.index, self.old[value.index], value.name
        is_backward = value.side is Side.BACKWARD
        if not is_backward:
            if old.recompute_ps is not None:
                inputs = tuple(need[i] for i in value.inputs)
                yield redo, CutValue(name, inputs, False, 0, None, old.recompute_ps)
            from_redo = (redo[index],) if index in redo else ()
            yield need, CutValue(name, from_redo, old.is_required, 0, old.save_ps, 0 if from_redo else None)
        may_wait, may_be_alive = self._may_be_later(value), self._may_be_alive(value)
        if self._is_there_anyway(value) or not (may_wait or may_be_alive):
            return
        inputs = tuple(late[i] for i in value.inputs if i in late) + ((redo[index],) if index in redo else ())
        later = CutValue(
            name,
            inputs if may_wait else (),
            is_backward and index in self.is_late,
            self.model.sizes[index] if may_be_alive else 0,
            save_ps=0 if may_be_alive else None,
            recompute_ps=0 if may_wait else None,
        )
        yield late, later
        if not is_backward:
            yield late, CutValue(name, (need[index], late[index]), index in self.is_late, 0, None, 0)

    def _is_there_anyway(self, value: Value) -> bool:
        """Whether a value counts already, is held by the caller, is no tensor, or is computed after the instant."""
        is_held = value.kind is OpKind.INPUT and value.role is not Role.TANGENT
        is_known = value.index in self.fixed or value.index in self.after
        return is_held or is_known or value.kind is OpKind.SYMBOLIC

    def _may_be_alive(self, value: Value) -> bool:
        """Whether a value has storage of its own: no view has, nor an op whose parts have it."""
        is_whole = not any(self.model.kinds[user] is OpKind.PART for user in value.users)
        return value.base == value.index and is_whole and value.kind is not OpKind.EFFECT

    def _may_be_later(self, value: Value) -> bool:
        """Whether a kernel after the instant may compute it."""
        if value.side is not Side.BACKWARD:
            return self.old[value.index].recompute_ps is not None
        return value.role is not Role.TANGENT and (value.index not in self.before or value.base != value.index)
