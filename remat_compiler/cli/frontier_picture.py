"""The frontier as a picture: peak against step time, beside plain Inductor's plan, the budget and the lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from remat_passes.plan import RematPlan
from remat_passes.units import format_bytes, format_us

from .frontier import TradeOff, other_families, tradeoffs
from .picture import BLUE, GREEN, ORANGE, VERMILION, WIDTH_INCHES, byte_unit, draw_budget, time_unit
from .tables import clean

HEIGHT_INCHES = 3.4
GREYS = ("0.35", "0.5", "0.62", "0.72", "0.8")  # of the plans in other numbers of slices; more than these are not drawn


def frontier_figure(plans: Sequence[RematPlan]) -> Figure:
    """One panel a plan."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES * len(plans)), layout="constrained")
    for panel, plan in zip(figure.subfigures(len(plans), 1, squeeze=False)[:, 0], plans, strict=True):
        _draw(panel, plan)
    return figure


def _draw(panel: SubFigure, plan: RematPlan) -> None:
    panel.suptitle(f"Projected peak against step time, {clean(plan.graph_id)}", x=0.01, ha="left", fontsize=9)
    axes = panel.subplots()
    points = tradeoffs(plan)
    byte_name, byte_size = byte_unit(max([point.peak_bytes for point in points], default=1))
    time_name, time_size = time_unit(max([point.step_us for point in points], default=1.0))
    _draw_points(axes, points, other_families(plan), byte_size, time_size)
    _draw_limits(axes, plan, byte_size, time_size)
    axes.set_ylabel(f"peak, {byte_name}")
    axes.set_xlabel(f"step time, {time_name}")
    axes.margins(0.08)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    _draw_shares(axes, plan, byte_size, time_size)
    panel.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)


def _draw_points(
    axes: Axes,
    points: Sequence[TradeOff],
    families: Mapping[str, Sequence[TradeOff]],
    byte_size: int,
    time_size: float,
) -> None:
    def line(kept: Sequence[TradeOff]) -> tuple[list[float], list[float]]:
        return [point.step_us / time_size for point in kept], [point.peak_bytes / byte_size for point in kept]

    for colour, (name, family) in zip(GREYS, families.items(), strict=False):
        axes.plot(*line(family), ".-", drawstyle="steps-post", color=colour, markersize=3, linewidth=0.9,
                  label=f"considered: {name}")  # fmt: skip
    own = [point for point in points if point.saved_bytes is not None]
    axes.plot(*line(own), "o-", drawstyle="steps-post", color=BLUE, markersize=3.5, linewidth=1.2,
              label=f"considered: {own[0].way}" if families and own else "plans considered")  # fmt: skip
    for point in points:
        size = f"{format_bytes(point.peak_bytes)}, {format_us(point.step_us)}"
        if point.is_inductor:
            axes.plot(*line([point]), "s", color=ORANGE, markersize=8, markeredgecolor="black", markeredgewidth=0.6,
                      label=f"plain Inductor: {size}", zorder=4)  # fmt: skip
        if point.is_chosen:
            axes.plot(*line([point]), "D", color=VERMILION, markersize=6, markeredgecolor="black", markeredgewidth=0.6,
                      label=f"chosen: {size}", zorder=5)  # fmt: skip


def _draw_limits(axes: Axes, plan: RematPlan, byte_size: int, time_size: float) -> None:
    """The budget where it lies among the points, and the time that no plan within it can beat."""
    peaks = [point.peak_bytes for point in tradeoffs(plan)]
    if plan.budget_bytes is not None:
        draw_budget(axes, plan.budget_bytes, byte_size, inside=plan.budget_bytes <= max(peaks, default=0))
    if 0 < plan.lower_bound_us < math.inf:
        axes.axvline(plan.lower_bound_us / time_size, color=GREEN, linestyle=":", linewidth=1.6,
                     label=f"lower bound: {format_us(plan.lower_bound_us)}")  # fmt: skip


def _draw_shares(axes: Axes, plan: RematPlan, byte_size: int, time_size: float) -> None:
    """The same axes in per cent of plain Inductor's, where its figures are known."""
    if plan.inductor_peak_bytes <= 0 or plan.inductor_step_us <= 0:
        return
    times = axes.secondary_xaxis("top", functions=_in_percent_of(plan.inductor_step_us / time_size))
    times.set_xlabel("% of plain Inductor's")
    peaks = axes.secondary_yaxis("right", functions=_in_percent_of(plan.inductor_peak_bytes / byte_size))
    peaks.set_ylabel("% of plain Inductor's")


def _in_percent_of(whole: float) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """From a figure to its per cent of ``whole``, and back."""
    return (lambda figure: 100 * figure / whole), (lambda per_cent: per_cent * whole / 100)
