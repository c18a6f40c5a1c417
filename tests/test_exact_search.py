"""Branch and bound: on small random graphs it finds what trying every decision finds, at every limit."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from graphs import JointBuilder, Staged, staged
from torch import fx

from remat_passes.cut import Cut, CutProblem, cut_of_saved
from remat_passes.exact import best_cut, decidable
from remat_passes.joint import JointGraph

aten = torch.ops.aten
SEEDS = range(12)


# -- graphs -----------------------------------------------------------------------------------------------------------


def random_joint(seed: int, num_values: int = 7) -> JointGraph:
    """Products, sums and pointwise work on rows of several widths; backward reads a part of them, in no order."""
    draw = random.Random(seed)
    build = JointBuilder()
    width = {(x := build.primal(32, 16)): 16}
    made = [x]
    weights: list[fx.Node] = []

    def weight(rows: int, columns: int) -> fx.Node:
        weights.append(build.primal(rows, columns))
        return weights[-1]

    def product(operand: fx.Node, columns: int) -> fx.Node:
        return build.call(aten.mm.default, operand, weight(width[operand], columns))

    for _ in range(num_values):
        source = draw.choice(made[-3:])
        partner = draw.choice(made)
        kind = draw.choice(("product", "exp", "combine", "sum"))
        if kind == "product":
            columns = draw.choice((4, 16, 64))
            node = product(source, columns)
        elif kind == "sum" and width[source] > 1:
            node, columns = build.call(aten.sum.dim_IntList, source, [1], True), 1
        elif kind == "combine" and width[partner] in (1, width[source]) and partner is not source:
            node, columns = build.call(aten.mul.Tensor, source, partner), width[source]
        else:
            node, columns = build.call(aten.exp.default, source), width[source]
        width[node] = columns
        made.append(node)
    gradient = build.tangent(32, width[made[-1]])
    width[gradient] = width[made[-1]]
    gradients = []
    for value in draw.sample(made[1:], k=min(4, num_values)):
        gradients.append(build.call(aten.mm.default, build.call(aten.t.default, value), gradient))
        columns = width[value]
        gradient = product(gradient, columns)
        width[gradient] = columns
        if draw.random() < 0.7:
            gradient = build.call(aten.mul.Tensor, gradient, value)
            width[gradient] = columns
    return build.joint([made[-1]], [*gradients, gradient])


@functools.cache
def random_graph(seed: int, fuses: bool) -> Staged:
    return staged(random_joint(seed), fuses=fuses)


# -- brute force ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """One decision and its peak."""

    cut: Cut
    peak_bytes: int


def brute_force(graph: Staged, problem: CutProblem) -> tuple[Tried, ...]:
    """Every decision that saves some of the values that may be saved and recomputes all else."""
    values = [i for i, v in enumerate(problem) if v.save_ps is not None and v.recompute_ps is not None and v.inputs]
    assert len(values) <= 12
    cuts: dict[tuple[frozenset[int], frozenset[int]], Cut] = {}
    for bits in itertools.product((False, True), repeat=len(values)):
        cut = cut_of_saved(problem, frozenset(itertools.compress(values, bits)))
        cuts[cut.need, cut.redo] = cut
    return tuple(Tried(cut, graph.model.project(cut).peak_bytes) for cut in cuts.values())


@functools.cache
def every_decision(seed: int, fuses: bool) -> tuple[Tried, ...]:
    graph = random_graph(seed, fuses)
    return brute_force(graph, graph.problem)


def limits(tried: tuple[Tried, ...]) -> list[int]:
    """At each peak that any decision has, and just below it."""
    return sorted({peak - less for peak in {found.peak_bytes for found in tried} for less in (0, 1)})


def fastest(tried: tuple[Tried, ...], limit_bytes: int) -> int | None:
    return min((found.cut.time_ps for found in tried if found.peak_bytes <= limit_bytes), default=None)


random_graphs = pytest.mark.parametrize(("seed", "fuses"), list(itertools.product(SEEDS, (False, True))))


# -- tests ------------------------------------------------------------------------------------------------------------


def test_the_random_graphs_leave_something_to_decide() -> None:
    """Else the comparisons below would say little."""
    counts = [len({found.peak_bytes for found in every_decision(seed, False)}) for seed in SEEDS]
    assert sum(count >= 3 for count in counts) >= len(SEEDS) // 2, counts


@random_graphs
def test_the_best_decision_is_found_at_every_limit(seed: int, fuses: bool) -> None:
    graph, tried = random_graph(seed, fuses), every_decision(seed, fuses)
    for limit_bytes in limits(tried):
        found = best_cut(graph.problem, graph.model, limit_bytes, None)
        assert (found.time_ps if found is not None else None) == fastest(tried, limit_bytes), limit_bytes
        if found is not None:
            assert graph.model.project(found).peak_bytes <= limit_bytes
            assert found == cut_of_saved(graph.problem, found.saved)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_something_faster_than_what_is_known_is_returned(seed: int) -> None:
    graph, tried = random_graph(seed, False), every_decision(seed, False)
    for limit_bytes in limits(tried):
        fitting = [found.cut for found in tried if found.peak_bytes <= limit_bytes]
        for known in fitting[:: max(1, len(fitting) // 4)]:
            found = best_cut(graph.problem, graph.model, limit_bytes, known)
            if known.time_ps == fastest(tried, limit_bytes):
                assert found is None
            else:
                assert found is not None
                assert found.time_ps == fastest(tried, limit_bytes)


@pytest.mark.parametrize("seed", SEEDS)
def test_permissions_are_kept(seed: int) -> None:
    """What may not be saved or not be recomputed is a smaller set of decisions, and the best of it is found."""
    graph, draw = random_graph(seed, False), random.Random(seed)
    open_values = decidable(graph.problem)
    saved, redone = draw.sample(open_values, 2)
    problem = tuple(
        replace(v, recompute_ps=None) if i == saved else replace(v, save_ps=None) if i == redone else v
        for i, v in enumerate(graph.problem)
    )
    tried = brute_force(graph, problem)
    for limit_bytes in limits(tried):
        found = best_cut(problem, graph.model, limit_bytes, None)
        assert (found.time_ps if found is not None else None) == fastest(tried, limit_bytes)
        if found is not None:
            assert saved not in found.redo
            assert redone not in found.saved


def test_values_that_nothing_depends_on_are_not_decided() -> None:
    build = JointBuilder()
    x, tangent = build.primal(64, 64), build.tangent(64, 64)
    used = build.call(aten.exp.default, x)
    unused = build.call(aten.exp.default, used)
    graph = staged(build.joint([unused], [build.call(aten.mul.Tensor, tangent, used)]))

    assert [graph.problem[i].name for i in decidable(graph.problem)] == [used.name]
