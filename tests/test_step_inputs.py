"""What the user calls the inputs of a step, and what was said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat_compiler
from remat_compiler import ConfigError, VerificationError, mark_batch
from remat_compiler.step_inputs import user_names
from remat_compiler.verify import Verified

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(step: Any, **options: object) -> Any:
    return torch.compile(step, backend="remat", options={"lowering": "eager", "num_microbatches": 2, **options})


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x", "x"),
        ("batch['y'][0]", "batch['y'][0]"),
        ("args[0]", "args[0]"),
        ("self._parameters['weight']", "weight"),
        ("self._modules['blocks']._modules['0']._modules['mlp']._parameters['weight']", "blocks.0.mlp.weight"),
        ("fn._modules['norm']._buffers['running_mean']", "norm.running_mean"),
        ("G['model']._modules['0']._parameters['bias']", "model.0.bias"),
        ("model._modules['0']._parameters['bias']", "model.0.bias"),
        ("self.model._modules['0']._parameters['bias']", "model.0.bias"),
        ("G['scale']", "scale"),
        ("self.offset", "self.offset"),
    ],
)
def test_a_parameter_is_called_by_the_path_to_its_module(source: str, name: str) -> None:
    assert user_names([source]) == (name,)


def test_names_stay_different() -> None:
    sources = ["self._parameters['weight']", "fn._parameters['weight']", "weight"]
    assert user_names(sources) == tuple(sources)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return (x - targets).square().mean()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randn(6, 4)


def config_error(step: Any, *inputs: Any) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        step(*inputs)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, ConfigError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert isinstance(error, ConfigError), caught.value
    return str(error)


def test_a_mark_and_an_option_that_disagree(batch: tuple[Tensor, Tensor]) -> None:
    x, targets = batch
    mark_batch(x, 1)
    text = config_error(compiled(Net(), batch_axes={"x": 0}), x, targets)
    assert "at axis 1 by mark_batch and at axis 0 by option batch_axes ('x')" in text
    mark_batch(x, 0)
    compiled(Net(), batch_axes={"x": 0})(x, targets).backward()


def test_one_input_under_two_names() -> None:
    def step(batch: dict[str, Tensor]) -> Tensor:
        return net(batch["x"], batch["y"])

    net = Net()
    batch = {"x": torch.randn(6, 4), "y": torch.randn(6, 4)}
    text = config_error(compiled(step, batch_axes={"batch['x']": 0, "batch.x": 1}), batch)
    assert "at axis 1 by option batch_axes ('batch.x')" in text or "at axis 0 by option batch_axes" in text
    assert "Say it once." in text


@pytest.mark.parametrize("name", ["target", "Targets", "targets_"])
def test_a_misspelt_input(batch: tuple[Tensor, Tensor], name: str) -> None:
    text = config_error(compiled(Net(), batch_axes={name: 0}), *batch)
    assert "Did you mean 'targets'?" in text
    assert "Its inputs are x, targets." in text


def test_a_misspelt_entry_of_a_dict() -> None:
    def step(batch: dict[str, Tensor]) -> Tensor:
        return net(batch["tokens"], batch["labels"])

    net = Net()
    batch = {"tokens": torch.randn(6, 4), "labels": torch.randn(6, 4)}
    text = config_error(compiled(step, batch_axes={"tokens": 0}), batch)
    assert "Did you mean \"batch['tokens']\"?" in text


class TwiceTheGradient(torch.autograd.Function):
    """A step that is the other one but for its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, tangent: Tensor) -> Tensor:
        return 2 * tangent


def test_a_failed_verification_names_the_users_parameters_and_is_kept() -> None:
    names = user_names(["self._modules['blocks']._modules['0']._parameters['weight']", "x"])
    verified = Verified(
        lambda weight, x: (TwiceTheGradient.apply(weight) * x).sum(),
        lambda budget_bytes: lambda weight, x: (weight * x).sum(),
        names,
        needed_bytes=0,
        described="g00",
        coarsest=None,
    )
    with pytest.raises(VerificationError) as caught:
        verified(torch.ones(3, requires_grad=True), torch.ones(3))

    kept = (
        "g00: the split step is not the same as the unsplit one."
        " gradient of blocks.0.weight: they differ by 1, of 1 at most."
    )
    assert remat_compiler.verifications()[-1] == kept
    assert str(caught.value).startswith(f"{kept} Please report")
