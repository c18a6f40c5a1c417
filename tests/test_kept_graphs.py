"""Backward more than once through one graph (``retain_graph=True``): Inductor's backward writes into what was saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from oracle import compiled
from torch import Tensor, nn

import remat_compiler
from remat_compiler.torch_private import inductor

ROWS, WIDTH, CLASSES = 64, 16, 400
TOLERANCE = 1e-10  # relative, in fp64; what is written over is wrong in the first digit

Step = Callable[[Tensor, Tensor], Tensor]


class Classifier(nn.Module):
    """The gradient of the logits, which are saved, is as large as they are and can take their place."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.stack(x), target)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (ROWS,))


def sums_of_gradients(module: nn.Module, step: Step, arguments: tuple[Tensor, Tensor], kept: Sequence[bool]) -> Tensor:
    """What has been added up after each of several backwards through one forward: a row a backward."""
    module.zero_grad(set_to_none=True)
    loss = step(*arguments)
    rows = []
    for keep in kept:
        loss.backward(retain_graph=keep)
        rows.append(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]))  # type: ignore[union-attr]
    return torch.stack(rows)


def worst_error(found: Tensor, expected: Tensor, module: nn.Module) -> float:
    """The largest error of any gradient after any backward, as a part of that gradient."""
    sizes = [parameter.numel() for parameter in module.parameters()]
    return max(
        float((mine - its).abs().max() / its.abs().max())
        for row, truth in zip(found, expected, strict=True)
        for mine, its in zip(row.split(sizes), truth.split(sizes), strict=True)
    )


def error_of(module: nn.Module, call: Step, arguments: tuple[Tensor, Tensor], kept: Sequence[bool]) -> float:
    expected = sums_of_gradients(module, module, arguments, kept)
    return worst_error(sums_of_gradients(module, call, arguments, kept), expected, module)


@pytest.mark.usefixtures("fresh_compiler")
def test_the_eager_lowering_keeps_a_graph_after_one_that_it_did_not_keep() -> None:
    module, arguments = Classifier().double(), batch()
    call = compiled(module)
    for kept in ([False], [True, True, False], [False]):
        assert error_of(module, call, arguments, kept) < TOLERANCE, kept


@pytest.mark.inductor
@pytest.mark.usefixtures("fresh_compiler")
def test_inductor_keeps_what_is_kept_and_reuses_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one compiled step: once, kept twice, once more; and without the second code the kept ones are wrong."""
    module, arguments = Classifier().double(), batch()
    call = compiled(module, lowering="inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("error", remat_compiler.RematWarning)
        for kept in ([True, False], [False], [True, True, False], [False]):
            assert error_of(module, call, arguments, kept) < TOLERANCE, kept
    [peak] = remat_compiler.measured_peaks()[-1:]  # of the first step that keeps no graph
    assert peak == pytest.approx(remat_compiler.plans()[-1].projected_peak_bytes, rel=0.01)

    monkeypatch.setattr(inductor, "graph_is_kept", lambda: False)
    assert error_of(module, call, arguments, [False]) < TOLERANCE
    assert error_of(module, call, arguments, [True, False]) > 0.01, "nothing was reused, so nothing was tested"


@pytest.mark.inductor
@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_of_gradients_are_one_clear_error_under_inductor() -> None:
    module, (x, target) = Classifier().double(), batch()
    x.requires_grad_()
    [gradient] = torch.autograd.grad(compiled(module, lowering="inductor")(x, target), x, create_graph=True)
    [truth] = torch.autograd.grad(module(x, target), x)
    torch.testing.assert_close(gradient.detach(), truth, rtol=0.0, atol=TOLERANCE * float(truth.abs().max()))

    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()
