"""Bound: the least time of any plan whose peak is within a budget, under the prices and the schedule class.

While a kernel of backward runs, three things are allocated for certain: what it reads and writes, the gradients that
were made before it, and every saved value that backward itself reads later. The first two are the same for every plan;
the third is linear in what is saved. So each such instant gives a problem of the cut with other bytes, and the dual of
its hull bounds the time of every plan that fits - also of one that recomputes a value more than once, because that
costs at least one recomputation. The best bound over some instants is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .cut import Cut, CutProblem, coarse_sweep
from .joint import JointGraph, Side
from .memory import MemoryModel
from .ops import OpKind

NUM_INSTANTS = 3  # of those that the chosen plan fills the most
MAX_CUTS = 10  # of each instant's hull; fewer make a lower bound that is lower, not wrong


@dataclass(frozen=True, slots=True)
class Instant:
    """A kernel of backward: bytes that every plan has then, and the values that count where they are saved."""

    index: int
    fixed_bytes: int
    waiting: frozenset[int]


def lower_bound_ps(
    joint: JointGraph, problem: CutProblem, model: MemoryModel, limit_bytes: int, chosen: Cut
) -> int | None:
    """The least time of all saves and recomputes of any plan within the limit.

    Args:
        joint: the graph, without repetitions.
        problem: its prices.
        model: for the bytes of storages.
        limit_bytes: of the peak.
        chosen: a plan of this graph, whose fullest instants are looked at.
    """
    room = limit_bytes - model.baseline_bytes

    def filled(instant: Instant) -> int:
        return instant.fixed_bytes + sum(problem[i].bytes for i in chosen.saved & instant.waiting)

    fullest = sorted(_instants(joint, problem, model), key=lambda at: (-filled(at), at.index))[:NUM_INSTANTS]
    bounds = [_bound_at(problem, instant, room) for instant in fullest]
    return max((bound for bound in bounds if bound is not None), default=None)


def _bound_at(problem: CutProblem, instant: Instant, room: int) -> int | None:
    counted = tuple(v if i in instant.waiting else replace(v, bytes=0) for i, v in enumerate(problem))
    return coarse_sweep(counted, MAX_CUTS).lower_bound_ps(max(0, room - instant.fixed_bytes))


def _instants(joint: JointGraph, problem: CutProblem, model: MemoryModel) -> Sequence[Instant]:
    runs_after: dict[int, int] = {}  # fused, an op may run as early as right after the last kernel that it needs
    last_use: dict[int, int] = {}
    products = {product for found in model.sums_of_products.values() for product in found}  # may run with their sum
    for index in joint.backward_values:
        inputs = joint.values[index].inputs
        is_kernel = not model.fuses or (joint.values[index].kind is OpKind.EXTERN and index not in products)
        runs_after[index] = index if is_kernel else max((runs_after.get(i, -1) for i in inputs), default=-1)
        for operand in inputs:
            base = joint.values[operand].base
            last_use[base] = max(last_use.get(base, -1), runs_after[index])
    outputs = {joint.values[i].base for i in joint.forward_outputs} - model.inputs
    gradients = {joint.values[i].base for i in joint.backward_outputs} - model.inputs
    made = sum(model.sizes[i] for i in outputs)
    counted = [
        (i, last) for i, last in last_use.items() if problem[i].bytes and joint.values[i].side is not Side.BACKWARD
    ]
    found = []
    for index in joint.backward_values:
        value = joint.values[index]
        if value.kind is not OpKind.EXTERN or index in products:
            continue
        results = [index, *(i for i in value.users if joint.values[i].kind is OpKind.PART)]
        operands = {joint.values[i].base for i in value.inputs} - model.inputs - outputs - gradients
        touched = [model.sizes[i] for i in (*operands, *results)]
        fixed = made + sum(touched) + model.workspaces[index]
        waiting = frozenset(i for i, last in counted if last >= index and i not in operands)
        found.append(Instant(index, fixed, waiting))
        made += sum(model.sizes[i] for i in results if i in gradients)
    return found
