"""SplitChoice: one way to split a step, looked at, decided and carried out.

The memory of a split step is in two places. The bodies hold the activations of a slice; the outer graph holds what is
around the loops. Where the whole step is split, the outer graph is taken as it is and the bodies are cut under what it
leaves. Where only the tail is, the activations are in the outer graph: that is cut, around bodies that are as fast as
they can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from remat_passes.batch import split_notes
from remat_passes.cost import PS_PER_US
from remat_passes.cut import Cut
from remat_passes.device import DeviceSpec
from remat_passes.errors import BudgetInfeasibleError
from remat_passes.outer import body_of_call
from remat_passes.plan import FrontierPoint, RematPlan
from remat_passes.planner import Setting
from remat_passes.search import Candidate, Choice, refusal
from remat_passes.split_plan import PlannedBody, plan_of_split

from . import torch_private
from .extraction import extract
from .microbatches import SplitGraph, joined
from .options import Options
from .staged import Staged, stage

Key = tuple[int, int]  # of a body: the level of its loop, and the length of slice

NO_LIMIT = 2**62
# What a call takes where only the memory around it is asked for: more than its results, so that they do not count.
MORE_THAN_RESULTS = 2**62
NOTHING_SAVED = Cut(frozenset(), frozenset(), 0, 0)


@dataclass(frozen=True)
class SplitChoice:
    """The decisions of the outer graph and of the bodies."""

    around: Staged  # the outer graph, with what its calls take
    outer: Choice
    bodies: Mapping[Key, Choice]
    time_ps: int

    @property
    def peak_bytes(self) -> int:
        """Of the whole step."""
        return self.outer.chosen.projection.peak_bytes


@dataclass(frozen=True)
class SplitWay:
    """A step that runs in so many slices, before anything is decided about it."""

    graph: SplitGraph
    outer: fx.GraphModule
    staged: Staged  # the outer graph, with calls that take neither time nor memory
    bodies: Mapping[Key, Staged]  # those that have a backward
    plain_bytes: Mapping[Key, int]  # what the others take above their operands
    calls: Mapping[int, tuple[str, int]]  # by place in the outer graph: the body, and how often

    @property
    def is_tail(self) -> bool:
        """Whether only the tail of the step is split."""
        return self.graph.step.axes.is_tail

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each body runs."""
        return _counts(self.calls)

    def _count(self, key: Key) -> int:
        return self.counts[self.graph.name(key)]

    @cached_property
    def held_bytes(self) -> dict[str, int]:
        """What the outer graph holds when it calls each body, at most."""
        around = self.staged.calling(dict.fromkeys(self.calls, MORE_THAN_RESULTS))
        return self._held(around, around.inductor)

    def _held(self, around: Staged, candidate: Candidate) -> dict[str, int]:
        called = {self.staged.joint.values[i].name: i for i in self.calls}
        held: dict[str, int] = {}
        for instant in candidate.projection.timeline:
            if instant.name in called:
                place = called[instant.name]
                body, own = self.calls[place][0], instant.bytes - around.model.called_bytes[place]
                held[body] = max(held.get(body, 0), own)
        return held

    @cached_property
    def fastest(self) -> SplitChoice:
        """The decisions that spend no time on memory."""
        bodies = {key: _only(staged, staged.fastest) for key, staged in self.bodies.items()}
        around = self._around(bodies)
        return self._choice(around, _only(around, around.fastest), bodies)

    def bound_ps(self, limit_bytes: int) -> int | None:
        """A time that no decisions within the limit are below; ``None`` where there are none."""
        total_ps = self.staged.bound_ps(limit_bytes) if self.is_tail else self.staged.time_ps(self.staged.fastest)
        for key, staged in self.bodies.items():
            bound_ps = staged.time_ps(staged.fastest) if self.is_tail else staged.bound_ps(self._room(key, limit_bytes))
            if total_ps is None or bound_ps is None:
                return None
            total_ps += self._count(key) * bound_ps
        return total_ps

    def search(self, limit_bytes: int) -> SplitChoice | None:
        """The fastest decisions within so many bytes; ``None`` where none were found."""
        can_do_without = self.is_tail or self.fastest.peak_bytes <= limit_bytes
        bodies: dict[Key, Choice] = {}
        for key, staged in self.bodies.items():
            fastest_bytes = staged.fastest.projection.peak_bytes
            choice = staged.search_within(fastest_bytes if can_do_without else self._room(key, limit_bytes))
            if choice is None:
                return None
            bodies[key] = choice
        around = self._around(bodies)
        outer = around.search_within(limit_bytes)
        return None if outer is None else self._choice(around, outer, bodies)

    @cached_property
    def smallest(self) -> SplitChoice:
        """The decisions with the lowest peak."""
        bodies = {key: _only(staged, staged.smallest) for key, staged in self.bodies.items()}
        around = self._around(bodies)
        return self._choice(around, _only(around, around.smallest), bodies)

    def in_least_memory(self) -> SplitChoice:
        """The fastest decisions of those with the lowest peak."""
        bodies = {key: staged.in_least_memory() for key, staged in self.bodies.items()}
        around = self._around(bodies)
        return self._choice(around, around.in_least_memory(), bodies)

    def decide(self, budget_bytes: int | None, limit_bytes: int | None) -> SplitChoice:
        """The decisions within the budget; without one, the fastest that are no higher than need be.

        Raises:
            BudgetInfeasibleError: there are none.
        """
        if budget_bytes is not None:
            limit = budget_bytes if limit_bytes is None else limit_bytes
            found = self.search(limit)
            if found is None and self.smallest.peak_bytes > limit:
                raise self.refusal(budget_bytes)
            return found or self.in_least_memory()
        bodies = {key: staged.search(None, None) for key, staged in self.bodies.items()}
        around = self._around(bodies)
        return self._choice(around, around.search(None, NO_LIMIT), bodies)

    def refusal(self, budget_bytes: int) -> BudgetInfeasibleError:
        """The error for a budget that no decision meets, with the smallest peak that there is."""
        smallest, model = self.smallest, self.smallest.around.model
        held = self._held(smallest.around, smallest.outer.chosen)
        inside = max(held.values(), default=0)
        parts: list[tuple[str, int]] = list(smallest.outer.chosen.projection.peak_values)
        inner = {name: model.called_bytes[i] for i, (name, _) in self.calls.items()}
        if any(held[name] + size >= smallest.peak_bytes for name, size in inner.items()):
            parts = [
                ("parameters, buffers and inputs", model.baseline_bytes),
                ("what is held around the loop", inside - model.baseline_bytes),
                ("one micro-batch", smallest.peak_bytes - inside),
            ]
        return refusal(budget_bytes, smallest.peak_bytes, parts, model.gradient_bytes)

    def _main(self, choice: SplitChoice) -> Key | None:
        """The body that the step spends its time in; ``None`` where the activations are around the loop."""
        if self.is_tail:
            return None
        times_ps = {k: self._count(k) * staged.time_ps(choice.bodies[k].chosen) for k, staged in self.bodies.items()}
        return max(times_ps, key=lambda key: (times_ps[key], key[1]), default=None)

    def frontier(self, choice: SplitChoice) -> tuple[FrontierPoint, ...]:
        """What was considered where the activations are, as the peak and the time of the whole step."""
        key = self._main(choice)
        if key is None:
            staged, inside, count, shift_bytes = choice.around, choice.outer, 1, 0
        else:
            staged, inside, count = self.bodies[key], choice.bodies[key], self._count(key)
            shift_bytes = self._held(choice.around, choice.outer.chosen)[self.graph.name(key)] - _operand_bytes(staged)
        rest_us = (choice.time_ps - count * staged.time_ps(inside.chosen)) / PS_PER_US
        return tuple(
            replace(
                point,
                peak_bytes=point.peak_bytes + shift_bytes,
                step_us=round(rest_us + count * point.step_us, 3),
                num_microbatches=len(self.graph.step.lengths),
                part="tail" if self.is_tail else "step",
            )
            for point in staged.frontier(inside)
        )

    def notes(self, has_groups: bool) -> tuple[str, ...]:
        """What the user should know of the split; ``has_groups`` where batch norm takes each slice by itself."""
        num_loops = sum(loop is not None for loop in self.graph.step.loops)
        return split_notes(self.graph.joint, self.graph.step.axes, num_loops, has_groups)

    def carry_out(
        self, choice: SplitChoice, full: Staged, setting: Setting, spec: DeviceSpec, notes: tuple[str, ...]
    ) -> RematPlan:
        """Put the cut bodies into the outer graph; the plan of the step."""
        planned: dict[str, PlannedBody] = {}
        held = self._held(choice.around, choice.outer.chosen)
        for key, staged in self.bodies.items():
            body, name = self.graph.bodies[key], self.graph.name(key)
            plan = staged.plan(choice.bodies[key], setting, spec)
            forward, backward = extract(
                body.module,
                staged.joint,
                choice.bodies[key].chosen,
                body.num_forward_outputs,
                fuses=staged.model.fuses,
            )
            torch_private.replace_graph(self.outer, name, joined(body, forward, backward, fuses=staged.model.fuses))
            planned[name] = PlannedBody(*key, self._count(key), plan, held[name], _operand_bytes(staged))
        joint, main = choice.around.joint, self._main(choice)
        return plan_of_split(
            choice.around.plan(choice.outer, setting, spec),
            tuple(planned.values()),
            None if main is None else planned[self.graph.name(main)],
            self.frontier(choice),
            {joint.values[i].name: planned[name] for i, (name, _) in self.calls.items() if name in planned},
            full.plan(full.as_inductor(), setting, spec),
            self.graph.step,
            full.joint,
            self.graph.names,
            notes,
            tangents_are_known=self.graph.tangents_are_known,
        )

    def _room(self, key: Key, limit_bytes: int) -> int:
        """What a body may need by its own count, where the step may need so much."""
        return max(0, limit_bytes - self.held_bytes[self.graph.name(key)] + _operand_bytes(self.bodies[key]))

    def _around(self, bodies: Mapping[Key, Choice]) -> Staged:
        """The outer graph with what its calls take. A chunk holds the results of its slices, and then those put
        together."""
        inner = dict(self.plain_bytes)
        for key, choice in bodies.items():
            inner[key] = choice.chosen.projection.peak_bytes - _operand_bytes(self.bodies[key])
        by_name = {self.graph.name(key): size for key, size in inner.items()}
        return self.staged.calling(
            {
                i: by_name[name] + 2 * (count - 1) * self.graph.split_bytes(name)
                for i, (name, count) in self.calls.items()
            }
        )

    def _choice(self, around: Staged, outer: Choice, bodies: Mapping[Key, Choice]) -> SplitChoice:
        inside = sum(self._count(key) * self.bodies[key].time_ps(choice.chosen) for key, choice in bodies.items())
        return SplitChoice(around, outer, bodies, around.time_ps(outer.chosen) + inside)


def look(
    graph: SplitGraph,
    num_fwd_outputs: int,
    static: list[int],
    options: Options,
    spec: DeviceSpec,
    device_type: str | None,
) -> SplitWay:
    """Stage the outer graph of a split step and its bodies."""
    outer = graph.outer({key: body.module for key, body in graph.bodies.items()})
    staged = stage(outer, num_fwd_outputs, static, options, spec, device_type, yardstick=False)
    calls = {i: body_of_call(name) for i, name in torch_private.calls_of(outer.graph).items()}
    counts = _counts(calls)
    bodies: dict[Key, Staged] = {}
    plain_bytes: dict[Key, int] = {}
    plain_ps = 0
    for key, body in graph.bodies.items():
        loop = graph.step.loops[key[0]]
        assert loop is not None
        arguments = (body.module, body.num_forward_outputs, graph.static_inputs(loop), options, spec, device_type)
        if body.is_trained:
            bodies[key] = stage(*arguments, is_body=True)
            continue
        plain = stage(*arguments, is_body=True, yardstick=False)
        plain_bytes[key] = plain.model.project(NOTHING_SAVED).peak_bytes - plain.model.baseline_bytes
        plain_ps += plain.costs.fixed_ps * counts[graph.name(key)]
    return SplitWay(graph, outer, staged.with_calls(calls, plain_ps), bodies, plain_bytes, calls)


def _counts(calls: Mapping[int, tuple[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in calls.values():
        found[name] += count
    return found


def _only(staged: Staged, candidate: Candidate) -> Choice:
    return Choice(candidate, staged.inductor, (candidate,), candidate.cut.time_ps)


def _operand_bytes(staged: Staged) -> int:
    """What a body's own count takes for there from the start: its inputs, and the accumulators."""
    return staged.model.baseline_bytes + staged.model.tangent_bytes
