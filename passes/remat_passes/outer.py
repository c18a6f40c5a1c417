"""The outer graph of a split step: what is whole, and the loops as calls of their bodies, one after another.

It is a joint graph again, with the inputs and outputs of the step's own, so that the stages behind it (the cut, the
memory model, the extraction of forward and backward) work on it as on any other. The accumulators go from call to call
as values: a graph that changed them in place through a call is miscompiled (torch 2.13, ``invoke_subgraph``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .batch_rules import Split
from .joint import JointGraph, Role
from .microbatch import Body, Handed, Loop, SplitStep, evaluate
from .ops import OpKind

aten = torch.ops.aten


@dataclass(frozen=True)
class Called:
    """A body as the outer graph calls it: ``graph`` is what the planner made of ``body.module``."""

    body: Body
    graph: fx.GraphModule
    name: str


def outer_graph(
    module: fx.GraphModule,
    joint: JointGraph,
    step: SplitStep,
    called: Mapping[tuple[int, int], Called],
    call: Callable[..., Any],
    accumulate: Callable[[torch.dtype], torch.dtype],
    num_forward_outputs: int,
    *,
    tangents_are_known: bool,
) -> fx.GraphModule:
    """Build the outer graph.

    Args:
        module: the joint module; it is not changed.
        joint: the same graph, read.
        step: what is computed where.
        called: the body for each level and length of slice.
        call: the higher-order op that calls a body: ``call(graph, name, *operands)``.
        accumulate: the dtype that sums over the slices are kept in, by that of their parts.
        tangents_are_known: the loops take 1 for the tangent of the loss, and the gradients are multiplied by the
            tangent at the end.
    """
    builder = _OuterBuilder(module, joint, step, called, call, accumulate, tangents_are_known)
    return builder.build(num_forward_outputs)


class _OuterBuilder:
    def __init__(
        self,
        module: fx.GraphModule,
        joint: JointGraph,
        step: SplitStep,
        called: Mapping[tuple[int, int], Called],
        call: Callable[..., Any],
        accumulate: Callable[[torch.dtype], torch.dtype],
        tangents_are_known: bool,
    ) -> None:
        self.module, self.joint, self.step, self.called = module, joint, step, called
        self.call, self.accumulate, self.tangents_are_known = call, accumulate, tangents_are_known
        self.graph = fx.Graph()
        self.env: dict[int, fx.Node] = {}
        self.tangents: list[fx.Node] = []
        self.attributes: dict[str, fx.GraphModule] = {}

    def build(self, num_forward_outputs: int) -> fx.GraphModule:
        for index, value in enumerate(self.joint.values):
            if self.joint.nodes[index].op == "placeholder":
                self._input(index, value.role)
        for level, indices in enumerate(self.step.whole):
            for index in indices:
                if index not in self.env and self.joint.values[index].kind is not OpKind.EFFECT:
                    self._copy(index)
            loop = self.step.loops[level]
            if loop is not None:
                self._loop(loop)
        for value in self.joint.values:
            if value.kind is OpKind.EFFECT:
                self._copy(value.index)
        self._outputs(num_forward_outputs)
        root: dict[str, Any] = {name: getattr(self.module, name) for name in self._attributes_of_module()}
        return fx.GraphModule({**root, **self.attributes}, self.graph)

    def _attributes_of_module(self) -> list[str]:
        own = [str(node.target) for node in self.graph.nodes if node.op == "get_attr"]
        return [name for name in dict.fromkeys(own) if name not in self.attributes]

    def _input(self, index: int, role: Role) -> None:
        node = self.joint.nodes[index]
        self.env[index] = self.graph.node_copy(node)
        if role is Role.TANGENT and self.tangents_are_known:
            self.tangents.append(self.env[index])
            val = node.meta["val"]
            options = {"dtype": val.dtype, "device": val.device}
            self.env[index] = self._emit(node, aten.full.default, (list(val.shape), 1), options, "known")

    def _copy(self, index: int) -> None:
        node = self.joint.nodes[index]
        position = dict(zip(node.all_input_nodes, self.joint.values[index].inputs, strict=True))
        self.env[index] = self.graph.node_copy(node, lambda source: self.env[position[source]])

    # -- loops

    def _loop(self, loop: Loop) -> None:
        sums = [self._zeros(index) for index in loop.partial]
        parts: list[list[fx.Node]] = [[] for _ in loop.split]
        start = 0
        for number, length in enumerate(self.step.lengths):
            results = self._called(loop, sums, start, length, number)
            sums = results[: len(sums)]
            for put, part in zip(parts, results[len(sums) :], strict=True):
                put.append(part)
            start += length
        for index, total in zip(loop.partial, sums, strict=True):
            self.env[index] = self._cast_back(index, total)
        for index, slices in zip(loop.split, parts, strict=True):
            self.env[index] = self._put_together(index, slices)

    def _called(self, loop: Loop, sums: Sequence[fx.Node], start: int, length: int, number: int) -> list[fx.Node]:
        called = self.called[loop.level, length]
        handed = [self._handed(handed, start, length, number) for handed in loop.handed]
        if called.name not in self.attributes:
            self.attributes[called.name] = called.graph
        attribute = self.graph.create_node("get_attr", called.name, (), {}, name=f"{called.name}_at_{number}")
        if loop.takes_start:
            options = {"dtype": torch.int64, "device": self.joint.device_type}
            origin = self.joint.nodes[(*loop.partial, *loop.split)[0]]
            handed.append(self._emit(origin, aten.full.default, ([], start), options, f"start_{number}"))
        operands = (*handed, *sums)
        call = self.graph.create_node(
            "call_function",
            self.call,
            (attribute, called.name, *operands),
            {},
            name=f"loop_{loop.level}_slice_{number}",
        )
        (output,) = called.body.module.graph.find_nodes(op="output")
        call.meta["val"] = tuple(result.meta["val"] for result in output.args[0])
        results: dict[int, fx.Node] = {}
        for place, k in enumerate(called.body.order):
            index = (*loop.partial, *loop.split)[k]
            part = self.graph.create_node(
                "call_function", operator.getitem, (call, place), {}, name=f"{self.joint.values[index].name}_{number}"
            )
            part.meta = {**_origin(self.joint.nodes[index]), "val": call.meta["val"][place]}
            results[k] = part
        return [results[k] for k in range(len(results))]

    def _handed(self, handed: Handed, start: int, length: int, number: int) -> fx.Node:
        whole, split = self.env[handed.value], handed.split
        if split is None:
            return whole
        origin = self.joint.nodes[handed.value]
        if split.outer == 1:
            ends = (split.axis, start * split.inner, (start + length) * split.inner)
            return self._emit(origin, aten.slice.Tensor, (whole, *ends), {}, f"slice_{number}")
        shape = list(origin.meta["val"].shape)
        apart = [*shape[: split.axis], split.outer, self.step.axes.batch, split.inner, *shape[split.axis + 1 :]]
        viewed = self._emit(origin, aten.reshape.default, (whole, apart), {}, f"apart_{number}")
        ends = (split.axis + 1, start, start + length)
        part = self._emit(origin, aten.slice.Tensor, (viewed, *ends), {}, f"slice_{number}")
        local = list(split.local_shape(shape, length))
        return self._emit(origin, aten.reshape.default, (part, local), {}, f"merged_{number}")

    def _zeros(self, index: int) -> fx.Node:
        node = self.joint.nodes[index]
        full = node.meta["val"]
        options = {"dtype": self.accumulate(full.dtype), "device": full.device}
        return self._emit(node, aten.full.default, (list(full.shape), 0), options, "zero")

    def _cast_back(self, index: int, total: fx.Node) -> fx.Node:
        node = self.joint.nodes[index]
        dtype = node.meta["val"].dtype
        if total.meta["val"].dtype == dtype:
            return total
        return self._emit(node, torch.ops.prims.convert_element_type.default, (total, dtype), {}, "total")

    def _put_together(self, index: int, slices: list[fx.Node]) -> fx.Node:
        node = self.joint.nodes[index]
        split = self.step.axes.states[index].split
        assert isinstance(split, Split)
        if split.outer == 1:
            return self._emit(node, aten.cat.default, (slices, split.axis), {}, "all")
        full = list(node.meta["val"].shape)
        apart = []
        for part, length in zip(slices, self.step.lengths, strict=True):
            shape = [*full[: split.axis], split.outer, length, split.inner, *full[split.axis + 1 :]]
            apart.append(self._emit(node, aten.reshape.default, (part, shape), {}, "apart"))
        together = self._emit(node, aten.cat.default, (apart, split.axis + 1), {}, "all")
        return self._emit(node, aten.reshape.default, (together, full), {}, "merged")

    # -- results

    def _outputs(self, num_forward: int) -> None:
        (output,) = self.module.graph.find_nodes(op="output")
        position = {node: index for index, node in enumerate(self.joint.nodes)}
        late = set(self.joint.backward_outputs) if self.tangents_are_known else set()
        scaled: dict[int, fx.Node] = {}
        flat = torch.utils._pytree.arg_tree_leaves(*output.args)
        results: list[Any] = []
        for place, result in enumerate(flat):
            if not isinstance(result, fx.Node):
                results.append(result)
                continue
            index = position[result]
            if place >= num_forward and index in late:
                scaled[index] = scaled.get(index) or self._scaled(index)
            results.append(scaled[index] if place >= num_forward and index in late else self.env[index])
        self.graph.output(tuple(results))
        (mine,) = self.graph.find_nodes(op="output")
        mine.meta = dict(output.meta)

    def _scaled(self, index: int) -> fx.Node:
        """A gradient times the tangent of the loss."""
        node, gradient = self.joint.nodes[index], self.env[index]
        (tangent,) = self.tangents
        if tangent.meta["val"].dim():
            tangent = self._emit(node, aten.reshape.default, (tangent, []), {}, "tangent")
        return self._emit(node, aten.mul.Tensor, (gradient, tangent), {}, "scaled")

    def _emit(self, origin: fx.Node, target: Any, args: Any, kwargs: Any, suffix: str) -> fx.Node:
        node = self.graph.create_node(
            "call_function", target, tuple(args), dict(kwargs), name=f"{origin.name}_{suffix}"
        )
        node.meta = {**_origin(origin), "val": evaluate(target, args, kwargs)}
        return node


def _origin(node: fx.Node) -> dict[str, Any]:
    """Where a node comes from in the user's program."""
    return {key: entry for key, entry in node.meta.items() if key not in ("val", "tensor_meta", "recompute", "desc")}
