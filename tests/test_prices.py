"""Prices of one instant: the bound is never above a decision, or a plan of the chain, that fits; and it says more."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from graphs import JointBuilder, Staged, products, staged
from test_bound import BUILDERS, built, chain_plans
from test_exact_search import SEEDS, Tried, brute_force, every_decision, fastest, limits, random_graph

from remat_passes.bound import lower_bound_ps
from remat_passes.cut import cut_of_saved
from remat_passes.joint import JointGraph
from remat_passes.prices import instant_bound_ps

aten = torch.ops.aten


def assert_below(graph: Staged, tried: Sequence[Tried], chosen: Sequence[Tried]) -> int:
    """The bound holds at every limit, whichever plan it is started from; how often it says something."""
    num_bounds = 0
    for limit_bytes, start in itertools.product(limits(tuple(tried)), chosen):
        least = fastest(tuple(tried), limit_bytes)
        bound = instant_bound_ps(graph.joint, graph.problem, graph.model, limit_bytes, [graph.model.project(start.cut)])
        num_bounds += bound is not None and bound > 0
        assert bound is None or least is None or bound <= least, f"{bound} > {least} at {limit_bytes}"
    return num_bounds


@pytest.mark.parametrize(("name", "fuses"), list(itertools.product(BUILDERS, (False, True))))
def test_never_above_the_fastest_decision_that_fits(name: str, fuses: bool) -> None:
    graph = built(name, fuses)
    tried = brute_force(graph, graph.problem)

    assert (assert_below(graph, tried, [tried[0], tried[-1]]) > 0) == (name != "chain")  # it has no kernel of its own


@pytest.mark.parametrize(("seed", "fuses"), list(itertools.product(SEEDS, (False, True))))
def test_never_above_the_fastest_decision_of_a_random_graph(seed: int, fuses: bool) -> None:
    tried = every_decision(seed, fuses)
    assert_below(random_graph(seed, fuses), tried, [tried[0], tried[-1]])


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("rows", [64, 512])
def test_never_above_a_plan_that_computes_values_more_than_once(rows: int, fuses: bool) -> None:
    graph = staged(products(10, rows, 32), fuses=fuses)
    plans = chain_plans(graph)
    projection = graph.model.project(cut_of_saved(graph.problem, frozenset()))

    assert any(repeats for _, repeats in plans)
    for limit_bytes in {plan.peak_bytes for plan, _ in plans}:
        least = min(plan.cut.time_ps for plan, _ in plans if plan.peak_bytes <= limit_bytes)
        bound = instant_bound_ps(graph.joint, graph.problem, graph.model, limit_bytes, [projection])
        assert bound is not None
        assert 0 < bound <= least


def kept_for_a_recomputation() -> JointGraph:
    """``y = exp(x @ w)`` twice over, where backward reads only pointwise work of each product: what is saved of it is
    saved for a recomputation."""
    build = JointBuilder()
    x, first, second, tangent = build.primal(64, 64), build.primal(64, 64), build.primal(64, 64), build.tangent(64, 64)
    a = build.call(aten.mm.default, x, first)
    b = build.call(aten.mm.default, build.call(aten.exp.default, a), second)
    out = build.call(aten.exp.default, b)
    back = build.call(aten.mm.default, build.call(aten.mul.Tensor, tangent, build.call(aten.sin.default, b)), second)
    back = build.call(aten.mm.default, build.call(aten.mul.Tensor, back, build.call(aten.cos.default, a)), first)
    return build.joint([build.call(aten.sum.default, out)], [back], static=[1, 2])


def test_what_is_saved_for_a_recomputation_counts() -> None:
    """bound.py sees only what backward itself reads, which here may all be recomputed from something else."""
    graph = staged(kept_for_a_recomputation(), fuses=True)
    tried = brute_force(graph, graph.problem)
    higher = 0
    for limit_bytes in limits(tried):
        least = fastest(tried, limit_bytes)
        start = next((found for found in tried if found.cut.time_ps == least), None)
        if start is None or start.peak_bytes > limit_bytes:
            continue
        known = lower_bound_ps(graph.joint, graph.problem, graph.model, limit_bytes, start.cut)
        projection = graph.model.project(start.cut)
        bound = instant_bound_ps(graph.joint, graph.problem, graph.model, limit_bytes, [projection])
        higher += bound is not None and bound > (known or 0)

    assert higher > 0
    assert_below(graph, tried, [tried[0], tried[-1]])
