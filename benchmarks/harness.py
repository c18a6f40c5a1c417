"""Trials: several systems at the same work, in one process.

Two runs one after the other cannot be compared on a shared machine, where a step takes 0.6 s in one minute and 0.9 s
in the next. Here every system does one step in turn, round after round, and what is reported is the median of the
ratios within a round. So all systems must be alive at the same time, each with a model of its own.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.profiler import record_function

import remat_compiler
from remat_compiler.measure import measure_peak, tensor_bytes
from remat_passes.errors import RematError, found_in
from remat_passes.plan import RematPlan

Batch = tuple[torch.Tensor, ...]
Forward = Callable[..., torch.Tensor]  # model and batch in, loss out
Clock = Callable[[Callable[[], object]], float]  # calls a step, and says how many seconds it took

# What of the largest gradient is nothing but rounding in float64: that of a sum of a million terms that cancel, which
# grows as the root of their number.
ZERO = 1e3 * torch.finfo(torch.float64).eps

_numbers = count()


@dataclass(frozen=True, slots=True)
class System:
    """One way to run a step: eager, or a backend of ``torch.compile`` with its options."""

    name: str
    backend: str | None = None  # None is eager
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A system at work: warmed up, with a model and inputs of its own."""

    system: System
    model: nn.Module
    batch: Batch
    step: Callable[[], torch.Tensor]  # forward and backward, from no gradients; returns the loss
    compile_s: float  # the first step's time less a warm one's
    planning_s: float | None  # of compile_s, what remat's planner took
    plan: RematPlan | None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The step times of one trial: its fastest, and the median of its ratios to the reference in the same round."""

    min_ms: float
    ratio: float


def seconds(step: Callable[[], object]) -> float:
    """The wall time of one call, its work on a CUDA device included."""
    start_s = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def processor_s(step: Callable[[], object]) -> float:
    """The processor seconds of one call: of all threads of this process, and of programs that it started and ended."""
    start_s, _ = _processor_s(), step()
    return _processor_s() - start_s


def _processor_s() -> float:
    return time.process_time() + sum(os.times()[2:4])  # the latter counts in hundredths, which steps are shorter than


CLOCKS: dict[str, Clock] = {"wall": seconds, "cpu": processor_s}


def _loss(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def compiled(system: System) -> Forward:
    """``system``'s version of calling the model, compiled when it is first called.

    Dynamo keeps the compiled versions of one code object in one list and gives up at eight of them, so each system gets
    a copy of the code.
    """
    if system.backend is None:
        return _loss
    name = f"loss_{next(_numbers)}"  # equal code objects are one to Dynamo's tables, so the names differ
    own = types.FunctionType(_loss.__code__.replace(co_name=name), globals(), name)
    return torch.compile(own, backend=system.backend, options=system.options or None)


@contextmanager
def empty_cache() -> Iterator[None]:
    """Inductor with an empty cache; what is left in it after a refusal goes too, which ``fresh_cache`` would keep."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, fresh_cache(dir=folder):
        yield


def start(system: System, model: nn.Module, batch: Batch) -> Trial:
    """Compile and warm ``system`` up on a copy of ``model``.

    Raises:
        RematError: remat refused the step.
    """
    model, forward = copy.deepcopy(model), compiled(system)

    def step() -> torch.Tensor:
        clear_gradients(model)
        loss = forward(model, *batch)
        loss.backward()
        return loss.detach()

    return warmed_up(system, model, batch, step)


def warmed_up(
    system: System,
    model: nn.Module,
    batch: Batch,
    step: Callable[[], torch.Tensor],
    *,
    clock: Clock = seconds,
    cache: Callable[[], AbstractContextManager[object]] = empty_cache,
) -> Trial:
    """``step``, compiled by its first call; with an empty cache no system profits from what another has compiled.

    Raises:
        RematError: remat refused the step.
    """
    num_plans = len(remat_compiler.plans())
    with cache(), refusals():
        first_s = clock(step)
    warm_s = min(clock(step) for _ in range(2))
    plans = remat_compiler.plans()[num_plans:]
    planning_s = sum(remat_compiler.planning_seconds()[num_plans:]) if plans else None
    plan = plans[0] if len(plans) == 1 else None  # the peak of a step of several graphs is not that of one of them
    return Trial(system, model, batch, step, max(first_s - warm_s, 0.0), planning_s, plan)


def pieces(batch: Batch, num_slices: int) -> list[Batch]:
    """The batch in slices of one size, along the first axis.

    Raises:
        ValueError: the samples do not divide by the slices.
    """
    if num_slices == 1:
        return [batch]
    samples = len(batch[0])
    if samples % num_slices:
        raise ValueError(f"{samples} samples do not make {num_slices} slices of one size.")
    return list(zip(*(tensor.split(samples // num_slices) for tensor in batch), strict=True))


def by_slices(forward: Forward, model: nn.Module, parts: Sequence[Batch], marker: str | None = None) -> torch.Tensor:
    """The loss, after forward and backward of one slice after the other; ``marker`` names a range around backward.

    Each slice's mean counts by its share of the samples, which is the mean over all where each sample counts alike.
    """
    losses = []
    for part in parts:
        loss = forward(model, *part)
        share = loss if len(parts) == 1 else loss / len(parts)
        with record_function(marker) if marker else nullcontext():
            share.backward()
        losses.append(share.detach())
        del loss, share
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def warm_inductor_up() -> None:
    """Compile a trifle, or the first system to compile pays for Inductor's imports and its precompiled header."""
    x = torch.ones(64, requires_grad=True)
    torch.compile(lambda x: x.sin().sum())(x).backward()


@contextmanager
def refusals() -> Iterator[None]:
    """A ``RematError`` that Dynamo has wrapped comes out as itself."""
    try:
        yield
    except Exception as error:
        refusal = found_in(error, RematError)
        if refusal is None:
            raise
        raise refusal from None


def clear_gradients(model: nn.Module) -> None:
    """Gradients are part of a step's memory, so every step starts without any."""
    for parameter in model.parameters():
        parameter.grad = None


def measured_total_bytes(trial: Trial) -> int:
    """The trial's own parameters, buffers and inputs, and the measured peak of one step above them.

    This is what ``memory_budget`` means on CPU. What the other trials hold is not counted.
    """
    clear_gradients(trial.model)
    own_bytes = tensor_bytes(trial.model, trial.batch)
    return own_bytes + measure_peak(trial.step, trial.batch[0].device.type).above_baseline_bytes


def interleaved_times(trials: Sequence[Trial], reference: Trial, num_rounds: int) -> list[StepTimes]:
    """The step times of every trial."""
    times_s = interleaved_s([trial.step for trial in trials], num_rounds)
    reference_s = times_s[trials.index(reference)]
    return [StepTimes(min(own_s) * 1e3, median_ratio(own_s, reference_s)) for own_s in times_s]


def interleaved_s(steps: Sequence[Callable[[], object]], num_rounds: int, clock: Clock = seconds) -> list[list[float]]:
    """The seconds of each step in each round. Each round starts with another one, so none always follows the same."""
    times_s: list[list[float]] = [[] for _ in steps]
    for round_number in range(num_rounds):
        for turn in range(len(steps)):
            index = (round_number + turn) % len(steps)
            times_s[index].append(clock(steps[index]))
    return times_s


def median_ratio(own_s: Sequence[float], other_s: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(own / other for own, other in zip(own_s, other_s, strict=True))


def reference_gradients(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Each parameter's gradient from eager PyTorch in float64: the truth that float32 results are held against."""
    precise = copy.deepcopy(model).double()
    inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch]
    precise(*inputs).backward()
    return {name: parameter.grad for name, parameter in precise.named_parameters() if parameter.grad is not None}


def gradient_error(trial: Trial, truth: Mapping[str, torch.Tensor]) -> float:
    """The worst error of the gradients of one more step, see ``worst_error``."""
    trial.step()
    return worst_error(named_gradients(trial.model), truth)


def named_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Each parameter's gradient, by the name that it has where no block is wrapped; a wrapper calls it ``inner``."""
    return {name.replace("inner.", ""): parameter.grad for name, parameter in model.named_parameters()}


def worst_error(gradients: Mapping[str, torch.Tensor | None], truth: Mapping[str, torch.Tensor]) -> float:
    """The largest of ``gradient_errors``, so that none hides behind another."""
    return max(gradient_errors(gradients, truth).values())


def gradient_errors(
    gradients: Mapping[str, torch.Tensor | None], truth: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """The relative error (2-norm) of each gradient; infinite where it is missing.

    One that is zero by mathematics is held against the largest: the bias of a key shifts all scores of a row alike,
    which softmax does not see, and its gradient in float64 is rounding.
    """
    largest: float = max(gradient.norm().item() for gradient in truth.values())
    errors = {}
    for name, expected in truth.items():
        gradient, size = gradients.get(name), expected.norm().item()
        distance = math.inf if gradient is None else (gradient.double() - expected).norm().item()
        scale = size if size > ZERO * largest else largest
        errors[name] = float(distance / scale if scale else math.inf if distance else 0.0)
    return errors
