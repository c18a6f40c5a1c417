"""CostGraph: what saving and what recomputing a value costs, in bytes and picoseconds.

A roofline with fusion. A kernel of its own (GEMM, convolution, attention) takes the longer of its arithmetic and its
traffic. A pointwise op is inlined into what reads it, so recomputing it costs arithmetic only, while saving it costs
one write in forward and one read in backward - unless the write or the read happens anyway. Without this a roofline
saves twice as much as it should (docs/cut.md has the derivation).

Williams, Waterman, Patterson: Roofline (CACM 52(4), 2009).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .device import DeviceSpec
from .joint import JointGraph, Role, Side, Size, Value
from .ops import FUSIBLE, OpKind, is_counter_random, op_name, transcendental_weight

PS_PER_US = 1_000_000

Sizes = Callable[[Value], tuple[Size, ...]]  # which form of the shape: as traced, or symbolic


def traced_sizes(value: Value) -> tuple[Size, ...]:
    return value.sizes


def symbolic_sizes(value: Value) -> tuple[Size, ...]:
    return value.shape


@dataclass(frozen=True, slots=True)
class ValueCost:
    """Prices of one value. Times are picoseconds, so that capacities of the cut are exact integers."""

    bytes: int  # what keeping it from forward to backward adds
    save_ps: int  # the write and the read that keeping it adds
    recompute_ps: int
    materialized_in_forward: bool
    materialized_in_backward: bool


@dataclass(frozen=True)
class CostGraph:
    """The prices of all values, and the part of the step's time that no decision changes."""

    values: tuple[ValueCost, ...]
    fixed_ps: int


def price(joint: JointGraph, spec: DeviceSpec) -> CostGraph:
    """The prices of a joint graph on a device, for the sizes that it was traced with."""
    depths = kernel_depths(joint)
    written_forward = [_is_written(joint, value, depths, (Side.FORWARD, Side.EITHER)) for value in joint.values]
    written_backward = [_is_written(joint, value, depths, (Side.BACKWARD,)) for value in joint.values]
    kept_anyway = {joint.values[i].base for i in joint.forward_outputs}
    values = tuple(
        _value_cost(joint, value, spec, written_forward[value.index], written_backward[value.index], kept_anyway)
        for value in joint.values
    )
    fixed = sum(
        _fixed_ps(joint, value, spec, written_forward[value.index] or written_backward[value.index])
        for value in joint.values
        if value.side is not Side.EITHER
    )
    return CostGraph(values=values, fixed_ps=fixed)


def kernel_depths(joint: JointGraph) -> list[int]:
    """How many kernels of their own lie on the longest path to each value: pointwise work fuses within one depth."""
    depths: list[int] = []
    for value in joint.values:
        depth = max((depths[i] for i in value.inputs), default=0)
        depths.append(depth + (value.kind in (OpKind.EXTERN, OpKind.SCATTER)))
    return depths


def readers(joint: JointGraph, value: Value) -> list[Value]:
    """The ops that read the value's storage, seen through views."""
    found: list[Value] = []
    stack = list(value.users)
    while stack:
        user = joint.values[stack.pop()]
        if user.kind is OpKind.VIEW:
            stack.extend(user.users)
        else:
            found.append(user)
    return found


def _is_written(joint: JointGraph, value: Value, depths: list[int], sides: tuple[Side, ...]) -> bool:
    """Whether the ops of ``sides`` make the value go through memory, whatever is decided."""
    if value.kind not in FUSIBLE or value.kind is OpKind.REDUCTION:
        return value.side in sides or value.role is not Role.NONE
    outputs = joint.backward_outputs if Side.BACKWARD in sides else joint.forward_outputs
    if value.index in outputs:
        return True
    here = [reader for reader in readers(joint, value) if reader.side in sides]
    kernels = [reader for reader in here if reader.kind not in FUSIBLE and reader.kind is not OpKind.SYMBOLIC]
    across = value.side in sides and any(depths[reader.index] > depths[value.index] for reader in here)
    return bool(kernels) or across


def _value_cost(
    joint: JointGraph, value: Value, spec: DeviceSpec, in_forward: bool, in_backward: bool, kept_anyway: set[int]
) -> ValueCost:
    traffic = _traffic_ps(value.bytes, spec)
    recompute = recompute_ps(joint, value, spec)
    if in_backward and value.kind in FUSIBLE:
        recompute += traffic
    save = (0 if in_forward else traffic) + (0 if in_backward else traffic)
    if value.side is Side.EITHER:
        save += recompute  # saving means computing it in forward first
    if _is_cast_of_parameter(joint, value):
        source = joint.values[value.inputs[0]]  # no copy of a weight is worth its bytes
        save = recompute + 2 * _traffic_ps(source.numel * _itemsize(source), spec)
    is_free = value.role is not Role.NONE or value.base in kept_anyway
    if value.role is not Role.NONE:
        save = 0 if in_backward else traffic
    return ValueCost(
        bytes=0 if is_free and value.index not in joint.mutated_inputs else value.bytes,
        save_ps=save,
        recompute_ps=recompute,
        materialized_in_forward=in_forward,
        materialized_in_backward=in_backward,
    )


def _is_cast_of_parameter(joint: JointGraph, value: Value) -> bool:
    is_cast = op_name(joint.nodes[value.index]) in ("convert_element_type", "_to_copy", "to")
    return is_cast and joint.values[value.inputs[0]].base in (joint.static_inputs or joint.trained_inputs)


def _fixed_ps(joint: JointGraph, value: Value, spec: DeviceSpec, written: bool) -> int:
    """What the value costs once a step: its work, and its way through memory when it takes one."""
    if value.kind not in FUSIBLE:
        return recompute_ps(joint, value, spec)
    through_memory = 2 * _traffic_ps(value.bytes, spec) + round(spec.launch_us * PS_PER_US) if written else 0
    return recompute_ps(joint, value, spec) + through_memory


def _traffic_ps(num_bytes: int, spec: DeviceSpec) -> int:
    return round(num_bytes / spec.bandwidth_bytes_per_us * PS_PER_US)


def recompute_ps(joint: JointGraph, value: Value, spec: DeviceSpec) -> int:
    """Picoseconds for running the op once, its operands at hand."""
    if value.kind in (OpKind.INPUT, OpKind.VIEW, OpKind.PART, OpKind.SYMBOLIC, OpKind.EFFECT):
        return 0
    return round(float(op_time_us(joint, value, spec, traced_sizes)) * PS_PER_US)


def op_time_us(joint: JointGraph, value: Value, spec: DeviceSpec, sizes: Sizes) -> Any:
    """Microseconds for running the op once: a number for traced sizes, a sympy expression for symbolic ones."""
    if value.kind in FUSIBLE:
        return _fusible_us(joint, value, spec, sizes)
    flops = matrix_flops(joint, value, sizes)
    rate = spec.matmul_flops_per_us.get(_dtype_name(joint, value), spec.matmul_flops_per_us["float32"])
    moved = sum(_bytes(joint.values[i], sizes) for i in value.inputs) + _result_bytes(joint, value, sizes)
    return _longer(flops / rate, moved / spec.bandwidth_bytes_per_us) + spec.launch_us


def _fusible_us(joint: JointGraph, value: Value, spec: DeviceSpec, sizes: Sizes) -> Any:
    node = joint.nodes[value.index]
    elements = _numel(sizes(value))
    if value.kind is OpKind.REDUCTION:
        operands = [joint.values[i] for i in value.inputs]
        elements = sum(_numel(sizes(operand)) for operand in operands)
        moved = sum(_bytes(operand, sizes) for operand in operands)
        return elements / spec.pointwise_flops_per_us + moved / spec.bandwidth_bytes_per_us
    flops = elements * _flops_per_element(node, spec)
    gathered = elements * _itemsize(value) if op_name(node) in _GATHERS else 0
    return flops / spec.pointwise_flops_per_us + gathered / spec.bandwidth_bytes_per_us


# Pointwise loops whose reads jump: they move what they produce once more.
_GATHERS = frozenset({"embedding", "gather", "index", "index_select", "_unsafe_index"})


def _flops_per_element(node: fx.Node, spec: DeviceSpec) -> float:
    if is_counter_random(node):
        return spec.random_flops
    return max(1.0, spec.transcendental_flops * transcendental_weight(node))


def matrix_flops(joint: JointGraph, value: Value, sizes: Sizes) -> Any:
    """Floating-point operations of a GEMM, convolution or attention by torch's own table; 0 for ops that it lacks."""
    node = joint.nodes[value.index]
    packet = getattr(node.target, "overloadpacket", None)
    index = {joint.nodes[i]: i for i in value.inputs}

    def shape(argument: Any) -> Any:
        return sizes(joint.values[index[argument]]) if isinstance(argument, fx.Node) else argument

    args = fx.map_arg(node.args, shape)
    if op_name(node) == "_scaled_dot_product_flash_attention_for_cpu":
        return sdpa_flop_count(*args[:3])
    if op_name(node) == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return sdpa_backward_flop_count(*args[:4])
    if packet not in flop_registry:
        return 0
    result = sizes(value) if value.dtype is not None else _part_shapes(joint, value, sizes)
    return flop_registry[packet](*args, **dict(node.kwargs), out_val=result)


def _part_shapes(joint: JointGraph, value: Value, sizes: Sizes) -> list[tuple[Size, ...] | None]:
    """The shape of each output of an op with several; ``None`` for one that nobody reads."""
    node = joint.nodes[value.index]
    parts = {joint.nodes[user].args[1]: sizes(joint.values[user]) for user in value.users}
    return [parts.get(position) for position in range(len(node.meta["val"]))]


def _longer(a: Any, b: Any) -> Any:
    return sympy.Max(a, b) if isinstance(a, sympy.Basic) or isinstance(b, sympy.Basic) else max(a, b)


def _numel(shape: tuple[Size, ...]) -> Any:
    product: Any = 1
    for dimension in shape:
        product = product * dimension
    return product


def _itemsize(value: Value) -> int:
    return value.dtype.itemsize if value.dtype is not None else 0


def _bytes(value: Value, sizes: Sizes) -> Any:
    return _numel(sizes(value)) * _itemsize(value) if value.dtype is not None else 0


def _result_bytes(joint: JointGraph, value: Value, sizes: Sizes) -> Any:
    if value.dtype is not None:
        return _bytes(value, sizes)
    return sum(_bytes(joint.values[user], sizes) for user in value.users if joint.values[user].kind is OpKind.PART)


def _dtype_name(joint: JointGraph, value: Value) -> str:
    operands = (joint.values[i].dtype for i in value.inputs)
    dtype = next((d for d in operands if d is not None and d.is_floating_point), value.dtype)
    return str(dtype or torch.float32).removeprefix("torch.")
