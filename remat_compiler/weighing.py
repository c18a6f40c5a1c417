"""Weighing: the ways to run one step - as it is, in slices, its tail in slices - under one limit.

Which way is worth a search is decided in ``remat_passes.candidates``; here the ways are looked at, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from remat_passes.batch import BatchAxes
from remat_passes.candidates import Found, Weighed, slice_counts, smallest, weigh
from remat_passes.cost import PS_PER_US
from remat_passes.errors import BudgetInfeasibleError
from remat_passes.plan import FrontierPoint, StepCandidate
from remat_passes.search import Candidate, Choice, refusal

from .split_choice import SplitChoice, SplitWay
from .staged import Staged

Part = Literal["step", "tail"]  # what runs in slices

# The most slices of a tail. Its rows are many, and in so many slices what is left of it is small beside the rest.
MAX_TAIL_SLICES = 64


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a step: what of it runs in slices, and in how many."""

    part: Part
    num_slices: int


UNSPLIT = Way("step", 1)


@dataclass(frozen=True)
class Answers:
    """What was found out about the ways to run one graph. It holds in a later trial too (trials.py), which has another
    limit for one way."""

    fastest: dict[Way, Found] = field(default_factory=dict)
    bounds_ps: dict[tuple[Way, int], int | None] = field(default_factory=dict)
    found: dict[tuple[Way, int], Found | None] = field(default_factory=dict)
    points: dict[Way, list[FrontierPoint]] = field(default_factory=dict)  # of what was searched last
    smallest_bytes: dict[Way, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """The way that was chosen, and what became of all of them."""

    way: Way
    choice: Choice | SplitChoice
    candidates: tuple[StepCandidate, ...]
    others: tuple[FrontierPoint, ...]  # what was found of the ways that were not chosen


def ladders(axes: Mapping[Part, BatchAxes]) -> list[list[Way]]:
    """The ways with slices, by what runs in them and by their number."""
    found: list[list[Way]] = []
    for part, states in axes.items():
        if part == "step":
            counts: Sequence[int] = slice_counts(states.batch)
        else:
            counts = [2**i for i in range(1, MAX_TAIL_SLICES.bit_length()) if 2**i <= states.batch]
        found.append([*([UNSPLIT] if part == "step" else []), *(Way(part, count) for count in counts)])
    return found if "step" in axes else [[UNSPLIT], *found]


class Weighing:
    """The ways to run one step, each looked at once."""

    def __init__(
        self,
        full: Staged,
        ways: Sequence[Sequence[Way]],
        look: Callable[[Way], SplitWay],
        limit_bytes: Callable[[Way], int],
        answers: Answers,
    ) -> None:
        self.full, self.ways, self._look, self.limit_bytes, self.answers = full, ways, look, limit_bytes, answers
        self._looked: dict[Way, SplitWay] = {}
        self._choices: dict[Way, Choice | SplitChoice] = {}

    def split_way(self, way: Way) -> SplitWay:
        """The step split this way."""
        if way not in self._looked:
            self._looked[way] = self._look(way)
        return self._looked[way]

    def weigh(self) -> Decision | None:
        """The fastest way within its limit, where there is one."""
        chosen, weighed = weigh(self.ways, self)
        chosen = chosen or self._smallest_within()
        if chosen is None:
            return None
        if chosen not in self._choices:  # its plan without recompute fits: the search has it, with all beside it
            assert self._searched(chosen) is not None, "it was found before"
        candidates = tuple(self._candidate(entry, is_chosen=entry.candidate == chosen) for entry in weighed)
        seen = dict.fromkeys((UNSPLIT, *self.answers.points))
        others = tuple(
            point for way in seen if way != chosen for point in self.answers.points.get(way) or self._points(way)
        )
        return Decision(chosen, self._choices[chosen], candidates, others)

    def _smallest_within(self) -> Way | None:
        """The way with the lowest peak, where that is within the limit."""
        way = self._smallest
        if self._smallest_bytes(way) > self.limit_bytes(way):
            return None
        self._choices[way] = self._staged(way).in_least_memory()
        return way

    @cached_property
    def _smallest(self) -> Way:
        """The way with the lowest peak."""
        return smallest(self.ways, self._smallest_bytes)

    def _staged(self, way: Way) -> Staged | SplitWay:
        return self.full if way == UNSPLIT else self.split_way(way)

    def _smallest_bytes(self, way: Way) -> int:
        known = self.answers.smallest_bytes
        if way not in known:
            known[way] = self._found(self._staged(way).smallest).peak_bytes
        return known[way]

    def refusal(self, budget_bytes: int) -> BudgetInfeasibleError:
        """The error for a budget that no way meets: that of the way with the lowest peak."""
        way = self._smallest
        if way != UNSPLIT:
            return self.split_way(way).refusal(budget_bytes)
        projection = self.full.smallest.projection
        gradient_bytes = self.full.model.gradient_bytes
        return refusal(budget_bytes, projection.peak_bytes, projection.peak_values, gradient_bytes)

    def part(self, way: Way) -> float:
        """The part of the batch that is in one slice."""
        return 1 / way.num_slices

    def fastest(self, way: Way) -> Found:
        """The plan that spends no time on memory."""
        known = self.answers.fastest
        if way not in known:
            known[way] = self._found(self._staged(way).fastest)
        return known[way]

    def bound_ps(self, way: Way) -> int | None:
        """A time that no plan within the limit is below; ``None`` where it is known that there is no plan."""
        limit_bytes = self._limit(way)
        known = self.answers.bounds_ps
        if (way, limit_bytes) not in known:
            known[way, limit_bytes] = self._staged(way).bound_ps(limit_bytes)
        return known[way, limit_bytes]

    def rough_bound_ps(self, way: Way) -> int:
        """A lower one that needs no look. Slices that save so much each save no more than that many times it together,
        and compute again at least what the whole step would that saves as much."""
        baseline = self.full.model.baseline_bytes
        room = way.num_slices * max(0, self.limit_bytes(way) - baseline)
        bound_ps = self.full.saving_bound_ps(baseline + room) if way.part == "step" else None
        return (bound_ps or self.full.time_ps(self.full.fastest)) + self._slicing_ps(way)

    def _slicing_ps(self, way: Way) -> int:
        """What slices cost by themselves, from those in fewer and in more that were looked at. It rises with their
        number, and less than in proportion: a loop costs something, however often it runs."""
        own_ps = {UNSPLIT.num_slices: self.full.time_ps(self.full.fastest)}
        own_ps |= {w.num_slices: found.time_ps for w, found in self.answers.fastest.items() if w.part == way.part}
        fewer = max(n for n in own_ps if n <= way.num_slices)
        more = min((n for n in own_ps if n > way.num_slices), default=fewer)
        part = (way.num_slices - fewer) / (more - fewer) if more > fewer else 0
        cost_ps = own_ps[fewer] + part * max(0, own_ps[more] - own_ps[fewer])
        return max(0, round(cost_ps) - own_ps[UNSPLIT.num_slices])

    def search(self, way: Way) -> Found | None:
        """The fastest plan within the limit, where there is one."""
        key = (way, self._limit(way))
        if key not in self.answers.found:
            choice = self._searched(way)
            self.answers.found[key] = None if choice is None else self._found(choice)
        return self.answers.found[key]

    def _searched(self, way: Way) -> Choice | SplitChoice | None:
        limit_bytes = self._limit(way)
        searched = self.full.search_within if way == UNSPLIT else self.split_way(way).search
        choice = searched(limit_bytes)
        if choice is not None:
            self._choices[way] = choice
            self.answers.points[way] = self._points(way)
        return choice

    def _limit(self, way: Way) -> int:
        """Of the step as it is never more than plain Inductor needs."""
        limit_bytes = self.limit_bytes(way)
        return min(limit_bytes, self.full.inductor.projection.peak_bytes) if way == UNSPLIT else limit_bytes

    def _candidate(self, weighed: Weighed[Way], *, is_chosen: bool) -> StepCandidate:
        found = self._found(self._choices[weighed.candidate]) if is_chosen else weighed.found
        return StepCandidate(
            num_microbatches=weighed.candidate.num_slices,
            part=weighed.candidate.part,
            peak_bytes=None if found is None else found.peak_bytes,
            step_us=None if found is None else round(found.time_ps / PS_PER_US, 3),
            chosen=is_chosen,
            verdict="chosen" if is_chosen else weighed.verdict,
        )

    def _found(self, decision: Candidate | Choice | SplitChoice) -> Found:
        if isinstance(decision, SplitChoice):
            return Found(decision.time_ps, decision.peak_bytes)
        candidate = decision.chosen if isinstance(decision, Choice) else decision
        return Found(self.full.time_ps(candidate), candidate.projection.peak_bytes)

    def _points(self, way: Way) -> list[FrontierPoint]:
        choice = self._choices.get(way)
        if isinstance(choice, SplitChoice):
            return [replace(point, chosen=False) for point in self.split_way(way).frontier(choice)]
        return [replace(point, chosen=False) for point in self.full.frontier(choice)]
