"""Repair: plans between those of the hull and of the chain, on a graph with a long skip; each one is a true replay."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from graphs import Staged, choose, staged, trace
from torch import Tensor, nn

from remat_passes.cut import cut_of_saved, fastest_price, solve, sweep, without_dead_ends
from remat_passes.repair import MAX_REPLAYS, NUM_RUNGS, Repaired, ladder, repaired


class Skips(nn.Module):
    """Layers whose results are all read again in the opposite order: between the two ends there is no narrow point."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = F.silu(layer(x))
            kept.append(x)
        for layer in self.up:
            x = F.silu(layer(x + kept.pop()))
        return x.square().mean()


@functools.cache
def skips(fuses: bool) -> Staged:
    return staged(trace(Skips(32, 5), torch.ones(512, 32)), fuses=fuses)


def never(limit_bytes: int, time_ps: int) -> bool:
    return False


def no_other(limit_bytes: int) -> None:
    return None


@functools.cache
def walked(fuses: bool) -> tuple[Repaired, ...]:
    graph = skips(fuses)
    start = solve(graph.problem, fastest_price(graph.problem))
    top_bytes = graph.model.project(start).peak_bytes
    return tuple(
        repaired(graph.joint, without_dead_ends(graph.problem), graph.model, start, top_bytes, never, no_other)
    )


def fastest_ps(plans: tuple[Repaired, ...], limit_bytes: int) -> int | None:
    return min((p.cut.time_ps for p in plans if p.projection.peak_bytes <= limit_bytes), default=None)


either_lowering = pytest.mark.parametrize("fuses", [False, True])


@either_lowering
def test_each_plan_is_a_decision_with_its_replay(fuses: bool) -> None:
    graph, plans = skips(fuses), walked(fuses)

    assert 1 < len(plans) <= MAX_REPLAYS
    assert len({(plan.cut.need, plan.cut.redo) for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.cut == cut_of_saved(without_dead_ends(graph.problem), plan.cut.saved)
        assert plan.projection == graph.model.project(plan.cut)


@either_lowering
def test_it_finds_faster_plans_than_the_hull_at_most_limits(fuses: bool) -> None:
    graph = skips(fuses)
    hull = tuple(Repaired(cut, graph.model.project(cut)) for cut in sweep(graph.problem, 100).vertices)
    top_bytes = hull[0].projection.peak_bytes
    faster = slower = 0
    for limit_bytes in ladder(top_bytes, graph.model.baseline_bytes):
        mine, its = fastest_ps(walked(fuses), limit_bytes), fastest_ps(hull, limit_bytes)
        faster += mine is not None and (its is None or mine < its)
        slower += its is not None and (mine is None or mine > its)

    assert faster > slower
    assert min(p.projection.peak_bytes for p in walked(fuses)) < min(p.projection.peak_bytes for p in hull)


@either_lowering
def test_a_plan_is_repaired_in_both_directions(fuses: bool) -> None:
    """Going down the ladder values are dropped; some later plan saves what an earlier one did not."""
    plans = walked(fuses)
    pairs = list(itertools.pairwise(plans))

    assert any(after.cut.saved < before.cut.saved or after.cut.redo > before.cut.redo for before, after in pairs)
    assert any(after.cut.time_ps < before.cut.time_ps for before, after in pairs)


def test_the_walk_ends_where_other_plans_are_better() -> None:
    graph = skips(True)
    start = solve(graph.problem, fastest_price(graph.problem))
    top_bytes = graph.model.project(start).peak_bytes
    problem = without_dead_ends(graph.problem)
    asked: list[int] = []

    def is_beaten(limit_bytes: int, time_ps: int) -> bool:
        asked.append(limit_bytes)
        return len(asked) == 2

    short = repaired(graph.joint, problem, graph.model, start, top_bytes, is_beaten, no_other)

    assert asked == ladder(top_bytes, graph.model.baseline_bytes)[:2]
    assert len(short) < len(walked(True))
    assert tuple(short) == walked(True)[: len(short)]


@either_lowering
def test_where_other_plans_are_better_it_starts_from_those(fuses: bool) -> None:
    """One that leaves room at most limits is filled: faster plans, each within its limit."""
    graph = skips(fuses)
    start = solve(graph.problem, fastest_price(graph.problem))
    top_bytes = graph.model.project(start).peak_bytes
    low = min(walked(fuses), key=lambda plan: plan.projection.peak_bytes)
    found = repaired(
        graph.joint,
        without_dead_ends(graph.problem),
        graph.model,
        start,
        top_bytes,
        lambda _limit, _time: True,
        lambda _limit: low.cut,
    )
    limits = [i for i in ladder(top_bytes, graph.model.baseline_bytes) if i > low.projection.peak_bytes]
    faster = [i for i in limits if (fastest_ps(tuple(found), i) or math.inf) < low.cut.time_ps]

    assert 2 * len(faster) > len(limits)
    assert all(plan.projection == graph.model.project(plan.cut) for plan in found)


def test_the_ladder_falls_and_stays_above_what_is_allocated_before_the_step() -> None:
    limits = ladder(1000, 100)

    assert len(limits) == NUM_RUNGS - 1
    assert all(100 < low < high < 1000 for high, low in itertools.pairwise(limits))


# -- in the search ----------------------------------------------------------------------------------------------------


@either_lowering
def test_the_search_chooses_among_them(fuses: bool) -> None:
    """In the least memory that the walk reaches, its plan is not slower than the best one of the walk."""
    least = min(plan.projection.peak_bytes for plan in walked(fuses))
    best_ps = fastest_ps(walked(fuses), least)

    assert best_ps is not None
    assert choose(skips(fuses), least).chosen.cut.time_ps <= best_ps


def test_the_peak_never_rises_over_twenty_falling_budgets() -> None:
    graph = skips(True)
    most = graph.inductor.projection.peak_bytes
    least = min(plan.projection.peak_bytes for plan in walked(True))
    budgets = [most - (most - least) * step // 19 for step in range(20)]
    chosen = [choose(graph, budget_bytes).chosen for budget_bytes in budgets]

    assert all(c.projection.peak_bytes <= budget_bytes for c, budget_bytes in zip(chosen, budgets, strict=True))
    assert len({c.projection.peak_bytes for c in chosen}) > 5
    for before, after in itertools.pairwise(chosen):
        assert after.projection.peak_bytes <= before.projection.peak_bytes
        assert after.cut.time_ps >= before.cut.time_ps
