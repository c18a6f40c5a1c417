"""Schedule: the order in which forward and backward run, once it is decided what is recomputed.

Forward keeps its order. What belongs to neither side stands behind it in the joint graph. A compiler that fuses
computes it in the kernels that make its operands; where ops run one by one it is computed where that lets go of
operands, as the slope of an activation does. Backward keeps the order that autograd gave it, and each recomputed value
is placed right before the first op that needs it: a value that is recomputed early only takes room
(torch/_functorch/partitioners.py, ``reordering_to_mimic_autograd_engine``, has the same idea).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass

from .cut import Cut
from .joint import JointGraph, Side
from .ops import OpKind, draws_from_generator


@dataclass(frozen=True, slots=True)
class Schedule:
    """Indices of the values in the order in which they are computed, inputs left out."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def schedule(joint: JointGraph, cut: Cut, *, early: bool) -> Schedule:
    """The order of both graphs for a decision; ``early`` where ops run one by one."""
    forward = _forward(joint, cut)
    return Schedule(_early(joint, cut, forward) if early else tuple(forward), _backward(joint, cut))


def _forward(joint: JointGraph, cut: Cut) -> list[int]:
    values = joint.values
    wanted: set[int] = set()
    stack = [*joint.forward_outputs, *cut.saved, *joint.forward_effects]
    while stack:
        index = stack.pop()
        if index not in wanted:
            wanted.add(index)
            stack.extend(values[index].inputs)
    return sorted(wanted - joint.inputs)


def _early(joint: JointGraph, cut: Cut, order: list[int]) -> tuple[int, ...]:
    """Forward with what belongs to neither side where its operands would be let go, if they need more memory."""
    values = joint.values
    ends = {*joint.forward_outputs, *cut.saved}
    stays = {values[i].base for i in ends | joint.inputs}
    placed = [i for i in order if values[i].side is not Side.EITHER]
    moved: dict[int, list[int]] = defaultdict(list)  # by the value of forward that they come after; -1: the inputs
    last_use = {values[i].base: reader for reader in placed for i in values[reader].inputs}
    anchors = {**dict.fromkeys(joint.inputs, -1), **{i: i for i in placed}}
    for target in (i for i in order if values[i].side is Side.EITHER and i in ends):
        group, operands = _missing(joint, target, anchors)
        freed = {values[i].base for i in operands} - stays
        added = sum(values[i].bytes for i in group & ends)
        is_smaller = sum(values[base].bytes for base in freed) >= added > 0
        if is_smaller and not any(_has_effect(joint, i) for i in group):
            anchor = max(*(anchors[i] for i in operands), *(last_use.get(base, -1) for base in freed))
            moved[anchor] += sorted(group)
            anchors.update(dict.fromkeys(group, anchor))
    if not moved:
        return tuple(order)
    late = {i for group in moved.values() for i in group}
    found: list[int] = list(moved[-1])
    for index in order:
        if index not in late:
            found.append(index)
            found += moved[index]
    return tuple(found)


def _has_effect(joint: JointGraph, index: int) -> bool:
    return joint.values[index].kind is OpKind.EFFECT or draws_from_generator(joint.nodes[index])


def _missing(joint: JointGraph, target: int, there: Container[int]) -> tuple[set[int], set[int]]:
    """What a value needs that is not there yet, itself included, and what that is computed from."""
    group: set[int] = set()
    operands: set[int] = set()
    stack = [target]
    while stack:
        index = stack.pop()
        if index in there:
            operands.add(index)
        elif index not in group:
            group.add(index)
            stack.extend(joint.values[index].inputs)
    return group, operands


def _backward(joint: JointGraph, cut: Cut) -> tuple[int, ...]:
    values = joint.values
    placed = {*joint.inputs, *cut.saved}
    order: list[int] = []
    for target in joint.backward_targets:
        missing: set[int] = set()
        stack = [target]
        while stack:
            index = stack.pop()
            if index not in placed and index not in missing:
                missing.add(index)
                stack.extend(values[index].inputs)
        order.extend(sorted(missing) if len(missing) > 1 else missing)
        placed |= missing
    return tuple(order)
