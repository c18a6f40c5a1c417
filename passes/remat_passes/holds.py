"""Holds: the ways in which each block of a chain can be held, with their bytes and times.

The cut, with some narrow points kept, falls apart into one cut for each block between them, so the vertices of its hull
name for each block what is worth saving at each price of a byte. What a block needs while its backward runs is read off
a replay of the whole step (memory.py), so the chain knows fusion, gradients and everything else that the replay knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from .again import may_repeat
from .blocks import Blocks, blocks
from .chain import ChainBlock, Option
from .cut import Cut, CutProblem, coarse_sweep, cut_of_saved, keeping
from .joint import JointGraph, Side
from .memory import MemoryModel
from .narrow import narrow_points
from .ops import OpKind, reduces_outer
from .schedule import schedule

# Every narrow point is kept, every second one, and so on: blocks of up to that many at a time are held as one.
STRIDES = (1, 2, 4, 8)

# Decisions are replayed one by one as long as that takes no more than so many values, each about 10 us: a second. Where
# it takes more, runs of different decisions are replayed side by side, and equal ones once.
REPLAYED_VALUES = 104_000
FEWEST_REPLAYS = 4

# Points at which a chain can be cut; with more, the table of chain.py would take longer than all else.
MAX_BOUNDARIES = 127


@dataclass(frozen=True)
class Holds:
    """A graph as a chain."""

    chain: Blocks
    blocks: tuple[ChainBlock, ...]
    always_saved: frozenset[int]  # of the values that belong to no block
    largest_bytes: int  # the highest peak of any option, with all that earlier blocks hold


def holds(joint: JointGraph, problem: CutProblem, model: MemoryModel, points: Sequence[int], max_cuts: int) -> Holds:
    """The chain of a graph.

    Args:
        joint: the graph.
        problem: its prices.
        model: replays decisions.
        points: where it is cut, at least one (see ``boundaries``).
        max_cuts: bounds the work for each stride (see ``cut.sweep``).
    """
    chain = blocks(joint, points)
    runs: list[list[_Run]] = []  # of each decision
    always_saved: frozenset[int] | None = None
    look = _Look(joint, chain)
    for stride in STRIDES:
        kept = points[stride - 1 :: stride]
        if not kept:
            break
        vertices = coarse_sweep(keeping(problem, kept), max_cuts).vertices
        runs += [_runs(problem, chain, look, kept, cut) for cut in vertices]
        if always_saved is None:
            always_saved = frozenset(i for i in vertices[0].saved if chain.block_of[i] is None)
    most = max(FEWEST_REPLAYS, REPLAYED_VALUES // len(joint.values))
    if len(runs) <= most:
        runs = [[replace(run, key=(at, run.first)) for run in part] for at, part in enumerate(runs)]  # each by itself
    replays = runs if len(runs) <= most else _packed(runs, chain.num_blocks, most)
    measured: dict[Hashable, _Measured] = {}
    gradients = _later_gradients(joint, model, chain)
    for replay in replays:
        measured.update(_measure(joint, problem, model, chain, always_saved or frozenset(), replay))
    options: list[list[Option]] = [[] for _ in range(chain.num_blocks)]
    largest_bytes = 0
    for part in runs:
        held_bytes = 0
        for run in part:
            found = measured.get(run.key)
            if found is not None:
                option = _option(run, found, gradients)
                options[run.first].append(option)
                largest_bytes = max(largest_bytes, held_bytes + max(option.peak_bytes, option.forward_peak_bytes))
            held_bytes += run.held_bytes
    passes = _pass_times(joint, problem, chain)
    kept_bytes = _kept_bytes(joint, problem, chain)
    return Holds(
        chain,
        tuple(
            ChainBlock(
                options=_undominated(options[k]),
                input_bytes=problem[points[k - 1]].bytes if k and may_repeat(joint, problem, points[k - 1]) else 0,
                pass_ps=passes[k],
                pass_peak_bytes=min((o.forward_peak_bytes for o in options[k] if o.span == 1), default=0),
                kept_bytes=kept_bytes[k],
            )
            for k in range(chain.num_blocks)
        ),
        always_saved or frozenset(),
        largest_bytes,
    )


def boundaries(joint: JointGraph, problem: CutProblem) -> tuple[int, ...]:
    """The narrow points that a chain can be cut at, if there are any: between two of them lies at least one kernel of
    its own, where there are such, because what pointwise work alone makes of a boundary is no boundary worth its
    bytes."""
    points = [i for i in narrow_points(joint) if problem[i].save_ps is not None]
    fine = blocks(joint, points)
    heavy = {
        fine.block_of[v.index]
        for v in joint.values
        if v.side is Side.FORWARD and v.kind in (OpKind.EXTERN, OpKind.SCATTER)
    }
    kept = [point for block, point in enumerate(points) if block in heavy] or points
    step = -(-len(kept) // MAX_BOUNDARIES) or 1
    return tuple(kept[step - 1 :: step])


@dataclass(frozen=True, slots=True)
class _Run:
    """The blocks between two kept points under one decision. Runs with equal keys look the same from the inside."""

    first: int
    span: int
    held: frozenset[int]
    held_bytes: int
    extra_ps: int
    key: Hashable


@dataclass(frozen=True, slots=True)
class _Measured:
    """The peaks of one run, less what is there anyway and what earlier runs hold, and where they were measured."""

    end: int  # the block behind the run
    forward_bytes: int
    backward_bytes: int


class _Look:
    """What the blocks of a graph look like, so that equal ones are measured once."""

    def __init__(self, joint: JointGraph, chain: Blocks) -> None:
        self.members: list[list[int]] = [[] for _ in range(chain.num_blocks)]
        place: dict[int, int] = {}
        for index, block in enumerate(chain.block_of):
            if block is not None:
                place[index] = len(self.members[block])
                self.members[block].append(index)
        numbers: dict[Hashable, int] = {}
        self.number_of: list[int] = []  # equal for equal blocks
        outputs = {joint.values[i].base for i in (*joint.forward_outputs, *joint.backward_outputs)}
        for block, members in enumerate(self.members):

            def seen(index: int, block: int = block) -> Hashable:
                other = chain.block_of[index]
                return joint.values[index].sizes if other is None else (other - block, place[index])

            looks = tuple(
                (
                    (value := joint.values[i]).op,
                    value.side,
                    value.sizes,
                    value.dtype,
                    value.bytes,
                    i in outputs,
                    value.kind is OpKind.REDUCTION and reduces_outer(joint.nodes[i]),
                    tuple(seen(operand) for operand in value.inputs),
                )
                for i in members
            )
            self.number_of.append(numbers.setdefault(looks, len(numbers)))

    def key(self, first: int, span: int, decided: bytearray) -> Hashable:
        """The blocks from ``first`` on with what is decided of each of their values."""
        return (
            tuple(self.number_of[first : first + span]),
            bytes(decided[i] for members in self.members[first : first + span] for i in members),
        )


_SAVED, _REDONE = 1, 2


def _runs(problem: CutProblem, chain: Blocks, look: _Look, kept: Sequence[int], cut: Cut) -> list[_Run]:
    """What each run of blocks between two kept points holds in a decision."""
    number = {point: k for k, point in enumerate(chain.boundaries)}
    starts = [0, *(number[point] + 1 for point in kept)]
    spans = [end - start for start, end in itertools.pairwise([*starts, chain.num_blocks])]
    run_of = [run for run, span in enumerate(spans) for _ in range(span)]
    reads = {point: run + 1 for run, point in enumerate(kept)}  # a kept point is held by the run that reads it
    held: list[set[int]] = [set() for _ in starts]
    extra_ps = [0] * len(starts)
    decided = bytearray(len(problem))
    saved = cut.saved
    for index in saved | cut.redo:
        decided[index] = _SAVED if index in saved else _REDONE
        block = chain.block_of[index]
        if block is None:
            continue
        run = reads.get(index, run_of[block])
        extra_ps[run] += (problem[index].save_ps if index in saved else problem[index].recompute_ps) or 0
        held[run].update([index] if index in saved else [])
    return [
        _Run(
            first=first,
            span=spans[run],
            held=frozenset(held[run]),
            held_bytes=sum(problem[i].bytes for i in held[run]),
            extra_ps=extra_ps[run],
            key=look.key(first, spans[run], decided),
        )
        for run, first in enumerate(starts)
    ]


def _packed(decisions: Sequence[Sequence[_Run]], num_blocks: int, most: int) -> list[list[_Run]]:
    """Runs of different decisions side by side, so that ``most`` replays of the whole step measure as many kinds of
    them as they can: kinds with many runs first, and of those with one the fastest and the smallest."""
    kinds: dict[Hashable, list[tuple[int, _Run]]] = {}
    for at, decision in enumerate(decisions):
        for run in decision:
            kinds.setdefault(run.key, []).append((min(at, len(decisions) - 1 - at), run))
    rows: list[list[_Run | None]] = [[None] * num_blocks for _ in range(most)]
    for found in sorted(kinds.values(), key=lambda found: (-len(found), found[0][0])):
        nearest = sorted((run for _, run in found), key=lambda run: abs(2 * run.first + run.span - num_blocks))
        _place(rows, nearest)
    filler = {run.first: run for run in decisions[0]}  # the first stride holds each block by itself
    packed = []
    for row in rows:
        if any(row):
            held = [row[block] or filler[block] for block in range(num_blocks)]
            packed.append(list(dict.fromkeys(held)))
    return packed


def _place(rows: Sequence[list[_Run | None]], runs: Sequence[_Run]) -> None:
    """Put one of the runs into the first row that has room for it."""
    for row in rows:
        for run in runs:
            if not any(row[run.first : run.first + run.span]):
                row[run.first : run.first + run.span] = [run] * run.span
                return


def _measure(
    joint: JointGraph,
    problem: CutProblem,
    model: MemoryModel,
    chain: Blocks,
    always_saved: frozenset[int],
    runs: Sequence[_Run],
) -> dict[Hashable, _Measured]:
    """Replay the step in which each run of blocks holds what it names."""
    cut = cut_of_saved(problem, always_saved.union(*(run.held for run in runs)))
    run_of = [number for number, run in enumerate(runs) for _ in range(run.span)]
    forward, backward = _peaks(joint, model, chain, run_of, [run.held_bytes for run in runs], cut)
    return {
        run.key: _Measured(run.first + run.span, forward[number], backward[number]) for number, run in enumerate(runs)
    }


def _option(run: _Run, measured: _Measured, gradients: Sequence[int]) -> Option:
    """The run as an option; what it was measured as may stand elsewhere, with more or fewer gradients made before."""
    return Option(
        span=run.span,
        held=run.held,
        held_bytes=run.held_bytes,
        extra_ps=run.extra_ps,
        peak_bytes=measured.backward_bytes + gradients[run.first + run.span] - gradients[measured.end],
        forward_peak_bytes=measured.forward_bytes,
    )


def _later_gradients(joint: JointGraph, model: MemoryModel, chain: Blocks) -> list[int]:
    """Bytes of the gradients that the blocks from each one on hand out."""
    made = [0] * (chain.num_blocks + 1)
    for index in {joint.values[i].base for i in joint.backward_outputs} - model.inputs:
        block = chain.block_of[index]
        if block is not None:
            made[block] += model.sizes[index]
    return list(itertools.accumulate(reversed(made)))[::-1]


def _peaks(
    joint: JointGraph, model: MemoryModel, chain: Blocks, run_of: Sequence[int], held_bytes: Sequence[int], cut: Cut
) -> tuple[list[int], list[int]]:
    """The peaks of each run in forward and in backward, less what is there anyway and what earlier runs hold."""
    before = [0, *itertools.accumulate(held_bytes)]
    forward, backward = [0] * len(held_bytes), [0] * len(held_bytes)
    index_of = {value.name: value.index for value in joint.values}
    reached = len(held_bytes) - 1  # once backward has freed something of a run, no later run's share is all there
    order = schedule(joint, cut, early=False)  # as a later pass over the blocks runs, which is in backward
    for instant in model.project(cut, order).timeline:
        block = chain.block_of[index_of[instant.name]]
        if block is None and not instant.is_backward:
            continue
        run = reached if block is None else run_of[block]
        if instant.is_backward:
            run = reached = min(run, reached)
        peaks = backward if instant.is_backward else forward
        peaks[run] = max(peaks[run], instant.bytes - model.baseline_bytes - before[run])
    return forward, backward


def _pass_times(joint: JointGraph, problem: CutProblem, chain: Blocks) -> list[int]:
    times = [0] * chain.num_blocks
    for value in joint.values:
        block = chain.block_of[value.index]
        if value.side is Side.FORWARD and block is not None:
            times[block] += problem[value.index].recompute_ps or 0
    return times


def _kept_bytes(joint: JointGraph, problem: CutProblem, chain: Blocks) -> list[int]:
    """What stays of each block where it is dropped, because it may not be computed again and what may be, or backward,
    reads it. A narrow point counts for the block behind it."""
    kept_bytes = [0] * chain.num_blocks
    behind = {point: k + 1 for k, point in enumerate(chain.boundaries)}
    for value in joint.values:
        block = chain.block_of[value.index]
        if value.side is Side.BACKWARD or block is None or may_repeat(joint, problem, value.index):
            continue
        if any(joint.values[i].side is Side.BACKWARD or may_repeat(joint, problem, i) for i in value.users):
            kept_bytes[behind.get(value.index, block)] += problem[value.index].bytes
    return kept_bytes


def _undominated(options: Sequence[Option]) -> tuple[Option, ...]:
    kept: list[Option] = []
    for option in options:
        if not any(option.is_beaten_by(other) for other in kept):
            kept = [other for other in kept if not other.is_beaten_by(option)] + [option]
    return tuple(kept)
