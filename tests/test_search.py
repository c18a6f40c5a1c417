"""The search: within the budget, never worse than plain Inductor, and monotone in the budget; against brute force."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from graphs import JointBuilder, Staged, chain, choose, staged, trace, value_of
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from remat_passes.cut import Cut, cut_of_saved, sweep
from remat_passes.errors import BudgetInfeasibleError, CannotPartitionError
from remat_passes.joint import JointGraph
from remat_passes.narrow import narrow_points
from remat_passes.search import TIME_RESOLUTION, Candidate, inductor_candidate
from remat_passes.units import format_bytes

aten = torch.ops.aten
NO_LIMIT = 2**50


# -- graphs -----------------------------------------------------------------------------------------------------------


def products(num_layers: int, rows: int = 32) -> JointGraph:
    """``h = exp(h @ w)`` for weights of 4 KiB, with all their gradients; a layer's values take 128 bytes a row each."""
    build = JointBuilder()
    h = build.primal(rows, 32)
    weights = [build.primal(32, 32) for _ in range(num_layers)]
    gradient = build.tangent(rows, 32)
    layers = []
    for w in weights:
        h_in, h = h, build.call(aten.exp.default, build.call(aten.mm.default, h, w))
        layers.append((h_in, w, h))
    gradients = []
    for h_in, w, out in reversed(layers):
        gradient = build.call(aten.mul.Tensor, gradient, out)
        gradients.append(build.call(aten.mm.default, build.call(aten.t.default, h_in), gradient))
        gradient = build.call(aten.mm.default, gradient, build.call(aten.t.default, w))
    return build.joint([build.call(aten.sum.default, h)], gradients, static=range(1, num_layers + 1))


def uneven() -> JointGraph:
    """Values of several sizes: a product that grows, a norm of its rows, and one that shrinks."""
    build = JointBuilder()
    x, up, down, tangent = build.primal(64, 16), build.primal(16, 64), build.primal(64, 8), build.tangent(64, 8)
    wide = build.call(aten.mm.default, x, up)
    gate = build.call(aten.sigmoid.default, wide)
    total = build.call(aten.sum.dim_IntList, gate, [1], True)
    share = build.call(aten.div.Tensor, gate, total)
    out = build.call(aten.mm.default, share, down)
    back = build.call(aten.mm.default, tangent, build.call(aten.t.default, down))
    down_gradient = build.call(aten.mm.default, build.call(aten.t.default, share), tangent)
    back = build.call(aten.div.Tensor, build.call(aten.mul.Tensor, back, gate), total)
    up_gradient = build.call(aten.mm.default, build.call(aten.t.default, x), back)
    return build.joint([out], [up_gradient, down_gradient], static=[1, 2])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.shrink(F.gelu(self.grow(self.norm(x)))), 0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


@functools.cache
def traced(fuses: bool) -> Staged:
    return staged(trace(Net(), torch.ones(64, 8)), fuses=fuses)


TINY: dict[str, Callable[[], JointGraph]] = {
    "chain": lambda: chain(6, 256, aten.exp.default),
    "products": lambda: products(4, rows=512),
    "uneven": uneven,
}


@functools.cache
def tiny(name: str, fuses: bool) -> Staged:
    return staged(TINY[name](), fuses=fuses)


tiny_graphs = pytest.mark.parametrize(("name", "fuses"), list(itertools.product(TINY, (False, True))))


# -- brute force ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Everything:
    """Every decision of a small graph that saves a subset of its values and recomputes the rest."""

    candidates: tuple[Candidate, ...]

    def fastest_ps(self, budget_bytes: int) -> int | None:
        fitting = [c.cut.time_ps for c in self.candidates if c.projection.peak_bytes <= budget_bytes]
        return min(fitting, default=None)

    @property
    def smallest_peak(self) -> int:
        return min(candidate.projection.peak_bytes for candidate in self.candidates)


def decidable(graph: Staged) -> list[int]:
    both = (i for i, v in enumerate(graph.problem) if v.save_ps is not None and v.recompute_ps is not None)
    return [index for index in both if graph.joint.values[index].side.value != "backward"]


@functools.cache
def brute_force(name: str, fuses: bool) -> Everything:
    graph = tiny(name, fuses)
    values = decidable(graph)
    assert 3 <= len(values) <= 10
    cuts: dict[tuple[frozenset[int], frozenset[int]], Cut] = {}
    for num_saved in range(len(values) + 1):
        for saved in itertools.combinations(values, num_saved):
            cut = cut_of_saved(graph.problem, frozenset(saved))
            cuts[cut.need, cut.redo] = cut
    return Everything(tuple(Candidate(cut, graph.model.project(cut)) for cut in cuts.values()))


def every_peak(everything: Everything) -> list[int]:
    """Budgets at and around each peak that any decision has."""
    peaks = {candidate.projection.peak_bytes for candidate in everything.candidates}
    return sorted({near for peak in peaks for near in (peak - 1, peak, peak + 1)}, reverse=True)


def try_choose(graph: Staged, budget_bytes: int | None) -> Candidate | None:
    try:
        return choose(graph, budget_bytes).chosen
    except BudgetInfeasibleError:
        return None


@tiny_graphs
def test_the_best_of_all_decisions_is_chosen(name: str, fuses: bool) -> None:
    """Or one that is better still, because it computes a value more than once."""
    graph, everything = tiny(name, fuses), brute_force(name, fuses)
    for budget_bytes in every_peak(everything):
        chosen, fastest_ps = try_choose(graph, budget_bytes), everything.fastest_ps(budget_bytes)
        if chosen is None:
            assert fastest_ps is None, "a budget is refused that a decision meets"
            continue
        assert chosen.projection.peak_bytes <= budget_bytes
        if chosen.unrolled is None:
            assert chosen.cut.time_ps == fastest_ps
            assert graph.model.project(chosen.cut).peak_bytes == chosen.projection.peak_bytes
        else:
            assert fastest_ps is None or chosen.cut.time_ps <= fastest_ps


@tiny_graphs
def test_without_a_limit_the_fastest_of_all_decisions_is_chosen(name: str, fuses: bool) -> None:
    everything = brute_force(name, fuses)
    inductor = tiny(name, fuses).inductor.projection.peak_bytes
    chosen = choose(tiny(name, fuses), NO_LIMIT).chosen

    assert chosen.cut.time_ps in (everything.fastest_ps(NO_LIMIT), everything.fastest_ps(inductor))


@tiny_graphs
def test_the_lower_bound_is_below_every_decision_within_the_budget(name: str, fuses: bool) -> None:
    graph, everything = tiny(name, fuses), brute_force(name, fuses)
    for budget_bytes in every_peak(everything):
        if try_choose(graph, budget_bytes) is None:
            continue
        choice, fastest_ps = choose(graph, budget_bytes), everything.fastest_ps(budget_bytes)
        assert fastest_ps is None or choice.lower_bound_ps <= fastest_ps
        assert choice.lower_bound_ps <= choice.chosen.cut.time_ps


@tiny_graphs
def test_where_the_best_of_all_decisions_lies_on_the_hull_it_is_chosen(name: str, fuses: bool) -> None:
    """The hull's own decisions are always among the candidates."""
    graph, everything = tiny(name, fuses), brute_force(name, fuses)
    for cut in sweep(graph.problem, 100).vertices:
        peak_bytes = graph.model.project(cut).peak_bytes
        if peak_bytes <= graph.inductor.projection.peak_bytes and cut.time_ps == everything.fastest_ps(peak_bytes):
            assert choose(graph, peak_bytes).chosen.cut.time_ps == cut.time_ps


@pytest.mark.parametrize("fuses", [False, True])
def test_the_tightest_budget_of_a_few_layers_is_that_of_all_decisions(fuses: bool) -> None:
    """Or a smaller one, because values may be computed more than once."""
    graph, everything = tiny("products", fuses), brute_force("products", fuses)
    smallest = named_peak(refusal(graph, 1))

    assert smallest <= everything.smallest_peak < graph.inductor.projection.peak_bytes * 0.9
    assert choose(graph, smallest).chosen.projection.peak_bytes == smallest
    assert refusal(graph, smallest - 1)


# -- budgets ----------------------------------------------------------------------------------------------------------


def falling_budgets(graph: Staged, count: int) -> list[int]:
    """From above what plain Inductor needs to below what can be reached."""
    loosest = graph.inductor.projection.peak_bytes * 21 // 20
    return [loosest - (loosest - graph.model.baseline_bytes) * step // count for step in range(count)]


def assert_monotone(graph: Staged, budgets: list[int]) -> int:
    """Peaks never rise and times never fall as the budget does; once one is refused all smaller ones are."""
    peak_bytes, time_ps, num_met = NO_LIMIT, 0, 0
    is_refused = False
    for budget_bytes in budgets:
        chosen = try_choose(graph, budget_bytes)
        assert chosen is None or not is_refused, f"{budget_bytes} is met although more was refused"
        is_refused = chosen is None
        if chosen is None:
            continue
        assert chosen.projection.peak_bytes <= budget_bytes
        assert chosen.projection.peak_bytes <= peak_bytes, f"the peak rose at {budget_bytes}"
        assert chosen.cut.time_ps >= time_ps, f"the step became faster at {budget_bytes}"
        peak_bytes, time_ps, num_met = chosen.projection.peak_bytes, chosen.cut.time_ps, num_met + 1
    return num_met


@tiny_graphs
def test_every_budget_of_a_tiny_graph(name: str, fuses: bool) -> None:
    assert assert_monotone(tiny(name, fuses), every_peak(brute_force(name, fuses))) >= 3


@pytest.mark.parametrize("fuses", [False, True])
def test_a_dense_grid_of_budgets_of_a_traced_step(fuses: bool) -> None:
    graph = traced(fuses)
    assert assert_monotone(graph, falling_budgets(graph, 10)) >= 3


@pytest.mark.parametrize("fuses", [False, True])
def test_the_smallest_peak_that_a_refusal_names_can_be_reached(fuses: bool) -> None:
    graph = traced(fuses)
    smallest = named_peak(refusal(graph, 1))
    chosen = choose(graph, smallest).chosen.projection.peak_bytes

    assert chosen == smallest
    assert named_peak(refusal(graph, smallest - 1)) == smallest


@pytest.mark.parametrize("fuses", [False, True])
def test_without_a_budget_equally_fast_means_the_lowest_peak(fuses: bool) -> None:
    """A budget asks for the fastest plan inside it; no budget asks for the smallest of those that are about as fast."""
    graph = traced(fuses)
    free, fastest = choose(graph, None).chosen, choose(graph, NO_LIMIT).chosen
    step_ps = graph.costs.fixed_ps + fastest.cut.time_ps

    assert free.projection.peak_bytes <= fastest.projection.peak_bytes
    assert fastest.cut.time_ps <= free.cut.time_ps <= fastest.cut.time_ps + TIME_RESOLUTION * step_ps


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("budget_bytes", [None, NO_LIMIT])
def test_never_above_what_plain_inductor_needs(fuses: bool, budget_bytes: int | None) -> None:
    choice = choose(traced(fuses), budget_bytes)
    assert choice.chosen.projection.peak_bytes <= choice.inductor.projection.peak_bytes


@tiny_graphs
@pytest.mark.parametrize("budget_bytes", [None, NO_LIMIT])
def test_never_above_the_yardstick_of_a_tiny_graph(name: str, fuses: bool, budget_bytes: int | None) -> None:
    choice = choose(tiny(name, fuses), budget_bytes)
    assert choice.chosen.projection.peak_bytes <= choice.inductor.projection.peak_bytes


def test_the_frontier_rises_in_time_and_falls_in_peak() -> None:
    graph = traced(False)
    smallest = named_peak(refusal(graph, 1))
    for budget_bytes in (None, smallest, (smallest + graph.inductor.projection.peak_bytes) // 2):
        frontier = choose(graph, budget_bytes).frontier
        pairs = [(point.cut.time_ps, point.projection.peak_bytes) for point in frontier]
        assert len(pairs) >= 2
        assert all(t0 < t1 and p0 > p1 for (t0, p0), (t1, p1) in itertools.pairwise(pairs))


# -- narrow points ----------------------------------------------------------------------------------------------------


def test_a_deep_chain_needs_less_than_saving_all_and_than_recomputing_all() -> None:
    # 16 layers of 64 KiB. Saved: 16 are alive at the start of backward. Recomputed from the input: as many. With every
    # fourth kept 4 are alive, and 4 more while a quarter is recomputed.
    graph = staged(products(16, rows=512), fuses=True)
    layers = {value.index for value in graph.joint.values if value.op == "aten.exp.default"}
    assert layers <= set(narrow_points(graph.joint))
    nothing = graph.model.project(cut_of_saved(graph.problem, frozenset())).peak_bytes
    smallest = choose(graph, named_peak(refusal(graph, 1))).chosen

    held = graph.model.baseline_bytes
    for peak_bytes in (graph.inductor.projection.peak_bytes, nothing):
        assert smallest.projection.peak_bytes - held < (peak_bytes - held) * 0.7


# -- refusals ---------------------------------------------------------------------------------------------------------


def refusal(graph: Staged, budget_bytes: int) -> str:
    with pytest.raises(BudgetInfeasibleError) as raised:
        choose(graph, budget_bytes)
    return str(raised.value)


def named_peak(message: str) -> int:
    return int(message.split("smallest peak that can be reached is ")[1].split("(")[1].split(" bytes")[0])


def test_a_refusal_names_the_budget_and_the_smallest_peak() -> None:
    graph = tiny("products", False)
    message = refusal(graph, 100_000)
    smallest = named_peak(message)

    assert "The memory budget of 97.7 KiB (100000 bytes) cannot be met" in message
    assert f"{format_bytes(smallest, round_up=True)} ({smallest} bytes)" in message
    assert 100_000 < smallest <= graph.inductor.projection.peak_bytes


def test_a_refusal_says_what_the_smallest_peak_is_made_of() -> None:
    graph = tiny("products", False)
    smallest = choose(graph, named_peak(refusal(graph, 1))).chosen.projection
    message = refusal(graph, 1)

    for name, size in smallest.peak_values[:4]:
        assert f"{name} {format_bytes(size)}" in message
    assert "parameters, buffers and inputs 80.0 KiB" in message  # 512 rows of 128 bytes, and four weights
    assert "16.0 KiB of gradients" in message


def test_a_refusal_says_what_would_help() -> None:
    message = refusal(tiny("chain", False), 1)
    assert "smaller batch" in message
    assert "fallback='inductor'" in message


# -- plain Inductor's decision ----------------------------------------------------------------------------------------


def drawn() -> JointGraph:
    """Dropout as one op with two results, the second of which, its mask, backward needs."""
    build = JointBuilder()
    x, tangent = build.primal(256), build.tangent(256)
    dropped = build.call(aten.native_dropout.default, x, 0.5, True)
    out, mask = (build.call(operator.getitem, dropped, position) for position in (0, 1))
    return build.joint([out], [build.call(aten.mul.Tensor, tangent, mask)])


def test_inductors_decision_is_read_back_from_the_names_it_saves() -> None:
    graph = traced(False)
    saved = {graph.joint.values[index].name for index in graph.inductor.cut.saved}
    everything = {value.name for value in graph.joint.values}
    again = inductor_candidate(graph.joint, graph.problem, graph.model, frozenset(saved))

    assert graph.inductor.is_legal
    assert saved < everything
    assert again.cut.saved == graph.inductor.cut.saved
    assert again.projection == graph.inductor.projection


def test_a_decision_of_inductor_that_draws_again_is_a_yardstick_and_no_candidate() -> None:
    graph = staged(drawn())
    illegal = inductor_candidate(graph.joint, graph.problem, graph.model, frozenset({"primals_1"}))
    dropped, mask = (value_of(graph.joint, name).index for name in ("native_dropout_default", "getitem_1"))
    unlawful = replace(graph, inductor=illegal)

    assert not illegal.is_legal
    assert dropped in illegal.cut.redo
    for budget_bytes in (None, NO_LIMIT):
        assert mask in choose(unlawful, budget_bytes).chosen.cut.saved


def test_what_cannot_be_partitioned_is_refused_at_every_budget() -> None:
    build = JointBuilder()
    x, tangent = build.primal(256), build.tangent(256)
    again = build.call(aten.exp.default, x, recompute=CheckpointPolicy.MUST_RECOMPUTE)
    once = build.call(aten.view.default, again, [256], recompute=CheckpointPolicy.MUST_SAVE)
    graph = build.joint([x], [build.call(aten.mul.Tensor, tangent, once)])
    for budget_bytes in (None, 1, NO_LIMIT):
        with pytest.raises(CannotPartitionError, match="exp_default"):
            choose(staged(graph), budget_bytes)
