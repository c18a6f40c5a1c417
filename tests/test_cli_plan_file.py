"""What the planner hands to the command line: the timeline, the peak, the frontier, and the way through the file."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import SPEC, Staged, choose, staged, trace
from plan_samples import gpt_plan
from torch import nn

from remat_passes.errors import PlanFileError
from remat_passes.memory import Instant
from remat_passes.plan import SCHEDULE_CLASS, FrontierPoint, RematPlan
from remat_passes.planner import MAX_MOMENTS, Setting, write_plan
from remat_passes.search import Choice

SETTING = Setting("g00-00000000", "2.13.0", "analytic", "eager", None, ())


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@functools.cache
def net() -> Staged:
    torch.manual_seed(0)
    return staged(trace(Net(), torch.randn(64, 16)))


def planned(choice: Choice, graph: Staged | None = None) -> RematPlan:
    graph = graph or net()
    return write_plan(graph.joint, graph.permissions, graph.costs, graph.model, SPEC, choice, SETTING)


def test_the_timeline_is_the_projection_with_modules() -> None:
    choice = choose(net(), None)

    plan = planned(choice)

    projected = choice.chosen.projection.timeline
    assert [(m.name, m.side == "backward", m.bytes) for m in plan.timeline] == [
        (i.name, i.is_backward, i.bytes) for i in projected
    ]
    assert max(moment.bytes for moment in plan.timeline) == plan.predicted_peak_bytes
    layers = [f"layers.{at}" for at in range(6)]
    for side, order in (("forward", layers), ("backward", layers[::-1])):
        met = dict.fromkeys(moment.module for moment in plan.timeline if moment.side == side)
        assert [module for module in met if module] == order


def test_what_is_alive_at_the_peak_has_its_module_and_adds_up() -> None:
    plan = planned(choose(net(), None))

    assert sum(value.bytes for value in plan.peak_values) == plan.predicted_peak_bytes
    modules = {value.name: value.module for value in plan.values}
    assert {modules[value.name] == value.module for value in plan.peak_values if value.name in modules} == {True}
    assert any(value.module for value in plan.peak_values)
    assert [value.module for value in plan.peak_values if value.name == "parameters, buffers and inputs"] == [""]


@pytest.mark.parametrize("num", [MAX_MOMENTS, MAX_MOMENTS + 1, 3 * MAX_MOMENTS - 1])
def test_a_long_timeline_is_thinned_to_the_highest_of_neighbours(num: int) -> None:
    choice = choose(net(), None)
    sizes = [(at * 7919) % 10_007 for at in range(num)]
    kernels = tuple(Instant(f"op_{at}", at >= num // 2, size) for at, size in enumerate(sizes))
    projection = replace(choice.chosen.projection, timeline=kernels)

    timeline = planned(replace(choice, chosen=replace(choice.chosen, projection=projection))).timeline

    length = -(-num // MAX_MOMENTS)
    assert len(timeline) == -(-num // length) <= MAX_MOMENTS
    assert [moment.bytes for moment in timeline] == [max(sizes[at : at + length]) for at in range(0, num, length)]
    assert [int(moment.name[3:]) // length for moment in timeline] == list(range(len(timeline)))


def test_exactly_one_point_of_the_frontier_is_chosen() -> None:
    highest = net().inductor.projection.peak_bytes
    for budget in (None, highest, highest * 7 // 8, highest * 3 // 4):
        plan = planned(choose(net(), budget))

        (chosen,) = [point for point in plan.frontier if point.chosen]
        assert chosen == FrontierPoint(plan.predicted_peak_bytes, plan.saved_bytes, plan.step_us, chosen=True)
        assert [point.step_us for point in plan.frontier] == sorted(point.step_us for point in plan.frontier)


def test_a_chosen_plan_off_the_frontier_is_put_in_its_place() -> None:
    choice = choose(net(), None)
    slower = replace(choice.chosen, cut=replace(choice.chosen.cut, time_ps=choice.chosen.cut.time_ps + 10**9))

    plan = planned(replace(choice, chosen=slower))

    assert len(plan.frontier) == len(choice.frontier) + 1
    assert [point.step_us for point in plan.frontier if point.chosen] == [plan.step_us]
    assert [point.step_us for point in plan.frontier] == sorted(point.step_us for point in plan.frontier)


def test_a_plan_says_which_schedules_its_bound_is_for() -> None:
    assert planned(choose(net(), None)).schedule_class == SCHEDULE_CLASS


def test_a_plan_survives_its_file_and_is_written_alike_each_time() -> None:
    plan = planned(choose(net(), None))

    assert RematPlan.from_json(plan.to_json(), "here") == plan
    assert planned(choose(net(), None)).to_json() == plan.to_json()
    record = json.loads(plan.to_json())
    assert list(record) == sorted(record)
    assert record["timeline"][0] == {
        "bytes": plan.timeline[0].bytes,
        "module": "layers.0",
        "name": plan.timeline[0].name,
        "side": "forward",
    }
    assert sorted(record["peak_values"][0]) == ["bytes", "module", "name"]


def damaged(change: Any) -> str:
    record = json.loads(gpt_plan().to_json())
    change(record)
    with pytest.raises(PlanFileError) as caught:
        RematPlan.from_json(json.dumps(record), "here")
    return str(caught.value)


def test_damage_is_named() -> None:
    assert "field 'timeline' is missing" in damaged(lambda plan: plan.pop("timeline"))
    assert "'timeline' is None, expected a list" in damaged(lambda plan: plan.update(timeline=None))
    assert "'bytes' is '7', expected int" in damaged(lambda plan: plan["timeline"][0].update(bytes="7"))
    assert "side 'up' of kernel 'add_0'" in damaged(lambda plan: plan["timeline"][0].update(side="up"))
    assert "field 'module' is missing" in damaged(lambda plan: plan["peak_values"][0].pop("module"))
    assert "'chosen' is 0, expected bool" in damaged(lambda plan: plan["frontier"][0].update(chosen=0))
    assert "'saved_bytes' is True, expected int" in damaged(lambda plan: plan.update(saved_bytes=True))
    assert "damaged plan file" in damaged(lambda plan: plan.update(peak_values=[["logits", 12]]))
    assert "damaged plan file" in damaged(lambda plan: plan.update(timeline=[7]))
