"""Again: a joint graph in which values that are computed more than once appear more than once.

A chain plan passes over some blocks several times. Here each pass gets values of its own, so that all later stages -
the cut, the schedule, the memory model, the extraction - see an ordinary joint graph, in which each value is saved or
is recomputed once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from .blocks import Blocks
from .chain import ChainPlan, Drop, Hold
from .cut import Cut, CutProblem
from .joint import JointGraph, Side, Value
from .ops import draws_from_generator

# Which computation of a value: (index, 0) is the one in forward, (index, p) the one in pass p, (index, BACKWARD_PASS)
# the one in the backward of its block, where a pass before it has dropped it.
Instance = tuple[int, int]
BACKWARD_PASS = -1


@dataclass(frozen=True)
class Unrolled:
    """The graph with repetitions, where each of its values comes from, and what is saved."""

    joint: JointGraph
    origin: tuple[int, ...]  # the value of the original graph that each value computes
    saved: frozenset[int]

    def on_original(self, cut: Cut) -> Cut:
        """A decision of this graph as far as the original graph can say it: what is saved is the same."""
        need, redo = (frozenset(self.origin[i] for i in values) for values in (cut.need, cut.redo - cut.saved))
        saved = frozenset(self.origin[i] for i in cut.saved)
        return Cut(need, redo - saved, cut.saved_bytes, cut.time_ps)


@dataclass(frozen=True, slots=True)
class _Passes:
    """A chain plan, read by block and by pass."""

    hold: Mapping[int, Hold]  # how each block is held for its backward
    pass_of: Mapping[int, int]  # in which pass
    first: tuple[int, ...]  # the first block of each pass
    parent: tuple[int, ...]  # the pass that a pass takes its input from


def _passes(plan: ChainPlan) -> _Passes:
    hold: dict[int, Hold] = {}
    pass_of: dict[int, int] = {}
    first, parent = [0], [0]
    stack = [(plan, 0)]
    while stack:
        part, number = stack.pop()
        for step in part.steps:
            if isinstance(step, Hold):
                covered = range(step.first, step.first + step.option.span)
                hold.update(dict.fromkeys(covered, step))
                pass_of.update(dict.fromkeys(covered, number))
                continue
            first.append(step.first)
            parent.append(number)
            stack.append((step.again, len(first) - 1))
    return _Passes(hold, pass_of, tuple(first), tuple(parent))


def unroll(
    joint: JointGraph,
    problem: CutProblem,
    chain: Blocks,
    always_saved: frozenset[int],
    plan: ChainPlan,
) -> Unrolled:
    """The graph that a chain plan asks for.

    Args:
        joint: the graph without repetitions.
        problem: its prices; what may not be recomputed is there once.
        chain: its blocks.
        always_saved: what is saved besides, of the values that belong to no block.
        plan: the passes over the blocks.
    """
    return _Unrolling(joint, problem, chain, plan).run(always_saved)


def may_repeat(joint: JointGraph, problem: CutProblem, index: int) -> bool:
    """Whether a value may be computed more than once; what may not is kept from its only computation on."""
    return problem[index].recompute_ps is not None and not draws_from_generator(joint.nodes[index])


class _Unrolling:
    def __init__(self, joint: JointGraph, problem: CutProblem, chain: Blocks, plan: ChainPlan) -> None:
        self.joint, self.problem, self.chain = joint, problem, chain
        self.passes = _passes(plan)
        self.dropped = [step.first for step in plan.steps if isinstance(step, Drop)]
        self.block_behind = {point: k + 1 for k, point in enumerate(chain.boundaries)}
        self.position: dict[Instance, int] = {}
        self.order: list[Instance] = []

    def run(self, always_saved: frozenset[int]) -> Unrolled:
        for value in self.joint.values:
            self._emit((value.index, 0))
        for index in self.joint.backward_outputs:
            self._emit(self._read_in_backward(index))
        origin = tuple(index for index, _ in self.order)
        at = [self.position[index, 0] for index in range(len(self.joint.values))]
        saved = {at[i] for i in always_saved}
        for block, hold in self.passes.hold.items():
            if self.passes.pass_of[block] == 0:
                saved.update(at[i] for i in hold.option.held)
        saved.update(at[self.chain.boundaries[first - 1]] for first in self.dropped if first)
        return Unrolled(self._graph(at), origin, frozenset(saved))

    # -- which computation an op reads

    def _in_pass(self, index: int, number: int) -> Instance:
        """The value as pass ``number`` has it: computed there, or taken from the pass around it."""
        block = self.chain.block_of[index]
        while number and block is not None and block < self.passes.first[number]:
            number = self.passes.parent[number]
        return (index, number if self._is_repeated(index) else 0)

    def _in_backward(self, index: int) -> Instance:
        """The value as backward has it."""
        block = self.chain.block_of[index]
        if block is None or not self._is_repeated(index):
            return (index, 0)
        behind = self.block_behind.get(index, block)
        if self.passes.hold[behind] is not self.passes.hold[block]:  # a boundary, and not inside of what is held as one
            return self._in_pass(index, self.passes.pass_of[behind])
        number = self.passes.pass_of[block]
        if number == 0 or index in self.passes.hold[block].option.held:
            return self._in_pass(index, number)
        return (index, BACKWARD_PASS)

    def _is_repeated(self, index: int) -> bool:
        return self.chain.block_of[index] is not None and may_repeat(self.joint, self.problem, index)

    def _operands(self, instance: Instance) -> tuple[Instance, ...]:
        index, number = instance
        value = self.joint.values[index]
        if number == BACKWARD_PASS or value.side is Side.BACKWARD:
            return tuple(self._read_in_backward(i) for i in value.inputs)
        return tuple(self._in_pass(i, number) for i in value.inputs)

    def _read_in_backward(self, index: int) -> Instance:
        """What backward reads or returns, forward's values and its own."""
        return (index, 0) if self.joint.values[index].side is Side.BACKWARD else self._in_backward(index)

    # -- the new graph

    def _emit(self, instance: Instance) -> None:
        stack = [instance]
        while stack:
            missing = [operand for operand in self._operands(stack[-1]) if operand not in self.position]
            if missing:
                stack.extend(reversed(missing))
                continue
            ready = stack.pop()
            if ready not in self.position:
                self.position[ready] = len(self.order)
                self.order.append(ready)

    def _graph(self, at: Sequence[int]) -> JointGraph:
        joint, position = self.joint, self.position
        inputs = [tuple(position[operand] for operand in self._operands(instance)) for instance in self.order]
        users: list[list[int]] = [[] for _ in self.order]
        for reader, operands in enumerate(inputs):
            for operand in dict.fromkeys(operands):
                users[operand].append(reader)
        values: list[Value] = []
        taken = {value.name for value in joint.values}
        for place, (index, number) in enumerate(self.order):
            value = joint.values[index]
            shared = value.base != index
            name = value.name if number == 0 else _free_name(value.name, _suffix(number), taken)
            taken.add(name)
            values.append(
                replace(
                    value,
                    index=place,
                    name=name,
                    side=value.side if number == 0 else Side.EITHER,
                    inputs=inputs[place],
                    users=tuple(users[place]),
                    repetition=max(number, 0),
                    is_copy=number != 0,
                    base=values[inputs[place][_operand_of_base(joint, value)]].base if shared else place,
                )
            )
        return replace(
            joint,
            values=tuple(values),
            nodes=tuple(joint.nodes[index] for index, _ in self.order),
            forward_outputs=tuple(at[i] for i in joint.forward_outputs),
            backward_outputs=tuple(position[self._read_in_backward(i)] for i in joint.backward_outputs),
            static_inputs=frozenset(at[i] for i in joint.static_inputs),
            trained_inputs=frozenset(at[i] for i in joint.trained_inputs),
            mutated_inputs=frozenset(at[i] for i in joint.mutated_inputs),
        )


def _suffix(number: int) -> str:
    return "_again" if number == BACKWARD_PASS else f"_pass{number}"


def _free_name(name: str, suffix: str, taken: Collection[str]) -> str:
    """The name with its suffix, as often as it takes: an op of the user's may be called that."""
    name += suffix
    while name in taken:
        name += suffix
    return name


def repetition_of(name: str) -> int:
    """The pass that a value of this name belongs to; 0 where it belongs to none."""
    suffix = name.rpartition("_pass")[2]
    return int(suffix) if "_pass" in name and suffix.isdigit() else 0


def _operand_of_base(joint: JointGraph, value: Value) -> int:
    """Which operand a view shows."""
    return next(k for k, i in enumerate(value.inputs) if joint.values[i].base == value.base)
