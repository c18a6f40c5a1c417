"""The chain: which boundaries to keep, what each block holds, and what to nest, for every amount of memory at once.

A step over blocks 0..n is a forward pass and then backward from the last block to the first. A pass over a block either
*holds* what one of the block's options names until the block's backward, or *drops* everything. What was dropped is
passed over again, from the last boundary that was held, and that second pass has the same choice again - so a value can
be computed more than twice, and memory goes below the square root of the number of blocks. With C(s, t, m) the least
additional time of blocks s..t in m bytes, the input of s not counted:

    (1) hold   C(s, t, m) = min over options o    extra(o) + C(s + span(o), t, m - held(o))        if peak(o) <= m
    (2) drop   C(s, t, m) = min over s < r <= t   pass(s..r-1) + C(r, t, m - input(s)) + C(s, r - 1, m)

What may not be computed again (random draws, MUST_SAVE) is kept through a drop: its bytes count as those of the input
do. It is there before every pass but the first, so it counts beside what such a pass needs, too; those passes are the
ones that do not go to the end of the chain.

This is the recurrence of rotor with several ways to hold a block, or several blocks as one (Beaumont, Eyraud-Dubois,
Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous chains, 2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

UNREACHABLE = np.int64(2**60)  # three of them still fit into 64 bits

Times: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to hold a block, or ``span`` blocks as one. Bytes do not count what other blocks hold."""

    span: int
    held: frozenset[int]  # values, the block's input among them where its backward reads it
    held_bytes: int  # from the block's forward to its backward
    extra_ps: int  # saving and recomputing
    peak_bytes: int  # of its backward, what it holds and the gradients of later blocks among them
    forward_peak_bytes: int

    def is_beaten_by(self, other: Option) -> bool:
        """Whether the other option of the same blocks is as good in everything."""
        mine = (self.held_bytes, self.extra_ps, self.peak_bytes, self.forward_peak_bytes)
        its = (other.held_bytes, other.extra_ps, other.peak_bytes, other.forward_peak_bytes)
        return self.span == other.span and all(a <= b for a, b in zip(its, mine, strict=True))


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """One block of the chain; its options begin here."""

    options: tuple[Option, ...]
    input_bytes: int  # 0 where it may not be computed again, and counts among what is kept
    pass_ps: int  # computing it once
    pass_peak_bytes: int  # while it is computed and nothing of it is held but what is kept
    kept_bytes: int = 0  # of what may not be computed again: from the first pass to the backward of the block


@dataclass(frozen=True, slots=True)
class Hold:
    """The blocks from ``first`` on are held by an option."""

    first: int
    option: Option


@dataclass(frozen=True, slots=True)
class Drop:
    """The blocks ``first`` to ``until`` - 1 are dropped; ``again`` passes over them anew in backward."""

    first: int
    until: int
    again: ChainPlan


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """One pass over a range of blocks, in their order."""

    steps: tuple[Hold | Drop, ...]


class Chain:
    """The table C of one chain, with memory in units of ``unit_bytes``."""

    def __init__(self, chain: Sequence[ChainBlock], num_units: int, unit_bytes: int) -> None:
        self.chain, self.num_units, self.unit_bytes = tuple(chain), num_units, unit_bytes
        n = len(self.chain)
        self.pass_ps: Times = np.concatenate(([0], np.cumsum([block.pass_ps for block in self.chain]))).astype(np.int64)
        self.pass_peaks: Times = np.array([block.pass_peak_bytes for block in self.chain], dtype=np.int64)
        self.kept_before: Times = np.concatenate(([0], np.cumsum([block.kept_bytes for block in self.chain])))
        self.best: Times = np.full((n, n, num_units + 1), UNREACHABLE, dtype=np.int64)  # [s, t] is C(s, t, .)
        for length in range(n):
            for first in range(n - length):
                self._fill(first, first + length)

    def _units(self, num_bytes: int) -> int:
        return -(-num_bytes // self.unit_bytes)

    def _fill(self, first: int, last: int) -> None:
        best = self.best[first, last]
        for option in self.chain[first].options:
            if first + option.span - 1 <= last:
                start, times = self._hold(first, last, option)
                np.minimum(best[start:], times, out=best[start:])
        if last > first:
            start, rows = self._drops(first, last)
            np.minimum(best[start:], rows.min(axis=0, initial=UNREACHABLE), out=best[start:])

    def _hold(self, first: int, last: int, option: Option) -> tuple[int, Times]:
        """(1) for one option, from the least memory on in which it runs."""
        held, end = self._units(option.held_bytes), self.num_units + 1
        following = first + option.span
        forward_peak_bytes = option.forward_peak_bytes + self._kept_ahead_bytes(following, last)
        start = min(end, max(self._units(option.peak_bytes), self._units(forward_peak_bytes), held))
        if following > last:
            return start, np.full(end - start, option.extra_ps, dtype=np.int64)
        return start, self.best[following, last, start - held : end - held] + option.extra_ps

    def _drops(self, first: int, last: int) -> tuple[int, Times]:
        """(2) from the least memory on in which the blocks can be passed over, one row for each r."""
        end = self.num_units + 1
        kept_bytes = self.kept_before[first + 1 : last + 1] - self.kept_before[first]
        held: Times = -(-(self.chain[first].input_bytes + kept_bytes) // self.unit_bytes)
        start = min(end, max(int(held[0]), self._units(self._pass_peak_bytes(first, last))))
        later = self._with_less(self.best[first + 1 : last + 1, last], held, start)
        again = self.best[first, first:last, start:]
        passed = self.pass_ps[first + 1 : last + 1] - self.pass_ps[first]
        return start, later + again + passed[:, None]

    def _with_less(self, rows: Times, less: Times, start: int) -> Times:
        """Each row from ``start`` on, at as many units less as its entry of ``less`` says."""
        end = self.num_units + 1
        if less[0] == less[-1]:
            return rows[:, start - less[0] : end - less[0]]
        columns = np.arange(start, end)[None, :] - less[:, None]
        return np.where(columns < 0, UNREACHABLE, np.take_along_axis(rows, np.maximum(columns, 0), axis=1))

    def _pass_peak_bytes(self, first: int, last: int) -> int:
        """While one of the blocks is passed over, the last one not among them."""
        peaks = self.pass_peaks[first:last] + self.kept_before[first:last] - self.kept_before[first]
        if last < len(self.chain) - 1:
            peaks = peaks + self.kept_before[last + 1] - self.kept_before[first + 1 : last + 1]
        return int(peaks.max())

    def _kept_ahead_bytes(self, first: int, last: int) -> int:
        """What is there of the blocks ``first`` to ``last`` before a pass that ends with them comes to them."""
        return self._kept_bytes(first, last + 1) if last < len(self.chain) - 1 else 0

    def _kept_bytes(self, first: int, until: int) -> int:
        return int(self.kept_before[until] - self.kept_before[first])

    def breakpoints(self) -> list[int]:
        """The amounts of memory from which on a faster plan exists, from the largest to the smallest."""
        times = self.best[0, len(self.chain) - 1]
        earlier = np.concatenate(([UNREACHABLE], times[:-1]))
        return [int(units) for units in np.flatnonzero((times < earlier) & (times < UNREACHABLE))[::-1]]

    def extra_ps(self, units: int) -> int:
        """The least additional time of the whole chain in that much memory."""
        return int(self.best[0, len(self.chain) - 1, units])

    def plan(self, units: int) -> ChainPlan:
        """The fastest plan in that much memory."""
        return ChainPlan(tuple(self._steps(0, len(self.chain) - 1, units)))

    def _steps(self, first: int, last: int, units: int) -> Iterator[Hold | Drop]:
        while first <= last:
            option = self._option_of(first, last, units)
            if option is not None:
                yield Hold(first, option)
                units -= self._units(option.held_bytes)
                first += option.span
                continue
            start, rows = self._drops(first, last)
            until = first + 1 + int(np.argmin(rows[:, units - start]))
            yield Drop(first, until, ChainPlan(tuple(self._steps(first, until - 1, units))))
            units -= self._units(self.chain[first].input_bytes + self._kept_bytes(first, until))
            first = until

    def _option_of(self, first: int, last: int, units: int) -> Option | None:
        """The option with which the table's entry is reached; ``None`` where it is reached by dropping."""
        for option in self.chain[first].options:
            if first + option.span - 1 <= last:
                start, times = self._hold(first, last, option)
                if units >= start and times[units - start] == self.best[first, last, units]:
                    return option
        return None
