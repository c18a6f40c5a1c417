"""What a plan says of itself in words: whether anything is gained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import SPEC, products, staged

from remat_passes.planner import Setting, write_plan
from remat_passes.search import Candidate, Choice


def with_figures(candidate: Candidate, peak_bytes: int, time_ps: int) -> Candidate:
    return replace(
        candidate,
        cut=replace(candidate.cut, time_ps=time_ps),
        projection=replace(candidate.projection, peak_bytes=peak_bytes),
    )


@pytest.mark.parametrize(
    ("peak_bytes", "time_ps", "gained"),
    [(99, 100, None), (100, 100, "nothing"), (101, 99, "only time"), (100, 99, "only time"), (100, 101, "nothing")],
)
def test_what_is_gained_is_what_was_predicted(peak_bytes: int, time_ps: int, gained: str | None) -> None:
    """Plain Inductor's plan is never read back, so the note holds two predictions against each other, and says so."""
    graph = staged(products(3, 64, 16))
    plain = with_figures(graph.inductor, 100, 100)
    chosen = with_figures(graph.inductor, peak_bytes, time_ps)
    setting = Setting("g00-0", "2", "analytic", "eager", None, ())
    choice = Choice(chosen, plain, (chosen,), 0)
    plan = write_plan(graph.joint, graph.permissions, graph.costs, graph.model, SPEC, choice, setting)

    expected = f"{gained} is gained on this graph: plain Inductor's plan is predicted to need no more memory"
    assert plan.notes == (() if gained is None else (expected,))
