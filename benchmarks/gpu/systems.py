"""One system at the GPT: compiled, its peak measured, its steps timed. This is what runs in a process of its own.

A process each: ``memory_budget`` counts everything that is allocated, and other systems' weights would be in it;
the allocator's peak is then the system's own; and a crash or the deadline loses one row.
"""

from __future__ import annotations

import gc
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.async_compile import shutdown_compile_workers

import remat_compiler
from benchmarks.gpu.settings import CHECKPOINT, EAGER, KNOB, LOOP, REMAT, Place, Setting
from benchmarks.gpu.turn import Turn, waiting
from benchmarks.harness import Batch, clear_gradients, refusals
from benchmarks.models import GPTShape, build_gpt, random_batch
from benchmarks.peak.models import checkpoint_blocks
from remat_compiler.backend import remat
from remat_compiler.measure import measure_peak, tensor_bytes
from remat_passes.errors import RematError
from remat_passes.plan import RematPlan

SEED = 0
Forward = Callable[..., Any]  # model and batch in, loss out
MANY_VERSIONS = {"recompile_limit": 256, "accumulated_recompile_limit": 1024}
NO_TURN = Turn(None)

_numbers = count()


def _call(model: nn.Module, *batch: Tensor) -> Any:
    return model(*batch)


def compiled(setting: Setting, place: Place, turn: Turn = NO_TURN) -> Forward:
    """The setting's version of calling the model, compiled when it is first called.

    Backends go by their functions and not by name: where nothing is installed there are no entry points.
    """
    if setting.family == EAGER:
        return _call
    name = f"call_{next(_numbers)}"  # Dynamo keeps the versions of one code object in one list, so each gets its own
    own = types.FunctionType(_call.__code__.replace(co_name=name), globals(), name)
    options = dict(setting.options)
    if setting.family == REMAT:
        backend: Callable[..., Callable[..., Any]] = remat
        options["lowering"] = place.lowering
        if place.device_spec is not None:
            options["device_spec"] = place.device_spec
    else:
        known = "inductor" if place.lowering == "inductor" else "aot_eager_decomp_partition"
        backend = torch._dynamo.lookup_backend(known)
    return torch.compile(own, backend=waiting(backend, turn), options=options or None, dynamic=False)


def remat_refusal(error: BaseException) -> str:
    """A failure in a line: of a refusal what remat says, of anything else its type as well."""
    try:
        with refusals():
            raise error
    except RematError as refusal:
        return f"refused: {refusal}"
    except Exception as other:
        text = str(getattr(other, "inner_exception", other)).strip().partition("\n")[0]
        return f"failed: {type(other).__name__}: {text}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One row: what became of one system. Times in microseconds are the plan's, in milliseconds the device's."""

    family: str
    name: str
    num_slices: int = 1
    budget_bytes: int | None = None
    measured_bytes: int | None = None
    projected_bytes: int | None = None
    predicted_us: float | None = None  # of a step, by the cost model
    step_ms: float | None = None  # right after its compile
    compile_s: float | None = None  # until forward and backward were ready to run
    planning_s: float | None = None
    loss: float | None = None
    gradient_norms: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    def to_record(self) -> dict[str, object]:
        """The row as JSON."""
        return asdict(self)


def failed(setting: Setting, failure: str) -> Measured:
    """The row of a system that could not be measured."""
    return Measured(setting.family, setting.name, setting.num_slices, setting.budget_bytes, failure=failure)


class Bench:
    """One system with a model of its own."""

    def __init__(self, setting: Setting, shape: GPTShape, place: Place, turn: Turn = NO_TURN) -> None:
        self.setting, self.place, self.turn = setting, place, turn
        dtype = torch.bfloat16 if place.device == "cuda" else torch.float32
        self.model = build_gpt(shape, SEED).to(place.device, dtype)
        self.model.head.weight = self.model.token_embedding.weight  # tied, and of this scale, as in GPT-2
        with torch.no_grad():
            self.model.head.weight.mul_(0.02)
        self.batch: Batch = random_batch(shape, SEED, place.device)
        if setting.family == CHECKPOINT:
            checkpoint_blocks(self.model)
        self.forward = compiled(setting, place, turn)
        self.plan: RematPlan | None = None
        num_parts = setting.num_slices if setting.family == LOOP else 1
        self.parts = list(zip(*(tensor.chunk(num_parts) for tensor in self.batch), strict=True))

    def step(self) -> Tensor:
        """Forward and backward, from no gradients; the loss."""
        clear_gradients(self.model)
        losses = []
        for part in self.parts:
            loss = self.forward(self.model, *part)
            if len(self.parts) > 1:
                loss = loss / len(self.parts)
            loss.backward()
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def measure(self, num_steps: int) -> Measured:
        """Compile, and measure peak and step time in this system's turn.

        Raises:
            RematError: remat refused the step.
        """
        self._fill_library_workspaces()
        num_plans = len(remat_compiler.plans())
        start_s = time.perf_counter()
        with torch._dynamo.config.patch(MANY_VERSIONS), self._compiling(), refusals():
            if self.setting.family == EAGER:
                self.turn.take()
            loss = float(self.step())
        compile_s = max(0.0, (self.turn.asked_s or start_s) - start_s)  # without waiting, and without the step
        norms = {name: float(p.grad.float().norm()) for name, p in self.model.named_parameters() if p.grad is not None}
        clear_gradients(self.model)
        own_bytes = tensor_bytes(self.model, self.batch)
        peak_bytes = measure_peak(self.step, self.place.device, baseline_bytes=own_bytes).peak_bytes
        plans = remat_compiler.plans()[num_plans:]
        self.plan = plan = plans[0] if len(plans) == 1 else None
        row = Measured(
            self.setting.family,
            self.setting.name,
            plan.num_microbatches if plan else self.setting.num_slices,
            self.setting.budget_bytes,
            peak_bytes,
            plan.projected_peak_bytes if plan else None,
            plan.step_us if plan else None,
            self._step_ms(num_steps),
            compile_s,
            sum(remat_compiler.planning_seconds()[num_plans:]) if plan else None,
            loss,
            {name.replace("inner.", ""): norm for name, norm in norms.items()},
        )
        self.rest()
        if self.place.lowering == "inductor":
            shutdown_compile_workers()  # many of these processes stay, and each has started some
        return row

    def time(self, num_steps: int) -> float:
        """Milliseconds of a step, the mean of so many, after one to warm up."""
        self.turn.take()
        self.step()
        step_ms = self._step_ms(num_steps)
        self.rest()
        return step_ms

    def rest(self) -> None:
        """Let go of the device and of what the allocator keeps for the next step."""
        clear_gradients(self.model)
        gc.collect()
        if self.place.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.turn.give()

    def _step_ms(self, num_steps: int) -> float:
        if self.place.device != "cuda":
            start_s = time.perf_counter()
            for _ in range(num_steps):
                self.step()
            return (time.perf_counter() - start_s) * 1e3 / num_steps
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(num_steps):
            self.step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / num_steps

    def _compiling(self) -> AbstractContextManager[object]:
        """The knob is set while compiling. Backward is compiled with forward, so that only what runs takes a turn."""
        if self.setting.family == EAGER:
            return nullcontext()
        changes: dict[str, object] = {"force_non_lazy_backward_lowering": True}
        if self.setting.family == KNOB:
            changes["activation_memory_budget"] = self.setting.ratio
        return torch._functorch.config.patch(changes)

    def _fill_library_workspaces(self) -> None:
        """Let cuBLAS allocate its workspaces, one a thread: they stay, and belong to what is there before the step."""
        if self.place.device == "cuda":
            x = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            (x @ x).sum().backward()
            torch.cuda.synchronize()


Row = dict[str, object]


class Desk:
    """What a process is asked to do, one order after another; rows come one at a time."""

    def __init__(self, place: Place, turn: Turn = NO_TURN) -> None:
        self.place, self.turn = place, turn
        self.bench: Bench | None = None

    def handle(self, order: str, *arguments: Any) -> Iterator[Row]:
        """The rows of one order."""
        handlers: dict[str, Callable[..., Iterator[Row]]] = {
            "exactness": self._exactness,
            "masks": self._masks,
            "measure": self._measure,
            "time": self._time,
            "costs": self._costs,
        }
        yield from handlers[order](*arguments)

    def _exactness(self, *arguments: Any) -> Iterator[Row]:
        from benchmarks.gpu.exact import as_record, exactness

        with torch._dynamo.config.patch(MANY_VERSIONS):
            yield from map(as_record, exactness(arguments[0], arguments[1], self.place, *arguments[2:]))

    def _masks(self, *arguments: Any) -> Iterator[Row]:
        from benchmarks.gpu.exact import as_record, masks

        with torch._dynamo.config.patch(MANY_VERSIONS):
            yield from map(as_record, masks(arguments[0], self.place, *arguments[1:]))

    def _measure(self, setting: Setting, shape: GPTShape, num_steps: int) -> Iterator[Row]:
        try:
            self.bench = Bench(setting, shape, self.place, self.turn)
            yield self.bench.measure(num_steps).to_record()
        except Exception as error:
            self.bench = None
            yield failed(setting, remat_refusal(error)).to_record()
        finally:
            self.turn.give()

    def _time(self, num_steps: int) -> Iterator[Row]:
        assert self.bench is not None
        yield {"step_ms": self.bench.time(num_steps)}

    def _costs(self) -> Iterator[Row]:
        from benchmarks.gpu.costs import costs

        assert self.bench is not None
        self.turn.take()
        yield from costs(self.bench)
        self.bench.rest()
