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
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from remat_passes.memory import BLOCK_BYTES, GEMMS, HALF_PRECISION

# What oneDNN's GEMMs in half precision allocate for each thread, at most: blocks of the operands in the order of its
# instructions, never more than the largest operand. Measured with torch 2.13.0 over 40 shapes of up to 16 MiB on a CPU
# with AVX512_BF16: up to 1.68 MiB; while rows are short enough to stay whole, 0.06 MiB and up to 0.66 KiB an element.
GEMM_BUFFER_BYTES = 2 * 2**20
GEMM_WHOLE_ROW = 512
GEMM_ROW_BUFFER_BYTES, GEMM_ELEMENT_BUFFER_BYTES = 2**16, 2**10
# The types whose convolutions oneDNN computes; others go through columns (aten/src/ATen/native/ConvolutionMM2d.cpp).
ONEDNN_CONVOLUTION = (torch.float32, torch.bfloat16)
# How ATen's attention on CPU cuts its work: rows of queries, by the fewest tokens, and columns of keys
# (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, ``qSplitSize`` and ``kvSplitSize``).
ATTENTION_ROWS = ((768, 256), (192, 64), (0, 32))
ATTENTION_COLUMNS = 512
# What the GEMMs inside of it allocate for each thread in half precision: 0.02 to 0.23 MiB over 11 shapes.
ATTENTION_GEMM_BYTES = 2**18
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


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
        (call,) = (
            node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "call"
        )
        return _Wrapper(graph, inputs, device_type).run(call)
    except (_NotUnderstoodError, SyntaxError, ValueError, LookupError, TypeError, NameError, AttributeError):
        return None


_OP_NAMESPACES = ("torch.ops.", "extern_kernels.", "aten.", "prims.")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The results of an op with several; the name that it has in the wrapper keeps all of them alive."""

    storages: Mapping[int, Storage]


@dataclass(frozen=True, slots=True)
class _Layout:
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements from the first to the last; gaps count, expanded dimensions do not."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return 1 + last if math.prod(self.sizes) else 0

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_channels_last(self) -> bool:
        return len(self.sizes) > 2 and self.strides[1] == 1

    @property
    def is_contiguous(self) -> bool:
        steps = itertools.accumulate(reversed(self.sizes[1:]), operator.mul, initial=1)
        return self.strides == tuple(reversed(list(steps)))


_Value = Storage | _Parts | int | None


class _Wrapper:
    def __init__(self, graph: Signature, inputs: Mapping[str, Storage | int], device_type: str) -> None:
        self.graph, self.inputs, self.device_type = graph, inputs, device_type
        self.block = BLOCK_BYTES.get(device_type, BLOCK_BYTES["cuda"])
        self.names: dict[str, Storage | _Parts | None] = {}
        self.layouts: dict[str, _Layout] = {}
        self.sizes: dict[str, int] = {}  # symbolic sizes
        taken = (entry.number for entry in inputs.values() if isinstance(entry, Storage))
        self.numbers = itertools.count(1 + max(taken, default=0))
        self.references: dict[int, int] = {}
        self.stated: dict[str, ast.Call] = {}  # what the wrapper says of the sizes of a name
        self.part_names: dict[str, dict[int, str]] = {}  # the names of an op's results, by the name of their tuple
        self.renamed: dict[str, str] = {}
        self.now = self.peak = 0
        self.timeline: list[tuple[str, int]] = []
        self.returned: dict[str, Storage] = {}

    def run(self, call: ast.FunctionDef) -> Allocations:
        self._look_ahead(call)
        self._block(call.body)
        return Allocations(tuple(self.timeline), self.peak, self.now, self.returned)

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
        if len(targets) != len(self.graph.placeholders):
            raise _NotUnderstoodError("other arguments than the graph has")
        for element, placeholder in zip(targets, self.graph.placeholders, strict=True):
            if not isinstance(element, ast.Name):
                raise _NotUnderstoodError(ast.unparse(element))
            self._bind(element.id, self.inputs[placeholder])

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
        for storage in _storages(value):
            self.references[storage.number] = self.references.get(storage.number, 0) + 1
        self._release(old)

    def _drop(self, target: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            raise _NotUnderstoodError(ast.unparse(target))
        self._release(self.names.pop(target.id, None))

    def _release(self, value: Storage | _Parts | None) -> None:
        for storage in _storages(value):
            self.references[storage.number] -= 1
            if not self.references[storage.number] and not storage.is_held:
                self.now -= storage.bytes

    def _allocate(self, num_bytes: int, dtype: torch.dtype) -> Storage:
        rounded = -(-num_bytes // self.block) * self.block
        self.now += rounded
        self.peak = max(self.peak, self.now)
        return Storage(next(self.numbers), rounded, dtype)

    # -- expressions

    def _result(self, value: ast.expr) -> _Value:
        match value:
            case ast.Name(id=name):
                return self._named(name)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int() as position)):
                whole = self.names[name]
                return whole.storages.get(position) if isinstance(whole, _Parts) else whole
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[base, *_]):
                return self._result(base)
            case ast.Call(func=ast.Name(id=function)) if function.startswith("empty_strided_"):
                return self._empty(value, function.removeprefix("empty_strided_"))
            case ast.Call(func=ast.Name(id="get_raw_stream")) | ast.Constant():
                return None
            case ast.Attribute() | ast.BinOp() | ast.Call():
                return self._size(value)
        raise _NotUnderstoodError(ast.unparse(value))

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

    def _layout(self, value: ast.expr) -> _Layout | None:
        """Sizes and strides of a tensor, where the wrapper has said them."""
        match value:
            case ast.Name(id=name) if name in self.layouts:
                return self.layouts[name]
            case ast.Name(id=name) if name in self.stated:
                return self._stated_layout(self.stated[name])
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[_, size, stride, *_]):
                return _Layout(self._sizes(size), self._sizes(stride))
            case ast.Call(func=ast.Name(id=function), args=[size, stride, *_]) if function.startswith("empty_strided_"):
                return _Layout(self._sizes(size), self._sizes(stride))
        return None

    def _stated_layout(self, statement: ast.Call) -> _Layout:
        _, size, stride, *_ = statement.args
        return _Layout(self._sizes(size), self._sizes(stride))

    def _empty(self, call: ast.Call, device: str) -> Storage:
        size, stride, dtype = call.args[:3]
        kind = getattr(torch, ast.unparse(dtype).removeprefix("torch."))
        extent = _Layout(self._sizes(size), self._sizes(stride)).extent
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

    def _matching_results(self, op: str, layouts: Mapping[int, _Layout]) -> tuple[Result | None, ...] | None:
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
        if name == "assert_size_stride":
            return
        if not (isinstance(call.func, ast.Name) or name.endswith(".run") or _is_op(call)):
            if not name.startswith(("args.", "torch.cuda.")):
                raise _NotUnderstoodError(name)
            return
        self._kernel(call)

    def _kernel(self, call: ast.Call, *results: Storage) -> None:
        name = ast.unparse(call.func).removeprefix("extern_kernels.")
        workspace_bytes = self._workspace_bytes(call, results) if self.device_type == "cpu" else 0
        self.peak = max(self.peak, self.now + workspace_bytes)
        self.timeline.append((name, self.now + workspace_bytes))

    def _workspace_bytes(self, call: ast.Call, results: Sequence[Storage]) -> int:
        """What ATen and oneDNN allocate for themselves on CPU while they run."""
        op, threads = _short_name(call), torch.get_num_threads()
        dtypes = {storage.dtype for storage in (*self._operands(call), *results)}
        is_half = not dtypes.isdisjoint(HALF_PRECISION)
        if op in ("convolution", "convolution_backward"):
            layouts = [self._known_layout(operand) for operand in call.args[: 3 if op.endswith("backward") else 2]]
            return _convolution_bytes(layouts, results[0], threads)
        if op == ATTENTION:
            query, key = (self._known_layout(operand) for operand in call.args[:2])
            return threads * _attention_bytes(query, key, is_half=is_half, is_backward=False)
        if op == f"{ATTENTION}_backward":
            gradient, query, key = (self._known_layout(operand) for operand in call.args[:3])
            # It is read token by token, and all the heads of a token are to stand together.
            copied_bytes = (
                gradient.numel * results[0].dtype.itemsize if gradient.strides[1] > gradient.strides[2] else 0
            )
            return copied_bytes + threads * _attention_bytes(query, key, is_half=is_half, is_backward=True)
        if op in GEMMS and is_half:
            rows = self._layout(call.args[1 if op in ("addmm", "baddbmm") else 0])
            most = _gemm_bytes(rows.sizes[-1]) if rows is not None else GEMM_BUFFER_BYTES
            return threads * min(most, max(storage.bytes for storage in self._operands(call)))
        return 0

    def _known_layout(self, operand: ast.expr) -> _Layout:
        layout = self._layout(operand)
        if layout is None:
            raise _NotUnderstoodError(f"the layout of {ast.unparse(operand)}")
        return layout

    def _return(self, value: ast.expr | None) -> None:
        elements = value.elts if isinstance(value, ast.Tuple) else []
        results = [None if isinstance(e, ast.Constant) else self._result(e) for e in elements]
        kept = {storage.number for storage in results if isinstance(storage, Storage)}
        alive = {s.number: s for value in self.names.values() for s in _storages(value) if not s.is_held}
        self.now -= sum(storage.bytes for number, storage in alive.items() if number not in kept)
        pairs = zip(self.graph.outputs, results, strict=True)
        self.returned = {name: s for name, s in pairs if name is not None and isinstance(s, Storage)}


def _gemm_bytes(row: int) -> int:
    """Of one thread, in half precision, for the sum over a row of that many elements."""
    if row > GEMM_WHOLE_ROW:
        return GEMM_BUFFER_BYTES
    return GEMM_ROW_BUFFER_BYTES + GEMM_ELEMENT_BUFFER_BYTES * row


def _convolution_bytes(layouts: Sequence[_Layout], result: Storage, threads: int) -> int:
    """Of a convolution, whose operands are image and weight, or of its backward: gradient, image and weight.

    oneDNN copies the weight, twice in backward, and what is not channels-last; for bfloat16 backward transposes an
    image a thread. Measured with torch 2.13.0 over 50 shapes.
    """
    dtype, is_backward = result.dtype, len(layouts) == 3
    *images, weight = layouts
    image = images[-1]
    image_bytes, weight_bytes = (layout.numel * dtype.itemsize for layout in (image, weight))
    output_bytes = images[0].numel * dtype.itemsize if is_backward else result.bytes
    if dtype not in ONEDNN_CONVOLUTION:
        pixels, outputs = math.prod(image.sizes[2:]) or 1, image.sizes[0] * weight.sizes[0] or 1
        return image_bytes * (output_bytes // dtype.itemsize // outputs) // pixels * math.prod(weight.sizes[2:])
    total = weight_bytes * (2 if is_backward else 1)
    if dtype is torch.bfloat16 and is_backward:
        total += threads * (image_bytes + output_bytes) // (image.sizes[0] or 1)
    if all(layout.is_channels_last for layout in images):
        return total
    odd = (layout for layout in images if not (layout.is_channels_last or layout.is_contiguous))
    total += sum(layout.numel * dtype.itemsize for layout in odd)
    return total + (image_bytes + output_bytes if is_backward else max(image_bytes, output_bytes))


def _attention_bytes(query: _Layout, key: _Layout, *, is_half: bool, is_backward: bool) -> int:
    """What one thread of ATen's attention on CPU allocates: the scores of a block, in fp32 and again in half precision,
    in backward also their gradient; in forward what it sums up (FlashAttentionKernel.cpp)."""
    tokens, size = query.sizes[-2:]
    rows = min(next(rows for fewest, rows in ATTENTION_ROWS if tokens >= fewest), tokens)
    block = rows * min(ATTENTION_COLUMNS, key.sizes[-2])
    gemm_bytes = ATTENTION_GEMM_BYTES if is_half else 0
    if is_backward:
        return 2 * block * (6 if is_half else 4) + 4 * rows + gemm_bytes
    return block * (6 if is_half else 4) + 4 * (2 * rows + rows * size)


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


def _has_shape(result: Result | None, layout: _Layout) -> bool:
    return result is not None and result.shape == layout.sizes


def _results(module: fx.GraphModule) -> dict[str, tuple[tuple[Result | None, ...], ...]]:
    """What the graph's ops return: by op, of each of its nodes."""
    found: dict[str, list[tuple[Result | None, ...]]] = {}
    for node in module.graph.nodes:
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
