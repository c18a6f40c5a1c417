"""Narrow points: the forward values through which everything that follows must pass.

The residual stream after each block is one. Keeping them turns one long recomputation into many short ones, so that
only one block is recomputed at a time (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016). They are the
dominators of the loss in the forward graph of activations (Cooper, Harvey, Kennedy: A Simple, Fast Dominance
Algorithm).
"""

from __future__ import annotations

import networkx as nx

from .joint import JointGraph

ROOT = -1


def narrow_points(joint: JointGraph) -> tuple[int, ...]:
    """Indices of the dominators of the forward outputs among the activations, in order; views stand for their base."""
    activations = joint.activations
    exits = {i for i in joint.forward_outputs if i in activations}
    if not exits:
        return ()
    graph = nx.DiGraph()
    for index in sorted(activations):
        feeds = [i for i in joint.values[index].inputs if i in activations]
        graph.add_edges_from((feed, index) for feed in feeds or [ROOT])
    sink = len(joint.values)
    graph.add_edges_from((index, sink) for index in exits)
    dominators = nx.immediate_dominators(graph, ROOT)
    found, index = set(), dominators.get(sink, ROOT)
    while index is not None and index != ROOT:
        found.add(joint.values[index].base)
        index = dominators.get(index, ROOT)
    return tuple(i for i in sorted(found) if joint.values[i].bytes)
