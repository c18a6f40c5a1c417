"""The whole way on Inductor: a small GPT's gradients, and the memory that its step really takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import device_spec_file
from oracle import (
    Lambda,
    Program,
    assert_same,
    budgets_between,
    compiled,
    installed_backend,
    relative_error,
    rows,
    run_eager,
    run_steps,
    smallest_peak,
)
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import remat_compiler
from benchmarks.models import GPTShape, build_gpt, random_batch
from remat_compiler.measure import MemoryTrace, measure_peak, tensor_bytes
from remat_passes.plan import RematPlan

pytestmark = pytest.mark.inductor

SHAPE = GPTShape(num_layers=2, width=64, num_heads=2, vocabulary=256, batch=8, tokens=128)
PROJECTION_ERROR = 0.10  # of the measured peak (issue 2, "Numbers")


@dataclass(frozen=True)
class Step:
    """A compiled step: its gradients, what it was planned to take and what it took."""

    name: str
    gradients: dict[str, torch.Tensor | None]
    memory: MemoryTrace
    plan: RematPlan | None


def gpt(dtype: torch.dtype = torch.float32) -> Program:
    return Program(lambda: build_gpt(SHAPE, seed=0), lambda: random_batch(SHAPE, seed=1), dtype)


def measured(name: str, make: Callable[[nn.Module], Callable[..., Any]], program: Program | None = None) -> Step:
    """Compile, take the gradients, then measure a step of its own."""
    program = program or gpt()
    module = program.module()
    before = len(remat_compiler.plans())
    call = make(module)
    [outcome] = run_steps(program, module, call)
    plans = remat_compiler.plans()[before:]
    plan = plans[0] if plans else None
    arguments = program.arguments()
    baseline_bytes = plan.baseline_bytes if plan else tensor_bytes(module, arguments)
    for parameter in module.parameters():
        parameter.grad = None

    def step() -> None:
        with program.precision():
            loss = call(*arguments)
        loss.backward()

    memory = measure_peak(step, baseline_bytes=baseline_bytes)
    return Step(name, dict(outcome.gradients), memory, plan)


def plain_inductor(module: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(module)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Step]]:
    """Plain Inductor, remat without a budget, and remat at a loose and at the tightest budget."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_DEVICE_SPEC", str(device_spec_file(tmp_path_factory)))
        smallest = smallest_peak(gpt(), lowering="inductor")
        free = measured("no budget", functools.partial(compiled, lowering="inductor"))
        assert free.plan is not None
        _, loose, tight = budgets_between(free.plan.inductor_peak_bytes, smallest, 3)
        found = [measured("plain", plain_inductor), free]
        for name, budget in (("loose", loose), ("tight", tight)):
            found.append(measured(name, functools.partial(compiled, lowering="inductor", memory_budget=budget)))
        yield {step.name: step for step in found}
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["no budget", "loose", "tight"])
def test_every_gradient_is_right(name: str, steps: dict[str, Step]) -> None:
    """Against fp64, and no further from it than twice what eager in fp32 is."""
    [truth], [eager] = run_eager(gpt(torch.float64)), run_eager(gpt())
    gradients = steps[name].gradients

    assert gradients.keys() == truth.gradients.keys()
    for parameter, expected in truth.gradients.items():
        found, rival = gradients[parameter], eager.gradients[parameter]
        assert found is not None
        assert expected is not None
        assert rival is not None
        assert relative_error(found, expected) <= 2 * relative_error(rival, expected) + 1e-6, parameter


@pytest.mark.parametrize("name", ["loose", "tight"])
def test_the_measured_peak_is_within_the_budget(name: str, steps: dict[str, Step]) -> None:
    plan = steps[name].plan
    assert plan is not None
    assert plan.budget_bytes is not None

    assert steps[name].memory.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("name", ["no budget", "loose", "tight"])
def test_the_projection_is_near_what_is_measured(name: str, steps: dict[str, Step]) -> None:
    plan, memory = steps[name].plan, steps[name].memory
    assert plan is not None

    assert plan.projected_peak_bytes == pytest.approx(memory.peak_bytes, rel=PROJECTION_ERROR)


@pytest.mark.parametrize("name", ["no budget", "loose", "tight"])
def test_never_above_plain_inductor(name: str, steps: dict[str, Step]) -> None:
    assert steps[name].memory.peak_bytes <= steps["plain"].memory.peak_bytes


def test_the_projection_for_plain_inductor_is_near_what_is_measured(steps: dict[str, Step]) -> None:
    """It is what 100 % means."""
    plan = steps["no budget"].plan
    assert plan is not None

    assert plan.inductor_peak_bytes == pytest.approx(steps["plain"].memory.peak_bytes, rel=PROJECTION_ERROR)


def test_a_smaller_budget_gives_a_smaller_peak(steps: dict[str, Step]) -> None:
    free, loose, tight = (steps[name].memory.peak_bytes for name in ("no budget", "loose", "tight"))

    assert tight < loose
    assert tight < 0.9 * steps["plain"].memory.peak_bytes
    assert loose <= max(free, steps["plain"].memory.peak_bytes)


def test_the_baseline_is_what_is_there_before_the_step(steps: dict[str, Step]) -> None:
    """On CPU: parameters, buffers and inputs."""
    plan = steps["no budget"].plan
    assert plan is not None

    assert plan.baseline_bytes == tensor_bytes(gpt().module(), gpt().arguments())


def layers(*parts: nn.Module) -> nn.Module:
    return Lambda(lambda m, x: m.stack(x).float().square().mean(), stack=nn.Sequential(*parts))


def convolutions() -> nn.Module:
    blocks = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    return layers(*(part for block in blocks for part in block))


def narrow_layers(count: int) -> nn.Module:
    blocks = [(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(count)]
    return layers(*(part for block in blocks for part in block))


class Checkpointed(nn.Module):
    """Two regions of the user's program that hold six layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = narrow_layers(3).stack, narrow_layers(3).stack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for region in (self.first, self.second):
            x = checkpoint(region, x, use_reentrant=False, context_fn=recompute_all)
        return x.square().mean()


def recompute_all() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)


OTHER_MODELS: dict[str, Program] = {
    "convolutions": Program(convolutions, lambda: (rows(16, 8, 16, 16),), torch.float32),
    "autocast": Program(lambda: narrow_layers(6), lambda: (rows(1024, 64),), torch.float32, torch.bfloat16),
    "regions": Program(Checkpointed, lambda: (rows(1024, 64),), torch.float32),
}


@pytest.mark.parametrize("model", OTHER_MODELS)
def test_other_models_stay_within_the_smallest_budget_and_below_plain_inductor(
    model: str, fresh_compiler: None
) -> None:
    program = OTHER_MODELS[model]
    budget = smallest_peak(program, lowering="inductor")
    tight = measured("tight", functools.partial(compiled, lowering="inductor", memory_budget=budget), program)
    plain = measured("plain", plain_inductor, program)

    print(model, budget, tight.memory.peak_bytes, plain.memory.peak_bytes)
    assert tight.memory.peak_bytes <= plain.memory.peak_bytes
    assert tight.memory.peak_bytes <= budget


def test_symbolic_sizes_under_the_smallest_budget(fresh_compiler: None) -> None:
    """Planned for one batch, right for every other."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))

    def of_batch(size: int) -> Program:
        return Program(build, lambda: (torch.randn(size, 8, requires_grad=True),))

    options = {"lowering": "inductor", "memory_budget": smallest_peak(of_batch(32), lowering="inductor")}
    torch._dynamo.reset()
    module, truth = of_batch(32).module(), of_batch(32).module()
    call = torch.compile(module, backend=installed_backend(), dynamic=True, options=options)

    for size in (32, 48, 8):
        [found] = run_steps(of_batch(size), module, call)
        [expected] = run_steps(of_batch(size), truth, truth)
        assert_same(found, expected)
