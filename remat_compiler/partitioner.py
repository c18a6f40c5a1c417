"""The partitioner: one joint graph in, its forward and backward out. This is the table of contents of remat.

Inductor calls it through ``config.custom_partitioner_fn``, after its own passes on the joint graph; the eager lowering
calls it through AOTAutograd. Each line of ``_decide`` is one stage in ``remat_passes`` that returns a new frozen value.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

import remat_passes
from remat_passes.batch import split_notes
from remat_passes.cost import CostGraph, price
from remat_passes.cut import Cut, CutProblem
from remat_passes.device import DeviceSpec
from remat_passes.errors import BudgetInfeasibleError
from remat_passes.joint import JointGraph, Side, capture
from remat_passes.legality import Permission, classify
from remat_passes.memory import MemoryModel
from remat_passes.microbatch import Body
from remat_passes.ops import written_operands
from remat_passes.outer import body_of_call
from remat_passes.plan import RematPlan
from remat_passes.planner import Setting, write_plan
from remat_passes.schedule import schedule
from remat_passes.search import Candidate, Choice, cut_problem, inductor_candidate, refusal, search
from remat_passes.split_plan import PlannedBody, plan_of_split

from . import torch_private
from .calibrate import default_cache_dir
from .first_step import FirstStep
from .measured_costs import KernelTimes, kernel_times
from .microbatches import SplitGraph, joined, split
from .options import Options, resolve_budget
from .plan_log import next_graph_number
from .readback import StepReader
from .step_inputs import StepInputs


@dataclass(frozen=True)
class Decided:
    """What the stages decided about one graph."""

    joint: JointGraph
    choice: Choice
    plan: RematPlan
    joint_text: str
    planning_seconds: float


@dataclass(frozen=True)
class Made:
    """One graph that was cut: its plan, its graphs as text, what Inductor's code says of its memory, and the watch over
    its first step."""

    plan: RematPlan
    planning_seconds: float
    texts: dict[str, str]
    reader: StepReader
    first_step: FirstStep

    @property
    def final_plan(self) -> RematPlan:
        """The plan with the peak that was read back from Inductor's code, where it could be read."""
        peak = self.reader.peak_bytes(self.plan.baseline_bytes)
        return self.plan if peak is None else replace(self.plan, projected_peak_bytes=peak)


NOTHING_KNOWN = StepInputs()


class RematPartitioner(torch_private.CustomPartitionerFn):
    """Cuts joint graphs by the options of one ``torch.compile`` call, at the prices of one device."""

    def __init__(
        self,
        options: Options,
        spec: DeviceSpec,
        limit_bytes: int | None = None,
        correction: str | None = None,
        inputs: StepInputs = NOTHING_KNOWN,
    ) -> None:
        self.options = options
        self.spec = spec
        self.inputs = inputs
        self.limit_bytes = limit_bytes  # the highest projected peak to accept, where a trial has shown a better one
        self.correction = correction  # what that trial has shown, for the plan's notes
        self.made: list[Made] = []
        self.table_hashes: list[str] = []  # of the measured times that each graph was priced with

    def __call__(  # type: ignore[override]  # what AOTAutograd passes on, by name
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **keywords: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition one joint graph (torch's ``CustomPartitionerFn`` interface)."""
        static = list(static_lifetime_input_indices or [])
        torch_private.prepare_joint_module(gm)
        if self.options.num_microbatches > 1:
            gm, decided = self._decide_split(gm, num_fwd_outputs, static)
        else:
            decided = self._decide(gm, num_fwd_outputs, static)
        forward, backward = _act(gm, decided, num_fwd_outputs)
        texts = {"joint": decided.joint_text, "forward": str(forward.graph), "backward": str(backward.graph)}
        reader = StepReader(decided.joint.device_type, num_fwd_outputs)
        first_step = FirstStep(decided.joint.device_type, num_fwd_outputs)
        self.made.append(Made(decided.plan, decided.planning_seconds, texts, reader, first_step))
        return forward, backward

    def compiled(self, graph: torch_private.CompiledGraph) -> None:
        """Take one of the compiled graphs. With several joint graphs in one module it is not known whose it is."""
        if len(self.made) != 1:
            return
        if graph.source:
            self.made[0].reader.read(graph.source, graph.signature, graph.inputs, is_backward=graph.is_backward)
        self.made[0].first_step.add(graph)

    def uuid(self) -> str:
        """Inductor's cache key: all that a plan depends on."""
        settings = f"{self.limit_bytes} {self.inputs} {torch_private.reuses_saved_values()}"
        parts = (self.options.identity(), repr(self.spec), settings, torch.__version__, _source_hash())
        return hashlib.sha256("\n".join((*parts, *self.table_hashes)).encode()).hexdigest()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Inductor's cache also pickles its whole configuration, and what was made must not be a part of the key."""
        return (str, (self.uuid(),))

    def _staged(
        self,
        gm: fx.GraphModule,
        num_fwd_outputs: int,
        static: list[int],
        *,
        is_body: bool = False,
        yardstick: bool = True,
    ) -> _Staged:
        """All that is known of a graph before anything is decided; without a yardstick, as if all were saved."""
        joint = capture(gm.graph, num_fwd_outputs, static, torch_private.pinned_to_backward(gm.graph))
        permissions = classify(joint)
        times = kernel_times(joint, self.spec, self.options, default_cache_dir(os.environ))
        self.table_hashes.append(times.content_hash)
        costs = price(joint, self.spec, times.table)
        problem = cut_problem(joint, permissions, costs)
        allocated = None if is_body else _allocated_bytes(joint.device_type)
        fuses = self.options.lowering == "inductor"
        model = MemoryModel(joint, fuses, allocated, torch.get_num_threads(), is_body)
        names = (
            torch_private.inductor_saved_names(gm, num_fwd_outputs, static)
            if yardstick
            else frozenset(joint.values[i].name for i in joint.required)
        )
        return _Staged(
            joint, permissions, costs, problem, model, times, inductor_candidate(joint, problem, model, names)
        )

    def _decide(self, gm: fx.GraphModule, num_fwd_outputs: int, static: list[int]) -> Decided:
        start = time.perf_counter()
        staged = self._staged(gm, num_fwd_outputs, static)
        budget = self._budget_bytes(staged)
        plan_text = str(gm.graph)
        choice = staged.search(budget, self.limit_bytes)
        plan = staged.plan(choice, self._setting(staged, budget), self.spec)
        seconds = time.perf_counter() - start
        return Decided(staged.joint, choice, plan, plan_text, seconds)

    def _budget_bytes(self, staged: _Staged) -> int | None:
        return _budget_bytes(self.options, staged.joint, staged.model, staged.inductor.projection.peak_bytes)

    def _setting(self, staged: _Staged, budget: int | None) -> Setting:
        setting = _setting(self.options, staged.times, staged.joint, budget, next_graph_number() + len(self.made))
        return setting if self.correction is None else replace(setting, notes=(self.correction, *setting.notes))

    # -- micro-batches

    def _decide_split(
        self, gm: fx.GraphModule, num_fwd_outputs: int, static: list[int]
    ) -> tuple[fx.GraphModule, Decided]:
        """The outer graph of a step that runs in micro-batches, its bodies planned, and what was decided about it."""
        start = time.perf_counter()
        text = str(gm.graph)
        full = self._staged(gm, num_fwd_outputs, static)
        budget = self._budget_bytes(full)
        graph = split(gm, full.joint, num_fwd_outputs, self.options, self.inputs)
        outer = graph.outer({key: body.module for key, body in graph.bodies.items()})
        staged = self._staged(outer, num_fwd_outputs, static, yardstick=False)
        calls = {i: body_of_call(name) for i, name in torch_private.calls_of(outer.graph).items()}
        held = _held_bytes(staged, calls)
        planned: dict[str, PlannedBody] = {}
        inner_bytes: dict[str, int] = {}
        for key, body in graph.bodies.items():
            name = graph.name(key)
            inner_bytes[name], plan = self._plan_body(outer, graph, key, held[name], budget)
            if plan is not None:
                count = sum(count for called, count in calls.values() if called == name)
                planned[name] = PlannedBody(*key, count, plan, held[name], _operand_bytes(plan, body))
        # A chunk holds the results of its slices, and then those put together.
        called_bytes = {
            i: inner_bytes[name] + 2 * (count - 1) * graph.split_bytes(name) for i, (name, count) in calls.items()
        }
        model = replace(staged.model, called_bytes=called_bytes)
        again = replace(staged.inductor, projection=model.project(staged.inductor.cut))
        staged = replace(staged.without_prices(calls), model=model, inductor=again)
        choice = staged.search(None, NO_LIMIT)
        peak_bytes = choice.chosen.projection.peak_bytes
        if budget is not None and peak_bytes > (budget if self.limit_bytes is None else self.limit_bytes):
            raise refusal(budget, peak_bytes, choice.chosen.projection.peak_values, model.gradient_bytes)
        setting = self._setting(full, budget)
        num_loops = sum(loop is not None for loop in graph.step.loops)
        notes = (
            *setting.notes,
            *split_notes(full.joint, graph.step.axes, num_loops, self.inputs.num_groups is not None),
        )
        plan = plan_of_split(
            staged.plan(choice, setting, self.spec),
            tuple(planned.values()),
            {staged.joint.values[i].name: planned[name] for i, (name, _) in calls.items() if name in planned},
            full.plan(full.as_inductor(), setting, self.spec),
            graph.step,
            full.joint,
            graph.names,
            notes,
            tangents_are_known=graph.tangents_are_known,
        )
        return outer, Decided(staged.joint, choice, plan, text, time.perf_counter() - start)

    def _plan_body(
        self, outer: fx.GraphModule, graph: SplitGraph, key: tuple[int, int], held_bytes: int, budget: int | None
    ) -> tuple[int, RematPlan | None]:
        """Plan one body under what the budget leaves, and put what came of it into the outer graph.

        What it takes above its operands in bytes, and its plan where it has a backward.
        """
        body, loop, name = graph.bodies[key], graph.step.loops[key[0]], graph.name(key)
        assert loop is not None
        if not body.is_trained:
            joint = capture(body.module.graph, body.num_forward_outputs, [], frozenset())
            model = MemoryModel(joint, self.options.lowering == "inductor", None, torch.get_num_threads())
            return model.project(NOTHING_SAVED).peak_bytes - model.baseline_bytes, None
        staged = self._staged(body.module, body.num_forward_outputs, graph.static_inputs(loop), is_body=True)
        operands = staged.model.baseline_bytes + staged.model.tangent_bytes
        room = None if budget is None else max(1, budget - held_bytes + operands)
        limit = None if self.limit_bytes is None else max(0, self.limit_bytes - held_bytes + operands)
        try:
            choice = staged.search(room, limit)
        except BudgetInfeasibleError as refused:
            assert budget is not None
            smallest = refused.smallest_bytes + held_bytes - operands
            parts = [("what is held around the loop", held_bytes), ("one micro-batch", smallest - held_bytes)]
            raise refusal(budget, smallest, parts, staged.model.gradient_bytes) from None
        decided = Decided(staged.joint, choice, staged.plan(choice, self._setting(staged, room), self.spec), "", 0.0)
        forward, backward = _act(body.module, decided, body.num_forward_outputs)
        torch_private.replace_graph(outer, name, joined(body, forward, backward))
        return choice.chosen.projection.peak_bytes - operands, decided.plan


@dataclass(frozen=True)
class _Staged:
    """One graph as the stages before the decision have left it."""

    joint: JointGraph
    permissions: tuple[Permission, ...]
    costs: CostGraph
    problem: CutProblem
    model: MemoryModel
    times: KernelTimes
    inductor: Candidate

    def search(self, budget_bytes: int | None, limit_bytes: int | None) -> Choice:
        """The decision."""
        fixed_ps = self.costs.fixed_ps
        return search(self.joint, self.problem, self.model, self.inductor, budget_bytes, fixed_ps, limit_bytes)

    def plan(self, choice: Choice, setting: Setting, spec: DeviceSpec) -> RematPlan:
        """The decision as users read it."""
        return write_plan(self.joint, self.permissions, self.costs, self.model, spec, choice, setting)

    def as_inductor(self) -> Choice:
        """Plain Inductor's decision."""
        return Choice(self.inductor, self.inductor, (self.inductor,), self.inductor.cut.time_ps)

    def without_prices(self, calls: Iterable[int]) -> _Staged:
        """The graph with calls that cost nothing: their time is that of their bodies."""
        fixed_ps = self.costs.fixed_ps - sum(self.costs.values[i].recompute_ps for i in calls)
        return replace(self, costs=replace(self.costs, fixed_ps=max(0, fixed_ps)))


# No candidate of an outer graph is refused: what does not fit is refused by name afterwards.
NO_LIMIT = 2**62
NOTHING_SAVED = Cut(frozenset(), frozenset(), 0, 0)


def _held_bytes(staged: _Staged, calls: Mapping[int, tuple[str, int]]) -> dict[str, int]:
    """What the outer graph holds when it calls each body, at most."""
    model = replace(staged.model, called_bytes=dict.fromkeys(calls, 0))
    names = {staged.joint.values[i].name: name for i, (name, _) in calls.items()}
    held: dict[str, int] = {}
    for instant in model.project(staged.inductor.cut).timeline:
        if instant.name in names:
            body = names[instant.name]
            held[body] = max(held.get(body, 0), instant.bytes)
    return held


def _operand_bytes(plan: RematPlan, body: Body) -> int:
    """What a body's plan counts as there from the start: its inputs, and the accumulators."""
    late = [node for node in body.module.graph.find_nodes(op="placeholder") if "tangents" in node.name]
    return plan.baseline_bytes + sum(int(node.meta["val"].untyped_storage().nbytes()) for node in late)


def _budget_bytes(options: Options, joint: JointGraph, model: MemoryModel, inductor_peak_bytes: int) -> int | None:
    if options.memory_budget is None:
        return None
    return resolve_budget(
        options.memory_budget,
        device_kind=joint.device_type,
        inductor_peak_bytes=inductor_peak_bytes,
        free_bytes=_free_bytes(joint.device_type),
        baseline_bytes=model.baseline_bytes,
    )


def _allocated_bytes(device_type: str) -> int | None:
    """What is allocated on the device now; ``None`` on CPU, which has no such counter."""
    return torch.cuda.memory_allocated() if device_type == "cuda" else None


def _free_bytes(device_type: str) -> int | None:
    """What can still be allocated: free on the device, or reserved by the allocator and unused."""
    if device_type != "cuda":
        return None
    free, _total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _setting(options: Options, times: KernelTimes, joint: JointGraph, budget_bytes: int | None, number: int) -> Setting:
    notes = ("num_microbatches is 'auto', which means 1 in this version",) if options.num_microbatches_auto else ()
    return Setting(
        graph_id=f"g{number:02d}-{joint.fingerprint}",
        torch_version=torch.__version__,
        cost_model=times.label,
        lowering=options.lowering,
        budget_bytes=budget_bytes,
        notes=(*times.notes, *notes),
    )


@functools.cache
def _source_hash() -> str:
    """A hash of all of remat's own source: other code may decide otherwise."""
    digest = hashlib.sha256()
    for package in (Path(remat_passes.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


# -- obeying the plan


def _act(gm: fx.GraphModule, decided: Decided, num_fwd_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two modules that hand over exactly what the plan saves, in the order that the plan was projected for."""
    chosen = decided.choice.chosen
    joint, cut = decided.joint if chosen.unrolled is None else chosen.unrolled.joint, chosen.cut
    nodes = _unrolled_nodes(gm.graph, joint, num_fwd_outputs)
    saved = [nodes[i] for i in sorted(cut.saved) if i not in joint.mutated_inputs]
    for source in (nodes[i] for i in sorted(cut.saved & joint.mutated_inputs)):
        saved.append(_copied_before_change(gm.graph, source))
        if any(joint.values[i].side is Side.BACKWARD for i in _writers(joint, source)):
            saved.append(source)  # backward changes it as well, and the change is to reach the caller
    recomputed = frozenset(nodes[i] for i in cut.redo)
    static = [nodes[i] for i in sorted(joint.static_inputs)]
    forward, backward = torch_private.extract_modules(gm, saved, recomputed, num_fwd_outputs, static)
    _check_writes(joint, forward, backward)
    names = [nodes[i].name for i in schedule(joint, cut).backward]
    return torch_private.thread_random_state(forward, _ordered(backward, names))


def _unrolled_nodes(graph: fx.Graph, joint: JointGraph, num_fwd_outputs: int) -> tuple[fx.Node, ...]:
    """The node of each value. One that is computed again gets a node of its own, which its readers read (in place)."""
    nodes: list[fx.Node] = []
    for value, node in zip(joint.values, joint.nodes, strict=True):
        operands = {old: nodes[i] for old, i in zip(node.all_input_nodes, value.inputs, strict=True)}
        if value.name != node.name:
            nodes.append(_copied(graph, node, operands, value.name))
            continue
        for old, new in operands.items():
            if old is not new:
                node.replace_input_with(old, new)
        nodes.append(node)
    if any(joint.nodes[i] is not nodes[i] for i in joint.backward_outputs):
        _return_from_backward(graph, {joint.nodes[i]: nodes[i] for i in joint.backward_outputs}, num_fwd_outputs)
    return tuple(nodes)


def _copied(graph: fx.Graph, node: fx.Node, operands: dict[fx.Node, fx.Node], name: str) -> fx.Node:
    last = max([*operands.values(), graph.find_nodes(op="placeholder")[-1]])  # where copies of changed inputs stand
    with graph.inserting_after(last):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operands[operand])
        copy = graph.create_node(node.op, node.target, args, kwargs, name=name, type_expr=node.type)
    if copy.name != name:
        raise AssertionError(f"the copy of {node.name} is to be called {name}, and that name is taken")
    copy.meta = dict(node.meta)
    return copy


def _return_from_backward(graph: fx.Graph, instead: dict[fx.Node, fx.Node], num_fwd_outputs: int) -> None:
    (output,) = graph.find_nodes(op="output")
    flat = list(output.args[0]) if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    backward = [instead.get(result, result) if isinstance(result, fx.Node) else result for result in flat]
    output.args = ((*flat[:num_fwd_outputs], *backward[num_fwd_outputs:]),)


def _writers(joint: JointGraph, source: fx.Node | None = None) -> list[int]:
    """The ops that change an input in place: this one, or any."""
    written = ((i, written_operands(node)) for i, node in enumerate(joint.nodes))
    return [i for i, operands in written if operands and (source is None or source in operands)]


def _check_writes(joint: JointGraph, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Each change in place runs on its own side; an extraction that cannot place one drops it without a word."""
    in_forward, in_backward = ({node.name for node in module.graph.nodes} for module in (forward, backward))
    for value in (joint.values[i] for i in _writers(joint)):
        if value.name not in (in_backward if value.side is Side.BACKWARD else in_forward):
            raise AssertionError(f"{value.name} ({value.source}) changes an input and was lost")


def _copied_before_change(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """A copy of an input that the step changes in place; everything but the change itself reads the copy."""
    last_input = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last_input):
        copy = graph.call_function(torch.ops.aten.clone.default, (source,))
    copy.meta = dict(source.meta)
    copy.meta["val"] = source.meta["val"].clone()
    source.replace_all_uses_with(
        copy, delete_user_cb=lambda user: user is not copy and source not in written_operands(user)
    )
    return copy


def _ordered(module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """The module with its nodes in the order of ``names``; what is not named goes right before its first reader."""
    by_name = {node.name: node for node in module.graph.nodes}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:
            missing = [source for source in stack[-1].all_input_nodes if source not in env]
            if missing:
                stack.extend(missing)
                continue
            ready = stack.pop()
            if ready not in env:
                env[ready] = graph.node_copy(ready, env.__getitem__)

    for node in module.graph.find_nodes(op="placeholder"):
        place(node)
    for name in names:
        if name in by_name:
            place(by_name[name])
    for node in module.graph.nodes:
        place(node)
    return fx.GraphModule(module, graph)
