"""The best that any decision can do under the eager memory model: by brute force, and by integer programming.

Two oracles that share nothing with the search. ``every_decision`` replays each decision of a small graph. ``ExactPeak``
writes the same question as a mixed-integer program for graphs that are too large for that: the least time of a decision
- each value saved, or recomputed at most once and as late as possible - whose peak is within a budget.

The program follows Checkmate (Jain et al., MLSys 2020), which decides for each stage of backward what is computed and
what is retained, with two differences. A value is recomputed once at most, and only where something reads it at once;
so the saved values alone decide everything, and only they need to be integers. Memory is followed by running sums of
what a storage takes between its readers, so each instant is linear.

In the terms of memory.py, backward falls into *slots*: one for each op of backward that reads something of forward,
with what is recomputed for it, in the order of the graph, and the ops behind it that read nothing of forward. A column
``redone[v][t]`` is 1 where v is recomputed in slot t, and ``kept[b][t + 1]`` where storage b is still there after it.

The program is never stricter than the replay, so its bound holds for every decision. It is laxer in two corners: a part
that is saved while its op is recomputed for another part is counted once, and a saved value whose storage no kernel of
backward reads may be freed early. Everywhere else both agree (tests/test_exact_peak.py).
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat_passes.cut import Cut, CutProblem, cut_of_saved
from remat_passes.errors import CannotPartitionError
from remat_passes.joint import JointGraph, Role, Side
from remat_passes.memory import MemoryModel, _Replay
from remat_passes.ops import OpKind
from remat_passes.search import Candidate

# HiGHS takes a row as met within 1e-6 of its unit (its option ``primal_feasibility_tolerance``), and refused a feasible
# program of these once where factors were not whole.
WHOLE_UNITS = 1e5

NO_KERNEL = frozenset({OpKind.VIEW, OpKind.PART, OpKind.SYMBOLIC, OpKind.INPUT})


# -- brute force ------------------------------------------------------------------------------------------------------


def decidable(joint: JointGraph, problem: CutProblem) -> tuple[int, ...]:
    """The values that may be saved as well as recomputed and that backward can come to need."""
    reached = _reached(problem)
    both = (i for i in sorted(reached) if problem[i].save_ps is not None and problem[i].recompute_ps is not None)
    return tuple(i for i in both if joint.values[i].side is not Side.BACKWARD)


def every_decision(joint: JointGraph, problem: CutProblem, model: MemoryModel) -> tuple[Candidate, ...]:
    """Each distinct decision that obeys the permissions, replayed; empty where there is none."""
    values = decidable(joint, problem)
    cuts: dict[tuple[frozenset[int], frozenset[int]], Cut] = {}
    for flags in itertools.product((False, True), repeat=len(values)):
        try:
            cut = cut_of_saved(problem, frozenset(itertools.compress(values, flags)))
        except CannotPartitionError:
            continue
        cuts[cut.need, cut.redo] = cut
    return tuple(Candidate(cut, model.project(cut)) for cut in cuts.values())


def fastest_ps(decisions: Iterable[Candidate], limit_bytes: int) -> int | None:
    """The least time within a peak; ``None`` where no decision has it."""
    return min((c.cut.time_ps for c in decisions if c.projection.peak_bytes <= limit_bytes), default=None)


def _reached(problem: CutProblem) -> frozenset[int]:
    """What backward can come to need: what it reads, and what recomputing that reads."""
    reached: set[int] = set()
    stack = [i for i, value in enumerate(problem) if value.is_required]
    while stack:
        index = stack.pop()
        if index not in reached:
            reached.add(index)
            stack.extend(problem[index].inputs if problem[index].recompute_ps is not None else ())
    return frozenset(reached)


# -- the integer program ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimum:
    """What the solver found. ``bound_ps`` holds for every decision within the budget, whether or not it had the time to
    prove an optimum; infinite where no decision is within it. ``best`` is the decision that it found, replayed."""

    bound_ps: float
    best: Candidate | None
    is_proven: bool
    seconds: float

    @property
    def is_infeasible(self) -> bool:
        return math.isinf(self.bound_ps)


Expression = dict[int, float]  # column -> factor; CONSTANT -> what is added
CONSTANT = -1


def _sum(*parts: tuple[float, Mapping[int, float]]) -> Expression:
    total: Expression = defaultdict(float)
    for factor, expression in parts:
        for column, value in expression.items():
            total[column] += factor * value
    return total


class _Program:
    """Columns and rows of a mixed-integer program under construction."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.upper: list[float] = []
        self.is_integer: list[bool] = []
        self.rows: list[Expression] = []  # each is to be <= 0
        self.is_memory: list[bool] = []  # ... or <= the bytes that the budget leaves

    def column(self, cost: float = 0.0, upper: float = 1.0, *, is_integer: bool = False) -> Expression:
        """A new column, from 0 up."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.is_integer.append(is_integer)
        return {len(self.costs) - 1: 1.0}

    def at_most(self, smaller: Mapping[int, float], larger: Mapping[int, float]) -> None:
        self._add(_sum((1.0, smaller), (-1.0, larger)), is_memory=False)

    def equal(self, one: Mapping[int, float], other: Mapping[int, float]) -> None:
        self.at_most(one, other)
        self.at_most(other, one)

    def within_memory(self, num_bytes: Mapping[int, float]) -> None:
        self._add(dict(num_bytes), is_memory=True)

    def _add(self, expression: Expression, *, is_memory: bool) -> None:
        row = {column: factor for column, factor in expression.items() if factor}
        if is_memory or row.keys() - {CONSTANT} or row.get(CONSTANT, 0) > 0:
            self.rows.append(row)
            self.is_memory.append(is_memory)


ONE: Expression = {CONSTANT: 1.0}
ZERO: Expression = {}


@dataclass(frozen=True)
class _Slot:
    """One op of backward that reads something of forward, and the ops behind it that do not. Bytes are of backward's
    own values."""

    target: int
    uses: frozenset[int]  # values
    reads: frozenset[int]  # storages
    before_bytes: int
    at_bytes: int  # while the op runs
    after_bytes: int  # the most while one of the ops behind it runs


class ExactPeak:
    """The program of one graph under the eager lowering, for any budget."""

    def __init__(
        self,
        joint: JointGraph,
        problem: CutProblem,
        model: MemoryModel,
        negligible_bytes: int = 0,
        followed: frozenset[int] | None = None,
    ) -> None:
        """
        Args:
            joint: the graph.
            problem: its prices and permissions.
            model: its memory model, with ``fuses=False``.
            negligible_bytes: storages of forward up to that size count as nothing, which makes the program smaller and
                lowers its bound.
            followed: the slots inside of which memory is followed; elsewhere it is seen while the op of backward runs
                and after it. ``None``: all.

        Raises:
            ValueError: the model fuses, or an op of backward reads what another changed in place: not in the program.
        """
        if model.fuses:
            raise ValueError("the program follows the replay of the eager lowering; this memory model fuses")
        self.joint, self.problem, self.model = joint, problem, model
        self.values = joint.values
        self.negligible_bytes, self.followed = negligible_bytes, followed
        self.held = frozenset(self.values[i].base for i in joint.forward_outputs) - model.inputs
        self.gradients = frozenset(self.values[i].base for i in joint.backward_outputs)
        self.program = _Program()
        self._alone: dict[int, int] = {}
        self.time_unit = max(1.0, sum((v.save_ps or 0) + (v.recompute_ps or 0) for v in problem) / 1e4)
        self.byte_unit = self._byte_unit()
        self.entry_bytes, self.slots = self._slots()
        self._name_columns()
        self._constrain_values()
        self._constrain_storages()
        self._follow_backward()
        self._follow_forward()

    def _byte_unit(self) -> float:
        """The largest unit in which all sizes are whole, where that is not too small: whole factors are exact."""
        unit = math.gcd(*self.model.sizes, *(self._workspace(i) for i in range(len(self.values)) if self._is_kernel(i)))
        total = sum(self.model.sizes)
        self.is_whole = unit > 0 and total / unit < WHOLE_UNITS
        return float(unit) if self.is_whole else max(1.0, total / WHOLE_UNITS)

    # -- what is decided

    def _is_seen_through(self, index: int) -> bool:
        """A view: who reads it reads what it shows."""
        value, price = self.values[index], self.problem[index]
        return value.kind is OpKind.VIEW and price.save_ps is None and price.recompute_ps == 0

    def _sources(self, inputs: Iterable[int]) -> frozenset[int]:
        """Values of forward, seen through views."""
        found: set[int] = set()
        stack = list(inputs)
        while stack:
            index = stack.pop()
            if self.values[index].side is Side.BACKWARD or self.values[index].role is Role.TANGENT:
                continue
            if self._is_seen_through(index):
                stack.extend(self.values[index].inputs)
            else:
                found.add(index)
        return frozenset(found)

    def _is_kernel(self, index: int) -> bool:
        return self.values[index].kind not in NO_KERNEL

    def _reads(self, index: int) -> frozenset[int]:
        """Storages that a kernel reads."""
        return (
            frozenset(self.values[i].base for i in self.values[index].inputs) if self._is_kernel(index) else frozenset()
        )

    def _owner(self, storage: int) -> int:
        value = self.values[storage]
        return value.inputs[0] if value.kind is OpKind.PART else storage

    def _is_forward_storage(self, index: int) -> bool:
        value = self.values[index]
        is_own = (
            value.base == index and self.model.sizes[index] > self.negligible_bytes and index not in self.model.inputs
        )
        return is_own and value.side is not Side.BACKWARD and value.role is not Role.TANGENT

    def _workspace(self, index: int) -> int:
        """What an op allocates beside its results, as a replay of it alone counts it."""
        if index not in self._alone:
            peak_bytes, made, _ = _Replay(self.model, [index], set(), {}, 0, set(), frozenset(), is_backward=True).run()
            self._alone[index] = peak_bytes - sum(self.model.sizes[i] for i in made)
        return self._alone[index]

    # -- backward's own values, which no decision changes

    def _slots(self) -> tuple[int, tuple[_Slot, ...]]:
        targets = self._targets()
        own = {i for i in self.joint.backward_values if self.values[i].base == i}
        own |= {v.index for v in self.values if v.role is Role.TANGENT}
        last = {read: at for at, target in enumerate(targets) for read in self._reads(target) if self._is_own(target)}
        alive = {v.index for v in self.values if v.role is Role.TANGENT}
        size = self.model.sizes
        entry = now = sum(size[i] for i in alive)
        slots: list[_Slot] = []
        for at, target in enumerate(targets):
            is_own = self._is_own(target)
            uses = self._sources(self.values[target].inputs if is_own else [target])
            uses = frozenset(i for i in uses if not self._is_free(i))
            reads = frozenset(i for i in self._reads(target) if self._is_forward_storage(i)) if is_own else frozenset()
            before, highest = now, now
            if is_own and self._is_kernel(target):
                results = [i for i in (target, *self._parts(target)) if i in own]
                alive.update(results)
                now += sum(size[i] for i in results)
                highest = now + self._workspace(target)
                dead = [i for i in self._reads(target) if last[i] == at and i in alive and i not in self.gradients]
                dead += [i for i in results if i not in last and i not in self.gradients]
                alive.difference_update(dead)
                now -= sum(size[i] for i in dead)
            if uses or reads:
                slots.append(_Slot(target, uses, reads, before, highest, now))
            elif slots:
                slots[-1] = replace(slots[-1], after_bytes=max(slots[-1].after_bytes, highest))
            else:
                entry = max(entry, highest)
        return entry, tuple(slots)

    def _is_own(self, target: int) -> bool:
        return self.values[target].side is Side.BACKWARD

    def _parts(self, index: int) -> list[int]:
        return [i for i in self.values[index].users if self.values[i].kind is OpKind.PART]

    def _targets(self) -> list[int]:
        """What backward is asked for, in the order of schedule.py: its ops, its outputs, what it changes in place."""
        ops = [i for i in self.joint.backward_values if self.values[i].role is Role.NONE]
        writes = [i for i in ops if self.values[i].kind is OpKind.EFFECT]
        order = [i for i in ops if i not in writes]
        if any(read in writes for i in order for read in self.values[i].inputs):
            raise ValueError("an op of backward reads what another changed in place: not in this program")
        outputs = [i for i in self.joint.backward_outputs if not self._is_own(i)]
        return [*order, *outputs, *writes]

    # -- columns

    def _is_free(self, index: int) -> bool:
        """There in backward without a price: an input of the step that the step does not change."""
        value, price = self.values[index], self.problem[index]
        costs = price.save_ps if price.recompute_ps is None else price.recompute_ps
        return value.kind is OpKind.INPUT and costs == 0 and index not in self.joint.mutated_inputs

    def _name_columns(self) -> None:
        self.first_use: dict[int, int] = {}
        for at, slot in enumerate(self.slots):
            for index in slot.uses:
                self.first_use.setdefault(index, at)
        self.saved: dict[int, Expression] = {}
        for index in sorted(_reached(self.problem)):
            value, price = self.values[index], self.problem[index]
            if self._is_free(index):
                self.saved[index] = ONE
            elif value.kind is OpKind.INPUT and price.recompute_ps is not None:
                self.saved[index] = self.program.column(price.recompute_ps / self.time_unit)
            elif price.save_ps is not None and value.side is not Side.BACKWARD:
                self.saved[index] = self.program.column(price.save_ps / self.time_unit, is_integer=True)
        self.redone: dict[int, dict[int, Expression]] = defaultdict(dict)
        self.candidates: list[tuple[int, ...]] = []
        for at, slot in enumerate(self.slots):
            found = self._redone_for(slot, at)
            self.candidates.append(found)
            for index in found:
                price = self.problem[index].recompute_ps or 0
                self.redone[index][at] = self.program.column(price / self.time_unit)

    def _redone_for(self, slot: _Slot, at: int) -> tuple[int, ...]:
        """What can be recomputed in a slot, in the order of the graph."""
        found: set[int] = set()
        stack = list(slot.uses)
        while stack:
            index = stack.pop()
            is_early = self.first_use.get(index, at) >= at
            may_be = self.values[index].kind is not OpKind.INPUT and self.problem[index].recompute_ps is not None
            if index not in found and is_early and may_be:
                found.add(index)
                stack.extend(self._sources(self.values[index].inputs))
        return tuple(sorted(found))

    def _redone(self, index: int, at: int) -> Expression:
        return self.redone[index].get(at, ZERO) if index in self.redone else ZERO

    def _present(self, index: int, at: int) -> Expression:
        """Whether a value is there for what runs in a slot."""
        if index in self.first_use and at >= self.first_use[index]:
            return ONE
        until = (d for t, d in self.redone[index].items() if t <= at) if index in self.redone else ()
        return _sum((1.0, self.saved.get(index, ZERO)), *((1.0, d) for d in until))

    def _constrain_values(self) -> None:
        program = self.program
        for index, at in self.first_use.items():
            until = [(1.0, d) for t, d in self.redone[index].items() if t <= at] if index in self.redone else []
            program.equal(_sum((1.0, self.saved.get(index, ZERO)), *until), ONE)
        for index, columns in self.redone.items():
            total = _sum(*((1.0, d) for d in columns.values()))
            if index not in self.first_use:
                program.at_most(_sum((1.0, self.saved.get(index, ZERO)), (1.0, total)), ONE)
        for at, (slot, found) in enumerate(zip(self.slots, self.candidates, strict=True)):
            readers: dict[int, list[Expression]] = defaultdict(list)
            for index in found:
                for source in self._sources(self.values[index].inputs):
                    readers[source].append(self._redone(index, at))
                    program.at_most(self._redone(index, at), self._present(source, at))
            for index in found:
                if index not in slot.uses:  # as late as possible: where something reads it
                    program.at_most(self._redone(index, at), _sum(*((1.0, d) for d in readers[index])))

    # -- storages

    def _constrain_storages(self) -> None:
        """What is retained after each slot, and that who reads a storage finds it there."""
        self.storages = [i for i in sorted(_reached(self.problem)) if self._is_forward_storage(i)]
        self.storages += [
            part
            for i in self.redone
            for part in self._parts(i)
            if self._is_forward_storage(part) and part not in self.storages
        ]
        self.readers: dict[int, dict[int, list[int]]] = {b: defaultdict(list) for b in self.storages}
        for at, found in enumerate(self.candidates):
            for index in found:
                for read in self._reads(index):
                    if read in self.readers:
                        self.readers[read][at].append(index)
        self.kept: dict[int, list[Expression]] = {b: self._kept(b) for b in self.storages}
        for storage in self.storages:
            saved = self.saved.get(storage, ZERO) if storage in self.held else ZERO
            for at, slot in enumerate(self.slots):
                there = _sum((1.0, self._there(storage, at)), (1.0, saved))
                if storage in slot.reads:
                    self.program.at_most(ONE, there)
                for reader in self.readers[storage].get(at, ()):
                    self.program.at_most(self._redone(reader, at), there)

    def _kept(self, storage: int) -> list[Expression]:
        """``kept[t + 1]`` is what is retained after slot t, ``kept[0]`` what was saved."""
        saved = self.saved.get(storage, ZERO)
        kept = [ZERO if storage in self.held else saved]
        used = [t for t, slot in enumerate(self.slots) if storage in slot.reads or self.readers[storage].get(t)]
        last = max(used, default=-1)
        for at in range(len(self.slots)):
            there = _sum((1.0, kept[-1]), (1.0, self._redone(self._owner(storage), at)))
            if storage in self.gradients:
                kept.append(there)
            elif at >= last or not there:
                kept.append(ZERO)
            elif at not in used and not self._redone(self._owner(storage), at):
                kept.append(kept[-1])  # what would be released here is released at the use before
            else:
                kept.append(self.program.column())
                self.program.at_most(kept[-1], there)
        return kept

    def _there(self, storage: int, at: int) -> Expression:
        """Whether a storage is there for what runs in a slot; of an output of forward, a second copy."""
        return _sum((1.0, self.kept[storage][at]), (1.0, self._redone(self._owner(storage), at)))

    # -- memory

    def _bytes(self, index: int) -> float:
        return self.model.sizes[index] / self.byte_unit

    def _copies(self) -> Expression:
        """Copies of inputs that the step changes in place."""
        copied = [i for i in self.saved if i in self.joint.mutated_inputs and self.problem[i].recompute_ps is None]
        return _sum(*((self._bytes(i), self.saved[i]) for i in copied))

    def _follow_backward(self) -> None:
        program, copies = self.program, self._copies()
        entering = [(self._bytes(b), self.kept[b][0]) for b in self.storages]
        program.within_memory(_sum((1.0, copies), (self.entry_bytes / self.byte_unit, ONE), *entering))
        for at, slot in enumerate(self.slots):
            self._follow_slot(at, slot, copies)
            after = [(self._bytes(b), self.kept[b][at + 1]) for b in self.storages]
            program.within_memory(_sum((1.0, copies), (slot.after_bytes / self.byte_unit, ONE), *after))

    def _follow_slot(self, at: int, slot: _Slot, copies: Expression) -> None:
        """A running sum over the kernels that may be recomputed in a slot, and the op that they are recomputed for."""
        program = self.program
        is_followed = self.followed is None or at in self.followed
        kernels = [i for i in self.candidates[at] if self._is_kernel(i)]
        if not is_followed:
            at_target = [(self._bytes(b), self._at_target(b, at, slot)) for b in self.storages]
            program.within_memory(_sum((1.0, copies), (slot.at_bytes / self.byte_unit, ONE), *at_target))
            return
        levels = {b: self._levels(b, at, slot) for b in self.storages}
        made = defaultdict(list)
        for b in self.storages:
            if self._redone(self._owner(b), at):
                made[self._owner(b)].append(b)
        now = _sum((1.0, copies), (slot.before_bytes / self.byte_unit, ONE))
        parts = []
        for b in self.storages:
            is_made = bool(self._redone(self._owner(b), at))
            parts.append((self._bytes(b), self.kept[b][at] if is_made else levels[b].from_start()))
        now = _sum((1.0, now), *parts)
        for position, kernel in enumerate(kernels):
            changes = [
                (self._bytes(b) * sign, level)
                for b in made[kernel]
                for sign, level in ((1.0, levels[b].from_start()), (-1.0, self.kept[b][at]))
            ]
            if position:
                before = kernels[position - 1]
                for b in {*self._reads(before), *made[before]}:
                    if b in levels:
                        old, new = levels[b].around(before)
                        changes += [(self._bytes(b), new), (-self._bytes(b), old)]
            now = self._running(_sum((1.0, now), *changes))
            workspace = self._workspace(kernel) / self.byte_unit
            program.within_memory(_sum((1.0, now), (workspace, self._redone(kernel, at))))
        at_target = [(self._bytes(b), self._at_target(b, at, slot)) for b in self.storages]
        program.within_memory(_sum((1.0, copies), (slot.at_bytes / self.byte_unit, ONE), *at_target))

    def _at_target(self, storage: int, at: int, slot: _Slot) -> Expression:
        return self._there(storage, at) if storage in slot.reads else self.kept[storage][at + 1]

    def _running(self, total: Expression) -> Expression:
        """A column that is at least the sum; sums stay short that way."""
        if len(total) <= 2:
            return total
        column = self.program.column(upper=math.inf)
        self.program.at_most(total, column)
        return column

    def _levels(self, storage: int, at: int, slot: _Slot) -> _Levels:
        """What a storage takes while each of the kernels of a slot runs that may read it."""
        there, after = self._there(storage, at), self.kept[storage][at + 1]
        if storage in slot.reads:
            return _Levels((), (), self._at_target(storage, at, slot))
        owner = self._owner(storage)
        made_here = [owner] if self._redone(owner, at) and self._is_kernel(owner) else []
        positions = [*made_here, *self.readers[storage].get(at, ())]
        levels: list[Expression] = []
        level = after
        for position in reversed(positions):
            if not there:
                levels.append(ZERO)
                continue
            above = self.program.column()
            self.program.at_most(level, above)
            # Where forward's output is held its readers may read that; only a second copy takes room.
            own = [(-1.0, self.saved.get(storage, ZERO))] if storage in self.held else []
            self.program.at_most(_sum((1.0, self._redone(position, at)), *own), above)
            level = above
            levels.append(level)
        return _Levels(tuple(positions), tuple(reversed(levels)), after)

    # -- forward

    def _follow_forward(self) -> None:
        """Forward's instants: what it computes anyway, what it computes because it is saved, and what is held."""
        program, values, copies = self.program, self.values, self._copies()
        runs = self._run_in_forward()
        kernels = [i for i in sorted(runs) if self._is_kernel(i)]
        storages = [b for b in range(len(values)) if self._is_forward_storage(b) and self._owner(b) in runs]
        rows: list[list[tuple[float, Expression]]] = [[(1.0, copies)] for _ in kernels]
        place = {kernel: position for position, kernel in enumerate(kernels)}
        read_at: dict[int, list[int]] = defaultdict(list)
        for kernel in kernels:
            for read in self._reads(kernel):
                read_at[read].append(kernel)
        for storage in storages:
            owner = self._owner(storage)
            readers = [owner, *read_at[storage]]
            is_held = storage in self.held
            level: Expression = ONE if is_held else self.saved.get(storage, ZERO)
            following = len(kernels)
            for reader in reversed(readers):  # from the end of forward to where the storage is made
                for position in range(place[reader] + 1, following):
                    rows[position].append((self._bytes(storage), level))
                following = place[reader] + 1
                level = self._either(level, runs[reader])
            rows[place[owner]].append((self._bytes(storage), level))
        outputs = sum(self._bytes(b) for b in self.held)
        for kernel, row in zip(kernels, rows, strict=True):
            row.append((self._workspace(kernel) / self.byte_unit, runs[kernel]))
            row.append((-outputs, ONE))  # what the budget leaves counts them as held, which is so in backward
            program.within_memory(_sum(*row))

    def _either(self, one: Expression, other: Expression) -> Expression:
        if ONE in (one, other):
            return ONE
        if not one or one == other:
            return other
        column = self.program.column()
        self.program.at_most(one, column)
        self.program.at_most(other, column)
        return column

    def _run_in_forward(self) -> dict[int, Expression]:
        """What forward computes: all that its outputs need, and what is saved of the rest."""
        values, program = self.values, self.program
        always: set[int] = set()
        stack = list(self.joint.forward_outputs)
        stack += [v.index for v in values if v.kind is OpKind.EFFECT and v.side is Side.FORWARD]
        while stack:
            index = stack.pop()
            if index not in always:
                always.add(index)
                stack.extend(values[index].inputs)
        runs: dict[int, Expression] = {i: ONE for i in always if values[i].kind is not OpKind.INPUT}
        rest = [v.index for v in values if v.side is not Side.BACKWARD and v.kind is not OpKind.INPUT]
        for index in rest:
            if index not in runs:
                runs[index] = program.column()
                program.at_most(self.saved.get(index, ZERO), runs[index])
        for index in rest:
            for source in values[index].inputs:
                if source in runs and runs[source] is not ONE:
                    program.at_most(runs[index], runs[source])
        return runs

    # -- solving

    def solve(self, budget_bytes: int, time_limit_s: float = 60.0, gap: float = 1e-6) -> Optimum:
        """The least time within a budget up to a relative gap, or the bound that was reached when the time was up."""
        program = self.program
        held_bytes = self.model.baseline_bytes + sum(self.model.sizes[b] for b in self.held)
        room = (budget_bytes - held_bytes) / self.byte_unit
        room = math.floor(room) if self.is_whole else room
        upper = np.array(
            [
                (room if memory else 0.0) - row.get(CONSTANT, 0.0)
                for row, memory in zip(program.rows, program.is_memory, strict=True)
            ]
        )
        entries = [
            (at, column, factor)
            for at, row in enumerate(program.rows)
            for column, factor in row.items()
            if column != CONSTANT
        ]
        rows, columns, factors = (np.array(part) for part in zip(*entries, strict=True))
        matrix = csr_array((factors, (rows, columns)), shape=(len(program.rows), len(program.costs)))
        started = time.perf_counter()
        found = milp(
            np.array(program.costs),
            constraints=LinearConstraint(matrix, -np.inf, upper),
            integrality=np.array(program.is_integer, dtype=int),
            bounds=Bounds(0, np.array(program.upper)),
            options={"time_limit": time_limit_s, "mip_rel_gap": gap},
        )
        return self._optimum(found, time.perf_counter() - started)

    def _optimum(self, found: object, seconds: float) -> Optimum:
        status, solution, bound = found.status, found.x, found.mip_dual_bound  # type: ignore[attr-defined]
        if status == 2:
            return Optimum(math.inf, None, True, seconds)
        if status not in (0, 1):
            raise RuntimeError(f"HiGHS ended with {found.message}")  # type: ignore[attr-defined]
        best = None
        if solution is not None:
            columns = {i: next(iter(c)) for i, c in self.saved.items() if c is not ONE}
            saved = frozenset(i for i, column in columns.items() if solution[column] > 0.5)
            cut = cut_of_saved(self.problem, saved)
            best = Candidate(cut, self.model.project(cut))
        return Optimum((bound or 0.0) * self.time_unit, best, status == 0, seconds)

    def too_high_in(self, decision: Candidate, budget_bytes: int) -> frozenset[int]:
        """The slots in which something is recomputed in more memory than the budget."""
        index_of = {value.name: value.index for value in self.values}
        slot_of = {slot.target: at for at, slot in enumerate(self.slots)}
        found: set[int] = set()
        at: int | None = None
        for instant in reversed(decision.projection.timeline):
            index = index_of[instant.name]
            if not instant.is_backward:
                break
            if self._is_own(index):
                at = slot_of.get(index)
            elif instant.bytes > budget_bytes and at is not None:
                found.add(at)
        return frozenset(found)


def optimum(
    joint: JointGraph,
    problem: CutProblem,
    model: MemoryModel,
    budget_bytes: int,
    time_limit_s: float,
    negligible_bytes: int = 0,
    gap: float = 1e-6,
) -> Optimum:
    """The least time within a budget, by a program that starts small: it follows memory inside of a slot, and counts
    storages of up to ``negligible_bytes``, once the solution of a smaller one turned out to need too much there.

    ``is_proven`` says that the solver finished and that its decision, replayed, is within the budget: no decision is
    faster. The bound holds in any case.
    """
    followed: frozenset[int] = frozenset()
    bound_ps, best, started = 0.0, None, time.perf_counter()
    while True:
        program = ExactPeak(joint, problem, model, negligible_bytes, followed)
        left_s = time_limit_s - (time.perf_counter() - started)
        found = program.solve(budget_bytes, max(left_s, 0.01), gap)
        bound_ps = max(bound_ps, found.bound_ps)
        fits = found.best is not None and found.best.projection.peak_bytes <= budget_bytes
        if fits and found.best is not None and (best is None or found.best.cut.time_ps < best.cut.time_ps):
            best = found.best
        seconds = time.perf_counter() - started
        too_high = frozenset() if found.best is None else program.too_high_in(found.best, budget_bytes)
        is_over = found.is_infeasible or fits or seconds > time_limit_s
        if is_over or (too_high <= followed and not negligible_bytes):
            return Optimum(bound_ps, best, found.is_proven and (fits or found.is_infeasible), seconds)
        if too_high <= followed:
            negligible_bytes //= 8  # what did not count makes the difference
        followed |= too_high


@dataclass(frozen=True)
class _Levels:
    """What a storage takes in a slot: while each kernel that reads it runs, and after the last of them."""

    positions: tuple[int, ...]
    levels: tuple[Expression, ...]
    last: Expression

    def from_start(self) -> Expression:
        return self.levels[0] if self.levels else self.last

    def around(self, kernel: int) -> tuple[Expression, Expression]:
        """While a kernel runs, and behind it."""
        if kernel not in self.positions:
            return self.last, self.last
        at = bisect.bisect_left(self.positions, kernel)
        behind = self.levels[at + 1] if at + 1 < len(self.levels) else self.last
        return self.levels[at], behind
