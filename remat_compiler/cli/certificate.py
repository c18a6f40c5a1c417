"""The certificate of a plan in one sentence: how much faster any plan within the same bytes could be at most.

A lower bound alone says little. Beside the step that was reached and the bytes that it was reached in, it says whether
there is anything left to look for.
"""

from __future__ import annotations

import math

from rich.text import Text

from remat_passes.plan import RematPlan
from remat_passes.units import format_bytes, format_us

from .tables import BOLD, DIM, INDENT, clean, paragraph


def certificate(plan: RematPlan) -> str:
    """The sentence. A plan whose peak turned out above its budget is not called certified."""
    this = f"this one: {format_us(plan.step_us)}, {format_bytes(plan.projected_peak_bytes)}"
    if not 0 < plan.lower_bound_us < math.inf:
        return f"Not certified: no lower bound is known; {this}"
    bound, gap = format_us(plan.lower_bound_us), f"(gap {100 * plan.gap:.1f}%)"
    if plan.budget_bytes is None:
        limit = f"plain Inductor's {format_bytes(plan.inductor_peak_bytes)}"
        return f"Certified: no plan within {limit} beats {bound}; {this} {gap}"
    limit = format_bytes(plan.budget_bytes)
    if plan.projected_peak_bytes > plan.budget_bytes:
        return f"Not certified: no plan within {limit} beats {bound}; {this}, which is above the budget"
    return f"Certified: no plan within {limit} beats {bound}; {this} {gap}"


def certificate_lines(plan: RematPlan, width: int) -> list[Text]:
    """The sentence, and below it what "no plan" means."""
    meaning = Text(clean(f"by the cost model, among plans where {plan.schedule_class}"), DIM)
    return [paragraph(Text(certificate(plan), BOLD), width), paragraph(meaning, width, indent=INDENT)]
