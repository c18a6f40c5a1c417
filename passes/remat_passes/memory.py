"""The memory model: how many bytes are alive at each kernel of the step.

The simulator replays forward and then backward in the order that will run. It is the planner's oracle, the tests'
oracle and the picture that users see, and its truth is the allocator (docs/memory-model.md lists what is exact and what
is estimated). Under Inductor, work is replayed by kernel:

(1) a pointwise result exists only when a kernel of its own, an output or many readers ask for it; else its readers
    compute it on the fly and keep *its operands* alive instead;
(2) written results that no reader outside their kernel asks for are never allocated;
(3) a kernel's results are allocated before its last operands are freed, except that a pointwise result takes over the
    storage of an operand of the same size that dies there and that the kernel reads for nothing else but what the
    result is computed from (torch/_inductor/scheduler.py, ``decide_inplace_update``);
(4) sums over the first axis that share a large operand run as one kernel, where the last of them can run;
(5) a convolution reads a channels-last copy of a concatenation and of an input in the plain layout, and forward hands
    the copies of inputs to backward in their place;
(6) a matrix product that is only added to something runs as one kernel with the sum, and not before it.

With ``fuses=False`` (the eager lowering) each op is a kernel, and nothing is taken over.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from torch import fx

from .cut import Cut
from .joint import JointGraph, Role, Value
from .ops import FUSIBLE, OpKind, op_name, reduces_outer
from .schedule import Schedule, schedule
from .workspace import (
    ATTENTION,
    GEMMS,
    HALF_PRECISION,
    Convolution,
    Layout,
    attention_backward_bytes,
    attention_bytes,
    channels_last,
    contiguous,
    convolution_bytes,
    gemm_bytes,
    gemm_copies_bytes,
)

# A pointwise result with more reads than this is written by Inductor once several readers want it
# (torch/_inductor/config.py, ``realize_reads_threshold``).
REALIZE_READS = 4

# How many kernels are searched for a dependency before a fusion is taken to be impossible. It bounds the work of a
# replay; Inductor gives up on distant fusions as well (torch/_inductor/scheduler.py, ``are_long_distant_nodes``).
FUSION_DISTANCE = 64

# What the allocator rounds a block up to: CPU hands out what was asked for (c10/core/CPUAllocator.cpp counts the bytes
# asked), CUDA rounds to 512 bytes (c10/cuda/CUDACachingAllocator.cpp, ``kMinBlockSize``).
BLOCK_BYTES = {"cpu": 1, "cuda": 512}


def block_bytes(device_type: str) -> int:
    """What a device's allocator rounds a block up to, in bytes."""
    return BLOCK_BYTES.get(device_type, BLOCK_BYTES["cuda"])


def rounded_up(number: int, multiple: int) -> int:
    """The least multiple that is not below ``number``."""
    return -(-number // multiple) * multiple


# ``prims.fma`` under the eager lowering is a product and a sum: one copy of its largest operand besides its result
# (measured in tests/test_memory_model.py).
EAGER_COPIES = frozenset({"fma"})
COPY_SUFFIX = " (copy)"  # how a projection names the copy of a value
PROMOTING = frozenset({"add", "sub", "mul", "div"})


class Instant(NamedTuple):
    """The memory while one kernel runs: which op leads it, on which side, and how many bytes are allocated."""

    name: str
    is_backward: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class Projection:
    """The memory of one step. ``peak_values`` names what is alive at the peak, with its bytes, largest first."""

    timeline: tuple[Instant, ...]
    peak_bytes: int
    peak_values: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Kernel:
    """A kernel while the graph is cut into kernels."""

    lead: int  # the first op
    fuses: bool
    is_sums: bool = False  # of reductions over the first axis
    repetition: int = 0  # the pass that it belongs to: the same value of two passes is not to be computed at once
    reduces: bool = False  # holds a reduction: pointwise work rather joins a kernel of its kind
    domains: set[int] = field(default_factory=set)  # sizes of its loops
    results: list[int] = field(default_factory=list)
    reads: dict[int, list[int]] = field(default_factory=dict)  # which of its ops read each operand
    after: set[int] = field(default_factory=set)  # the kernels that make its operands
    depth: int = 1  # at least so many kernels, itself among them, run until it has run


# What a kernel allocates, what of its operands a result takes over, and what is gone when it ends.
_Change: TypeAlias = tuple[list[int], set[int], set[int]]


@dataclass(frozen=True)
class MemoryModel:
    """The memory of a joint graph under a lowering, for any decision."""

    joint: JointGraph
    fuses: bool
    already_allocated_bytes: int | None = None  # None: parameters, buffers and inputs
    num_threads: int = 1  # that CPU kernels run on: some of their workspaces are per thread
    is_body: bool = False  # of a loop: its tangents (the accumulators) are there from the start, and not written into
    called_bytes: Mapping[int, int] = field(default_factory=dict)  # what each call of a body takes above its start
    device_type: str | None = None  # whose allocator and libraries count; None: those of the device of the trace

    @cached_property
    def _device_type(self) -> str:
        return self.joint.device_type if self.device_type is None else self.device_type

    @cached_property
    def _block(self) -> int:
        return block_bytes(self._device_type)

    def _rounded(self, index: int) -> int:
        return rounded_up(self.joint.values[index].bytes, self._block)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Allocated bytes of each value's own storage."""
        return tuple(self._rounded(value.index) for value in self.joint.values)

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Elements of each value."""
        return tuple(value.numel for value in self.joint.values)

    @cached_property
    def domains(self) -> tuple[int, ...]:
        """The size of the loop that computes each value: a reduction runs over what it reads."""
        return tuple(
            max([value.numel, *(self.elements[read] for read in self._reads[value.index])])
            if value.kind is OpKind.REDUCTION
            else value.numel
            for value in self.joint.values
        )

    @cached_property
    def outer(self) -> frozenset[int]:
        """Reductions over the first axis."""
        nodes = self.joint.nodes
        return frozenset(
            v.index for v in self.joint.values if v.kind is OpKind.REDUCTION and reduces_outer(nodes[v.index])
        )

    @property
    def splits_reductions(self) -> bool:
        """Whether what needs the result of a reduction runs in a loop of its own, as in Inductor's C++ kernels
        (torch/_inductor/codegen/cpp.py, ``can_fuse_vertical``); GPU kernels hold a row in registers."""
        return self._device_type == "cpu"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The op of each value, without namespace and overload."""
        return tuple(op_name(node) for node in self.joint.nodes)

    @cached_property
    def convolutions(self) -> frozenset[int]:
        return frozenset(i for i, name in enumerate(self.names) if name.startswith("convolution"))

    @cached_property
    def sums_of_products(self) -> Mapping[int, tuple[int, ...]]:
        """(6) Of each sum, the products that Inductor may compute together with it, the one that it prefers first
        (torch/_inductor/fx_passes/post_grad.py, ``addmm`` and ``is_valid_addmm_fusion``)."""
        if not self.fuses:
            return {}
        found = {}
        for value in self.joint.values:
            if self.names[value.index] != "add" or len(value.inputs) != 2 or self._prefers_pointwise(value):
                continue
            operands = [self.joint.values[i] for i in reversed(value.inputs)]
            pairs = ((product, other) for product, other in (operands, reversed(operands)))
            products = tuple(product.index for product, other in pairs if self._is_addmm(product, other))
            if products:
                found[value.index] = products
        return found

    @cached_property
    def products_of_sums(self) -> frozenset[int]:
        """The products that may run with the sum that they go into."""
        return frozenset(product for products in self.sums_of_products.values() for product in products)

    def _is_addmm(self, product: Value, other: Value) -> bool:
        if self.names[product.index] != "mm" or other.dtype is not product.dtype or len(other.sizes) > 2:
            return False
        sizes = zip(reversed(other.sizes), reversed(product.sizes), strict=False)
        return all(own in (1, wanted) for own, wanted in sizes)

    def _prefers_pointwise(self, value: Value) -> bool:
        """On a GPU a sum that only pointwise ops read is left to them (``should_prefer_unfused_addmm``)."""
        if self._device_type == "cpu" or value.index in (
            *self.joint.forward_outputs,
            *self.joint.backward_outputs,
        ):
            return False
        return all(self.kinds[user] is OpKind.POINTWISE for user in value.users)

    @cached_property
    def workspaces(self) -> tuple[int, ...]:
        """What each op allocates for itself while it runs, in bytes; 0 for Inductor's own kernels."""
        return tuple(self._workspace_bytes(value) for value in self.joint.values)

    def _workspace_bytes(self, value: Value) -> int:
        if self._device_type != "cpu" or value.kind in (OpKind.INPUT, OpKind.VIEW, OpKind.PART, OpKind.SYMBOLIC):
            return 0
        name = self.names[value.index]
        operands = self._arguments(value.index)
        sizes = [self.sizes[operand.base] for operand in operands]
        touched = [self.sizes[value.index], *(self.sizes[i] for i in self._parts.get(value.index, ())), *sizes]
        dtype = operands[0].dtype if operands else None
        if dtype is not None and name in ("convolution", "convolution_backward"):
            count = 3 if name.endswith("backward") else 2
            layouts = [self._convolved(operand) for operand in operands[:count]]
            output_numel = layouts[0].numel if len(layouts) == 3 else value.numel
            told = Convolution.of(self.joint.nodes[value.index].args[count + 1 :])
            return convolution_bytes(layouts, output_numel, dtype, self.num_threads, told)
        if dtype is not None and name == ATTENTION:
            query, key = (self._layout(operand) for operand in operands[:2])
            return attention_bytes(query, key, dtype, self.num_threads)
        if dtype is not None and name == f"{ATTENTION}_backward":
            gradient, query, key = (self._layout(operand) for operand in operands[:3])
            return attention_backward_bytes(gradient, query, key, dtype, self.num_threads)
        if dtype is not None and name in GEMMS:
            matrices = [self._layout(operand) for operand in operands[-2:]]
            copied_bytes = 0 if self.fuses else gemm_copies_bytes(matrices, dtype.itemsize)
            is_half = dtype in HALF_PRECISION
            return copied_bytes + (gemm_bytes(matrices[0].sizes[-1], max(touched), self.num_threads) if is_half else 0)
        if self.fuses:
            return 0
        if dtype is not None and dtype.is_complex and name == "abs":
            return value.numel * dtype.itemsize  # the result as a complex number, before it is one
        return (max(touched) if name in EAGER_COPIES else 0) + self._promoted_bytes(value)

    def _arguments(self, index: int) -> list[Value]:
        """The operands of an op as they stand, one that stands twice twice: attention may be of one tensor thrice."""
        position = dict(zip(self.joint.nodes[index].all_input_nodes, self.joint.values[index].inputs, strict=True))
        leaves = (argument for argument in self.joint.nodes[index].args if isinstance(argument, fx.Node))
        return [self.joint.values[position[leaf]] for leaf in leaves]

    def _layout(self, value: Value) -> Layout:
        """The layout that the graph was traced with."""
        strides = self.joint.nodes[value.index].meta["val"].stride()
        is_known = all(isinstance(stride, int) for stride in strides)
        return Layout(value.sizes, tuple(strides)) if is_known else contiguous(value.sizes)

    def _convolved(self, value: Value) -> Layout:
        """Inductor hands convolutions what is channels-last (torch/_inductor/graph.py, ``decide_layout_opt``)."""
        return channels_last(value.sizes) if self.fuses else self._layout(value)

    def _promoted_bytes(self, value: Value) -> int:
        """The copy that ATen's CPU arithmetic makes of what it combines with floats of another type: masks, integers,
        16-bit parts of a sum in fp32, real factors of a complex number."""
        dtype = value.dtype
        if self.names[value.index] not in PROMOTING or dtype is None:
            return 0
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0
        operands = (self.joint.values[i] for i in value.inputs)
        return sum(o.numel * dtype.itemsize for o in operands if o.dtype not in (None, dtype) and o.sizes)

    @cached_property
    def plain_images(self) -> frozenset[int]:
        """Inputs that Inductor would copy to be channels-last (torch/_inductor/graph.py, ``run_node``)."""
        if not self.fuses or self._device_type != "cpu":
            return frozenset()
        images = (self.joint.values[i] for i in self.inputs if len(self.joint.values[i].sizes) == 4)
        return frozenset(value.index for value in images if not self._is_channels_last(value))

    def _is_channels_last(self, value: Value) -> bool:
        """Dimensions of size 1 have no place in the order."""
        wanted, own = channels_last(value.sizes).strides, self._layout(value).strides
        return all(size == 1 or a == b for size, a, b in zip(value.sizes, wanted, own, strict=True))

    @cached_property
    def kinds(self) -> tuple[OpKind, ...]:
        return tuple(value.kind for value in self.joint.values)

    @cached_property
    def inputs(self) -> frozenset[int]:
        """What the caller holds during the whole step."""
        return frozenset(v.index for v in self.joint.values if v.kind is OpKind.INPUT and v.role is not Role.TANGENT)

    @cached_property
    def baseline_bytes(self) -> int:
        """What is allocated before the step: on CPU, where no counter says, the graph's own inputs."""
        own = sum(self.sizes[i] for i in self.inputs)
        return own if self.already_allocated_bytes is None else max(own, self.already_allocated_bytes)

    @cached_property
    def gradient_bytes(self) -> int:
        """What backward hands out."""
        return sum(self.sizes[i] for i in self._gradients - self.inputs)

    @cached_property
    def tangent_bytes(self) -> int:
        """What backward is handed beside what forward saves."""
        return sum(self.sizes[i] for i in self._tangents)

    @cached_property
    def _outputs(self) -> frozenset[int]:
        """The storages that forward hands out."""
        return frozenset(self.joint.values[i].base for i in self.joint.forward_outputs)

    @cached_property
    def _gradients(self) -> frozenset[int]:
        """The storages that backward hands out."""
        return frozenset(self.joint.values[i].base for i in self.joint.backward_outputs)

    @cached_property
    def _tangents(self) -> frozenset[int]:
        return frozenset(value.index for value in self.joint.values if value.role is Role.TANGENT)

    @cached_property
    def _reads(self) -> tuple[tuple[int, ...], ...]:
        """The storages that each op reads, seen through views."""
        values = self.joint.values
        return tuple(tuple(dict.fromkeys(values[i].base for i in value.inputs)) for value in values)

    @cached_property
    def _parts(self) -> Mapping[int, tuple[int, ...]]:
        parts = defaultdict(list)
        for value in self.joint.values:
            if value.kind is OpKind.PART:
                parts[value.inputs[0]].append(value.index)
        return {op: tuple(found) for op, found in parts.items()}

    @cached_property
    def _runs(self) -> tuple[bool, ...]:
        """Whether each value is computed by a kernel, or inside of one."""
        return tuple(kind not in (OpKind.VIEW, OpKind.PART, OpKind.SYMBOLIC, OpKind.INPUT) for kind in self.kinds)

    @cached_property
    def _fusible(self) -> tuple[bool, ...]:
        """Whether each value may share a kernel with others."""
        return tuple(self.fuses and kind in FUSIBLE for kind in self.kinds)

    @cached_property
    def _asks(self) -> tuple[bool, ...]:
        """Whether each op wants its operands written."""
        return tuple(kind in (OpKind.EXTERN, OpKind.EFFECT) for kind in self.kinds)

    @cached_property
    def _bytes_at(self) -> tuple[int, ...]:
        """Bytes by storage; a copy, whose number is negative, has those of what it copies."""
        return (*self.sizes, *reversed(self.sizes))

    @cached_property
    def _elements_at(self) -> tuple[int, ...]:
        """Elements by storage, as ``_bytes_at``."""
        return (*self.elements, *reversed(self.elements))

    def project(self, cut: Cut, order: Schedule | None = None) -> Projection:
        """Replay the step for a decision."""
        forward, backward = self._replays(cut, order or schedule(self.joint, cut, early=not self.fuses))
        peak = max(forward.run(), backward.run(), key=lambda found: found[0])
        return Projection(
            timeline=(*forward.timeline, *backward.timeline),
            peak_bytes=peak[0],
            peak_values=self._named(peak[1] | (self._outputs if peak[2] else set()) - self.inputs),
        )

    def kernels(self, cut: Cut, order: Schedule) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The kernel that writes each value that is written, in forward and in backward, all by their names: a kernel
        has that of its side and of its first op."""
        forward, backward = self._replays(cut, order)
        return forward.written_by(), backward.written_by()

    def _replays(self, cut: Cut, order: Schedule) -> tuple[_Replay, _Replay]:
        """Forward and backward, for a decision."""
        values = self.joint.values
        outputs, tangents = self._outputs, self._tangents
        kept = {values[i].base for i in cut.saved} - self.inputs
        copies = cut.saved & self.joint.mutated_inputs
        held = self.baseline_bytes + sum(self.sizes[i] for i in copies)

        early = self.tangent_bytes if self.is_body else 0
        held += early
        reordered = self._reordered(order.forward)
        handed_on = {-1 - i for i in reordered & cut.saved}
        forward = _Replay(
            self, order.forward, outputs | kept | handed_on, {}, held, set(), reordered, is_backward=False
        )
        entering = dict.fromkeys((kept - outputs) | tangents | handed_on, 0)
        held += sum(self.sizes[i] for i in outputs - self.inputs) - early
        # Tensor.backward holds scalars to the end; what a body is handed a slice of is held by its caller.
        late = {i for i in tangents if not values[i].shape or (self.is_body and self._is_slice(i))}
        backward = _Replay(
            self,
            order.backward,
            self._gradients | late,
            entering,
            held,
            kept,
            reordered & cut.saved,
            is_backward=True,
        )
        return forward, backward

    def _is_slice(self, index: int) -> bool:
        """Whether an input shows a part of a larger storage."""
        storage_bytes = self.joint.nodes[index].meta["val"].untyped_storage().nbytes()
        return bool(storage_bytes > self.joint.values[index].bytes)

    def _reordered(self, order: Sequence[int]) -> frozenset[int]:
        """(5) The inputs that are copied: a convolution reads them, or what is computed from them
        (torch/_inductor/graph.py, ``find_nodes_prefer_channels_last``)."""
        if not self.plain_images:
            return frozenset()
        wanted: set[int] = set()
        for index in reversed(order):
            if index in wanted or self.names[index] == "convolution":
                wanted.update(self.joint.values[index].inputs)
        return self.plain_images & wanted

    def _named(self, alive: Iterable[int]) -> tuple[tuple[str, int], ...]:
        """Values with bytes, largest first; everything held before the step stands first as one entry."""
        found = [(self.joint.values[i].name, self.sizes[i]) for i in alive if i >= 0 and self.sizes[i]]
        found += [(f"{self.joint.values[-1 - i].name}{COPY_SUFFIX}", self.sizes[-1 - i]) for i in alive if i < 0]
        found.append(("parameters, buffers and inputs", self.baseline_bytes))
        return tuple(sorted(found, key=lambda entry: (-entry[1], entry[0])))


class _Replay:
    """One graph, cut into kernels and replayed."""

    def __init__(
        self,
        model: MemoryModel,
        order: Sequence[int],
        outputs: AbstractSet[int],
        entering: Mapping[int, int],
        held_bytes: int,
        saved: set[int],
        reordered: frozenset[int],
        *,
        is_backward: bool,
    ) -> None:
        self.model, self.order, self.outputs, self.is_backward = model, order, outputs, is_backward
        self.entering, self.held_bytes, self.saved = entering, held_bytes, saved
        self.reordered = reordered
        self.timeline: list[Instant] = []
        self.kernels: list[_Kernel] = []
        self.kernel_of: dict[int, int] = {}
        self.leaves: dict[int, tuple[int, ...]] = {}
        self.product_of = self._merged()  # of each sum that runs as one kernel with a product
        self.num_readers: dict[int, int] = defaultdict(int)  # of each storage
        self.asked: set[int] = set()  # the storages that an op wants written
        self.made_from: dict[int, set[int]] = {}  # what a result is computed from inside of its kernel
        self.read_by: dict[int, list[int]] = defaultdict(list)  # the kernels that read each storage

    def run(self) -> tuple[int, set[int], bool]:
        """The peak, what is alive at it, and whether that is in backward."""
        self._cut_into_kernels()
        return self._replay()

    def written_by(self) -> Mapping[str, str]:
        """The kernel that writes each value that is written; copies are left out."""
        self._cut_into_kernels()
        values, kernels, side = self.model.joint.values, self.kernels, "backward" if self.is_backward else "forward"
        written = ((index, kernel) for index, kernel in self.kernel_of.items() if index >= 0)
        return {values[index].name: f"{side} {values[kernels[kernel].lead].name}" for index, kernel in written}

    # -- (1) which results are written, and by which kernel

    def _cut_into_kernels(self) -> None:
        self._count_readers()
        products = set(self.product_of.values())
        if self.reordered and not self.is_backward:
            self._copy_inputs()
        runs, fusible = self.model._runs, self.model._fusible
        for index in self.order:
            if not runs[index]:
                continue
            leaves = self._leaf_reads(index)
            fuses = fusible[index] and index not in self.product_of
            if index in products or (fuses and not self._is_written(index, leaves)):
                self.leaves[index] = leaves
                continue
            self._place(index, leaves, fuses)

    def _merged(self) -> dict[int, int]:
        """(6) The product that each sum is computed together with: one that nothing else in this graph reads."""
        in_order = set(self.order)
        found: dict[int, int] = {}
        for index, products in self.model.sums_of_products.items():
            if index not in in_order:
                continue
            alone = (
                p
                for p in products
                if p in in_order
                and p not in self.outputs
                and not any(user in in_order for user in self.model.joint.values[p].users if user != index)
            )
            product = next(alone, None)
            if product is not None:
                found[index] = product
        return found

    def _count_readers(self) -> None:
        kinds, reads, asks, num_readers = self.model.kinds, self.model._reads, self.model._asks, self.num_readers
        for index in self.order:
            if kinds[index] is OpKind.VIEW or kinds[index] is OpKind.PART:
                continue
            for read in reads[index]:
                num_readers[read] += 1
            if asks[index] or index in self.product_of:
                self.asked.update(reads[index])

    def _leaf_reads(self, index: int) -> tuple[int, ...]:
        """The written storages that the op reads once what is computed on the fly is seen through."""
        reads = self.model._reads[index]
        if not self.reordered and self.leaves.keys().isdisjoint(reads):
            return reads
        found: dict[int, None] = {}
        for read in reads:
            found.update(dict.fromkeys(self.leaves.get(read, (-1 - read if read in self.reordered else read,))))
        return tuple(found)

    def _is_written(self, index: int, leaves: Sequence[int]) -> bool:
        if index in self.outputs or self.model.kinds[index] is OpKind.REDUCTION or index in self.model._parts:
            return True
        return index in self.asked or (self.num_readers[index] > 1 and len(leaves) > REALIZE_READS)

    def _place(self, index: int, leaves: Sequence[int], fuses: bool) -> None:
        """Give a written result a kernel: one that it fuses with, or a new one."""
        model, kernels, kernel_of = self.model, self.kernels, self.kernel_of
        domain = model.domains[index]
        after = {kernel_of[leaf] for leaf in leaves if leaf in kernel_of}
        place = self._fused_into(index, leaves, domain, after) if fuses else None
        if place is None:
            place = len(kernels)
            repetition = model.joint.values[index].repetition
            kernels.append(_Kernel(index, fuses, index in model.outer, repetition))
        kernel = kernels[place]
        kernel.reduces = kernel.reduces or model.kinds[index] is OpKind.REDUCTION
        kernel.domains.update((domain, model.elements[index]))
        made_here = {self._owner(leaf) for leaf in leaves if kernel_of.get(leaf) == place} if place in after else set()
        self.made_from[index] = made_here.union(*(self.made_from[op] for op in made_here))
        after.discard(place)
        kernel.after |= after
        kernel.depth = max(kernel.depth, 1 + max((kernels[earlier].depth for earlier in after), default=0))
        for leaf in leaves:
            kernel.reads.setdefault(leaf, []).append(index)
            self.read_by[leaf].append(place)
        for result in (index, *model._parts.get(index, ())):
            if result in self.saved:
                # Computed again with the op's other results, beside the one that was saved and that all readers take.
                kernel.results += [] if fuses else [-1 - result]
                continue
            kernel.results.append(result)
            kernel_of[result] = place
        if model.fuses and index in model.convolutions:
            self._copy_operands(place, leaves)

    def _copy_inputs(self) -> None:
        copies = [-1 - i for i in sorted(self.reordered)]
        self.kernels.append(_Kernel(lead=min(self.reordered), fuses=True, results=copies))
        self.kernel_of.update(dict.fromkeys(copies, 0))

    def _copy_operands(self, place: int, leaves: Sequence[int]) -> None:
        """(5) A convolution reads a channels-last copy of a concatenation, whose parts are written in the plain layout;
        other results are written channels-last at once (torch/_inductor/graph.py, ``decide_layout_opt``)."""
        for leaf in leaves:
            producer = self.kernel_of.get(leaf)
            if producer is None or leaf < 0 or self.model.names[leaf] != "cat":
                continue
            copy = -1 - leaf
            if copy not in self.kernel_of:
                self.kernels[producer].results.append(copy)
                self.kernel_of[copy] = producer
            self.kernels[place].reads.setdefault(copy, []).append(place)

    def _owner(self, index: int) -> int:
        """The op that writes a storage: a part is written by the op that it is a part of."""
        value = self.model.joint.values[_original(index)]
        return value.inputs[0] if value.kind is OpKind.PART else value.index

    def _fused_into(self, index: int, leaves: Sequence[int], domain: int, after: set[int]) -> int | None:
        """The kernel that makes the result's last operand, or one that shares a large operand and need not run before
        any of the others; the loops must be of one size. (4) Sums over the first axis fuse with one another only."""
        is_sum = index in self.model.outer
        repetition = self.model.joint.values[index].repetition

        def fits(place: int) -> bool:
            kernel = self.kernels[place]
            if not kernel.fuses or kernel.is_sums != is_sum or domain not in kernel.domains:
                return False
            if kernel.repetition != repetition:
                return False
            if self.model.splits_reductions and self._needs_reduction_of(place, leaves):
                return False
            return not self._runs_before_any(place, after - {place})

        if after and not is_sum and fits(last := max(after)):
            return last
        elements = self.model._elements_at
        large = [leaf for leaf in leaves if elements[leaf] == domain]
        sharing = {place for leaf in large for place in self.read_by[leaf]} - after
        ordered = sorted(sharing, key=lambda place: (self.kernels[place].reduces, place))
        return next((place for place in ordered if fits(place)), None)

    def _needs_reduction_of(self, place: int, leaves: Sequence[int]) -> bool:
        kinds = self.model.kinds
        return any(kinds[self._owner(leaf)] is OpKind.REDUCTION for leaf in leaves if self.kernel_of.get(leaf) == place)

    def _runs_before_any(self, place: int, others: set[int]) -> bool:
        """Whether one of the other kernels needs a result of this one; too long a search counts as yes."""
        if any(self.kernels[other].depth > FUSION_DISTANCE for other in others):
            return True
        seen, stack = set(others), list(others)
        while stack:
            if len(seen) > FUSION_DISTANCE:
                return True
            needed = self.kernels[stack.pop()].after
            if place in needed:
                return True
            stack.extend(needed - seen)
            seen |= needed
        return False

    def _in_order(self) -> list[_Kernel]:
        """The kernels in the order in which they run: each as early as it was asked for and its operands allow."""
        waiting = {place: len(kernel.after) for place, kernel in enumerate(self.kernels)}
        readers: dict[int, list[int]] = defaultdict(list)
        for place, kernel in enumerate(self.kernels):
            for earlier in kernel.after:
                readers[earlier].append(place)
        ready = [place for place, missing in waiting.items() if not missing]
        order = []
        while ready:
            place = heapq.heappop(ready)
            order.append(self.kernels[place])
            for reader in readers[place]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, reader)
        return order

    # -- (2) and (3) what is allocated when

    def _replay(self) -> tuple[int, set[int], bool]:
        kernels = self._in_order() if self.model.fuses else self.kernels
        last_use = {read: at for at, kernel in enumerate(kernels) for read in kernel.reads}
        size, values, called_bytes = self.model._bytes_at, self.model.joint.values, self.model.called_bytes
        alive, outputs = set(self.entering), self.outputs
        now = self.held_bytes + sum(size[i] for i in alive)
        peak, peak_at = now, -1
        changes: list[_Change] = []
        for at, kernel in enumerate(kernels):
            results = kernel.results
            if kernel.fuses:
                results = [r for r in results if last_use.get(r) != at or r in outputs]
            dying = [r for r in kernel.reads if last_use[r] == at and r in alive and r not in outputs]
            taken = self._taken_over(kernel, results, dying) if kernel.fuses and dying and results else set()
            before = now
            now += sum([size[r] for r in results]) - sum([size[r] for r in taken])
            highest = now + (0 if kernel.fuses else self._workspace_bytes(kernel.lead))
            if kernel.lead in called_bytes:
                after = now - sum([size[r] for r in dying])  # the body lets go of its operands as it goes
                highest = max(before + called_bytes[kernel.lead], after)
            self.timeline.append(Instant(values[kernel.lead].name, self.is_backward, highest))
            if highest > peak:
                peak, peak_at = highest, at
            gone = {*dying, *[r for r in results if r not in last_use and r not in outputs]}
            changes.append((results, taken, gone))
            alive.update(results)
            alive -= gone
            now -= sum([size[r] for r in gone - taken])
        return peak, self._alive_at(peak_at, changes), self.is_backward

    def _alive_at(self, peak_at: int, changes: Sequence[_Change]) -> set[int]:
        """What is allocated while one kernel runs; before the first one where ``peak_at`` is -1."""
        alive = set(self.entering)
        for results, _taken, gone in changes[: max(0, peak_at)]:
            alive.update(results)
            alive -= gone
        for results, taken, _gone in changes[peak_at : peak_at + 1] if peak_at >= 0 else ():
            alive.update(results)
            alive -= taken
        return alive

    def _workspace_bytes(self, op: int) -> int:
        return self.model.workspaces[self.product_of.get(op, op)]

    def _is_accumulator(self, index: int) -> bool:
        return self.model.is_body and index >= 0 and self.model.joint.values[index].role is Role.TANGENT

    def _taken_over(self, kernel: _Kernel, results: Sequence[int], dying: Sequence[int]) -> set[int]:
        """Operands whose storage a result of the kernel takes over."""
        taken: set[int] = set()
        values, size = self.model.joint.values, self.model._bytes_at
        for result in results:
            if result < 0 or values[result].kind is not OpKind.POINTWISE:
                continue
            for operand in dying:
                if size[operand] != size[result] or operand in taken or self._is_accumulator(operand):
                    continue
                readers = kernel.reads[operand]
                if result in readers and self.made_from[result].issuperset(r for r in readers if r != result):
                    taken.add(operand)
                    break
        return taken


def _original(index: int) -> int:
    """What a copy, whose number is negative, is a copy of."""
    return index if index >= 0 else -1 - index
