"""Candidates: in how many slices to run a step, weighed together with the cut.

A step in more slices holds fewer activations and takes longer: weights are read once a slice, kernels are small, sums
pass through memory. A step in fewer slices has to recompute more under the same budget. What a number of slices is
worth only a search for its best cut can tell, so few are searched:

- the plan that spends no time on memory gives a bound: no plan in so many slices is faster, and where it fits, it is
  the best of them. Its peak is nearly a straight line over the part of the batch that is in a slice, so the fewest
  slices with which it fits are found by secants;
- in fewer slices something has to be recomputed, and that is worth a search only where the bound on any plan within
  the limit is clearly below the best time so far. Where the budget cannot be met, it cannot be met in fewer slices;
- but the step as it is holds nothing around a loop (random draws, what is put together), and is asked on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# The part of a step that another number of slices has to promise to be searched: the cost model does not resolve less
# (docs/decisions/0010-slices-and-cut-together.md).
RESOLUTION = 0.005
# The part of a step that a whole ladder has to promise: a second body is built for each of its candidates.
WORTH_BUILDING = 0.02
# The longest slices of two neighbours on the ladder differ by this factor or one sample: 25 candidates for a batch of
# 1024.
RUNG = 1.25
# Guesses by secant before the rest of a ladder is bisected: on a straight line two, and one for the neighbour.
MAX_SECANTS = 4

TOO_LARGE = "the budget cannot be met"
TOO_SLOW = "no plan within the budget is clearly faster than the chosen one"

C = TypeVar("C", bound=Hashable)
Asked = TypeVar("Asked", contravariant=True)


@dataclass(frozen=True, slots=True)
class Found:
    """The time of a plan and its projected peak."""

    time_ps: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Weighed(Generic[C]):
    """A candidate and what became of it; ``found`` is a plan of it, where one was worked out."""

    candidate: C
    found: Found | None
    verdict: str


def slice_counts(batch: int) -> tuple[int, ...]:
    """The numbers of slices above one that are worth a look, rising; of those with one longest slice the fewest."""
    counts: list[int] = []
    longest = batch
    while longest > 1:
        wanted = max(1, min(longest - 1, int(longest / RUNG)))
        counts.append(-(-batch // wanted))
        longest = -(-batch // counts[-1])
    return tuple(counts)


class Outlook(Protocol[Asked]):
    """What can be asked of a candidate, the cheapest question first."""

    def part(self, candidate: Asked) -> float:
        """The part of the batch that is in one slice."""

    def fastest(self, candidate: Asked) -> Found:
        """The plan that spends no time on memory."""

    def limit_bytes(self, candidate: Asked) -> int:
        """What a plan of it may need."""

    def rough_bound_ps(self, candidate: Asked) -> int:
        """A time that no plan within the limit is below, had without looking at the candidate itself."""

    def bound_ps(self, candidate: Asked) -> int | None:
        """A time that no plan within the limit is below; ``None`` where it is known that there is no plan."""

    def search(self, candidate: Asked) -> Found | None:
        """The fastest plan within the limit, where there is one."""


def weigh(ladders: Sequence[Sequence[C]], outlook: Outlook[C]) -> tuple[C | None, tuple[Weighed[C], ...]]:
    """The candidate whose best plan within its limit is the fastest, and what became of each.

    Args:
        ladders: the candidates, each ladder by rising number of slices; the first of the first is the step as it is.
        outlook: answers for a candidate.
    """
    weighing = _Weighing(outlook, ladders[0][0])
    if not weighing.is_settled_by(ladders[0][0], [c for ladder in ladders for c in ladder][1:]):
        weighing.weigh_ladder(ladders[0])
        for ladder in ladders[1:]:
            weighing.weigh_other(ladder)
    chosen = weighing.best[0] if weighing.best is not None else None
    return chosen, tuple(weighing.weighed(c) for ladder in ladders for c in ladder)


def smallest(ladders: Sequence[Sequence[C]], peak_bytes: Callable[[C], int]) -> C:
    """The candidate with the lowest peak, by few questions.

    More slices hold fewer activations, and more of what is put together from them: from the most slices of a ladder the
    peak falls while fewer are taken, and then it rises.

    Args:
        ladders: as those of ``weigh``.
        peak_bytes: the lowest peak of a candidate.
    """
    lowest = ladders[0][0]
    for ladder in ladders:
        last = ladder[-1]
        for fewer in reversed(ladder[:-1]):
            if peak_bytes(fewer) >= peak_bytes(last):
                break
            last = fewer
        lowest = min(lowest, last, key=peak_bytes)
    return lowest


class _Weighing(Generic[C]):
    def __init__(self, outlook: Outlook[C], whole: C) -> None:
        self.outlook, self.whole = outlook, whole
        self.best: tuple[C, Found] | None = None
        self.floor_ps = 0
        self.found: dict[C, Found] = {}
        self.searched: set[C] = set()
        self.verdicts: dict[C, str] = {}

    def weighed(self, candidate: C) -> Weighed[C]:
        is_chosen = self.best is not None and self.best[0] == candidate
        verdict = "chosen" if is_chosen else self.verdicts.get(candidate, "not clearly faster than the chosen one")
        return Weighed(candidate, self.found.get(candidate), verdict)

    def is_settled_by(self, first: C, others: Sequence[C]) -> bool:
        """Whether the step as it is can be had at hardly any cost: any other candidate takes longer than it may."""
        self.floor_ps = floor_ps = self.outlook.fastest(first).time_ps
        bound_ps = self.outlook.bound_ps(first)
        if bound_ps is None or bound_ps * (1 - RESOLUTION) > floor_ps:
            return False
        if not self._search(first) or self._is_worth(floor_ps):
            return False
        self._say(others, "not looked at: the budget costs the chosen one hardly any time")
        return True

    def weigh_other(self, ladder: Sequence[C]) -> None:
        """Another ladder, where the one before leaves so much to be won."""
        if self.best is not None and self.floor_ps > (1 - WORTH_BUILDING) * self.best[1].time_ps:
            self._say(ladder, "not looked at: the budget costs the chosen one little time")
            return
        self.weigh_ladder(ladder, stops_at_bound=True)

    def _weigh_whole(self) -> None:
        """The step as it is. Its bound costs nothing, and what it is worth decides how far down a ladder is walked."""
        if self.whole not in self.searched and self._promises(self.whole) and not self._search(self.whole):
            self._say([self.whole], TOO_LARGE)

    def weigh_ladder(self, ladder: Sequence[C], *, stops_at_bound: bool = False) -> None:
        """Weigh a ladder from the fewest slices that do without recompute downwards.

        Args:
            ladder: the candidates, by rising number of slices.
            stops_at_bound: fewer slices promise no more than the first that promises too little.
        """
        start, end = self._fewest(ladder)
        self._say(ladder[end:], TOO_SLOW)
        self._say(ladder[start + 1 : end], "more slices than are needed to do without recompute")
        if start < end:
            self._take(ladder[start], self.outlook.fastest(ladder[start]))
        self._weigh_whole()
        for position in reversed(range(start)):
            if ladder[position] in self.found or ladder[position] in self.searched:
                continue
            if not self._promises(ladder[position]):
                ruled_out = ladder[: position + 1] if stops_at_bound else ladder[position : position + 1]
                self._say(ruled_out, TOO_SLOW)
                if stops_at_bound:
                    return
            elif not self._goes_on(ladder, position, can_do_without=start < len(ladder)):
                return

    def _fewest(self, ladder: Sequence[C]) -> tuple[int, int]:
        """The place on a ladder of the fewest slices that do without recompute, and where those end that are worth a
        look, as more slices take longer; twice the same where none do without."""
        too_few, enough = -1, len(ladder)
        before, excess_before = 0.0, -float(self.outlook.limit_bytes(self.whole))  # of nothing at all
        candidate: C = self.whole
        for tries in range(len(ladder) + 1):
            part, excess = self.outlook.part(candidate), self._excess_bytes(candidate)
            if candidate in ladder:
                place = ladder.index(candidate)
                if excess > 0 and not self._is_worth(self.outlook.fastest(candidate).time_ps):
                    return place, place
                too_few, enough = (place, enough) if excess > 0 else (too_few, place)
            if enough - too_few == 1:
                break
            place = (too_few + enough) // 2
            if tries < MAX_SECANTS and excess != excess_before:
                wanted = part - excess * (part - before) / (excess - excess_before)
                fits = (i for i, other in enumerate(ladder) if self.outlook.part(other) <= wanted)
                place = min(max(next(fits, len(ladder)), too_few + 1), enough - 1)
            before, excess_before, candidate = part, excess, ladder[place]
        return enough, len(ladder)

    def _promises(self, candidate: C) -> bool:
        """Whether a plan of it could be clearly faster than the best one."""
        if not self._is_worth(self.outlook.rough_bound_ps(candidate)):
            return False
        bound_ps = self.outlook.bound_ps(candidate)
        return bound_ps is None or self._is_worth(bound_ps)

    def _goes_on(self, ladder: Sequence[C], position: int, *, can_do_without: bool) -> bool:
        """Look at one candidate that has to recompute; whether those in fewer slices are worth a look."""
        candidate = ladder[position]
        if self.outlook.bound_ps(candidate) is None or not self._search(candidate):
            self._say(ladder[: position + 1], TOO_LARGE)
            return False
        if self.best is not None and self.best[0] != candidate and not can_do_without:
            self._say(ladder[:position], "not looked at: in more slices it was slower already")
            return False
        return True

    def _say(self, candidates: Sequence[C], verdict: str) -> None:
        for candidate in candidates:
            if candidate not in self.found:
                self.verdicts.setdefault(candidate, verdict)

    def _excess_bytes(self, candidate: C) -> int:
        return self.outlook.fastest(candidate).peak_bytes - self.outlook.limit_bytes(candidate)

    def _is_worth(self, time_ps: int) -> bool:
        return self.best is None or time_ps < (1 - RESOLUTION) * self.best[1].time_ps

    def _search(self, candidate: C) -> bool:
        """Whether there is a plan within the limit."""
        self.searched.add(candidate)
        found = self.outlook.search(candidate)
        if found is not None:
            self._take(candidate, found)
        return found is not None

    def _take(self, candidate: C, found: Found) -> None:
        self.found[candidate] = found
        if self._is_worth(found.time_ps):
            self.best = (candidate, found)
