"""The outer graph of a split step: what is whole, and the loops as calls of their bodies, one after another.

It is a joint graph again, with the inputs and outputs of the step's own, so that the stages behind it (the cut, the
memory model, the extraction of forward and backward) work on it as on any other. The accumulators go from call to call
as values: a graph that changed them in place through a call is miscompiled (torch 2.13, ``invoke_subgraph``).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .batch_rules import Split
from .joint import JointGraph, Role, Side
from .microbatch import Body, Handed, Loop, SplitStep, evaluate, sliced_val
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


# A loop of more calls than this is made of chunks: graphs that call the body for some slices each. Inductor takes about
# 3 ms for each result of a call (64 calls with 56 results: 11 s), and a chunk is compiled once.
MAX_CALLS = 12


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` slices of ``length`` samples each, from ``start`` on, that one call takes care of."""

    start: int
    length: int
    count: int


@dataclass(frozen=True, slots=True)
class _Part:
    """What a call gave of a value that is put together: so many samples of it."""

    node: fx.Node
    length: int


def pieces(lengths: Sequence[int]) -> list[Piece]:
    """The calls of a loop over slices of these lengths."""
    found: list[Piece] = []
    start = 0
    for length, run in itertools.groupby(lengths):
        left = len(list(run))
        count = math.isqrt(left) if left > MAX_CALLS else 1
        while left:
            taken = count if left >= count else 1
            found.append(Piece(start, length, taken))
            start, left = start + length * taken, left - taken
    return found


def chunk_name(body: str, count: int) -> str:
    """What the graph is called that calls a body so many times."""
    return f"{body}_{count}_times"


def body_of_call(name: str) -> tuple[str, int]:
    """Which body a graph of that name calls, and how often."""
    body, _, count = name.removesuffix("_times").rpartition("_")
    return (body, int(count)) if name.endswith("_times") else (name, 1)


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
        self.tangents: dict[int, fx.Node] = {}
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
                self._take_tangents(loop, indices)
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
            self.tangents[index] = self.env[index]
            val = node.meta["val"]
            options = {"dtype": val.dtype, "device": val.device}
            self.env[index] = self._emit(node, aten.full.default, (list(val.shape), 1), options, "known")

    def _take_tangents(self, loop: Loop, before: Sequence[int]) -> None:
        """Behind the loop of a tail, backward goes on with the tangents themselves: only the loop took 1 for them."""
        if not (self.step.axes.is_tail and self.tangents_are_known):
            return
        for index in (*loop.partial, *loop.split):
            if self.joint.values[index].side is Side.BACKWARD:
                self.env[index] = self._scaled(index)
        self.env.update(self.tangents)
        for index in before:
            value = self.joint.values[index]
            if value.side is Side.BACKWARD and value.kind is not OpKind.INPUT:
                self._copy(index)

    def _copy(self, index: int) -> None:
        node = self.joint.nodes[index]
        position = dict(zip(node.all_input_nodes, self.joint.values[index].inputs, strict=True))
        self.env[index] = self.graph.node_copy(node, lambda source: self.env[position[source]])

    # -- loops

    def _loop(self, loop: Loop) -> None:
        sums = [self._zeros(index) for index in loop.partial]
        parts: list[list[_Part]] = [[] for _ in loop.split]
        for piece in pieces(self.step.lengths):
            start = self._start(loop, piece.start) if loop.takes_start else None
            handed = [self._handed(h, self.env[h.value], piece, self.step.axes.batch) for h in loop.handed]
            sums = self._run(loop, piece, handed, start, sums, parts)
        for index, total in zip(loop.partial, sums, strict=True):
            self.env[index] = self._cast_back(index, total)
        for index, slices in zip(loop.split, parts, strict=True):
            self.env[index] = self._put_together(index, slices)

    def _run(
        self,
        loop: Loop,
        piece: Piece,
        handed: Sequence[fx.Node],
        start: fx.Node | None,
        sums: Sequence[fx.Node],
        parts: Sequence[list[_Part]],
    ) -> list[fx.Node]:
        """Call the body for one slice, or a graph that calls it for several; the new sums."""
        called = self.called[loop.level, piece.length]
        order = called.body.order if piece.count == 1 else tuple(range(len(called.body.order)))
        results = self._called(loop, piece, [*handed, *([start] if start is not None else []), *sums], order)
        for put, part in zip(parts, results[len(sums) :], strict=True):
            put.append(_Part(part, piece.length * piece.count))
        return results[: len(sums)]

    def _called(self, loop: Loop, piece: Piece, operands: Sequence[fx.Node], order: Sequence[int]) -> list[fx.Node]:
        """The results of a call, in the order of ``Loop.partial`` and ``Loop.split``."""
        called = self.called[loop.level, piece.length]
        name = called.name if piece.count == 1 else chunk_name(called.name, piece.count)
        if name not in self.attributes:
            self.attributes[name] = called.graph if piece.count == 1 else self._chunk(loop, piece)
        attribute = self.graph.create_node("get_attr", name, (), {}, name=f"{name}_graph")
        call = self.graph.create_node(
            "call_function", self.call, (attribute, name, *operands), {}, name=f"loop_{loop.level}_from_{piece.start}"
        )
        graph = called.body.module.graph if piece.count == 1 else self.attributes[name].graph
        (output,) = graph.find_nodes(op="output")
        call.meta["val"] = tuple(result.meta["val"] for result in output.args[0])
        results: dict[int, fx.Node] = {}
        for place, k in enumerate(order):
            origin = self.joint.nodes[(*loop.partial, *loop.split)[k]]
            label = f"{origin.name}_{piece.start}"
            part = self.graph.create_node("call_function", operator.getitem, (call, place), {}, name=label)
            part.meta = {**_origin(origin), "val": call.meta["val"][place]}
            results[k] = part
        return [results[k] for k in range(len(results))]

    def _chunk(self, loop: Loop, piece: Piece) -> fx.GraphModule:
        """A graph that calls the body for several slices, so that a graph of many slices stays small."""
        outside, attributes = self.graph, self.attributes
        self.graph, self.attributes = fx.Graph(), {}
        batch = piece.length * piece.count
        wholes = [self._input_of_chunk(self._handed_val(h, batch)) for h in loop.handed]
        first = self._input_of_chunk(torch.empty((), dtype=torch.int64, device=self.joint.device_type))
        sums = [self._input_of_chunk(self._sum_val(index)) for index in loop.partial]
        parts: list[list[_Part]] = [[] for _ in loop.split]
        for number in range(piece.count):
            one = Piece(number * piece.length, piece.length, 1)
            handed = [self._handed(h, whole, one, batch) for h, whole in zip(loop.handed, wholes, strict=True)]
            origin = self.joint.nodes[(*loop.partial, *loop.split)[0]]
            start = self._emit(origin, aten.add.Tensor, (first, one.start), {}, "start") if loop.takes_start else None
            sums = self._run(loop, one, handed, start, sums, parts)
        whole_parts = [self._put_together(i, slices) for i, slices in zip(loop.split, parts, strict=True)]
        if not loop.takes_start:
            self.graph.erase_node(first)
        self.graph.output((*sums, *whole_parts))
        module = fx.GraphModule(dict(self.attributes), self.graph)
        self.graph, self.attributes = outside, attributes
        return module

    def _input_of_chunk(self, val: Any) -> fx.Node:
        placeholder = self.graph.placeholder(f"handed_{len(self.graph.nodes)}")
        placeholder.meta = {"val": val}
        return placeholder

    def _handed_val(self, handed: Handed, length: int) -> Any:
        full = self.joint.nodes[handed.value].meta["val"]
        return full if handed.split is None else sliced_val(full, handed.split, length)

    def _sum_val(self, index: int) -> torch.Tensor:
        full: torch.Tensor = self.joint.nodes[index].meta["val"]
        return full.new_empty(full.shape, dtype=self.accumulate(full.dtype))

    def _start(self, loop: Loop, start: int) -> fx.Node:
        origin = self.joint.nodes[(*loop.partial, *loop.split)[0]]
        options = {"dtype": torch.int64, "device": self.joint.device_type}
        return self._emit(origin, aten.full.default, ([], start), options, "start")

    def _handed(self, handed: Handed, whole: fx.Node, piece: Piece, batch: int) -> fx.Node:
        """What a call is handed of a value that has ``batch`` samples here."""
        split, origin = handed.split, self.joint.nodes[handed.value]
        if split is None:
            return whole
        start, stop = piece.start, piece.start + piece.length * piece.count
        if split.outer == 1:
            ends = (split.axis, start * split.inner, stop * split.inner)
            return self._emit(origin, aten.slice.Tensor, (whole, *ends), {}, "slice")
        shape = list(whole.meta["val"].shape)
        apart = [*shape[: split.axis], split.outer, batch, split.inner, *shape[split.axis + 1 :]]
        viewed = self._emit(origin, aten.reshape.default, (whole, apart), {}, "apart")
        part = self._emit(origin, aten.slice.Tensor, (viewed, split.axis + 1, start, stop), {}, "slice")
        local = list(split.local_shape(shape, stop - start))
        return self._emit(origin, aten.reshape.default, (part, local), {}, "merged")

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

    def _put_together(self, index: int, slices: Sequence[_Part]) -> fx.Node:
        node = self.joint.nodes[index]
        split = self.step.axes.states[index].split
        assert isinstance(split, Split)
        if len(slices) == 1:
            return slices[0].node
        if split.outer == 1:
            return self._emit(node, aten.cat.default, ([part.node for part in slices], split.axis), {}, "all")
        full = list(node.meta["val"].shape)
        apart = []
        for part in slices:
            shape = [*full[: split.axis], split.outer, part.length, split.inner, *full[split.axis + 1 :]]
            apart.append(self._emit(node, aten.reshape.default, (part.node, shape), {}, "apart"))
        together = self._emit(node, aten.cat.default, (apart, split.axis + 1), {}, "all")
        length = sum(part.length for part in slices)
        return self._emit(node, aten.reshape.default, (together, list(split.local_shape(full, length))), {}, "merged")

    # -- results

    def _outputs(self, num_forward: int) -> None:
        (output,) = self.module.graph.find_nodes(op="output")
        position = {node: index for index, node in enumerate(self.joint.nodes)}
        is_late = self.tangents_are_known and not self.step.axes.is_tail
        late = set(self.joint.backward_outputs) if is_late else set()
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
        (tangent,) = self.tangents.values()
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
