"""The tail: what follows the value from which the largest one of forward is made, up to the loss.

With a large vocabulary the logits alone can take more memory than all layers before them. Then it is enough to run the
last product and the loss in slices, of rows and not of samples, and to keep the rest of the step whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from .batch import BatchAxes, batch_axes, batch_inputs, batch_values, before_tail
from .joint import JointGraph, Side, Value

# A tail is worth slices of its own where its product makes what it reads so much larger.
GROWTH = 2


def find_tail(joint: JointGraph, *, tangents_are_known: bool) -> BatchAxes | None:
    """The states of a step whose tail runs in slices; ``None`` where its largest value is no larger than what it is
    made from."""
    start = _start(joint)
    if start is None:
        return None
    largest = _largest(joint)
    for seeds, rows in _seeds(joint, start):
        axes = batch_axes(joint, seeds, rows, tangents_are_known=tangents_are_known, tail_of=start)
        if axes.states[largest].is_inside and axes.num_loops == max(1, axes.backward_level + 1):
            return axes
    return None


def _largest(joint: JointGraph) -> int:
    return max(joint.activations, key=lambda i: (joint.values[i].numel, -i), default=-1)


def _start(joint: JointGraph) -> int | None:
    """From the largest activation back to the first one that is much smaller."""
    index = _largest(joint)
    while index >= 0:
        operands = [i for i in joint.values[index].inputs if i in joint.activations]
        source = max(operands, key=lambda i: joint.values[i].numel, default=None)
        if source is None:
            return None
        if joint.values[source].dtype is not None and GROWTH * joint.values[source].numel <= joint.values[index].numel:
            return source if joint.values[source].sizes and joint.values[source].sizes[0] > 1 else None
        index = source
    return None


def _seeds(joint: JointGraph, start: int) -> Iterator[tuple[dict[int, int], int]]:
    """What carries the rows into the tail, the finest rows first: its start, and beside it what of the batch is not
    computed from those (labels, masks), where it first has as many rows."""
    rows = joint.values[start].sizes[0]
    before = before_tail(joint, start)
    for value in joint.values:
        if value.index != start and before.intersection(value.inputs):
            before.add(value.index)
    of_batch = batch_values(joint) | set(batch_inputs(joint))
    beside = of_batch - before
    sizes = [joint.values[i].sizes[0] for i in beside if joint.values[i].sizes]
    finer = [size for size in sizes if size > 1 and rows % size == 0]
    for batch in dict.fromkeys(sorted([rows, *finer], reverse=True)):
        seeds, reached = {start: 0}, {start}
        for value in joint.values:
            if reached.intersection(value.inputs):
                reached.add(value.index)
            elif value.index in beside and _has_rows(value, batch):
                seeds[value.index] = 0
                reached.add(value.index)
        yield seeds, batch


def _has_rows(value: Value, batch: int) -> bool:
    is_early = value.side is not Side.BACKWARD and value.dtype is not None
    return is_early and bool(value.sizes) and value.sizes[0] > 0 and value.sizes[0] % batch == 0
