"""The recompute cases of CASES.md: failures that users of other systems reported, each standing for its whole kind.

The number of a case is in the name of its tests. Whatever the budget, the step is compared with the oracle's.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    BREAKS_A_RULE,
    FP64,
    Lambda,
    Outcome,
    Program,
    assert_close,
    assert_same,
    budgets_between,
    check_at_budgets,
    check_peaks,
    compiled,
    installed_backend,
    relative_error,
    remat_error,
    rows,
    run_at,
    run_at_budgets,
    run_eager,
    run_remat,
    run_steps,
    smallest_peak,
)
from torch import Tensor, fx, nn
from torch._library.effects import EffectType
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import remat_compiler
from remat_compiler import CannotPartitionError, ConfigError
from remat_compiler.partitioner import RematPartitioner
from remat_passes.plan import RematPlan, ValuePlan

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROOT = Path(__file__).resolve().parent.parent
BATCH, WIDTH = 32, 8


# -- R1: dropout -----------------------------------------------------------------------------------------------------

# Linear in x once the random numbers are drawn, each its own way to draw them.
NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "nn.Dropout": nn.Dropout(0.4),
    "F.dropout": lambda x: F.dropout(x, 0.2, training=True),
    "nn.Dropout1d": lambda x: F.dropout1d(x.unsqueeze(0), 0.4, training=True).squeeze(0),
    "rand_like": lambda x: x * torch.rand_like(x),
    "rand": lambda x: x * torch.rand(x.shape, dtype=x.dtype),
    "randn_like": lambda x: x * torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "normal": lambda x: x * torch.normal(torch.zeros_like(x), 2.0),
    "randint": lambda x: x * torch.randint(1, 5, x.shape),
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "multinomial": lambda x: x[torch.multinomial(torch.ones(x.shape[0]), x.shape[0], replacement=True)],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "sdpa": lambda x: F.scaled_dot_product_attention(x.detach(), x.detach(), x, dropout_p=0.3),
    "sdpa of heads": lambda x: heads_with_dropout(x),
}


def heads_with_dropout(x: Tensor) -> Tensor:
    """Attention with dropout over two heads; linear in x, which enters query and key as a constant."""
    split = x.view(2, -1, 2, x.shape[-1] // 2).transpose(1, 2)
    frozen = split.detach()
    return F.scaled_dot_product_attention(frozen, frozen, split, dropout_p=0.3).transpose(1, 2).reshape(x.shape)


class NoisyChain(nn.Module):
    """Homogeneous of degree one in its input and in each weight, whatever was drawn."""

    def __init__(self, *noises: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.noises = noises
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(len(noises) + 1)])

    def forward(self, x: Tensor) -> Tensor:
        for noise, weight in zip(self.noises, self.weights, strict=False):
            x = F.leaky_relu(noise(x @ weight))
        return (x @ self.weights[-1]).sum()


def noisy(*noises: Callable[[Tensor], Tensor]) -> Program:
    return Program(lambda: NoisyChain(*noises), lambda: (rows(BATCH, WIDTH),))


def assert_masks_agree(program: Program, outcome: Outcome) -> None:
    """Euler: a function of degree one is its gradient times its argument. Another mask in backward breaks it."""
    leaves = {**dict(program.module().named_parameters()), "input 0": program.arguments()[0]}
    for name, leaf in leaves.items():
        gradient = outcome.gradients[name]
        assert gradient is not None
        assert (gradient * leaf).sum().item() == pytest.approx(outcome.loss.item(), rel=1e-9), name


@pytest.mark.parametrize("noise", NOISES)
def test_r1_the_gradient_shows_the_mask_of_forward(noise: str) -> None:
    """And no budget changes what is drawn, nor how far the generator moves."""
    program = noisy(*[NOISES[noise]] * 3)
    free, *limited = run_at_budgets(program)

    for run in (free, *limited):
        for found, expected in zip(run.outcomes, free.outcomes, strict=True):
            assert_masks_agree(program, found)
            assert_same(found, expected)
    assert free.outcomes[0].loss != free.outcomes[1].loss
    check_peaks([run.plan for run in limited])


def test_r1_budgets_do_recompute_around_dropout() -> None:
    """Else the tests above would hold because nothing was at stake."""
    program = noisy(*[NOISES["nn.Dropout"]] * 6)
    plans = [run.plan for run in run_at_budgets(program)]

    assert plans[-1].saved_bytes < plans[0].saved_bytes
    assert plans[-1].recompute_us > 0


@pytest.mark.inductor
def test_r1_on_inductor() -> None:
    program = noisy(NOISES["nn.Dropout"], NOISES["rand_like"], NOISES["sdpa of heads"], NOISES["bernoulli"])
    free = run_at(program, None, lowering="inductor")
    budget = budgets_between(free.plan.projected_peak_bytes, smallest_peak(program, lowering="inductor"), 2)[-1]
    tight = run_at(program, budget, lowering="inductor")

    assert tight.plan.saved_bytes <= free.plan.saved_bytes
    for outcome in (*free.outcomes, *tight.outcomes):
        assert_masks_agree(program, outcome)


# -- R2: what backward reads is changed in place ---------------------------------------------------------------------


def after_the_exponent(m: nn.Module, x: Tensor) -> Tensor:
    t = torch.exp(m.state)
    y = x * t * m.weight
    m.state.add_(1)
    return y.sum()


def through_a_view(m: nn.Module, x: Tensor) -> Tensor:
    y = x * torch.exp(m.state.view(2, -1)[1]).repeat(2) * m.weight
    m.state.add_(1)
    return y.sum()


def view_is_changed(m: nn.Module, x: Tensor) -> Tensor:
    y = x * torch.exp(m.state) * m.weight
    m.state[2:5].mul_(3)
    return y.sum()


def view_of_a_view_is_changed(m: nn.Module, x: Tensor) -> Tensor:
    window = m.state.view(2, -1).t()
    y = x * torch.sin(window.reshape(-1)) * m.weight
    window[0].sub_(2)
    return y.sum()


def read_twice(m: nn.Module, x: Tensor) -> Tensor:
    before = torch.exp(m.state)
    m.state.add_(0.5)
    after = torch.exp(m.state)
    return (torch.sin(x * before) * m.weight * after).sum()


def changed_twice(m: nn.Module, x: Tensor) -> Tensor:
    first = torch.exp(m.state)
    m.state.add_(1)
    second = torch.exp(m.state.clone())
    m.state.mul_(0.5)
    return (x * first * m.weight + torch.sin(x * second)).sum()


def moving_average(m: nn.Module, x: Tensor) -> Tensor:
    y = torch.tanh(x * m.weight) * m.state.clone().sigmoid()
    with torch.no_grad():
        m.state.copy_(0.9 * m.state + 0.1 * y.mean(0))
    return (y * x).sum()


def counted(m: nn.Module, x: Tensor) -> Tensor:
    y = x * m.weight / (m.count + 1)
    m.count.add_(1)
    return torch.sin(y).sum()


def replaced(m: nn.Module, x: Tensor) -> Tensor:
    y = x * torch.exp(m.state) * m.weight
    m.state = m.state + 1
    return y.sum()


def two_exchanged(m: nn.Module, x: Tensor) -> Tensor:
    y = x * torch.exp(m.state) * m.weight * torch.sin(m.other)
    held = m.state.clone()
    m.state.copy_(m.other)
    m.other.copy_(held)
    return y.sum()


def filled(m: nn.Module, x: Tensor) -> Tensor:
    y = torch.sin(x * torch.exp(m.state)) * m.weight
    m.state.zero_()
    return y.sum()


def index_is_changed(m: nn.Module, x: Tensor) -> Tensor:
    y = x[:, m.places.clone()] * m.weight
    m.places.copy_(m.places.flip(0))
    return torch.sin(y).sum()


def activation_in_place(m: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.exp(x * m.weight) + m.state
    hidden.mul_(2).relu_()
    return (hidden * torch.sin(x)).sum()


BUFFER_CHANGES = [
    after_the_exponent,
    through_a_view,
    view_is_changed,
    view_of_a_view_is_changed,
    read_twice,
    changed_twice,
    moving_average,
    counted,
    replaced,
    two_exchanged,
    filled,
    index_is_changed,
    activation_in_place,
]


def stateful(change: Callable[..., Tensor]) -> nn.Module:
    return Lambda(
        change,
        weight=rows(WIDTH),
        state=torch.linspace(-1, 1, WIDTH),
        other=torch.linspace(2, 3, WIDTH),
        count=torch.tensor(0),
        places=torch.arange(WIDTH),
    )


@pytest.mark.parametrize("change", BUFFER_CHANGES)
def test_r2_backward_sees_the_buffer_as_forward_did(change: Callable[..., Tensor]) -> None:
    program = Program(lambda: stateful(change), lambda: (rows(BATCH, WIDTH),))

    check_at_budgets(program)


def scaled_then_changed(m: nn.Module, x: Tensor, state: Tensor) -> Tensor:
    y = x * torch.exp(state) * m.weight
    state.mul_(2)
    return y.sum()


def part_changed(m: nn.Module, x: Tensor, state: Tensor) -> Tensor:
    y = torch.sin(x * torch.exp(state[:3]).sum() * m.weight)
    state[1:].add_(1)
    return y.sum()


def input_read_before_and_after(m: nn.Module, x: Tensor, state: Tensor) -> Tensor:
    y = x * torch.exp(state) * m.weight
    state.add_(1)
    return (y * torch.exp(state)).sum()


def changed_and_returned(m: nn.Module, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    y = x * torch.exp(state) * m.weight
    state.add_(1)
    return y.sum(), state


@pytest.mark.parametrize(
    "change", [scaled_then_changed, part_changed, input_read_before_and_after, changed_and_returned]
)
def test_r2_backward_sees_the_input_as_forward_did(change: Callable[..., Any]) -> None:
    program = Program(lambda: stateful(change), lambda: (rows(BATCH, WIDTH), torch.linspace(-1, 1, WIDTH)))

    check_at_budgets(program)


def test_r2_spectral_norm_iterates_as_in_eager() -> None:
    def build() -> nn.Module:
        first, second = (nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        return Lambda(lambda m, x: m.second(torch.tanh(m.first(x))).square().mean(), first=first, second=second)

    check_at_budgets(Program(build, lambda: (rows(BATCH, WIDTH),)), num_steps=3)


def test_r2_frozen_weights_changed_under_no_grad() -> None:
    def step(m: nn.Module, x: Tensor) -> Tensor:
        y = torch.exp(torch.sin(m.weight.detach())) * x
        with torch.no_grad():
            m.weight.mul_(0.5)
        return (y * m.other).sum()

    def build() -> nn.Module:
        return Lambda(step, weight=rows(WIDTH), other=rows(WIDTH))

    check_at_budgets(Program(build, lambda: (rows(BATCH, WIDTH),)))


@pytest.mark.inductor
def test_r2_on_inductor() -> None:
    def step(m: nn.Module, x: Tensor, state: Tensor) -> Tensor:
        y = x * torch.exp(m.state) * torch.exp(state) * m.weight
        m.state.add_(1)
        state.mul_(2)
        return y.sum()

    program = Program(lambda: stateful(step), lambda: (rows(BATCH, WIDTH), torch.linspace(-1, 1, WIDTH)))
    expected = run_eager(program, num_steps=2)
    for budget in (None, smallest_peak(program, lowering="inductor")):
        run = run_at(program, budget, lowering="inductor")
        for found, truth in zip(run.outcomes, expected, strict=True):
            assert_same(found, truth)


# -- R3: batch-norm statistics ---------------------------------------------------------------------------------------


def normalised(layer: Callable[[], nn.Module], norm: Callable[[], nn.Module]) -> nn.Module:
    """Three rounds of layer, norm and ReLU."""
    parts = [part() for _ in range(3) for part in (layer, norm, nn.ReLU)]
    return Lambda(lambda m, x: m.stack(x).square().mean(), stack=nn.Sequential(*parts))


# Without bias: before a norm its gradient is zero but for rounding, and has no relative error.
def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def convolution() -> nn.Module:
    return nn.Conv2d(3, 3, 3, padding=1, bias=False)


NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (linear, lambda: nn.BatchNorm1d(WIDTH), (BATCH, WIDTH)),
    "BatchNorm1d, momentum None": (linear, lambda: nn.BatchNorm1d(WIDTH, momentum=None), (BATCH, WIDTH)),
    "BatchNorm1d, no affine": (linear, lambda: nn.BatchNorm1d(WIDTH, affine=False), (BATCH, WIDTH)),
    "BatchNorm1d, no statistics": (linear, lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), (BATCH, WIDTH)),
    "BatchNorm2d": (convolution, lambda: nn.BatchNorm2d(3), (4, 3, 6, 6)),
    "BatchNorm2d, momentum None": (convolution, lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 6, 6)),
    "BatchNorm2d, evaluated": (convolution, lambda: nn.BatchNorm2d(3).eval(), (4, 3, 6, 6)),
    "BatchNorm3d": (lambda: nn.Conv3d(2, 2, 1, bias=False), lambda: nn.BatchNorm3d(2), (2, 2, 3, 3, 3)),
    "InstanceNorm1d with statistics": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 1, bias=False),
        lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True),
        (3, WIDTH, 5),
    ),
}


@pytest.mark.parametrize("norm", NORMS)
def test_r3_statistics_advance_once_a_step(norm: str) -> None:
    layer, make, shape = NORMS[norm]
    program = Program(lambda: normalised(layer, make), lambda: (rows(*shape),))

    runs = check_at_budgets(program)

    tracked = [buffer for name, buffer in runs[-1].outcomes[-1].buffers.items() if "num_batches_tracked" in name]
    assert all(int(count) in (0, 2) for count in tracked)


@pytest.mark.inductor
def test_r3_on_inductor() -> None:
    layer, make, shape = NORMS["BatchNorm2d"]
    program = Program(lambda: normalised(layer, make), lambda: (rows(*shape),))
    expected = run_eager(program, num_steps=2)

    run = run_at(program, smallest_peak(program, lowering="inductor"), lowering="inductor")

    for found, truth in zip(run.outcomes, expected, strict=True):
        assert_same(found, truth)


# -- R4: the user's annotations --------------------------------------------------------------------------------------

Policy = Callable[..., CheckpointPolicy]
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MM, SIN, VIEW = torch.ops.aten.mm.default, torch.ops.aten.sin.default, torch.ops.aten.view.default
TRANSPOSE, LAYER_NORM = torch.ops.aten.transpose.int, torch.ops.aten.native_layer_norm.default
MARKED: dict[str, tuple[Any, ...]] = {"mm": (MM,), "attention": (ATTENTION,), "pointwise": (SIN,)}


def marking(ops: tuple[Any, ...], mark: CheckpointPolicy, rest: CheckpointPolicy | None = None) -> Policy:
    """Marks ``ops``, and all else with ``rest``."""
    otherwise = rest or CheckpointPolicy.PREFER_RECOMPUTE

    def policy(_context: object, op: Any, *_args: object, **_keywords: object) -> CheckpointPolicy:
        return mark if op in ops else otherwise

    return policy


def everything(mark: CheckpointPolicy) -> Policy:
    return marking((), mark, mark)


def region(policy: Policy | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """A checkpoint region of the user's program; without a policy the plain one."""
    if policy is None:
        return checkpoint(function, *arguments, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


class MarkedBlocks(nn.Module):
    """Four blocks: projection, sine, attention, dropout, sine, projection, residual. ``enter`` calls a block."""

    def __init__(self, enter: Callable[..., Tensor], dropout: float) -> None:
        super().__init__()
        self.enter, self.dropout = enter, dropout
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 2 for _ in range(8)])

    def block(self, x: Tensor, into: Tensor, out: Tensor) -> Tensor:
        heads = torch.sin(x @ into).view(2, -1, 2, WIDTH // 2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)
        return x + torch.sin(F.dropout(mixed, self.dropout)) @ out

    def forward(self, x: Tensor) -> Tensor:
        for into, out in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = self.enter(self.block, x, into, out)
        return x.square().mean()


def marked_blocks(policy: Policy | None, dropout: float = 0.0) -> Program:
    """Each block a region of the policy, or of none."""
    return Program(lambda: MarkedBlocks(functools.partial(region, policy), dropout), lambda: (rows(128, WIDTH),))


def bare_blocks() -> Program:
    return Program(lambda: MarkedBlocks(lambda block, *inputs: block(*inputs), 0.0), lambda: (rows(128, WIDTH),))


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[fx.Graph, fx.Graph]]:
    """The forward and backward graphs of each partition made during the test."""
    seen: list[tuple[fx.Graph, fx.Graph]] = []
    original = RematPartitioner.__call__

    def recording(self: RematPartitioner, *arguments: Any, **keywords: Any) -> Any:
        forward, backward = original(self, *arguments, **keywords)
        seen.append((forward.graph, backward.graph))
        return forward, backward

    monkeypatch.setattr(RematPartitioner, "__call__", recording)
    return seen


Graphs = list[tuple[fx.Graph, fx.Graph]]


def ops_of(graph: fx.Graph) -> Counter[Any]:
    """The ops that a graph runs; one that runs with a saved generator state is an operand of the call."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    wrapped = [entry for node in calls for entry in node.args if isinstance(entry, torch._ops.OpOverload)]
    return Counter([node.target for node in calls] + wrapped)


def recomputed(graphs: tuple[fx.Graph, fx.Graph], op: Any) -> int:
    """How often ``op`` of forward runs again in backward; each product has two more there, for its gradients."""
    forward, backward = (ops_of(graph)[op] for graph in graphs)
    return backward - 2 * forward if op is MM else backward


def handed_over(forward: fx.Graph, num_outputs: int = 1) -> set[fx.Node]:
    """What forward gives to backward on top of inputs and of what it returns anyway."""
    (output,) = forward.find_nodes(op="output")
    flat = [node for node in output.args[0] if isinstance(node, fx.Node)]
    return {node for node in flat[num_outputs:] if node.op != "placeholder"} - set(flat[:num_outputs])


def origin(node: fx.Node) -> Any:
    """The op that made a value, seen through the parts of a result and through a call with a saved generator state."""
    while node.target is operator.getitem:
        source, part = node.args
        if "save_rng_state" in str(source.target) and part == 0:
            return source.target  # the state itself
        node = source
    return next((entry for entry in node.args if isinstance(entry, torch._ops.OpOverload)), node.target)


def entries(plan: RematPlan, op: Any) -> list[ValuePlan]:
    return [value for value in plan.values if value.op == str(op)]


@pytest.mark.parametrize("marked", MARKED)
def test_r4_must_save_holds_at_every_budget(marked: str, partitions: Graphs) -> None:
    [op] = MARKED[marked]
    check_at_budgets(marked_blocks(marking((op,), CheckpointPolicy.MUST_SAVE)))

    assert len(partitions) == 4
    assert [recomputed(graphs, op) for graphs in partitions] == [0] * 4


@pytest.mark.parametrize("marked", MARKED)
def test_r4_must_recompute_holds_at_every_budget(marked: str, partitions: Graphs) -> None:
    [op] = MARKED[marked]
    # The rest is not marked to be recomputed, as it is in a plain region: that alone would drop the marked values too.
    policy = marking((op,), CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE)
    runs = check_at_budgets(marked_blocks(policy))

    # Where memory is no object, backward may get the cosine of a marked value instead: that is not marked.
    assert recomputed(partitions[-1], op) >= 3
    for forward, _ in partitions:
        assert op not in {origin(node) for node in handed_over(forward)}
    for run in runs:
        assert {value.decision for value in entries(run.plan, op)} <= {"recompute"}


@pytest.mark.parametrize("marked", MARKED)
def test_r4_without_a_mark_the_budgets_decide(marked: str, partitions: Graphs) -> None:
    """Else the marks above would hold because nothing else was ever chosen."""
    [op] = MARKED[marked]
    run_at_budgets(bare_blocks())

    again = [recomputed(graphs, op) for graphs in partitions]
    assert max(again) > 0
    assert op is SIN or min(again) < 4
    assert op is SIN or any(op in {origin(node) for node in handed_over(forward)} for forward, _ in partitions)


def test_r4_plain_checkpoint_regions_are_recomputed_where_it_pays() -> None:
    runs = check_at_budgets(marked_blocks(None))

    assert runs[-1].plan.saved_bytes < runs[0].plan.inductor_peak_bytes


SAVE_PRODUCTS = marking((MM, ATTENTION), CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
RECOMPUTE_PRODUCTS = marking((MM, ATTENTION), CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE)
MARKS_ON_ALL: dict[str, Policy] = {
    "save all": everything(CheckpointPolicy.MUST_SAVE),
    "recompute all": everything(CheckpointPolicy.MUST_RECOMPUTE),
    "prefer to save": everything(CheckpointPolicy.PREFER_SAVE),
    "save views": marking((VIEW, TRANSPOSE), CheckpointPolicy.MUST_SAVE),
    "recompute views": marking((VIEW, TRANSPOSE), CheckpointPolicy.MUST_RECOMPUTE),
    "save products": SAVE_PRODUCTS,
    "recompute products": RECOMPUTE_PRODUCTS,
}


@pytest.mark.parametrize("policy", MARKS_ON_ALL)
def test_r4_marks_on_everything(policy: str) -> None:
    check_at_budgets(marked_blocks(MARKS_ON_ALL[policy]), count=2, num_steps=1)


@pytest.mark.parametrize("policy", ["recompute all", "save products"])
def test_r4_marks_do_not_change_what_is_drawn(policy: str) -> None:
    free, *limited = run_at_budgets(marked_blocks(MARKS_ON_ALL[policy], dropout=0.3), count=2)

    for run in limited:
        for found, expected in zip(run.outcomes, free.outcomes, strict=True):
            assert_same(found, expected)


def test_r4_a_recomputed_dropout_draws_its_mask_again() -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.dropout(F.leaky_relu(F.dropout(x @ weight, 0.4)), 0.2) @ weight.detach()

    def step(m: nn.Module, x: Tensor) -> Tensor:
        policy = everything(CheckpointPolicy.MUST_RECOMPUTE)
        x = region(policy, block, x, m.first)
        return region(policy, block, x, m.second).sum()

    program = Program(
        lambda: Lambda(step, first=rows(WIDTH, WIDTH), second=rows(WIDTH, WIDTH)), lambda: (rows(64, WIDTH),)
    )
    for run in run_at_budgets(program):
        for outcome in run.outcomes:
            assert_masks_agree(program, outcome)


def test_r4_several_results_of_one_op() -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        values, places = torch.sin(F.layer_norm(x, (WIDTH,)) @ weight).topk(4, dim=1)
        return values.sum() + torch.sin(x.gather(1, places)).sum()

    for mark in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE):
        policy = marking((LAYER_NORM, torch.ops.aten.topk.default), mark)
        program = Program(
            lambda policy=policy: Lambda(lambda m, x: region(policy, block, x, m.weight), weight=rows(WIDTH, WIDTH)),
            lambda: (rows(64, WIDTH),),
        )
        check_at_budgets(program, count=2)


@pytest.mark.parametrize("outer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_r4_a_region_in_a_region_of_the_other_mark(outer: CheckpointPolicy) -> None:
    [inner] = {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE} - {outer}

    def inside(x: Tensor, weight: Tensor) -> Tensor:
        return torch.sin(torch.sin(x) @ weight)

    def around(x: Tensor, weight: Tensor) -> Tensor:
        return torch.sin(region(everything(inner), inside, torch.sin(x), weight)) * x

    program = Program(
        lambda: Lambda(lambda m, x: region(everything(outer), around, x, m.weight).sum(), weight=rows(WIDTH, WIDTH)),
        lambda: (rows(64, WIDTH),),
    )
    check_at_budgets(program, count=2)


def test_r4_a_mark_on_what_reads_a_changed_buffer() -> None:
    def block(x: Tensor, state: Tensor) -> Tensor:
        return torch.sin(torch.exp(state) * x) * torch.exp(state)

    def step(m: nn.Module, x: Tensor, enter: Callable[..., Tensor]) -> Tensor:
        y = enter(block, x * m.weight, m.state)
        m.state.add_(1)
        return y.sum()

    def program(enter: Callable[..., Tensor]) -> Program:
        return Program(lambda: stateful(functools.partial(step, enter=enter)), lambda: (rows(BATCH, WIDTH),))

    # In eager a region reads the buffer again after the change, and autograd refuses that: the truth has no region.
    expected = run_eager(program(lambda block, *inputs: block(*inputs)), num_steps=2)
    marked = program(functools.partial(region, everything(CheckpointPolicy.MUST_RECOMPUTE)))
    for run in run_at_budgets(marked):
        for found, truth in zip(run.outcomes, expected, strict=True):
            assert_same(found, truth)


def test_r4_a_marked_result_that_the_step_returns() -> None:
    def block(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.sin(x @ weight)
        return hidden, torch.sin(hidden)

    def step(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return region(everything(CheckpointPolicy.MUST_RECOMPUTE), block, x, m.weight)

    check_at_budgets(Program(lambda: Lambda(step, weight=rows(WIDTH, WIDTH)), lambda: (rows(64, WIDTH),)))


# -- R12, and R4 again: what can be neither saved nor recomputed -----------------------------------------------------


@pytest.fixture(scope="module")
def once_only() -> Any:
    """A custom op that runs under an effect token, so that nobody may run it twice."""
    library = torch.library.Library("remat_tests", "DEF")
    library.define("once(Tensor x) -> Tensor")
    library.impl("once", lambda x: x * 3, "CompositeExplicitAutograd")
    torch.library.register_fake("remat_tests::once", torch.empty_like, lib=library)
    torch.library.register_autograd("remat_tests::once", lambda _context, grad: grad * 3, lib=library)
    op = torch.ops.remat_tests.once.default
    torch.library._register_effectful_op(op, EffectType.ORDERED, lib=library)
    yield op
    library._destroy()


def conflicting(op: Any) -> Program:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return torch.sin(op(torch.sin(x)) * weight)  # the weight's gradient reads what ``op`` returns

    def step(m: nn.Module, x: Tensor) -> Tensor:
        return region(everything(CheckpointPolicy.MUST_RECOMPUTE), block, x, m.weight).sum()

    return Program(lambda: Lambda(step, weight=rows(WIDTH)), lambda: (rows(BATCH, WIDTH),))


def refusal(program: Program, **options: object) -> CannotPartitionError:
    with pytest.raises(Exception, match="neither saved") as caught:
        run_remat(program, **options)
    error = remat_error(caught.value)
    assert isinstance(error, CannotPartitionError)
    assert str(error) in str(caught.value)  # it reaches the user whole
    return error


@pytest.mark.parametrize("budget", [None, "90%"])
def test_r12_one_error_names_the_value_and_both_reasons(
    once_only: Any, budget: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    text = str(refusal(conflicting(once_only), memory_budget=budget))

    assert re.search(r"Backward needs \w+", text)
    assert "MUST_RECOMPUTE" in text
    assert "effect" in text
    assert list(tmp_path.iterdir()) == []


def test_r4_the_error_names_the_op_and_its_line(once_only: Any) -> None:
    text = str(refusal(conflicting(once_only)))

    assert "once" in text, "the op"
    assert re.search(r"test_cases_recompute\.py:\d+", text), "the line"


def test_r12_what_a_custom_op_returns_is_saved_unless_marked() -> None:
    calls = []

    @torch.library.custom_op("remat_tests::recorded", mutates_args=())
    def op(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.sin(x)

    op.register_fake(torch.empty_like)
    op.register_autograd(lambda context, grad: grad * 2)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.sin(op(torch.sin(x)) * weight)
        return x

    def step(m: nn.Module, x: Tensor, policy: Policy) -> Tensor:
        return region(policy, block, x, m.weight).sum()

    def calls_a_step(policy: Policy) -> int:
        program = Program(
            lambda: Lambda(lambda m, x: step(m, x, policy), weight=rows(WIDTH)), lambda: (rows(64, WIDTH),)
        )
        budget = smallest_peak(program)
        run = run_at(program, budget, num_steps=1)
        calls.clear()
        assert_same(run_at(program, budget, num_steps=1).outcomes[0], run.outcomes[0])
        return len(calls)

    assert calls_a_step(everything(CheckpointPolicy.PREFER_SAVE)) == 6
    assert calls_a_step(everything(CheckpointPolicy.MUST_RECOMPUTE)) > 6


def test_r4_contradicting_marks_are_refused_by_op_line_and_both_rules() -> None:
    """A view and what it shows are one storage, which cannot be saved and recomputed at once."""
    contradiction = marking((ATTENTION,), CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE)

    text = str(refusal(marked_blocks(contradiction)))

    assert "MUST_SAVE" in text
    assert "MUST_RECOMPUTE" in text
    assert re.search(r"test_cases_recompute\.py:\d+", text)


# -- R8: weights cast to bf16 ----------------------------------------------------------------------------------------

HIDDEN = 24


def cast_by_autocast(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.stack(x).float().square().mean()


def cast_by_hand(m: nn.Module, x: Tensor) -> Tensor:
    x = x.bfloat16()
    for layer in m.stack:
        x = x @ layer.weight.bfloat16().t() if isinstance(layer, nn.Linear) else layer(x)
    return x.float().square().mean()


def cast_up(m: nn.Module, x: Tensor) -> Tensor:
    """Stored in 16 bits, used in 32."""
    for layer in m.stack:
        x = (
            x @ layer.weight.bfloat16().detach().float().t() * layer.weight.mean()
            if hasattr(layer, "weight")
            else layer(x)
        )
    return x.square().mean()


def mlp(step: Callable[..., Tensor], dtype: torch.dtype) -> nn.Module:
    layers = [nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False), nn.GELU()]
    layers += [nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False)]
    return Lambda(step, stack=nn.Sequential(*layers).to(dtype))


def copies_of_weights(plan: RematPlan) -> list[ValuePlan]:
    """Saved values of the shape of a weight; no activation here has it."""
    return [value for value in plan.values if value.decision == "save" and set(value.shape) == {WIDTH, HIDDEN}]


@pytest.mark.parametrize(
    ("step", "stored"),
    [(cast_by_autocast, torch.float32), (cast_by_hand, torch.float32), (cast_up, torch.bfloat16)],
)
def test_r8_no_cast_of_a_weight_is_saved(step: Callable[..., Tensor], stored: torch.dtype) -> None:
    program = Program(lambda: mlp(step, stored), lambda: (rows(96, WIDTH),), dtype=None)
    expected = run_eager(program)[0]
    whole = {"num_microbatches": 1}  # a slice of activations may have the shape of a weight
    smallest = smallest_peak(program, **whole)
    free = run_at(program, None, num_steps=1, **whole)
    budgets = budgets_between(free.plan.inductor_peak_bytes, smallest, 6)

    for run in (free, *(run_at(program, budget, num_steps=1, **whole) for budget in budgets)):
        assert copies_of_weights(run.plan) == [], run.budget_bytes
        assert not any(note.startswith(BREAKS_A_RULE) for note in run.plan.notes), (
            "saving a cast is wasteful, not wrong"
        )
        assert_close(run.outcomes[0], expected, tolerance=2e-2)  # a bf16 rounding is 4e-3


# -- R9: what only backward needs ------------------------------------------------------------------------------------


class CoshInBackward(torch.autograd.Function):
    """Its backward scales by a function of the weight alone."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = context.saved_tensors
        return grad * torch.cosh(weight), (grad * x * torch.cosh(weight)).sum(0)


ONLY_IN_BACKWARD: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "cos of sin": (lambda m, x: (x * torch.sin(m.weight)).sum(), torch.ops.aten.cos.default),
    "sign of abs": (lambda m, x: (x @ m.square.abs()).sin().sum(), torch.ops.aten.sign.default),
    "autograd.Function": (lambda m, x: CoshInBackward.apply(x.sin(), m.weight).sum(), torch.ops.aten.cosh.default),
}


@pytest.mark.parametrize("case", ONLY_IN_BACKWARD)
def test_r9_an_op_on_parameters_stays_in_backward(case: str, partitions: Graphs) -> None:
    step, op = ONLY_IN_BACKWARD[case]
    program = Program(lambda: Lambda(step, weight=rows(WIDTH), square=rows(WIDTH, WIDTH)), lambda: (rows(2, WIDTH),))

    check_at_budgets(program, num_microbatches=1)  # slices have their backward in forward

    for forward, backward in partitions:
        assert op not in ops_of(forward)
        assert op in ops_of(backward)


# -- R11: many tiny values -------------------------------------------------------------------------------------------


def tiny_values(m: nn.Module, x: Tensor, nothing: Tensor) -> Tensor:
    for _ in range(40):
        x = torch.sin(x) * m.weight
        nothing = torch.sin(nothing)
    return x.sum() + nothing.sum()


def bytes_handed_over(forward: fx.Graph) -> int:
    tensors = [node.meta["val"] for node in handed_over(forward) if isinstance(node.meta["val"], Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_r11_tiny_values_add_up_to_the_byte(partitions: Graphs) -> None:
    program = Program(
        lambda: Lambda(tiny_values, weight=rows(7)), lambda: (rows(3, 7), torch.empty(0, 5, requires_grad=True))
    )

    runs = check_at_budgets(program, count=4)

    assert len({run.plan.saved_bytes for run in runs}) > 1
    for run, (forward, _) in zip(runs, partitions, strict=True):
        saved = sum(value.bytes for value in run.plan.values if value.decision == "save")
        assert run.plan.saved_bytes == saved == bytes_handed_over(forward)


def test_r11_one_byte_less_than_the_smallest_is_refused() -> None:
    program = Program(
        lambda: Lambda(tiny_values, weight=rows(7)), lambda: (rows(3, 7), torch.empty(0, 5, requires_grad=True))
    )
    smallest = smallest_peak(program)

    assert run_at(program, smallest).plan.projected_peak_bytes == smallest
    with pytest.raises(Exception, match=re.escape(f"({smallest} bytes)")):
        run_remat(program, memory_budget=smallest - 1)


# -- R13: a tensor that is an input and an output --------------------------------------------------------------------

PASSED_THROUGH: dict[str, Callable[..., Any]] = {
    "input": lambda m, x: (x, (x * m.weight).sin().sum()),
    "parameter": lambda m, x: ((x * m.weight).sin().sum(), m.weight),
    "buffer": lambda m, x: ((x * m.weight * m.state).sin().sum(), m.state),
    "view of the input": lambda m, x: ((x * m.weight).sin().sum(), x.view(-1)[::2]),
    "view of a parameter": lambda m, x: ((x * m.weight).sin().sum(), m.weight[1:]),
    "detached input": lambda m, x: ((x * m.weight).sin().sum(), x.detach()),
    "all inputs": lambda m, x: (x, m.weight, m.state, (x * m.weight).sum()),
    "twice": lambda m, x: (lambda y: (y, y, x, x))((x * m.weight).sin()),
    "nothing else": lambda m, x: (x + 0 * m.weight, x),
    "constant gradient": lambda m, x: (x, m.weight.sum()),
}


@pytest.mark.parametrize("case", PASSED_THROUGH)
def test_r13_an_input_that_is_an_output(case: str) -> None:
    program = Program(
        lambda: Lambda(PASSED_THROUGH[case], weight=rows(WIDTH), state=torch.linspace(1, 2, WIDTH)),
        lambda: (rows(BATCH, WIDTH),),
    )

    check_at_budgets(program, count=2)


# -- R15: other options with all caches on ---------------------------------------------------------------------------

STEP_SCRIPT = """
    import json, sys
    import torch
    from torch import nn
    from oracle import compiled
    import remat_compiler


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.sin(torch.dropout(torch.exp(torch.sin(layer(x))), 0.2, True))
            return x.square().mean()


    def held_bytes(loss):
        tensors = [t for t in loss.grad_fn.saved_tensors if t is not None and not isinstance(t, nn.Parameter)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


    def step(**options):
        torch.manual_seed(0)
        net = Net()
        loss = compiled(net, **options)(torch.randn(64, 8))
        held = held_bytes(loss)
        loss.backward()
        return held


    def smallest_peak(**options):
        try:
            step(memory_budget=1, **options)
        except Exception as error:
            return int(str(error).split("smallest peak")[1].split("(")[1].split(" ")[0])
"""


def run_script(body: str, cwd: Path, **environment: str) -> str:
    """What a script printed, run in a process of its own on the source at hand."""
    script = textwrap.dedent(STEP_SCRIPT) + textwrap.dedent(body)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "passes", ROOT / "tests")))
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", script]
    finished = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def inductor_steps(*budgets: str) -> str:
    """A script that prints, for each budget: bytes the plan saves, bytes autograd holds, whether a cache served."""
    return f"""
        from torch._dynamo.utils import counters
        for budget in ({", ".join(budgets)}):
            counters.clear()
            held = step(lowering="inductor", memory_budget=budget, num_microbatches=1)
            served = counters["inductor"]["fxgraph_cache_hit"]
            print(json.dumps([remat_compiler.plans()[-1].saved_bytes, held, served]))
    """


@pytest.mark.inductor
def test_r15_each_budget_gets_its_own_plan_with_all_caches_on(tmp_path: Path) -> None:
    """In one process and in two: what autograd holds between forward and backward is what the plan says."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}

    [first] = map(json.loads, run_script(inductor_steps("None,"), tmp_path, **cache).splitlines())
    other_process = inductor_steps("smallest_peak(lowering='inductor', num_microbatches=1)", "None")
    tight, again = map(json.loads, run_script(other_process, tmp_path, **cache).splitlines())

    loose_bytes, loose_held, _ = first
    tight_bytes, tight_held, served_to_tight = tight
    assert again[:2] == first[:2]
    assert again[2] > 0, "the caches were not on: this test says nothing"
    assert served_to_tight == 0
    assert tight_bytes < loose_bytes
    assert loose_held - tight_held == loose_bytes - tight_bytes


def test_r15_each_option_counts_in_one_process() -> None:
    program = noisy(*[NOISES["nn.Dropout"]] * 4)
    module = program.module()
    smallest = smallest_peak(program)
    before = len(remat_compiler.plans())

    for budget in (None, smallest, None):
        run_steps(program, module, compiled(module, memory_budget=budget))

    loose, tight, again = remat_compiler.plans()[before:]
    assert (tight.budget_bytes, loose.budget_bytes) == (smallest, None)
    assert tight.saved_bytes < loose.saved_bytes == again.saved_bytes


# -- R16: the same plan in every process -----------------------------------------------------------------------------


def plan_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_r16_plan_files_are_the_same_under_any_hash_seed(tmp_path: Path) -> None:
    body = """
        for budget in (None, smallest_peak(), "95%"):
            step(memory_budget=budget, dump_dir=DUMP)
    """
    found = []
    for seed in ("1", "4242"):
        folder = tmp_path / seed
        run_script(f"DUMP = {str(folder)!r}\n" + textwrap.dedent(body), tmp_path, PYTHONHASHSEED=seed)
        found.append(plan_files(folder))

    assert found[0] == found[1]
    assert sum(name.endswith(".plan.json") for name in found[0]) == 3


# -- R17: misspelt options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wrong", "right"),
    [
        ({"memory_buget": "8GiB"}, "memory_buget", "memory_budget"),
        ({"lowring": "eager"}, "lowring", "lowering"),
        ({"num_micro_batches": 4}, "num_micro_batches", "num_microbatches"),
        ({"max_autotunes": True}, "max_autotunes", "max_autotune"),
        ({"lowering": "egaer"}, "egaer", "eager"),
    ],
)
def test_r17_the_right_name_is_suggested(options: dict[str, object], wrong: str, right: str) -> None:
    with pytest.raises(Exception, match="Did you mean") as caught:
        torch.compile(torch.sin, backend=installed_backend(), options=options)(rows(2))

    error = remat_error(caught.value)
    assert isinstance(error, ConfigError)
    assert f"Did you mean {right!r}?" in str(caught.value)
    assert wrong in str(error)


def test_r17_in_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_MEMORY_BUGET", "8GiB")

    with pytest.raises(Exception, match=r"REMAT_MEMORY_BUGET.*Did you mean 'REMAT_MEMORY_BUDGET'") as caught:
        torch.compile(torch.sin, backend=installed_backend())(rows(2))
    assert isinstance(remat_error(caught.value), ConfigError)


# -- R18: backward more than once ------------------------------------------------------------------------------------


def chain_of_layers() -> Program:
    def build() -> nn.Module:
        layers = [part for _ in range(3) for part in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())]
        return Lambda(lambda m, x: m.stack(x).square().mean(), stack=nn.Sequential(*layers))

    return Program(build, lambda: (rows(BATCH, WIDTH),))


def gradients_after_two_backwards(
    program: Program, call: Callable[..., Tensor], module: nn.Module
) -> dict[str, Tensor]:
    loss = call(*program.arguments())
    loss.backward(retain_graph=True)
    loss.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def assert_two_backwards_add_up(lowering: str, **options: object) -> None:
    program = chain_of_layers()
    module, truth = program.module(), program.module()
    budget = smallest_peak(program, lowering=lowering)

    found = gradients_after_two_backwards(
        program, compiled(module, lowering=lowering, memory_budget=budget, **options), module
    )

    expected = gradients_after_two_backwards(program, truth, truth)
    assert found.keys() == expected.keys()
    assert {name: relative_error(found[name], gradient) for name, gradient in expected.items()} == pytest.approx(
        dict.fromkeys(expected, 0.0), abs=FP64
    )


def test_r18_two_backwards_through_one_graph() -> None:
    assert_two_backwards_add_up("eager")


def refusal_of_two_backwards(lowering: str) -> str | None:
    try:
        assert_two_backwards_add_up(lowering)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.inductor
def test_r18_on_inductor_it_works_or_says_why() -> None:
    """Inductor reuses saved buffers in backward unless told not to, and refuses a retained graph for that."""
    refused = refusal_of_two_backwards("inductor")
    assert refused is None or "torch._functorch.config.donated_buffer" in refused

    with torch._functorch.config.patch(donated_buffer=False):
        assert_two_backwards_add_up("inductor")


def test_r18_a_third_backward_without_the_graph_is_autograd_s_own_error() -> None:
    program = chain_of_layers()
    loss = compiled(program.module())(*program.arguments())
    loss.backward()

    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_r18_gradients_of_gradients_are_refused_clearly() -> None:
    program = chain_of_layers()
    x = program.arguments()[0]
    loss = compiled(program.module())(x)
    [grad] = torch.autograd.grad(loss, x, create_graph=True)

    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()
