"""Memory over one step as a picture, and beside it what is alive at the peak."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from remat_passes.plan import Moment, RematPlan
from remat_passes.units import format_bytes

from .peak import BEFORE, OTHER, PeakGroup, peak_groups
from .picture import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    LIGHT_GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WIDTH_INCHES,
    YELLOW,
    byte_unit,
    draw_budget,
    shortened,
    spread,
)
from .tables import clean

HEIGHT_INCHES = 3.3
NUM_GROUPS = 5
ROOM = 1.06  # of the axis above the highest line
FAR = 1.3  # a budget that is higher than all else by this factor is named, but not drawn: it would flatten the rest
LABEL_GAP = 0.135  # of the axis, between two labels of two lines each
LABEL_LETTERS = 22
GROUP_COLOURS = (ORANGE, GREEN, PURPLE, YELLOW, VERMILION, SKY)


def memory_figure(plans: Sequence[RematPlan]) -> Figure:
    """One panel a plan."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES * len(plans)), layout="constrained")
    for panel, plan in zip(figure.subfigures(len(plans), 1, squeeze=False)[:, 0], plans, strict=True):
        _draw(panel, plan)
    return figure


def _draw(panel: SubFigure, plan: RematPlan) -> None:
    panel.suptitle(f"Projected memory of one step, {clean(plan.graph_id)}", x=0.01, ha="left", fontsize=9)
    over_time, at_peak = panel.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    alive = sum(value.bytes for value in plan.peak_values)
    lines = [plan.predicted_peak_bytes, alive, plan.inductor_peak_bytes, *(moment.bytes for moment in plan.timeline)]
    top = max(lines) * ROOM or 1.0
    if plan.budget_bytes is not None and plan.budget_bytes <= max(lines) * FAR:
        top = max(top, plan.budget_bytes * ROOM)
    name, unit = byte_unit(top)
    _draw_timeline(over_time, plan.timeline, unit)
    _draw_limits(over_time, plan, top, unit)
    over_time.set_ylim(0, top / unit)
    over_time.set_ylabel(f"allocated, {name}")
    over_time.set_xlabel("kernels, in the order that they run")
    _draw_groups(at_peak, peak_groups(plan.peak_values, NUM_GROUPS), top / unit, unit)
    handles, labels = over_time.get_legend_handles_labels()
    panel.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, fontsize=8)


def _draw_timeline(axes: Axes, timeline: Sequence[Moment], unit: int) -> None:
    """Both sides filled; the line between two kernels is the step from one to the next."""
    for side, colour in (("forward", SKY), ("backward", BLUE)):
        places = [place for place, moment in enumerate(timeline) if moment.side == side]
        if not places:
            continue
        sizes = [timeline[place].bytes / unit for place in places]
        edges = [*places, places[-1] + 1]
        axes.stairs(sizes, edges, fill=True, color=colour, alpha=0.45, linewidth=0)
        axes.stairs(sizes, edges, color=colour, linewidth=1.2, label=side, baseline=None)
    axes.set_xlim(0, max(len(timeline), 1))


def _draw_limits(axes: Axes, plan: RematPlan, top: float, unit: int) -> None:
    """The budget, plain Inductor's peak, and the peak itself at the kernel where it is."""
    axes.axhline(
        plan.inductor_peak_bytes / unit, color=GREY, linestyle=":", linewidth=1.6,
        label=f"plain Inductor's peak {format_bytes(plan.inductor_peak_bytes)}",
    )  # fmt: skip
    if plan.budget_bytes is not None:
        draw_budget(axes, plan.budget_bytes, unit, inside=plan.budget_bytes <= top)
    if plan.timeline:
        place = max(range(len(plan.timeline)), key=lambda at: plan.timeline[at].bytes)
        peak = plan.timeline[place]
        what = f"peak {format_bytes(peak.bytes)} at {shortened(clean(peak.name), LABEL_LETTERS)}"
        axes.plot(place + 0.5, peak.bytes / unit, "o", color=VERMILION, markersize=5, label=what, zorder=5)


def _draw_groups(axes: Axes, groups: Sequence[PeakGroup], top: float, unit: int) -> None:
    """What was there before the step at the bottom, then the groups by size, each with its name and bytes."""
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.set_xlabel("alive at\nthe peak")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False)
    ordered = sorted(groups, key=lambda group: (group.label != BEFORE, group.label == OTHER, -group.bytes))
    colours = iter(GROUP_COLOURS)
    centres = []
    base = 0.0
    for group in ordered:
        height = group.bytes / unit
        colour = {BEFORE: GREY, OTHER: LIGHT_GREY}.get(group.label) or next(colours)
        axes.bar(0.5, height, width=1, bottom=base, color=colour, edgecolor="white", linewidth=0.6)
        centres.append(base + height / 2)
        base += height
    for group, centre, place in zip(ordered, centres, spread(centres, LABEL_GAP * top, top), strict=True):
        axes.annotate(
            _label(group), (1, centre), xytext=(1.45, place), va="center", fontsize=8, color=DARK, linespacing=1.05,
            annotation_clip=False, arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 1,
                                               "shrinkB": 0, "relpos": (0, 0.5)},
        )  # fmt: skip


def _label(group: PeakGroup) -> str:
    name = "parameters, inputs" if group.label == BEFORE else shortened(clean(group.label), LABEL_LETTERS)
    return f"{name}\n{format_bytes(group.bytes)}"
