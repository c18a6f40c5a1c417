"""What ``capture`` reads out of a joint graph: bytes, sides, who changes what, and where a value comes from."""

from __future__ import annotations

import inspect
import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F
from graphs import JointBuilder, choose, staged, trace, value_of, values_of
from torch import Tensor, nn

from remat_passes.cut import fastest_price, smallest_price, solve
from remat_passes.joint import JointGraph, Role, Side
from remat_passes.narrow import narrow_points
from remat_passes.ops import OpKind
from remat_passes.schedule import schedule

aten = torch.ops.aten


def weight(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def names(joint: JointGraph, indices: frozenset[int] | tuple[int, ...]) -> set[str]:
    return {joint.values[index].name for index in indices}


def forward_bytes(joint: JointGraph) -> dict[str, int]:
    """Bytes of what forward computes, without what takes none."""
    own = (v for v in joint.values if v.side is Side.FORWARD and v.role is Role.NONE and v.bytes)
    return {value.name: value.bytes for value in own}


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_views_and_aliases_take_no_bytes_and_name_the_storage_they_show() -> None:
    w = weight(4, 4)

    def step(x: Tensor) -> Tensor:
        y = (x @ w).relu()
        return y.t().reshape(2, 8)[:, :4].exp().sum() + y.view(16).sin().sum()

    joint = trace(step, torch.ones(4, 4)).joint
    expected = {"mm": 64, "relu": 64, "clone": 64, "exp": 32, "sum_1": 4, "sin": 64, "sum_2": 4, "add": 4}

    assert forward_bytes(joint) == expected  # reshape of a transpose copies: "clone"
    assert {
        v.name: joint.values[v.base].name for v in joint.values if v.base != v.index and v.side is not Side.BACKWARD
    } == {
        "alias": "relu",  # what autograd keeps of relu and exp
        "alias_1": "exp",
        "alias_2": "exp",
        "alias_3": "relu",
        "permute": "relu",
        "view": "clone",
        "slice_1": "clone",
        "view_1": "relu",
        "permute_2": "primals_1",
    }
    assert all(value.bytes == 0 for value in joint.values if value.base != value.index)


def test_a_chain_of_views_ends_at_the_storage() -> None:
    build = JointBuilder()
    x = build.primal(4, 6)
    flat = build.call(aten.view.default, x, [24])
    tail = build.call(aten.slice.Tensor, flat, 0, 12, 24)
    square = build.call(aten.view.default, tail, [3, 4])
    turned = build.call(aten.permute.default, square, [1, 0])
    joint = build.joint([build.call(aten.neg.default, turned)], [])

    assert [joint.values[v.base].name for v in joint.values if v.kind is OpKind.VIEW] == ["primals_1"] * 4
    assert joint.values[-1].base == joint.values[-1].index
    assert joint.values[-1].bytes == 12 * 4


def test_bytes_are_those_of_the_storage() -> None:
    build = JointBuilder()
    build.primal(3, 5, dtype=torch.float64)
    build.primal(7, dtype=torch.bool)
    build.primal(0, 5)
    build.primal(4, 4, dtype=torch.bfloat16)
    gaps = build.call(aten.empty_strided.default, [4, 4], [8, 1])  # the last element is number 3 * 8 + 3
    turned = build.call(aten.empty_strided.default, [4, 2], [1, 4])
    row = build.primal(1, 6)
    wide = build.call(aten.expand.default, row, [100, 6])
    joint = build.joint([gaps, turned, wide], [])

    assert [value.bytes for value in joint.values] == [120, 7, 0, 32, 28 * 4, 8 * 4, 24, 0]
    assert [value.numel for value in joint.values] == [15, 7, 0, 16, 16, 8, 6, 600]


def test_the_parts_of_an_op_with_several_results_carry_its_bytes() -> None:
    build = JointBuilder()
    x = build.primal(4, 10)
    top = build.call(aten.topk.default, x, 3)
    values, indices = (build.call(operator.getitem, top, position) for position in (0, 1))
    split = build.call(aten.split.Tensor, x, 5, 1)
    half = build.call(operator.getitem, split, 1)
    joint = build.joint([values, indices, half], [])
    found = {value.name: (value.kind, value.bytes, joint.values[value.base].name) for value in joint.values}

    assert found["topk_default"] == (OpKind.EXTERN, 0, "topk_default")
    assert found[values.name] == (OpKind.PART, 4 * 3 * 4, values.name)
    assert found[indices.name] == (OpKind.PART, 4 * 3 * 8, indices.name)
    assert found[half.name] == (OpKind.VIEW, 0, "primals_1")  # a part of a view is a view


def test_statistics_of_a_norm_are_parts() -> None:
    norm = nn.LayerNorm(8)
    joint = trace(lambda x: norm(x).square().sum(), torch.ones(6, 8)).joint
    (statistics,) = values_of(joint, "aten.var_mean.correction")
    parts = [value for value in joint.values if value.kind is OpKind.PART]

    assert statistics.bytes == 0
    assert [part.inputs for part in parts] == [(statistics.index,)] * 2
    assert [part.bytes for part in parts] == [24, 24]


def test_tied_weights_are_one_input() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens)).sum()

    joint = trace(Tied(), torch.zeros(3, dtype=torch.int64)).joint
    assert [joint.values[i].bytes for i in joint.static_inputs] == [160]


# -- sides ------------------------------------------------------------------------------------------------------------


def test_sides_and_what_backward_reads_of_a_small_step() -> None:
    w = weight(4, 4)
    joint = trace(lambda x: (x @ w).sin().sum(), torch.ones(4, 4)).joint
    sides = {value.name: value.side for value in joint.values}

    assert {name for name, side in sides.items() if side is Side.FORWARD} == {
        "primals_1",
        "primals_2",
        "mm",
        "sin",
        "sum_1",
    }
    assert {name for name, side in sides.items() if side is Side.EITHER} == {"cos", "permute"}
    assert names(joint, joint.required) == {"cos", "permute"}
    assert names(joint, joint.forward_outputs) == {"sum_1"}
    assert names(joint, joint.backward_outputs) == {"mm_1"}


def test_an_op_on_parameters_alone_that_only_backward_reads_stays_in_backward() -> None:
    class Scaled(nn.Module):  # d sin(w) needs cos(w)
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale.sin()).square().sum()

    graph = staged(trace(Scaled(), torch.ones(16, 8)))
    (cosine,) = values_of(graph.joint, "aten.cos.default")
    assert cosine.side is Side.EITHER
    assert names(graph.joint, cosine.inputs) == {"primals_1"}
    assert graph.joint.static_inputs.issuperset(cosine.inputs)

    smallest = solve(graph.problem, smallest_price(graph.problem))
    fastest = solve(graph.problem, fastest_price(graph.problem))
    chosen = choose(graph, None).chosen.cut
    for cut in (smallest, fastest, chosen):
        order = schedule(graph.joint, cut, early=False)
        assert cosine.index in cut.redo
        assert cosine.index in order.backward
        assert cosine.index not in order.forward


def test_random_state_of_backward_is_no_input_of_forward() -> None:
    build = JointBuilder()
    seed = build.graph.placeholder("fwd_seed_1")
    other = build.graph.placeholder("bwd_seed_1")
    for node in (seed, other):
        node.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
    joint = build.joint([], [])

    assert value_of(joint, "bwd_seed_1").side is Side.BACKWARD
    assert value_of(joint, "fwd_seed_1").side is Side.FORWARD


# -- inputs that change -----------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("still", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * torch.exp(self.count) + self.still
        self.count.add_(1)
        return y.sum()


def test_a_buffer_that_the_graph_changes_is_marked() -> None:
    joint = trace(Counting(), torch.ones(4, 4)).joint
    (copy,) = values_of(joint, "aten.copy_.default")
    (exp,) = values_of(joint, "aten.exp.default")

    assert joint.mutated_inputs == frozenset(exp.inputs)
    assert copy.kind is OpKind.EFFECT
    assert copy.side is Side.FORWARD


def test_an_input_that_the_step_changes_is_marked() -> None:
    w = weight(4, 4)

    def step(x: Tensor) -> Tensor:
        y = x.sin() * w
        x.add_(1)
        return y.sum()

    joint = trace(step, torch.ones(4, 4)).joint
    (sine,) = values_of(joint, "aten.sin.default")
    assert joint.mutated_inputs == frozenset(sine.inputs)


def test_an_input_that_changes_right_after_forward_is_marked() -> None:
    def step(x: Tensor) -> Tensor:
        y = x.exp()
        x.mul_(2)
        return y.sum()

    joint = trace(step, torch.ones(4, 4, requires_grad=True).clone()).joint

    # AOTAutograd hands the new value out and writes it back itself, because autograd must see that.
    assert values_of(joint, "aten.copy_.default") == []
    assert names(joint, joint.mutated_inputs) == {"primals_1"}


def test_batch_norm_changes_its_three_buffers() -> None:
    joint = trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.ones(2, 3, 8, 8)).joint
    assert sorted(joint.values[i].sizes for i in joint.mutated_inputs) == [(), (4,), (4,)]


def test_nothing_is_marked_where_nothing_changes() -> None:
    assert trace(nn.Linear(4, 4), torch.ones(2, 4)).joint.mutated_inputs == frozenset()


def test_a_write_in_the_graph_is_found_at_the_operand_that_it_changes() -> None:
    build = JointBuilder()
    x, y = build.primal(4), build.primal(4)
    joint_inputs = build.call(aten.add.Tensor, x, y)
    build.call(aten.copy_.default, y, joint_inputs)
    joint = build.joint([joint_inputs], [])

    assert names(joint, joint.mutated_inputs) == {"primals_2"}


# -- an input that is an output ---------------------------------------------------------------------------------------


def test_an_input_that_is_also_an_output_of_both_sides() -> None:
    build = JointBuilder()
    x, w, tangent = build.primal(4), build.primal(4), build.tangent(4)
    product = build.call(aten.mul.Tensor, x, w)
    gradient = build.call(aten.mul.Tensor, tangent, x)
    joint = build.joint([x, product], [w, gradient], static=[1])

    assert names(joint, joint.forward_outputs) == {"primals_1", "mul_tensor"}
    assert names(joint, joint.backward_outputs) == {"primals_2", "mul_tensor_1"}
    assert names(joint, joint.required) == {"primals_1", "primals_2"}
    assert names(joint, joint.static_inputs) == {"primals_2"}


def test_a_missing_gradient_is_no_value() -> None:
    build = JointBuilder()
    x, tangent = build.primal(4), build.tangent(4)
    joint = build.joint([build.call(aten.neg.default, x)], [None, build.call(aten.neg.default, tangent)])

    assert names(joint, joint.backward_outputs) == {"neg_default_1"}


# -- symbolic sizes ---------------------------------------------------------------------------------------------------


def test_symbolic_sizes_come_with_the_sizes_that_were_traced() -> None:
    joint = trace(nn.Sequential(nn.Linear(4, 8), nn.GELU()), torch.ones(6, 4), dynamic=True).joint
    (product,) = values_of(joint, "aten.addmm.default")
    rows, columns = product.shape

    assert isinstance(rows, sympy.Symbol)
    assert columns == 8
    assert product.sizes == (6, 8)
    assert product.bytes == 6 * 8 * 4
    assert joint.symbols == ((str(rows), 6),)


def test_a_size_worked_out_from_another_is_an_expression_of_it() -> None:
    linear = nn.Linear(4, 4)
    joint = trace(lambda x: torch.cat([linear(x), x]).exp(), torch.ones(6, 4), dynamic=True).joint
    (exponential,) = values_of(joint, "aten.exp.default")
    (symbol,) = exponential.shape[0].free_symbols

    assert exponential.shape == (2 * symbol, 4)
    assert exponential.sizes == (12, 4)
    assert joint.symbols == ((str(symbol), 6),)


def test_fixed_sizes_leave_no_symbols() -> None:
    assert trace(nn.Linear(4, 8), torch.ones(6, 4), dynamic=False).joint.symbols == ()


# -- where a value comes from -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.grow = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.grow(self.norm(x))  # line A
        return F.silu(h).sum(-1, keepdim=True)  # line B


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


def line_of(function: object, mark: str) -> str:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    (offset,) = (at for at, line in enumerate(lines) if mark in line)
    return f"{Path(__file__)}:{first + offset}"


@pytest.fixture(scope="module")
def stack() -> JointGraph:
    return trace(Stack(), torch.ones(4, 8)).joint


def test_module_paths_are_those_of_the_users_program(stack: JointGraph) -> None:
    products = [value for value in values_of(stack, "aten.addmm.default") if value.side is Side.FORWARD]
    statistics = [value for value in values_of(stack, "aten.var_mean.correction") if value.side is Side.FORWARD]

    assert [value.module for value in products] == ["blocks.0.grow", "blocks.1.grow"]
    assert [value.module for value in statistics] == ["blocks.0.norm", "blocks.1.norm"]


def test_source_lines_are_those_of_the_users_program(stack: JointGraph) -> None:
    products = [value for value in values_of(stack, "aten.addmm.default") if value.side is Side.FORWARD]
    gates = [value for value in values_of(stack, "aten.sigmoid.default") if value.side is Side.FORWARD]
    exits = [value for value in values_of(stack, "aten.exp.default") if value.side is Side.FORWARD]

    assert {value.source for value in products} == {line_of(Block.forward, "# line A")}
    assert {value.source for value in [*gates, *exits]} == {line_of(Block.forward, "# line B")}


def test_values_that_only_backward_reads_carry_the_line_of_their_forward_op(stack: JointGraph) -> None:
    either = [value for value in stack.values if value.side is Side.EITHER and value.kind is OpKind.POINTWISE]

    assert either
    assert {value.source for value in either} <= {line_of(Block.forward, mark) for mark in ("# line A", "# line B")}


def test_a_module_of_torch_that_is_compiled_itself_is_the_top_level() -> None:
    joint = trace(nn.Sequential(nn.Linear(4, 8), nn.GELU()), torch.ones(6, 4)).joint
    (product,) = values_of(joint, "aten.addmm.default")
    assert product.module == "0"


def test_inputs_have_neither_module_nor_line(stack: JointGraph) -> None:
    inputs = [value for value in stack.values if value.role is not Role.NONE]
    assert {(value.module, value.source, value.op) for value in inputs} == {("", "", "input")}


# -- lowering ---------------------------------------------------------------------------------------------------------

POOLING_STEP = """
import torch
from graphs import trace
trace(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.MaxPool2d(2)), torch.ones(1, 1, 4, 4))
"""


def test_a_step_that_pools_can_be_traced_before_inductor_was_imported() -> None:
    root = Path(__file__).parents[1]
    paths = [str(root), str(root / "passes"), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, "-c", POOLING_STEP], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-600:]


# -- the graph as a whole ---------------------------------------------------------------------------------------------


def test_fingerprint_depends_on_the_graph_alone() -> None:
    first, again = (trace(Stack(), torch.ones(4, 8)).joint for _ in range(2))
    wider = trace(Stack(), torch.ones(5, 8)).joint

    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != wider.fingerprint
    assert len(first.fingerprint) == 8


def test_values_stand_in_topological_order(stack: JointGraph) -> None:
    for value in stack.values:
        assert all(source < value.index for source in value.inputs)
        assert all(value.index in stack.values[user].inputs for user in value.users)
        assert all(value.index in stack.values[source].users for source in value.inputs)


def test_narrow_points_are_what_every_path_to_the_loss_passes(stack: JointGraph) -> None:
    # From the first value that depends on a parameter: norm's weight and bias, grow, silu (its division), its sum, the
    # residual addition. In the second block the residual goes around all of that. Then the loss.
    first_block = {"mul_1", "add_1", "addmm", "div", "sum_1", "add_3"}
    assert names(stack, narrow_points(stack)) == first_block | {"add_7", "sum_3"}


def layers(static: list[int]) -> JointGraph:
    build = JointBuilder()
    h, first, second = build.primal(8, 4), build.primal(4, 4), build.primal(4, 4)
    for w in (first, second):
        h = build.call(aten.exp.default, build.call(aten.mm.default, h, w))
    gradient = build.call(aten.mul.Tensor, build.tangent(8, 4), h)
    return build.joint([h], [None, build.call(aten.mm.default, build.call(aten.t.default, h), gradient)], static)


def test_layers_have_narrow_points_whether_or_not_their_weights_are_parameters_of_a_module() -> None:
    expected = {"mm_default", "exp_default", "mm_default_1", "exp_default_1"}

    assert names(layers([1, 2]), narrow_points(layers([1, 2]))) == expected
    assert names(layers([]), narrow_points(layers([]))) == expected  # a step that takes its weights as arguments
