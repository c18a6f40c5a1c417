"""On paper: a training step that is captured without being run, and planned for a device that is not there.

The script runs with tensors that have a shape and no contents, so that a model of billions of parameters takes no
memory and no time, and it ends where its first backward begins. By then each compiled part of the forward has been
traced into its joint graph by the passes that Inductor runs on it, and nothing has been lowered. One captured step is
planned as often as one likes: for another budget, another device, another number of micro-batches.

Why not meta tensors: they have no device, so that kernels are chosen that no device has. Why not fake tensors of the
device itself: without it torch cannot trace them through autograd.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import fx

from remat_passes.cost import PS_PER_US, price
from remat_passes.device import DeviceSpec
from remat_passes.errors import CannotCaptureError, ConfigError, RematError, found_in
from remat_passes.joint import JointGraph, capture
from remat_passes.memory import MemoryModel
from remat_passes.plan import RematPlan

from . import torch_private
from .batch_norm import group_counts, settle_batch_norm
from .options import Options, parse_options
from .partitioner import RematPartitioner
from .step_inputs import StepInputs, step_inputs

AT_ONCE = 1e30  # a rate so high that what has it takes no time


@dataclass(frozen=True)
class CapturedGraph:
    """One joint graph of the step, what is known of its inputs, and what ``torch.compile`` was given for it."""

    module: torch_private.JointModule
    known: StepInputs
    given: Mapping[str, object]
    has_batch_norm: bool  # in training: in how many slices it runs has to be known before it is traced

    @cached_property
    def joint(self) -> JointGraph:
        """The graph as the passes read it."""
        module = self.module
        return capture(module.module.graph, module.num_forward_outputs, module.static_inputs, frozenset())

    @property
    def num_parameters(self) -> int:
        """Elements of what is trained."""
        return sum(self.joint.values[i].numel for i in self.joint.trained_inputs)

    def options(self, settings: Mapping[str, object]) -> Options:
        """What the script, the environment and the command say, of which the last wins.

        Raises:
            ConfigError: an option is unknown, malformed, or asks for what cannot be done on paper.
        """
        given = {**self.given, **settings}
        options = parse_options(given, os.environ, torch_private.inductor_option_names())
        if options.cost_model == "measured":
            raise ConfigError(
                "Option cost_model is 'measured', which runs kernels, and on paper nothing is run. Export a table on"
                " the device (remat_compiler.export_cost_table) and name its file, or use 'analytic'."
            )
        return replace(options, num_microbatches_auto=False) if self.has_batch_norm else options


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A training step on paper. ``graphs`` are those with a backward."""

    graphs: tuple[CapturedGraph, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """The step's work by the roofline, nothing computed twice: what each resource would take if it were the only one.

    On a GPU they overlap: a kernel takes the longer of its arithmetic and its memory traffic.
    """

    arithmetic_us: float
    traffic_us: float
    launch_us: float


class _Reached(BaseException):
    """Ends the script where its backward begins. No ``except Exception`` of the script's is to stop it."""


class _Recorder:
    """What is seen of the script while it runs."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.settings = settings  # what wins over the options in the script
        self.graphs: list[CapturedGraph] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.is_tracing = False  # AOTAutograd traces backward through torch.autograd.grad
        self.eager_backward = ""  # where a backward began of which nothing was compiled

    def backend(
        self, options: Mapping[str, object], module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Take one Dynamo graph's joint graph, and have the script go on with the graph as it is."""
        parsed = parse_options({**options, **self.settings}, os.environ, torch_private.inductor_option_names())
        known = step_inputs(module, inputs, parsed.batch_axes)
        traced = torch_private.copy_of(module)
        if parsed.num_microbatches > 1 or parsed.num_microbatches_auto:
            torch_private.fix_sizes(inputs)
        if parsed.num_microbatches > 1:
            traced, known = settle_batch_norm(traced, known, parsed)
        self.is_tracing = True
        joint = torch_private.joint_module_of(traced, inputs, parsed.inductor)
        self.is_tracing = False
        if joint is not None:
            self.graphs.append(CapturedGraph(joint, known, options, has_batch_norm=group_counts(module) is not None))
        return module.forward

    def compile(self, model: Any = None, **keywords: Any) -> Any:
        """``torch.compile``, whatever backend it is given."""
        if model is None:
            return functools.partial(self.compile, **keywords)
        is_own = keywords.pop("backend", "inductor") in ("remat", "inductor")
        options = keywords.pop("options", None) or {}
        keywords.pop("mode", None)
        return _compile(model, backend=functools.partial(self.backend, options if is_own else {}), **keywords)

    def backward(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """A backward: the end of the script, unless nothing of it was compiled."""
        if self.is_tracing:
            return original(*arguments, **keywords)
        if self.graphs or self.eager_backward:
            raise _Reached
        self.eager_backward = _script_line(traceback.extract_stack())
        return original(*arguments, **keywords)

    def optimizer(self, original: Callable[..., Any], optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        """An optimizer is made."""
        original(optimizer, *arguments, **keywords)
        self.optimizers.append(optimizer)

    @contextmanager
    def watching(self, *, for_gpu: bool) -> Iterator[None]:
        """What of torch the script calls is this recorder's."""
        with (
            torch_private.tensors_on_paper(for_gpu=for_gpu),
            mock.patch.object(torch, "compile", self.compile),
            _wrapped(torch.autograd, "backward", self.backward),  # Tensor.backward calls it
            _wrapped(torch.autograd, "grad", self.backward),
            _wrapped(torch.optim.Optimizer, "__init__", self.optimizer),
        ):
            yield


_compile = torch.compile


@contextmanager
def _wrapped(owner: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def called(*arguments: Any, **keywords: Any) -> Any:
        return instead(original, *arguments, **keywords)

    with mock.patch.object(owner, name, called):
        yield


def capture_step(
    run: Callable[[], object], name: str, settings: Mapping[str, object], *, for_gpu: bool = False
) -> CapturedStep:
    """The training step that ``run`` reaches first.

    Args:
        run: executes the script.
        name: what errors call it.
        settings: options that win over those that the script gives ``torch.compile``.
        for_gpu: choose kernels as a GPU would, where a CPU has none like them.

    Raises:
        CannotCaptureError: it ends without one, asks for what is in a tensor, or does not compile its model.
        RematError: the options in the script, or the step itself, are refused.
        Exception: whatever else the script ends with.
    """
    recorder = _Recorder(settings)
    try:
        with recorder.watching(for_gpu=for_gpu):
            run()
    except _Reached:
        pass
    except SystemExit as ended:
        if not recorder.graphs and ended.code:
            raise CannotCaptureError(
                f"{name} ended with exit code {ended.code!r} before its first training step."
            ) from None
    except Exception as error:
        refused = found_in(error, RematError)
        if refused is not None:
            raise refused from None
        unknown = _unknown_contents(error)
        if unknown is None:
            raise
        raise CannotCaptureError(unknown) from None
    if not recorder.graphs:
        raise CannotCaptureError(_no_step(name, recorder.eager_backward))
    return CapturedStep(tuple(recorder.graphs), tuple(recorder.optimizers))


def call_step(step: Callable[[], Any]) -> None:
    """Call a function that is a training step, or gives one: a tuple of something to compile and its arguments.

    What is not compiled in it is planned as if all of it were: ``torch.compile(step)``.
    """
    made = step()
    if isinstance(made, tuple) and made and callable(made[0]):
        torch.compile(made[0])(*made[1:])
        return
    torch.compile(step)()


def _unknown_contents(error: BaseException) -> str | None:
    """What to say where the script asked for what is in a tensor."""
    asked = found_in(error, torch_private.UNKNOWN_CONTENTS)
    if asked is None:
        return None
    line = _script_line(traceback.extract_tb(asked.__traceback__))
    return (
        f"{line or 'The script'} needs what is in a tensor ({asked}), and on paper a tensor has a shape and no"
        " contents. Put what reads it behind the first backward, or name a function that does without it and makes one"
        " training step: remat plan TRAIN.py:step."
    )


def _script_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line that is neither torch's nor remat's: ``train.py:12: loss.item()``."""
    folders = tuple(os.path.join(os.path.dirname(path), "") for path in (str(torch.__file__), __file__))
    for frame in reversed(frames):
        if not frame.filename.startswith(folders) and os.path.isfile(frame.filename):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}: {frame.line}"
    return ""


def _no_step(name: str, eager_backward: str) -> str:
    if eager_backward:
        return (
            f"{name} trains, but compiles nothing of what it trains ({eager_backward}): only what torch.compile"
            " captures can be planned. Write model = torch.compile(model, backend='remat'), or name a function that"
            " makes one training step, which is then planned as a whole: remat plan TRAIN.py:step."
        )
    return (
        f"{name} ended without a training step: nothing that was compiled with torch.compile was called with gradients"
        " enabled. Give the arguments with which it trains, or name a function that makes one training step:"
        " remat plan TRAIN.py:step."
    )


# -- planning what was captured


def plan_graph(graph: CapturedGraph, spec: DeviceSpec, options: Options) -> RematPlan:
    """The plan of one captured graph at the prices of a device, counted as that device's allocator does.

    Raises:
        BudgetInfeasibleError: no plan is within the budget.
        RematError: the step cannot be split or partitioned.
    """
    partitioner = RematPartitioner(options, spec, inputs=graph.known, device_type=spec.kind)
    module = torch_private.copy_of(graph.module.module)
    static = list(graph.module.static_inputs)
    return partitioner.decide(module, graph.module.num_forward_outputs, static).plan


def held_bytes(graph: CapturedGraph, spec: DeviceSpec) -> tuple[int, int]:
    """What is allocated at the end of the step whatever the plan: parameters, buffers and inputs; their gradients."""
    model = MemoryModel(graph.joint, fuses=True, device_type=spec.kind)
    return model.baseline_bytes, model.gradient_bytes


def limits(graph: CapturedGraph, spec: DeviceSpec) -> Limits:
    """What the step's time is made of."""
    no_arithmetic: dict[str, Any] = {
        "matmul_flops_per_us": dict.fromkeys(spec.matmul_flops_per_us, AT_ONCE),
        "convolution_flops_per_us": AT_ONCE,
        "pointwise_flops_per_us": AT_ONCE,
    }
    no_traffic = {"bandwidth_bytes_per_us": AT_ONCE}
    no_launches = {"launch_us": 0.0, "convolution_launch_us": 0.0}
    arithmetic, traffic, launches = (
        price(graph.joint, replace(spec, **others)).fixed_ps / PS_PER_US
        for others in (no_traffic | no_launches, no_arithmetic | no_launches, no_arithmetic | no_traffic)
    )
    return Limits(arithmetic, traffic, launches)
