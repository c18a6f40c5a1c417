"""The picture of the peaks: one small plot a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peak.table import COMPILE, EAGER, REMAT, Point, Record

MIB = 2**20
NUM_COLUMNS = 4
MAX_RATIO = 3.0  # of the steps that are drawn: slower ones, as a loop over single samples, would flatten all others

# Seven colours that people with any colour vision tell apart: Okabe and Ito, "Color Universal Design", 2008.
STYLES = {
    EAGER: ("#999999", "s"),
    COMPILE: ("#0072B2", "s"),
    "activation_memory_budget": ("#56B4E9", "o"),
    "checkpoint per block": ("#009E73", "^"),
    "checkpoint of attention": ("#CC79A7", "v"),
    REMAT: ("#D55E00", "o"),
    # what the suite measures beside these
    "Python loop": ("#E69F00", "^"),
    "loop with another": ("#E69F00", "x"),
    "eager with another": ("#999999", "x"),
    "auto_chunker": ("black", "+"),
    "fused cross entropy": ("black", "*"),
}


def draw_peaks(records: Sequence[Record], path: Path) -> None:
    """Write measured peaks against step times, or against backward's products where no times were measured."""
    drawn = [record for record in records if record.points]
    num_rows = max(1, math.ceil(len(drawn) / NUM_COLUMNS))
    figure = Figure(figsize=(4 * NUM_COLUMNS, 3.2 * num_rows), layout="constrained")  # asks for no screen
    grid = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False)
    for axes in grid.flat[len(drawn) :]:
        axes.set_visible(False)
    for record, axes in zip(drawn, grid.flat, strict=False):
        _draw_model(axes, record)
    names = dict.fromkeys(family for record in drawn for family in record.families)
    found = {
        label: handle
        for axes in grid.flat[: len(drawn)]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [found[n] for n in names if n in found],
        [n for n in names if n in found],
        loc="outside upper center",
        ncols=min(len(names), 6) or 1,
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_model(axes: Axes, record: Record) -> None:
    is_timed = any(point.step_ratio for point in record.points)
    for family in record.families:
        colour, marker = STYLES.get(family, ("black", "x"))
        points = [p for p in record.family(family) if _effort(p, is_timed) is not None]
        peaks = [(p.measured_bytes or 0) / MIB for p in points]
        efforts = [_effort(p, is_timed) for p in points]
        line = "-" if family in (REMAT, "activation_memory_budget") else "none"
        axes.plot(peaks, efforts, marker, linestyle=line, color=colour, linewidth=1, markersize=4, label=family)
    axes.set_title(record.title, loc="left", fontsize=9)
    axes.set_xlabel("measured peak, MiB", fontsize=8)
    axes.set_ylabel("step / torch.compile" if is_timed else "products in backward", fontsize=8)
    axes.set_xlim(left=0)
    if is_timed and max(point.step_ratio or 0 for point in record.points) > MAX_RATIO:
        axes.set_ylim(top=MAX_RATIO)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _effort(point: Point, is_timed: bool) -> float | None:
    return point.step_ratio if is_timed else point.num_products
