"""Repair: plans that are found from the fastest one, a value at a time.

The hull knows one price for all bytes, and the chain keeps the narrow points. Where long skips leave few of them, the
plans are far apart. So a walk starts from the fastest plan and goes down a ladder of limits. At each limit

(1) *drop*: of the saved values that are alive while too much is, the one that costs the least time for the bytes by
    which it lowers the excess is recomputed instead, until the plan fits;
(2) *swap*: where no drop helps, because what was dropped is in the way while it is recomputed, one value is saved again
    and another one is dropped;
(3) *fill*: what was dropped in vain is saved again, the largest gain in time first, as long as the plan fits.

Where the plans of the chain are faster, (1) to (3) start from those: they keep whole boundaries, and seldom use up a
limit.

Each step is judged by a replay (memory.py), and each plan that was replayed is a candidate. Neither the ladder nor the
bound on the work depends on the budget, so the peak that the search chooses does not rise when the budget falls
(docs/decisions/0008-repair-on-a-ladder.md, which has the measurements).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .cut import Cut, CutProblem, cut_of_saved, num_readers, with_saved, without_saved
from .joint import JointGraph, Side
from .memory import MemoryModel, Projection
from .schedule import schedule

# Steps of the ladder between the peak of the fastest plan and what is allocated before the step.
NUM_RUNGS = 24

# Bounds on the work: a replay takes about 5 us a value of the graph (U-Net and GPT of docs/decisions/0008), so a walk
# takes about half a second, on a large graph as well.
MAX_REPLAYS = 96
MAX_VALUES_REPLAYED = 100_000
MAX_DROPS_TRIED = 8  # for one step; the first that helps is taken
MAX_AGAIN_TRIED, MAX_SWAPS_TRIED = 3, 6  # values to save again, and drops for each of them
MAX_FILLS_TRIED = 12  # at one limit

# A value smaller than this part of all bytes decides no peak: it is saved wherever it is needed.
LARGE_PART = 2000

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Repaired:
    """A decision and its replay."""

    cut: Cut
    projection: Projection


@dataclass(frozen=True, slots=True)
class _State:
    """Where the walk stands: what may be saved, and the plan that follows from it."""

    saved: frozenset[int]
    plan: Repaired


@dataclass(frozen=True, slots=True)
class _Clock:
    """The instants of a replay: when each is, and the bytes allocated then.

    Decisions have different kernels, so time is told by the ops that all of them have: instant t of forward runs op t,
    and instant n + b of backward runs op b of the n values, or recomputes something for it.
    """

    times: Numbers
    used: Numbers


def repaired(
    joint: JointGraph,
    problem: CutProblem,
    model: MemoryModel,
    start: Cut,
    top_bytes: int,
    is_beaten: Callable[[int, int], bool],
    other: Callable[[int], Cut | None],
) -> list[Repaired]:
    """The plans on the walk down from ``start``, in the order in which they were found.

    Args:
        joint: the graph, without repetitions.
        problem: its prices, without dead ends (``cut.without_dead_ends``).
        model: replays decisions.
        start: the fastest plan.
        top_bytes: its peak.
        is_beaten: whether plans of another kind are clearly better at a limit (bytes) than a time (ps). It must not
            depend on the budget, nor must ``other``.
        other: such a plan for a limit, ``None`` where there is none. From where the walk is beaten, or fails, each step
            of the ladder starts from it.
    """
    walk = _Walk(joint, problem, model)
    state = walk.begin(start)
    is_ahead = True
    for limit_bytes in ladder(top_bytes, model.baseline_bytes):
        if is_ahead:
            state = walk.drop(state, limit_bytes)
            fits = state.plan.projection.peak_bytes <= limit_bytes
            is_ahead = fits and not is_beaten(limit_bytes, state.plan.cut.time_ps)
        if not is_ahead:
            cut = other(limit_bytes)
            if cut is None or not walk.may_go_on():
                break
            state = walk.drop(walk.begin(cut), limit_bytes)
        if state.plan.projection.peak_bytes <= limit_bytes:
            walk.fill(state, limit_bytes)
    return list(walk.known.values())


def ladder(top_bytes: int, bottom_bytes: int) -> list[int]:
    """The limits of a walk in bytes, falling, evenly spaced between the peak of the fastest plan and what is allocated
    before the step."""
    return [top_bytes - (top_bytes - bottom_bytes) * rung // NUM_RUNGS for rung in range(1, NUM_RUNGS)]


class _Walk:
    def __init__(self, joint: JointGraph, problem: CutProblem, model: MemoryModel) -> None:
        self.joint, self.problem, self.model = joint, problem, model
        least_bytes = sum(value.bytes for value in problem) // LARGE_PART
        decidable = [i for i, v in enumerate(problem) if v.save_ps is not None and v.recompute_ps is not None]
        self.large = frozenset(i for i in decidable if problem[i].bytes > least_bytes)
        self.small = frozenset(decidable) - self.large
        self.index_of = {value.name: value.index for value in joint.values}
        self.num_values = len(joint.values)
        self.last_use = self._last_uses()
        self.num_replays = min(MAX_REPLAYS, MAX_VALUES_REPLAYED // self.num_values)
        self.known: dict[tuple[frozenset[int], frozenset[int]], Repaired] = {}

    def begin(self, cut: Cut) -> _State:
        """The plan that saves what ``cut`` saves, and small values besides."""
        saved = cut.saved | self.small
        return _State(saved, self._replay(cut_of_saved(self.problem, saved)))

    def drop(self, state: _State, limit_bytes: int) -> _State:
        """(1) and (2), until the plan fits or nothing helps any more."""
        while state.plan.projection.peak_bytes > limit_bytes and self.may_go_on():
            excess = _excess_bytes(state.plan.projection, limit_bytes)
            drops = self._drops(state, limit_bytes)
            tried = (self._moved(state, state.saved - {value}) for value in drops[:MAX_DROPS_TRIED])
            better = next((s for s in tried if s and _excess_bytes(s.plan.projection, limit_bytes) < excess), None)
            better = better or self._swapped(state, drops, limit_bytes, excess)
            if better is None:
                return state
            state = better
        return state

    def fill(self, state: _State, limit_bytes: int) -> None:
        """(3); what is found stays among the known plans, and the walk goes on from where it was."""
        tries = 0
        clock, computed = self._clock(state.plan), self._recomputed_at(state.plan.cut)
        readers = num_readers(self.problem, state.plan.cut)
        for value in self._by_time_of_saving(state):
            cut = with_saved(self.problem, state.plan.cut, readers, value)
            if cut.time_ps >= state.plan.cut.time_ps or self._estimated_peak(state, cut, clock, computed) > limit_bytes:
                continue
            if tries == MAX_FILLS_TRIED or not self.may_go_on():
                return
            tries += 1
            plan = self._replay(cut)
            if plan.projection.peak_bytes <= limit_bytes:
                state = _State(state.saved | {value}, plan)
                clock, computed = self._clock(plan), self._recomputed_at(plan.cut)
                readers = num_readers(self.problem, plan.cut)

    def may_go_on(self) -> bool:
        """Whether there is work left within the bound."""
        return len(self.known) < self.num_replays

    # -- moves

    def _drops(self, state: _State, limit_bytes: int) -> list[int]:
        """Saved values that are alive while too much is, the least time for a byte of the excess first."""
        clock = self._clock(state.plan)
        over = np.maximum(0, clock.used - limit_bytes)
        times, over = clock.times[over > 0], over[over > 0]
        found = []
        for value in sorted(state.plan.cut.saved & self.large):
            is_alive = (times >= value) & (times < self.last_use[value])
            gain = int(np.minimum(over[is_alive], self.problem[value].bytes).sum())
            if gain:
                cut = without_saved(self.problem, state.plan.cut, state.saved, value)
                found.append((max(1, cut.time_ps - state.plan.cut.time_ps) / gain, value))
        return [value for _, value in sorted(found)]

    def _swapped(self, state: _State, drops: list[int], limit_bytes: int, excess: int) -> _State | None:
        """The best exchange of a value that is recomputed while too much is alive for one of the first drops."""
        best: tuple[float, _State] | None = None
        in_the_way = self._in_the_way(state, limit_bytes)[:MAX_AGAIN_TRIED]
        for again, value in itertools.product(in_the_way, drops[:MAX_SWAPS_TRIED]):
            moved = self._moved(state, (state.saved | {again}) - {value}) if self.may_go_on() else None
            if moved is None:
                continue
            gain = excess - _excess_bytes(moved.plan.projection, limit_bytes)
            time_ps = moved.plan.cut.time_ps - state.plan.cut.time_ps
            price = time_ps / gain if time_ps > 0 < gain else time_ps
            if gain > 0 and (best is None or price < best[0]):
                best = (price, moved)
        return best[1] if best is not None else None

    def _in_the_way(self, state: _State, limit_bytes: int) -> list[int]:
        """What is recomputed for the ops that run while too much is alive, the largest gain in time first."""
        clock, computed = self._clock(state.plan), self._recomputed_at(state.plan.cut)
        full = set(clock.times[clock.used > limit_bytes].tolist())
        return [value for value in self._by_time_of_saving(state, least_ps=None) if computed.get(value) in full]

    def _by_time_of_saving(self, state: _State, least_ps: int | None = 0) -> list[int]:
        """The recomputed values by the time that saving them gains, which is more than ``least_ps``."""
        found = []
        readers = num_readers(self.problem, state.plan.cut)
        for value in sorted(state.plan.cut.redo & self.large):
            gain = state.plan.cut.time_ps - with_saved(self.problem, state.plan.cut, readers, value).time_ps
            if least_ps is None or gain > least_ps:
                found.append((-gain, value))
        return [value for _, value in sorted(found)]

    def _moved(self, state: _State, saved: frozenset[int]) -> _State | None:
        """The plan that saves these values; ``None`` where they alone are more than the peak already is."""
        cut = cut_of_saved(self.problem, saved)
        if self.model.baseline_bytes + cut.saved_bytes > state.plan.projection.peak_bytes:
            return None
        return _State(saved, self._replay(cut))

    # -- replays

    def _replay(self, cut: Cut) -> Repaired:
        key = (cut.need, cut.redo)
        if key not in self.known:
            self.known[key] = Repaired(cut, self.model.project(cut))
        return self.known[key]

    def _estimated_peak(self, state: _State, cut: Cut, clock: _Clock, computed: dict[int, int]) -> int:
        """The peak of a plan that saves more, from the replay of one that saves less: a value that is saved is alive
        from forward on, and not only from where it was recomputed."""
        used = clock.used.copy()
        for value in cut.saved - state.plan.cut.saved:
            used[(clock.times >= value) & (clock.times < computed.get(value, 0))] += self.model.sizes[value]
        for value in state.plan.cut.saved - cut.saved:
            used[clock.times >= value] -= self.model.sizes[value]
        return int(used.max())

    # -- time

    def _last_uses(self) -> list[int]:
        """When backward itself reads each storage last; never ending where only recomputations read it."""
        last = [3 * self.num_values] * self.num_values
        for index in self.joint.backward_values:
            for operand in self.joint.values[index].inputs:
                last[self.joint.values[operand].base] = self.num_values + index
        return last

    def _clock(self, plan: Repaired) -> _Clock:
        leads = [(self.index_of[at.name], at.is_backward) for at in plan.projection.timeline]
        times = list(self._times(leads))
        return _Clock(np.array(times[::-1]), np.array([at.bytes for at in plan.projection.timeline]))

    def _recomputed_at(self, cut: Cut) -> dict[int, int]:
        """When each recomputed value is computed."""
        order = schedule(self.joint, cut, early=False).backward  # which does not depend on it
        return dict(zip(reversed(order), self._times([(index, True) for index in order]), strict=True))

    def _times(self, ops: list[tuple[int, bool]]) -> Iterator[int]:
        """The times of ops, from the last to the first; ``True`` for those that run in backward."""
        following = 2 * self.num_values
        for index, is_backward in reversed(ops):
            if is_backward and self.joint.values[index].side is Side.BACKWARD:
                following = self.num_values + index
            yield following if is_backward else index


def _excess_bytes(projection: Projection, limit_bytes: int) -> int:
    """By how much the instants of a step are above a limit, all together."""
    return sum(max(0, at.bytes - limit_bytes) for at in projection.timeline)
