"""Joint graphs without a compile: the partitioner that keeps what it is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from .eager import compile_with_aot_autograd
from .fake_tensors import as_device, on_cpu
from .graphs import outside_of_tracing


@dataclass(frozen=True, slots=True, eq=False)
class JointModule:
    """A joint graph as a partitioner is handed it."""

    module: fx.GraphModule
    num_forward_outputs: int
    static_inputs: tuple[int, ...]
    inputs: tuple[Any, ...] = ()  # of Dynamo's graph, which stand before the tangents


class Stopped(BaseException):
    """Ends a compile that is wanted for its joint graph only; no ``except Exception`` of torch's is to stop it."""


class TakesJointModule(CustomPartitionerFn):
    """Keeps the joint graph instead of cutting it."""

    def __init__(self) -> None:
        self.inputs: tuple[Any, ...] = ()
        self.taken: JointModule | None = None

    def __call__(  # type: ignore[override]
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **keywords: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.taken = JointModule(gm, num_fwd_outputs, tuple(static_lifetime_input_indices or ()), self.inputs)
        raise Stopped

    def uuid(self) -> str:
        return "remat: nothing is compiled"


def joint_module_of(module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, object]) -> JointModule | None:
    """The joint graph that ``compile_with_inductor`` would cut, by the same passes; ``None`` where no gradient is
    wanted. Nothing is lowered."""
    from torch._inductor.compile_fx import compile_fx

    def inner(*_arguments: Any, **_keywords: Any) -> Any:
        raise Stopped

    takes = TakesJointModule()
    for node in module.graph.nodes:  # Inductor's passes run what makes constants, on the device that it names
        node.args = fx.node.map_aggregate(node.args, on_cpu)
        node.kwargs = {name: on_cpu(as_device(arg) if name == "device" else arg) for name, arg in node.kwargs.items()}
    with outside_of_tracing(), functorch_config.patch(enable_autograd_cache=False), suppress(Stopped):
        compile_fx(
            module, list(inputs), inner_compile=inner, config_patches={**options, "custom_partitioner_fn": takes}
        )
    return takes.taken


def traced_step(step: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> JointModule:
    """The joint graph of ``step`` that the eager lowering would cut. The step itself does not run.

    Raises:
        ValueError: it has no backward.
    """

    takes = TakesJointModule()

    def backend(module: fx.GraphModule, arguments: Sequence[Any]) -> Any:
        takes.inputs = tuple(arguments)
        return compile_with_aot_autograd(module, arguments, takes, lambda _graph: None)

    torch._dynamo.reset()
    with suppress(Stopped):
        torch.compile(step, backend=backend, dynamic=dynamic)(*inputs)
    if takes.taken is None:
        raise ValueError("the step has no backward: give it an input or a parameter that requires a gradient")
    return takes.taken
