"""The prices, worked out by hand for a device of round figures (``graphs.SPEC``), and as expressions of the sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from graphs import SPEC, JointBuilder, trace, value_of, values_of
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from remat_passes.cost import (
    PS_PER_US,
    CostGraph,
    kernel_depths,
    matrix_flops,
    op_time_us,
    price,
    recompute_ps,
    symbolic_sizes,
    symbolic_step_us,
    traced_sizes,
)
from remat_passes.cost_table import CostTable, kernel_key, kernels
from remat_passes.joint import UNBACKED_SIZE, JointGraph, Side
from remat_passes.ops import FUSIBLE, OpKind

aten = torch.ops.aten
GPU = replace(SPEC, kind="cuda")
TIMED = {*FUSIBLE, OpKind.EXTERN, OpKind.SCATTER}


def single(op: Callable[..., Any], shapes: list[tuple[int, ...]], *arguments: Any, **options: Any) -> JointGraph:
    """A graph of one op on inputs of these shapes, and ``arguments`` behind them."""
    build = JointBuilder()
    inputs = [build.primal(*shape, dtype=options.get("dtype", torch.float32)) for shape in shapes]
    node = build.call(op, *inputs, *arguments)
    parts = [build.call(operator.getitem, node, at) for at in options.get("parts", ())]
    return build.joint(parts or [node], [])


def time_us(op: Callable[..., Any], shapes: list[tuple[int, ...]], *arguments: Any, **options: Any) -> float:
    joint = single(op, shapes, *arguments, **options)
    value = joint.values[len(shapes)]
    return float(op_time_us(joint, value, options.get("spec", GPU), traced_sizes))


# -- a kernel of its own takes the longer of arithmetic and traffic on a GPU, on a CPU both ---------------------------


def test_a_large_product_is_bound_by_arithmetic() -> None:
    flops, moved_bytes = 2 * 128**3, 3 * 128 * 128 * 4
    assert flops / 10_000 > moved_bytes / 1_000
    assert time_us(aten.mm.default, [(128, 128), (128, 128)]) == pytest.approx(419.4304 + 2)


def test_a_thin_product_is_bound_by_traffic() -> None:
    moved_bytes = (64 * 32 + 32 * 16 + 64 * 16) * 4
    assert moved_bytes / 1_000 > 2 * 64 * 32 * 16 / 10_000
    assert time_us(aten.mm.default, [(64, 32), (32, 16)]) == pytest.approx(14.336 + 2)


def test_on_a_cpu_a_product_packs_its_operands_and_then_computes() -> None:
    arithmetic_us, traffic_us = 419.4304, 3 * 128 * 128 * 4 / 1_000
    assert time_us(aten.mm.default, [(128, 128), (128, 128)], spec=SPEC) == pytest.approx(
        arithmetic_us + traffic_us + 2
    )


@pytest.mark.parametrize("num_slices", [1, 2, 4, 8])
def test_the_weight_of_a_product_is_packed_once_a_slice(num_slices: int) -> None:
    whole_us = time_us(aten.mm.default, [(512, 128), (128, 64)], spec=SPEC)
    slice_us = time_us(aten.mm.default, [(512 // num_slices, 128), (128, 64)], spec=SPEC)
    packed_us = 128 * 64 * 4 / 1_000
    assert num_slices * slice_us == pytest.approx(whole_us + (num_slices - 1) * (packed_us + 2))


@pytest.mark.parametrize(
    ("dtype", "flops_per_us", "itemsize"),
    [(torch.float64, 5_000, 8), (torch.bfloat16, 20_000, 2), (torch.float16, 40_000, 2)],
)
def test_the_rate_is_that_of_the_dtype(dtype: torch.dtype, flops_per_us: int, itemsize: int) -> None:
    arithmetic_us, traffic_us = 2 * 256**3 / flops_per_us, 3 * 256 * 256 * itemsize / 1_000
    found = time_us(aten.mm.default, [(256, 256), (256, 256)], dtype=dtype)
    assert found == pytest.approx(max(arithmetic_us, traffic_us) + 2)


def test_batched_and_biased_products() -> None:
    assert time_us(aten.bmm.default, [(3, 128, 128), (3, 128, 128)]) == pytest.approx(3 * 419.4304 + 2)
    assert time_us(aten.addmm.default, [(128,), (128, 128), (128, 128)]) == pytest.approx(419.4304 + 2)


CONVOLUTION = (
    [1, 1],
    [1, 1],
    [1, 1],
    False,
    [0, 0],
    1,
)  # stride, padding, dilation, transposed, output padding, groups


def test_a_convolution() -> None:
    flops = 2 * 2 * 16 * 16 * 8 * 4 * 3 * 3  # batch, height, width, channels out and in, window
    moved_bytes = (2 * 4 * 256 + 8 * 4 * 9 + 8 + 2 * 8 * 256) * 4
    found = time_us(aten.convolution.default, [(2, 4, 16, 16), (8, 4, 3, 3), (8,)], *CONVOLUTION)
    assert found == pytest.approx(max(flops / 10_000, moved_bytes / 1_000) + 2)


MASKS = pytest.mark.parametrize(
    ("mask", "parts", "passes"),
    [([True, True, True], (0, 1, 2), 2), ([False, True, True], (1, 2), 1), ([True, False, False], (0,), 1)],
)


@MASKS
def test_a_convolution_has_a_rate_and_a_launch_of_its_own(
    mask: list[bool], parts: tuple[int, ...], passes: int
) -> None:
    spec = replace(GPU, bandwidth_bytes_per_us=1e9, convolution_flops_per_us=100.0, convolution_launch_us=30.0)
    pass_us = 2 * 2 * 16 * 16 * 8 * 4 * 3 * 3 / 100 + 30
    shapes = [(2, 8, 16, 16), (2, 4, 16, 16), (8, 4, 3, 3)]
    forward_us = time_us(aten.convolution.default, [*shapes[1:], (8,)], *CONVOLUTION, spec=spec)
    backward_us = time_us(aten.convolution_backward.default, shapes, [8], *CONVOLUTION, mask, parts=parts, spec=spec)
    assert (forward_us, backward_us) == pytest.approx((pass_us, passes * pass_us))
    in_bfloat16 = time_us(aten.convolution.default, [*shapes[1:], (8,)], *CONVOLUTION, spec=spec, dtype=torch.bfloat16)
    assert in_bfloat16 == pytest.approx((pass_us - 30) * 100 / spec.matmul_flops_per_us["bfloat16"] + 30)


@MASKS
def test_the_backward_of_a_convolution_costs_what_is_asked_of_it(
    mask: list[bool], parts: tuple[int, ...], passes: int
) -> None:
    shapes = [(2, 8, 16, 16), (2, 4, 16, 16), (8, 4, 3, 3)]
    joint = single(aten.convolution_backward.default, shapes, [8], *CONVOLUTION, mask, parts=parts)
    flops = matrix_flops(joint, joint.values[3], traced_sizes)
    assert flops == passes * 2 * 2 * 16 * 16 * 8 * 4 * 3 * 3


def test_the_first_convolution_of_a_network_can_be_priced() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    assert price(trace(lambda x: net(x).square().mean(), torch.ones(2, 3, 8, 8)).joint, SPEC).fixed_ps > 0


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"])
def test_attention_is_two_products(name: str) -> None:
    shape = (2, 4, 64, 16)  # batch, heads, tokens, width of a head
    joint = single(getattr(aten, name).default, [shape, shape, shape], parts=(0,))
    assert matrix_flops(joint, joint.values[3], traced_sizes) == 2 * (2 * 2 * 4 * 64 * 64 * 16)


def test_a_kernel_without_arithmetic_moves_its_bytes() -> None:
    found = time_us(aten.sort.default, [(10, 100)], parts=(0, 1))
    assert found == pytest.approx((4_000 + 4_000 + 8_000) / 1_000 + 2)


def test_a_scatter_is_a_kernel_of_its_own() -> None:
    build = JointBuilder()
    x, index = build.primal(1_000), build.primal(5, dtype=torch.int64)
    joint = build.joint([build.call(aten.scatter.value, x, 0, index, 1.0)], [])

    assert op_time_us(joint, joint.values[2], SPEC, traced_sizes) == pytest.approx((4_000 + 40 + 4_000) / 1_000 + 2)


# -- fused work costs arithmetic --------------------------------------------------------------------------------------


def test_pointwise_work_takes_no_launch_and_no_traffic() -> None:
    assert time_us(aten.relu.default, [(10, 100)]) == pytest.approx(1.0)
    assert time_us(aten.mul.Tensor, [(10, 100), (10, 100)]) == pytest.approx(1.0)
    assert time_us(aten.add.Tensor, [(10, 100), (100,)]) == pytest.approx(1.0)


def test_a_transcendental_costs_its_share_of_the_devices_figure() -> None:
    # ops.py measures exp, erf and tanh at 0.35, 0.8 and 1.9 of their mean, which is 20 flops here.
    assert time_us(aten.exp.default, [(1_000,)]) == pytest.approx(0.35 * 20)
    assert time_us(aten.erf.default, [(1_000,)]) == pytest.approx(0.8 * 20)
    assert time_us(aten.tanh.default, [(1_000,)]) == pytest.approx(1.9 * 20)


def test_a_reduction_reads_its_operand() -> None:
    assert time_us(aten.sum.dim_IntList, [(10, 100)], [1]) == pytest.approx(1_000 / 1_000 + 4_000 / 1_000)
    assert time_us(aten.var_mean.correction, [(10, 100)], [1], parts=(0, 1)) == pytest.approx(5.0)


def test_a_gather_moves_what_it_produces() -> None:
    build = JointBuilder()
    table, index = build.primal(500, 8), build.primal(100, dtype=torch.int64)
    joint = build.joint([build.call(aten.embedding.default, table, index)], [])
    found = op_time_us(joint, joint.values[2], SPEC, traced_sizes)

    assert found == pytest.approx(100 * 8 / 1_000 + 100 * 8 * 4 / 1_000)


def test_a_factory_writes_nothing_until_it_is_read() -> None:
    assert time_us(aten.full.default, [], [1_000], 1.0) == pytest.approx(1.0)


def test_views_parts_and_inputs_are_free() -> None:
    build = JointBuilder()
    x = build.primal(16, 16)
    view = build.call(aten.view.default, x, [256])
    part = build.call(operator.getitem, build.call(aten.topk.default, x, 2), 0)
    joint = build.joint([view, part], [])

    for name in ("primals_1", "view_default", "getitem"):
        assert recompute_ps(joint, value_of(joint, name), SPEC) == 0


# -- prices of a joint graph ------------------------------------------------------------------------------------------


def products() -> JointGraph:
    """Two products with three pointwise ops between them; 1,000 elements, 4 us of traffic, each.

    y = x @ w, a = relu(y), b = a * a, c = b + b, out = c @ w; backward multiplies by a and by c's product's gradient.
    """
    build = JointBuilder()
    x, w, tangent = build.primal(100, 10), build.primal(10, 10), build.tangent(100, 10)
    y = build.call(aten.mm.default, x, w)
    a = build.call(aten.relu.default, y)
    b = build.call(aten.mul.Tensor, a, a)
    c = build.call(aten.add.Tensor, b, b)
    out = build.call(aten.mm.default, c, w)
    weight_gradient = build.call(aten.mm.default, build.call(aten.t.default, c), tangent)
    gradient = build.call(aten.mm.default, tangent, build.call(aten.t.default, w))
    gradient = build.call(aten.mul.Tensor, gradient, a)
    gradient = build.call(aten.mm.default, build.call(aten.t.default, x), gradient)
    return build.joint([out], [build.call(aten.add.Tensor, weight_gradient, gradient)], static=[1])


@pytest.fixture(scope="module")
def costs() -> CostGraph:
    return price(products(), SPEC)


def priced(costs: CostGraph, name: str) -> tuple[int, float, float]:
    """Bytes, and the microseconds of saving and of recomputing."""
    cost = costs.values[value_of(products(), name).index]
    return cost.bytes, cost.save_ps / PS_PER_US, cost.recompute_ps / PS_PER_US


def test_what_only_fused_readers_read_costs_arithmetic_to_recompute_and_traffic_to_save(costs: CostGraph) -> None:
    # a is never written: saving it adds a write and a read, recomputing it only its relu.
    assert priced(costs, "relu_default") == (4_000, 8.0, 1.0)
    assert priced(costs, "mul_tensor") == (4_000, 8.0, 1.0)


def test_what_a_kernel_reads_on_both_sides_is_written_anyway(costs: CostGraph) -> None:
    # c is written for the product in forward and read by a product in backward, saved or not: saving it costs nothing.
    # Recomputing it writes it once more.
    assert priced(costs, "add_tensor") == (4_000, 0.0, 1.0 + 4.0)


def test_a_product_is_written_anyway_and_saving_it_adds_a_read(costs: CostGraph) -> None:
    moved_bytes = (1_000 + 100 + 1_000) * 4
    arithmetic_us = 2 * 100 * 10 * 10 / 10_000
    assert priced(costs, "mm_default") == (4_000, 4.0, arithmetic_us + moved_bytes / 1_000 + 2)


def test_inputs_and_outputs_are_there_anyway(costs: CostGraph) -> None:
    assert priced(costs, "primals_1")[0] == 0
    assert priced(costs, "primals_2")[0] == 0
    assert priced(costs, "mm_default_1")[0] == 0


def test_a_value_that_either_side_can_compute_is_computed_first_where_it_is_saved() -> None:
    joint = trace(lambda x: x.sin().sum(), torch.ones(10, 100, requires_grad=True)).joint
    (cosine,) = values_of(joint, "aten.cos.default")
    cost = price(joint, SPEC).values[cosine.index]

    assert cosine.side is Side.EITHER
    assert cost.recompute_ps == round(0.8 * 20 * PS_PER_US)
    assert cost.save_ps == cost.recompute_ps + 8 * PS_PER_US


def test_an_input_that_changes_costs_the_bytes_of_its_copy() -> None:
    build = JointBuilder()
    x, tangent = build.primal(1_000), build.tangent(1_000)
    gradient = build.call(aten.mul.Tensor, tangent, x)
    build.call(aten.copy_.default, x, build.call(aten.neg.default, x))
    joint = build.joint([], [gradient])

    assert price(joint, SPEC).values[0].bytes == 4_000


def test_what_no_decision_changes_is_the_work_of_both_sides() -> None:
    build = JointBuilder()
    x, w, tangent = build.primal(100, 10), build.primal(10, 10), build.tangent(100, 10)
    y = build.call(aten.mm.default, x, w)
    out = build.call(aten.relu.default, build.call(aten.neg.default, y))
    gradient = build.call(aten.mm.default, build.call(aten.t.default, x), build.call(aten.neg.default, tangent))
    joint = build.joint([out], [gradient])

    product_us = 2 * 100 * 10 * 10 / 10_000 + (1_000 + 100 + 1_000) * 4 / 1_000 + 2
    written_us = 1.0 + 2 * 4.0 + 2.0  # a pointwise op that is written: arithmetic, its traffic, one launch
    assert price(joint, SPEC).fixed_ps == round((product_us + 1.0 + written_us + written_us + product_us) * PS_PER_US)


def test_pointwise_work_that_is_equally_deep_is_launched_once() -> None:
    def fixed_us(num_results: int) -> float:
        build = JointBuilder()
        x = build.primal(1_000)
        results = [build.call(aten.mul.Tensor, x, 2.0 + number) for number in range(num_results)]
        return price(build.joint(results, []), SPEC).fixed_ps / PS_PER_US

    written_us = 1.0 + 2 * 4.0
    assert [fixed_us(num_results) for num_results in (1, 2, 3)] == [written_us * n + 2 for n in (1, 2, 3)]


def test_depth_counts_kernels_on_the_longest_path() -> None:
    joint = products()
    depths = dict(zip((value.name for value in joint.values), kernel_depths(joint), strict=True))

    assert [depths[name] for name in ("primals_1", "mm_default", "relu_default", "add_tensor")] == [0, 1, 1, 1]
    assert depths["mm_default_1"] == 2
    assert depths["mul_tensor_1"] == 1  # the tangent's product and relu are one kernel deep each


# -- symbolic sizes ---------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        scores = (x @ x.transpose(1, 2)).softmax(-1)
        return F.gelu(scores @ x).square().mean()


@pytest.fixture(scope="module")
def dynamic() -> JointGraph:
    return trace(Encoder(), torch.zeros(6, 10, dtype=torch.int64), dynamic=True).joint


def test_times_as_expressions_give_the_traced_times_at_the_traced_sizes(dynamic: JointGraph) -> None:
    assert sorted(hint for _, hint in dynamic.symbols) == [6, 10]
    timed = [value for value in dynamic.values if value.kind in TIMED]
    expressions = [sympy.sympify(op_time_us(dynamic, value, SPEC, symbolic_sizes)) for value in timed]
    assert sum(bool(expression.free_symbols) for expression in expressions) > len(timed) / 2
    for value, expression in zip(timed, expressions, strict=True):
        traced = op_time_us(dynamic, value, SPEC, traced_sizes)
        assert at_sizes(expression, dynamic, scale=1) == pytest.approx(float(traced), rel=1e-12), value.name


def at_sizes(expression: sympy.Expr, joint: JointGraph, scale: int) -> float:
    """The expression at ``scale`` times the traced sizes."""
    sizes = dict(joint.symbols)
    return float(
        expression.subs({symbol: scale * sizes.get(str(symbol), UNBACKED_SIZE) for symbol in expression.free_symbols})
    )


def test_times_grow_with_a_symbolic_size(dynamic: JointGraph) -> None:
    rows = max(dynamic.symbols, key=lambda entry: entry[1])[0]
    products = values_of(dynamic, "aten.bmm.default")
    assert products
    for value in products:
        expression = op_time_us(dynamic, value, SPEC, symbolic_sizes)
        assert rows in {str(symbol) for symbol in expression.free_symbols}
        assert at_sizes(expression, dynamic, scale=4) > at_sizes(expression, dynamic, scale=1)


def test_fixed_sizes_give_numbers() -> None:
    joint = single(aten.mm.default, [(128, 128), (128, 128)])
    assert not isinstance(op_time_us(joint, joint.values[2], SPEC, symbolic_sizes), sympy.Basic)


def test_every_timed_op_of_the_step_has_a_time(dynamic: JointGraph) -> None:
    for value, cost in zip(dynamic.values, price(dynamic, SPEC).values, strict=True):
        node: fx.Node = dynamic.nodes[value.index]
        assert (cost.recompute_ps > 0) == (value.kind in TIMED), node.name
        assert cost.save_ps >= 0
        assert type(cost.save_ps) is type(cost.recompute_ps) is type(cost.bytes) is int


# -- the step as a function of its sizes ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def convolutions() -> JointGraph:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, groups=2))
    return trace(lambda x: net(x).square().mean(), torch.ones(4, 3, 12, 12), dynamic=True).joint


@pytest.fixture(scope="module")
def unbacked() -> JointGraph:
    """Rows that a mask picks: how many depends on what the tensor holds."""
    layer = nn.Linear(16, 16)

    def step(x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        return (layer(rows).softmax(-1) * rows).sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return trace(step, torch.ones(12, 16)).joint


@pytest.mark.parametrize("graph", ["dynamic", "convolutions", "unbacked"])
def test_the_step_at_the_traced_sizes_is_the_traced_step(graph: str, request: pytest.FixtureRequest) -> None:
    joint: JointGraph = request.getfixturevalue(graph)
    found = symbolic_step_us(joint, SPEC)
    assert found.free_symbols
    assert at_sizes(found, joint, scale=1) == pytest.approx(price(joint, SPEC).fixed_ps / PS_PER_US, rel=1e-6)
    assert at_sizes(found, joint, scale=2) > at_sizes(found, joint, scale=1) * 1.2


@pytest.mark.parametrize("graph", ["dynamic", "convolutions", "unbacked"])
def test_each_decision_adds_its_price_to_the_step(graph: str, request: pytest.FixtureRequest) -> None:
    joint: JointGraph = request.getfixturevalue(graph)
    costs, fixed = price(joint, SPEC), symbolic_step_us(joint, SPEC)
    for value, cost in zip(joint.values, costs.values, strict=True):
        for decided, price_ps in (
            ({"saved": [value.index]}, cost.save_ps),
            ({"redone": [value.index]}, cost.recompute_ps),
        ):
            added = symbolic_step_us(joint, SPEC, **decided) - fixed
            # to a picosecond: each of the rounded parts is off by less than one half
            assert at_sizes(added, joint, scale=1) == pytest.approx(price_ps / PS_PER_US, abs=3e-6, rel=1e-6), (
                value.name
            )


def test_sizes_that_depend_on_the_contents_count_as_the_same_number_everywhere(unbacked: JointGraph) -> None:
    (product,) = [value for value in values_of(unbacked, "aten.addmm.default") if value.side is Side.FORWARD]
    assert product.sizes == (UNBACKED_SIZE, 16)
    assert f"float32[{UNBACKED_SIZE},16]" in str(kernel_key(unbacked, product))
    assert matrix_flops(unbacked, product, traced_sizes) == 2 * UNBACKED_SIZE * 16 * 16


def test_a_measured_time_scales_with_the_sizes_as_the_analytic_one(dynamic: JointGraph) -> None:
    keys = list(kernels(dynamic))
    table = CostTable("d", "s", "v", {key: 1_000.0 + at for at, key in enumerate(keys)})
    for key, values in kernels(dynamic).items():
        measured = sympy.sympify(op_time_us(dynamic, values[0], SPEC, symbolic_sizes, table))
        analytic = sympy.sympify(op_time_us(dynamic, values[0], SPEC, symbolic_sizes))
        assert op_time_us(dynamic, values[0], SPEC, traced_sizes, table) == table.times_us[key]
        ratio = table.times_us[key] / at_sizes(analytic, dynamic, scale=1)
        for scale in (1, 4):
            assert at_sizes(measured, dynamic, scale) == pytest.approx(ratio * at_sizes(analytic, dynamic, scale))
    found = at_sizes(symbolic_step_us(dynamic, SPEC, table=table), dynamic, scale=1)
    assert found == pytest.approx(price(dynamic, SPEC, table).fixed_ps / PS_PER_US, rel=1e-6)
    assert found > 1_000 * len(keys)


# -- torch's table of formulas ----------------------------------------------------------------------------------------


def test_a_formula_that_asks_for_tensors_gets_their_shapes() -> None:
    build = JointBuilder()
    q, k, v = (build.primal(10, 4, 16) for _ in range(3))  # two sequences of up to 7 tokens in one, heads, width
    offsets = build.primal(3, dtype=torch.int32)
    node = build.graph.call_function(
        aten._flash_attention_forward.default, (q, k, v, offsets, offsets, 7, 7, 0.0, False, False)
    )
    node.meta["val"] = (q.meta["val"],)
    joint = build.joint([build.call(operator.getitem, node, 0)], [])
    assert matrix_flops(joint, joint.values[4], traced_sizes) == 2 * (2 * 2 * 4 * 7 * 7 * 16)


def test_a_formula_that_fails_leaves_the_traffic(monkeypatch: pytest.MonkeyPatch, dynamic: JointGraph) -> None:
    value = values_of(dynamic, "aten.bmm.default")[0]

    def picky(a: Any, b: Any, out_val: Any = None) -> int:
        if any(isinstance(size, sympy.Basic) for size in a.shape):
            raise AssertionError("symbols do not compare")
        return 10**9

    monkeypatch.setitem(flop_registry, aten.bmm, picky)
    expression = op_time_us(dynamic, value, SPEC, symbolic_sizes)
    traced = op_time_us(dynamic, value, SPEC, traced_sizes)
    moved_bytes = sum(4 * dynamic.values[i].numel for i in (value.index, *value.inputs))
    assert traced == pytest.approx(10**9 / 10_000 + moved_bytes / 1_000 + 2)
    assert at_sizes(expression, dynamic, scale=1) == pytest.approx(traced)
    assert at_sizes(expression, dynamic, scale=2) > 2 * traced

    monkeypatch.setitem(flop_registry, aten.bmm, lambda *args, **kwargs: 1 / 0)
    assert matrix_flops(dynamic, value, traced_sizes) == 0
    assert recompute_ps(dynamic, value, SPEC) > 2 * PS_PER_US


def test_prices_of_equal_layers_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count(*args: Any, **kwargs: Any) -> int:
        counted.append(1)
        return 7

    monkeypatch.setitem(flop_registry, aten.mm, count)
    build = JointBuilder()
    x, w = build.primal(32, 32), build.primal(32, 32)
    for _ in range(20):
        x = build.call(aten.mm.default, x, w)
    price(build.joint([x], []), SPEC)
    assert counted == [1]
