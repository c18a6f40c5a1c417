"""Narrow points: the forward values through which everything that follows must pass.

The residual stream after each block is one. Keeping them turns one long recomputation into many short ones, so that
only one block is recomputed at a time (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016). They are the
dominators of the loss in the forward graph of activations (Cooper, Harvey, Kennedy: A Simple, Fast Dominance
Algorithm).
"""

from __future__ import annotations

from .joint import JointGraph

ROOT = -1


def narrow_points(joint: JointGraph) -> tuple[int, ...]:
    """Indices of the dominators of the forward outputs among the activations, in order; views stand for their base."""
    activations = joint.activations
    exits = {i for i in joint.forward_outputs if i in activations}
    if not exits:
        return ()
    above = {ROOT: ROOT}  # the immediate dominator of each value, which stands before it

    def common(feeds: list[int]) -> int:
        """The last value that dominates, or is, each of the feeds."""
        found = feeds[0] if feeds else ROOT
        for other in feeds[1:]:
            while found != other:
                found, other = (above[found], other) if found > other else (found, above[other])
        return found

    for index in sorted(activations):
        above[index] = common([i for i in joint.values[index].inputs if i in activations])
    found, index = set(), common(sorted(exits))
    while index != ROOT:
        found.add(joint.values[index].base)
        index = above[index]
    return tuple(i for i in sorted(found) if joint.values[i].bytes)
