"""Tensors that backward changes in place: gradient statistics, scaling factors, counters of custom functions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

EAGER: dict[str, object] = {"lowering": "eager"}


def compiled(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(step, backend="remat", options=EAGER)


class LargestGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, largest: Tensor) -> Tensor:
        ctx.largest = largest
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.largest.copy_(gradient.abs().max())
        return gradient, None


class FadingScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor, calls: Tensor) -> Tensor:
        ctx.scale, ctx.calls = scale, calls
        return x * scale

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        before = ctx.scale * 1
        ctx.scale.mul_(0.5)
        ctx.calls.add_(1)
        return gradient * before, None, None


class CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, count: Tensor) -> Tensor:
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.count.add_(10)
        return gradient * 2, None


def test_a_buffer_that_only_backward_writes() -> None:
    weight, largest = torch.full((4,), 3.0, requires_grad=True), torch.zeros(())
    compiled(lambda x: (LargestGradient.apply(x * weight, largest) * 5).sum())(torch.ones(4)).backward()
    assert largest.item() == 5.0


def test_backward_reads_before_it_writes() -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    scale, calls = torch.ones((), dtype=torch.float64), torch.zeros(())
    step = compiled(lambda x: FadingScale.apply((x * weight).sin(), scale, calls).sum())
    for expected_scale in (1.0, 0.5):
        weight.grad = None
        step(torch.ones(4, dtype=torch.float64)).backward()
        torch.testing.assert_close(weight.grad, expected_scale * torch.ones(4, dtype=torch.float64).cos())
    assert (scale.item(), calls.item()) == (0.25, 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_buffer_that_both_sides_write(dtype: torch.dtype) -> None:
    """The count is held against AOTAutograd without remat, which decides what the graph says of the two writes; its
    gradient is no reference, because it reads the buffer after the update."""

    def after_a_step(backend: str, **keywords: object) -> tuple[float, Tensor]:
        torch._dynamo.reset()
        weight, count = torch.ones(4, dtype=dtype, requires_grad=True), torch.zeros((), dtype=dtype)

        def step(x: Tensor) -> Tensor:
            y = CountInBackward.apply((x * weight).sin() * count.exp(), count)
            count.add_(1)
            return y.sum()

        torch.compile(step, backend=backend, **keywords)(torch.ones(4, dtype=dtype)).backward()
        assert weight.grad is not None
        return count.item(), weight.grad

    count, gradient = after_a_step("remat", options=EAGER)
    assert count == after_a_step("aot_eager")[0] >= 10
    torch.testing.assert_close(gradient, 2 * torch.ones(4, dtype=dtype).cos())


def test_a_cast_of_a_parameter_that_must_be_saved_is_saved() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    save_all = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(lambda x: F.linear(x, weight), x, use_reentrant=False, context_fn=save_all).sum()

    compiled(step)(torch.randn(4, 8, requires_grad=True)).backward()
    assert weight.grad is not None


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_the_generator_moves_once_a_step(probability: float) -> None:
    weight = torch.ones(64, requires_grad=True)

    def step(w: Tensor) -> Tensor:
        return (w.sin() * torch.bernoulli(torch.ones(64), probability)).exp().sum()

    states = []
    for run in (step, compiled(step)):
        torch.manual_seed(0)
        run(weight).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
