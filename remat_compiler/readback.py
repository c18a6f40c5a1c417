"""Allocations: what Inductor's own code allocates and frees, read back from it.

The memory model predicts what Inductor fuses, reorders and computes in place. Once Inductor has compiled a graph
nothing of that is a prediction any more: the wrapper that it writes states every allocation and every release. Here
that wrapper is run on bytes instead of tensors. Two things do not stand in it: the types of what an ATen op returns,
which come from the graph, and what ATen's kernels allocate for themselves, which comes from measurements.

The wrapper is Python (torch/_inductor/codegen/wrapper.py). Whatever in it is not understood - control flow, graph
partitions, the C++ wrapper, a result whose size or type nobody states - makes the whole reading void, and the
prediction stands.
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

from remat_passes.memory import block_bytes, rounded_up
from remat_passes.workspace import (
    ATTENTION,
    GEMMS,
    HALF_PRECISION,
    Convolution,
    Layout,
    attention_backward_bytes,
    attention_bytes,
    convolution_bytes,
    gemm_bytes,
)


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
    at_peak: tuple[tuple[int, str, int], ...] = ()  # what is alive at the peak: its number, what it is, bytes


class _NotUnderstoodError(Exception):
    """The wrapper holds something that this reading does not know."""


@dataclass(frozen=True, slots=True)
class Result:
    """One result of an op."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True, slots=True)
class Signature:
    """What a graph says of itself before Inductor takes it apart."""

    placeholders: tuple[str, ...]
    outputs: tuple[str | None, ...]
    results: Mapping[str, tuple[tuple[Result | None, ...], ...]]  # by op: those of each of its nodes


def signature(module: fx.GraphModule) -> Signature:
    """The names of a graph's inputs and outputs, and the types of what its ops return."""
    (output,) = module.graph.find_nodes(op="output")
    results = torch.utils._pytree.arg_tree_leaves(*output.args)
    return Signature(
        tuple(node.name for node in module.graph.find_nodes(op="placeholder")),
        tuple(node.name if isinstance(node, fx.Node) else None for node in results),
        _results(module),
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
        module = ast.parse(source)
        (call,) = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "call")
        called = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        return _Wrapper(graph, inputs, device_type, called).run(call)
    except (_NotUnderstoodError, SyntaxError, ValueError, LookupError, TypeError, NameError, AttributeError):
        return None


_OP_NAMESPACES = ("torch.ops.", "extern_kernels.", "aten.", "prims.")

# Functions of the wrapper that return memory of their first operand. ``copy_if_misaligned`` stands before the first
# kernel that reads an input on a GPU, and what the allocator hands out is aligned; it copies what starts in the middle
# of a storage at an odd place, which is not known here.
_SHOWS_OPERAND = frozenset({"reinterpret_tensor", "alloc_from_pool", "copy_if_misaligned"})
# Methods of a buffer that write it: a workspace that is cleared, a copy to or from another device.
_WRITING_METHODS = frozenset({"zero_", "copy_", "fill_"})
_ASSERTIONS = frozenset({"assert_size_stride", "assert_alignment"})


@dataclass(frozen=True, slots=True)
class _Parts:
    """The results of an op with several, or a list of arguments: its name in the wrapper keeps all of them alive."""

    storages: Mapping[int, Storage]
    sizes: Mapping[int, int] = field(default_factory=dict)


_Value = Storage | _Parts | int | None


class _Wrapper:
    def __init__(
        self,
        graph: Signature,
        inputs: Mapping[str, Storage | int],
        device_type: str,
        called: Mapping[str, ast.FunctionDef],
    ) -> None:
        self.graph, self.inputs, self.device_type = graph, inputs, device_type
        self.called = called  # the bodies of loops
        self.arguments: list[Storage | int | None] = [inputs[name] for name in graph.placeholders]
        self.block = block_bytes(device_type)
        self.handed: _Parts | None = None  # the list that a body is called with, until it has taken it apart
        self.names: dict[str, Storage | _Parts | None] = {}
        self.layouts: dict[str, Layout] = {}
        self.sizes: dict[str, int] = {}  # symbolic sizes
        taken = (entry.number for entry in inputs.values() if isinstance(entry, Storage))
        self.numbers = itertools.count(1 + max(taken, default=0))
        self.references: dict[int, int] = {}
        self.stated: dict[str, ast.Call] = {}  # what the wrapper says of the sizes of a name
        self.part_names: dict[str, dict[int, str]] = {}  # the names of an op's results, by the name of their tuple
        self.renamed: dict[str, str] = {}
        self.now = self.peak = 0
        # What is alive: an argument by its name, anything else by the kernel that it was first handed to.
        storages = ((name, entry) for name, entry in inputs.items() if isinstance(entry, Storage))
        self.alive: dict[int, tuple[str, int]] = {s.number: (name, s.bytes) for name, s in storages}
        self.unnamed: list[int] = []
        self._record_peak("", 0)
        self.timeline: list[tuple[str, int]] = []
        self.returned: dict[str, Storage] = {}

    def run(self, call: ast.FunctionDef) -> Allocations:
        for function in (call, *self.called.values()):
            self._look_ahead(function)
        results = self._function(call)
        pairs = zip(self.graph.outputs, results, strict=True)
        self.returned = {name: s for name, s in pairs if name is not None and isinstance(s, Storage)}
        return Allocations(tuple(self.timeline), self.peak, self.now, self.returned, self.at_peak)

    def _look_ahead(self, call: ast.FunctionDef) -> None:
        """The wrapper states the size of what an ATen op returns only after it has dropped the op's operands."""
        for node in ast.walk(call):
            match node:
                case ast.Call(func=ast.Name(id="assert_size_stride"), args=[ast.Name(id=name), *_]):
                    self.stated.setdefault(name, node)
                case ast.Assign(
                    targets=[ast.Name(id=part)],
                    value=ast.Subscript(value=ast.Name(id=whole), slice=ast.Constant(value=int() as position)),
                ):
                    self.part_names.setdefault(whole, {})[position] = part
                case ast.Assign(targets=[ast.Name(id=renamed)], value=ast.Name(id=whole)):
                    self.renamed.setdefault(whole, renamed)

    def _function(self, function: ast.FunctionDef) -> list[_Value]:
        """Run the wrapper, or a body that it calls, on ``arguments``; its results keep what is theirs alive."""
        self.results: list[_Value] = []
        self._block(function.body)
        kept = _Parts(dict(enumerate(s for s in self.results if isinstance(s, Storage))))
        self._hold(kept)
        for name in list(self.names):
            self._release(self.names.pop(name))
        return self.results

    def _call_body(self, name: str, value: ast.Call) -> None:
        """A body takes the list of its arguments apart, so that nothing else keeps them alive."""
        (listed,) = (argument.id for argument in value.args if isinstance(argument, ast.Name))
        handed = self.names.pop(listed)
        outside, self.names = self.names, {}
        if not isinstance(handed, _Parts):
            raise _NotUnderstoodError(ast.unparse(value))
        count = len(handed.storages) + len(handed.sizes)
        entries: dict[int, Storage | int] = {**handed.storages, **handed.sizes}
        self.arguments = [entries[place] for place in range(count)]
        self.handed = handed
        assert isinstance(value.func, ast.Name)
        results = self._function(self.called[value.func.id])
        self.names = outside
        parts = _Parts({at: result for at, result in enumerate(results) if isinstance(result, Storage)})
        self._bind(name, parts)
        self._release(parts)  # the hold of the function that returned them

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
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=function)) as call) if (
                function in self.called
            ):
                self._call_body(name, call)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value)
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
        if len(targets) != len(self.arguments):
            raise _NotUnderstoodError("other arguments than the graph has")
        for element, argument in zip(targets, self.arguments, strict=True):
            if not isinstance(element, ast.Name):
                raise _NotUnderstoodError(ast.unparse(element))
            self._bind(element.id, argument)
        if self.handed is not None:
            self._release(self.handed)
            self.handed = None

    def _assign(self, name: str, value: ast.expr) -> None:
        layout = self._layout(value)
        if isinstance(value, ast.Call) and _is_op(value):
            self._bind(name, self._op(name, value))
        else:
            self._bind(name, self._result(value))
        if layout is not None:
            self.layouts[name] = layout

    def _bind(self, name: str, value: _Value) -> None:
        old = self.names.pop(name, None)
        if isinstance(value, int):
            self.sizes[name] = value
            return
        self.names[name] = value
        self._hold(value)
        self._release(old)

    def _hold(self, value: Storage | _Parts | None) -> None:
        for storage in _storages(value):
            self.references[storage.number] = self.references.get(storage.number, 0) + 1

    def _drop(self, target: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            raise _NotUnderstoodError(ast.unparse(target))
        self._release(self.names.pop(target.id, None))

    def _release(self, value: Storage | _Parts | None) -> None:
        for storage in _storages(value):
            self.references[storage.number] -= 1
            if not self.references[storage.number] and not storage.is_held:
                self.now -= storage.bytes
                self.alive.pop(storage.number, None)

    def _allocate(self, num_bytes: int, dtype: torch.dtype) -> Storage:
        rounded = rounded_up(num_bytes, self.block)
        storage = Storage(next(self.numbers), rounded, dtype)
        self.now += rounded
        self.alive[storage.number] = ("a buffer", rounded)
        self.unnamed.append(storage.number)
        if self.now > self.peak:
            self._record_peak("", 0)
        return storage

    # -- expressions

    def _result(self, value: ast.expr) -> _Value:
        match value:
            case ast.Name(id=name):
                return self._named(name)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int() as position)):
                whole = self.names[name]
                return whole.storages.get(position) if isinstance(whole, _Parts) else whole
            case ast.Call(func=ast.Name(id=function), args=[base, *_]) if function in _SHOWS_OPERAND:
                return self._result(base)
            case ast.Call(func=ast.Attribute(value=base, attr="as_strided")):  # of a buffer that is padded in place
                return self._result(base)
            case ast.Call(func=ast.Name(id=function)) if function.startswith("empty_strided_"):
                return self._empty(value, function.removeprefix("empty_strided_"))
            case ast.Call(func=ast.Name(id="get_raw_stream")) | ast.Constant():
                return None
            case ast.List(elts=elements):
                return self._listed([self._result(element) for element in elements])
            case ast.BinOp(left=ast.List(elts=[ast.Constant(value=None)])):
                return None
            case ast.Attribute() | ast.BinOp() | ast.Call():
                return self._size(value)
        raise _NotUnderstoodError(ast.unparse(value))

    def _listed(self, values: Sequence[_Value]) -> _Parts:
        storages = {at: value for at, value in enumerate(values) if isinstance(value, Storage)}
        sizes = {at: value for at, value in enumerate(values) if isinstance(value, int)}
        if len(storages) + len(sizes) != len(values):
            raise _NotUnderstoodError("a list of other things than tensors and sizes")
        return _Parts(storages, sizes)

    def _named(self, name: str) -> _Value:
        return self.sizes[name] if name in self.sizes else self.names[name]

    def _size(self, value: ast.expr) -> int:
        """A size: a number, or arithmetic on symbolic sizes."""
        compiled = compile(ast.Expression(value), "<wrapper>", "eval")
        size = eval(compiled, {"__builtins__": {}, "min": min, "max": max}, dict(self.sizes))
        if not isinstance(size, int):
            raise _NotUnderstoodError(ast.unparse(value))
        return size

    def _sizes(self, value: ast.expr) -> tuple[int, ...]:
        if not isinstance(value, ast.Tuple):
            raise _NotUnderstoodError(ast.unparse(value))
        return tuple(self._size(element) for element in value.elts)

    def _layout(self, value: ast.expr) -> Layout | None:
        """Sizes and strides of a tensor, where the wrapper has said them."""
        match value:
            case ast.Name(id=name) if name in self.layouts:
                return self.layouts[name]
            case ast.Name(id=name) if name in self.stated:
                return self._stated_layout(self.stated[name])
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[_, size, stride, *_]):
                return Layout(self._sizes(size), self._sizes(stride))
            case ast.Call(func=ast.Name(id=function), args=[size, stride, *_]) if function.startswith("empty_strided_"):
                return Layout(self._sizes(size), self._sizes(stride))
            case ast.Call(func=ast.Attribute(attr="as_strided"), args=[size, stride, *_]):
                return Layout(self._sizes(size), self._sizes(stride))
            case ast.Call(func=ast.Name(id="alloc_from_pool"), args=[_, _, _, size, stride]):
                return Layout(self._sizes(size), self._sizes(stride))
            case ast.Call(func=ast.Name(id="copy_if_misaligned"), args=[base]):
                return self._layout(base)
        return None

    def _stated_layout(self, statement: ast.Call) -> Layout:
        _, size, stride, *_ = statement.args
        return Layout(self._sizes(size), self._sizes(stride))

    def _empty(self, call: ast.Call, device: str) -> Storage:
        size, stride, dtype = call.args[:3]
        kind = getattr(torch, ast.unparse(dtype).removeprefix("torch."))
        extent = Layout(self._sizes(size), self._sizes(stride)).extent
        return self._allocate(extent * kind.itemsize if device == self.device_type else 0, kind)

    # -- ops of ATen

    def _op(self, name: str, call: ast.Call) -> Storage | _Parts | None:
        """What an op returns: an operand that it has written or shows, or new results."""
        out = next((word.value for word in call.keywords if word.arg == "out"), None)
        shown = out if out is not None else _shown_operand(call)
        if shown is not None:
            self._kernel(call)
            value = self._result(shown)
            if isinstance(value, int):
                raise _NotUnderstoodError(ast.unparse(call))
            return value
        statement = self.stated.get(name) or self.stated.get(self.renamed.get(name, ""))
        if statement is not None:
            [(_, storage)] = self._allocate_results(call, {0: statement})
            self._kernel(call, storage)
            return storage
        part_names = self.part_names.get(name, {})
        stated = {position: self.stated[part] for position, part in part_names.items() if part in self.stated}
        if not stated or len(stated) < len(part_names):
            raise _NotUnderstoodError(f"the sizes of {name}")
        storages = self._allocate_results(call, stated)
        self._kernel(call, *(storage for _, storage in storages))
        return _Parts(dict(storages))

    def _allocate_results(self, call: ast.Call, stated: Mapping[int, ast.Call]) -> list[tuple[int, Storage]]:
        """Allocate what an op returns; the graph knows the types, and results that the wrapper does not look at."""
        layouts = {position: self._stated_layout(statement) for position, statement in stated.items()}
        found = self._matching_results(_op_name(call, stated), layouts)
        if found is None:
            dtypes = {storage.dtype for storage in self._operands(call)}
            if len(dtypes) != 1:
                raise _NotUnderstoodError(f"the type of {ast.unparse(call)}")
            dtype = dtypes.pop()
            return [(at, self._allocate(layout.extent * dtype.itemsize, dtype)) for at, layout in layouts.items()]
        allocated = []
        for at, result in enumerate(found):
            if result is None:
                continue
            extent = layouts[at].extent if at in layouts else math.prod(result.shape)
            counts = result.device_type == self.device_type
            allocated.append((at, self._allocate(extent * result.dtype.itemsize if counts else 0, result.dtype)))
        return allocated

    def _matching_results(self, op: str, layouts: Mapping[int, Layout]) -> tuple[Result | None, ...] | None:
        """What the graph's op with these shapes returns; ``None`` where the graph has no such op."""
        found = {
            results
            for results in self.graph.results.get(op, ())
            if all(at < len(results) and _has_shape(results[at], layout) for at, layout in layouts.items())
        }
        exact = {results for results in found if sum(result is not None for result in results) == len(layouts)}
        found = exact or found
        if len(found) > 1:
            raise _NotUnderstoodError(f"which {op} it is")
        return found.pop() if found else None

    def _operands(self, call: ast.Call) -> Iterator[Storage]:
        for node in ast.walk(call):
            if isinstance(node, ast.Name):
                yield from _storages(self.names.get(node.id))

    # -- kernels

    def _run(self, call: ast.Call) -> None:
        name = ast.unparse(call.func)
        if name in _ASSERTIONS or name.startswith(("args.", "torch.cuda.")):
            return
        is_kernel = isinstance(call.func, ast.Name) or name.endswith(".run") or _is_op(call)
        if not (is_kernel or self._writes_buffer(call)):
            raise _NotUnderstoodError(name)
        self._kernel(call)

    def _writes_buffer(self, call: ast.Call) -> bool:
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr=method):
                return name in self.names and method in _WRITING_METHODS
        return False

    def _kernel(self, call: ast.Call, *results: Storage) -> None:
        name = ast.unparse(call.func).removeprefix("extern_kernels.")
        workspace = self._workspace_bytes if self.device_type == "cpu" else self._gpu_workspace_bytes
        workspace_bytes = workspace(call, results)
        for number in self.unnamed:
            if number in self.alive:
                self.alive[number] = (f"a buffer of {name}", self.alive[number][1])
        self.unnamed.clear()
        if self.now + workspace_bytes >= self.peak:
            self._record_peak(name, workspace_bytes)
        self.timeline.append((name, self.now + workspace_bytes))

    def _record_peak(self, kernel: str, workspace_bytes: int) -> None:
        self.peak = self.now + workspace_bytes
        workspace = ((-1, f"workspace of {kernel}", workspace_bytes),) if workspace_bytes else ()
        self.at_peak = (*((number, *entry) for number, entry in self.alive.items()), *workspace)

    def _workspace_bytes(self, call: ast.Call, results: Sequence[Storage]) -> int:
        """What ATen and oneDNN allocate for themselves on CPU while they run."""
        op, threads = _short_name(call), torch.get_num_threads()
        storages = [*self._operands(call), *results]
        if op in ("convolution", "convolution_backward"):
            count = 3 if op.endswith("backward") else 2
            layouts = [self._known_layout(operand) for operand in call.args[:count]]
            dtype = results[0].dtype
            output_numel = layouts[0].numel if len(layouts) == 3 else results[0].bytes // dtype.itemsize
            return convolution_bytes(layouts, output_numel, dtype, threads, _convolution(call, count))
        if op == ATTENTION:
            query, key = (self._known_layout(operand) for operand in call.args[:2])
            return attention_bytes(query, key, results[0].dtype, threads)
        if op == f"{ATTENTION}_backward":
            gradient, query, key = (self._known_layout(operand) for operand in call.args[:3])
            return attention_backward_bytes(gradient, query, key, results[0].dtype, threads)
        if op in GEMMS and any(storage.dtype in HALF_PRECISION for storage in storages):
            rows = self._layout(call.args[1 if op in ("addmm", "baddbmm") else 0])
            row = None if rows is None else rows.sizes[-1]
            return gemm_bytes(row, max(storage.bytes for storage in storages), threads)
        return 0

    def _gpu_workspace_bytes(self, call: ast.Call, results: Sequence[Storage]) -> int:
        """What flash attention allocates in backward; what other libraries take on a GPU is not known here."""
        if _short_name(call) != FLASH_BACKWARD:
            return 0
        gradient, query, key = (self._known_layout(operand) for operand in call.args[:3])
        parts = flash_backward_parts(gradient, query, key, results[0].dtype)
        return sum(rounded_up(part_bytes, self.block) for part_bytes in parts)

    def _known_layout(self, operand: ast.expr) -> Layout:
        layout = self._layout(operand)
        if layout is None:
            raise _NotUnderstoodError(f"the layout of {ast.unparse(operand)}")
        return layout

    def _return(self, value: ast.expr | None) -> None:
        elements = value.elts if isinstance(value, ast.Tuple) else []
        self.results = [None if isinstance(e, ast.Constant) else self._result(e) for e in elements]


def _convolution(call: ast.Call, num_operands: int) -> Convolution:
    """What a convolution is told, which its call in the code states by place or, but for the bias, by name."""
    named = [keyword.value for keyword in call.keywords if keyword.arg != "bias"]
    told = [*call.args[num_operands + 1 :], *named]
    try:
        return Convolution.of([ast.literal_eval(argument) for argument in told])
    except ValueError:
        raise _NotUnderstoodError(f"what {ast.unparse(call)} is told") from None


FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"


def flash_backward_parts(gradient: Layout, query: Layout, key: Layout, dtype: torch.dtype) -> tuple[int, ...]:
    """The blocks that the backward of flash attention on a GPU allocates besides its results, in bytes.

    The operands are (batch, heads, tokens, size of a head). For each row of queries a sum, and the gradient of the
    queries in fp32, both for whole blocks of rows; where heads share keys, the gradients of keys and values for each
    head; and a copy of the incoming gradient where the heads of a token do not stand together. Read in the source
    (aten/src/ATen/native/transformers/cuda, ``mha_bwd`` of flash_attn/flash_api.cpp, and attention_backward.cu).
    """
    batch, heads, tokens, size = query.sizes
    rows = rounded_up(tokens, 128)
    head = rounded_up(size, 32 if size <= 128 else 64)
    sums, accumulated = 4 * batch * heads * rows, 4 * batch * heads * rows * head
    expanded = batch * heads * key.sizes[2] * size * dtype.itemsize if key.sizes[1] != heads else 0
    copied = gradient.numel * dtype.itemsize if gradient.strides[1] > gradient.strides[2] else 0
    return sums, accumulated, expanded, expanded, copied


def _storages(value: Storage | _Parts | None) -> tuple[Storage, ...]:
    if isinstance(value, _Parts):
        return tuple(value.storages.values())
    return () if value is None else (value,)


def _is_op(call: ast.Call) -> bool:
    return ast.unparse(call.func).startswith(_OP_NAMESPACES)


def _short_name(call: ast.Call) -> str:
    """``mm`` of ``extern_kernels.mm`` and of ``torch.ops.aten.mm.out``."""
    parts = ast.unparse(call.func).removeprefix("torch.ops.").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _op_name(call: ast.Call, stated: Mapping[int, ast.Call]) -> str:
    """The op as the graph names it; the statement of a size says it too, as its last argument."""
    for statement in stated.values():
        match statement.args[3:]:
            case [ast.Constant(value=str() as op)]:
                return op
    name = ast.unparse(call.func)
    return name if name.startswith("torch.ops.") else f"torch.ops.{name.replace('extern_kernels.', 'aten.')}"


def _shown_operand(call: ast.Call) -> ast.expr | None:
    """The operand whose memory an op returns, as its schema says: a view, or a change in place."""
    path = ast.unparse(call.func).removeprefix("torch.ops.").split(".")
    if path[0] == "extern_kernels" or len(path) != 3:
        return None
    op: Any = getattr(getattr(getattr(torch.ops, path[0]), path[1]), path[2])
    if len(op._schema.returns) != 1 or op._schema.returns[0].alias_info is None:
        return None
    for argument, value in zip(op._schema.arguments, call.args, strict=False):
        if argument.alias_info is not None:
            return value
    return None


def _has_shape(result: Result | None, layout: Layout) -> bool:
    return result is not None and result.shape == layout.sizes


def _results(module: fx.GraphModule) -> dict[str, tuple[tuple[Result | None, ...], ...]]:
    """What the graph's ops return, and those of the graphs that it calls: by op, of each of its nodes."""
    found: dict[str, list[tuple[Result | None, ...]]] = {}
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        if node.op != "call_function":
            continue
        results: Any = node.meta.get("val")
        several = results if isinstance(results, (tuple, list)) else [results]
        found.setdefault(f"torch.ops.{node.target}", []).append(tuple(_result(entry) for entry in several))
    return {op: tuple(results) for op, results in found.items()}


def _result(tensor: Any) -> Result | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    return Result(tuple(_hint(size) for size in tensor.shape), tensor.dtype, tensor.device.type)


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
        self.entered: frozenset[int] = frozenset()  # the storages that backward starts with

    def read(self, source: str, graph: Signature, inputs: Sequence[Any], *, is_backward: bool) -> None:
        """Take one compiled graph: its wrapper, and what it was compiled for."""
        arguments = dict(zip(graph.placeholders, inputs, strict=True))
        if not is_backward:
            numbered = enumerate(arguments.items())
            self.primals = {name: _held(number, value, self.device_type) for number, (name, value) in numbered}
            self.user_outputs = graph.outputs[: self.num_forward_outputs]
            self.forward = read_allocations(source, graph, self.primals, self.device_type)
        elif self.forward is not None:
            entering = self._entering(self.forward, arguments)
            if entering is not None:
                self.entered = frozenset(entry.number for entry in entering.values() if isinstance(entry, Storage))
                self.backward = read_allocations(source, graph, entering, self.device_type)

    def peak_bytes(self, baseline_bytes: int) -> int | None:
        """The step's peak with what was allocated before it; ``None`` where a graph was not understood."""
        if self.forward is None or self.backward is None:
            return None
        started = self.forward.final_bytes + self.entering_bytes
        return baseline_bytes + max(self.forward.peak_bytes, started + self.backward.peak_bytes)

    def peak_values(self, baseline_bytes: int) -> tuple[tuple[str, int], ...]:
        """What ``peak_bytes`` is made of, largest first; nothing where a graph was not understood.

        Saved values have the names of the graph, what a kernel has allocated is called after it. What was there before
        the step is one entry.
        """
        if self.forward is None or self.backward is None:
            return ()
        parts = [("parameters, buffers and inputs", baseline_bytes)]
        is_backward = self.peak_bytes(0) != self.forward.peak_bytes
        own = {entry.number for entry in self.primals.values() if isinstance(entry, Storage)}
        at_peak = self.backward.at_peak if is_backward else self.forward.at_peak
        parts += [(name, size) for number, name, size in at_peak if number not in own]
        if is_backward:  # outputs that backward does not read are alive beside it
            entered = own | self.entered
            outputs = {s.number: (name, s.bytes) for name, s in self.forward.returned.items()}
            parts += [entry for number, entry in outputs.items() if number not in entered]
        return tuple(sorted((part for part in parts if part[1]), key=lambda part: (-part[1], part[0])))

    def _entering(self, forward: Allocations, arguments: Mapping[str, Any]) -> dict[str, Storage | int] | None:
        """What backward starts with: saved values are its own to free, the caller's tensors are not."""
        outputs = {forward.returned[name].number for name in self.user_outputs if name and name in forward.returned}
        numbers = itertools.count(1 + max((s.number for s in forward.returned.values()), default=len(self.primals)))
        entering: dict[str, Storage | int] = {}
        for name, value in arguments.items():
            if name in forward.returned:  # of an input that a convolution reads it is a copy in another layout
                saved = forward.returned[name]
                entering[name] = replace(saved, is_held=saved.is_held or saved.number in outputs)
            elif name in self.primals:
                entering[name] = self.primals[name]
            elif isinstance(value, torch.Tensor) and "tangents" in name:
                # Of a scalar loss it is made by Tensor.backward, which holds it to the end.
                tangent = replace(_tensor(next(numbers), value, self.device_type), is_held=value.dim() == 0)
                self.entering_bytes += tangent.bytes
                entering[name] = tangent
            elif isinstance(value, (int, torch.SymInt)):
                entering[name] = _hint(value)
            else:
                return None
        return entering


def _held(number: int, value: Any, device_type: str) -> Storage | int:
    return _tensor(number, value, device_type) if isinstance(value, torch.Tensor) else _hint(value)


def _tensor(number: int, tensor: torch.Tensor, device_type: str) -> Storage:
    """What is there before the graph, as the device's allocator has rounded it; nothing of another device."""
    num_bytes = math.prod(_hint(size) for size in tensor.shape) * tensor.dtype.itemsize
    counts = tensor.device.type == device_type
    rounded = rounded_up(num_bytes, block_bytes(device_type)) if counts else 0
    return Storage(number, rounded, tensor.dtype, is_held=True)
