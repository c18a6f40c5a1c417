"""FirstStep: the peak that the first real step takes, held against the one that was projected.

A projection that nobody checks is a promise that nobody keeps. So the first forward of a compiled graph that its
backward follows is measured, once: the two compiled functions are exchanged for ones that count, and put back after
it. What runs between them is the user's and is neither counted nor slowed down.

On CPU the bytes are summed up from the allocator's log, opened for the time of forward and again for that of backward.
A log that stayed open in between would be in the way of whatever profiler the user starts there. On CUDA the
allocator's own peak is read. It is not reset, because it is the user's too; so where the step stays below an earlier
peak, all that can be said is that.
"""

from __future__ import annotations

import itertools
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from remat_passes.errors import RematWarning
from remat_passes.joint import UNBACKED_SIZE
from remat_passes.plan import RematPlan
from remat_passes.units import format_bytes

from .plan_log import record_measurement
from .torch_private import AllocationLog, CompiledGraph, graph_is_kept

# What a projection may be off by before the user is told. The largest difference seen after the read-back is 2.3 %
# (benchmarks/peak), so what is above this is a fault and no noise.
TOLERANCE = 0.05

# ATen wraps a Python number in a tensor of its own while an op runs: 8 to 24 bytes were seen under the eager lowering.
SCALARS_BYTES = 64

# A size that depends on the contents of a tensor: torch/fx/experimental/symbolic_shapes.py, ``SymT.UNBACKED_INT``.
UNBACKED = re.compile(r"\bu\d+\b")

# How many forwards are looked at before it is given up: a script that runs the model a few times without a backward, or
# under a profiler of its own, is still measured, and one that never trains is left alone.
MAX_FORWARDS = 5

Code = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class _Forward:
    """One forward that was measured: bytes above its start, and where its inputs and results lie."""

    peak_bytes: int
    final_bytes: int
    inputs: frozenset[int]
    outputs: frozenset[int]  # of the results, those that are the caller's
    results: frozenset[int]


class FirstStep:
    """The watch over one graph. ``add`` takes its compiled forward and backward, before or after ``watch`` starts.

    The first ``num_outputs`` results of its forward are the caller's, the others are saved.
    """

    def __init__(self, device_type: str, num_outputs: int = 0) -> None:
        self.device_type = device_type
        self.num_outputs = num_outputs
        self.graphs: list[CompiledGraph] = []
        self.plan: RematPlan | None = None
        self.number = -1
        self.is_guess = False  # some sizes depend on the contents of tensors
        self.originals: list[tuple[Any, Code]] = []
        self.forward: _Forward | None = None
        self.num_forwards = 0
        self.lock = threading.Lock()

    def add(self, graph: CompiledGraph) -> None:
        """Take one of the two compiled graphs."""
        if self.num_forwards > MAX_FORWARDS:
            return
        self.graphs.append(graph)
        self.is_guess = self.is_guess or any(_depends_on_contents(entry) for entry in graph.inputs)
        if self.plan is not None:
            self._exchange(graph)

    def watch(self, plan: RematPlan, number: int) -> None:
        """Measure the next real step, for plan ``number`` of this process."""
        self.plan, self.number = plan, number
        for graph in self.graphs:
            self._exchange(graph)

    def _exchange(self, graph: CompiledGraph) -> None:
        original = getattr(graph.code, "current_callable", None)
        if original is None:
            return
        self.originals.append((graph.code, original))
        sizes = tuple(_size(entry) for entry in graph.inputs)
        if graph.is_backward:
            tangents = frozenset(i for i, name in enumerate(graph.signature.placeholders) if "tangents" in name)
            graph.code.current_callable = lambda arguments: self._backward(original, tangents, arguments)
        else:
            graph.code.current_callable = lambda arguments: self._forward(original, sizes, arguments)

    def _end(self) -> None:
        """Put the compiled functions back."""
        with self.lock:
            self.num_forwards = MAX_FORWARDS + 1
            self.forward = None
            while self.originals:
                code, original = self.originals.pop()
                code.current_callable = original
            self.graphs.clear()

    # -- the two functions that count

    def _forward(self, original: Code, sizes: tuple[int | None, ...], arguments: list[Any]) -> Any:
        self.forward = None
        self.num_forwards += 1
        if self.num_forwards > MAX_FORWARDS:
            self._end()
            return original(arguments)
        if not _is_real(arguments) or not _has_sizes(arguments, sizes) or not self._can_count():
            return original(arguments)
        held = list(_tensors(arguments))
        inputs = _places(held)
        if self.device_type != "cpu":
            held.clear()  # only CPU's log has no size for what is freed here and was there before
        counted = self._counted(arguments)
        with counted:
            results = original(arguments)
        outputs, all_results = _places(_tensors(results[: self.num_outputs])), _places(_tensors(results))
        self.forward = _Forward(counted.peak_bytes, counted.final_bytes, inputs, outputs, all_results)
        return results

    def _backward(self, original: Code, tangents: frozenset[int], arguments: list[Any]) -> Any:
        forward, self.forward = self.forward, None
        if forward is None or graph_is_kept() or not _is_real(arguments) or not self._can_count():
            return original(arguments)  # a graph that is kept keeps what it has saved: that was not projected
        saved = [entry for i, entry in enumerate(arguments) if i not in tangents and isinstance(entry, torch.Tensor)]
        if not _places(saved) <= forward.inputs | forward.results:
            return original(arguments)  # of another forward than the last one
        held: list[torch.Tensor] = []
        entering_bytes = 0
        if self.device_type == "cpu":
            # Outputs, too: one that is saved and that nobody has kept would be freed here and not in the projection.
            kept = forward.inputs | forward.outputs
            held = [tensor for tensor in saved if _place(tensor) in kept]
            entering_bytes = sum(_place_bytes(arguments[i]) for i in tangents)
            held += _enter_into_log(arguments, tangents)
        del saved
        counted = self._counted(arguments)
        with counted:
            results = original(arguments)
        del held
        self._judge(self._peak_bytes(forward, entering_bytes, counted))
        return results

    def _peak_bytes(self, forward: _Forward, entering_bytes: int, backward: _Counted) -> int | None:
        """The peak of the step, with what the plan counts as there before; ``None`` where it cannot be told."""
        if self.device_type == "cpu":
            before_bytes = 0 if self.plan is None else self.plan.baseline_bytes
            started_bytes = before_bytes + forward.final_bytes + entering_bytes
            return max(before_bytes + forward.peak_bytes, started_bytes + backward.peak_bytes)
        if backward.peak_bytes:
            return max(forward.peak_bytes, backward.peak_bytes)
        is_hidden = backward.earlier_bytes > forward.peak_bytes  # by what ran before the step, or inside of it
        return None if is_hidden else forward.peak_bytes

    def _can_count(self) -> bool:
        return self.device_type == "cuda" or (self.device_type == "cpu" and AllocationLog.is_possible())

    def _counted(self, arguments: list[Any]) -> _Counted:
        devices = (tensor.device for tensor in _tensors(arguments))
        return _Counted(next((device for device in devices if device.type == self.device_type), self.device_type))

    def _judge(self, peak_bytes: int | None) -> None:
        plan = self.plan
        self._end()
        if plan is None or peak_bytes is None:
            return
        record_measurement(self.number, peak_bytes)
        text = difference(plan, peak_bytes, self.is_guess)
        if text:
            warnings.warn(text, RematWarning, stacklevel=2)


class _Counted:
    """Bytes above the start while a function runs on CPU. On CUDA the process's peak, or 0 where it did not move."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.log = AllocationLog() if self.device.type == "cpu" else None
        self.peak_bytes = self.final_bytes = 0
        self.earlier_bytes = 0

    def __enter__(self) -> None:
        if self.log is None:
            self.earlier_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            self.log.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.log is None:
            now_bytes = torch.cuda.max_memory_allocated(self.device)
            self.peak_bytes = now_bytes if now_bytes > self.earlier_bytes else 0
            return
        self.log.__exit__(*error)
        totals = list(itertools.accumulate(self.log.sizes, initial=0))
        self.peak_bytes, self.final_bytes = max(totals), totals[-1]


def _enter_into_log(arguments: list[Any], tangents: frozenset[int]) -> list[torch.Tensor]:
    """Exchange the tangents for copies whose size the log knows when backward frees them; those that are to be held.

    Autograd holds a scalar loss's tangent to the end, and what is not one dense block has no copy of the same layout.
    """
    held: list[torch.Tensor] = []
    for i in sorted(tangents):
        tangent = arguments[i]
        if not isinstance(tangent, torch.Tensor):
            continue
        if tangent.dim() == 0 or _place_bytes(tangent) != tangent.numel() * tangent.itemsize:
            held.append(tangent)
            continue
        with AllocationLog():
            copy = tangent.clone(memory_format=torch.preserve_format)
        if copy.stride() == tangent.stride():
            arguments[i] = copy
        else:
            held += [tangent, copy]
    return held


def _is_real(arguments: Iterable[Any]) -> bool:
    """Plain tensors on plain storages: not a trace of the compiled function by another compiler."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return all(type(tensor) in plain and _has_storage(tensor) for tensor in _tensors(arguments))


def _has_storage(tensor: torch.Tensor) -> bool:
    """Sparse tensors, and those that ``vmap`` hands out, have none."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def _size(entry: Any) -> int | None:
    """The number that an argument was compiled for where it is a size; ``None`` for what is none."""
    if isinstance(entry, torch.SymInt):
        return int(entry.node.hint) if entry.node.has_hint() else None
    return entry if isinstance(entry, int) else None


def _depends_on_contents(entry: Any) -> bool:
    """Whether a size that was compiled for, or one of a tensor's, is not known before the step runs."""
    sizes = entry.shape if isinstance(entry, torch.Tensor) else (entry,)
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in sizes)


def _has_sizes(arguments: list[Any], sizes: tuple[int | None, ...]) -> bool:
    """Whether the symbolic sizes are those that the plan was made for."""
    return len(arguments) == len(sizes) and all(
        size is None or entry == size for entry, size in zip(arguments, sizes, strict=True)
    )


def _tensors(entries: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (entry for entry in entries if isinstance(entry, torch.Tensor))


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _places(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Where the storages lie; empty ones lie nowhere."""
    return frozenset(_place(tensor) for tensor in tensors) - {0}


def _place_bytes(entry: Any) -> int:
    return entry.untyped_storage().nbytes() if isinstance(entry, torch.Tensor) else 0


def is_over_budget(plan: RematPlan, measured_bytes: int) -> bool:
    """Whether a measured peak is above the plan's budget by more than a few scalars."""
    return plan.budget_bytes is not None and measured_bytes > plan.budget_bytes + SCALARS_BYTES


def difference(plan: RematPlan, measured_bytes: int, is_guess: bool = False) -> str | None:
    """What the user should know of a step that took other memory than projected; ``None`` where there is nothing.

    Where sizes depend on the contents of tensors (``is_guess``, or a value of the plan has such a size), the projection
    counted a fixed guess, and a budget worked out from the difference would be worth nothing.
    """
    projected, budget = plan.projected_peak_bytes, plan.budget_bytes
    is_over = is_over_budget(plan, measured_bytes)
    if not is_over and abs(measured_bytes - projected) <= max(TOLERANCE * projected, SCALARS_BYTES):
        return None
    figures = (
        f"{plan.graph_id}: the first step took {format_bytes(measured_bytes)} at its peak, and"
        f" {format_bytes(projected)} were projected ({100 * (measured_bytes / max(projected, 1) - 1):+.1f} %)"
    )
    is_guess = is_guess or any(UNBACKED.search(str(size)) for value in plan.values for size in value.shape)
    if is_guess:
        over = f", {format_bytes(measured_bytes - budget)} over the budget" if budget is not None and is_over else ""
        return (
            f"{figures}{over}. Some of its sizes depend on the contents of tensors and were projected as"
            f" {UNBACKED_SIZE} each, so nothing can be concluded: another batch takes other memory."
        )
    if budget is None:
        room = "leave that much room" if measured_bytes > projected else "it could be that much higher"
        return f"{figures}. A memory_budget would be off by as much: {room}."
    enough = format_bytes(budget * projected // measured_bytes)
    if is_over:
        return (
            f"{figures}; that is {format_bytes(measured_bytes - budget)} over the budget of {format_bytes(budget)}."
            f" memory_budget={budget * projected // measured_bytes} ({enough}) leaves room for the difference."
        )
    if measured_bytes > projected:
        return f"{figures}. The budget of {format_bytes(budget)} holds all the same."
    return (
        f"{figures}. The budget of {format_bytes(budget)} is not used up:"
        f" memory_budget={budget * projected // measured_bytes} ({enough}) would give a faster plan in no more memory."
    )
