"""Staged: one joint graph as the stages before the decision leave it.

``stage`` is the table of contents of planning: each line is a stage in ``remat_passes`` that returns a frozen value.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from remat_passes.bound import InstantHull, highest_bound_ps, instants
from remat_passes.cost import CostGraph, price
from remat_passes.cut import CutProblem, Sweep, coarse_sweep
from remat_passes.device import DeviceSpec
from remat_passes.joint import JointGraph, capture
from remat_passes.legality import Permission, classify
from remat_passes.memory import MemoryModel
from remat_passes.plan import FrontierPoint, RematPlan
from remat_passes.planner import Setting, frontier, frontier_point, write_plan
from remat_passes.search import (
    Candidate,
    Choice,
    Search,
    cut_problem,
    inductor_candidate,
)

from . import torch_private
from .calibrate import default_cache_dir
from .measured_costs import KernelTimes, kernel_times
from .options import Options

# Cuts of the sweep that bounds a candidate before it is searched: a search takes ten times as long.
MAX_CUTS_OF_BOUND = 6


@dataclass(frozen=True)
class Staged:
    """One graph, its permissions, its prices, its memory, and what plain Inductor would do with it."""

    joint: JointGraph
    permissions: tuple[Permission, ...]
    costs: CostGraph
    problem: CutProblem
    model: MemoryModel
    times: KernelTimes
    inductor: Candidate

    @cached_property
    def searching(self) -> Search:
        """The search of this graph, for whatever limits are asked."""
        return Search(self.joint, self.problem, self.model, self.inductor, self.costs.fixed_ps)

    def search(self, budget_bytes: int | None, limit_bytes: int | None) -> Choice:
        """The decision.

        Raises:
            BudgetInfeasibleError: there is none within the budget.
        """
        return self.searching.choose(budget_bytes, limit_bytes)

    def search_within(self, limit_bytes: int) -> Choice | None:
        """The decision within so many bytes, where there is one."""
        return self.searching.within(limit_bytes)

    @property
    def smallest(self) -> Candidate:
        """The decision with the lowest peak."""
        return self.searching.smallest

    def in_least_memory(self) -> Choice:
        """The fastest decision of those with the lowest peak."""
        found = self.search_within(self.smallest.projection.peak_bytes)
        assert found is not None, "the smallest decision fits into what it needs"
        return found

    @property
    def fastest(self) -> Candidate:
        """The decision that spends no time on memory."""
        return self.searching.fastest

    @cached_property
    def hull(self) -> Sweep:
        """The hull of saved bytes and time, coarsely: its bound on the time of plans that save little."""
        return coarse_sweep(self.problem, MAX_CUTS_OF_BOUND)

    def frontier(self, choice: Choice | None) -> tuple[FrontierPoint, ...]:
        """What was considered for a decision; where there is none, the vertices of the hull that no faster one beats in
        peak."""
        if choice is not None:
            return frontier(choice, self.costs.fixed_ps)
        kept: list[Candidate] = []
        for cut in self.hull.vertices:
            candidate = Candidate(cut, self.model.project(cut))
            if not kept or candidate.projection.peak_bytes < kept[-1].projection.peak_bytes:
                kept.append(candidate)
        return tuple(frontier_point(candidate, self.costs.fixed_ps) for candidate in kept)

    @cached_property
    def fullest(self) -> list[InstantHull]:
        """What bounds the time of plans at the instant at which the fastest one needs most."""
        return instants(self.joint, self.problem, self.model, [self.fastest.projection])

    def saving_bound_ps(self, limit_bytes: int) -> int | None:
        """A time of the whole graph that no plan within the limit is below, because all that is saved is alive between
        forward and backward; ``None`` where there is no plan."""
        room = limit_bytes - self.model.baseline_bytes
        if room < 0:
            return None
        bound_ps = self.hull.lower_bound_ps(room)
        smallest_ps = self.hull.vertices[-1].time_ps  # what saves less recomputes something twice
        return self.costs.fixed_ps + (smallest_ps if bound_ps is None else bound_ps)

    def bound_ps(self, limit_bytes: int) -> int | None:
        """A higher one, for what is alive at the fullest instant."""
        bound_ps = self.saving_bound_ps(limit_bytes)
        if bound_ps is None:
            return None
        return max(bound_ps, self.costs.fixed_ps + (highest_bound_ps(self.fullest, limit_bytes) or 0))

    def time_ps(self, candidate: Candidate) -> int:
        """The time of the whole graph."""
        return self.costs.fixed_ps + candidate.cut.time_ps

    def plan(self, choice: Choice, setting: Setting, spec: DeviceSpec) -> RematPlan:
        """The decision as users read it."""
        return write_plan(self.joint, self.permissions, self.costs, self.model, spec, choice, setting)

    def as_inductor(self) -> Choice:
        """Plain Inductor's decision."""
        return Choice(self.inductor, self.inductor, (self.inductor,), self.inductor.cut.time_ps)

    def calling(self, called_bytes: Mapping[int, int]) -> Staged:
        """The graph with calls that take so much memory above their start."""
        model = replace(self.model, called_bytes=dict(called_bytes))
        again = replace(self.inductor, projection=model.project(self.inductor.cut))
        return replace(self, model=model, inductor=again)

    def with_calls(self, calls: Iterable[int], time_ps: int) -> Staged:
        """The graph with calls that take ``time_ps`` together; what their bodies take besides is not counted here."""
        fixed_ps = self.costs.fixed_ps - sum(self.costs.values[i].recompute_ps for i in calls)
        return replace(self, costs=replace(self.costs, fixed_ps=max(0, fixed_ps) + time_ps))


def stage(
    gm: fx.GraphModule,
    num_fwd_outputs: int,
    static: Sequence[int],
    options: Options,
    spec: DeviceSpec,
    device_type: str | None,
    *,
    is_body: bool = False,
    yardstick: bool = True,
) -> Staged:
    """All that is known of a graph before anything is decided.

    Args:
        gm: the joint module.
        num_fwd_outputs: how many of the outputs belong to forward.
        static: positions of parameters and buffers among the primals.
        options: of the compile.
        spec: whose prices count.
        device_type: whose memory counts; ``None``: that of the device of the trace.
        is_body: of a loop, which is called with the rest of the step around it.
        yardstick: ask torch's own partitioner what it would save; without it, as if all were saved.
    """
    joint = capture(gm.graph, num_fwd_outputs, static, torch_private.pinned_to_backward(gm.graph))
    permissions = classify(joint)
    times = kernel_times(joint, spec, options, default_cache_dir(os.environ))
    costs = price(joint, spec, times.table)
    problem = cut_problem(joint, permissions, costs)
    is_here = device_type is None and not is_body
    model = MemoryModel(
        joint,
        fuses=options.lowering == "inductor",
        already_allocated_bytes=allocated_bytes(joint.device_type) if is_here else None,
        num_threads=torch.get_num_threads(),
        is_body=is_body,
        device_type=device_type,
    )
    names = (
        torch_private.inductor_saved_names(gm, num_fwd_outputs, list(static))
        if yardstick
        else frozenset(joint.values[i].name for i in joint.required)
    )
    return Staged(joint, permissions, costs, problem, model, times, inductor_candidate(joint, problem, model, names))


def allocated_bytes(device_type: str) -> int | None:
    """What is allocated on the device now; ``None`` on CPU, which has no such counter."""
    return torch.cuda.memory_allocated() if device_type == "cuda" else None
