"""The planner: from what the search chose to the plan that users read, every decision with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .cost import PS_PER_US, CostGraph
from .cut import Cut
from .device import DeviceSpec
from .joint import UNBACKED_SIZE, JointGraph, Role, Side, Value
from .legality import Permission, must_recompute
from .memory import COPY_SUFFIX, Instant, MemoryModel, Projection
from .ops import OpKind
from .plan import SCHEDULE_CLASS, Decision, FrontierPoint, Moment, PeakValue, RematPlan, StepSide, ValuePlan
from .search import Candidate, Choice
from .units import format_us

# A longer timeline is thinned: a picture of 80 mm, a column of a paper, has 1,890 dots beside each other in print
# (600 dots an inch).
MAX_MOMENTS = 2000


@dataclass(frozen=True, slots=True)
class Setting:
    """What a plan records of its surroundings."""

    graph_id: str
    torch_version: str
    cost_model: str
    lowering: str
    budget_bytes: int | None
    notes: tuple[str, ...]


def write_plan(
    joint: JointGraph,
    permissions: Sequence[Permission],
    costs: CostGraph,
    model: MemoryModel,
    spec: DeviceSpec,
    choice: Choice,
    setting: Setting,
) -> RematPlan:
    """The plan of one graph, whose values appear as often as they are computed."""
    cut = choice.chosen.cut
    unrolled = choice.chosen.unrolled
    if unrolled is not None:
        joint = unrolled.joint
        permissions = [permissions[i] for i in unrolled.origin]
        costs = replace(costs, values=tuple(costs.values[i] for i in unrolled.origin))
    modules = {value.name: value.module for value in joint.values}

    def step_us(time_ps: int) -> float:
        return _us(costs.fixed_ps + time_ps)

    return RematPlan(
        graph_id=setting.graph_id,
        torch_version=setting.torch_version,
        device=spec.name,
        cost_model=setting.cost_model,
        lowering=setting.lowering,
        budget_bytes=setting.budget_bytes,
        num_microbatches=1,
        projected_peak_bytes=choice.chosen.projection.peak_bytes,
        predicted_peak_bytes=choice.chosen.projection.peak_bytes,
        inductor_peak_bytes=choice.inductor.projection.peak_bytes,
        baseline_bytes=model.baseline_bytes,
        gradient_bytes=model.gradient_bytes,
        saved_bytes=cut.saved_bytes,
        recompute_us=_us(sum(costs.values[i].recompute_ps for i in cut.redo if joint.values[i].side is Side.FORWARD)),
        step_us=step_us(cut.time_ps),
        inductor_step_us=step_us(choice.inductor.cut.time_ps),
        lower_bound_us=step_us(choice.lower_bound_ps),
        schedule_class=SCHEDULE_CLASS,
        values=tuple(_value_plan(joint, permissions, costs, cut, i) for i in sorted(cut.need) if _is_shown(joint, i)),
        frontier=frontier(choice, costs.fixed_ps),
        timeline=_timeline(choice.chosen.projection, modules),
        peak_values=_peak_values(choice.chosen.projection, modules),
        symbols=joint.symbols,
        notes=(*setting.notes, *_notes(joint, permissions, choice)),
    )


def _us(time_ps: int) -> float:
    return round(time_ps / PS_PER_US, 3)


def frontier(choice: Choice, fixed_ps: int) -> tuple[FrontierPoint, ...]:
    """What was considered, by rising time. A chosen plan that another one beats by a hair stands among them as well."""
    chosen = frontier_point(choice.chosen, fixed_ps)
    others = [frontier_point(candidate, fixed_ps) for candidate in choice.frontier]
    points = {*others, chosen}
    ordered = sorted(points, key=lambda point: (point.step_us, -point.peak_bytes, point.saved_bytes))
    return tuple(replace(point, chosen=point == chosen) for point in ordered)


def frontier_point(candidate: Candidate, fixed_ps: int) -> FrontierPoint:
    """One decision of a graph whose undecided part takes ``fixed_ps``."""
    peak_bytes, step_us = candidate.projection.peak_bytes, _us(fixed_ps + candidate.cut.time_ps)
    return FrontierPoint(peak_bytes, candidate.cut.saved_bytes, step_us, chosen=False)


def _timeline(projection: Projection, modules: Mapping[str, str]) -> tuple[Moment, ...]:
    """The memory at each kernel. Of more than ``MAX_MOMENTS``, each run of neighbours is stood for by its highest."""
    kernels = projection.timeline
    length = -(-len(kernels) // MAX_MOMENTS) or 1
    runs = [kernels[start : start + length] for start in range(0, len(kernels), length)]
    return tuple(_moment(max(run, key=lambda kernel: kernel.bytes), modules) for run in runs)


def _moment(kernel: Instant, modules: Mapping[str, str]) -> Moment:
    side: StepSide = "backward" if kernel.is_backward else "forward"
    return Moment(kernel.name, modules.get(kernel.name, ""), side, kernel.bytes)


def _peak_values(projection: Projection, modules: Mapping[str, str]) -> tuple[PeakValue, ...]:
    """What is alive at the peak; a copy belongs to the module of what it copies."""
    return tuple(
        PeakValue(name, size, modules.get(name.removesuffix(COPY_SUFFIX), "")) for name, size in projection.peak_values
    )


def _is_shown(joint: JointGraph, index: int) -> bool:
    """Sizes and ops with several outputs have no bytes of their own to decide about."""
    value = joint.values[index]
    return value.dtype is not None and value.kind is not OpKind.SYMBOLIC


def _value_plan(
    joint: JointGraph, permissions: Sequence[Permission], costs: CostGraph, cut: Cut, index: int
) -> ValuePlan:
    value = joint.values[index]
    decision, reason = _reason(joint, permissions[index], costs, cut, value)
    return ValuePlan(
        name=value.name,
        op=value.op,
        shape=tuple(size if isinstance(size, int) else str(size) for size in value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        bytes=value.bytes,
        module=value.module,
        source=value.source,
        decision=decision,
        reason=reason,
        cost_us=_us(_recompute_ps(joint, costs, value)),
        inputs=tuple(joint.values[i].name for i in _tensor_inputs(joint, value)),
    )


def _recompute_ps(joint: JointGraph, costs: CostGraph, value: Value) -> int:
    """The price of recomputing; a part's is that of the op it is a part of."""
    source = value.inputs[0] if value.kind is OpKind.PART else value.index
    return costs.values[source].recompute_ps


def _tensor_inputs(joint: JointGraph, value: Value) -> list[int]:
    """The values that recomputing this one reads; an op with several outputs is seen through."""
    found: list[int] = []
    for index in value.inputs:
        source = joint.values[index]
        if source.dtype is None and source.kind is not OpKind.SYMBOLIC:
            found.extend(_tensor_inputs(joint, source))
        elif source.dtype is not None:
            found.append(index)
    return list(dict.fromkeys(found))


def _reason(
    joint: JointGraph, permission: Permission, costs: CostGraph, cut: Cut, value: Value
) -> tuple[Decision, str]:
    if value.index in joint.mutated_inputs:
        return "save", "the step changes this input in place, so backward gets a copy made before"
    if value.role is not Role.NONE or value.kind is OpKind.INPUT:
        return "free", "an input of the step, alive anyway"
    if value.base != value.index:
        return "free", f"a view of {joint.values[value.base].name}"
    if value.is_copy:
        which = f"in pass {value.repetition} over its block" if value.repetition else "in the backward of its block"
        return "recompute", f"computed once more, {which}: what came before it was not kept"
    if value.side is Side.EITHER and value.index in cut.redo and not must_recompute(joint, value):
        return "free", "only backward needs it, so it is computed there, once"
    if value.index in cut.redo:
        return "recompute", _why_recompute(joint, permission, costs, value)
    if value.index in joint.forward_outputs:
        return "free", "an output of the step, alive anyway"
    return "save", _why_save(permission, costs, joint, value)


def _why_recompute(joint: JointGraph, permission: Permission, costs: CostGraph, value: Value) -> str:
    if must_recompute(joint, value):
        return permission.no_save or ""
    cost, redo = costs.values[value.index], _recompute_ps(joint, costs, value)
    if redo <= cost.save_ps:
        return f"recomputing takes {format_us(_us(redo))}, writing and reading it {format_us(_us(cost.save_ps))}"
    return f"recomputing takes {format_us(_us(redo))} and frees its bytes"


def _why_save(permission: Permission, costs: CostGraph, joint: JointGraph, value: Value) -> str:
    if permission.no_recompute:
        return permission.no_recompute
    blocked = joint.values[value.inputs[0]] if value.kind is OpKind.PART else None
    redo = _recompute_ps(joint, costs, value)
    if blocked is not None and redo == 0:
        return f"a part of {blocked.name}, which is not recomputed"
    return f"recomputing it (and what it needs) would take {format_us(_us(redo))} or more"


def _notes(joint: JointGraph, permissions: Sequence[Permission], choice: Choice) -> tuple[str, ...]:
    notes = []
    chosen, plain = choice.chosen, choice.inductor
    if chosen.projection.peak_bytes >= plain.projection.peak_bytes:
        gained = "only time" if chosen.cut.time_ps < plain.cut.time_ps else "nothing"
        notes.append(f"{gained} is gained on this graph: plain Inductor's plan is predicted to need no more memory")
    if not choice.inductor.is_legal:
        notes.append("plain Inductor's own plan breaks a rule of correctness on this graph and was not considered")
    if joint.symbols:
        sizes = ", ".join(f"{name} = {hint}" for name, hint in joint.symbols)
        notes.append(f"sizes are symbolic; planned for {sizes}; larger ones need more than projected")
    known = {name for name, _ in joint.symbols}
    symbolic = [size for value in joint.values for size in value.shape if not isinstance(size, int)]
    unknown = sorted({str(symbol) for size in symbolic for symbol in size.free_symbols} - known)
    unbacked = [name for name in unknown if name.startswith("u")]
    if unbacked:
        notes.append(
            f"the sizes {', '.join(unbacked)} depend on the contents of tensors and are not known: {UNBACKED_SIZE} was"
            " assumed for each, so the projected peak is a guess and a budget does not bind"
        )
    return tuple(notes)
