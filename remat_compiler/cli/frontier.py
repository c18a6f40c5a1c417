"""The frontier in a few lines: what a smaller peak would have cost in time, and where the chosen plan lies."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from remat_passes.plan import FrontierPoint, RematPlan
from remat_passes.units import format_bytes

from .headline import ratio, time_text
from .tables import BOLD, Column, Row, fitted_table, heading

NUM_POINTS = 12
BAR_WIDTH = 24


def frontier_section(plan: RematPlan, width: int) -> list[Text]:
    """At most ``NUM_POINTS`` of the plans that were considered, with the chosen one marked."""
    if not plan.frontier:
        return []
    chosen = FrontierPoint(plan.projected_peak_bytes, plan.saved_bytes, plan.step_us)
    points = with_chosen(plan.frontier, chosen)
    picked = pick_evenly(points, points.index(chosen))
    highest = max(point.peak_bytes for point in picked)
    rows = [_row(point, point == chosen, plan, highest) for point in picked]
    columns = [
        Column("step", "right"),
        Column("of plain\nInductor's", "right"),
        Column("saved", "right"),
        Column("peak", "right"),
        Column("", flexible=True),
    ]
    title = f"Peak against step time ({len(picked)} of the {len(points)} plans that were considered)"
    return [heading(title, width), Text(), fitted_table(columns, rows, width)]


def with_chosen(frontier: Sequence[FrontierPoint], chosen: FrontierPoint) -> list[FrontierPoint]:
    """The points by step time; a chosen plan that is none of them is put where it belongs."""
    points = list(frontier) if chosen in frontier else [*frontier, chosen]
    return sorted(points, key=lambda point: (point.step_us, -point.peak_bytes))


def pick_evenly(points: Sequence[FrontierPoint], chosen: int, most: int = NUM_POINTS) -> list[FrontierPoint]:
    """At most ``most`` of the points: both ends, the one at index ``chosen``, and the rest evenly between."""
    if len(points) <= most:
        return list(points)
    last = len(points) - 1
    picked = [round(place * last / (most - 1)) for place in range(most)]
    if chosen not in picked:
        nearest = min(range(1, most - 1), key=lambda place: abs(picked[place] - chosen))
        picked[nearest] = chosen
    return [points[index] for index in picked]


def _row(point: FrontierPoint, is_chosen: bool, plan: RematPlan, highest: int) -> Row:
    bar = "#" * max(round(BAR_WIDTH * point.peak_bytes / highest), 1) if highest else ""
    cells = (
        time_text(point.step_us),
        ratio(point.step_us, plan.inductor_step_us),
        format_bytes(point.saved_bytes),
        format_bytes(point.peak_bytes),
        f"{bar} <- chosen" if is_chosen else bar,
    )
    return tuple(Text(cell, BOLD if is_chosen else "") for cell in cells)
