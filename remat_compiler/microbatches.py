"""Micro-batches: the joint graph with its loops, each body cut by its own plan.

The bodies are what takes the memory, so each is planned as a step of its own, under what the budget leaves beside all
that the outer graph holds while the loop runs; the forward and the backward that this gives are joined into one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from remat_passes.batch import BatchAxes, choose_axes, has_small_tail, is_linear_in_tangents
from remat_passes.errors import CannotSplitError, ConfigError
from remat_passes.joint import JointGraph, Role, Side
from remat_passes.microbatch import Body, Loop, SplitStep, make_body, split_step
from remat_passes.outer import Called, outer_graph

from . import torch_private
from .kept import kept
from .options import AccumulateDtype, Options
from .step_inputs import StepInputs


@dataclass(frozen=True)
class SplitGraph:
    """A step that was split, before its bodies are planned."""

    joint: JointGraph  # of the full batch
    module: fx.GraphModule
    num_forward_outputs: int
    step: SplitStep
    bodies: Mapping[tuple[int, int], Body]  # by level and length of slice
    names: Mapping[int, str]  # what the user calls the inputs
    tangents_are_known: bool
    accumulate: Callable[[torch.dtype], torch.dtype]

    def static_inputs(self, loop: Loop) -> list[int]:
        """Which of a body's primals are parameters or buffers, handed whole."""
        early = [h for h in loop.handed if self.joint.values[h.value].side is not Side.BACKWARD]
        return [k for k, h in enumerate(early) if h.split is None and h.value in self.joint.static_inputs]

    def name(self, key: tuple[int, int]) -> str:
        """What the outer graph calls a body."""
        level, length = key
        return f"{torch_private.BODY_PREFIX}{level}_of_{length}"

    def split_bytes(self, name: str) -> int:
        """What a body returns beside sums, in bytes."""
        key = next(key for key in self.bodies if self.name(key) == name)
        loop, body = self.step.loops[key[0]], self.bodies[key]
        assert loop is not None
        (output,) = body.module.graph.find_nodes(op="output")
        places = [place for place, k in enumerate(body.order) if k >= len(loop.partial)]
        return sum(int(output.args[0][place].meta["val"].untyped_storage().nbytes()) for place in places)

    def outer(self, graphs: Mapping[tuple[int, int], fx.GraphModule]) -> fx.GraphModule:
        """The outer graph, with these graphs for its bodies."""
        called = {key: Called(body, graphs[key], self.name(key)) for key, body in self.bodies.items()}
        with torch_private.fake_mode_of(self.module):
            return outer_graph(
                self.module,
                self.joint,
                self.step,
                called,
                torch_private.call_subgraph(),
                self.accumulate,
                self.num_forward_outputs,
                tangents_are_known=self.tangents_are_known,
            )


def axes_of(joint: JointGraph, options: Options, inputs: StepInputs, num_microbatches: int) -> BatchAxes:
    """What carries the batch.

    Raises:
        CannotSplitError: the step is not the same when it is computed slice by slice.
    """
    if joint.symbols:
        raise CannotSplitError(
            "The step cannot be split into micro-batches: sizes in it depend on the contents of a tensor"
            f" ({', '.join(name for name, _ in joint.symbols)}). Make them fixed, with a mask instead of a selection."
        )
    known = tangents_are_known(joint)
    said, names = _inputs(joint, inputs)
    try:
        axes = choose_axes(joint, said, names, inputs.num_groups, num_microbatches, tangents_are_known=known)
    except CannotSplitError as refused:
        if inputs.batch_norm:
            raise CannotSplitError(inputs.batch_norm) from refused
        raise
    if inputs.batch_norm and not has_small_tail(joint, axes):
        raise CannotSplitError(inputs.batch_norm)
    return axes


def split(
    module: fx.GraphModule,
    joint: JointGraph,
    num_forward_outputs: int,
    axes: BatchAxes,
    num_microbatches: int,
    options: Options,
    inputs: StepInputs,
) -> SplitGraph:
    """Split a joint graph into so many slices.

    Raises:
        CannotSplitError: the step is not the same when it is computed slice by slice.
        ConfigError: there are more slices than samples.
    """
    _check_number(axes, num_microbatches)
    step = split_step(joint, axes, num_microbatches)
    torch_private.lower_own_ops()
    accumulate = functools.partial(accumulator_dtype, options.accumulate_dtype)
    with torch_private.fake_mode_of(module):
        bodies = {
            (loop.level, length): make_body(joint, step, loop, length, accumulate)
            for loop in step.loops
            if loop is not None
            for length in dict.fromkeys(step.lengths)
        }
    _, names = _inputs(joint, inputs)
    known = tangents_are_known(joint)
    return SplitGraph(joint, module, num_forward_outputs, step, bodies, names, known, accumulate)


def _check_number(axes: BatchAxes, num_microbatches: int) -> None:
    if num_microbatches > axes.batch:
        raise ConfigError(
            f"Option num_microbatches is {num_microbatches} and the batch has {axes.batch} samples: a micro-batch has"
            f" at least one. Use at most {axes.batch}, or leave such a batch out where it is the last of an epoch"
            " (drop_last=True of a DataLoader)."
        )


def _inputs(joint: JointGraph, inputs: StepInputs) -> tuple[dict[int, int], dict[int, str]]:
    """The inputs of the joint graph that were said to carry the batch, and what the user calls all of them."""
    axes = dict(inputs.batch_axes)
    said, names = {}, {}
    for value, node in zip(joint.values, joint.nodes, strict=True):
        if value.role is not Role.PRIMAL:
            continue
        position = torch_private.input_position(node)
        is_known = position is not None and position < len(inputs.names)
        names[value.index] = inputs.names[position] if position is not None and is_known else value.name
        if position is not None and position in axes:
            said[value.index] = axes[position]
    return said, names


def accumulator_dtype(wanted: AccumulateDtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a sum over slices of parts of ``dtype``.

    Those of 16-bit parts are kept in fp32 unless the user wants another: a bf16 sum of 64 slices is 1.6 % off.
    """
    if wanted == "same" or not dtype.is_floating_point:
        return dtype
    return torch.promote_types(dtype, getattr(torch, wanted))


def tangents_are_known(joint: JointGraph) -> bool:
    """Whether the loops may take 1 for the tangent and multiply the gradients by it at the end.

    So where the only tangent is that of one number, the loss. Not where backward computes in fp16: the tangent then
    carries a loss scale without which small gradients are lost. And not where backward is not linear in it.
    """
    tangents = [value for value in joint.values if value.role is Role.TANGENT]
    halves = any(joint.values[i].dtype is torch.float16 for i in joint.backward_values)
    is_loss = len(tangents) == 1 and tangents[0].numel == 1 and tangents[0].is_float
    return is_loss and not halves and is_linear_in_tangents(joint)


def joined(body: Body, forward: fx.GraphModule, backward: fx.GraphModule, *, fuses: bool) -> fx.GraphModule:
    """One graph of a body's forward and backward: what forward saves, backward reads at once. A compiler that ``fuses``
    is told what is saved."""
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    for node in body.module.graph.find_nodes(op="placeholder"):
        env[node.name] = graph.node_copy(node)
    first = _inlined(graph, forward, env, "")
    saved = [node for node in _results(forward)[body.num_forward_outputs :] if isinstance(node, fx.Node)]
    inner = {**env, **{node.name: _kept(graph, first[node]) if fuses else first[node] for node in saved}}
    second = _inlined(graph, backward, inner, "_redone")
    results = [first[node] for node in _results(forward)[: body.num_forward_outputs]]
    results += [second[node] for node in _results(backward)]
    graph.output(tuple(results))
    (output,) = body.module.graph.find_nodes(op="output")
    module = fx.GraphModule({**_attributes(forward), **_attributes(backward)}, graph)
    module.meta.update(output.meta)
    return module


def _kept(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.op == "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
        return node
    saved = graph.call_function(kept._opoverload, (node,))
    saved.meta = dict(node.meta)
    return saved


def _results(module: fx.GraphModule) -> list[fx.Node]:
    (output,) = module.graph.find_nodes(op="output")
    return list(torch.utils._pytree.arg_tree_leaves(*output.args))


def _attributes(module: fx.GraphModule) -> dict[str, object]:
    return {str(node.target): getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")}


def _inlined(
    graph: fx.Graph, module: fx.GraphModule, inputs: Mapping[str, fx.Node], suffix: str
) -> dict[fx.Node, fx.Node]:
    """The module's nodes copied into ``graph``; its inputs are taken by name."""
    taken = {node.name for node in graph.nodes}
    placed: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            placed[node] = inputs[node.name]
        elif node.op != "output":
            args, kwargs = fx.map_arg((node.args, node.kwargs), placed.__getitem__)
            name = f"{node.name}{suffix}" if node.name in taken else node.name
            placed[node] = graph.create_node(node.op, node.target, args, kwargs, name=name)
            placed[node].meta = dict(node.meta)
    return placed
