"""``remat dump``: everything that was chosen, for people, for programs, or as a drawing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from remat_passes.plan import DECISIONS, SCHEMA, RematPlan
from remat_passes.units import format_bytes

from .candidates import candidate_section
from .dot import dot_graph
from .frontier import frontier_section
from .groups import group_record, group_values, total
from .headline import headline, summary, time_text
from .peak import peak_section
from .picture import check_picture, write_picture
from .plan_files import WrongUse, read_plans
from .slices import split_section
from .tables import Column, Row, fitted_table, heading, page_width, render, wants_colour, write
from .value_table import source_root, value_section


def dump_plans(path: Path, form: str, every_value: bool, output: Path | None, picture: Path | None) -> None:
    """Show the plans at ``path`` on stdout, or write them to the file ``output``; draw their memory into ``picture``.

    Raises:
        WrongUse: there is nothing at ``path``, ``output`` cannot be written, or the picture drawn or written.
        PlanFileError: there is no plan at ``path``, or a damaged one.
    """
    if picture is not None:
        check_picture(picture)
    plans = read_plans(path)
    if picture is not None:
        from .memory_picture import memory_figure

        write_picture(memory_figure, plans, picture)
    if form == "json":
        text = plans_json(plans, as_array=path.is_dir())
    elif form == "dot":
        text = "\n".join(dot_graph(plan) for plan in plans)
    else:
        parts = report(plans, page_width(sys.stdout), every_value)
        text = render(parts, page_width(sys.stdout), colour=output is None and wants_colour(sys.stdout))
    if output is None:
        write(text, sys.stdout)
    else:
        _write_file(text, output)


def _write_file(text: str, output: Path) -> None:
    try:
        output.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise WrongUse(f"{output} cannot be written: {error.strerror}.") from None


def plans_json(plans: Sequence[RematPlan], *, as_array: bool) -> str:
    """The plans as plan files hold them, each with its ``groups`` and its ``gap``."""
    records = [plan_record(plan) for plan in plans]
    return json.dumps(records if as_array else records[0], sort_keys=True, indent=1) + "\n"


def plan_record(plan: RematPlan) -> dict[str, Any]:
    """One plan for JSON; it can be read back as a plan file."""
    groups = [group_record(group) for group in group_values(plan.values)]
    return {"schema": SCHEMA, **asdict(plan), "groups": groups, "gap": plan.gap}


def report(plans: Sequence[RematPlan], width: int, every_value: bool) -> list[Text]:
    """The text form: a summary when there are several plans, then each plan in full."""
    parts: list[Text] = [*summary(plans, width), Text()] if len(plans) > 1 else []
    for place, plan in enumerate(plans):
        parts += [Text(f"\n{'-' * width}\n")] if place else []
        parts += headline(plan, width)
        parts += candidate_section(plan, width)
        parts += split_section(plan, width, every_value, source_root(plan.values))
        parts += value_section(plan, width, every_value)
        parts += _totals(plan, width)
        parts += peak_section(plan, width)
        parts += frontier_section(plan, width)
    return parts


MEANINGS = {
    "save": "kept from forward to backward",
    "recompute": "dropped after forward, computed again in backward",
    "free": "no memory of its own: an input, an output or a view",
}


def _totals(plan: RematPlan, width: int) -> list[Text]:
    columns = [
        Column("decision"),
        Column("values", "right"),
        Column("bytes", "right"),
        Column("recompute", "right"),
        Column("what it means", flexible=True),
    ]
    rows: list[Row] = []
    for decision in DECISIONS:
        sums = total(plan.values, decision)
        paid = time_text(plan.recompute_us) if decision == "recompute" else "-"
        rows.append((decision, str(sums.num_values), format_bytes(sums.bytes), paid, MEANINGS[decision]))
    return [heading("In all", width), Text(), fitted_table(columns, rows, width)]
