"""BatchAxes: how each value of a step depends on the batch, and what of it can be computed slice by slice.

Each value of the joint graph, traced at the full batch, gets one state:

- **same**: it does not depend on the batch (weights, constants, their sums);
- **split**: a slice of it can be computed from slices (activations, losses per sample);
- **partial**: the sum over the slices is the value (weight gradients, the summed loss);
- **whole**: it needs the whole batch at once, so it is computed outside of the loop.

A step has *levels*. What is whole at level 0 depends on the inputs alone, loop 0 on that; what is whole at level 1 may
depend on the results of loop 0 (put together or added up), loop 1 on that, and so on. A value of loop 0 that loop 1
needs is computed again there, unless it is put together anyway. So a plain training step has one loop; a loss that
couples the samples, such as one with negatives from the batch, has two, with the coupled tail between them.

A loss that goes over the batch several times (statistics, what is made of them, statistics of that) would have a loop
for each. There the features are put together once, and all that follows them stays whole.

Values that are had from the inputs by cheap work (masks, counts of labels) may be whole at level 0 as well as split,
whatever an op asks for. That is what gives a mean over the valid tokens its denominator before the loop starts.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import fx

from .batch_rules import (
    PARTIAL,
    Alignment,
    Result,
    Split,
    alignments,
    is_zeros,
    rules_of,
    tensor_operands,
    tensor_results,
)
from .errors import CannotSplitError
from .joint import JointGraph, Role, Side
from .ops import OpKind, draws_from_generator, is_builtin, op_name


class Dependence(enum.Enum):
    """How a value depends on the batch."""

    SAME = "same in every slice"
    SPLIT = "split"
    PARTIAL = "partial sum"
    WHOLE = "whole batch"


Use: TypeAlias = Split | Literal["inside"] | None  # of a whole value: a slice or all of it; else the slice's own


NEEDS_SUM = "which is a sum over the whole batch"


@dataclass(frozen=True, slots=True)
class State:
    """The state of one value. ``level`` is that at which it is whole, or the loop that it is computed in."""

    dependence: Dependence
    level: int
    split: Split | None = None
    why: str = ""  # its op waits for a loop because of this

    @property
    def needs_sum(self) -> bool:
        """Whether it waits because one of its operands is a partial sum."""
        return self.why.endswith(NEEDS_SUM)

    @property
    def is_inside(self) -> bool:
        return self.dependence in (Dependence.SPLIT, Dependence.PARTIAL)


@dataclass(frozen=True)
class BatchAxes:
    """The states of the values of one joint graph, for one choice of what carries the batch."""

    batch: int
    seeds: Mapping[int, int]  # inputs that carry the batch, and at which axis
    states: tuple[State, ...]
    uses: Mapping[int, tuple[Use, ...]]  # of each op inside a loop: how it takes its tensor operands
    results: Mapping[int, tuple[Result, ...]]  # of each op inside a loop: what comes out
    cheap: frozenset[int]  # values inside that may be whole at level 0 as well
    backward_level: int  # from this level on, things need the tangents
    tail_of: int | None = None  # the value behind which all is split, where not the whole step is
    kept: frozenset[int] = frozenset()  # values inside that are put together rather than computed again

    def is_computed(self, index: int, level: int) -> bool:
        """Whether a loop computes a value inside that it needs; else it is handed its slice."""
        is_earlier = self.states[index].level < level
        return index not in self.seeds and not (is_earlier and index in self.kept)

    @property
    def is_tail(self) -> bool:
        """Whether only the tail of the step is split."""
        return self.tail_of is not None

    def whole_level(self, index: int) -> int:
        """The level at which all of a value is there."""
        state = self.states[index]
        if not state.is_inside:
            return state.level
        return 0 if index in self.cheap else state.level + 1

    @property
    def num_loops(self) -> int:
        return 1 + max((state.level for state in self.states if state.is_inside), default=-1)


def batch_axes(
    joint: JointGraph,
    seeds: Mapping[int, int],
    batch: int,
    *,
    tangents_are_known: bool,
    tail_of: int | None = None,
    stays_whole: bool = False,
) -> BatchAxes:
    """Work out the states, given the inputs that carry the batch.

    Args:
        joint: the graph, traced at the full batch.
        seeds: the axis of each value that carries the batch, by index: inputs, and with ``tail_of`` what forward makes.
        batch: the number of samples.
        tangents_are_known: whether backward's tangents are constants, so that loops need not wait for them.
        tail_of: a seed that forward makes: what it is computed from stays whole, and so does backward from there on.
        stays_whole: what forward computes from whole values stays whole, so that forward has one loop.
    """
    return _Analysis(joint, seeds, batch, tangents_are_known, tail_of, stays_whole).run()


@dataclass
class _Analysis:
    joint: JointGraph
    seeds: Mapping[int, int]
    batch: int
    tangents_are_known: bool
    tail_of: int | None = None
    stays_whole: bool = False
    states: dict[int, State] = field(default_factory=dict)
    uses: dict[int, tuple[Use, ...]] = field(default_factory=dict)
    results: dict[int, tuple[Result, ...]] = field(default_factory=dict)
    cheap: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)  # storages that are put together for an op that needs all of them
    backward_level: int = 0
    draw_level: int = 0  # of the last draw from a generator

    def run(self) -> BatchAxes:
        self.position = {node: index for index, node in enumerate(self.joint.nodes)}
        self.largest = max((self.joint.values[i].numel for i in self.seeds), default=0)
        self.before = set() if self.tail_of is None else before_tail(self.joint, self.tail_of) - set(self.seeds)
        order = {Side.FORWARD: 0, Side.EITHER: 1, Side.BACKWARD: 2}
        values = sorted(self.joint.values, key=lambda value: (order[value.side], value.index))
        for value in values:
            if value.side is Side.BACKWARD and not self.backward_level and not self.tangents_are_known:
                self.backward_level = self._level_of_forward()
            self.states[value.index] = self._state(value.index)
        return BatchAxes(
            self.batch,
            self.seeds,
            tuple(self.states[i] for i in range(len(self.states))),
            self.uses,
            self.results,
            frozenset(self.cheap),
            self.backward_level,
            self.tail_of,
            self._kept(),
        )

    def _kept(self) -> frozenset[int]:
        """What is needed whole, but for what is whole without that; and gradients that are no larger than those among
        it: to compute one again takes both forward and backward of what is behind it."""
        whole = {i for value in self.joint.values for i in self._read_whole(value.index)}
        late = self.joint.backward_values
        largest = max((self.joint.values[i].numel for i in whole.intersection(late)), default=0)
        whole.update(i for i in late if self.joint.values[i].numel <= largest)
        return frozenset(i for i in whole if self._can_be_handed(i) and i not in self.cheap)

    def _can_be_handed(self, index: int) -> bool:
        """Whether a loop can be handed slices of a value. Of an op with several results each is, and not the op."""
        is_tensor = isinstance(self.joint.nodes[index].meta.get("val"), torch.Tensor)
        return is_tensor and self.states[index].dependence is Dependence.SPLIT

    def _read_whole(self, index: int) -> Iterator[int]:
        """What an op takes whole of what loops compute."""
        value, uses = self.joint.values[index], self.uses.get(index)
        if uses is not None:
            operands = [self.position[operand] for operand in tensor_operands(self.joint.nodes[index])]
            read = [i for i, use in zip(operands, uses, strict=True) if use != "inside" and self.states[i].is_inside]
        elif self.states[index].dependence is Dependence.WHOLE and value.kind is not OpKind.VIEW:
            read = [i for i in value.inputs if self.states[i].dependence is Dependence.SPLIT]
        else:
            read = []
        yield from (i for i in read if i not in self.cheap)

    def _level_of_forward(self) -> int:
        return max(1, *(self._whole_level(i) for i in self.joint.forward_outputs), 1)

    def _state(self, index: int) -> State:
        value, node = self.joint.values[index], self.joint.nodes[index]
        if index in self.seeds:
            self.cheap.add(index)
            split = Split(self.seeds[index], 1, value.sizes[self.seeds[index]] // self.batch)
            return State(Dependence.SPLIT, 0, split)
        if value.kind is OpKind.INPUT:
            is_late = value.role is Role.TANGENT and not self.tangents_are_known
            return State(Dependence.WHOLE if is_late else Dependence.SAME, self.backward_level if is_late else 0)
        if value.side is not Side.FORWARD and self.before.intersection(value.inputs):
            self.before.add(index)
        if index in self.before:
            return self._outside(index)
        if node.target is operator.getitem:
            return self._part(index)
        operands = [self.position[operand] for operand in tensor_operands(node)]
        inside = [place for place, i in enumerate(operands) if self.states[i].is_inside]
        if draws_from_generator(node):
            return self._drawn(index, f"{value.op} draws from a generator that moves on" if inside else "")
        if not inside:
            return self._outside(index)
        if value.kind is OpKind.EFFECT:
            return self._outside(index, f"{value.op} changes a tensor in place")
        return self._inside(index, operands, inside) or self._outside(index, self._why(index, operands))

    def _drawn(self, index: int, why: str) -> State:
        """Draws from one generator stay in their order: none runs before one that the program has earlier."""
        state = self._outside(index, why)
        self.draw_level = max(self.draw_level, state.level)
        if state.level == self.draw_level:
            return state
        return State(Dependence.WHOLE, self.draw_level, None, why or "it draws after what waits for a loop")

    def _part(self, index: int) -> State:
        source = self.joint.values[index].inputs[0]
        if source not in self.results:
            return self._outside(index)
        position = self.joint.nodes[index].args[1]
        result = self.results[source][position] if isinstance(position, int) else None
        if result is None:
            return State(Dependence.WHOLE, self.states[source].level + 1, None, "the op has no rule for this result")
        if source in self.cheap:
            self.cheap.add(index)
        return self._of_result(result, self.states[source].level)

    def _of_result(self, result: Result, level: int) -> State:
        if isinstance(result, Split):
            return State(Dependence.SPLIT, level, result)
        return State(Dependence.PARTIAL, level)

    def _outside(self, index: int, why: str = "") -> State:
        inputs = self.joint.values[index].inputs
        level = max((self._whole_level(i) for i in inputs), default=0)
        states = [self.states[i] for i in inputs]
        if why or self.stays_whole:
            self.gathered.update(self.joint.values[i].base for i in inputs if self.states[i].is_inside)
        if self.stays_whole:  # one-hot labels as large as what is put together cost no more than that
            split = (self.joint.values[i] for i in inputs if self.states[i].dependence is Dependence.SPLIT)
            self.largest = max([self.largest, *(value.numel for value in split)])
        if all(state.dependence is Dependence.SAME for state in states):
            return State(Dependence.SAME, 0)
        return State(Dependence.WHOLE, level, None, why)

    def _whole_level(self, index: int) -> int:
        state = self.states[index]
        return state.level if not state.is_inside else 0 if index in self.cheap else state.level + 1

    def _why(self, index: int, operands: Sequence[int]) -> str:
        """Why an op takes operands whole that could be had slice by slice; ``""`` where that costs nothing."""
        late = [i for i in operands if self.states[i].is_inside and i not in self.cheap]
        value = self.joint.values[index]
        op = value.op
        if not late and (not operands or value.kind is not OpKind.EXTERN):
            return ""
        if any(self.states[i].dependence is Dependence.PARTIAL for i in late):
            name = next(self.joint.values[i].name for i in late if self.states[i].dependence is Dependence.PARTIAL)
            return f"{op} needs {name}, {NEEDS_SUM}"
        if not rules_of(self.joint.nodes[index]):
            return f"there is no rule for how {op} carries the batch"
        return f"{op} needs the whole batch"

    def _inside(self, index: int, operands: Sequence[int], inside: Sequence[int]) -> State | None:
        """The op inside of a loop; with as few of its operands whole that could be slices as there have to be."""
        for kept in self._candidates(operands, inside):
            found = self._aligned(index, operands, kept)
            if found is not None:
                uses, results = found
                if self._is_in_tail(index, operands, kept, is_sum=PARTIAL in results):
                    return None
                dropped = [i for place, i in enumerate(operands) if place in inside and place not in kept]
                return replace(self._placed(index, operands, uses, results), why=self._why(index, dropped))
        return None

    def _is_in_tail(self, index: int, operands: Sequence[int], kept: Sequence[int], *, is_sum: bool) -> bool:
        """Whether an op belongs to what runs on the whole batch between two loops: it reads a result of that, and
        beside it only what is had whole at no cost (labels). A sum over slices would take one more loop, so that it
        belongs there too if it reads what is put together for the tail anyway."""
        if self.stays_whole:
            return self._follows_whole(index, operands, kept)
        reads_whole = any(self.states[i].dependence is Dependence.WHOLE and self.states[i].level for i in operands)
        inside = [i for i in operands if self.states[i].is_inside and i not in self.cheap]
        return reads_whole and (not inside or (is_sum and self._is_gathered(inside)))

    def _follows_whole(self, index: int, operands: Sequence[int], kept: Sequence[int]) -> bool:
        """Whether an op stays whole as what it reads does: any of forward that waits for a loop, and those of backward
        that read what is put together for forward's, or nothing of the slices."""
        waits = any(self._whole_level(i) for place, i in enumerate(operands) if place not in kept)
        side = self.joint.values[index].side
        if side is Side.FORWARD:
            return waits
        inside = [operands[place] for place in kept if operands[place] not in self.cheap]
        return self._is_gathered(inside) and (waits or (side is Side.BACKWARD and bool(inside)))

    def _is_gathered(self, indices: Sequence[int]) -> bool:
        return self.gathered.issuperset(self.joint.values[i].base for i in indices)

    def _candidates(self, operands: Sequence[int], inside: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Which of the operands to take as slices: all; else without the partial sums; else without cheap ones."""
        partial = [p for p in inside if self.states[operands[p]].dependence is Dependence.PARTIAL]
        split = [p for p in inside if p not in partial]
        if not (partial and split):
            yield tuple(inside)
        elif split:
            yield tuple(split)
        droppable = [p for p in split if operands[p] in self.cheap]
        for count in range(1, len(droppable) + 1):
            for dropped in itertools.combinations(droppable, count):
                if len(dropped) < len(split):
                    yield tuple(p for p in split if p not in dropped)

    def _aligned(
        self, index: int, operands: Sequence[int], kept: Sequence[int]
    ) -> tuple[tuple[Use, ...], tuple[Result, ...]] | None:
        node = self.joint.nodes[index]
        first = self.states[operands[kept[0]]]
        if first.dependence is Dependence.PARTIAL:
            is_linear = _is_linear(node, len(operands), kept)
            uses: tuple[Use, ...] = tuple("inside" if place in kept else None for place in range(len(operands)))
            return (uses, (PARTIAL,) * _num_results(node)) if is_linear else None
        assert first.split is not None
        found = [
            alignment
            for alignment in alignments(node, kept[0], first.split, self.batch)
            if all(alignment.operands[place] == self.states[operands[place]].split for place in kept)
            and any(result is not None for result in alignment.results)
        ]
        best = min(found, key=_num_partial, default=None)
        if best is None:
            return None
        return tuple("inside" if place in kept else split for place, split in enumerate(best.operands)), best.results

    def _placed(self, index: int, operands: Sequence[int], uses: tuple[Use, ...], results: tuple[Result, ...]) -> State:
        value = self.joint.values[index]
        tensors = dict(zip(operands, uses, strict=True))
        levels = [self.states[i].level if tensors.get(i) == "inside" else self._whole_level(i) for i in value.inputs]
        level = max(levels)
        self.uses[index], self.results[index] = uses, results
        inside = [i for i, use in zip(operands, uses, strict=True) if use == "inside"]
        is_small = value.kind is not OpKind.EXTERN and value.numel <= self.largest
        if level == 0 and is_small and all(i in self.cheap for i in inside):
            self.cheap.add(index)
        if _num_results(self.joint.nodes[index]) > 1 or value.dtype is None:
            return State(Dependence.SPLIT, level)
        return self._of_result(results[0], level)


def _num_partial(alignment: Alignment) -> int:
    return sum(not isinstance(result, Split) for result in alignment.results)


def _num_results(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, (tuple, list)) else 1


# -- partial sums: only what is linear may be done to them inside of a loop

# Linear in their only tensor operand, whatever else they are told.
_LINEAR = frozenset(
    "neg view _unsafe_view reshape permute t transpose unsqueeze squeeze expand select slice alias clone sum mean"
    " unbind split split_with_sizes detach".split()
)


def _is_linear(node: fx.Node, num_operands: int, partial: Sequence[int]) -> bool:
    """Whether the op of the full values is the sum of the ops of the parts, with these operands partial sums."""
    name = op_name(node)
    if not is_builtin(node) or not _keeps_digits(node) or node.kwargs.get("rounding_mode") is not None:
        return False
    if num_operands == 1:
        return name in _LINEAR or name in ("mul", "div", "convert_element_type", "_to_copy")
    if name in ("add", "sub", "cat", "stack"):
        return len(partial) == num_operands
    if name == "div":
        return tuple(partial) == (0,)
    return name in ("mul", "mm", "bmm") and len(partial) == 1


def _keeps_digits(node: fx.Node) -> bool:
    """Whether the result has as many digits as the operands; a cast to fewer would round each part by itself."""
    results = [result.dtype for result in tensor_results(node) if isinstance(result, torch.Tensor)]
    operands = [operand.meta["val"].dtype for operand in tensor_operands(node)]
    return all(before == after or _is_wider(before, after) for before in operands for after in results)


def _is_wider(before: torch.dtype, after: torch.dtype) -> bool:
    if not (before.is_floating_point and after.is_floating_point):
        return False
    return bool(torch.finfo(after).eps <= torch.finfo(before).eps and torch.finfo(after).max >= torch.finfo(before).max)


# -- backward is linear in its tangents, unless the user wrote one that is not

# Linear in their first tensor operand with all others held, beside the ops above and every ``..._backward``.
_LINEAR_IN_FIRST = frozenset(
    "gather index index_select _unsafe_index constant_pad_nd cumsum flip rev roll repeat tril triu as_strided squeeze"
    " unfold diagonal convert_element_type _to_copy getitem masked_fill _fft_c2c _fft_c2r _fft_r2c"
    " view_as_real view_as_complex real imag _conj resolve_conj flatten".split()
)
_LINEAR_IN_EACH = frozenset("mul mm bmm convolution".split())
_LINEAR_IN_ALL = frozenset(
    "add sub cat stack where scatter_add index_add index_put _unsafe_index_put _unsafe_masked_index_put_accumulate"
    " scatter addmm baddbmm fma slice_scatter select_scatter".split()
)


def is_linear_in_tangents(joint: JointGraph) -> bool:
    """Whether backward times a number is backward of the tangent times that number.

    That holds for all of autograd's own formulas. A ``torch.autograd.Function`` may clip or normalise the gradient.
    """
    late = set(joint.backward_values)
    position = {node: index for index, node in enumerate(joint.nodes)}
    if not all(index in late or is_zeros(joint.nodes[index]) for index in joint.backward_outputs):
        return False  # a gradient that has nothing of the tangent
    return all(
        _is_linear_in(joint.nodes[index], late, position)
        for index in joint.backward_values
        if joint.values[index].kind is not OpKind.INPUT
    )


def _is_linear_in(node: fx.Node, late: set[int], position: Mapping[fx.Node, int]) -> bool:
    if node.target is operator.getitem:
        return True
    operands = tensor_operands(node)
    places = [place for place, operand in enumerate(operands) if position[operand] in late]
    name = op_name(node)
    tensors = [result for result in tensor_results(node) if isinstance(result, torch.Tensor)]
    is_float = all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    bends = any(node.kwargs.get(name) is not None for name in ("rounding_mode", "reduce"))
    if not places or not is_float or not is_builtin(node) or bends:
        return False
    if name == "copy":
        return len(operands) - 1 in places  # it returns its source
    if places == [0] and (name in _LINEAR or name in _LINEAR_IN_FIRST or name == "div" or name.endswith("_backward")):
        return _has_no_constant(node, name)
    if len(places) == 1 and (name in _LINEAR_IN_EACH or name.endswith(("_backward_data", "_backward"))):
        return name in _LINEAR_IN_EACH or places == [0]
    if name not in _LINEAR_IN_ALL:
        return False
    return _has_no_constant(node, name) and _rest_is_zero(node, name, operands, places)


def _has_no_constant(node: fx.Node, name: str) -> bool:
    """Whether no number is put in beside the operands."""
    if name == "constant_pad_nd":
        return not (node.args[2] if len(node.args) > 2 else 0)
    if name in ("masked_fill", "scatter"):
        numbers = [argument for argument in node.args[2:] if isinstance(argument, (int, float))]
        return all(number == 0 for number in numbers[-1:])
    if name in ("add", "sub"):
        return not any(isinstance(argument, (int, float)) and argument for argument in node.args[:2])
    return name != "where" or not any(isinstance(argument, (int, float)) and argument for argument in node.args[1:])


def _rest_is_zero(node: fx.Node, name: str, operands: Sequence[fx.Node], places: Sequence[int]) -> bool:
    """Whether what stands beside the operands that depend on a tangent is zero, or only says where they go."""
    if name in ("addmm", "baddbmm", "fma"):
        added, factors = (2, {0, 1}) if name == "fma" else (0, {1, 2})
        is_product = len(factors.intersection(places)) == 1
        return is_product and (added in places or is_zeros(operands[added]))
    if name == "where" and 0 in places:
        return False
    free = range(1, len(operands)) if name == "where" else range(len(operands))
    values = [place for place in free if operands[place].meta["val"].dtype.is_floating_point]
    return all(place in places or is_zeros(operands[place]) for place in values)


def batch_inputs(joint: JointGraph) -> tuple[int, ...]:
    """The tensors that the step is handed beside its parameters.

    A step without parameters of its own is handed them as inputs, and those that get a gradient are taken for them;
    where it is handed nothing else (the part of a model behind a graph break), all count.
    """
    weights = joint.static_inputs or joint.trained_inputs
    tensors = [v.index for v in joint.values if v.role is Role.PRIMAL and v.dtype is not None and v.sizes]
    others = tuple(index for index in tensors if index not in weights)
    return others or tuple(index for index in tensors if index not in joint.static_inputs)


def found_seeds(joint: JointGraph) -> Iterable[tuple[dict[int, int], int]]:
    """What may carry the batch, likelier first: each size that some inputs have at their first axis, then second."""
    inputs = [joint.values[i] for i in batch_inputs(joint)]
    for axis in (0, 1):
        sizes = [value.sizes[axis] for value in inputs if len(value.sizes) > axis and value.sizes[axis] > 1]
        for size in dict.fromkeys(sorted(sizes, key=lambda size: -sizes.count(size))):
            same = [v.index for v in inputs if len(v.sizes) > axis and v.sizes[axis] == size]
            yield dict.fromkeys(same, axis), size


# -- choosing what carries the batch

# The largest part of forward's values that may need the whole batch. A step of which more would be whole takes nearly
# the memory that it takes unsplit, and the reason is mostly one op early on that couples the samples.
MAX_WHOLE = 0.9
NOTED_WHOLE = 0.1  # from this part on, the user should know how much of forward runs unsplit
# How often forward may be computed more than in a split that couples nothing: once, for backward slices behind a tail.
MAX_MORE_FORWARDS = 1
FEW_LOOPS = 2  # slices and, behind a tail, slices of backward
MAX_LOOPS = 2 * FEW_LOOPS  # the same before and behind a value that is put together; each has a body to compile


def choose_axes(
    joint: JointGraph,
    said: Mapping[int, int],
    names: Mapping[int, str],
    num_groups: int | None,
    num_microbatches: int,
    *,
    tangents_are_known: bool,
) -> BatchAxes:
    """Find what carries the batch: what the user has said, else the choice that leaves the least to be computed whole.

    Args:
        joint: the graph, traced at the full batch.
        said: the axis of each input that was said to carry the batch; empty where nothing was said.
        names: what the user calls the inputs.
        num_microbatches: an axis with fewer samples is taken only where there is no other that is worth it.
        num_groups: take the batch for so many groups of samples that belong together.
        tangents_are_known: see ``batch_axes``.

    Raises:
        CannotSplitError: nothing carries the batch, or an op couples the samples.
    """
    candidates: Iterable[tuple[dict[int, int], int]]
    candidates = [(dict(said), joint.values[i].sizes[axis]) for i, axis in list(said.items())[:1]] or list(
        found_seeds(joint)
    )
    if any(joint.values[i].sizes[axis] == 1 for i, axis in said.items()):
        raise CannotSplitError(
            f"The step cannot be split into micro-batches: the batch, which was said to be at axis"
            f" {next(iter(said.values()))} of {', '.join(names[i] for i in said)}, has one sample. Leave"
            " num_microbatches at 1 for it, or leave it out where it is the last of an epoch (drop_last=True of a"
            " DataLoader)."
        )
    if num_groups is not None:
        candidates = [(seeds, num_groups) for seeds, size in candidates if size % num_groups == 0]

    def ways(seeds: Mapping[int, int], batch: int) -> Iterator[BatchAxes]:
        """The states with as much as can be inside of loops; where those are many, with one tail that stays whole."""
        axes = batch_axes(joint, seeds, batch, tangents_are_known=tangents_are_known)
        if axes.num_loops > FEW_LOOPS:
            whole = batch_axes(joint, seeds, batch, tangents_are_known=tangents_are_known, stays_whole=True)
            yield whole
            if _is_worth(joint, whole) and has_small_tail(joint, whole):
                return
        yield axes

    found = [axes for seeds, batch in candidates for axes in ways(seeds, batch)]
    if not found:
        raise CannotSplitError(
            "The step cannot be split into micro-batches: none of its inputs can carry the batch; beside parameters and"
            " buffers it has no tensor with more than one sample. Pass the batch in as an argument."
        )

    def score(axes: BatchAxes) -> tuple[bool, bool, float]:
        return not _is_worth(joint, axes), axes.batch < num_microbatches, whole_share(joint, axes)

    best = min(found, key=score)
    if not _is_worth(joint, best) and not said:
        seeds, batch = found[0].seeds, found[0].batch
        fewer = [{i: axis for i, axis in seeds.items() if i != left} for left in seeds] if len(seeds) > 1 else []
        best = min([best, *(axes for some in fewer for axes in ways(some, batch))], key=score)
    if not _is_worth(joint, best):
        raise _refusal(joint, found[0], names, num_microbatches)
    if best.batch < num_microbatches:  # where as many inputs have a longer axis, that is likelier the batch
        longer = (axes for axes in found if axes.batch >= num_microbatches and len(axes.seeds) >= len(best.seeds))
        likelier = next(longer, None)
        if likelier is not None:
            raise _refusal(joint, likelier, names, num_microbatches)
    return best


def _is_worth(joint: JointGraph, axes: BatchAxes) -> bool:
    """Whether most of the step is inside of few loops, and little of it is computed again and again: once a loop at
    most."""
    once = 2 if axes.backward_level else 1  # a loop of backward by itself computes again what it needs of forward
    is_often = axes.num_loops > once + MAX_MORE_FORWARDS and num_forwards(joint, axes) > once + MAX_MORE_FORWARDS
    return 0 < axes.num_loops <= MAX_LOOPS and not is_often and whole_share(joint, axes) <= MAX_WHOLE


def has_small_tail(joint: JointGraph, axes: BatchAxes) -> bool:
    """Whether hardly anything of forward runs whole, and that once: between slices of forward and of backward."""
    return axes.num_loops <= FEW_LOOPS and whole_share(joint, axes) < NOTED_WHOLE


def num_forwards(joint: JointGraph, axes: BatchAxes) -> float:
    """How often forward is computed: its elements that depend on the batch, over all loops and outside of them."""
    sizes = _forward_sizes(joint)
    position = {node: index for index, node in enumerate(joint.nodes)}
    computed = sum(size for index, size in sizes.items() if not axes.states[index].is_inside)
    for level in range(axes.num_loops):
        pending = [i for i, state in enumerate(axes.states) if state.is_inside and state.level == level]
        inside: set[int] = set()
        while pending:
            index = pending.pop()
            if index not in inside:
                inside.add(index)
                read = _read_inside(joint, axes, position, index)
                pending += [i for i in read if axes.is_computed(i, level)]
        computed += sum(sizes.get(index, 0) for index in inside)
    return computed / max(1, sum(sizes.values()))


def _read_inside(joint: JointGraph, axes: BatchAxes, position: Mapping[fx.Node, int], index: int) -> list[int]:
    """What an op inside of a loop reads of the loop's own slice."""
    if joint.nodes[index].target is operator.getitem:
        return [joint.values[index].inputs[0]]
    uses = zip(tensor_operands(joint.nodes[index]), axes.uses.get(index, ()), strict=False)
    return [position[operand] for operand, use in uses if use == "inside"]


def batch_values(joint: JointGraph) -> frozenset[int]:
    """All that depends on an input of the step other than its parameters."""
    found = set(batch_inputs(joint))
    for value in joint.values:
        if found.intersection(value.inputs):
            found.add(value.index)
    return frozenset(i for i in found if joint.values[i].kind is not OpKind.INPUT)


def before_tail(joint: JointGraph, start: int) -> set[int]:
    """What of the batch a value is computed from."""
    found: set[int] = set()
    of_batch = batch_values(joint)
    stack = list(joint.values[start].inputs)
    while stack:
        index = stack.pop()
        if index not in found and index in of_batch:
            found.add(index)
            stack.extend(joint.values[index].inputs)
    return found


def _forward_sizes(joint: JointGraph) -> dict[int, int]:
    """The elements of each value of forward that depends on the batch."""
    return {i: joint.values[i].numel for i in batch_values(joint) if joint.values[i].side is Side.FORWARD}


def whole_share(joint: JointGraph, axes: BatchAxes) -> float:
    """The part of forward's elements that depend on the batch and are computed outside of the loops."""
    sizes = _forward_sizes(joint)
    outside = sum(size for i, size in sizes.items() if not axes.states[i].is_inside)
    return outside / max(1, sum(sizes.values()))


def _refusal(joint: JointGraph, axes: BatchAxes, names: Mapping[int, str], num_microbatches: int) -> CannotSplitError:
    """The error for a step of which most is whole: the first op that needs all of the batch, and what would help."""
    culprits = [v for v, state in zip(joint.values, axes.states, strict=True) if state.why]
    first = min(culprits, key=lambda value: (value.side is Side.BACKWARD, value.index), default=None)
    why = "" if first is None else axes.states[first.index].why
    if first is None:
        first = next((v for v in joint.values if _gathers(joint, axes, v.index)), None)
        why = "" if first is None else f"{first.op} needs the whole batch"
    inputs = ", ".join(names[i] for i in axes.seeds)
    tried = f"with {axes.batch} samples at axis {next(iter(axes.seeds.values()))} of {inputs}"
    if first is None:
        return CannotSplitError(
            f"The step cannot be split into micro-batches: {tried}, hardly any of it depends on the batch. Pass the"
            " batch in as an argument, and say with batch_axes which axis it is."
        )
    place = f" at {first.source}" if first.source else ""
    module = f" (module {first.module})" if first.module else ""
    return CannotSplitError(
        f"The step cannot be split into micro-batches: {tried}, {why}, in {first.name}{place}{module}."
        f"{_on_short_axis(joint, axes, names, num_microbatches)} {_remedy(first.op, why)}"
    )


def _on_short_axis(joint: JointGraph, axes: BatchAxes, names: Mapping[int, str], num_microbatches: int) -> str:
    """What is to be known where the first axis was passed over because it has fewer samples than there are slices."""
    short = {i: joint.values[i].sizes[0] for i, axis in axes.seeds.items() if axis}
    if not short or min(short.values()) >= num_microbatches:
        return ""
    index, size = min(short.items(), key=lambda entry: entry[1])
    limit = "such a batch cannot be split" if size == 1 else f"num_microbatches is at most {size}"
    return f" If axis 0 of {names[index]}, of size {size}, is the batch, {limit}."


def _gathers(joint: JointGraph, axes: BatchAxes, index: int) -> bool:
    """Whether an op takes whole what could be had slice by slice, at no cost, so that all behind it is whole."""
    state, value = axes.states[index], joint.values[index]
    return state.dependence is Dependence.WHOLE and any(axes.states[i].is_inside for i in value.inputs)


def _remedy(op: str, why: str) -> str:
    if ("var_mean" in op or "batch_norm" in op) and "no rule" not in why:
        return (
            "This is what batch norm in training does: the samples are normalised together, so a smaller batch is"
            ' another function. batch_norm="per_microbatch" (REMAT_BATCH_NORM) takes each micro-batch by itself, as an'
            " accumulation loop does; group norm, or eval mode, does without the batch."
        )
    if "no rule" in why:
        return (
            "If the op treats each sample by itself, say so with remat_compiler.register_batch_rule; else compute it"
            " outside of the compiled step, or leave the batch whole (num_microbatches=1)."
        )
    return (
        "Compute it outside of the compiled step, or leave the batch whole (num_microbatches=1); if one of these inputs"
        " does not carry the batch, name those that do with batch_axes."
    )


def split_notes(joint: JointGraph, axes: BatchAxes, num_loops: int, has_groups: bool) -> tuple[str, ...]:
    """What the user should know of a split; ``has_groups`` where batch norm takes each micro-batch by itself."""
    notes = _notes_on_samples(joint, axes) if num_loops else ()
    if has_groups:
        text = "batch norm takes each micro-batch by itself, and its running statistics follow one after another"
        notes = (*notes, text)
    return (*notes, *_notes_on_whole(joint, axes, num_loops))


def _notes_on_samples(joint: JointGraph, axes: BatchAxes) -> tuple[str, ...]:
    """Whether random numbers of the batch are drawn for all of it."""
    drawn = [v for v, node in zip(joint.values, joint.nodes, strict=True) if draws_from_generator(node) and v.sizes]
    if not any(value.numel >= axes.batch and value.is_float for value in drawn):
        return ()
    return (
        "random numbers come from a generator that moves on: they are drawn for the whole batch, outside of the loops",
    )


def _notes_on_whole(joint: JointGraph, axes: BatchAxes, num_loops: int) -> tuple[str, ...]:
    if not num_loops:
        return ("nothing of this graph runs in micro-batches: all that depends on the batch needs the whole of it",)
    share = whole_share(joint, axes)
    if share < NOTED_WHOLE:
        return ()
    reason = next((state.why for state in axes.states if state.why), "")
    return (
        f"{share:.0%} of forward runs on the whole batch, outside of the loops" + (f": {reason}" if reason else ""),
    )
