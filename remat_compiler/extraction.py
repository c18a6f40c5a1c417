"""Extraction: the joint module becomes forward and backward, exactly as the cut says.

They hand over what the plan saves and nothing else, in the order that the plan was projected for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import fx

from remat_passes.joint import JointGraph, Side
from remat_passes.memory import MemoryModel
from remat_passes.ops import OpKind, op_kind, written_operands
from remat_passes.schedule import schedule
from remat_passes.search import Candidate

from . import torch_private
from .masks import pack_masks

_Kernels: TypeAlias = Mapping[str, str]  # by value: the kernel that writes it


def extract(
    gm: fx.GraphModule, captured: JointGraph, chosen: Candidate, num_fwd_outputs: int, *, fuses: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint module by a decision; the module itself is changed.

    Args:
        gm: the joint module that ``captured`` was read from.
        captured: its graph as values.
        chosen: the decision.
        num_fwd_outputs: how many of the outputs belong to forward.
        fuses: as the decision was projected for (``MemoryModel.fuses``).
    """
    joint, cut = captured if chosen.unrolled is None else chosen.unrolled.joint, chosen.cut
    nodes = _unrolled_nodes(gm.graph, joint, num_fwd_outputs)
    saved = [nodes[i] for i in sorted(cut.saved) if i not in joint.mutated_inputs]
    for source in (nodes[i] for i in sorted(cut.saved & joint.mutated_inputs)):
        saved.append(_copied_before_change(gm.graph, source))
        if any(joint.values[i].side is Side.BACKWARD for i in _writers(joint, source)):
            saved.append(source)  # backward changes it as well, and the change is to reach the caller
    recomputed = frozenset(nodes[i] for i in cut.redo)
    copies = {value.name for value in joint.values if value.is_copy}
    static = [nodes[i] for i in sorted(joint.static_inputs)]
    forward, backward = torch_private.extract_modules(gm, saved, recomputed, num_fwd_outputs, static, copies)
    _check_writes(joint, forward, backward)
    order = schedule(joint, cut, early=not fuses)
    forward, backward = (
        _ordered(module, [nodes[i].name for i in side])
        for module, side in ((forward, order.forward), (backward, order.backward))
    )
    if fuses:
        _mark_places(forward, backward, MemoryModel(joint, fuses).kernels(cut, order))
    forward, backward = torch_private.thread_random_state(forward, backward)
    if fuses and joint.device_type == "cpu":
        computed = {v.name for v in joint.values if v.kind is OpKind.POINTWISE and v.base == v.index}
        pack_masks(forward, backward, computed, num_fwd_outputs)
    return forward, backward


def _mark_places(forward: fx.GraphModule, backward: fx.GraphModule, kernels: tuple[_Kernels, _Kernels]) -> None:
    """Tell Inductor where each op stands in the order of the plan, and which kernel of the plan writes it."""
    position = num_own_kernels = 0
    for module, kernel_of in zip((forward, backward), kernels, strict=True):
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            position += 1
            num_own_kernels += op_kind(node) is OpKind.EXTERN
            node.meta[torch_private.PLACE] = torch_private.Place(
                position, num_own_kernels, kernel_of.get(node.name, "")
            )


def _unrolled_nodes(graph: fx.Graph, joint: JointGraph, num_fwd_outputs: int) -> tuple[fx.Node, ...]:
    """The node of each value. One that is computed again gets a node of its own, which its readers read (in place)."""
    nodes: list[fx.Node] = []
    for value, node in zip(joint.values, joint.nodes, strict=True):
        operands = {old: nodes[i] for old, i in zip(node.all_input_nodes, value.inputs, strict=True)}
        if value.name != node.name:
            nodes.append(_copied(graph, node, operands, value.name))
            continue
        for old, new in operands.items():
            if old is not new:
                node.replace_input_with(old, new)
        nodes.append(node)
    if any(joint.nodes[i] is not nodes[i] for i in joint.backward_outputs):
        _return_from_backward(graph, {joint.nodes[i]: nodes[i] for i in joint.backward_outputs}, num_fwd_outputs)
    return tuple(nodes)


def _copied(graph: fx.Graph, node: fx.Node, operands: dict[fx.Node, fx.Node], name: str) -> fx.Node:
    last = max([*operands.values(), graph.find_nodes(op="placeholder")[-1]])  # where copies of changed inputs stand
    with graph.inserting_after(last):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operands[operand])
        copy = graph.create_node(node.op, node.target, args, kwargs, name=name, type_expr=node.type)
    if copy.name != name:
        raise AssertionError(f"the copy of {node.name} is to be called {name}, and that name is taken")
    copy.meta = dict(node.meta)
    return copy


def _return_from_backward(graph: fx.Graph, instead: dict[fx.Node, fx.Node], num_fwd_outputs: int) -> None:
    (output,) = graph.find_nodes(op="output")
    flat = list(output.args[0]) if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    backward = [instead.get(result, result) if isinstance(result, fx.Node) else result for result in flat]
    output.args = ((*flat[:num_fwd_outputs], *backward[num_fwd_outputs:]),)


def _writers(joint: JointGraph, source: fx.Node | None = None) -> list[int]:
    """The ops that change an input in place: this one, or any."""
    written = ((i, written_operands(node)) for i, node in enumerate(joint.nodes))
    return [i for i, operands in written if operands and (source is None or source in operands)]


def _check_writes(joint: JointGraph, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Each change in place runs on its own side; an extraction that cannot place one drops it without a word."""
    in_forward, in_backward = ({node.name for node in module.graph.nodes} for module in (forward, backward))
    for value in (joint.values[i] for i in _writers(joint)):
        if value.name not in (in_backward if value.side is Side.BACKWARD else in_forward):
            raise AssertionError(f"{value.name} ({value.source}) changes an input and was lost")


def _copied_before_change(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """A copy of an input that the step changes in place; everything but the change itself reads the copy."""
    last_input = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last_input):
        copy = graph.call_function(torch.ops.aten.clone.default, (source,))
    copy.meta = dict(source.meta)
    copy.meta["val"] = source.meta["val"].clone()
    source.replace_all_uses_with(
        copy, delete_user_cb=lambda user: user is not copy and source not in written_operands(user)
    )
    return copy


def _ordered(module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """The module with its nodes in the order of ``names``; what is not named goes right before its first reader."""
    by_name = {node.name: node for node in module.graph.nodes}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:
            missing = [source for source in stack[-1].all_input_nodes if source not in env]
            if missing:
                stack.extend(missing)
                continue
            ready = stack.pop()
            if ready not in env:
                env[ready] = graph.node_copy(ready, env.__getitem__)

    for node in module.graph.find_nodes(op="placeholder"):
        place(node)
    for name in names:
        if name in by_name:
            place(by_name[name])
    for node in module.graph.nodes:
        place(node)
    return fx.GraphModule(module, graph)
