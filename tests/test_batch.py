"""Batch axes and the split step, stage by stage: what the states of values are, and what is computed where."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import trace
from torch import Tensor, nn

import remat_compiler
from remat_compiler import ConfigError, mark_batch, register_batch_rule, torch_private, verify
from remat_compiler.microbatches import accumulator_dtype
from remat_compiler.plan_log import recorded
from remat_passes.batch import choose_axes
from remat_passes.batch_rules import Concatenation, Narrowing, Reshape, Split
from remat_passes.microbatch import make_body, slice_lengths, split_step
from remat_passes.outer import body_of_call, chunk_name, pieces
from remat_passes.plan import BatchValue, Microbatches, RematPlan

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(step: Callable[..., Any], **options: object) -> Callable[..., Any]:
    return torch.compile(step, backend="remat", options={"lowering": "eager", "num_microbatches": 3, **options})


def last_plan() -> RematPlan:
    return recorded()[-1].plan


def last_split() -> Microbatches:
    split = last_plan().microbatches
    assert split is not None
    return split


def values(op: str) -> list[BatchValue]:
    return [value for value in last_split().values if value.op.startswith(op)]


# -- where the batch is after a change of axes


@pytest.mark.parametrize(
    ("before", "after", "split", "expected"),
    [
        ((4, 5, 7), (20, 7), Split(0), Split(0, 1, 5)),
        ((20, 7), (4, 5, 7), Split(0, 1, 5), Split(0)),
        ((3, 4, 5), (12, 5), Split(1), Split(0, 3, 1)),
        ((3, 4, 5), (60,), Split(1), Split(0, 3, 5)),
        ((4, 6), (2, 2, 6), Split(0), None),  # two axes have a part of the batch each
        ((4, 6), (8, 3), Split(0), Split(0, 1, 2)),
        ((1, 4, 6), (4, 1, 6), Split(1), Split(0)),
    ],
)
def test_reshape(before: tuple[int, ...], after: tuple[int, ...], split: Split, expected: Split | None) -> None:
    alignment = Reshape(before, after).align(0, split, batch=4)

    assert (None if alignment is None else alignment.results[0]) == expected
    if expected is not None:
        back = Reshape(before, after).align(-1, expected, batch=4)
        assert back is not None
        assert back.operands == (split,)


def test_two_views_of_a_batch_one_after_another() -> None:
    joined = Concatenation(0, (4, 4)).align(0, Split(0), batch=4)
    assert joined is not None
    assert joined.results == (Split(0, 2, 1),)
    assert Concatenation(0, (4, 8)).align(0, Split(0), batch=4) is None

    second = Narrowing(0, 4, 8).align(0, Split(0, 2, 1), batch=4)
    assert second is not None
    assert second.results == (Split(0, 1, 1),)
    assert Narrowing(0, 1, 8).align(0, Split(0, 2, 1), batch=4) is None


def test_lengths_of_slices_differ_by_one_at_most() -> None:
    assert slice_lengths(8, 3) == (3, 3, 2)
    assert slice_lengths(10, 4) == (3, 3, 2, 2)
    assert slice_lengths(4, 4) == (1, 1, 1, 1)


@pytest.mark.parametrize("lengths", [(3, 3, 2), (1,) * 64, (2,) * 30 + (1,) * 7, (5,) * 13])
def test_pieces_are_the_slices(lengths: tuple[int, ...]) -> None:
    found = pieces(lengths)

    assert [piece.length for piece in found for _ in range(piece.count)] == list(lengths)
    assert [piece.start for piece in found] == [sum(p.length * p.count for p in found[:at]) for at in range(len(found))]
    assert len(found) <= 24


def test_the_name_of_a_chunk_says_what_it_calls() -> None:
    assert body_of_call(chunk_name("remat_loop_0_of_4", 8)) == ("remat_loop_0_of_4", 8)
    assert body_of_call("remat_loop_0_of_4") == ("remat_loop_0_of_4", 1)


def test_the_dtype_of_a_sum() -> None:
    assert accumulator_dtype("float32", torch.bfloat16) is torch.float32
    assert accumulator_dtype("float32", torch.float64) is torch.float64
    assert accumulator_dtype("float64", torch.float32) is torch.float64
    assert accumulator_dtype("same", torch.bfloat16) is torch.bfloat16
    assert accumulator_dtype("float64", torch.int64) is torch.int64


# -- what a plan says of a split step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def test_a_plain_step_has_one_loop_and_its_denominator_is_outside() -> None:
    net = Net()
    labels = torch.tensor([1, -100, 3, 0, -100, 2, 2, 1])
    compiled(lambda x, y: F.cross_entropy(net(x), y, ignore_index=-100))(torch.randn(8, 6), labels).backward()

    split = last_split()
    assert (split.batch, split.lengths, split.num_loops, split.runs_in) == (8, (3, 3, 2), 1, "forward")
    assert [(given.name, given.axis) for given in split.inputs] == [("x", 0), ("y", 0)]
    assert {value.where for value in values("aten.addmm")} == {"loop 0"}
    assert "outside" in {value.where for value in values("aten.sum")}  # the count of valid labels
    assert not [value.why for value in values("aten.addmm") if value.why]


def test_a_loss_with_negatives_has_its_tail_between_two_loops() -> None:
    net = Net()
    labels = torch.arange(6)
    compiled(lambda x: F.cross_entropy(net(x) @ net(x).t(), labels))(torch.randn(6, 6)).backward()

    split = last_split()
    assert split.num_loops == 2
    products = [value for value in values("aten.mm") if value.why]
    assert products[0].where == "outside"
    assert products[0].why == "aten.mm.default needs the whole batch"
    assert "loop 0 and loop 1" in {value.where for value in values("aten.addmm")}  # once more, for backward


def test_outputs_other_than_a_loss_have_a_loop_on_each_side() -> None:
    net = Net()
    compiled(net)(torch.randn(6, 6)).sum().backward()

    assert (last_split().num_loops, last_split().runs_in) == (2, "forward and backward")


def test_an_axis_that_was_said_is_taken() -> None:
    net, x = Net(), torch.randn(6, 6)
    compiled(lambda x: net(x).square().mean(), batch_axes={"x": 0})(x).backward()
    assert last_split().inputs[0].axis == 0

    torch._dynamo.reset()
    marked = mark_batch(torch.randn(4, 6, 6), 1)
    compiled(lambda batch: net(batch["x"][0]).square().mean())({"x": [marked]}).backward()
    assert [(given.name, given.axis) for given in last_split().inputs] == [("batch['x'][0]", 1)]


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"z": 0}, "the compiled step has none of that name"),
        ({"x": 2}, "it has axes 0 to 1"),
        ({"x": 0, "y": 1}, "disagree on its size: x has 6, y has 5"),
    ],
)
def test_axes_that_cannot_be(axes: dict[str, int], text: str) -> None:
    net = Net()
    with pytest.raises(Exception, match="ConfigError") as caught:
        compiled(lambda x, y: F.mse_loss(net(x), y), batch_axes=axes)(torch.randn(6, 6), torch.randn(6, 5))
    assert text in str(caught.value)


def test_marks_of_what_has_no_such_axis() -> None:
    with pytest.raises(ConfigError, match="it has axes 0 to 1"):
        mark_batch(torch.zeros(2, 3), 2)
    with pytest.raises(ConfigError, match="only tensors"):
        mark_batch([1, 2])  # type: ignore[arg-type]


@torch.library.custom_op("remat_tests::row_sums", mutates_args=())
def row_sums(x: Tensor) -> Tensor:
    return x.sum(1)


@row_sums.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0])


def _row_sums_backward(context: Any, gradient: Tensor) -> Tensor:
    return gradient.unsqueeze(1).expand(context.shape)


row_sums.register_autograd(
    _row_sums_backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape)
)


def test_a_rule_makes_a_custom_op_split() -> None:
    net, x = Net(), torch.randn(6, 6)

    def step(x: Tensor) -> Tensor:
        return (row_sums(net(x)) ** 2).sum()

    expected = torch.autograd.grad(step(x), list(net.parameters()))
    compiled(step)(x).backward()
    (without,) = values("remat_tests")
    assert without.where == "outside"
    assert without.why == "there is no rule for how remat_tests.row_sums.default carries the batch"

    torch._dynamo.reset()
    register_batch_rule(torch.ops.remat_tests.row_sums, lambda x: [((0,), (0,))])
    net.zero_grad()
    compiled(step)(x).backward()
    (with_rule,) = values("remat_tests")
    assert with_rule.where == "loop 0"
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_rules_for_what_is_no_op() -> None:
    with pytest.raises(ConfigError, match="which is no op"):
        register_batch_rule("mylib::op", lambda x: [])
    with pytest.raises(ConfigError, match="a rule is a function"):
        register_batch_rule(torch.ops.aten.mm, 3)  # type: ignore[arg-type]


def test_a_plan_with_its_slices_survives_its_file() -> None:
    net = Net()
    compiled(lambda x: net(x).square().mean())(torch.randn(6, 6)).backward()

    assert RematPlan.from_json(last_plan().to_json(), "a plan") == last_plan()


# -- memory


class Deep(nn.Module):
    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, y)


@pytest.mark.parametrize("num_microbatches", [2, 8, 16])
def test_projected_is_measured_and_within_the_budget(num_microbatches: int) -> None:
    x, y = torch.randn(128, 32), torch.randn(128, 32)
    compiled(Deep(), num_microbatches=num_microbatches)(x, y).backward()
    free, measured = last_plan(), remat_compiler.measured_peaks()[-1]
    assert measured is not None
    assert abs(measured - free.projected_peak_bytes) <= 64

    torch._dynamo.reset()
    budget = free.baseline_bytes + (free.projected_peak_bytes - free.baseline_bytes) * 19 // 20
    compiled(Deep(), num_microbatches=num_microbatches, memory_budget=budget)(x, y).backward()
    measured = remat_compiler.measured_peaks()[-1]
    assert measured is not None
    assert measured <= budget + 64


def test_more_slices_take_less() -> None:
    x, y = torch.randn(128, 32), torch.randn(128, 32)
    peaks = []
    for number in (1, 2, 4, 8):
        torch._dynamo.reset()
        compiled(Deep(), num_microbatches=number)(x, y).backward()
        peaks.append(last_plan().projected_peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


def test_a_budget_that_no_plan_of_a_slice_meets() -> None:
    with pytest.raises(Exception, match="cannot be met") as caught:
        compiled(Deep(), memory_budget=1000)(torch.randn(128, 32), torch.randn(128, 32))
    assert "what is held around the loop" in str(caught.value)


# -- dropout


@pytest.mark.inductor
def test_dropout_is_the_unsplit_steps_bit_for_bit() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.GELU(), nn.Linear(8, 6), nn.Dropout(0.2)).double()
    x = torch.randn(20, 3, 6, dtype=torch.float64)
    outputs = []
    for number in (1, 14):  # uneven slices, and enough of them for chunks
        torch._dynamo.reset()
        step = torch.compile(net, backend="remat", options={"num_microbatches": number})
        torch.manual_seed(7)
        output = step(x)
        gradients = torch.autograd.grad(output.square().sum(), list(net.parameters()))
        outputs.append((output.detach(), gradients))

    (whole, expected), (split, found) = outputs
    assert torch.equal(whole == 0, split == 0)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10)
    plan = last_plan()
    assert plan.projected_peak_bytes == remat_compiler.measured_peaks()[-1]  # read back through chunks and bodies


@pytest.mark.inductor
def test_a_product_is_added_to_its_sum_by_the_gemm_itself() -> None:
    from torch._inductor.utils import run_and_get_code

    net, x = nn.Linear(16, 8, bias=False), torch.randn(64, 16)
    step = torch.compile(lambda x: net(x).square().mean(), backend="remat", options={"num_microbatches": 4})

    _, codes = run_and_get_code(lambda: step(x).backward())

    products = re.findall(r"extern_kernels\.(\w+)\(", "".join(codes))
    assert products == ["mm", "addmm"]  # of forward, and of the weight


# -- verify


def test_verify_finds_nothing_where_nothing_is_wrong() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 6))
    x = torch.randn(8, 6)
    before, state = [p.clone() for p in net.parameters()], torch.get_rng_state()
    step = compiled(lambda x: net(x).square().mean(), verify=True)
    torch.manual_seed(3)
    loss = step(x)
    loss.backward()

    (text,) = remat_compiler.verifications()[-1:]
    assert "verified, " in text
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    torch._dynamo.reset()
    torch.set_rng_state(state)
    torch.manual_seed(3)
    assert torch.equal(compiled(lambda x: net(x).square().mean())(x), loss)  # the step's own draws are those without it


def test_verify_compares_complex_gradients_as_closely_as_others() -> None:
    weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
    step = compiled(lambda x: (x.to(torch.complex64) @ weight).abs().square().mean(), verify=True)
    step(torch.randn(8, 6)).backward()

    assert ": verified, " in remat_compiler.verifications()[-1]


def test_verify_takes_a_smaller_batch_where_the_step_is_called_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, num_before = nn.Linear(6, 6), torch.randn(8, 6), len(remat_compiler.verifications())
    step = compiled(lambda x: net(x).square().mean(), verify=True)
    step(x[:4])
    monkeypatch.setattr(verify, "_free_bytes", lambda arguments: 1)
    step(x)

    smaller, larger = remat_compiler.verifications()[num_before:]
    assert ": verified, " in smaller
    assert ": not verified, because the unsplit step needs" in larger
    assert larger.endswith("Call the step once with a smaller batch: each size is compiled and verified by itself.")


def test_verify_names_the_gradient_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat_passes import microbatch

    right = microbatch.local_mean
    monkeypatch.setattr(
        microbatch,
        "local_mean",
        lambda node, length, batch, emit, operand: emit(
            torch.ops.aten.mul.Tensor, (right(node, length, batch, emit, operand), 1.5), {}
        ),
    )
    net = Net()
    step = compiled(lambda x: net(x).square().mean(), verify=True)
    with pytest.raises(remat_compiler.VerificationError, match="the split step is not the same") as caught:
        step(torch.randn(8, 6))
    assert "output 0: they differ by" in str(caught.value)


# -- found by attack


class Clipped(torch.autograd.Function):
    """A backward that is not linear in the gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


def gradients_of(step: Callable[..., Tensor], net: nn.Module, *inputs: Tensor) -> list[Tensor]:
    net.zero_grad()
    (0.7 * step(*inputs)).backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def test_a_backward_that_is_not_linear_gets_the_true_tangent() -> None:
    net, x, y = Net().double(), torch.randn(6, 6).double(), torch.randn(6, 5).double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(Clipped.apply(net(x)), y)

    expected = gradients_of(step, net, x, y)
    for found, wanted in zip(gradients_of(compiled(step), net, x, y), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert last_split().runs_in == "forward and backward"


@pytest.mark.parametrize(
    "rounded",
    [
        lambda h: torch.div(h.sum(0), 0.37, rounding_mode="floor"),
        lambda h: h.sum(0).detach().sum(dtype=torch.int64),
    ],
    ids=["division that rounds", "sum that truncates"],
)
def test_parts_of_a_sum_are_not_rounded_one_by_one(rounded: Callable[[Tensor], Tensor]) -> None:
    net, x = Net().double(), torch.randn(6, 6).double()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        h = net(x)
        return h.square().mean(), rounded(h.detach())

    torch.testing.assert_close(compiled(step)(x)[1], step(x)[1])


def test_a_causal_mask_is_compared_inside_of_the_slices() -> None:
    """Handed in it would be a Boolean in memory, which a CPU reads one element at a time."""
    layer = nn.Linear(6, 6)

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = layer(x)
        scores = hidden @ hidden.transpose(1, 2)
        ahead = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return F.mse_loss(scores.masked_fill(ahead, -1e9).softmax(-1) @ hidden, y)

    joint = trace(step, torch.randn(8, 5, 6), torch.randn(8, 5, 6)).joint
    split = split_step(joint, choose_axes(joint, {}, {}, None, 4, tangents_are_known=True), 4)
    (loop,) = (loop for loop in split.loops if loop is not None)
    assert not [joint.values[h.value].name for h in loop.handed if joint.values[h.value].dtype is torch.bool]
    assert torch.bool in {joint.values[h.value].dtype for h in loop.local}


def test_no_gradient_of_a_tied_weight_waits_for_the_other() -> None:
    """Else the gradient of the logits is alive until the embedding has its gradient, at the end of backward."""
    embedding, first = nn.Embedding(11, 6), nn.Linear(6, 6)

    def step(tokens: Tensor, y: Tensor) -> Tensor:
        logits = F.gelu(first(embedding(tokens))) @ embedding.weight.T
        return F.cross_entropy(logits, y)

    joint = trace(step, torch.randint(11, (8,)), torch.randint(11, (8,))).joint
    split = split_step(joint, choose_axes(joint, {}, {}, None, 4, tangents_are_known=True), 4)
    (loop,) = (loop for loop in split.loops if loop is not None)
    with torch_private.fake_mode_of(joint.nodes[0].graph.owning_module):
        body = make_body(joint, split, loop, 2, lambda dtype: dtype)
    of_weight = (i for i, gradient in enumerate(loop.partial) if joint.values[gradient].sizes == (11, 6))
    (place,) = (body.order.index(i) for i in of_weight)
    (output,) = body.module.graph.find_nodes(op="output")
    scattered = output.args[0][place]
    product = scattered.args[0]
    assert "index_put" in str(scattered.target)
    assert product.target is torch.ops.aten.add.Tensor
    assert product.args[0].op == "placeholder"
    position = {node: i for i, node in enumerate(body.module.graph.nodes)}
    assert position[product] == position[product.args[1]] + 1


def test_a_scatter_that_leaves_out_what_was_there() -> None:
    net, x, index = Net().double(), torch.randn(6, 6).double(), torch.tensor([0, 1, 0, 2, 0, 1])

    def step(x: Tensor, index: Tensor) -> Tensor:
        rows = index[:, None].expand(-1, 5)
        zeros = torch.zeros(4, 5, dtype=x.dtype)
        return zeros.scatter_reduce(0, rows, net(x), "sum", include_self=False).square().sum()

    expected = gradients_of(step, net, x, index)
    for found, wanted in zip(gradients_of(compiled(step), net, x, index), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_backward_that_multiplies_what_it_scatters_is_not_linear() -> None:
    class Multiplied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return torch.scatter(g, 1, torch.zeros(len(g), 1, dtype=torch.int64), 3.0 * g, reduce="multiply")

    net, x, y = Net().double(), torch.randn(6, 6).double(), torch.randn(6, 5).double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        return 5.0 * F.mse_loss(Multiplied.apply(net(x)), y)

    expected = gradients_of(step, net, x, y)
    for found, wanted in zip(gradients_of(compiled(step), net, x, y), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert last_split().runs_in == "forward and backward"


def test_draws_stay_in_their_order() -> None:
    """What is drawn from a result of the loop comes before what the program draws after it."""
    net, x = Net().double(), torch.randn(6, 6).double()

    def step(x: Tensor) -> Tensor:
        output = net(x)
        drawn = torch.multinomial(output.softmax(-1), 1)
        noise = torch.randn_like(output)
        return (output.gather(1, drawn) + noise.sum(1, keepdim=True) * output).square().mean()

    losses = []
    for number in (1, 2):
        torch._dynamo.reset()
        torch.manual_seed(3)
        losses.append(compiled(step, num_microbatches=number)(x))
    torch.testing.assert_close(losses[0], losses[1])
