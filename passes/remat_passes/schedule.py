"""Schedule: the order in which forward and backward run, once it is decided what is recomputed.

Forward keeps its order. Backward keeps the order that autograd gave it, and each recomputed value is placed right
before the first op that needs it: a value that is recomputed early only takes room (torch/_functorch/partitioners.py,
``reordering_to_mimic_autograd_engine``, has the same idea).
"""

from __future__ import annotations

from dataclasses import dataclass

from .cut import Cut
from .joint import JointGraph, Role, Side
from .ops import OpKind


@dataclass(frozen=True, slots=True)
class Schedule:
    """Indices of the values in the order in which they are computed, inputs left out."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def schedule(joint: JointGraph, cut: Cut) -> Schedule:
    """The order of both graphs for a decision."""
    return Schedule(forward=_forward(joint, cut), backward=_backward(joint, cut))


def _forward(joint: JointGraph, cut: Cut) -> tuple[int, ...]:
    wanted: set[int] = set()
    stack = [*joint.forward_outputs, *cut.saved]
    stack += [v.index for v in joint.values if v.kind is OpKind.EFFECT and v.side is Side.FORWARD]
    while stack:
        index = stack.pop()
        if index not in wanted:
            wanted.add(index)
            stack.extend(joint.values[index].inputs)
    return tuple(sorted(i for i in wanted if joint.values[i].kind is not OpKind.INPUT))


def _backward(joint: JointGraph, cut: Cut) -> tuple[int, ...]:
    placed = {v.index for v in joint.values if v.kind is OpKind.INPUT} | cut.saved
    order: list[int] = []
    targets = [i for i in joint.backward_values if joint.values[i].role is Role.NONE]
    writes = [
        i for i in targets if joint.values[i].kind is OpKind.EFFECT
    ]  # last: nothing reads the old value after them
    for target in [*(i for i in targets if i not in writes), *joint.backward_outputs, *writes]:
        missing: set[int] = set()
        stack = [target]
        while stack:
            index = stack.pop()
            if index not in placed and index not in missing:
                missing.add(index)
                stack.extend(joint.values[index].inputs)
        order.extend(sorted(missing))
        placed |= missing
    return tuple(order)
