"""The numbers of slices that were weighed under a budget: what each would need, and why it was not taken."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from remat_passes.plan import RematPlan, StepCandidate
from remat_passes.units import format_bytes

from .headline import time_text
from .tables import BOLD, Column, Row, fitted_table, heading

WAYS = {"step": "the batch in {} slices", "tail": "the tail in {} slices"}


def way_text(part: str, num_microbatches: int) -> str:
    """``the batch in 4 slices``, ``the tail in 8 slices``, ``unsplit``."""
    return WAYS.get(part, part + " in {} slices").format(num_microbatches) if num_microbatches > 1 else "unsplit"


def candidate_section(plan: RematPlan, width: int) -> list[Text]:
    """A part of ``remat dump`` and ``remat frontier``; nothing where there was no choice."""
    if len(plan.candidates) < 2:
        return []
    columns = [
        Column("way to run the step"),
        Column("step", "right"),
        Column("peak", "right"),
        Column("", flexible=True),
    ]
    rows = [_row(candidate) for candidate in _gathered(plan.candidates)]
    return [heading("In how many slices", width), Text(), fitted_table(columns, rows, width)]


def _gathered(candidates: Sequence[StepCandidate]) -> list[list[StepCandidate]]:
    """Neighbours of which nothing is known but one and the same verdict share a line."""
    runs: list[list[StepCandidate]] = []
    for candidate in candidates:
        last = runs[-1][-1] if runs else None
        is_same = last is not None and (last.part, last.verdict, last.step_us) == (
            candidate.part,
            candidate.verdict,
            candidate.step_us,
        )
        if is_same and candidate.step_us is None and last is not None and last.num_microbatches > 1:
            runs[-1].append(candidate)
        else:
            runs.append([candidate])
    return runs


def _row(run: Sequence[StepCandidate]) -> Row:
    first, last = run[0], run[-1]
    way = way_text(first.part, last.num_microbatches)
    if len(run) > 1:
        way = way.replace(f"in {last.num_microbatches}", f"in {first.num_microbatches} to {last.num_microbatches}")
    cells = (
        way,
        "-" if first.step_us is None else time_text(first.step_us),
        "-" if first.peak_bytes is None else format_bytes(first.peak_bytes),
        first.verdict,
    )
    return tuple(Text(cell, BOLD if first.chosen else "") for cell in cells)
