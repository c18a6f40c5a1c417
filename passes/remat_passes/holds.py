"""Holds: the ways in which each block of a chain can be held, with their bytes and times.

The cut, with some narrow points kept, falls apart into one cut for each block between them, so the vertices of its hull
name for each block what is worth saving at each price of a byte. What a block needs while its backward runs is read off
a replay of the whole step (memory.py), so the chain knows fusion, gradients and everything else that the replay knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .blocks import Blocks, blocks
from .chain import ChainBlock, Option
from .cut import Cut, CutProblem, coarse_sweep, keeping
from .joint import JointGraph, Side
from .memory import MemoryModel
from .narrow import narrow_points
from .ops import OpKind

# Every narrow point is kept, every second one, and so on: blocks of up to that many at a time are held as one.
STRIDES = (1, 2, 4, 8)

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
    options: list[list[Option]] = [[] for _ in range(chain.num_blocks)]
    always_saved: frozenset[int] | None = None
    largest_bytes = 0
    for stride in STRIDES:
        kept = points[stride - 1 :: stride]
        if not kept:
            break
        vertices = coarse_sweep(keeping(problem, kept), max_cuts).vertices
        for cut in vertices:
            held_bytes = 0
            for first, option in _options(joint, problem, model, chain, kept, cut):
                options[first].append(option)
                largest_bytes = max(largest_bytes, held_bytes + max(option.peak_bytes, option.forward_peak_bytes))
                held_bytes += option.held_bytes
        if always_saved is None:
            always_saved = frozenset(i for i in vertices[0].saved if chain.block_of[i] is None)
    passes = _pass_times(joint, problem, chain)
    return Holds(
        chain,
        tuple(
            ChainBlock(
                options=_undominated(options[k]),
                input_bytes=problem[points[k - 1]].bytes if k else 0,
                pass_ps=passes[k],
                pass_peak_bytes=min((o.forward_peak_bytes for o in options[k] if o.span == 1), default=0),
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


def _options(
    joint: JointGraph, problem: CutProblem, model: MemoryModel, chain: Blocks, kept: Sequence[int], cut: Cut
) -> Iterable[tuple[int, Option]]:
    """What each run of blocks between two kept points holds in a decision, with its first block."""
    number = {point: k for k, point in enumerate(chain.boundaries)}
    starts = [0, *(number[point] + 1 for point in kept)]
    spans = [end - start for start, end in itertools.pairwise([*starts, chain.num_blocks])]
    run_of = [run for run, span in enumerate(spans) for _ in range(span)]
    reads = {point: run + 1 for run, point in enumerate(kept)}  # a kept point is held by the run that reads it
    held: list[set[int]] = [set() for _ in starts]
    extra_ps = [0] * len(starts)
    for index in cut.saved | cut.redo:
        block = chain.block_of[index]
        if block is None:
            continue
        run = reads.get(index, run_of[block])
        extra_ps[run] += (problem[index].save_ps if index in cut.saved else problem[index].recompute_ps) or 0
        held[run].update([index] if index in cut.saved else [])
    held_bytes = [sum(problem[i].bytes for i in values) for values in held]
    forward, backward = _peaks(joint, model, chain, run_of, held_bytes, cut)
    for run, first in enumerate(starts):
        yield (
            first,
            Option(
                span=spans[run],
                held=frozenset(held[run]),
                held_bytes=held_bytes[run],
                extra_ps=extra_ps[run],
                peak_bytes=backward[run],
                forward_peak_bytes=forward[run],
            ),
        )


def _peaks(
    joint: JointGraph, model: MemoryModel, chain: Blocks, run_of: Sequence[int], held_bytes: Sequence[int], cut: Cut
) -> tuple[list[int], list[int]]:
    """The peaks of each run in forward and in backward, less what is there anyway and what earlier runs hold."""
    before = [0, *itertools.accumulate(held_bytes)]
    forward, backward = [0] * len(held_bytes), [0] * len(held_bytes)
    index_of = {value.name: value.index for value in joint.values}
    reached = len(held_bytes) - 1  # once backward has freed something of a run, no later run's share is all there
    for instant in model.project(cut).timeline:
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


def _undominated(options: Sequence[Option]) -> tuple[Option, ...]:
    kept: list[Option] = []
    for option in options:
        if not any(option.is_beaten_by(other) for other in kept):
            kept = [other for other in kept if not other.is_beaten_by(option)] + [option]
    return tuple(kept)
