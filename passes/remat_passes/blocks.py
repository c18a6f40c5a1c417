"""Blocks: the forward graph between two narrow points, as a chain.

A block reads the narrow point before it, values that belong to no block (weights, masks shared by several), and nothing
else; it hands on its own narrow point. So what one block saves does not change what another one has to recompute, and
the choice over blocks is a problem on a chain (chain.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .joint import JointGraph, Side, Value


@dataclass(frozen=True)
class Blocks:
    """The blocks of a graph, in the order of forward.

    ``boundaries[k]`` is what block k hands to block k + 1; the last block has none. ``block_of[i]`` is the block that
    computes value i, ``None`` for what belongs to no block; for a value of backward it is the block that it belongs to.
    """

    boundaries: tuple[int, ...]
    block_of: tuple[int | None, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.boundaries) + 1


def blocks(joint: JointGraph, boundaries: Sequence[int]) -> Blocks:
    """Cut forward at narrow points, which are given in their order."""
    after = {point: position + 1 for position, point in enumerate(boundaries)}
    block_of: list[int | None] = [None] * len(joint.values)
    for value in joint.values:
        if value.side is not Side.BACKWARD:
            behind = [b for b in (after.get(i, block_of[i]) for i in value.inputs) if b is not None]
            first = 0 if value.index in joint.activations else None
            block_of[value.index] = max(behind, default=first)
    _claim_private(joint, block_of)
    for value in joint.values:
        if value.side is Side.BACKWARD:
            block_of[value.index] = _block_of_backward(joint, value, block_of, after)
    return Blocks(tuple(boundaries), tuple(block_of))


def _claim_private(joint: JointGraph, block_of: list[int | None]) -> None:
    """A mask or a cast of a weight that a single block reads belongs to that block, and is computed again with it."""
    for value in reversed(joint.values):
        if block_of[value.index] is not None or value.side is Side.BACKWARD or not value.inputs:
            continue
        readers = {block_of[user] for user in value.users if joint.values[user].side is not Side.BACKWARD}
        if len(readers) == 1 and value.index not in joint.forward_outputs:
            block_of[value.index] = readers.pop()


def _block_of_backward(
    joint: JointGraph, value: Value, block_of: Sequence[int | None], after: dict[int, int]
) -> int | None:
    """The earliest block whose values or gradients the op reads; narrow points belong to two, so they do not say."""
    found = [block_of[i] for i in value.inputs if i not in after and joint.values[i].base not in after]
    return min((b for b in found if b is not None), default=None)
