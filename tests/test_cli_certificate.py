"""The certificate: one sentence for every kind of plan, and the gap behind it."""

from __future__ import annotations

import math

import pytest
from plan_samples import MIB, plan

from remat_compiler.cli.certificate import certificate, certificate_lines


def test_a_plan_within_its_budget() -> None:
    assert certificate(plan()) == (
        "Certified: no plan within 256.0 MiB beats 12.00 ms; this one: 12.50 ms, 240.0 MiB (gap 4.0%)"
    )


def test_without_a_budget_the_bound_is_for_plain_inductor_s_peak() -> None:
    assert certificate(plan(budget_bytes=None)) == (
        "Certified: no plan within plain Inductor's 600.0 MiB beats 12.00 ms; this one: 12.50 ms, 240.0 MiB (gap 4.0%)"
    )


def test_a_plan_above_its_budget_is_not_certified() -> None:
    assert certificate(plan(projected_peak_bytes=257 * MIB)) == (
        "Not certified: no plan within 256.0 MiB beats 12.00 ms; this one: 12.50 ms, 257.0 MiB, which is above the"
        " budget"
    )


@pytest.mark.parametrize("bound", [0.0, math.inf, math.nan])
def test_an_unknown_bound_certifies_nothing(bound: float) -> None:
    assert certificate(plan(lower_bound_us=bound)) == (
        "Not certified: no lower bound is known; this one: 12.50 ms, 240.0 MiB"
    )


def test_the_gap_is_a_part_of_the_step() -> None:
    assert plan(step_us=200.0, lower_bound_us=150.0).gap == 0.25
    assert plan(step_us=200.0, lower_bound_us=200.0).gap == 0.0
    assert plan(step_us=200.0, lower_bound_us=200.001).gap == 0.0  # a bound that was rounded up proves no less
    assert plan(step_us=0.0, lower_bound_us=0.0).gap == 0.0


def test_the_class_of_schedules_stands_below_it() -> None:
    sentence, meaning = certificate_lines(plan(), 140)

    assert sentence.plain.startswith("Certified")
    assert meaning.plain == f"  by the cost model, among plans where {plan().schedule_class}"
