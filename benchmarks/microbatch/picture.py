"""The picture of the peaks: measured bytes against the number of slices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.microbatch.table import CHUNKER, COMPILE, EAGER, LOOP, REMAT, Point

MIB = 2**20

# Colours that people with any colour vision tell apart: Okabe and Ito, "Color Universal Design", 2008.
CURVES = {LOOP: ("#009E73", "^"), REMAT: ("#D55E00", "o")}
LINES = {EAGER: "#999999", COMPILE: "#0072B2", CHUNKER: "#CC79A7"}


def draw_slices(points: Sequence[Point], path: Path) -> None:
    """Write a curve for what runs in slices, and a line for each system that does not."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")  # without pyplot nothing asks for a screen
    axes = figure.subplots()
    known = [point for point in points if point.measured_bytes is not None]
    for family, (colour, marker) in CURVES.items():
        _draw_curve(axes, family, [p for p in known if p.family == family], colour, marker)
    for family, colour in LINES.items():
        for point in [p for p in known if p.family == family]:
            axes.axhline((point.measured_bytes or 0) / MIB, color=colour, linewidth=1, label=point.name)
    axes.set_xscale("log", base=2)
    axes.set_title("Measured peak of one training step", loc="left")
    axes.set_xlabel("slices")
    axes.set_ylabel("parameters, inputs and all allocations, MiB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_curve(axes: Axes, family: str, points: Sequence[Point], colour: str, marker: str) -> None:
    if not points:
        return
    peaks = [(point.measured_bytes or 0) / MIB for point in points]
    axes.plot([p.num_slices for p in points], peaks, marker, linestyle="-", color=colour, linewidth=1.5, label=family)
