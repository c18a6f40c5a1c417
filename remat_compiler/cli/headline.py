"""The headline of a plan: its figures beside those of plain Inductor, in words for someone who meets remat today."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.text import Text

from remat_passes.plan import RematPlan
from remat_passes.units import format_bytes, format_us

from .certificate import certificate_lines
from .groups import total
from .slices import loops_text, slices_of
from .tables import BOLD, DIM, INDENT, NOTE, Column, Row, clean, fitted_table, labelled, paragraph, wrapped


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole``, or a dash when there is no whole."""
    return f"{100 * part / whole:.0f}%" if whole > 0 else "-"


def ratio(part: float, whole: float) -> str:
    """How many times ``whole``, or a dash when there is no whole."""
    return f"{part / whole:.2f}x" if whole > 0 else "-"


def time_text(us: float) -> str:
    """A time, or a dash for one that does not exist: what may not be recomputed has an infinite cost."""
    return format_us(us) if math.isfinite(us) else "-"


def count(num: int, noun: str) -> str:
    """``1 value``, ``12 values``."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def headline(plan: RematPlan, width: int) -> list[Text]:
    """What the plan promises: a titled list of figures, and how close it is to the best there is."""
    origin = f"planned for {plan.device} with the {plan.cost_model} cost model, lowered by {plan.lowering},"
    title = Text.assemble((clean(plan.graph_id), BOLD), "  ", (clean(f"{origin} torch {plan.torch_version}"), DIM))
    figures = labelled(_figures(plan), width)
    return [wrapped(title, width), Text(), figures, *_notes(plan.notes, width), Text(), *certificate_lines(plan, width)]


def _figures(plan: RematPlan) -> list[Row]:
    rows = [
        ("budget", _budget(plan), _room(plan)),
        ("projected peak", format_bytes(plan.projected_peak_bytes), _against_inductor_peak(plan)),
        ("step time", time_text(plan.step_us), _against_inductor_step(plan)),
        ("saved", format_bytes(plan.saved_bytes), _saved(plan)),
        ("recompute", time_text(plan.recompute_us), _recomputed(plan)),
        ("micro-batches", str(plan.num_microbatches), _slices(plan)),
        ("before the step", format_bytes(plan.baseline_bytes), "allocated already: parameters, buffers, inputs"),
        ("gradients", format_bytes(plan.gradient_bytes), "of the parameters, alive at the end of the step"),
    ]
    if plan.symbols:
        sizes = ", ".join(f"{name} = {hint}" for name, hint in plan.symbols)
        rows.append(("symbols", str(len(plan.symbols)), clean(f"planned for {sizes}; other sizes need other bytes")))
    return [(label, Text(figure, BOLD), meaning) for label, figure, meaning in rows]


def _notes(notes: Iterable[str], width: int) -> list[Text]:
    return [paragraph(Text(clean(f"note: {note}"), NOTE), width, indent=INDENT) for note in notes]


def _budget(plan: RematPlan) -> str:
    return "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)


def _room(plan: RematPlan) -> str:
    if plan.budget_bytes is None:
        return "no limit was set: the smallest of the fastest plans"
    left = plan.budget_bytes - plan.projected_peak_bytes
    return f"{format_bytes(left)} of it stay unused" if left >= 0 else f"exceeded by {format_bytes(-left)}"


def _against_inductor_peak(plan: RematPlan) -> str:
    plain = plan.inductor_peak_bytes
    if plain <= 0:
        return "plain Inductor's is not known"
    return f"{percent(plan.projected_peak_bytes, plain)} of plain Inductor's {format_bytes(plain)}"


def _against_inductor_step(plan: RematPlan) -> str:
    if plan.inductor_step_us <= 0:
        return "plain Inductor's is not known"
    return f"{ratio(plan.step_us, plan.inductor_step_us)} plain Inductor's {time_text(plan.inductor_step_us)}"


def _saved(plan: RematPlan) -> str:
    values = f"{count(total(plan.values, 'save').num_values, 'value')} kept from forward to backward"
    return values if plan.microbatches is None else f"{values}, in each slice"


def _recomputed(plan: RematPlan) -> str:
    dropped = total(plan.values, "recompute")
    if not dropped.num_values:
        return "nothing is computed twice"
    values = count(dropped.num_values, "dropped value")
    share = percent(plan.recompute_us, plan.step_us)
    each = "" if plan.microbatches is None else " in each slice"
    return f"{share} of the step, to compute {values} ({format_bytes(dropped.bytes)}) again{each}"


def _slices(plan: RematPlan) -> str:
    split = plan.microbatches
    if split is not None:
        return f"{slices_of(split)}: {loops_text(split)}"
    num = plan.num_microbatches
    return "the batch is not split" if num == 1 else f"the batch runs in {num} slices"


SUMMARY = [
    Column("graph", flexible=True),
    Column("peak", "right"),
    Column("of\nplain", "right"),
    Column("step", "right"),
    Column("of\nplain", "right"),
    Column("saved", "right"),
    Column("recompute", "right"),
    Column("micro-\nbatches", "right"),
]


def summary(plans: Sequence[RematPlan], width: int) -> list[Text]:
    """One line a plan, and their notes."""
    rows = [_summary_row(plan) for plan in plans]
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    meaning = Text("of plain: compared with what plain Inductor is projected to need", DIM)
    return [fitted_table(SUMMARY, rows, width), paragraph(meaning, width, indent=INDENT), *_notes(notes, width)]


def _summary_row(plan: RematPlan) -> Row:
    return (
        clean(plan.graph_id),
        format_bytes(plan.projected_peak_bytes),
        percent(plan.projected_peak_bytes, plan.inductor_peak_bytes),
        time_text(plan.step_us),
        ratio(plan.step_us, plan.inductor_step_us),
        format_bytes(plan.saved_bytes),
        time_text(plan.recompute_us),
        str(plan.num_microbatches),
    )
