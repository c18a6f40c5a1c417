"""Cuts that differ from a known one by a single saved value: the same as worked out anew."""

from __future__ import annotations

import random

import pytest

from remat_passes.cut import CutProblem, CutValue, cut_of_saved, num_readers, with_saved, without_saved


def random_problem(seed: int) -> CutProblem:
    """Forty values with up to three inputs each; what may not be recomputed may be saved."""
    draw = random.Random(seed)
    values = []
    for index in range(40):
        inputs = tuple(sorted(draw.sample(range(index), min(index, draw.randint(0, 3)))))
        recompute_ps = draw.randint(0, 50) if inputs and draw.random() < 0.9 else None
        values.append(CutValue(f"v{index}", inputs, draw.random() < 0.3, draw.randint(0, 9), 7, recompute_ps))
    return tuple(values)


@pytest.mark.parametrize("seed", range(30))
def test_one_value_less_or_more_gives_the_cut_worked_out_anew(seed: int) -> None:
    problem = random_problem(seed)
    saved = frozenset(random.Random(seed).sample(range(40), 20))
    cut = cut_of_saved(problem, saved)
    readers = num_readers(problem, cut)
    for index, value in enumerate(problem):
        if index in cut.saved and value.recompute_ps is not None:
            assert without_saved(problem, cut, saved, index) == cut_of_saved(problem, saved - {index})
        if index not in saved:
            assert with_saved(problem, cut, readers, index) == cut_of_saved(problem, saved | {index})
