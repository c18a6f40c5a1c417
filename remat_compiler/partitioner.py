"""The partitioner: one joint graph in, its forward and backward out. This is the table of contents of remat.

Inductor calls it through ``config.custom_partitioner_fn``, after its own passes on the joint graph; the eager lowering
calls it through AOTAutograd. Each line of ``_decide`` is one stage in ``remat_passes`` that returns a new frozen value.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

import remat_passes
from remat_passes.batch import BatchAxes, found_seeds
from remat_passes.device import DeviceSpec
from remat_passes.errors import BudgetInfeasibleError, CannotSplitError
from remat_passes.joint import JointGraph
from remat_passes.memory import MemoryModel
from remat_passes.plan import RematPlan
from remat_passes.planner import Setting
from remat_passes.search import Candidate, Choice
from remat_passes.tail import find_tail

from . import torch_private
from .extraction import extract
from .first_step import FirstStep
from .measured_costs import KernelTimes
from .microbatches import axes_of, split, tangents_are_known
from .options import Options, resolve_budget
from .plan_log import next_graph_number
from .readback import StepReader
from .split_choice import SplitChoice, SplitWay, look
from .staged import Staged, stage
from .step_inputs import StepInputs
from .weighing import UNSPLIT, Answers, Decision, Part, Way, Weighing, ladders


@dataclass(frozen=True)
class Decided:
    """What the stages decided about one graph."""

    module: fx.GraphModule  # the joint module that is to be cut: with micro-batches, one with loops
    joint: JointGraph  # the same, read
    chosen: Candidate
    way: Way
    plan: RematPlan
    joint_text: str = ""
    planning_seconds: float = 0.0


@dataclass(frozen=True)
class _Step:
    """One joint graph, before anything is decided about it."""

    gm: fx.GraphModule
    num_fwd_outputs: int
    static: list[int]
    full: Staged
    budget_bytes: int | None


@dataclass(frozen=True)
class Made:
    """One graph that was cut: its plan, its graphs as text, what Inductor's code says of its memory, and the watch over
    its first step."""

    plan: RematPlan
    way: Way
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
NO_BATCH = (
    "this graph runs whole: torch.compile broke the step into several, and no input of this one can carry the batch"
    " (TORCH_LOGS=graph_breaks shows where)"
)


class RematPartitioner(torch_private.CustomPartitionerFn):
    """Cuts joint graphs by the options of one ``torch.compile`` call, at the prices of one device."""

    def __init__(
        self,
        options: Options,
        spec: DeviceSpec,
        limit_bytes: int | None = None,
        correction: str | None = None,
        inputs: StepInputs = NOTHING_KNOWN,
        device_type: str | None = None,
        limits: Mapping[Way, int] | None = None,
        answers: dict[str, Answers] | None = None,
    ) -> None:
        self.options = options
        self.device_type = device_type  # whose memory counts, where it is not the device of the trace
        self.spec = spec
        self.inputs = inputs
        self.limit_bytes = limit_bytes  # the highest projected peak to accept, where a trial has shown a better one
        self.correction = correction  # what that trial has shown, for the plan's notes
        self.limits = dict(limits or {})  # the same of the ways to run the step that were tried
        self.answers = {} if answers is None else answers  # of earlier trials, by the fingerprint of the graph
        self.why_not = ""  # the step runs in no other number of slices
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
        decided = self.decide(gm, num_fwd_outputs, list(static_lifetime_input_indices or []))
        fuses = self.options.lowering == "inductor"
        forward, backward = extract(decided.module, decided.joint, decided.chosen, num_fwd_outputs, fuses=fuses)
        texts = {"joint": decided.joint_text, "forward": str(forward.graph), "backward": str(backward.graph)}
        reader = StepReader(decided.joint.device_type, num_fwd_outputs)
        first_step = FirstStep(decided.joint.device_type, num_fwd_outputs)
        self.made.append(Made(decided.plan, decided.way, decided.planning_seconds, texts, reader, first_step))
        return forward, backward

    def decide(self, gm: fx.GraphModule, num_fwd_outputs: int, static: list[int]) -> Decided:
        """The decision about one joint graph: the step as it is or in slices, its cut, and the plan.

        Raises:
            BudgetInfeasibleError: no plan is within the budget.
            CannotSplitError: the step is to run in slices, and is not the same then.
        """
        with without_collections():
            return self._decided(gm, num_fwd_outputs, static)

    def _decided(self, gm: fx.GraphModule, num_fwd_outputs: int, static: list[int]) -> Decided:
        start = time.perf_counter()
        torch_private.prepare_joint_module(gm)
        text = str(gm.graph)
        full = self._stage(gm, num_fwd_outputs, static)
        step = _Step(gm, num_fwd_outputs, static, full, self._budget_bytes(full))
        if self._has_no_batch(full.joint):
            decided = self._unsplit(step, full.search(step.budget_bytes, self._limit_of(UNSPLIT)))
            decided = replace(decided, plan=replace(decided.plan, notes=(*decided.plan.notes, NO_BATCH)))
        elif self.options.num_microbatches > 1:
            axes = axes_of(full.joint, self.options, self.inputs, self.options.num_microbatches)
            decided = self._split(step, Way("step", self.options.num_microbatches), axes)
        elif self.options.num_microbatches_auto and step.budget_bytes is not None:
            decided = self._weighed(step)
        else:
            decided = self._unsplit(step, full.search(step.budget_bytes, self._limit_of(UNSPLIT)))
        corrected = (self.correction, *decided.plan.notes) if self.correction else decided.plan.notes
        plan = replace(decided.plan, notes=corrected)
        return replace(decided, plan=plan, joint_text=text, planning_seconds=time.perf_counter() - start)

    def compiled(self, graph: torch_private.CompiledGraph) -> None:
        """Take one of the compiled graphs. With several joint graphs in one module it is not known whose it is."""
        if len(self.made) != 1:
            return
        if graph.source:
            self.made[0].reader.read(graph.source, graph.signature, graph.inputs, is_backward=graph.is_backward)
        self.made[0].first_step.add(graph)

    def uuid(self) -> str:
        """Inductor's cache key: all that a plan depends on."""
        settings = f"{self.limit_bytes} {self.limits} {self.inputs} {torch_private.reuses_saved_values()}"
        parts = (self.options.identity(), repr(self.spec), settings, torch.__version__, _source_hash())
        return hashlib.sha256("\n".join((*parts, *self.table_hashes)).encode()).hexdigest()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Inductor's cache also pickles its whole configuration, and what was made must not be a part of the key."""
        return (str, (self.uuid(),))

    def _stage(self, gm: fx.GraphModule, num_fwd_outputs: int, static: list[int]) -> Staged:
        staged = stage(gm, num_fwd_outputs, static, self.options, self.spec, self.device_type)
        self.table_hashes.append(staged.times.content_hash)
        return staged

    def _budget_bytes(self, full: Staged) -> int | None:
        return _budget_bytes(self.options, full.joint, full.model, full.inductor.projection.peak_bytes)

    def _setting(self, step: _Step) -> Setting:
        number = next_graph_number() + len(self.made)
        return _setting(self.options, step.full.times, step.full.joint, step.budget_bytes, number)

    def _unsplit(self, step: _Step, choice: Choice) -> Decided:
        plan = step.full.plan(choice, self._setting(step), self.spec)
        return Decided(step.gm, step.full.joint, choice.chosen, UNSPLIT, plan)

    def _limit_of(self, way: Way) -> int | None:
        return self.limits.get(way, self.limit_bytes)

    # -- micro-batches

    def _has_no_batch(self, joint: JointGraph) -> bool:
        """Whether the step is to run in slices and this is a part of it without an input that can carry the batch."""
        is_asked = self.options.num_microbatches > 1 and self.inputs.is_part and not self.inputs.batch_axes
        return is_asked and all(size < self.options.num_microbatches for _, size in found_seeds(joint))

    def _look(self, step: _Step, way: Way, axes: BatchAxes) -> SplitWay:
        joint, num_outputs = step.full.joint, step.num_fwd_outputs
        graph = split(step.gm, joint, num_outputs, axes, way.num_slices, self.options, self.inputs)
        found = look(graph, num_outputs, step.static, self.options, self.spec, self.device_type)
        self.table_hashes += [staged.times.content_hash for staged in (found.staged, *found.bodies.values())]
        return found

    def _split(self, step: _Step, way: Way, axes: BatchAxes) -> Decided:
        """The step run in this way."""
        split_way = self._look(step, way, axes)
        return self._carried_out(step, way, split_way, split_way.decide(step.budget_bytes, self._limit_of(way)))

    def _carried_out(self, step: _Step, way: Way, split_way: SplitWay, choice: SplitChoice) -> Decided:
        setting = self._setting(step)
        notes = (*setting.notes, *split_way.notes(self.inputs.num_groups is not None))
        plan = split_way.carry_out(choice, step.full, setting, self.spec, notes)
        return Decided(split_way.outer, choice.around.joint, choice.outer.chosen, way, plan)

    def _weighed(self, step: _Step) -> Decided:
        """The step in as many slices as suit its budget best."""
        budget_bytes, axes = step.budget_bytes, self._axes(step)
        assert budget_bytes is not None

        def limit_bytes(way: Way) -> int:
            limit = self._limit_of(way)
            return budget_bytes if limit is None else limit

        weighing = Weighing(
            step.full,
            ladders(axes),
            lambda way: self._look(step, way, axes[way.part]),
            limit_bytes,
            self.answers.setdefault(step.full.joint.fingerprint, Answers()),
        )
        decision = weighing.weigh()
        if decision is None:
            refused = weighing.refusal(budget_bytes)
            text = f"{refused} {self.why_not}".strip()
            raise BudgetInfeasibleError(text, refused.budget_bytes, refused.smallest_bytes)
        decided = self._taken(step, weighing, decision)
        frontier = sorted(
            (*decided.plan.frontier, *decision.others), key=lambda point: (point.step_us, -point.peak_bytes)
        )
        notes = (*decided.plan.notes, *([self.why_not] if self.why_not else []))
        plan = replace(decided.plan, candidates=decision.candidates, frontier=tuple(frontier), notes=notes)
        return replace(decided, plan=plan)

    def _taken(self, step: _Step, weighing: Weighing, decision: Decision) -> Decided:
        if isinstance(decision.choice, SplitChoice):
            return self._carried_out(step, decision.way, weighing.split_way(decision.way), decision.choice)
        return self._unsplit(step, decision.choice)

    def _axes(self, step: _Step) -> dict[Part, BatchAxes]:
        """What of the step can run in slices."""
        joint = step.full.joint
        found: dict[Part, BatchAxes] = {}
        if not joint.backward_outputs:
            return found
        try:
            found["step"] = axes_of(joint, self.options, self.inputs, 2)
        except CannotSplitError as refused:
            self.why_not = f"No other number of micro-batches was weighed. {refused}"
        tail = None if joint.symbols else find_tail(joint, tangents_are_known=tangents_are_known(joint))
        if tail is not None:
            found["tail"] = tail
        return found


def _budget_bytes(options: Options, joint: JointGraph, model: MemoryModel, inductor_peak_bytes: int) -> int | None:
    if options.memory_budget is None:
        return None
    return resolve_budget(
        options.memory_budget,
        device_kind=joint.device_type,
        inductor_peak_bytes=inductor_peak_bytes,
        free_bytes=_free_bytes(joint.device_type),
        baseline_bytes=model.baseline_bytes,
        reserve_bytes=options.reserve_bytes,
    )


def _free_bytes(device_type: str) -> int | None:
    """What can still be allocated: free on the device, or reserved by the allocator and unused."""
    if device_type != "cuda":
        return None
    free, _total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _setting(options: Options, times: KernelTimes, joint: JointGraph, budget_bytes: int | None, number: int) -> Setting:
    return Setting(
        graph_id=f"g{number:02d}-{joint.fingerprint}",
        torch_version=torch.__version__,
        cost_model=times.label,
        lowering=options.lowering,
        budget_bytes=budget_bytes,
        notes=times.notes,
    )


@contextmanager
def without_collections() -> Iterator[None]:
    """No search for cycles of garbage while a graph is planned: each walks all that torch holds of the program, and
    together they took 4.6 of 10.9 s for 96 llama blocks (``benchmarks/plan_time.py``)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def _source_hash() -> str:
    """A hash of all of remat's own source: other code may decide otherwise."""
    digest = hashlib.sha256()
    for package in (Path(remat_passes.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
