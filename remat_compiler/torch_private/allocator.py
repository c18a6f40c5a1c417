"""What PyTorch's CPU allocator hands out and takes back, and when."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class AllocationLog:
    """The sizes that PyTorch's CPU allocator hands out (positive) and takes back (negative) in this thread, in order.

    torch.profiler counts the same (measure.py). It is not for a step of the user's: Kineto prints to stderr when it
    starts and when it stops, and a session that the user opens meanwhile, in whatever thread, breaks this one or the
    process (tried on 2.13.0). The profiler that it has replaced belongs to one thread and is silent. A block from
    before the log is freed without a size, and with a warning on stderr, so whoever logs keeps those alive.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @staticmethod
    def is_possible() -> bool:
        """Not while a profiler is active."""
        return not (torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())

    def __enter__(self) -> AllocationLog:
        nothing = torch._C._profiler._ExperimentalConfig()
        config = torch.autograd.ProfilerConfig(
            torch.autograd.ProfilerState.CPU, False, True, False, False, False, nothing
        )
        torch.autograd._enable_profiler_legacy(config)
        return self

    def __exit__(self, *_error: object) -> None:
        events = [event for thread in torch.autograd._disable_profiler_legacy() for event in thread]
        self.sizes = [event.cpu_memory_usage() for event in events if event.cpu_memory_usage()]


@dataclass(frozen=True, slots=True)
class Allocation:
    """A call of PyTorch's CPU allocator: positive bytes for a block handed out, negative ones for one taken back."""

    at_ns: int
    place: int  # its address
    bytes: int


def allocations_within(profiler: torch.profiler.profile, name: str) -> tuple[int, int, list[Allocation]]:
    """Start and end of the range of that name in ns, and the CPU allocator's calls between them, in order.

    The profiler's public events have no address. Without it a free cannot be told from one of a block that was there
    before: the allocator's reporter (c10/core/CPUAllocator.cpp) keeps the sizes of blocks that an earlier profile saw
    and whose end it did not, and gives such a size to whatever block lies there later.
    """
    from torch._C._profiler import _ExtraFields_Allocation

    if profiler.profiler is None or profiler.profiler.kineto_results is None:
        raise RuntimeError("torch.profiler recorded nothing; is another profiler active?")
    found = []
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    start_ns = end_ns = 0
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == name:
            start_ns, end_ns = event.start_time_ns, event.end_time_ns
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
            found.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
    found.sort(key=lambda allocation: allocation.at_ns)  # threads stand one after another
    return start_ns, end_ns, [allocation for allocation in found if start_ns <= allocation.at_ns <= end_ns]
