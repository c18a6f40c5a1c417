"""Graphs of Dynamo and AOTAutograd: what their nodes stand for, the graphs that they call, copies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..readback import Signature


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGraph:
    """The forward or the backward of one joint graph, once it is compiled."""

    signature: Signature
    inputs: list[Any]  # what it was compiled for
    is_backward: bool
    source: str  # what Inductor wrote; empty on the eager lowering
    code: Any  # what is called; ``current_callable`` does the work where there is such an attribute


# What the graphs that are called by name start with (remat_compiler/microbatches.py).
BODY_PREFIX = "remat_loop_"


# Where a node says its place in a plan, in its ``meta``.
PLACE = "remat_place"


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """Where an op stands in the order of a plan, and what it runs in."""

    position: int
    num_own_kernels: int  # of ATen, that run up to it
    kernel: str  # that writes it; empty where none does


def call_subgraph() -> Any:
    """The higher-order op that calls a graph by name; Inductor compiles the graph once for all of its calls."""
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

    return invoke_subgraph


def calls_of(graph: fx.Graph) -> dict[int, str]:
    """The calls of graphs by name: their place among the nodes, and whom they call."""
    target = call_subgraph()
    return {place: str(node.args[1]) for place, node in enumerate(graph.nodes) if node.target is target}


def replace_graph(module: fx.GraphModule, name: str, graph: fx.GraphModule) -> None:
    """Exchange the graph that is called by that name, wherever it is called."""
    for inner in list(module.modules()):
        if name in inner._modules:
            setattr(inner, name, graph)


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """The module with a graph of its own: a compile takes the one that it is given apart."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _copy_output_metadata(module.graph, graph)
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)  # AOTAutograd knows Dynamo's graphs, and which inputs are static, by these three
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = module._param_name_to_source
    for old, new in zip(module.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copy


def _copy_output_metadata(source: fx.Graph, target: fx.Graph) -> None:
    (old,), (new,) = source.find_nodes(op="output"), target.find_nodes(op="output")
    new.meta = dict(old.meta)


def source_names(module: fx.GraphModule) -> tuple[str, ...]:
    """What Dynamo calls each input of its graph: ``x``, ``batch['y'][0]``, ``L['self']._parameters['weight']``."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = getattr(source, "name", node.name)
        text = str(name() if callable(name) else name)
        names.append(re.sub(r"^L\['(\w+)'\]", r"\1", text))
    return tuple(names)


def input_position(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph a placeholder of the joint graph is.

    ``None`` for what AOTAutograd has put in: effect tokens, which stand before the inputs and are numbered as they are.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    description = node.meta.get("desc")
    return description.idx if isinstance(description, PlainAOTInput) else None


def fix_sizes(inputs: Sequence[Any]) -> None:
    """Make symbolic sizes numbers: guards then have the graph compiled anew for others."""
    for entry in inputs:
        if isinstance(entry, torch.SymInt):
            int(entry)


def marked_dynamic(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes that ``torch._dynamo.mark_dynamic`` was told of: Dynamo refuses a graph that fixes their sizes."""
    return tuple(sorted(getattr(tensor, "_dynamo_dynamic_indices", ())))


def is_part(module: fx.GraphModule) -> bool:
    """Whether a Dynamo graph is one of several of a step: it ends in a graph break, or goes on behind one."""
    reason = getattr(module, "compile_subgraph_reason", None)
    ends_in_break = reason is not None and bool(reason.graph_break)
    traces = (node.meta.get("stack_trace") or "" for node in module.graph.nodes)
    return ends_in_break or any(TORCH_DYNAMO_RESUME_IN_PREFIX in trace for trace in traces)


def num_versions_left() -> int:
    """How many more versions of the function that is compiled now torch.compile will make."""
    compile_id = CompileContext.current_compile_id()
    made = 1 if compile_id is None else (compile_id.frame_compile_id or 0) + 1
    return int(torch._dynamo.config.recompile_limit) - made


def fake_mode_of(module: fx.GraphModule) -> AbstractContextManager[object]:
    """The mode of the fake tensors that a graph was traced with."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), nullcontext())


def outside_of_tracing() -> AbstractContextManager[object]:
    """Neither fake tensors nor other modes of the compile that is going on."""
    return _disable_current_modes()
