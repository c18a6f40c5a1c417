"""torch's own partitioners: what they would save, and their cut of a joint module in two.

They work on the joint module in place, so it is theirs once it is handed over.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any
from unittest import mock

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch.utils._ordered_set import OrderedSet

from remat_passes.cut import Residual

from .graphs import copy_of


def prepare_joint_module(joint_module: fx.GraphModule) -> None:
    """Remove dead code and merge equal ops, as torch's own partitioner does before it decides (in place).

    Nobody runs the joint module, so no code is generated for it: for a large graph that takes longer than both passes.
    """
    joint_module.graph.eliminate_dead_code()
    if functorch_config.cse:
        graph = fx_graph_cse(joint_module.graph)
        graph.owning_module = joint_module
        joint_module._graph = graph


def pinned_to_backward(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that must run in backward although no tangent reaches them (changes in place in backward)."""
    return frozenset(node for node in graph.nodes if partitioners._must_be_in_backward(node))


def inductor_saved_names(
    joint_module: fx.GraphModule, num_fwd_outputs: int, static_lifetime_input_indices: Sequence[int]
) -> frozenset[str]:
    """The values that plain Inductor would save of a prepared joint module (see ``prepare_joint_module``).

    Up to the two modules that it cuts, its partitioner only marks nodes. So it is asked on the module itself, and the
    marks are taken off again: a copy and two modules that nobody runs take four fifths of its time. Where its decision
    is not that of one minimum cut, it is run as a whole.
    """
    static = list(static_lifetime_input_indices)
    marks = {node: node.meta.get("recompute") for node in joint_module.graph.nodes}
    try:
        _mark_as_partitioner_does(joint_module)
        found = partitioners.classify_nodes(joint_module, static, num_fwd_outputs)
        if found.required_bw_nodes and _is_one_minimum_cut(joint_module.graph):
            _measure_distances(joint_module.graph, found)
            with mock.patch.object(nx, "minimum_cut", _minimum_cut):  # torch 2.15 has a flow of its own
                saved = partitioners.choose_saved_values_set(joint_module.graph, found)
            return frozenset(node.name for node in saved)
    finally:
        for node, mark in marks.items():
            if mark is not None:
                node.meta["recompute"] = mark
            else:
                node.meta.pop("recompute", None)
            node.__dict__.pop("dist_from_bw", None)
    return _saved_by_whole_partitioner(joint_module, num_fwd_outputs, static)


def _mark_as_partitioner_does(joint_module: fx.GraphModule) -> None:
    """What ``min_cut_rematerialization_partition`` marks before it classifies, in its order."""
    if partitioners.has_recomputable_ops(joint_module):
        partitioners.cleanup_recompute_tags(joint_module, is_default_partition=False)
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(joint_module)
    for mark in ("force_save_effectful_ops", "force_save_bw_mutation_src"):  # not in every version
        getattr(partitioners, mark, lambda _module: None)(joint_module)


def _is_one_minimum_cut(graph: fx.Graph) -> bool:
    """Whether nothing but the minimum cut decides: no budget of torch's own, no vote among ranks."""
    annotation = getattr(partitioners, "_get_memory_budget_annotation", lambda _node: None)
    has_budget = functorch_config.activation_memory_budget != 1 or any(
        "memory_budget" in node.meta or annotation(node) is not None for node in graph.nodes
    )
    return not (has_budget or functorch_config._sync_decision_cross_ranks)


def _measure_distances(graph: fx.Graph, found: Any) -> None:
    """How many ops lie between each node and backward, where the partitioner looks for it."""
    far = int(1e9)  # its own figure for "never"
    for node in reversed(graph.nodes):
        if node.op == "output":
            node.dist_from_bw = far
        elif not found.is_required_fw(node):
            node.dist_from_bw = 0
        else:
            node.dist_from_bw = min((user.dist_from_bw + 1 for user in node.users), default=far)
            node.dist_from_bw = min(node.dist_from_bw, far)


def _minimum_cut(graph: nx.DiGraph, source: str, sink: str) -> tuple[int, tuple[set[str], set[str]]]:
    """``networkx.minimum_cut`` for networks of which most edges are infinite: the same cut, since what can still reach
    the sink is the same for every maximum flow.

    What infinite edges tie to the source or to the sink is no part of the flow.

    Raises:
        networkx.NetworkXUnbounded: there is a path of infinite edges alone.
    """
    edges = list(graph.edges(data="capacity", default=math.inf))
    first = _tied(source, ((tail, head) for tail, head, capacity in edges if capacity == math.inf))
    last = _tied(sink, ((head, tail) for tail, head, capacity in edges if capacity == math.inf))
    if sink in first:
        raise nx.NetworkXUnbounded("Infinite capacity path, flow unbounded above.")
    rest: dict[tuple[str, str], int] = {}
    for tail, head, capacity in edges:
        if capacity and tail not in last and head not in first:
            ends = (source if tail in first else tail, sink if head in last else head)
            rest[ends] = rest.get(ends, 0) + capacity
    network = Residual(inf=1 + 3 * sum(rest.values()))  # networkx stops there; no flow is as large
    network.add_nodes_from((source, sink))
    for tail, head in rest:
        network.add_edges_from(((tail, head), (head, tail)), capacity=0)
    for (tail, head), capacity in rest.items():
        network.succ[tail][head]["capacity"] = capacity
    boykov_kolmogorov(network, source, sink, residual=network)
    reaching, stack = set(last), [sink]
    while stack:
        head = stack.pop()
        for tail, edge in network.pred[head].items():
            if tail not in reaching and edge["flow"] < edge["capacity"]:
                reaching.add(tail)
                stack.append(tail)
    return network.graph["flow_value"], (set(graph) - reaching, reaching)


def _tied(start: str, ties: Iterable[tuple[str, str]]) -> set[str]:
    """What ties lead to, from their first end to their second."""
    following: dict[str, list[str]] = {}
    for one, other in ties:
        following.setdefault(one, []).append(other)
    found, stack = {start}, [start]
    while stack:
        for node in following.get(stack.pop(), ()):
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def _saved_by_whole_partitioner(
    joint_module: fx.GraphModule, num_fwd_outputs: int, static: list[int]
) -> frozenset[str]:
    """Its partitioner run on a copy, its answer read back."""
    copy = copy_of(joint_module)
    for node in copy.graph.nodes:
        node.meta = dict(node.meta)
    forward, _backward = partitioners.min_cut_rematerialization_partition(
        copy, (), num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
    )
    (outputs,) = forward.graph.find_nodes(op="output")
    flat = torch.utils._pytree.arg_tree_leaves(*outputs.args)
    return frozenset(node.name for node in flat[num_fwd_outputs:] if isinstance(node, fx.Node))


def extract_modules(
    joint_module: fx.GraphModule,
    saved: Sequence[fx.Node],
    recomputed: frozenset[fx.Node],
    num_fwd_outputs: int,
    static_inputs: Sequence[fx.Node],
    copies: AbstractSet[str],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules that hand over exactly ``saved``; all else that backward needs is in backward.

    ``copies`` are the names of ops that stand for a repetition of another one.
    Random ops that the user marked MUST_RECOMPUTE draw the same numbers again: their generator state is saved.
    """
    sizes = [node for node in saved if partitioners.is_sym_node(node)]
    opaque = [node for node in saved if _is_opaque(node)]
    tensors = [node for node in saved if node not in sizes and node not in opaque]
    keywords: dict[str, Any] = {
        "saved_sym_nodes": sizes,
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_nodes": OrderedSet(static_inputs),
    }
    if "saved_opaque_nodes" in inspect.signature(partitioners._extract_fwd_bwd_modules).parameters:
        keywords["saved_opaque_nodes"] = opaque
    else:
        tensors += opaque
    forward, backward = partitioners._extract_fwd_bwd_modules(joint_module, tensors, **keywords)
    # Extraction copies a random op wherever its operands are, and no sweep of dead code takes one that draws from a
    # generator (Inductor's fallback_random): a repetition in forward, and in backward what nothing reads, goes here.
    forward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=node.name not in copies))
    backward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    if any(_draws_again(node, recomputed) for node in joint_module.graph.nodes):
        forward, backward = partitioners.functionalize_rng_ops(joint_module, forward, backward, len(sizes))
    return forward, backward


def thread_random_state(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Hand the random state of nested graphs to the outer ones, and read parts of results as early as they exist."""
    forward, backward = partitioners.raise_getitems(forward), partitioners.raise_getitems(backward)
    if not hasattr(partitioners, "thread_graphsafe_rng_from_hops"):
        return forward, backward
    return (
        partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False),
        partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True),
    )


def _is_opaque(node: fx.Node) -> bool:
    check = getattr(partitioners, "is_opaque_node", None)
    return bool(check is not None and check(node))


def _draws_again(node: fx.Node, recomputed: frozenset[fx.Node]) -> bool:
    tags = getattr(node.target, "tags", ())
    return node in recomputed and torch.Tag.nondeterministic_seeded in tags and partitioners.must_recompute(node)
