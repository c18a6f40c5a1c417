"""The split step: the joint graph of the full batch becomes loops over slices of it.

Every op that runs inside of a loop goes into the loop's *body*, one graph for all slices; the body takes what is whole,
its slice of what is split, and the accumulators, and returns new accumulators. What is the same in every slice, and
what needs the whole batch, stays in the outer graph. Literals are those of the full batch, because the graph was traced
there: a mean over the batch stays one division by the whole count.

The obvious alternative, tracing the step at the size of a slice, turns each mean over the batch into a mean of means.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import fx

from .batch import BatchAxes, Dependence
from .batch_rules import ACCUMULATIONS, PARTIAL, Alignment, Result, Split, alignments, tensor_operands, tensor_results
from .errors import ConfigError
from .joint import JointGraph, Role, Side
from .ops import OpKind, draws_from_generator, is_builtin, is_counter_random, op_name, schema_of
from .random_at import random_at

aten = torch.ops.aten
random_at_op = random_at._opoverload

Use: TypeAlias = Split | None


@dataclass(frozen=True, slots=True)
class Handed:
    """What a body is handed of a whole value: a slice of it, or all of it."""

    value: int
    split: Split | None


@dataclass(frozen=True)
class Loop:
    """One loop over the slices: what its body takes, and what is to come out."""

    level: int
    inside: tuple[int, ...]  # the values that the body computes
    local: tuple[Handed, ...]  # values that are the same in every slice of which the body makes its own part
    handed: tuple[Handed, ...]
    takes_start: bool  # the body is told where its slice starts, because it draws random numbers
    partial: tuple[int, ...]  # results that are added up
    split: tuple[int, ...]  # results that are put together


@dataclass(frozen=True)
class SplitStep:
    """What is computed where. ``whole`` is in the order in which it can run, by level."""

    axes: BatchAxes
    lengths: tuple[int, ...]  # of the slices
    whole: tuple[tuple[int, ...], ...]
    loops: tuple[Loop | None, ...]  # by level


def slice_lengths(batch: int, num_microbatches: int) -> tuple[int, ...]:
    """The lengths of the slices, longest first; they differ by one at most."""
    short, longer = divmod(batch, num_microbatches)
    return (short + 1,) * longer + (short,) * (num_microbatches - longer)


def split_step(joint: JointGraph, axes: BatchAxes, num_microbatches: int) -> SplitStep:
    """Decide for each value where it is computed: in the outer graph, in which loops, or not at all."""
    return _Demand(joint, axes).step(slice_lengths(axes.batch, num_microbatches))


class _Demand:
    """What is needed, from the step's outputs back to its inputs."""

    def __init__(self, joint: JointGraph, axes: BatchAxes) -> None:
        self.joint, self.axes = joint, axes
        self.position = {node: index for index, node in enumerate(joint.nodes)}
        self.whole: set[int] = set()
        self.inside: dict[int, set[int]] = defaultdict(set)
        self.local: dict[int, set[Handed]] = defaultdict(set)
        self.handed: dict[int, set[Handed]] = defaultdict(set)
        self.results: dict[int, set[int]] = defaultdict(set)
        self.pending: list[tuple[Any, ...]] = []

    def step(self, lengths: tuple[int, ...]) -> SplitStep:
        effects = [value.index for value in self.joint.values if value.kind is OpKind.EFFECT]
        self.pending = [("whole", i) for i in (*self.joint.forward_outputs, *self.joint.backward_outputs, *effects)]
        while self.pending:
            what, *rest = self.pending.pop()
            getattr(self, f"_need_{what}")(*rest)
        num_levels = 1 + max([self.axes.whole_level(i) for i in self.whole], default=0)
        by_level: list[list[int]] = [[] for _ in range(num_levels)]
        for index in sorted(self.whole - set().union(*self.results.values())):
            by_level[self.axes.whole_level(index)].append(index)
        loops = tuple(self._loop(level) if level in self.inside else None for level in range(num_levels))
        return SplitStep(self.axes, lengths, tuple(map(tuple, by_level)), loops)

    def _loop(self, level: int) -> Loop:
        results = sorted(self.results[level])
        states = self.axes.states
        return Loop(
            level,
            tuple(sorted(self.inside[level])),
            tuple(sorted(self.local[level], key=_handed_order)),
            tuple(sorted(self.handed[level], key=_handed_order)),
            any(is_counter_random(self.joint.nodes[made.value]) for made in self.local[level]),
            tuple(i for i in results if states[i].dependence is Dependence.PARTIAL),
            tuple(i for i in results if states[i].dependence is Dependence.SPLIT),
        )

    def _need_whole(self, index: int) -> None:
        if index in self.whole:
            return
        self.whole.add(index)
        state = self.axes.states[index]
        value = self.joint.values[index]
        is_view = value.kind is OpKind.VIEW and self.joint.nodes[index].target is not operator.getitem
        if state.is_inside and index not in self.axes.cheap and not is_view:
            self.results[state.level].add(index)
            self.pending.append(("inside", index, state.level))
            return
        self.pending += [("whole", i) for i in self.joint.values[index].inputs]

    def _need_inside(self, index: int, level: int) -> None:
        if index in self.inside[level]:
            return
        value, node = self.joint.values[index], self.joint.nodes[index]
        if value.kind is OpKind.INPUT or not self.axes.is_computed(index, level):
            self._hand(index, self.axes.states[index].split, level)
            return
        self.inside[level].add(index)
        if node.target is operator.getitem:
            self.pending.append(("inside", value.inputs[0], level))
            return
        tensors = [self.position[operand] for operand in tensor_operands(node)]
        for operand, use in zip(tensors, self.axes.uses[index], strict=True):
            if use == "inside":
                self.pending.append(("inside", operand, level))
            elif isinstance(use, Split):
                self.pending.append(("local", operand, use, level))
            else:
                self.pending.append(("local", operand, None, level))
        for other in set(value.inputs) - set(tensors):
            self._hand(other, None, level)

    def _need_local(self, index: int, split: Split | None, level: int) -> None:
        made = Handed(index, split)
        if made in self.local[level]:
            return
        alignment = made_locally(self.joint, self.axes, made)
        if alignment is None:
            self._hand(index, split, level)
            return
        self.local[level].add(made)
        node = self.joint.nodes[index]
        for operand, use in zip(tensor_operands(node), alignment.operands, strict=True):
            self.pending.append(("local", self.position[operand], use, level))

    def _hand(self, index: int, split: Split | None, level: int) -> None:
        self.handed[level].add(Handed(index, split))
        self.pending.append(("whole", index))


def _handed_order(handed: Handed) -> tuple[int, int, int, int]:
    split = handed.split
    return (handed.value, *((-1, 0, 0) if split is None else (split.axis, split.outer, split.inner)))


def made_locally(joint: JointGraph, axes: BatchAxes, made: Handed) -> Alignment | None:
    """How a body makes its part of a value that is the same in every slice; ``None`` where it is handed a slice.

    A mask of the size of the logits is then never there at full size, and a causal mask is not there at all: it is
    compared inside of the kernels that read it. Numbers that count up (iota) are sliced, which gives each slice its
    offset.
    """
    value, node, state = joint.values[made.value], joint.nodes[made.value], axes.states[made.value]
    simple = value.kind in (OpKind.FACTORY, OpKind.POINTWISE, OpKind.VIEW)
    if state.dependence is not Dependence.SAME or not simple or draws_from_generator(node):
        return None
    if made.split is None:  # whole: what is made of positions alone is made where it is needed, all else handed in
        is_made = (value.kind is OpKind.FACTORY and not value.inputs) or made.value in joint.positional
        return Alignment((None,) * len(tensor_operands(node)), (None,)) if is_made else None
    if value.kind is OpKind.VIEW and node.target is operator.getitem:
        return None
    if is_counter_random(node):
        return Alignment((None,), (made.split,)) if _is_first_axis(value.sizes, made.split) else None
    return next(iter(alignments(node, -1, made.split, axes.batch)), None)


def _is_first_axis(sizes: Sequence[int], split: Split) -> bool:
    """Whether a slice is one run of elements."""
    return split.outer == 1 and math.prod(sizes[: split.axis]) == 1


# -- one op on a slice

# Arguments that say how large the result is.
_SIZES = frozenset("size shape sizes input_sizes input_size self_size".split())


def local_arguments(
    node: fx.Node, alignment: Alignment, batch: int, length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments for a slice of ``length`` samples; its operands stay those of the whole."""
    args, kwargs = list(node.args), dict(node.kwargs)
    result, split = tensor_results(node)[0], alignment.results[0]
    schema = schema_of(node)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        is_size = argument.name in _SIZES and isinstance(given, (list, tuple)) and len(given) == result.dim()
        if is_size and isinstance(split, Split):
            local = list(split.local_shape(result.shape, length))
            if place < len(args):
                args[place] = local
            else:
                kwargs[argument.name] = local
    if op_name(node) == "as_strided" and isinstance(split, Split):
        args[2] = list(torch.empty(split.local_shape(result.shape, length), device="meta").stride())
    if op_name(node) == "repeat" and isinstance(split, Split):
        args[1] = _local_repeats(node, cast("list[int]", args[1]), split, alignment.operands[0], length)
    if op_name(node) in _COUNTS_SAMPLES and alignment.operands[0] is not None:
        args[_COUNTS_SAMPLES[op_name(node)]] = alignment.operands[0].outer * length * alignment.operands[0].inner
    if op_name(node) == "squeeze" and len(args) == 2 and isinstance(args[1], (list, tuple)):
        sizes = tensor_operands(node)[0].meta["val"].shape
        args[1] = [axis for axis in args[1] if sizes[cast("int", axis)] == 1]  # a slice of one sample keeps its axis
    if op_name(node) == "iota" and isinstance(split, Split):  # counted anew in each slice (``RowByRow``)
        args[0] = split.outer * length * split.inner
    if op_name(node) == "slice" and alignment.operands[0] is not None:
        _localise_slice(node, args, alignment.operands[0], batch, length)
    return tuple(args), kwargs


# Where an op is told the number of samples.
_COUNTS_SAMPLES = {"native_group_norm": 3, "native_group_norm_backward": 5}


def _local_repeats(
    node: fx.Node, repeats: Sequence[int], split: Split, operand: Split | None, length: int
) -> list[int]:
    """An axis that is repeated from one element, or made anew, is as long as it is told to be."""
    local = list(repeats)
    if operand is None:
        local[split.axis] = split.outer * length * split.inner
    return local


def _localise_slice(node: fx.Node, args: list[Any], split: Split, batch: int, length: int) -> None:
    """A slice of the axis that carries the batch takes whole outer parts of it: its ends move with their size."""
    full = tensor_operands(node)[0].meta["val"]
    dim = args[1] % full.dim() if len(args) > 1 else 0
    if dim != split.axis:
        return
    first, last, _ = slice(*(args[2:4] if len(args) > 2 else (None, None))).indices(full.shape[dim])
    args[1:] = [dim, first * length // batch, last * length // batch]


def is_mean_over_batch(node: fx.Node, results: Sequence[Result], partial_operand: bool) -> bool:
    """Whether the op divides by the size of an axis that is sliced."""
    return op_name(node) == "mean" and results[0] == PARTIAL and not partial_operand


def local_mean(node: fx.Node, length: int, batch: int, emit: Callable[..., fx.Node], operand: fx.Node) -> fx.Node:
    """The part of a mean over the batch: the sum of the slice by the count of the whole."""
    value = node.meta["val"]
    full = tensor_operands(node)[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else None
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    dims = list(dims) if isinstance(dims, (list, tuple)) and dims else list(range(full.dim()))
    count = full.numel() // max(value.numel(), 1)
    total = emit(aten.sum.dim_IntList, (operand, dims, keepdim), {"dtype": value.dtype})
    return emit(aten.div.Tensor, (total, count), {})


# -- bodies


@dataclass(frozen=True)
class Body:
    """The graph of one loop for slices of one length.

    Its inputs are what is handed in, in the order of ``Loop.handed``, then the start of the slice where it takes that,
    then the accumulators, in the order of ``Loop.partial``. Its outputs are the new accumulators and the slices of
    ``Loop.split``: first those that belong to forward, then those of backward; ``order`` gives the position of each
    output in (partial, split).
    """

    module: fx.GraphModule
    num_forward_outputs: int
    order: tuple[int, ...]
    is_trained: bool  # it has a backward side, so there is something to decide


def make_body(
    joint: JointGraph, step: SplitStep, loop: Loop, length: int, accumulate: Callable[[torch.dtype], torch.dtype]
) -> Body:
    """Build the body for slices of ``length`` samples."""
    return _BodyBuilder(joint, step.axes, loop, length, accumulate).build()


class _BodyBuilder:
    def __init__(
        self,
        joint: JointGraph,
        axes: BatchAxes,
        loop: Loop,
        length: int,
        accumulate: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        self.joint, self.axes, self.loop, self.length, self.accumulate = joint, axes, loop, length, accumulate
        self.position = {node: index for index, node in enumerate(joint.nodes)}
        self.graph = fx.Graph()
        self.env: dict[Any, fx.Node] = {}  # by Handed for what is whole or made here, by index for what is inside
        self.sum_of, self.taken_apart = self._summands()

    def build(self) -> Body:
        loop = self.loop
        for handed in loop.handed:
            self.env[handed] = self._input(handed)
        if loop.takes_start:
            self.env["start"] = self._start()
        sums = {index: self._accumulator(index) for index in loop.partial}
        made: list[tuple[int, int, Handed | int]] = [(handed.value, 0, handed) for handed in loop.local]
        made += [(index, 1, index) for index in loop.inside]
        for index, _, key in sorted(made, key=lambda entry: entry[:2]):
            total = self.sum_of.get(index, index)
            if index in self.sum_of and self._adds_by_itself(index):
                sums[total] = self._added_into(sums[total], index)
            elif index not in self.taken_apart:
                self.env[key] = self._local(key) if isinstance(key, Handed) else self._inside(index)
                if key in self.sum_of:  # at once, so that no part of a sum waits for the end
                    sums[total] = self._added(sums[total], index)
        return self._finished([*sums.values(), *(self._result(i) for i in loop.split)])

    def _summands(self) -> tuple[dict[int, int], frozenset[int]]:
        """What is added into which sum, and the additions that this leaves out: of a weight that is used twice, neither
        gradient waits for the other, and what it is made from (the gradient of the logits) not either."""
        inside, results = frozenset(self.loop.inside), {*self.loop.partial, *self.loop.split}
        sum_of: dict[int, int] = {}
        taken_apart: set[int] = set()
        for total in self.loop.partial:
            stack = [total]
            while stack:
                index = stack.pop()
                operands = self.joint.values[index].inputs
                readers = [inside.intersection(self.joint.values[i].users) for i in (index, *operands)]
                is_last = index != total or not readers[0]
                if is_last and self._adds_sums(index) and results.isdisjoint(operands) and readers[1:] == [{index}] * 2:
                    taken_apart.add(index)
                    stack.extend(operands)
                else:
                    sum_of[index] = total
        return sum_of, frozenset(taken_apart)

    def _adds_sums(self, index: int) -> bool:
        """Whether a value is the plain sum of two partial sums like itself."""
        value, node = self.joint.values[index], self.joint.nodes[index]
        if op_name(node) != "add" or node.kwargs.get("alpha", 1) != 1 or len(value.inputs) != 2:
            return False
        operands = [self.joint.values[i] for i in value.inputs]
        return all(
            self.axes.states[o.index].dependence is Dependence.PARTIAL
            and (o.sizes, o.dtype) == (value.sizes, value.dtype)
            for o in operands
        )

    def _finished(self, results: list[fx.Node]) -> Body:
        indices = (*self.loop.partial, *self.loop.split)
        is_late = [self.joint.values[i].side is Side.BACKWARD for i in indices]
        order = tuple(sorted(range(len(indices)), key=lambda k: (is_late[k], k)))
        self.graph.output(tuple(results[k] for k in order))
        self.graph.eliminate_dead_code()  # zeros that nothing is scattered into any more
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return Body(module, is_late.count(False), order, any(is_late))

    def _input(self, handed: Handed) -> fx.Node:
        value, node = self.joint.values[handed.value], self.joint.nodes[handed.value]
        full = node.meta["val"]
        kind = "tangents" if value.side is Side.BACKWARD or value.role is Role.TANGENT else "primals"
        placeholder = self.graph.placeholder(f"{kind}_{len(self.env) + 1}")
        if handed.split is None or not isinstance(full, torch.Tensor):
            placeholder.meta = {"val": full}
        else:
            placeholder.meta = {"val": sliced_val(full, handed.split, self.length)}
        return placeholder

    def _start(self) -> fx.Node:
        placeholder = self.graph.placeholder(f"primals_{len(self.env) + 1}")
        placeholder.meta = {"val": torch.empty((), dtype=torch.int64, device=self.joint.device_type)}
        return placeholder

    def _accumulator(self, index: int) -> fx.Node:
        kind = "tangents" if self.joint.values[index].side is Side.BACKWARD else "primals"
        full = self.joint.nodes[index].meta["val"]
        placeholder = self.graph.placeholder(f"{kind}_{len(self.graph.nodes) + 1}")
        placeholder.meta = {"val": full.new_empty(full.shape, dtype=self.accumulate(full.dtype))}
        return placeholder

    def _exact_sum(self, index: int, operands: Sequence[fx.Node]) -> fx.Node | None:
        """A sum that is a part of a wider one is not rounded before it is added: the roundings would add up as well."""
        node = self.joint.nodes[index]
        if index not in self.sum_of or op_name(node) != "sum" or self.axes.results[index][0] != PARTIAL:
            return None
        full = node.meta["val"]
        wider = self.accumulate(full.dtype)
        if wider == full.dtype or self._is_read(index):
            return None
        reduced = operands[0].meta["val"].dim() - full.dim() if len(node.args) < 2 else None
        dims = list(range(reduced)) if reduced is not None else node.args[1]
        keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
        return self._emit(node, aten.sum.dim_IntList, (operands[0], dims, keepdim), {"dtype": wider})

    def _adds_by_itself(self, index: int) -> bool:
        """Whether a part of a sum is scattered into zeros that can as well be the sum so far."""
        node = self.joint.nodes[index]
        if not node.kwargs.get("include_self", True):
            return False  # the sum so far would be left out
        if op_name(node) not in ACCUMULATIONS or self.accumulate(node.meta["val"].dtype) != node.meta["val"].dtype:
            return False
        return not self._is_read(index)

    def _is_read(self, index: int) -> bool:
        """Whether the body computes something from a value, beside the sum that it goes into."""
        return any(user in self.loop.inside and user not in self.taken_apart for user in self.joint.values[index].users)

    def _added_into(self, accumulator: fx.Node, index: int) -> fx.Node:
        """The op that makes a part of a sum, with the sum so far for the zeros that it adds into."""
        node = self.joint.nodes[index]
        operands = self._operands(index)
        args, kwargs = _with_operands(node, node.args, node.kwargs, [accumulator, *operands[1:]], self._other)
        return self._emit(node, node.target, args, kwargs, "accumulate")

    def _added(self, accumulator: fx.Node, index: int) -> fx.Node:
        return self._emit(
            self.joint.nodes[index], aten.add.Tensor, (accumulator, self._result(index)), {}, "accumulate"
        )

    def _result(self, index: int) -> fx.Node:
        split = self.axes.states[index].split
        return self.env[index] if index in self.env else self.env[Handed(index, split)]

    def _inside(self, index: int) -> fx.Node:
        node = self.joint.nodes[index]
        if node.target is operator.getitem:
            source = self.env[self.joint.values[index].inputs[0]]
            return self._emit(node, operator.getitem, (source, node.args[1]), {})
        uses, results = self.axes.uses[index], self.axes.results[index]
        alignment = Alignment(tuple(self._split_of(index, k) for k in range(len(uses))), results)
        operands = self._operands(index)
        exact = self._exact_sum(index, operands)
        if exact is not None:
            return exact
        from_partial = "inside" in uses and any(
            self.axes.states[self.position[o]].dependence is Dependence.PARTIAL
            for o, use in zip(tensor_operands(node), uses, strict=True)
            if use == "inside"
        )
        if is_mean_over_batch(node, results, from_partial):
            emit = lambda target, args, kwargs: self._emit(node, target, args, kwargs, "part")  # noqa: E731
            return local_mean(node, self.length, self.axes.batch, emit, operands[0])
        return self._computed(node, alignment, operands)

    def _operands(self, index: int) -> list[fx.Node]:
        """The tensor operands of an op inside of the loop, as the body has them."""
        pairs = zip(tensor_operands(self.joint.nodes[index]), self.axes.uses[index], strict=True)
        return [
            self._result(self.position[operand]) if use == "inside" else self._whole(self.position[operand], use)
            for operand, use in pairs
        ]

    def _split_of(self, index: int, place: int) -> Split | None:
        use = self.axes.uses[index][place]
        if use != "inside":
            return use
        return self.axes.states[self.position[tensor_operands(self.joint.nodes[index])[place]]].split

    def _whole(self, index: int, split: Split | None) -> fx.Node:
        return self.env[Handed(index, split)]

    def _local(self, made: Handed) -> fx.Node:
        alignment = made_locally(self.joint, self.axes, made)
        assert alignment is not None
        node = self.joint.nodes[made.value]
        operands = [
            self._whole(self.position[operand], use)
            for operand, use in zip(tensor_operands(node), alignment.operands, strict=True)
        ]
        if is_counter_random(node):
            return self._random(node, made.split, operands[0])
        return self._computed(node, alignment, operands)

    def _random(self, node: fx.Node, split: Split | None, seed: fx.Node) -> fx.Node:
        """The numbers that the full batch has at this slice."""
        size, mode = cast("list[int]", node.args[0]), node.args[2]
        assert split is not None
        per_sample = split.inner * math.prod(size[split.axis + 1 :])
        local = list(split.local_shape(size, self.length))
        return self._emit(node, random_at_op, (seed, self.env["start"], local, mode, per_sample), {})

    def _computed(self, node: fx.Node, alignment: Alignment, operands: Sequence[fx.Node]) -> fx.Node:
        args, kwargs = local_arguments(node, alignment, self.axes.batch, self.length)
        args, kwargs = _with_operands(node, args, kwargs, operands, self._other)
        target = node.target
        if op_name(node) == "as_strided":  # its rule has it for a view only (batch_rules.py)
            target, args = aten.reshape.default, args[:2]
        computed = self._emit(node, target, args, kwargs)
        self._check(node, alignment, computed)
        return computed

    def _other(self, node: fx.Node) -> fx.Node:
        """An operand that is no tensor."""
        return self.env[Handed(self.position[node], None)]

    def _emit(self, origin: fx.Node, target: Any, args: Any, kwargs: Any, suffix: str = "") -> fx.Node:
        name = f"{origin.name}_{suffix}" if suffix else origin.name
        try:
            val = evaluate(target, args, kwargs)
        except (RuntimeError, ValueError):
            if op_name(origin) not in ("view", "_unsafe_view"):
                raise
            target = aten.reshape.default  # a slice need not have strides that a view can be had of
            val = evaluate(target, args, kwargs)
        node = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=name)
        node.meta = {key: entry for key, entry in origin.meta.items() if key not in ("val", "tensor_meta")}
        node.meta["val"] = val
        return node

    def _check(self, node: fx.Node, alignment: Alignment, computed: fx.Node) -> None:
        """The slice has the shape that the analysis said."""
        for full, split, local in zip(tensor_results(node), alignment.results, tensor_results(computed), strict=True):
            if not isinstance(full, torch.Tensor) or split is None:
                continue
            expected = split.local_shape(full.shape, self.length) if isinstance(split, Split) else tuple(full.shape)
            if tuple(local.shape) != tuple(expected) or local.dtype != full.dtype:
                if not is_builtin(node):
                    raise ConfigError(
                        f"The rule that register_batch_rule was given for {node.target} is wrong: a slice of it is"
                        f" {tuple(local.shape)} {local.dtype}, and by the rule it is {tuple(expected)} {full.dtype}."
                    )
                raise AssertionError(
                    f"{node.name} ({node.target}) of a slice is {tuple(local.shape)} {local.dtype} and was to be"
                    f" {tuple(expected)} {full.dtype}"
                )


def _with_operands(
    node: fx.Node, args: Any, kwargs: Any, operands: Sequence[fx.Node], other: Callable[[fx.Node], fx.Node]
) -> tuple[Any, Any]:
    """The arguments with each tensor operand exchanged for the one at its place."""
    left = iter(operands)
    tensors = set(tensor_operands(node))

    def exchange(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        return next(left) if leaf in tensors else other(leaf)

    exchanged: tuple[Any, Any] = torch.utils._pytree.tree_map(exchange, (args, kwargs))
    return exchanged


def evaluate(target: Any, args: Any, kwargs: Any) -> Any:
    """What an op returns, on the fake tensors of its operands."""
    args, kwargs = fx.map_arg((tuple(args), dict(kwargs)), lambda node: node.meta["val"])
    return target(*args, **kwargs)


def sliced_val(full: torch.Tensor, split: Split, length: int) -> torch.Tensor:
    """The fake tensor of a slice."""
    if split.outer == 1:
        return full.narrow(split.axis, 0, length * split.inner)
    return full.new_empty(split.local_shape(full.shape, length))
