"""CostGraph: what saving and what recomputing a value costs, in bytes and picoseconds.

A roofline with fusion. A kernel of its own (GEMM, convolution, attention) takes the longer of its arithmetic and its
traffic on a GPU, and both one after the other on a CPU (``DeviceSpec.overlaps``). A pointwise op is inlined into what
reads it, so recomputing it costs arithmetic only, while saving it costs one write in forward and one read in backward -
unless the write or the read happens anyway. Without this a roofline saves twice as much as it should (docs/cut.md has
the derivation).

Williams, Waterman, Patterson: Roofline (CACM 52(4), 2009).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .cost_table import CostTable, dimension_hint, kernel_key
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


def price(joint: JointGraph, spec: DeviceSpec, table: CostTable | None = None) -> CostGraph:
    """The prices of a joint graph on a device, for the sizes that it was traced with.

    What ``table`` has measured counts as measured; everything else is analytic.
    """
    values, work = _prices(_Pricing(joint, spec, table, traced_sizes))
    return CostGraph(values=tuple(values), fixed_ps=sum(work))


def symbolic_step_us(
    joint: JointGraph,
    spec: DeviceSpec,
    saved: Iterable[int] = (),
    redone: Iterable[int] = (),
    table: CostTable | None = None,
) -> sympy.Expr:
    """Microseconds of the step as a function of its symbolic sizes: the work that no decision changes, and what saving
    the values ``saved`` and recomputing ``redone`` adds (``Cut.saved``, ``Cut.redo``).

    At ``joint.symbols``, and ``UNBACKED_SIZE`` for symbols that are not among them, it is the step time of the plan, up
    to its rounding to picoseconds. What a table has measured scales as the analytic time does.
    """
    values, work = _prices(_Pricing(joint, spec, table, symbolic_sizes))
    terms = [*work, *(values[i].save_ps for i in saved), *(values[i].recompute_ps for i in redone)]
    return sympy.Add(*(sympy.sympify(term) for term in terms)) / PS_PER_US


@dataclass(frozen=True)
class _Pricing:
    """What the prices of one graph depend on. At traced sizes times are whole picoseconds, else expressions of them."""

    joint: JointGraph
    spec: DeviceSpec
    table: CostTable | None
    sizes: Sizes

    def ps(self, us: Any) -> Any:
        return round(float(us) * PS_PER_US) if self.sizes is traced_sizes else us * PS_PER_US

    def traffic_ps(self, num_bytes: Any) -> Any:
        return self.ps(num_bytes / self.spec.bandwidth_bytes_per_us)

    def storage_bytes(self, value: Value) -> Any:
        """The bytes of the value's own storage; a size that was traced as a number stays one."""
        if self.sizes is traced_sizes or value.bytes == 0 or value.shape == value.sizes:
            return value.bytes
        return _bytes(value, self.sizes)

    def work_ps(self, value: Value) -> Any:
        """Running the op once, its operands at hand."""
        if value.kind in _WITHOUT_WORK:
            return 0
        return self.ps(op_time_us(self.joint, value, self.spec, self.sizes, self.table))


_WITHOUT_WORK = frozenset({OpKind.INPUT, OpKind.VIEW, OpKind.PART, OpKind.SYMBOLIC, OpKind.EFFECT})


def _prices(pricing: _Pricing) -> tuple[list[ValueCost], list[Any]]:
    """The prices of each value, and the terms of the time that no decision changes: the work of each value, its way
    through memory where it takes one, and the launches of fused kernels."""
    joint = pricing.joint
    written = _written(joint)
    kept_anyway = {joint.values[i].base for i in joint.forward_outputs}
    depths = kernel_depths(joint)
    fused: set[tuple[Side, int]] = set()  # kernels of pointwise work: what is equally deep is one
    values, fixed = [], []
    for value, (in_forward, in_backward) in zip(joint.values, written, strict=True):
        work = pricing.work_ps(value)
        values.append(_value_cost(pricing, value, work, in_forward, in_backward, kept_anyway))
        if value.side is Side.EITHER:
            continue
        is_written = value.kind in FUSIBLE and (in_forward or in_backward)
        fixed.append(work + 2 * pricing.traffic_ps(pricing.storage_bytes(value)) if is_written else work)
        if is_written:
            fused.add((value.side, depths[value.index]))
    return values, [*fixed, len(fused) * pricing.ps(pricing.spec.launch_us)]


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


def _written(joint: JointGraph) -> list[tuple[bool, bool]]:
    """Whether the ops of forward, and those of backward, make each value go through memory, whatever is decided."""
    depths = kernel_depths(joint)
    outputs = (frozenset(joint.forward_outputs), frozenset(joint.backward_outputs))
    return [_is_written(joint, value, depths, outputs) for value in joint.values]


_OF_FORWARD, _OF_BACKWARD = (Side.FORWARD, Side.EITHER), (Side.BACKWARD,)


def _is_written(
    joint: JointGraph, value: Value, depths: list[int], outputs: tuple[frozenset[int], frozenset[int]]
) -> tuple[bool, bool]:
    if value.kind not in FUSIBLE or value.kind is OpKind.REDUCTION:
        is_input = value.role is not Role.NONE
        return is_input or value.side in _OF_FORWARD, is_input or value.side in _OF_BACKWARD
    found = readers(joint, value)

    def through_memory(sides: tuple[Side, ...]) -> bool:
        here = [reader for reader in found if reader.side in sides]
        kernels = any(reader.kind not in FUSIBLE and reader.kind is not OpKind.SYMBOLIC for reader in here)
        return kernels or (value.side in sides and any(depths[r.index] > depths[value.index] for r in here))

    return (
        value.index in outputs[0] or through_memory(_OF_FORWARD),
        value.index in outputs[1] or through_memory(_OF_BACKWARD),
    )


def _value_cost(
    pricing: _Pricing, value: Value, work_ps: Any, in_forward: bool, in_backward: bool, kept_anyway: set[int]
) -> ValueCost:
    joint = pricing.joint
    traffic = pricing.traffic_ps(pricing.storage_bytes(value))
    recompute = work_ps
    if in_backward and value.kind in FUSIBLE:
        recompute += traffic
    save = (0 if in_forward else traffic) + (0 if in_backward else traffic)
    if value.side is Side.EITHER:
        save += recompute  # saving means computing it in forward first
    if _is_cast_of_parameter(joint, value):
        source = joint.values[value.inputs[0]]  # no copy of a weight is worth its bytes
        save = recompute + 2 * pricing.traffic_ps(_bytes(source, pricing.sizes))
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


def recompute_ps(joint: JointGraph, value: Value, spec: DeviceSpec, table: CostTable | None = None) -> int:
    """Picoseconds for running the op once, its operands at hand."""
    return int(_Pricing(joint, spec, table, traced_sizes).work_ps(value))


# -- one op


def op_time_us(joint: JointGraph, value: Value, spec: DeviceSpec, sizes: Sizes, table: CostTable | None = None) -> Any:
    """Microseconds for running the op once: a number for traced sizes, a sympy expression for symbolic ones.

    A measured time holds for the traced sizes; at others it scales as the analytic time does.
    """
    measured_us = _measured_us(joint, value, table)
    if measured_us is None:
        return _analytic_us(joint, value, spec, sizes)
    if sizes is traced_sizes or value.kind in _WITHOUT_WORK:
        return measured_us
    there = _analytic_us(joint, value, spec, sizes)
    if not isinstance(there, sympy.Basic):
        return measured_us
    return measured_us * there / float(_analytic_us(joint, value, spec, traced_sizes))


def _measured_us(joint: JointGraph, value: Value, table: CostTable | None) -> float | None:
    key = None if table is None else kernel_key(joint, value)
    return None if table is None or key is None else table.times_us.get(key)


def _analytic_us(joint: JointGraph, value: Value, spec: DeviceSpec, sizes: Sizes) -> Any:
    if value.kind in FUSIBLE:
        return _fusible_us(joint, value, spec, sizes)
    arithmetic_us = matrix_flops(joint, value, sizes) / _rate(joint, value, spec)
    traffic_us = _moved_bytes(joint, value, sizes) / spec.bandwidth_bytes_per_us
    both_us = _longer(arithmetic_us, traffic_us) if spec.overlaps else arithmetic_us + traffic_us
    return both_us + _launch_us(joint.nodes[value.index], spec)


_CONVOLUTIONS = ("convolution", "convolution_backward")


def _rate(joint: JointGraph, value: Value, spec: DeviceSpec) -> float:
    dtype = _dtype_name(joint, value)
    if dtype == "float32" and op_name(joint.nodes[value.index]) in _CONVOLUTIONS:
        return spec.convolution_flops_per_us
    return spec.matmul_flops_per_us.get(dtype, spec.matmul_flops_per_us["float32"])


def _launch_us(node: fx.Node, spec: DeviceSpec) -> float:
    """Of the passes of a convolution - its backward makes one for the input and one for the weight, where they are
    asked for - or of another kernel."""
    name, num_passes = op_name(node), 1
    if name == "convolution_backward":
        asked: Any = node.args[-1]
        num_passes = sum(asked[:2])
    return num_passes * spec.convolution_launch_us if name in _CONVOLUTIONS else spec.launch_us


def _moved_bytes(joint: JointGraph, value: Value, sizes: Sizes) -> Any:
    return sum(_bytes(joint.values[i], sizes) for i in value.inputs) + _result_bytes(joint, value, sizes)


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
    """Floating-point operations of a GEMM, convolution or attention by torch's own table; 0 for ops that it lacks.

    Where its formula does not take these sizes - it compares them, and symbols do not always compare - the arithmetic
    grows as the bytes do, and at traced sizes it is 0: a price is no reason to refuse a step.
    """
    formula = _flop_formula(joint.nodes[value.index])
    if formula is None:
        return 0
    try:
        return _counted(formula, *_flop_arguments(joint, value, sizes))
    except Exception:  # a formula is foreign code: torch's, or whoever registered one for an op of theirs
        if sizes is traced_sizes:
            return 0
    growth = sympy.sympify(_moved_bytes(joint, value, sizes)) / _moved_bytes(joint, value, traced_sizes)
    return matrix_flops(joint, value, traced_sizes) * growth


# Kernels that torch's table lacks: its formulas for the same work, and how many of the operands those take.
_LACKING: Mapping[str, tuple[Callable[..., Any], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}


@dataclass(frozen=True, slots=True)
class _Formula:
    """A formula of torch's table, and what it is called with."""

    count: Callable[..., Any]
    num_operands: int | None  # shapes, by position, and nothing else; None: all arguments
    is_raw: bool = False  # takes tensors where the others take shapes


@dataclass(frozen=True, slots=True)
class _Shaped:
    """As much of a tensor as a raw formula looks at. Without contents it counts each sequence at its full length."""

    shape: tuple[Size, ...]
    device: ClassVar[torch.device] = torch.device("meta")

    def size(self, axis: int) -> Size:
        return self.shape[axis]


def _flop_formula(node: fx.Node) -> _Formula | None:
    if op_name(node) in _LACKING:
        return _Formula(*_LACKING[op_name(node)])
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    # ``register_flop_formula`` wraps what takes shapes and leaves what asks for tensors (``get_raw``) as it is.
    return None if count is None else _Formula(count, None, is_raw=not hasattr(count, "__wrapped__"))


_Arguments = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...], Any]  # positional, by name, the result


def _flop_arguments(joint: JointGraph, value: Value, sizes: Sizes) -> _Arguments:
    """Operands as shapes, the arguments as they are, and the shapes of the result: all of it hashable."""
    node = joint.nodes[value.index]
    formula = _flop_formula(node)
    index = {joint.nodes[i]: i for i in value.inputs}

    def frozen(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            operand = joint.values[index[argument]]
            if operand.kind is OpKind.SYMBOLIC:
                return _number(argument, sizes)
            return _Shaped(sizes(operand)) if formula is not None and formula.is_raw else sizes(operand)
        return tuple(map(frozen, argument)) if isinstance(argument, (list, tuple)) else argument

    if formula is not None and formula.num_operands is not None:
        return tuple(map(frozen, node.args[: formula.num_operands])), (), None
    result = sizes(value) if value.dtype is not None else _part_shapes(joint, value, sizes)
    return tuple(map(frozen, node.args)), tuple((name, frozen(node.kwargs[name])) for name in node.kwargs), result


def _number(node: fx.Node, sizes: Sizes) -> Any:
    """A size that is an operand: ``max_q`` of an attention."""
    number = node.meta["val"]
    if sizes is traced_sizes or not isinstance(number, torch.SymInt):
        return dimension_hint(number)
    return sympy.sympify(number.node.expr)


@functools.lru_cache(maxsize=4096)  # some hundred distinct calls a network; equal layers make thousands of equal ones
def _counted(formula: _Formula, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], result: Any) -> Any:
    if formula.num_operands is not None:
        return formula.count(*args)
    return formula.count(*args, **dict(kwargs), out_val=result)


def _part_shapes(joint: JointGraph, value: Value, sizes: Sizes) -> tuple[tuple[Size, ...] | None, ...]:
    """The shape of each output of an op with several; ``None`` for one that nobody reads."""
    node = joint.nodes[value.index]
    parts = {joint.nodes[user].args[1]: sizes(joint.values[user]) for user in value.users}
    return tuple(parts.get(position) for position in range(len(node.meta["val"])))


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
