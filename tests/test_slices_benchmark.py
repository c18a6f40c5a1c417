"""The table of steps in slices, and where the chosen number stands, from times made up."""

from __future__ import annotations

import pytest

from benchmarks.peak.models import MODELS
from benchmarks.slices import AUTO, Step, rank, rows

MODEL = MODELS["gpt-sdpa"]


def step(asked: int | str, num_slices: int, projected_us: float, ratio: float) -> Step:
    return Step(asked, num_slices, projected_us, fastest_us=1e3 * ratio, ratio=ratio)


def test_ratios_are_to_the_first_step() -> None:
    first, second = rows(MODEL, None, [step(1, 1, 2_000.0, 1.0), step(4, 4, 2_200.0, 1.0)])
    assert first == ("gpt-sdpa", "none", "1", "1", "2.00", "1.00", "1.000", "1.000", "+0.0 %")
    assert second[-3:] == ("1.100", "1.000", "+10.0 %")


@pytest.mark.parametrize(("chosen", "place", "of_fastest"), [(4, 1, "1.000"), (2, 2, "1.100"), (1, 3, "1.250")])
def test_the_chosen_number_is_held_against_the_fixed_ones(chosen: int, place: int, of_fastest: str) -> None:
    """The time of the chosen step itself scatters from that of the same number as a fixed one, which counts."""
    fixed = [step(1, 1, 1.0, 1.0), step(2, 2, 1.0, 0.88), step(4, 4, 1.0, 0.8)]
    said = rank(MODEL, "50%", [*fixed, step(AUTO, chosen, 1.0, 7.0)])
    assert f"{chosen} slices chosen, place {place} of 3; 4 is the fastest" in said
    assert said.endswith(f"takes {of_fastest} of it.")


def test_a_number_that_was_not_tried_stands_with_its_own_time() -> None:
    said = rank(MODEL, "50%", [step(1, 1, 1.0, 1.0), step(2, 2, 1.0, 0.8), step(AUTO, 3, 1.0, 0.9)])
    assert "3 slices chosen, place 2 of 2" in said


def test_a_budget_that_no_plan_meets() -> None:
    assert rank(MODEL, "1%", []) == "gpt-sdpa, 1%: no plan is within the budget."
