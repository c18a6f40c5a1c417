"""Inductor's kernels as the plan has them: what fuses, in which order they run, and when their operands are freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import networkx as nx
import torch
from torch import fx

from remat_passes.again import repetition_of

from .graphs import BODY_PREFIX, PLACE, Place, call_subgraph


@contextmanager
def kernels_as_planned() -> Iterator[None]:
    """While it is open, Inductor makes the kernels of a graph by the plan that the graph is written by.

    The order that fusing leaves is the depth-first one of its dependencies. Of four orders Inductor then takes the one
    that it estimates to peak lowest (torch/_inductor/memory.py); the plan's is put in the place of the first. And its
    C++ calls what runs between two kernels of ATen as one function, whose operands live until all of it has run: here
    it is called kernel by kernel, which is what that estimate takes for granted, as the plan does.
    """
    from torch._inductor import memory
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    scheduling: Any = cpp.CppScheduling
    reorder, is_full = memory.reorder_for_peak_memory, scheduling.ready_to_flush

    def from_plan(nodes: list[Any], *arguments: Any, **keywords: Any) -> list[Any]:
        return reorder(_in_order_of(V.graph.module, nodes), *arguments, **keywords)

    def frees_something(own: Any) -> bool:
        return bool(own.scheduler.buffer_names_to_free) or bool(is_full(own))

    memory.reorder_for_peak_memory, scheduling.ready_to_flush = from_plan, frees_something
    try:
        with V.set_choices_handler(_planned_apart(type(V.choices))):
            yield
    finally:
        memory.reorder_for_peak_memory, scheduling.ready_to_flush = reorder, is_full


def _in_order_of(module: Any, kernels: Sequence[Any]) -> list[Any]:
    """The kernels in the order of the graph, as far as what they depend on allows: each of them is ready when the last
    of its ops is."""
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    makers = {name: at for at, kernel in enumerate(kernels) for name in kernel.get_buffer_names()}
    place_of = [max((places.get(op, -1) for op in _ops(kernel)), default=-1) for kernel in kernels]
    runs_before: nx.DiGraph[int] = nx.DiGraph()
    runs_before.add_nodes_from(range(len(kernels)))
    for at, kernel in enumerate(kernels):
        needed = {makers[name] for name in (needs.name for needs in kernel.unmet_dependencies) if name in makers}
        runs_before.add_edges_from((maker, at) for maker in needed - {at})
    try:
        return [kernels[at] for at in nx.lexicographical_topological_sort(runs_before, place_of.__getitem__)]
    except nx.NetworkXUnfeasible:  # some wait for one another: Inductor is to say so
        return list(kernels)


def _ops(kernel: Any) -> Iterator[fx.Node]:
    """The ops of the graph that a kernel computes."""
    for part in kernel.get_nodes():
        yield from getattr(part.node, "origins", ())


def _planned_apart(choices: type[Any]) -> Any:
    """Inductor's choices, but what the plan computes at different times does not fuse: it would be computed once, at
    the earlier one, and kept. Those are the values of two passes over a block, and what has a kernel of ATen
    between."""

    class Apart(choices):  # type: ignore[misc]
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            apart = _repetitions(node1) != _repetitions(node2) or _are_far_apart(node1, node2)
            return not apart and bool(choices.can_fuse(scheduler, node1, node2, shared_data_score))

        def uuid(self) -> str:
            return "remat: what the plan has apart"

    return Apart()


def _repetitions(scheduled: Any) -> frozenset[int]:
    """The passes that the results of a scheduled node belong to."""
    origins = (getattr(part.node, "origin_node", None) for part in scheduled.get_nodes())
    return frozenset(repetition_of(origin.name) for origin in origins if origin is not None) or frozenset((0,))


def _places(scheduled: Any) -> set[Place]:
    """Where the results of a scheduled node stand in the plan. Each is the last of the ops that it is computed by."""
    places = ([op.meta[PLACE] for op in _ops(part) if PLACE in op.meta] for part in scheduled.get_nodes())
    return {max(found) for found in places if found}


def _are_far_apart(node1: Any, node2: Any) -> bool:
    """Whether the plan has a kernel of ATen between what two nodes compute, and does not fuse them itself."""
    first, second = _places(node1), _places(node2)
    planned = {place.kernel for place in first} & {place.kernel for place in second} - {""}
    return not planned and any(one.num_own_kernels != other.num_own_kernels for one in first for other in second)


@contextmanager
def known_results() -> Iterator[None]:
    """Fake calls of loops' bodies return what the body's graph says of its results.

    Inductor's passes propagate fake tensors several times, and each time run the whole body for each call of it: 12 s
    of 47 for a GPT in 64 micro-batches.
    """
    from torch._higher_order_ops import utils

    call = call_subgraph()
    functions = getattr(utils, "registered_hop_fake_fns", {})
    run = functions.get(call)
    if run is None:
        yield
        return

    def results(graph: Any, name: str, *operands: Any) -> Any:
        known = _results_of(graph) if str(name).startswith(BODY_PREFIX) else None
        if known is None:
            return run(graph, name, *operands)
        return tuple(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in known)

    functions[call] = results
    try:
        yield
    finally:
        functions[call] = run


def _results_of(graph: Any) -> list[torch.Tensor] | None:
    """The fake tensors that a graph returns, where it says so of all."""
    if not isinstance(graph, fx.GraphModule):
        return None
    (output,) = graph.graph.find_nodes(op="output")
    vals = [getattr(node, "meta", {}).get("val") for node in output.args[0]]
    known = [val for val in vals if isinstance(val, torch.Tensor)]
    return known if len(known) == len(vals) else None
