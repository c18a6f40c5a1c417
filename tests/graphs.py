"""Small joint graphs: built op by op, or traced from a step and taken before anything is decided.

Both go through ``capture``, so a test states ops and shapes, and never a field that ``capture`` should work out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from remat_compiler import torch_private
from remat_compiler.measured_costs import KernelTimes
from remat_compiler.staged import Staged
from remat_passes.again import Unrolled
from remat_passes.cost import price
from remat_passes.cut import Cut, CutProblem, cut_of_saved
from remat_passes.device import DeviceSpec
from remat_passes.joint import JointGraph, Side, Value, capture
from remat_passes.legality import classify
from remat_passes.memory import MemoryModel
from remat_passes.search import Candidate, Choice, cut_problem, inductor_candidate

KIB, MIB = 2**10, 2**20

ANALYTIC = KernelTimes(None, "analytic", ())

# Round figures, so that times can be worked out by hand: 1,000 bytes, 10,000 matmul flops and 1,000 pointwise flops a
# microsecond.
SPEC = DeviceSpec(
    name="by-hand",
    kind="cpu",
    memory_bytes=2**34,
    bandwidth_bytes_per_us=1_000.0,
    matmul_flops_per_us={"float32": 10_000.0, "float64": 5_000.0, "bfloat16": 20_000.0, "float16": 40_000.0},
    pointwise_flops_per_us=1_000.0,
    transcendental_flops=20.0,
    random_flops=50.0,
    launch_us=2.0,
    convolution_flops_per_us=10_000.0,
    convolution_launch_us=2.0,
    source="made up",
)


# -- built op by op ---------------------------------------------------------------------------------------------------


@dataclass
class JointBuilder:
    """A joint graph under construction; each call returns the node of the new value."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    num_primals: int = 0
    num_tangents: int = 0

    def primal(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """An input of the step."""
        self.num_primals += 1
        return self._input(f"primals_{self.num_primals}", shape, dtype)

    def tangent(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """The gradient that enters backward."""
        self.num_tangents += 1
        return self._input(f"tangents_{self.num_tangents}", shape, dtype)

    def _input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(*shape, dtype=dtype)
        return node

    def call(self, op: Callable[..., Any], *args: Any, **meta: Any) -> fx.Node:
        """One op on nodes and constants; ``meta`` goes into the node as the tracer would put it."""
        node = self.graph.call_function(op, args)
        with self.mode:
            node.meta["val"] = op(*fx.map_arg(args, lambda source: source.meta["val"]))
        node.meta.update(meta)
        return node

    def joint(
        self, outputs: Sequence[fx.Node], gradients: Sequence[fx.Node | None], static: Sequence[int] = ()
    ) -> JointGraph:
        """What ``capture`` makes of it; ``static`` are the positions of parameters among the primals."""
        self.graph.output((*outputs, *gradients))
        return capture(self.graph, len(outputs), static, frozenset())


def chain(num_layers: int, size: int, op: Callable[..., Any]) -> JointGraph:
    """``op(op(... x))``; backward multiplies the tangent by each layer's result, from the last to the first."""
    build = JointBuilder()
    layers = [build.primal(size)]
    gradient = build.tangent(size)
    for _ in range(num_layers):
        layers.append(build.call(op, layers[-1]))
    for layer in reversed(layers[1:]):
        gradient = build.call(torch.ops.aten.mul.Tensor, gradient, layer)
    return build.joint([layers[-1]], [gradient])


def products(num_layers: int, rows: int, width: int) -> JointGraph:
    """``h = exp(h @ w)`` with the gradients of all weights, layer by layer."""
    build = JointBuilder()
    h = build.primal(rows, width)
    weights = [build.primal(width, width) for _ in range(num_layers)]
    gradient = build.tangent(rows, width)
    layers: list[tuple[fx.Node, fx.Node, fx.Node]] = []
    for w in weights:
        before, h = h, build.call(torch.ops.aten.exp.default, build.call(torch.ops.aten.mm.default, h, w))
        layers.append((before, w, h))
    gradients = []
    for before, w, after in reversed(layers):
        gradient = build.call(torch.ops.aten.mul.Tensor, gradient, after)
        gradients.append(build.call(torch.ops.aten.mm.default, build.call(torch.ops.aten.t.default, before), gradient))
        gradient = build.call(torch.ops.aten.mm.default, gradient, build.call(torch.ops.aten.t.default, w))
    return build.joint([h], gradients, static=range(1, num_layers + 1))


# -- traced from a step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """The joint graph of a step, and what plain Inductor would save of it."""

    joint: JointGraph
    inductor_saved: frozenset[str]


def trace(step: Callable[..., Any], *inputs: object, dynamic: bool | None = None) -> Traced:
    """The joint graph of ``step``, after the decompositions of Inductor; the step itself does not run."""
    taken = torch_private.traced_step(step, *inputs, dynamic=dynamic)
    module, num_outputs, static = taken.module, taken.num_forward_outputs, taken.static_inputs
    torch_private.prepare_joint_module(module)
    joint = capture(module.graph, num_outputs, static, torch_private.pinned_to_backward(module.graph))
    return Traced(joint, torch_private.inductor_saved_names(module, num_outputs, static))


# -- the stages up to the search --------------------------------------------------------------------------------------


def staged(
    source: JointGraph | Traced, *, fuses: bool = False, spec: DeviceSpec = SPEC, allocated_bytes: int | None = None
) -> Staged:
    """Run the stages; a graph without Inductor's decision gets that of saving everything that backward reads."""
    joint = source.joint if isinstance(source, Traced) else source
    permissions, costs = classify(joint), price(joint, spec)
    problem = cut_problem(joint, permissions, costs)
    model = MemoryModel(joint, fuses, allocated_bytes)
    if isinstance(source, Traced):
        inductor = inductor_candidate(joint, problem, model, source.inductor_saved)
    else:
        everything = cut_of_saved(problem, frozenset(range(len(problem))) - _unsavable(problem))
        inductor = Candidate(everything, model.project(everything))
    return Staged(joint, permissions, costs, problem, model, ANALYTIC, inductor)


def choose(graph: Staged, budget_bytes: int | None) -> Choice:
    """What the search makes of it."""
    return graph.search(budget_bytes, None)


def unrolled_problem(problem: CutProblem, graph: Unrolled) -> CutProblem:
    """The prices of the values that are repeated, for the graph with repetitions."""
    required = graph.joint.required
    return tuple(
        old
        if value.side is Side.BACKWARD
        else replace(old, name=value.name, inputs=value.inputs, is_required=value.index in required)
        for value, old in zip(graph.joint.values, (problem[i] for i in graph.origin), strict=True)
    )


def _unsavable(problem: CutProblem) -> frozenset[int]:
    return frozenset(index for index, value in enumerate(problem) if value.save_ps is None)


def value_of(joint: JointGraph, name: str) -> Value:
    """The value called ``name``."""
    (found,) = (value for value in joint.values if value.name == name)
    return found


def values_of(joint: JointGraph, op: str) -> list[Value]:
    """The values that the op ``op`` computes, in order: ``values_of(joint, "aten.mm.default")``."""
    return [value for value in joint.values if value.op == op]


def saving(problem: CutProblem, joint: JointGraph, *names: str) -> Cut:
    """The decision that saves these values where backward needs them, and recomputes all else."""
    return cut_of_saved(problem, frozenset(value_of(joint, name).index for name in names))
