"""The oracle: the same step in fp64, eager, unsplit and with everything saved.

What a compiled step hands back is compared with it thing by thing, each gradient on its own: a sum over gradients hides
one that is wrong behind the others, and a loss says nothing about backward at all. Budgets are taken from the plan's
own figures, so that the tight ones are tight on every machine.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat_compiler
import remat_compiler.backend
from remat_compiler import BudgetInfeasibleError
from remat_passes.device import DTYPES, DeviceSpec
from remat_passes.plan import RematPlan

FP64 = 1e-10  # relative error of a gradient between two orders of the same fp64 sums (CASES.md)
FP32 = 1e-5

# What a budget is asked to be when only the smallest reachable peak is wanted.
ONE_BYTE = 1

# One machine's figures for all tests: what is chosen must not depend on how fast the machine at hand is.
TEST_SPEC = DeviceSpec(
    name="cpu",
    kind="cpu",
    memory_bytes=24 * 2**30,
    bandwidth_bytes_per_us=44_000.0,
    matmul_flops_per_us=dict.fromkeys(DTYPES, 50_000.0),
    pointwise_flops_per_us=64_000.0,
    transcendental_flops=60.0,
    random_flops=470.0,
    launch_us=0.9,
    convolution_flops_per_us=50_000.0,
    convolution_launch_us=0.9,
    source="about a 2-core server; fixed for the tests",
)


def installed_backend() -> str | Callable[..., Any]:
    """``"remat"`` as users write it; the function behind it in a checkout that is not installed."""
    return "remat" if "remat" in torch.compiler.list_backends() else remat_compiler.backend.remat


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


@dataclass(frozen=True)
class Program:
    """A training step: a module whose forward returns the loss, or outputs that are weighted into one.

    ``build`` and ``inputs`` make everything anew from a fixed seed, so that two runs start from the same numbers.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    dtype: torch.dtype | None = torch.float64  # floats are cast to it; None leaves each as it is
    autocast: torch.dtype | None = None

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        built = self.build()
        return built if self.dtype is None else built.to(self.dtype)

    def arguments(self) -> tuple[Any, ...]:
        torch.manual_seed(1)
        return tuple(_cast(entry, self.dtype) for entry in self.inputs())

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """What the forward runs under."""
        return contextlib.nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast)

    def in_dtype(self, dtype: torch.dtype | None, autocast: torch.dtype | None = None) -> Program:
        return Program(self.build, self.inputs, dtype, autocast)


@dataclass(frozen=True)
class Outcome:
    """All that one step leaves behind."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    inputs: tuple[Tensor, ...]  # as the step left them
    rng_state: Tensor = field(repr=False)

    @property
    def loss(self) -> Tensor:
        return self.outputs[0]


def _cast(entry: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(entry, Tensor) or dtype is None or not entry.is_floating_point():
        return entry
    return entry.detach().to(dtype).requires_grad_(entry.requires_grad)


# -- running ---------------------------------------------------------------------------------------------------------


def run_eager(program: Program, num_steps: int = 1) -> list[Outcome]:
    """The truth: the program as Python runs it."""
    module = program.module()
    return run_steps(program, module, module, num_steps)


def run_remat(program: Program, num_steps: int = 1, **options: object) -> list[Outcome]:
    """The program compiled by remat; FX graphs run as they are unless ``lowering`` says otherwise."""
    module = program.module()
    return run_steps(program, module, compiled(module, **options), num_steps)


def compiled(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
    """``torch.compile`` with remat, from a fresh start of Dynamo."""
    torch._dynamo.reset()
    return torch.compile(function, backend=installed_backend(), options={"lowering": "eager", **options})


def run_steps(program: Program, module: nn.Module, call: Callable[..., Any], num_steps: int = 1) -> list[Outcome]:
    """Forward and backward ``num_steps`` times on the same numbers; gradients are taken anew each time."""
    arguments = program.arguments()
    torch.manual_seed(2)
    return [_run_step(program, module, call, arguments) for _ in range(num_steps)]


def _run_step(program: Program, module: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Outcome:
    leaves = _leaves(module, arguments)
    for leaf in leaves.values():
        leaf.grad = None
    with program.precision():
        outputs = _flat(call(*arguments))
    weighted_sum(outputs).backward()
    return Outcome(
        outputs=tuple(output.detach().clone() for output in outputs),
        gradients={name: leaf.grad for name, leaf in leaves.items()},
        buffers={name: buffer.detach().clone() for name, buffer in module.named_buffers()},
        inputs=tuple(entry.detach().clone() for entry in arguments if isinstance(entry, Tensor)),
        rng_state=torch.get_rng_state(),
    )


def _leaves(module: nn.Module, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    inputs = {f"input {i}": entry for i, entry in enumerate(arguments) if isinstance(entry, Tensor)}
    leaves = {**dict(module.named_parameters()), **inputs}
    return {name: leaf for name, leaf in leaves.items() if leaf.requires_grad and leaf.is_leaf}


def _flat(outputs: Any) -> tuple[Tensor, ...]:
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def weighted_sum(outputs: Sequence[Tensor]) -> Tensor:
    """One loss of several outputs, in which no two elements weigh the same."""
    total = torch.zeros((), dtype=torch.float64)
    for position, output in enumerate(outputs):
        if not output.requires_grad:
            continue
        real = torch.view_as_real(output) if output.is_complex() else output
        weights = torch.linspace(1.0, 2.0 + position, real.numel(), dtype=torch.float64)
        total = total + (real.double() * weights.view(real.shape)).sum()
    return total


# -- comparing -------------------------------------------------------------------------------------------------------


def relative_error(found: Tensor, expected: Tensor) -> float:
    """``|found - expected| / |expected|`` in norms; NaN meets NaN, and nothing else."""
    if found.shape != expected.shape:
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.detach().to(wide), expected.detach().to(wide)
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    difference = (found - expected).nan_to_num().norm().item()
    scale = expected.nan_to_num().norm().item()
    return difference / scale if scale else difference


def assert_same(found: Outcome, expected: Outcome, tolerance: float = FP64) -> None:
    """Outputs, each gradient, buffers and inputs agree, and the generator stands where it should."""
    assert_close(found, expected, tolerance)
    assert torch.equal(found.rng_state, expected.rng_state), "the generator moved on by another number of draws"


def assert_close(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Outputs, each gradient, buffers and inputs agree."""
    errors = dict(_errors(found, expected))
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:g}: {wrong}"


def _errors(found: Outcome, expected: Outcome) -> Iterator[tuple[str, float]]:
    assert len(found.outputs) == len(expected.outputs)
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.buffers.keys() == expected.buffers.keys()
    for position, (one, other) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        yield f"output {position}", relative_error(one, other)
    for name, expected_gradient in expected.gradients.items():
        yield f"gradient of {name}", _gradient_error(found.gradients[name], expected_gradient)
    for name, buffer in expected.buffers.items():
        yield f"buffer {name}", relative_error(found.buffers[name], buffer)
    for position, (one, other) in enumerate(zip(found.inputs, expected.inputs, strict=True)):
        yield f"input {position} afterwards", relative_error(one, other)


def _gradient_error(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    return relative_error(found, expected)


# -- budgets ---------------------------------------------------------------------------------------------------------


def remat_error(error: BaseException) -> BaseException:
    """remat's own error inside what Dynamo made of it."""
    inner = getattr(error, "inner_exception", None)
    return inner if inner is not None else error


def smallest_peak(program: Program, **options: object) -> int:
    """The smallest peak that can be reached, as the refusal of an impossible budget states it."""
    with pytest.raises(Exception, match="cannot be met") as caught:
        run_remat(program, memory_budget=ONE_BYTE, **options)
    error = remat_error(caught.value)
    assert isinstance(error, BudgetInfeasibleError)
    return int(re.findall(r"smallest peak that can be reached is [^(]*\((\d+) bytes\)", str(error))[0])


def budgets_between(loosest: int, smallest: int, count: int) -> list[int]:
    """``count`` budgets from loose to tight, both ends among them."""
    gap = loosest - smallest
    return [loosest - gap * step // (count - 1) for step in range(count)]


@dataclass(frozen=True)
class Run:
    """What one budget gave."""

    budget_bytes: int | None
    plan: RematPlan
    outcomes: tuple[Outcome, ...]


def run_at(program: Program, budget_bytes: int | None, num_steps: int = 2, **options: object) -> Run:
    """Compile at one budget; the program must be one graph."""
    before = len(remat_compiler.plans())
    outcomes = run_remat(program, num_steps, memory_budget=budget_bytes, **options)
    plans = remat_compiler.plans()[before:]
    assert len(plans) == 1, f"{len(plans)} plans for one graph"
    assert plans[0].budget_bytes == budget_bytes
    return Run(budget_bytes, plans[0], tuple(outcomes))


def run_at_budgets(program: Program, count: int = 3, num_steps: int = 2, **options: object) -> list[Run]:
    """No budget, then ``count`` budgets from what plain Inductor needs down to the smallest reachable peak.

    A looser budget changes nothing: no plan takes more than plain Inductor's.
    """
    free = run_at(program, None, num_steps, **options)
    smallest = smallest_peak(program, **options)
    loosest = max(smallest, free.plan.inductor_peak_bytes)
    budgets = budgets_between(loosest, smallest, count)
    return [free, *(run_at(program, budget, num_steps, **options) for budget in budgets)]


def check_at_budgets(
    program: Program, count: int = 3, num_steps: int = 2, tolerance: float = FP64, **options: object
) -> list[Run]:
    """Every step at every budget equals the eager one, every plan is within its budget, and no peak rises."""
    expected = run_eager(program, num_steps)
    runs = run_at_budgets(program, count, num_steps, **options)
    for run in runs:
        for found, truth in zip(run.outcomes, expected, strict=True):
            assert_same(found, truth, tolerance)
    check_peaks([run.plan for run in runs])
    return runs


BREAKS_A_RULE = "plain Inductor's own plan breaks a rule"  # a plan's note: there it is no yardstick


def check_peaks(plans: Sequence[RematPlan]) -> None:
    """Projected peaks stay within their budgets and plain Inductor's, and do not rise as the budgets fall."""
    for plan in plans:
        assert plan.budget_bytes is None or plan.projected_peak_bytes <= plan.budget_bytes
        if not any(note.startswith(BREAKS_A_RULE) for note in plan.notes):
            assert plan.projected_peak_bytes <= plan.inductor_peak_bytes
    within = [plan.projected_peak_bytes for plan in plans if plan.budget_bytes is not None]
    assert all(later <= earlier for earlier, later in itertools.pairwise(within)), within
