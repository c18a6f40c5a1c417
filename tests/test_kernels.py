"""Inductor's kernels run as the plan has them: in its order, fused as it fuses, freed one by one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config

import remat_compiler
from remat_compiler.torch_private import inductor
from remat_compiler.torch_private.kernels import _in_order_of
from remat_passes.plan import RematPlan


class Blocks(nn.Module):
    """Gated blocks with dropout: cheap pointwise work between products, which a tight plan computes again."""

    def __init__(self, width: int = 32, num_blocks: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_blocks))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(num_blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + F.dropout(down(F.gelu(up(norm(x)), approximate="tanh")), 0.1)
        return x.square().mean()


def planned(budget: str, num_microbatches: int) -> RematPlan:
    torch.manual_seed(0)
    torch._dynamo.reset()
    options = {"memory_budget": budget, "num_microbatches": num_microbatches}
    with config.patch(force_disable_caches=True):
        torch.compile(Blocks(), backend="remat", options=options)(torch.randn(512, 32)).backward()
    return remat_compiler.plans()[-1]


def test_a_body_allocates_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("30%", 4)
    assert plan.projected_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.005)
    assert not plan.notes
    monkeypatch.setattr(inductor, "kernels_as_planned", nullcontext)
    assert "planned again" in " ".join(planned("30%", 4).notes)  # else this net says nothing about the order


def kernel(name: str, op: fx.Node, *needs: str) -> Any:
    dependencies = [SimpleNamespace(name=needed) for needed in needs]
    own = SimpleNamespace(get_buffer_names=lambda: {name}, unmet_dependencies=dependencies)
    own.get_nodes = lambda: [SimpleNamespace(node=SimpleNamespace(origins={op}))]
    return own


def test_kernels_stand_in_the_order_of_the_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    ops = [graph.call_function(torch.sin, (x,)) for _ in range(4)]
    first, second, third, fourth = (kernel(f"buf{at}", op) for at, op in enumerate(ops))
    third.unmet_dependencies = [SimpleNamespace(name="buf3")]  # what it needs stands behind it
    module = SimpleNamespace(graph=graph)
    assert _in_order_of(module, [third, second, fourth, first]) == [first, second, fourth, third]


def test_kernels_that_wait_for_one_another_are_left_as_they_are() -> None:
    graph = fx.Graph()
    op = graph.placeholder("x")
    kernels = [kernel("buf0", op, "buf1"), kernel("buf1", op, "buf0")]
    assert _in_order_of(SimpleNamespace(graph=graph), kernels) == kernels
