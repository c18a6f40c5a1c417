"""The lower bound of time: never above a decision, or a plan of the chain, whose peak is within the limit; and it says
more than the time of no limit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from graphs import JointBuilder, Staged, chain, products, staged, unrolled_problem, value_of
from test_exact_search import SEEDS, Tried, brute_force, every_decision, fastest, limits, random_graph

from remat_passes.again import unroll
from remat_passes.bound import lower_bound_ps
from remat_passes.chain import Chain
from remat_passes.cut import Cut, cut_of_saved, without_dead_ends
from remat_passes.holds import boundaries, holds
from remat_passes.joint import JointGraph

aten = torch.ops.aten


# -- graphs -----------------------------------------------------------------------------------------------------------


def read_early_although_listed_late() -> JointGraph:
    """Backward reads ``v`` twice in one fused kernel; between the two ops, in autograd's order, is a large product."""
    build = JointBuilder()
    x, w, tangent = build.primal(64, 512), build.primal(512, 64), build.tangent(64, 64)
    v = build.call(aten.mm.default, x, w)
    out = build.call(aten.sum.dim_IntList, v, [1], True)
    first = build.call(aten.sum.dim_IntList, build.call(aten.mul.Tensor, v, tangent), [1], True)
    large = build.call(aten.mm.default, w, tangent)
    second = build.call(aten.sum.dim_IntList, build.call(aten.sub.Tensor, v, tangent), [1], True)
    return build.joint([out], [first, large, second])


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


BUILDERS: dict[str, Callable[[], JointGraph]] = {
    "chain": lambda: chain(6, 256, aten.exp.default),
    "products": lambda: products(4, 64, 32),
    "many rows": lambda: products(3, 512, 32),
}


@functools.cache
def built(name: str, fuses: bool) -> Staged:
    return staged(BUILDERS[name](), fuses=fuses)


def bound_ps(graph: Staged, limit_bytes: int, start: Cut) -> int | None:
    """The bound from the fullest instants of a plan."""
    replays = [graph.model.project(start)] * 2
    return lower_bound_ps(graph.joint, graph.problem, graph.model, limit_bytes, replays)


def assert_below(graph: Staged, tried: Sequence[Tried], chosen: Sequence[Tried]) -> int:
    """The bound holds at every limit, whichever decision it is started from; how often it says something."""
    num_bounds = 0
    for limit_bytes in limits(tuple(tried)):
        least = fastest(tuple(tried), limit_bytes)
        for start in chosen:
            bound = bound_ps(graph, limit_bytes, start.cut)
            num_bounds += bound is not None and bound > 0
            assert bound is None or least is None or bound <= least, f"{bound} > {least} at {limit_bytes}"
    return num_bounds


# -- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fuses"), list(itertools.product(BUILDERS, (False, True))))
def test_never_above_the_fastest_decision_that_fits(name: str, fuses: bool) -> None:
    graph = built(name, fuses)
    tried = brute_force(graph, graph.problem)
    chosen = [tried[0], tried[len(tried) // 2], tried[-1]]

    assert (assert_below(graph, tried, chosen) > 0) == (name != "chain")  # a chain's backward has no kernel of its own


@pytest.mark.parametrize(("seed", "fuses"), list(itertools.product(SEEDS, (False, True))))
def test_never_above_the_fastest_decision_of_a_random_graph(seed: int, fuses: bool) -> None:
    tried = every_decision(seed, fuses)
    assert_below(random_graph(seed, fuses), tried, [tried[0], tried[-1]])


def test_a_value_that_a_fused_kernel_reads_early_does_not_count_later() -> None:
    graph = staged(read_early_although_listed_late(), fuses=True)
    tried = brute_force(graph, graph.problem)
    assert_below(graph, tried, tried)


def test_what_is_saved_for_a_recomputation_counts() -> None:
    """Backward reads only what may be recomputed; what it is recomputed from waits all the same."""
    graph = staged(kept_for_a_recomputation(), fuses=True)
    tried = brute_force(graph, graph.problem)
    free = min(found.cut.time_ps for found in tried)
    higher = 0
    for limit_bytes in limits(tried):
        start = min((t for t in tried if t.peak_bytes <= limit_bytes), key=lambda t: t.cut.time_ps, default=None)
        bound = None if start is None else bound_ps(graph, limit_bytes, start.cut)
        higher += bound is not None and bound > free

    assert higher > 0
    assert_below(graph, tried, [tried[0], tried[-1]])


def test_it_is_more_than_the_time_of_no_limit() -> None:
    """On a chain of products a small limit costs time, and the bound sees that."""
    graph = built("many rows", False)
    tried = brute_force(graph, graph.problem)
    free, tight = min(found.cut.time_ps for found in tried), min(found.peak_bytes for found in tried)
    best = min((found for found in tried if found.peak_bytes == tight), key=lambda found: found.cut.time_ps)
    bound = bound_ps(graph, tight, best.cut)

    assert bound is not None
    assert free < bound <= best.cut.time_ps


def test_without_a_kernel_in_backward_there_is_no_bound() -> None:
    graph = built("chain", False)
    assert bound_ps(graph, 2**40, graph.inductor.cut) is None


# -- plans of the chain -----------------------------------------------------------------------------------------------


def chain_plans(graph: Staged) -> list[tuple[Tried, bool]]:
    """Every plan of the graph's chain with the peak of its replay, and whether it computes a value more than once."""
    problem = without_dead_ends(graph.problem)
    held = holds(graph.joint, problem, graph.model, boundaries(graph.joint, problem), max_cuts=8)
    assert held is not None
    table = Chain(held.blocks, num_units=256, unit_bytes=-(-held.largest_bytes // 256))
    found = []
    for units in table.breakpoints():
        again = unroll(graph.joint, problem, held.chain, held.always_saved, table.plan(units))
        cut = cut_of_saved(unrolled_problem(problem, again), again.saved)
        peak_bytes = replace(graph.model, joint=again.joint).project(cut).peak_bytes
        repeats = len(again.origin) > len(graph.joint.values)
        found.append((Tried(cut, peak_bytes), repeats))
    return found


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("rows", [64, 512])
def test_never_above_a_plan_that_computes_values_more_than_once(rows: int, fuses: bool) -> None:
    graph = staged(products(10, rows, 32), fuses=fuses)
    plans = chain_plans(graph)
    starts = [graph.inductor.cut, cut_of_saved(graph.problem, frozenset())]

    assert any(repeats for _, repeats in plans)
    assert len({value_of(graph.joint, "exp_default").bytes, *(plan.peak_bytes for plan, _ in plans)}) > 3
    for limit_bytes in {plan.peak_bytes for plan, _ in plans}:
        least = min(plan.cut.time_ps for plan, _ in plans if plan.peak_bytes <= limit_bytes)
        for start in starts:
            bound = bound_ps(graph, limit_bytes, start)
            assert bound is not None
            assert 0 < bound <= least
