"""In how many slices: the choice among candidates, against asking every one of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from remat_passes.candidates import RESOLUTION, Found, slice_counts, smallest, weigh


@dataclass
class Model:
    """A step whose activations take ``activation_bytes`` and whose slices cost ``overhead_ps`` each; recompute gets
    a part of the bytes back for a time that rises with them, down to ``floor`` of them."""

    activation_bytes: int
    held_bytes: int
    work_ps: int
    overhead_ps: int
    price_ps: int  # for all bytes
    floor: float
    limit: int = 0
    searches: int = 0

    def part(self, candidate: int) -> float:
        return 1 / candidate

    def limit_bytes(self, candidate: int) -> int:
        return self.limit

    def _bytes(self, count: int) -> int:
        return self.held_bytes + self.activation_bytes // count

    def fastest(self, candidate: int) -> Found:
        return Found(self.work_ps + self.overhead_ps * (candidate - 1), self._bytes(candidate))

    def bound_ps(self, candidate: int) -> int | None:
        found = self.best(candidate)
        return None if found is None else round(self.fastest(candidate).time_ps * 0.5 + found.time_ps * 0.5)

    def rough_bound_ps(self, candidate: int) -> int:
        return self.work_ps

    def search(self, candidate: int) -> Found | None:
        self.searches += 1
        return self.best(candidate)

    def best(self, candidate: int) -> Found | None:
        limit_bytes = self.limit
        own = self.activation_bytes // candidate
        dropped = max(0, self._bytes(candidate) - limit_bytes)
        if dropped > own * (1 - self.floor):
            return None
        time_ps = self.fastest(candidate).time_ps + self.price_ps * dropped // max(own, 1)
        return Found(time_ps, self._bytes(candidate) - dropped)


def random_model(rng: random.Random) -> Model:
    return Model(
        activation_bytes=rng.randrange(10**6, 10**9),
        held_bytes=rng.randrange(10**5, 10**8),
        work_ps=10**9,
        overhead_ps=rng.randrange(10**4, 10**8),
        price_ps=rng.randrange(10**7, 5 * 10**8),
        floor=rng.uniform(0.05, 0.9),
    )


@pytest.mark.parametrize("seed", range(200))
def test_the_chosen_one_is_the_fastest_within_the_limit_up_to_the_resolution(seed: int) -> None:
    rng = random.Random(seed)
    model, counts = random_model(rng), (1, *slice_counts(rng.randrange(2, 200)))
    model.limit = limit_bytes = rng.randrange(model.held_bytes, model.held_bytes + model.activation_bytes * 5 // 4)
    chosen, weighed = weigh([counts], model)
    plans = {count: model.best(count) for count in counts}
    feasible = {count: plan.time_ps for count, plan in plans.items() if plan is not None}
    assert [entry.candidate for entry in weighed] == list(counts)
    assert all(entry.verdict for entry in weighed)
    if not feasible:
        assert chosen is None
        return
    assert chosen is not None
    # Where all have to recompute, the search ends at the first number of slices that is no better.
    tolerance = 2 * RESOLUTION if model.fastest(counts[-1]).peak_bytes <= limit_bytes else 0.05
    assert feasible[chosen] <= min(feasible.values()) * (1 + tolerance)
    assert [entry.candidate for entry in weighed if entry.verdict == "chosen"] == [chosen]


def test_few_candidates_are_searched() -> None:
    searches = []
    for seed in range(100):
        rng = random.Random(seed)
        model = random_model(rng)
        model.limit = model.held_bytes + model.activation_bytes // 3
        weigh([(1, *slice_counts(64))], model)
        searches.append(model.searches)
    assert sum(searches) / len(searches) < 2.5


def test_the_step_as_it_is_may_fit_where_few_slices_do_not() -> None:
    """What slices hold around their loop is not there without one."""

    class Around(Model):
        def _bytes(self, count: int) -> int:
            return super()._bytes(count) + (0 if count == 1 else 10**6)

    model = Around(10**6, 10**5, 10**9, 10**5, 10**8, 0.1, limit=10**6)
    chosen, weighed = weigh([(1, 2, 4, 8)], model)
    assert chosen == 1
    assert [entry.verdict for entry in weighed] == ["chosen", *["the budget cannot be met"] * 3]


def test_a_second_ladder_ends_where_its_slices_are_too_slow_whatever_they_need() -> None:
    """More slices take longer still, and fewer hold more: none of either is asked for its plan without recompute."""
    asked: list[int] = []

    class Rows(Model):
        """Below 100 slices of the step, from there on slices of its tail, which hold the rest of the step as it is."""

        def part(self, candidate: int) -> float:
            return 1 / (candidate % 100)

        def fastest(self, candidate: int) -> Found:
            asked.append(candidate)
            count = candidate % 100
            return Found(self.work_ps + self.overhead_ps * (count - 1), self._bytes(count if candidate < 100 else 1))

    model = Rows(10**6, 10**5, 10**9, 3 * 10**7, 10**8, 0.9, limit=6 * 10**5)
    chosen, weighed = weigh([(1, 2, 4, 8), (102, 104, 108, 116)], model)
    assert chosen == 2
    assert len({candidate for candidate in asked if candidate > 100}) == 1
    assert {entry.verdict for entry in weighed[4:]} == {
        "no plan within the budget is clearly faster than the chosen one"
    }


def test_a_step_that_fits_is_left_as_it_is() -> None:
    model = Model(10**6, 10**6, 10**9, 10**6, 10**8, 0.1, limit=3 * 10**6)
    chosen, weighed = weigh([(1, 2, 4, 8)], model)
    assert chosen == 1
    assert {entry.verdict for entry in weighed[1:]} == {
        "not looked at: the budget costs the chosen one hardly any time"
    }


@pytest.mark.parametrize("per_slice", [0, 1, 40, 3000, 10**7])
def test_the_smallest_is_asked_of_few(per_slice: int) -> None:
    """Each slice takes memory of its own as well: with little of it the most slices take the least, with much the step
    as it is."""
    counts, rows = (1, *slice_counts(100)), tuple(2**i for i in range(1, 7))
    asked: list[int] = []

    def peak_bytes(count: int) -> int:
        asked.append(count)
        return 10**6 // count + per_slice * count

    found = smallest([counts, rows], peak_bytes)
    assert peak_bytes(found) == min(peak_bytes(count) for count in (*counts, *rows))
    asked.clear()
    smallest([counts, rows], lambda count: peak_bytes(count))
    assert per_slice > 40 or set(asked) <= {1, 50, 100, 32, 64}


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16, 100, 1024])
def test_slice_counts_are_the_fewest_of_each_length_up_to_single_samples(batch: int) -> None:
    counts = slice_counts(batch)
    assert list(counts) == sorted(set(counts))
    assert all(2 <= count <= batch for count in counts)
    lengths = [-(-batch // count) for count in counts]
    assert len(set(lengths)) == len(lengths)
    assert all(-(-batch // (count - 1)) > length for count, length in zip(counts, lengths, strict=True))
    if batch > 1:
        assert (counts[0], counts[-1]) == (2, batch)
