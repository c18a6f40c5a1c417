"""MemoryTrace: the bytes that a step really takes, counted by the allocator.

What is projected must be compared with something that does not share the projection's mistakes. On CUDA that is the
caching allocator's own counter. CPU has none: the resident set size, the obvious stand-in, also counts the
interpreter, code and pages that the C library keeps, and misses what is freed between two samples. The profiler's
memory events are exact: one signed size for each call of PyTorch's CPU allocator.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .torch_private import allocations_within

_STEP = "remat_compiler.measure.step"  # the range that marks the step among the profiler's events


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """The memory of one step on one device.

    Every count is of bytes that PyTorch's allocator handed out: what was there when the step started
    (``baseline_bytes``) plus what the step allocated, less what it freed of that. Memory that a library takes from the
    operating system by itself (a BLAS's own buffers, Python's objects) is not counted, nor is rounding by CPU's
    ``malloc``; CUDA's counter does round as its allocator rounds. A step that frees what was there before goes below
    the baseline on CUDA only: CPU's allocator does not know the size of a block from before the profiler's start.
    """

    baseline_bytes: int
    peak_bytes: int  # the highest total at any instant of the step; at least baseline_bytes
    duration_us: float  # on CPU with the profiler's own cost in it: not a step time
    timeline: tuple[tuple[float, int], ...]  # (us since the start, total bytes from then on); empty on CUDA

    @property
    def above_baseline_bytes(self) -> int:
        """What the step takes on top of what was there at its start."""
        return self.peak_bytes - self.baseline_bytes


def measure_peak(step: Callable[[], object], device: str = "cpu", *, baseline_bytes: int = 0) -> MemoryTrace:
    """Run ``step`` once and measure its highest total of allocated bytes.

    Gradients are allocated only where ``.grad`` is ``None`` at the start, so set that before, and not in the step.
    What ``step`` returns is alive until the measurement ends. Warm a compiled step up first, or its compilation is
    measured too.

    Args:
        step: Called once, without arguments.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        baseline_bytes: On CPU, what to count as there at the start, see ``tensor_bytes``; with 0 the trace holds the
            bytes above the start. CUDA's allocator knows what is there, so there it is not used.

    Raises:
        ValueError: Bytes cannot be measured on that device.
    """
    gc.collect()  # garbage in cycles would else be freed at some instant of the step
    kind = torch.device(device).type
    if kind == "cpu":
        return _measure_cpu(step, baseline_bytes)
    if kind == "cuda":
        return _measure_cuda(step, device)
    raise ValueError(f"The peak of a step cannot be measured on {device!r}, only on 'cpu' and 'cuda'.")


def tensor_bytes(*objects: object) -> int:
    """Bytes of the distinct storages behind ``objects``, each storage once.

    An object is a tensor, a module (its parameters and buffers), or a mapping or iterable of such; anything else has no
    bytes. A view counts as its whole storage, because that is what it keeps alive. Gradients are not counted.
    """
    storages = {}
    for tensor in _tensors(objects):
        storage = tensor.untyped_storage()
        storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(entry: object) -> Iterator[torch.Tensor]:
    if isinstance(entry, torch.Tensor):
        yield entry
    elif isinstance(entry, torch.nn.Module):
        yield from entry.parameters()
        yield from entry.buffers()
    elif isinstance(entry, Mapping):
        yield from _tensors(entry.values())
    elif isinstance(entry, Iterable) and not isinstance(entry, (str, bytes)):
        for inner in entry:
            yield from _tensors(inner)


def _measure_cuda(step: Callable[[], object], device: str) -> MemoryTrace:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    baseline_bytes = torch.cuda.memory_allocated(device)
    start_s = time.perf_counter()
    result = step()
    torch.cuda.synchronize(device)
    duration_us = (time.perf_counter() - start_s) * 1e6
    peak_bytes = torch.cuda.max_memory_allocated(device)
    del result
    return MemoryTrace(baseline_bytes, peak_bytes, duration_us, ())


def _measure_cpu(step: Callable[[], object], baseline_bytes: int) -> MemoryTrace:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function(_STEP):
            result = step()
        del result
    start_ns, end_ns, events = allocations_within(profiler, _STEP)
    total_bytes = baseline_bytes
    timeline = [(0.0, total_bytes)]
    places: set[int] = set()
    for event in events:
        if event.bytes > 0:
            places.add(event.place)
        elif event.place not in places:
            continue  # from before the step: its size is unknown, or that of a block that was there long ago
        else:
            places.remove(event.place)
        total_bytes += event.bytes
        timeline.append(((event.at_ns - start_ns) / 1e3, total_bytes))
    peak_bytes = max(total for _, total in timeline)
    return MemoryTrace(baseline_bytes, peak_bytes, (end_ns - start_ns) / 1e3, tuple(timeline))
