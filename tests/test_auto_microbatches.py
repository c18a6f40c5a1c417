"""One number in: under a budget the number of slices and the cut are chosen together, in one compile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from microbatch_programs import (
    BATCH,
    CLASSES,
    TIME,
    WIDTH,
    Attention,
    Step,
    flat_cross_entropy,
    ragged_labels,
)
from oracle import FP64, Program, assert_same, remat_error, run_eager, run_remat
from torch import Tensor, nn

import remat_compiler
from remat_compiler import BudgetInfeasibleError, verify
from remat_compiler.partitioner import RematPartitioner
from remat_compiler.plan_log import measured_peaks
from remat_compiler.weighing import UNSPLIT, Way
from remat_passes.plan import RematPlan

pytestmark = pytest.mark.usefixtures("fresh_compiler")


FEW_BYTES = 64  # numbers that eager ops allocate for themselves


def deep(batch: int = BATCH) -> Program:
    """Small weights under large activations, so that slices can do what recompute cannot."""

    def build() -> nn.Module:
        body = nn.Sequential(
            nn.Linear(WIDTH, 12),
            *(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(6)),
            nn.Linear(12, CLASSES),
        )
        return Step(body, lambda step, logits, y: flat_cross_entropy(logits, y))

    return Program(build, lambda: (torch.randn(batch, 64, WIDTH), *ragged_labels(batch, 64, CLASSES)))


def planned(program: Program, budget: object, **options: object) -> RematPlan:
    """The plan of a step that is the same as in eager mode, and within its budget as the allocator counts."""
    (found,), (expected,) = run_remat(program, memory_budget=budget, **options), run_eager(program)
    assert_same(found, expected, FP64)
    plan = remat_compiler.plans()[-1]
    assert plan.budget_bytes is not None
    assert plan.projected_peak_bytes <= plan.budget_bytes
    measured = measured_peaks()[-1]
    assert measured is not None
    assert measured <= plan.budget_bytes + FEW_BYTES
    return plan


def test_falling_budgets_take_more_slices_and_are_kept() -> None:
    plans = [planned(deep(), f"{percent}%") for percent in (100, 90, 60, 40, 25, 17)]
    peaks = [plan.projected_peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    numbers = [plan.num_microbatches for plan in plans]
    assert numbers[0] == 1
    assert numbers == sorted(numbers)
    assert numbers[-1] >= 4


def test_the_plan_holds_what_was_weighed(tmp_path: Path) -> None:
    plan = planned(deep(), "30%", dump_dir=str(tmp_path))
    chosen = [candidate for candidate in plan.candidates if candidate.chosen]
    assert [candidate.num_microbatches for candidate in chosen] == [plan.num_microbatches]
    assert {candidate.num_microbatches for candidate in plan.candidates if candidate.part == "step"} >= {1, 2, BATCH}
    assert all(candidate.verdict for candidate in plan.candidates)
    (path,) = tmp_path.glob("*.plan.json")
    again = RematPlan.from_json(path.read_text(), "the file")
    assert again == plan
    assert json.loads(path.read_text())["candidates"]


def test_the_frontier_holds_more_than_one_number_of_slices() -> None:
    plan = planned(deep(), "55%")
    assert sum(point.chosen for point in plan.frontier) == 1
    peaks = [point.peak_bytes for point in plan.own_frontier if not point.chosen]
    assert peaks == sorted(peaks, reverse=True)
    assert len({(point.part, point.num_microbatches) for point in plan.frontier}) > 1


def test_plans_are_the_same_from_run_to_run() -> None:
    texts = set()
    for _ in range(2):
        plan = planned(deep(), "40%")
        texts.add(plan.to_json().replace(plan.graph_id, ""))
    assert len(texts) == 1


def test_a_fixed_number_of_slices_is_not_weighed() -> None:
    plan = planned(deep(), "90%", num_microbatches=2)
    assert (plan.num_microbatches, plan.candidates) == (2, ())


def test_attention_and_odd_batches() -> None:
    program = Program(
        lambda: Step(Attention("explicit"), lambda step, logits, y: flat_cross_entropy(logits, y)),
        lambda: (torch.randn(7, TIME, WIDTH), *ragged_labels(7, TIME, CLASSES)),
    )
    smallest = smallest_bytes(program)
    plan = planned(program, smallest)
    assert plan.num_microbatches > 1


def smallest_bytes(program: Program, **options: object) -> int:
    return refused(program, **options).smallest_bytes


def refused(program: Program, **options: object) -> BudgetInfeasibleError:
    with pytest.raises(Exception, match="cannot be met") as caught:
        run_remat(program, memory_budget=1, **options)
    error = remat_error(caught.value)
    assert isinstance(error, BudgetInfeasibleError)
    return error


def test_the_smallest_peak_is_that_of_the_smallest_way() -> None:
    program = deep()
    smallest = smallest_bytes(program)
    assert smallest < smallest_bytes(program, num_microbatches=1)
    planned(program, smallest)


def test_a_refusal_says_that_slices_are_off() -> None:
    assert "REMAT_NUM_MICROBATCHES" in str(refused(deep(), num_microbatches=1))
    assert "REMAT_NUM_MICROBATCHES" not in str(refused(deep()))


def norm_program() -> Program:
    def build() -> nn.Module:
        body = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, CLASSES))
        return Step(body, lambda step, logits, y: flat_cross_entropy(logits.unsqueeze(1), y))

    return Program(build, lambda: (torch.randn(BATCH, 2, 8, 8), *ragged_labels(BATCH, 1, CLASSES)))


def test_batch_norm_is_not_split_unless_that_is_asked_for() -> None:
    program = norm_program()
    error = refused(program)
    assert "per_microbatch" in str(error)
    run_remat(program, memory_budget=error.smallest_bytes - 1, batch_norm="per_microbatch")
    plan = remat_compiler.plans()[-1]
    assert plan.num_microbatches > 1
    assert plan.projected_peak_bytes < error.smallest_bytes


def test_a_step_that_cannot_be_split_is_planned_whole_and_says_why() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 9))

        def forward(self) -> Tensor:
            return self.layers(torch.ones(WIDTH, dtype=self.layers[0].weight.dtype)).square().mean()

    program = Program(Alone, tuple)
    plan = planned(program, "100%")
    assert plan.num_microbatches == 1
    assert any("No other number of micro-batches was weighed" in note for note in plan.notes)
    assert "No other number of micro-batches was weighed" in str(refused(program))


def test_symbolic_sizes_are_kept_where_the_budget_allows() -> None:
    program = deep()
    module = program.module()
    torch._dynamo.reset()
    call = torch.compile(module, backend="remat", dynamic=True, options={"lowering": "eager", "memory_budget": "100%"})
    x, y = program.arguments()
    call(x, y).backward()
    plan = remat_compiler.plans()[-1]
    assert plan.symbols
    assert plan.num_microbatches == 1


def test_symbolic_sizes_are_fixed_where_the_budget_asks_for_slices() -> None:
    program = deep()
    budget = smallest_bytes(program, num_microbatches=1) - 1
    torch._dynamo.reset()
    options = {"lowering": "eager", "memory_budget": budget}
    call = torch.compile(program.module(), backend="remat", dynamic=True, options=options)
    call(*program.arguments()).backward()
    plan = remat_compiler.plans()[-1]
    assert not plan.symbols
    assert plan.num_microbatches > 1


def test_the_last_version_that_torch_compile_makes_is_a_warning() -> None:
    program = deep()
    torch._dynamo.reset()
    options = {"lowering": "eager", "memory_budget": "8GiB"}
    call = torch.compile(program.module(), backend="remat", dynamic=False, options=options)
    x, y = program.arguments()
    with torch._dynamo.config.patch(recompile_limit=3):
        for size in (8, 7):
            call(x[:size], y[:size]).backward()
        with pytest.warns(remat_compiler.RematWarning, match="recompile_limit"):
            call(x[:6], y[:6]).backward()


def test_an_error_of_one_way_is_not_held_against_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit that a trial lowers is that of the way it was made for."""
    program = deep()
    plan = planned(program, "60%")
    limits = {UNSPLIT: 0, Way("step", plan.num_microbatches): 0}
    original = RematPartitioner.__init__

    def with_limits(self: RematPartitioner, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        self.limits = limits

    monkeypatch.setattr(RematPartitioner, "__init__", with_limits)
    other = planned(program, "60%")
    assert plan.num_microbatches < other.num_microbatches < BATCH


def test_verify_recomputes_where_the_unsplit_step_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    program = deep()
    smallest = smallest_bytes(program, num_microbatches=1)
    monkeypatch.setattr(verify, "_free_bytes", lambda arguments: smallest)
    planned(program, smallest - 1, verify=True)
    assert ": verified, " in remat_compiler.verifications()[-1]

    monkeypatch.setattr(verify, "_free_bytes", lambda arguments: smallest // 2)
    planned(program, smallest - 1, verify=True)
    assert "not verified, because the unsplit step needs" in remat_compiler.verifications()[-1]


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"memory_budget": "60%"}])
def test_the_cache_key_holds_the_measured_times_of_the_bodies(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    """Another table may give a body another plan, and Inductor's cache has to know."""
    made: list[RematPartitioner] = []
    original = RematPartitioner.decide

    def kept(self: RematPartitioner, *arguments: Any) -> Any:
        made.append(self)
        return original(self, *arguments)

    monkeypatch.setattr(RematPartitioner, "decide", kept)
    run_remat(deep(), **options)
    [partitioner] = made
    assert len(partitioner.table_hashes) >= 3  # of the step, of the graph around the loop, and of its body
    before = partitioner.uuid()
    partitioner.table_hashes[-1] = "another table"
    assert partitioner.uuid() != before
