"""The plan of a split step: the plan of its main body, seen from the whole step.

The decisions are those of the body, because that is where the activations are; peak, times and what is alive at the
peak are those of the step, with the body run once a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .batch import Dependence
from .joint import JointGraph
from .microbatch import SplitStep
from .ops import OpKind
from .plan import BatchInput, BatchValue, FrontierPoint, Microbatches, Moment, PeakValue, RematPlan

OUTSIDE = "outside"
NOWHERE = "not computed"


@dataclass(frozen=True)
class PlannedBody:
    """One body as it is called: how often, its own plan, and what is held around it."""

    level: int
    length: int
    count: int
    plan: RematPlan
    held_bytes: int  # by the step when the call starts, the body's operands among it
    operand_bytes: int  # of that, what the body's own plan counts as there

    @property
    def peak_bytes(self) -> int:
        """The peak of the step while the body runs."""
        return self.held_bytes - self.operand_bytes + self.plan.projected_peak_bytes


def plan_of_split(
    outer: RematPlan,
    bodies: Sequence[PlannedBody],
    main: PlannedBody | None,
    frontier: tuple[FrontierPoint, ...],
    calls: dict[str, PlannedBody],
    unsplit: RematPlan,
    step: SplitStep,
    joint: JointGraph,
    names: Mapping[int, str],
    notes: Sequence[str],
    *,
    tangents_are_known: bool,
) -> RematPlan:
    """Put the plans together.

    Args:
        outer: the plan of the outer graph, the calls' own memory counted.
        bodies: the plans of the bodies that have a backward.
        main: the one of them whose decisions are shown; without it, those of the outer graph.
        frontier: what was considered, as seen from the whole step.
        calls: which body each call of the outer graph runs, by the name of the call.
        unsplit: what is said of the whole step: its budget, plain Inductor's peak and time.
        step: what is computed where.
        joint: the graph of the full batch.
        names: what the user calls the inputs.
        notes: what the user should read.
        tangents_are_known: whether backward runs inside of forward's loop.
    """
    shown = outer if main is None else main.plan
    at_peak = max(bodies, key=lambda body: body.peak_bytes, default=None)
    is_inside = at_peak is not None and at_peak.peak_bytes >= outer.projected_peak_bytes
    return replace(
        shown,
        graph_id=unsplit.graph_id,
        budget_bytes=unsplit.budget_bytes,
        num_microbatches=len(step.lengths),
        projected_peak_bytes=outer.projected_peak_bytes,
        predicted_peak_bytes=outer.predicted_peak_bytes,
        inductor_peak_bytes=unsplit.inductor_peak_bytes,
        inductor_step_us=unsplit.inductor_step_us,
        baseline_bytes=outer.baseline_bytes,
        gradient_bytes=outer.gradient_bytes,
        recompute_us=round(outer.recompute_us + sum(body.plan.recompute_us * body.count for body in bodies), 3),
        step_us=round(outer.step_us + sum(body.plan.step_us * body.count for body in bodies), 3),
        lower_bound_us=round(outer.lower_bound_us + sum(b.plan.lower_bound_us * b.count for b in bodies), 3),
        schedule_class=_schedule_class(step, shown),
        frontier=frontier,
        timeline=_timeline(outer.timeline, calls),
        peak_values=_peak_values(at_peak, outer) if is_inside and at_peak is not None else outer.peak_values,
        notes=(*notes, *_notes(outer, unsplit)),
        microbatches=_microbatches(step, joint, names, tangents_are_known),
    )


def _schedule_class(step: SplitStep, shown: RematPlan) -> str:
    if step.axes.is_tail:
        return f"the tail of the step runs in {len(step.lengths)} slices; around it, {shown.schedule_class}"
    return f"the batch runs in {len(step.lengths)} slices; in each of them, {shown.schedule_class}"


def _notes(outer: RematPlan, unsplit: RematPlan) -> tuple[str, ...]:
    if outer.projected_peak_bytes < unsplit.inductor_peak_bytes:
        return ()
    return (
        "micro-batches gain nothing on this step: its gradients, which are summed up beside those of a slice, weigh"
        " more than the activations that are saved",
    )


def _timeline(outer: Sequence[Moment], calls: dict[str, PlannedBody]) -> tuple[Moment, ...]:
    """The outer graph's, each call exchanged for what happens in it."""
    moments: list[Moment] = []
    for moment in outer:
        body = calls.get(moment.name)
        if body is None:
            moments.append(moment)
            continue
        shift = body.held_bytes - body.operand_bytes
        moments.extend(replace(inner, bytes=inner.bytes + shift) for inner in body.plan.timeline)
    return tuple(moments)


def _peak_values(body: PlannedBody, outer: RematPlan) -> tuple[PeakValue, ...]:
    """What is alive at a peak inside of a body."""
    there = "parameters, buffers and inputs"
    inner = [value for value in body.plan.peak_values if value.name != there]
    known = sum(value.bytes for value in inner)
    rest = body.peak_bytes - known - outer.baseline_bytes
    held = [PeakValue(there, outer.baseline_bytes, "")]
    held += [PeakValue("held around the loop", rest, "")] if rest > 0 else []
    return tuple(sorted([*inner, *held], key=lambda value: (-value.bytes, value.name)))


def _awaited(step: SplitStep, joint: JointGraph) -> set[int]:
    """What the loops wait for: the values that they are handed, and all that those are computed from."""
    found: set[int] = set()
    stack = [handed.value for loop in step.loops if loop is not None for handed in loop.handed]
    while stack:
        index = stack.pop()
        if index not in found:
            found.add(index)
            stack.extend(joint.values[index].inputs)
    return found


def _microbatches(
    step: SplitStep, joint: JointGraph, names: Mapping[int, str], tangents_are_known: bool
) -> Microbatches:
    axes = step.axes
    outside = {i for level in step.whole for i in level}
    loops = {
        loop.level: {*loop.inside, *(made.value for made in loop.local)} for loop in step.loops if loop is not None
    }
    awaited = _awaited(step, joint)
    values = []
    for value, state in zip(joint.values, axes.states, strict=True):
        if value.kind is OpKind.INPUT:
            continue
        places = [f"loop {level}" for level, inside in sorted(loops.items()) if value.index in inside]
        places += [OUTSIDE] if value.index in outside else []
        axis = state.split.axis if state.split is not None and state.dependence is Dependence.SPLIT else None
        where = " and ".join(places) or NOWHERE
        kind = state.dependence.value
        is_end = state.needs_sum and value.index not in awaited  # what a sum goes into at the end couples nothing
        why = "" if is_end else state.why
        values.append(BatchValue(value.name, value.op, value.bytes, value.source, kind, axis, where, why))
    return Microbatches(
        batch=axes.batch,
        lengths=step.lengths,
        num_loops=len(loops),
        part="tail" if axes.is_tail else "step",
        runs_in="forward" if tangents_are_known else "forward and backward",
        inputs=tuple(BatchInput(names.get(i, joint.values[i].name), axis) for i, axis in sorted(axes.seeds.items())),
        values=tuple(values),
    )
