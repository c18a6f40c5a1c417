"""Blocks: what one block computes reads the narrow point before it, what belongs to no block, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from graphs import JointBuilder, products, trace, value_of, values_of
from torch import Tensor, fx, nn

from remat_passes.blocks import Blocks, blocks
from remat_passes.joint import JointGraph, Side
from remat_passes.narrow import narrow_points

aten = torch.ops.aten


# -- graphs -----------------------------------------------------------------------------------------------------------


def masked(is_shared: bool) -> JointGraph:
    """Two layers, each with a mask from what is no activation; ``is_shared`` gives both the same."""
    build = JointBuilder()
    h, noise = build.primal(8, 8), build.primal(8, 8)
    weights = [build.primal(8, 8) for _ in range(2)]
    gradient = build.tangent(8, 8)
    masks: list[fx.Node] = []
    for w in weights:
        if not masks or not is_shared:
            masks.append(build.call(aten.gt.Scalar, noise, 0.5 + len(masks)))
        h = build.call(aten.mul.Tensor, build.call(aten.mm.default, h, w), masks[-1])
    for w, mask in zip(reversed(weights), (masks[-1], masks[0]), strict=True):
        masked_gradient = build.call(aten.mul.Tensor, gradient, mask)
        gradient = build.call(aten.mm.default, masked_gradient, build.call(aten.t.default, w))
    return build.joint([h], [gradient], static=[2, 3])


class Residual(nn.Module):
    """Norm, products, dropout and residual sums; one table of positions that each layer reads."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(num_layers))
        self.grow = nn.ModuleList(nn.Linear(8, 16) for _ in range(num_layers))
        self.shrink = nn.ModuleList(nn.Linear(16, 8) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.arange(8, device=x.device).cos()
        for norm, grow, shrink in zip(self.norms, self.grow, self.shrink, strict=True):
            x = x + F.dropout(shrink(F.gelu(grow(norm(x) * shift))), 0.1)
        return x.square().mean()


GRAPHS: dict[str, Callable[[], JointGraph]] = {
    "products": lambda: products(4, 8, 8),
    "own masks": lambda: masked(is_shared=False),
    "shared mask": lambda: masked(is_shared=True),
    "residual": lambda: trace(Residual(), torch.ones(32, 8)).joint,
}
graphs = pytest.mark.parametrize("name", GRAPHS)


@dataclass(frozen=True)
class InBlocks:
    joint: JointGraph
    chain: Blocks


@functools.cache
def in_blocks(name: str) -> InBlocks:
    joint = GRAPHS[name]()
    return InBlocks(joint, blocks(joint, narrow_points(joint)))


# -- every graph ------------------------------------------------------------------------------------------------------


@graphs
def test_a_block_reads_itself_its_narrow_point_and_what_belongs_to_no_block(name: str) -> None:
    joint, chain = in_blocks(name).joint, in_blocks(name).chain
    assert chain.num_blocks >= 3
    for value in joint.values:
        block = chain.block_of[value.index]
        if value.side is Side.BACKWARD or block is None:
            continue
        for operand in value.inputs:
            before = chain.boundaries[block - 1] if block else None
            is_point = operand == before or (before is not None and joint.values[operand].base == before)
            assert chain.block_of[operand] in (block, None) or is_point, (value.name, joint.values[operand].name)


@graphs
def test_a_narrow_point_belongs_to_the_block_that_computes_it(name: str) -> None:
    joint, chain = in_blocks(name).joint, in_blocks(name).chain
    assert chain.num_blocks == len(chain.boundaries) + 1
    assert [chain.block_of[point] for point in chain.boundaries] == list(range(len(chain.boundaries)))
    assert all(joint.values[point].base == point for point in chain.boundaries)


@graphs
def test_what_belongs_to_no_block_reads_no_block(name: str) -> None:
    """So it can be had at any time, whatever the blocks hold."""
    joint, chain = in_blocks(name).joint, in_blocks(name).chain
    for value in joint.values:
        if value.side is not Side.BACKWARD and chain.block_of[value.index] is None:
            assert all(chain.block_of[i] is None for i in value.inputs), value.name


@graphs
def test_every_activation_belongs_to_a_block_and_no_input_does(name: str) -> None:
    joint, chain = in_blocks(name).joint, in_blocks(name).chain
    assert all(chain.block_of[i] is not None for i in joint.activations)
    assert all(chain.block_of[v.index] is None for v in joint.values if not v.inputs and v.side is not Side.BACKWARD)


@pytest.mark.parametrize("name", ["own masks", "residual"])  # elsewhere kernels read narrow points and weights only
def test_backward_goes_from_the_last_block_to_the_first(name: str) -> None:
    joint, chain = in_blocks(name).joint, in_blocks(name).chain
    kernels = [v.index for v in joint.values if v.side is Side.BACKWARD and v.op == "aten.mm.default"]
    visited = [block for block in (chain.block_of[i] for i in kernels) if block is not None]

    assert visited == sorted(visited, reverse=True)
    assert len(set(visited)) >= 2


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_layers_of_products_by_hand() -> None:
    """Forward: narrow points are both the products and the exponentials; keep the exponentials of layers 1 and 3."""
    joint = products(4, 8, 8)
    kept = [value_of(joint, name).index for name in ("exp_default", "exp_default_2")]
    chain = blocks(joint, kept)
    where = {value.name: chain.block_of[value.index] for value in joint.values}

    assert chain.boundaries == tuple(kept)
    assert [where[name] for name in ("mm_default", "exp_default")] == [0, 0]
    assert [where[f"{op}_default_{k}"] for k in (1, 2) for op in ("mm", "exp")] == [1] * 4
    assert [where[name] for name in ("mm_default_3", "exp_default_3")] == [2, 2]
    assert {where[value.name] for value in joint.values if value.op == "input"} == {None}


def test_without_narrow_points_there_is_one_block() -> None:
    joint = products(4, 8, 8)
    chain = blocks(joint, [])

    assert chain.num_blocks == 1
    assert {chain.block_of[i] for i in joint.activations} == {0}
    assert {chain.block_of[v.index] for v in values_of(joint, "aten.mm.default")} == {0}


def test_a_mask_of_one_block_belongs_to_it() -> None:
    joint, chain = in_blocks("own masks").joint, in_blocks("own masks").chain
    (first, second) = values_of(joint, "aten.gt.Scalar")
    products_of = [chain.block_of[v.index] for v in values_of(joint, "aten.mul.Tensor") if v.side is Side.FORWARD]

    assert [chain.block_of[first.index], chain.block_of[second.index]] == products_of
    assert products_of[0] != products_of[1]


def test_a_mask_of_two_blocks_belongs_to_none() -> None:
    joint, chain = in_blocks("shared mask").joint, in_blocks("shared mask").chain
    (mask,) = values_of(joint, "aten.gt.Scalar")
    assert chain.block_of[mask.index] is None


def test_a_value_that_the_step_returns_is_not_taken_into_a_block() -> None:
    build = JointBuilder()
    x, w, tangent = build.primal(8, 8), build.primal(8, 8), build.tangent(8, 8)
    table = build.call(aten.cos.default, w)
    h = build.call(aten.mm.default, x, table)
    out = build.call(aten.exp.default, h)
    back = build.call(aten.mm.default, build.call(aten.mul.Tensor, tangent, out), build.call(aten.t.default, table))
    joint = build.joint([out, table], [back], static=[1])
    chain = blocks(joint, [value_of(joint, h.name).index])

    assert chain.block_of[value_of(joint, table.name).index] is None
