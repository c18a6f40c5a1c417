"""``remat frontier``: what a smaller peak costs in time, for one captured graph, and where the chosen plan lies.

The points are the plans that the search considered and that no other beats in both. Beside them stands plain
Inductor's own plan, because that is what a user has today.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from remat_passes.plan import FrontierPoint, RematPlan
from remat_passes.units import format_bytes

from .candidates import candidate_section, way_text
from .certificate import certificate_lines
from .headline import count, percent, time_text
from .picture import check_picture, write_picture
from .plan_files import read_plans
from .tables import (
    BOLD,
    DIM,
    INDENT,
    Column,
    Row,
    clean,
    fitted_table,
    heading,
    page_width,
    paragraph,
    print_parts,
    write,
)

MIB = 2**20
NUM_SHOWN = 12  # of the frontier as a part of 'remat dump'
BAR_WIDTH = 24
FIGURES_WIDTH = 67  # of a line without its bar, with the longest mark

CSV_COLUMNS = (
    "graph_id",
    "peak_bytes",
    "saved_bytes",
    "step_us",
    "of_inductor_peak",
    "of_inductor_step",
    "us_per_mib",
    "chosen",
    "plain_inductor",
    "way",
)


@dataclass(frozen=True, slots=True)
class TradeOff:
    """One point: the peak, the step time, and what its smaller peak costs beside the point before it."""

    peak_bytes: int
    saved_bytes: int | None  # not known of plain Inductor's plan
    step_us: float
    us_per_mib: float | None  # time lost per MiB gained; None where the peak is no smaller than before
    is_chosen: bool
    is_inductor: bool
    way: str = "unsplit"

    @property
    def mark(self) -> str:
        """What a reader should know the point by."""
        names = [name for name, holds in (("chosen", self.is_chosen), ("plain", self.is_inductor)) if holds]
        return f"<- {', '.join(names)}" if names else ""


def show_frontiers(path: Path, form: str, picture: Path | None) -> None:
    """Show the frontier of each plan at ``path`` on stdout, and draw it into ``picture``.

    Raises:
        WrongUse: there is nothing at ``path``, or the picture cannot be drawn or written.
        PlanFileError: there is no plan at ``path``, or a damaged one.
    """
    if picture is not None:
        check_picture(picture)
    plans = read_plans(path)
    if picture is not None:
        from .frontier_picture import frontier_figure

        write_picture(frontier_figure, plans, picture)
    if form == "json":
        records = [frontier_record(plan) for plan in plans]
        text = json.dumps(records if path.is_dir() else records[0], sort_keys=True, indent=1) + "\n"
        write(text, sys.stdout)
    elif form == "csv":
        write(frontier_csv(plans), sys.stdout)
    else:
        print_parts(frontier_report(plans, page_width(sys.stdout)), sys.stdout)


def tradeoffs(plan: RematPlan, most: int | None = None) -> list[TradeOff]:
    """The points by rising step time, at most ``most`` of them: the ends, the marked ones and some between."""
    points = _with_inductor([_tradeoff(point) for point in plan.own_frontier], plan)
    if most is not None:
        marked = {place for place, point in enumerate(points) if point.mark}
        points = [points[place] for place in pick_evenly(len(points), marked, most)]
    return _with_rates(points)


def other_families(plan: RematPlan) -> dict[str, list[TradeOff]]:
    """The points that run in other numbers of slices, by what they are called."""
    own, families = set(plan.own_frontier), dict[str, list[TradeOff]]()
    for point in plan.frontier:
        if point not in own:
            families.setdefault(way_text(point.part, point.num_microbatches), []).append(_tradeoff(point))
    return families


def _tradeoff(point: FrontierPoint) -> TradeOff:
    way = way_text(point.part, point.num_microbatches)
    return TradeOff(point.peak_bytes, point.saved_bytes, point.step_us, None, point.chosen, False, way)


def _with_inductor(points: list[TradeOff], plan: RematPlan) -> list[TradeOff]:
    """Plain Inductor's point marked where it is one of them, else put where it belongs."""
    if not points or plan.inductor_peak_bytes <= 0 or plan.inductor_step_us <= 0:
        return points
    plain = (plan.inductor_peak_bytes, plan.inductor_step_us)
    marked = [
        replace(point, is_inductor=True) if (point.peak_bytes, point.step_us) == plain else point for point in points
    ]
    if marked == points:
        marked.append(TradeOff(plan.inductor_peak_bytes, None, plan.inductor_step_us, None, False, True))
    return sorted(marked, key=lambda point: (point.step_us, -point.peak_bytes))


def _with_rates(points: Sequence[TradeOff]) -> list[TradeOff]:
    """Each point with what it costs beside the one before it; one that gains nothing is passed over."""
    rated = []
    before: TradeOff | None = None
    for point in points:
        rate = None
        if before is not None and point.peak_bytes < before.peak_bytes:
            rate = (point.step_us - before.step_us) / (before.peak_bytes - point.peak_bytes) * MIB
        rated.append(replace(point, us_per_mib=rate))
        if before is None or point.peak_bytes < before.peak_bytes:
            before = point
    return rated


def pick_evenly(num: int, kept: Iterable[int], most: int) -> list[int]:
    """At most ``most`` of ``num`` places (or all of ``kept``): both ends, ``kept``, and the rest evenly between."""
    if num <= most:
        return list(range(num))
    picked = {0, num - 1, *kept}
    evenly = [round(place * (num - 1) / (most - 1)) for place in range(most)]
    far_first = sorted(evenly, key=lambda place: -min(abs(place - other) for other in picked))
    for place in far_first:
        if len(picked) < most:
            picked.add(place)
    return sorted(picked)


def frontier_report(plans: Sequence[RematPlan], width: int) -> list[Text]:
    """The text form: for each graph its certificate and all its points."""
    parts: list[Text] = []
    for place, plan in enumerate(plans):
        parts += [Text(f"\n{'-' * width}\n")] if place else []
        parts += [Text(clean(plan.graph_id), BOLD), Text(), *certificate_lines(plan, width)]
        points = tradeoffs(plan)
        parts += candidate_section(plan, width)
        title = f"Peak against step time ({count(len(plan.own_frontier), 'plan')} that none of those considered beats)"
        parts += _section(title, points, plan, width) if points else [Text("\nThe plan file holds no frontier.")]
    return parts


def frontier_section(plan: RematPlan, width: int) -> list[Text]:
    """A part of ``remat dump``: at most ``NUM_SHOWN`` of the points."""
    points = tradeoffs(plan, NUM_SHOWN)
    if not points:
        return []
    all_points = len(tradeoffs(plan))
    shown = f"{len(points)} of {all_points} points" if len(points) < all_points else count(all_points, "point")
    return _section(f"Peak against step time ({shown})", points, plan, width)


def _section(title: str, points: Sequence[TradeOff], plan: RematPlan, width: int) -> list[Text]:
    highest = max(point.peak_bytes for point in points)
    bar_width = max(min(BAR_WIDTH, width - FIGURES_WIDTH), 1)
    rows = [_row(point, plan, highest, bar_width) for point in points]
    columns = [
        Column("step", "right"),
        Column("of\nplain", "right"),
        Column("peak", "right"),
        Column("of\nplain", "right"),
        Column("per MiB\ngained", "right"),
        Column("", flexible=True),
    ]
    meaning = Text(
        "plain: plain Inductor's own plan; per MiB gained: the time that the smaller peak costs, beside the line above",
        DIM,
    )
    return [
        heading(title, width),
        Text(),
        fitted_table(columns, rows, width),
        paragraph(meaning, width, indent=INDENT),
    ]


def _row(point: TradeOff, plan: RematPlan, highest: int, bar_width: int) -> Row:
    bar = "#" * max(round(bar_width * point.peak_bytes / highest), 1) if highest else ""
    cells = (
        time_text(point.step_us),
        step_percent(point.step_us, plan.inductor_step_us),
        format_bytes(point.peak_bytes),
        percent(point.peak_bytes, plan.inductor_peak_bytes),
        "-" if point.us_per_mib is None else time_text(point.us_per_mib),
        f"{bar} {point.mark}" if point.mark else bar,
    )
    return tuple(Text(cell, BOLD if point.is_chosen else "") for cell in cells)


def step_percent(part_us: float, whole_us: float) -> str:
    """A step in per cent with one decimal, because a plan is often slower by less than one."""
    return f"{100 * part_us / whole_us:.1f}%" if whole_us > 0 else "-"


def frontier_record(plan: RematPlan) -> dict[str, Any]:
    """The frontier of one plan for JSON, in bytes and microseconds."""
    return {
        "graph_id": plan.graph_id,
        "budget_bytes": plan.budget_bytes,
        "lower_bound_us": plan.lower_bound_us,
        "schedule_class": plan.schedule_class,
        "gap": plan.gap,
        "inductor_peak_bytes": plan.inductor_peak_bytes,
        "inductor_step_us": plan.inductor_step_us,
        "points": [_point_record(point, plan) for point in _all_points(plan)],
        "candidates": [asdict(candidate) for candidate in plan.candidates],
    }


def _point_record(point: TradeOff, plan: RematPlan) -> dict[str, Any]:
    return {
        "peak_bytes": point.peak_bytes,
        "saved_bytes": point.saved_bytes,
        "step_us": point.step_us,
        "of_inductor_peak": _part(point.peak_bytes, plan.inductor_peak_bytes),
        "of_inductor_step": _part(point.step_us, plan.inductor_step_us),
        "us_per_mib": None if point.us_per_mib is None else round(point.us_per_mib, 3),
        "chosen": point.is_chosen,
        "plain_inductor": point.is_inductor,
        "way": point.way,
    }


def _all_points(plan: RematPlan) -> list[TradeOff]:
    return [*tradeoffs(plan), *(point for points in other_families(plan).values() for point in points)]


def _part(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None


def frontier_csv(plans: Sequence[RematPlan]) -> str:
    """One line a point under a header; what is not known is empty, and true and false are 1 and 0."""
    page = io.StringIO()
    writer = csv.DictWriter(page, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for plan in plans:
        for point in _all_points(plan):
            record = {"graph_id": plan.graph_id, **_point_record(point, plan)}
            writer.writerow({key: int(cell) if isinstance(cell, bool) else cell for key, cell in record.items()})
    return page.getvalue()
