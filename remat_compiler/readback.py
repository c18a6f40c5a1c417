"""Allocations: what Inductor's own code allocates and frees, read back from it.

The memory model predicts what Inductor fuses, reorders and computes in place. Once Inductor has compiled a graph
nothing of that is a prediction any more: the wrapper that it writes states every allocation and every release. Here
that wrapper is run on bytes instead of tensors. What ATen's kernels allocate for themselves does not stand in it, so
those come from the table of the memory model (``remat_passes.memory.CPU_WORKSPACE``).

The wrapper is Python (torch/_inductor/codegen/wrapper.py). Whatever in it is not understood - control flow, graph
partitions, the C++ wrapper - makes the whole reading void, and the prediction stands.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from remat_passes.memory import BLOCK_BYTES, CPU_WORKSPACE, GEMMS, HALF_PRECISION


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory. ``is_held`` marks what the caller keeps alive, whatever the wrapper drops."""

    number: int
    bytes: int
    dtype: torch.dtype
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class Allocations:
    """One compiled graph on bytes: how much more than at its start is allocated, kernel by kernel."""

    timeline: tuple[tuple[str, int], ...]  # kernel, bytes above the start while it runs
    peak_bytes: int
    final_bytes: int  # of what it returns, less what of its arguments it has freed
    returned: Mapping[str, Storage]  # by the name of the graph's output node


class _NotUnderstoodError(Exception):
    """The wrapper holds something that this reading does not know."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a graph says of itself before Inductor takes it apart."""

    placeholders: tuple[str, ...]
    outputs: tuple[str | None, ...]
    dtypes: Mapping[tuple[str, int | None, tuple[int, ...]], torch.dtype]  # of results, by op, position and shape


def signature(module: fx.GraphModule) -> Signature:
    """The names of a graph's inputs and outputs, and the types of what its ops return."""
    (output,) = module.graph.find_nodes(op="output")
    results = torch.utils._pytree.arg_tree_leaves(*output.args)
    return Signature(
        tuple(node.name for node in module.graph.find_nodes(op="placeholder")),
        tuple(node.name if isinstance(node, fx.Node) else None for node in results),
        _result_dtypes(module),
    )


def read_allocations(
    source: str, graph: Signature, inputs: Mapping[str, Storage | int], device_type: str
) -> Allocations | None:
    """Run a wrapper on bytes; ``None`` where it is not understood.

    Args:
        source: what Inductor wrote.
        graph: the graph that it compiled.
        inputs: the storage of each placeholder, or its number where it is a size; storages that are not held are freed
            when the wrapper drops them.
        device_type: the device whose bytes count.
    """
    try:
        (call,) = (
            node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "call"
        )
        return _Wrapper(graph, inputs, device_type).run(call)
    except (_NotUnderstoodError, SyntaxError, ValueError, KeyError, TypeError, NameError, AttributeError):
        return None


@dataclass(slots=True)
class _Pending:
    """The result of an ATen op until the wrapper states its size; ``parts`` where it has several."""

    op: str
    operands: tuple[Storage, ...]
    position: int | None = None
    parts: dict[int, Storage] = field(default_factory=dict)


_OP_NAMESPACES = ("torch.ops.", "extern_kernels.", "aten.", "prims.")


class _Wrapper:
    def __init__(self, graph: Signature, inputs: Mapping[str, Storage | int], device_type: str) -> None:
        self.graph, self.inputs, self.device_type = graph, inputs, device_type
        self.block = BLOCK_BYTES.get(device_type, BLOCK_BYTES["cuda"])
        self.names: dict[str, Storage | _Pending | None] = {}
        self.sizes: dict[str, int] = {}  # symbolic sizes
        taken = (entry.number for entry in inputs.values() if isinstance(entry, Storage))
        self.numbers = itertools.count(1 + max(taken, default=0))
        self.references: dict[int, int] = {}
        self.now = self.peak = 0
        self.timeline: list[tuple[str, int]] = []
        self.returned: dict[str, Storage] = {}

    def run(self, call: ast.FunctionDef) -> Allocations:
        self._block(call.body)
        return Allocations(tuple(self.timeline), self.peak, self.now, self.returned)

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.With(body=body):
                self._block(body)
            case ast.Assign(targets=[ast.Name(id="args")]) | ast.Pass() | ast.Assert():
                pass
            case ast.Assign(targets=[target], value=ast.Name(id="args")):
                self._bind_arguments(target)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._bind(name, self._result(value))
            case ast.Delete(targets=targets):
                for target in targets:
                    self._drop(target)
            case ast.Expr(value=ast.Call() as call):
                self._run(call)
            case ast.Return(value=value):
                self._return(value)
            case _:
                raise _NotUnderstoodError(ast.unparse(statement))

    # -- names and storages

    def _bind_arguments(self, target: ast.expr) -> None:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        if len(targets) != len(self.graph.placeholders):
            raise _NotUnderstoodError("other arguments than the graph has")
        for element, placeholder in zip(targets, self.graph.placeholders, strict=True):
            if not isinstance(element, ast.Name):
                raise _NotUnderstoodError(ast.unparse(element))
            self._bind(element.id, self.inputs[placeholder])

    def _bind(self, name: str, value: Storage | _Pending | int | None) -> None:
        old = self.names.pop(name, None)
        if isinstance(value, int):
            self.sizes[name] = value
            return
        self.names[name] = value
        if isinstance(value, Storage):
            self.references[value.number] = self.references.get(value.number, 0) + 1
        if isinstance(old, Storage):
            self._release(old)

    def _drop(self, target: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            raise _NotUnderstoodError(ast.unparse(target))
        storage = self.names.pop(target.id, None)
        if isinstance(storage, Storage):
            self._release(storage)

    def _release(self, storage: Storage) -> None:
        self.references[storage.number] -= 1
        if not self.references[storage.number] and not storage.is_held:
            self.now -= storage.bytes

    def _allocate(self, num_bytes: int, dtype: torch.dtype) -> Storage:
        rounded = -(-num_bytes // self.block) * self.block
        self.now += rounded
        self.peak = max(self.peak, self.now)
        return Storage(next(self.numbers), rounded, dtype)

    # -- expressions

    def _result(self, value: ast.expr) -> Storage | _Pending | int | None:
        match value:
            case ast.Name(id=name):
                return self._named(name)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int() as position)):
                whole = self.names[name]
                return _Pending(whole.op, whole.operands, position) if isinstance(whole, _Pending) else whole
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[base, *_]):
                return self._result(base)
            case ast.Call(func=ast.Name(id=function)) if function.startswith("empty_strided_"):
                return self._empty(value, function.removeprefix("empty_strided_"))
            case ast.Call(func=function) if ast.unparse(function).startswith(_OP_NAMESPACES):
                return self._extern(value)
            case ast.Call(func=ast.Name(id="get_raw_stream")) | ast.Constant():
                return None
            case ast.Attribute() | ast.BinOp() | ast.Call():
                return self._size(value)
        raise _NotUnderstoodError(ast.unparse(value))

    def _named(self, name: str) -> Storage | _Pending | int | None:
        return self.sizes[name] if name in self.sizes else self.names[name]

    def _size(self, value: ast.expr) -> int:
        """A size: a number, or arithmetic on symbolic sizes."""
        compiled = compile(ast.Expression(value), "<wrapper>", "eval")
        size = eval(compiled, {"__builtins__": {}, "min": min, "max": max}, dict(self.sizes))
        if not isinstance(size, int):
            raise _NotUnderstoodError(ast.unparse(value))
        return size

    def _sizes(self, value: ast.expr) -> list[int]:
        if not isinstance(value, ast.Tuple):
            raise _NotUnderstoodError(ast.unparse(value))
        return [self._size(element) for element in value.elts]

    def _extent(self, size: ast.expr, stride: ast.expr) -> int:
        sizes, strides = self._sizes(size), self._sizes(stride)
        return 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if math.prod(sizes) else 0

    def _empty(self, call: ast.Call, device: str) -> Storage:
        size, stride, dtype = call.args[:3]
        kind = getattr(torch, ast.unparse(dtype).removeprefix("torch."))
        counts = device == self.device_type
        return self._allocate(self._extent(size, stride) * kind.itemsize if counts else 0, kind)

    def _extern(self, call: ast.Call) -> Storage | _Pending:
        name = ast.unparse(call.func)
        operands = tuple(self._operands(call))
        out = next((word.value for word in call.keywords if word.arg == "out"), None)
        if out is not None:
            storage = self._result(out)
            if isinstance(storage, Storage):
                return storage
        return _Pending(name, operands)

    def _operands(self, call: ast.Call) -> Iterator[Storage]:
        for node in ast.walk(call):
            if isinstance(node, ast.Name):
                storage = self.names.get(node.id)
                if isinstance(storage, Storage):
                    yield storage

    # -- kernels

    def _run(self, call: ast.Call) -> None:
        name = ast.unparse(call.func)
        if name == "assert_size_stride":
            self._state_size(call)
        elif isinstance(call.func, ast.Name) or name.endswith(".run") or name.startswith(_OP_NAMESPACES):
            self._kernel(name.removeprefix("extern_kernels."), tuple(self._operands(call)))
        elif not name.startswith(("args.", "torch.cuda.")):
            raise _NotUnderstoodError(name)

    def _state_size(self, call: ast.Call) -> None:
        """The wrapper states the size of what an ATen op has returned; only now it is known what it allocated."""
        target, size, stride = call.args[:3]
        pending = self.names.get(target.id) if isinstance(target, ast.Name) else None
        if not isinstance(pending, _Pending) or not isinstance(target, ast.Name):
            return
        shape = tuple(self._sizes(size))
        own = pending.operands[0].dtype if pending.operands else torch.float32
        dtype = self.graph.dtypes.get((pending.op, pending.position, shape), own)
        storage = self._allocate(self._extent(size, stride) * dtype.itemsize, dtype)
        self.names[target.id] = storage
        self.references[storage.number] = 1
        self._kernel(pending.op, (*pending.operands, storage))

    def _kernel(self, name: str, touched: tuple[Storage, ...]) -> None:
        highest = self.now + self._workspace_bytes(name, touched)
        self.peak = max(self.peak, highest)
        self.timeline.append((name, highest))

    def _workspace_bytes(self, name: str, touched: tuple[Storage, ...]) -> int:
        """What ATen allocates for itself while it runs, as the memory model has it."""
        if self.device_type != "cpu":
            return 0
        op = name.removeprefix("torch.ops.").split(".")
        short = op[1] if len(op) > 1 else op[0]
        multiple = CPU_WORKSPACE.get(short, 0)
        if short in GEMMS and any(storage.dtype in HALF_PRECISION for storage in touched):
            multiple = 1
        return multiple * max((storage.bytes for storage in touched), default=0)

    def _return(self, value: ast.expr | None) -> None:
        elements = value.elts if isinstance(value, ast.Tuple) else []
        results = [None if isinstance(e, ast.Constant) else self._result(e) for e in elements]
        kept = {storage.number for storage in results if isinstance(storage, Storage)}
        alive = {s.number: s for s in self.names.values() if isinstance(s, Storage) and not s.is_held}
        self.now -= sum(storage.bytes for number, storage in alive.items() if number not in kept)
        pairs = zip(self.graph.outputs, results, strict=True)
        self.returned = {name: s for name, s in pairs if name is not None and isinstance(s, Storage)}


def _result_dtypes(module: fx.GraphModule) -> dict[tuple[str, int | None, tuple[int, ...]], torch.dtype]:
    """The types of what the graph's ops return, by op, position and shape."""
    found: dict[tuple[str, int | None, tuple[int, ...]], torch.dtype] = {}
    for node in module.graph.nodes:
        results: Any = node.meta.get("val")
        if node.op != "call_function":
            continue
        single = not isinstance(results, (tuple, list))
        for position, result in enumerate([results] if single else results):
            if isinstance(result, torch.Tensor):
                shape = tuple(_hint(size) for size in result.shape)
                found[f"torch.ops.{node.target}", None if single else position, shape] = result.dtype
    return found


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else -1


class StepReader:
    """Reads back the forward and the backward of one step, as Inductor compiles them one after the other.

    ``peak_bytes(baseline_bytes)`` is known once both were compiled and understood.
    """

    def __init__(self, device_type: str, num_forward_outputs: int) -> None:
        self.device_type, self.num_forward_outputs = device_type, num_forward_outputs
        self.forward: Allocations | None = None
        self.backward: Allocations | None = None
        self.primals: dict[str, Storage | int] = {}
        self.user_outputs: tuple[str | None, ...] = ()
        self.entering_bytes = 0  # tangents

    def read(self, source: str, graph: Signature, inputs: Sequence[Any], *, is_backward: bool) -> None:
        """Take one compiled graph: its wrapper, and what it was compiled for."""
        arguments = dict(zip(graph.placeholders, inputs, strict=True))
        if not is_backward:
            self.primals = {name: _held(number, value) for number, (name, value) in enumerate(arguments.items())}
            self.user_outputs = graph.outputs[: self.num_forward_outputs]
            self.forward = read_allocations(source, graph, self.primals, self.device_type)
        elif self.forward is not None:
            entering = self._entering(self.forward, arguments)
            if entering is not None:
                self.backward = read_allocations(source, graph, entering, self.device_type)

    def peak_bytes(self, baseline_bytes: int) -> int | None:
        """The step's peak with what was allocated before it; ``None`` where a graph was not understood."""
        if self.forward is None or self.backward is None:
            return None
        started = self.forward.final_bytes + self.entering_bytes
        return baseline_bytes + max(self.forward.peak_bytes, started + self.backward.peak_bytes)

    def _entering(self, forward: Allocations, arguments: Mapping[str, Any]) -> dict[str, Storage | int] | None:
        """What backward starts with: saved values are its own to free, the caller's tensors are not."""
        outputs = {forward.returned[name].number for name in self.user_outputs if name and name in forward.returned}
        numbers = itertools.count(1 + max((s.number for s in forward.returned.values()), default=len(self.primals)))
        entering: dict[str, Storage | int] = {}
        for name, value in arguments.items():
            if name in self.primals:
                entering[name] = self.primals[name]
            elif name in forward.returned:
                saved = forward.returned[name]
                entering[name] = replace(saved, is_held=saved.is_held or saved.number in outputs)
            elif isinstance(value, torch.Tensor) and "tangents" in name:
                # Of a scalar loss it is made by Tensor.backward, which holds it to the end.
                tangent = replace(_tensor(next(numbers), value), is_held=value.dim() == 0)
                self.entering_bytes += tangent.bytes
                entering[name] = tangent
            elif isinstance(value, (int, torch.SymInt)):
                entering[name] = _hint(value)
            else:
                return None
        return entering


def _held(number: int, value: Any) -> Storage | int:
    return _tensor(number, value) if isinstance(value, torch.Tensor) else _hint(value)


def _tensor(number: int, tensor: torch.Tensor) -> Storage:
    numel = math.prod(_hint(size) for size in tensor.shape)
    return Storage(number, numel * tensor.dtype.itemsize, tensor.dtype, is_held=True)
