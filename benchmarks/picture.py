"""The picture of memory over a step, one curve a system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remat_compiler.measure import MemoryTrace

# Three colours that people with any colour vision tell apart: Okabe and Ito, "Color Universal Design", 2008.
COLOURS = ("#999999", "#0072B2", "#D55E00")
MIB = 2**20
PNG_DPI = 150


def draw_memory(curves: Mapping[str, MemoryTrace], budget_bytes: int | None, path: Path) -> None:
    """Write the total bytes over the time of one step into ``path``, with the budget and each curve's peak."""
    figure = Figure(figsize=(9, 5), layout="constrained")  # without pyplot nothing asks for a screen
    axes = figure.subplots()
    for (name, trace), colour in zip(curves.items(), COLOURS, strict=False):
        _draw_curve(axes, name, trace, colour)
    if budget_bytes is not None:
        label = f"budget: {budget_bytes / MIB:.0f} MiB"
        axes.axhline(budget_bytes / MIB, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_title("Memory over one training step (forward, then backward)", loc="left")
    axes.set_xlabel("time since the step's start, ms (with the profiler on)")
    axes.set_ylabel("parameters, inputs and all allocations, MiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", framealpha=0.9, edgecolor="none")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=PNG_DPI)


def _draw_curve(axes: Axes, name: str, trace: MemoryTrace, colour: str) -> None:
    times_ms = [time_us / 1e3 for time_us, _ in trace.timeline] + [trace.duration_us / 1e3]
    totals_mib = [total / MIB for _, total in trace.timeline]
    totals_mib.append(totals_mib[-1])
    label = f"{name}: peak {trace.peak_bytes / MIB:.0f} MiB"
    axes.plot(times_ms, totals_mib, drawstyle="steps-post", color=colour, linewidth=1.5, label=label)
    peak = max(range(len(totals_mib)), key=totals_mib.__getitem__)
    axes.plot(times_ms[peak], totals_mib[peak], "o", color=colour, markersize=6)
