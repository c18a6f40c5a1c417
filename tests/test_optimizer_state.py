"""The bytes of an optimizer's state before its first step, held against those after it, for every class of torch's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import remat_compiler
from remat_compiler import ConfigError, optimizer_state_bytes

# Every optimizer of torch.optim with what changes its state.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}],
    "Adafactor": [{}, {"foreach": False}],
    "Adagrad": [{}, {"fused": True}],
    "Adam": [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}, {"amsgrad": True, "foreach": True}],
    "AdamW": [{}, {"amsgrad": True}, {"lr": torch.tensor(1e-3)}, {"fused": True, "amsgrad": True}],
    "Adamax": [{}],
    "ASGD": [{}, {"foreach": True}],
    "Muon": [{}],
    "NAdam": [{}, {"decoupled_weight_decay": True}],
    "RAdam": [{}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "fused": True}],
    "SparseAdam": [{}],
}
REFUSED = {"LBFGS"}
CASES = [(name, setting) for name, settings in SETTINGS.items() for setting in settings]


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))


def mixed() -> nn.Module:
    """Several shapes and dtypes, a scalar, one that is frozen and one that is no dense row of elements."""
    module = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Conv1d(2, 3, 3))
    module.register_parameter("scale", nn.Parameter(torch.ones(())))
    module.register_parameter("narrow", nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16)))
    module.register_parameter("turned", nn.Parameter(torch.ones(3, 4).t()))
    module.register_parameter("frozen", nn.Parameter(torch.ones(1000), requires_grad=False))
    return module


def made(name: str, setting: dict[str, Any]) -> Optimizer:
    module = matrices() if name in ("Muon", "SparseAdam") else mixed()
    if setting.get("fused") and name in ("SGD", "Adagrad"):
        module.register_parameter("narrow", None)  # one dtype
    optimizer: Optimizer = getattr(torch.optim, name)(list(module.parameters()), **{"lr": 1e-3, **setting})
    return optimizer


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def step_once(optimizer: Optimizer, gradient: Callable[[Tensor], Tensor] = torch.ones_like) -> None:
    for parameter in parameters_of(optimizer):
        parameter.grad = gradient(parameter) if parameter.requires_grad else None
    optimizer.step()


def held_bytes(optimizer: Optimizer) -> int:
    entries = (entry for state in optimizer.state.values() for entry in state.values())
    storages = {e.untyped_storage().data_ptr(): e.untyped_storage().nbytes() for e in entries if isinstance(e, Tensor)}
    return sum(storages.values())


def sparse_row(parameter: Tensor) -> Tensor:
    return torch.ones_like(parameter).to_sparse(1)


def test_every_optimizer_of_torch_is_here() -> None:
    found = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and issubclass(kind, Optimizer)}
    assert found - {"Optimizer"} == set(SETTINGS) | REFUSED


@pytest.mark.parametrize(("name", "setting"), CASES, ids=lambda part: str(part))
def test_what_is_said_is_what_is_held_after_a_step(name: str, setting: dict[str, Any]) -> None:
    optimizer = made(name, setting)
    before = [parameter.detach().clone() for parameter in parameters_of(optimizer)]

    held = held_bytes(optimizer)  # Adagrad's is there from the start
    said = optimizer_state_bytes(optimizer)

    assert held_bytes(optimizer) == held
    assert bool(optimizer.state) == (name == "Adagrad")
    assert all(torch.equal(old, new) for old, new in zip(before, parameters_of(optimizer), strict=True))
    assert all(parameter.grad is None for parameter in parameters_of(optimizer))
    step_once(optimizer, sparse_row if name == "SparseAdam" else torch.ones_like)
    assert said == held_bytes(optimizer)
    assert optimizer_state_bytes(optimizer) == said  # with the state there


def test_adam_by_hand() -> None:
    weight = nn.Parameter(torch.zeros(1000, 10))
    assert optimizer_state_bytes(torch.optim.Adam([weight])) == 2 * 40_000 + 4
    assert optimizer_state_bytes(torch.optim.Adam([weight], amsgrad=True)) == 3 * 40_000 + 4
    assert optimizer_state_bytes(torch.optim.SGD([weight])) == 0


def test_groups_and_their_own_settings() -> None:
    a, b = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(200))
    optimizer = torch.optim.SGD([{"params": [a], "momentum": 0.9}, {"params": [b]}], lr=0.1)
    assert optimizer_state_bytes(optimizer) == 400


def test_state_that_is_there_counts_as_it_is() -> None:
    """Half of the parameters have stepped, with another dtype of state."""
    a, b = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(200))
    optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
    a.grad = torch.ones(100)
    optimizer.step()
    optimizer.state[a]["momentum_buffer"] = torch.zeros(100, dtype=torch.float64)
    assert optimizer_state_bytes(optimizer) == 800 + 800


def test_nothing_is_allocated_for_it() -> None:
    """A terabyte of parameters that are nowhere."""
    with torch.device("meta"):
        weight = nn.Parameter(torch.empty(2**20, 2**18))
    assert optimizer_state_bytes(torch.optim.AdamW([weight])) == 2 * 2**40


def test_hooks_schedulers_and_what_they_wrap_are_left_alone() -> None:
    weight = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.AdamW([weight])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: called.append("all"))
    try:
        assert optimizer_state_bytes(optimizer) == 84
    finally:
        handle.remove()
    assert called == []
    assert not optimizer.state
    step_once(optimizer)
    scheduler.step()
    assert called == ["before", "after"]


class Lion(Optimizer):
    """As optimizers that people write: state made in the step, a number read out of a tensor, attributes of its own."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["nested"] = {"rows": [parameter.new_zeros(parameter.shape[0])], "step": 0}
                    state["view"] = state["moment"][:1]
                    state["weight"] = parameter
                self.seen.append(parameter.grad.norm().item())
                state["nested"]["step"] += 1
                parameter.sub_(state["moment"].sign(), alpha=group["lr"] * min(1.0, self.seen[-1]))


def test_an_optimizer_that_nobody_knows() -> None:
    weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16))
    optimizer = Lion([weight])
    assert optimizer_state_bytes(optimizer) == 8 * 4 * 4 + 8 * 2
    assert optimizer.seen == []


def test_what_no_copy_can_say() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.state["picked"] = self.param_groups[0]["params"][0].nonzero()

    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match=r"The state of Odd cannot be worked out .* Run one step and count"):
        optimizer_state_bytes(Odd([weight]))
    with pytest.raises(ConfigError, match=r"The state of LBFGS cannot be worked out .*closure.*Set reserve"):
        optimizer_state_bytes(torch.optim.LBFGS([weight]))
    with pytest.raises(ConfigError, match=r"was given a list: it takes an optimizer"):
        optimizer_state_bytes([weight])  # type: ignore[arg-type]


def test_a_sparse_moment_is_refused() -> None:
    table = nn.Parameter(torch.zeros(10, 4))
    table.grad = torch.ones(10, 4).to_sparse(1)
    with pytest.raises(ConfigError, match="it is sparse, and grows with the rows"):
        optimizer_state_bytes(torch.optim.SGD([table], lr=0.1, momentum=0.9))


def test_a_copy_of_a_copy_says_the_same() -> None:
    optimizer = torch.optim.Adam(mixed().parameters())
    assert optimizer_state_bytes(copy.deepcopy(optimizer)) == remat_compiler.optimizer_state_bytes(optimizer)


def test_a_reserve_is_kept_free_of_the_budget() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    reserve = optimizer_state_bytes(torch.optim.AdamW(net.parameters()))
    options = {"lowering": "eager", "memory_budget": "1MiB", "reserve": reserve, "num_microbatches": 1}
    torch.compile(net, backend="remat", options=options)(torch.randn(16, 8)).sum().backward()
    assert remat_compiler.plans()[-1].budget_bytes == 2**20 - reserve

    torch._dynamo.reset()
    with pytest.raises(Exception, match="nothing is left for the step"):
        torch.compile(net, backend="remat", options={**options, "reserve": "1MiB"})(torch.randn(16, 8))
