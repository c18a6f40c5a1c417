"""The cost model against the device: kernels of the graph one by one, and one step by class of kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.systems import Bench
from remat_compiler import torch_private
from remat_compiler.device_at_hand import device_spec
from remat_compiler.measured_costs import measure_kernels
from remat_passes.cost import op_time_us, traced_sizes
from remat_passes.cost_table import kernels
from remat_passes.device import DeviceSpec
from remat_passes.joint import JointGraph, capture
from remat_passes.ops import OpKind, op_name

GEMM, ATTENTION, CONVOLUTION, INDUCTOR, OTHER = "GEMMs", "attention", "convolutions", "Inductor's own kernels", "other"

# By what kernels of CUDA's libraries and of Inductor are called.
NAMES = (
    (INDUCTOR, ("triton_",)),
    (ATTENTION, ("flash", "fmha", "sdpa", "attention")),
    (CONVOLUTION, ("conv", "wgrad", "dgrad")),
    (GEMM, ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")),
)


def joint_graph(bench: Bench) -> JointGraph:
    """The joint graph of a bench's step, as remat would plan it."""

    def call(*batch: torch.Tensor) -> Any:
        return bench.model(*batch)

    taken = torch_private.traced_step(call, *bench.batch, dynamic=False)
    torch_private.prepare_joint_module(taken.module)
    pinned = torch_private.pinned_to_backward(taken.module.graph)
    return capture(taken.module.graph, taken.num_forward_outputs, taken.static_inputs, pinned)


@dataclass(frozen=True, slots=True)
class ClassCost:
    """What one class of kernels takes of a step, projected and measured."""

    kind: str
    how: str  # "one by one", on operands made up, or "in the step", by the profiler
    num_kernels: int
    projected_us: float | None
    measured_us: float
    lowest_ratio: float | None = None  # of a single kernel, projected to measured
    highest_ratio: float | None = None


def class_of_op(op: str) -> str:
    """The class of an ATen op that is a kernel of its own."""
    if "attention" in op:
        return ATTENTION
    if op.startswith("convolution"):
        return CONVOLUTION
    return GEMM if op in ("mm", "addmm", "bmm", "baddbmm") else OTHER


def class_of_kernel(name: str) -> str:
    """The class of a kernel by its name on the device."""
    lowered = name.lower()
    return next((kind for kind, parts in NAMES if any(part in lowered for part in parts)), OTHER)


def costs(bench: Bench) -> Iterator[dict[str, object]]:
    """Every class of kernels, one by one and in the step."""
    joint = joint_graph(bench)
    place = bench.place
    name = torch.cuda.get_device_name() if place.device == "cuda" else None
    spec = device_spec(place.device_spec, place.device, name, None, Path())
    single = list(one_by_one(joint, spec))
    yield from map(asdict, single)
    projected = {cost.kind: cost.projected_us for cost in single}
    if bench.plan is not None:  # what its step takes besides
        projected[INDUCTOR] = bench.plan.step_us - sum(us for us in projected.values() if us is not None)
    for cost in in_step(bench, projected):
        yield asdict(cost)


def one_by_one(joint: JointGraph, spec: DeviceSpec) -> Iterator[ClassCost]:
    """The graph's kernels that libraries bring, each timed alone, by class."""
    wanted = {key: values for key, values in kernels(joint).items() if values[0].kind is OpKind.EXTERN}
    times_us, _untimed = measure_kernels(joint, wanted, spec)
    found: dict[str, list[tuple[int, float, float]]] = {}
    for key, measured_us in times_us.items():
        value = wanted[key][0]
        projected_us = float(op_time_us(joint, value, spec, traced_sizes))
        kind = class_of_op(op_name(joint.nodes[value.index]))
        found.setdefault(kind, []).append((len(wanted[key]), projected_us, measured_us))
    for kind in sorted(found):
        rows = found[kind]
        ratios = [projected / measured for _, projected, measured in rows]
        yield ClassCost(
            kind,
            "one by one",
            sum(count for count, _, _ in rows),
            sum(count * projected for count, projected, _ in rows),
            sum(count * measured for count, _, measured in rows),
            min(ratios),
            max(ratios),
        )


def in_step(bench: Bench, projected_us: dict[str, float | None]) -> Iterator[ClassCost]:
    """One step's kernels by class, as the profiler of the device saw them."""
    is_cuda = bench.place.device == "cuda"
    bench.step()
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        bench.step()
        if is_cuda:
            torch.cuda.synchronize()
    measured: dict[str, tuple[int, float]] = {}
    for event in profiler.key_averages():
        us = float(event.self_device_time_total if is_cuda else event.self_cpu_time_total)
        kind = class_of_kernel(event.key)
        num_kernels, total_us = measured.get(kind, (0, 0.0))
        measured[kind] = (num_kernels + (event.count if us else 0), total_us + us)
    for kind in sorted(measured):
        yield ClassCost(kind, "in the step", measured[kind][0], projected_us.get(kind), measured[kind][1])
