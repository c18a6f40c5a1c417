"""The recompute cases of CASES.md: failures that users of other systems reported, each standing for its whole kind.

The number of a case is in the name of its tests. Whatever the budget, the step is compared with the oracle's.
"""

from __future__ import annotations

import functools
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
    FP64,
    Outcome,
    Program,
    Run,
    assert_same,
    budgets_between,
    check_at_budgets,
    check_peaks,
    compiled,
    relative_error,
    remat_error,
    run_at,
    run_at_budgets,
    run_eager,
    run_remat,
    run_steps,
    smallest_peak,
)
from remat_passes.plan import RematPlan, ValuePlan
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import remat_compiler
from remat_compiler import CannotPartitionError, ConfigError
from remat_compiler.partitioner import RematPartitioner

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROOT = Path(__file__).resolve().parent.parent
BATCH, WIDTH = 32, 8


def rows(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=requires_grad)


class Lambda(nn.Module):
    """A function over a module's own parameters."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif part.requires_grad:
                self.register_parameter(name, nn.Parameter(part))
            else:
                self.register_buffer(name, part)

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(self, *arguments)


# -- R1: dropout --------------------------------------------------------------------------------------------------------

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


# -- R2: what backward reads is changed in place ------------------------------------------------------------------------


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


# -- R3: batch-norm statistics ------------------------------------------------------------------------------------------


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
