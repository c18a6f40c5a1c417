"""Schedule: the order in which forward and backward run, once it is decided what is recomputed.

Forward keeps its order. Backward keeps the order that autograd gave it, and each recomputed value is placed right
before the first op that needs it: a value that is recomputed early only takes room (torch/_functorch/partitioners.py,
``reordering_to_mimic_autograd_engine``, has the same idea).
"""

from __future__ import annotations

from dataclasses import dataclass

from .cut import Cut
from .joint import JointGraph


@dataclass(frozen=True, slots=True)
class Schedule:
    """Indices of the values in the order in which they are computed, inputs left out."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def schedule(joint: JointGraph, cut: Cut) -> Schedule:
    """The order of both graphs for a decision."""
    return Schedule(forward=_forward(joint, cut), backward=_backward(joint, cut))


def _forward(joint: JointGraph, cut: Cut) -> tuple[int, ...]:
    values = joint.values
    wanted: set[int] = set()
    stack = [*joint.forward_outputs, *cut.saved, *joint.forward_effects]
    while stack:
        index = stack.pop()
        if index not in wanted:
            wanted.add(index)
            stack.extend(values[index].inputs)
    return tuple(sorted(wanted - joint.inputs))


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
