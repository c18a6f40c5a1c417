"""Planning does not do the same work for each of many equal layers; counted, because times depend on the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.networks import EqualLayers, ExplicitAttention, LanguageModel, LlamaBlock, ResNet, UNet
from benchmarks.plan_time import timed
from remat_compiler import torch_private
from remat_compiler.torch_private import partitioners
from remat_passes import holds as holds_module
from remat_passes.cut import Network, cut_of, cut_of_saved, fastest_price, smallest_price, solve, without_dead_ends
from remat_passes.holds import boundaries, holds
from remat_passes.memory import MemoryModel
from tests.graphs import Staged, Traced, staged, trace


def equal_layers(num_layers: int) -> Staged:
    return staged(trace(EqualLayers(16, num_layers), torch.randn(32, 16), torch.randn(32, 16)), fuses=True)


def num_flows(graph: Staged) -> int:
    network = Network(graph.problem)
    network.solve(fastest_price(graph.problem))
    network.solve(smallest_price(graph.problem))
    return network.num_flows


def test_equal_layers_are_solved_once() -> None:
    assert 0 < num_flows(equal_layers(4)) == num_flows(equal_layers(8))


def test_a_cut_put_together_from_equal_parts_adds_up() -> None:
    problem = equal_layers(8).problem
    for price in (fastest_price(problem), smallest_price(problem)):
        cut = solve(problem, price)
        assert cut == cut_of(problem, cut.need, cut.redo) == cut_of_saved(problem, cut.saved)


def test_equal_blocks_share_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few replays, runs of all decisions stand side by side, and what is measured is the same."""
    graph = equal_layers(24)
    problem = without_dead_ends(graph.problem)
    points = boundaries(graph.joint, problem)
    replays = 0
    project = MemoryModel.project

    def counted(self: MemoryModel, *arguments: object) -> object:
        nonlocal replays
        replays += 1
        return project(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryModel, "project", counted)
    each = holds(graph.joint, problem, graph.model, points, 8)
    num_each, replays = replays, 0
    monkeypatch.setattr(holds_module, "REPLAYED_VALUES", 0)
    packed = holds(graph.joint, problem, graph.model, points, 8)

    assert replays <= holds_module.FEWEST_REPLAYS < num_each
    middle = len(points) // 2
    assert packed.blocks[middle] == each.blocks[middle]
    assert all(block.options for block in packed.blocks)


# -- the yardstick ----------------------------------------------------------------------------------------------------


class Region(nn.Module):
    """Two checkpoint regions, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda h, layer=layer: torch.tanh(layer(h)), x, use_reentrant=False)
        return x.square().mean()


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(32, (2, 16)), torch.randint(32, (2, 16))


STEPS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "equal layers": lambda: (EqualLayers(16, 3), (torch.randn(32, 16), torch.randn(32, 16))),
    "dropout": lambda: (LanguageModel([ExplicitAttention(16, 2, 0.1)], 16, 32, None), tokens()),
    "llama": lambda: (LanguageModel([LlamaBlock(16, 4, 2) for _ in range(2)], 16, 32, 4), tokens()),
    "batch norm": lambda: (ResNet(4, 2), (torch.randn(2, 3, 8, 8), torch.randint(10, (2,)))),
    "skips": lambda: (UNet(4), (torch.randn(2, 3, 16, 16), torch.randint(5, (2, 16, 16)))),
    "checkpoint": lambda: (Region(), (torch.randn(4, 8),)),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_yardstick_is_the_answer_of_the_whole_partitioner(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it leaves no mark on the joint module."""
    step, inputs = STEPS[name]()
    fast = torch_private.inductor_saved_names
    whole: list[frozenset[str]] = []

    def both(module: torch.fx.GraphModule, num_outputs: int, static: list[int]) -> frozenset[str]:
        marks = [(dict(node.meta), hasattr(node, "dist_from_bw")) for node in module.graph.nodes]
        found = fast(module, num_outputs, static)
        assert marks == [(dict(node.meta), hasattr(node, "dist_from_bw")) for node in module.graph.nodes]
        whole.append(partitioners._saved_by_whole_partitioner(module, num_outputs, static))
        return found

    monkeypatch.setattr(torch_private, "inductor_saved_names", both)
    traced: Traced = trace(step, *inputs)

    found, expected = (
        staged(replace(traced, inductor_saved=n)).inductor.cut for n in (traced.inductor_saved, whole[0])
    )
    assert found == expected
    assert found.saved


def test_the_flow_of_the_yardstick_is_that_of_networkx() -> None:
    """Also where several cuts cost the same: the one nearest to the sink."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        graph = nx.DiGraph()
        graph.add_nodes_from("stabc")
        for tail, head in torch.randint(5, (9, 2), generator=generator).tolist():
            capacity = int(torch.randint(4, (1,), generator=generator))
            if tail != head:
                graph.add_edge("stabc"[tail], "stabc"[head], capacity=capacity if capacity < 3 else float("inf"))
        try:
            expected = nx.minimum_cut(graph, "s", "t")
        except nx.NetworkXUnbounded:
            with pytest.raises(nx.NetworkXUnbounded):
                partitioners._minimum_cut(graph, "s", "t")
            continue
        assert partitioners._minimum_cut(graph, "s", "t") == expected


def test_networkx_is_itself_again() -> None:
    step, inputs = STEPS["equal layers"]()
    before = nx.minimum_cut
    with mock.patch.object(partitioners, "_minimum_cut", wraps=partitioners._minimum_cut) as used:
        trace(step, *inputs)
    has_own_flow = hasattr(partitioners.partitioners, "minimum_cut")  # torch, from 2.15 on: that one is left alone
    assert used.called is not has_own_flow
    assert nx.minimum_cut is before


def test_the_benchmark_of_plan_times_goes_through_all_stages() -> None:
    timing = timed(4, ())
    assert timing.num_values > 400
    assert list(timing.seconds)[-2:] == ["search", "schedule"]
