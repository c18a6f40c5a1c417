"""The chain: its table against every plan of a short chain, and the memory of its plans against a walk of the step.

The walk knows nothing of the recurrence: it goes through a plan as a step would run it, forward and then backward, with
the bytes of every block that is held or kept as a checkpoint added up.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from remat_passes.chain import UNREACHABLE, Chain, ChainBlock, ChainPlan, Drop, Hold, Option

# -- the oracle -------------------------------------------------------------------------------------------------------


def walk(
    chain: Sequence[ChainBlock], plan: ChainPlan, held_bytes: int = 0, kept_bytes: int | None = None
) -> tuple[int, int]:
    """The additional time (ps) and the highest number of bytes of one pass over blocks and of their backward.

    ``kept_bytes`` are there of the blocks before the pass comes to them; ``None`` in the first pass.
    """
    is_first, ahead_bytes = kept_bytes is None, kept_bytes or 0
    time_ps, peak_bytes = 0, held_bytes + ahead_bytes
    before: list[int] = []
    for step in plan.steps:
        before.append(held_bytes)
        if isinstance(step, Hold):
            reached = chain[step.first : step.first + step.option.span]
            ahead_bytes -= 0 if is_first else sum(block.kept_bytes for block in reached)
            peak_bytes = max(peak_bytes, held_bytes + step.option.forward_peak_bytes + ahead_bytes)
            held_bytes += step.option.held_bytes
            time_ps += step.option.extra_ps
        else:
            dropped = chain[step.first : step.until]
            behind_bytes = 0
            for block in dropped:
                ahead_bytes -= 0 if is_first else block.kept_bytes
                peak_bytes = max(peak_bytes, before[-1] + behind_bytes + block.pass_peak_bytes + ahead_bytes)
                behind_bytes += block.kept_bytes
            held_bytes += dropped[0].input_bytes + behind_bytes
            time_ps += sum(block.pass_ps for block in dropped)
        peak_bytes = max(peak_bytes, held_bytes + ahead_bytes)
    for step, held_before in reversed(list(zip(plan.steps, before, strict=True))):
        if isinstance(step, Hold):
            peak_bytes = max(peak_bytes, held_before + step.option.peak_bytes)
        else:
            kept = sum(block.kept_bytes for block in chain[step.first : step.until])
            again_ps, again_bytes = walk(chain, step.again, held_before, kept)
            time_ps, peak_bytes = time_ps + again_ps, max(peak_bytes, again_bytes)
    return time_ps, peak_bytes


def every_plan(chain: Sequence[ChainBlock], first: int, last: int) -> Iterator[tuple[Hold | Drop, ...]]:
    """All plans of blocks ``first`` to ``last``."""
    if first > last:
        yield ()
        return
    for option in chain[first].options:
        if first + option.span - 1 <= last:
            for rest in every_plan(chain, first + option.span, last):
                yield (Hold(first, option), *rest)
    for until in range(first + 1, last + 1):
        for again in every_plan(chain, first, until - 1):
            for rest in every_plan(chain, until, last):
                yield (Drop(first, until, ChainPlan(again)), *rest)


def least_ps(chain: Sequence[ChainBlock], first: int, last: int, room_bytes: int) -> int | None:
    """The recurrence as it is written down, in exact bytes; ``None`` where nothing fits."""
    if first > last:
        return 0
    found: list[int] = []
    for option in chain[first].options:
        following = chain[first + option.span : last + 1]
        ahead_bytes = sum(block.kept_bytes for block in following) if last < len(chain) - 1 else 0
        needed = max(option.held_bytes, option.peak_bytes, option.forward_peak_bytes + ahead_bytes)
        if first + option.span - 1 <= last and needed <= room_bytes:
            rest = least_ps(chain, first + option.span, last, room_bytes - option.held_bytes)
            found += [option.extra_ps + rest] if rest is not None else []
    for until in range(first + 1, last + 1):
        dropped = chain[first:until]
        stays_bytes = dropped[0].input_bytes + sum(block.kept_bytes for block in dropped)
        if max(stays_bytes, *passing_bytes(chain, first, until, last)) <= room_bytes:
            later = least_ps(chain, until, last, room_bytes - stays_bytes)
            again = least_ps(chain, first, until - 1, room_bytes)
            if later is not None and again is not None:
                found.append(sum(block.pass_ps for block in dropped) + later + again)
    return min(found, default=None)


def passing_bytes(chain: Sequence[ChainBlock], first: int, until: int, last: int) -> list[int]:
    """While each of the blocks is passed over: what is kept of those before it, and ahead of it in a later pass."""
    found = []
    for k in range(first, until):
        ahead = chain[k + 1 : last + 1] if last < len(chain) - 1 else ()
        kept_bytes = sum(block.kept_bytes for block in (*chain[first:k], *ahead))
        found.append(chain[k].pass_peak_bytes + kept_bytes)
    return found


def covered(plan: ChainPlan) -> list[int]:
    """The blocks that one pass goes over, in its order."""
    found: list[int] = []
    for step in plan.steps:
        span = range(step.first, step.first + step.option.span if isinstance(step, Hold) else step.until)
        found.extend(span)
        if isinstance(step, Drop):
            assert covered(step.again) == list(span), "what is dropped is passed over again, all of it"
    return found


def depth(plan: ChainPlan) -> int:
    """How many passes over one block follow one another at the most."""
    return 1 + max((depth(step.again) for step in plan.steps if isinstance(step, Drop)), default=0)


# -- chains -----------------------------------------------------------------------------------------------------------


def random_chain(seed: int, num_blocks: int, scale: int = 1) -> tuple[ChainBlock, ...]:
    """Blocks with one to three options each, some of which hold two or three blocks as one; in every second chain some
    keep bytes through a drop, which every option holds."""
    draw = random.Random(seed)
    kept = [draw.choice([0, 0, 1, 2]) if seed % 2 else 0 for _ in range(num_blocks)]

    def option(position: int, span: int) -> Option:
        stays = sum(kept[position : position + span])
        held = stays + draw.randint(0, 4 * span)
        return Option(
            span=span,
            held=frozenset(),
            held_bytes=held * scale + (draw.randrange(scale) if scale > 1 else 0),
            extra_ps=draw.randint(0, 9),
            peak_bytes=draw.randint(0, held + 4) * scale,  # below what is held where another block's bytes are freed
            forward_peak_bytes=(stays + draw.randint(0, 5)) * scale,
        )

    def block(position: int) -> ChainBlock:
        longest = min(3, num_blocks - position)
        spans = [1, *(draw.randint(1, longest) for _ in range(draw.randint(0, 2)))]
        return ChainBlock(
            options=tuple(option(position, span) for span in spans),
            input_bytes=draw.randint(0, 3) * scale,
            pass_ps=draw.randint(1, 9),
            pass_peak_bytes=(kept[position] + draw.randint(0, 4)) * scale,
            kept_bytes=kept[position] * scale,
        )

    return tuple(block(position) for position in range(num_blocks))


def equal_chain(num_blocks: int) -> tuple[ChainBlock, ...]:
    """Layers as in an MLP: backward reads the layer's input, and beside it there are two gradients of the same size."""
    held = Option(span=1, held=frozenset(), held_bytes=1, extra_ps=0, peak_bytes=3, forward_peak_bytes=2)
    return (ChainBlock(options=(held,), input_bytes=1, pass_ps=1, pass_peak_bytes=2),) * num_blocks


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_table_is_the_best_of_all_plans(seed: int) -> None:
    chain = random_chain(seed, num_blocks=1 + seed % 5)
    table = Chain(chain, num_units=24, unit_bytes=1)
    walked = [walk(chain, ChainPlan(steps)) for steps in every_plan(chain, 0, len(chain) - 1)]
    for room in range(25):
        fitting = [time_ps for time_ps, peak_bytes in walked if peak_bytes <= room]
        assert min(table.extra_ps(room), UNREACHABLE) == min(fitting, default=UNREACHABLE), room


@pytest.mark.parametrize("seed", range(20))
def test_every_entry_of_the_table_is_the_recurrence(seed: int) -> None:
    chain = random_chain(100 + seed, num_blocks=4)
    table = Chain(chain, num_units=14, unit_bytes=1)
    for first, last in itertools.combinations_with_replacement(range(4), 2):
        for room in range(15):
            expected = least_ps(chain, first, last, room)
            found = int(table.best[first, last, room])
            assert found == expected if expected is not None else found >= UNREACHABLE


def test_the_random_chains_have_plans_of_every_kind() -> None:
    """Else the comparisons above would say little."""
    plans, keeping = [], []
    for seed in range(40):
        chain = random_chain(seed, num_blocks=1 + seed % 5)
        table = Chain(chain, num_units=24, unit_bytes=1)
        plans += [table.plan(units) for units in table.breakpoints()]
        keeping += plans[-len(table.breakpoints()) :] if any(block.kept_bytes for block in chain) else []
    holds = [step for plan in plans for step in plan.steps if isinstance(step, Hold)]

    assert {step.option.span for step in holds} == {1, 2, 3}
    assert {depth(plan) for plan in plans} >= {1, 2, 3}
    assert {depth(plan) for plan in keeping} >= {1, 2, 3}


# -- its plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("unit_bytes", [1, 7])
def test_every_plan_goes_over_all_blocks_in_the_time_and_the_bytes_that_it_was_asked_for(
    seed: int, unit_bytes: int
) -> None:
    chain = random_chain(seed, num_blocks=7, scale=unit_bytes)
    table = Chain(chain, num_units=40, unit_bytes=unit_bytes)
    assert table.breakpoints()
    for units in range(41):
        if table.extra_ps(units) >= UNREACHABLE:
            continue
        plan = table.plan(units)
        time_ps, peak_bytes = walk(chain, plan)
        assert covered(plan) == list(range(7))
        assert time_ps == table.extra_ps(units)
        assert peak_bytes <= units * unit_bytes


@pytest.mark.parametrize("seed", range(10))
def test_coarse_units_round_up(seed: int) -> None:
    """They may miss a plan that just fits; they never promise one that does not."""
    chain = random_chain(seed, num_blocks=5, scale=7)
    exact, coarse = Chain(chain, num_units=280, unit_bytes=1), Chain(chain, num_units=56, unit_bytes=5)
    for units in range(57):
        assert coarse.extra_ps(units) >= exact.extra_ps(units * 5)
    assert coarse.extra_ps(56) == exact.extra_ps(280)


@pytest.mark.parametrize("seed", range(20))
def test_breakpoints_fall_in_memory_and_rise_in_time(seed: int) -> None:
    table = Chain(random_chain(seed, num_blocks=6), num_units=40, unit_bytes=1)
    found = table.breakpoints()
    times = [table.extra_ps(units) for units in found]

    assert found
    assert all(more > less for more, less in itertools.pairwise(found))
    assert all(fast < slow for fast, slow in itertools.pairwise(times))
    assert times[0] == table.extra_ps(40)
    for units in found:
        assert units == 0 or table.extra_ps(units - 1) > table.extra_ps(units)
    for units in range(41):
        known = [table.extra_ps(found_units) for found_units in found if found_units <= units]
        assert min(known, default=UNREACHABLE) == min(table.extra_ps(units), UNREACHABLE)


def test_a_chain_that_fits_nowhere_has_no_breakpoints() -> None:
    held = Option(span=1, held=frozenset(), held_bytes=9, extra_ps=0, peak_bytes=9, forward_peak_bytes=0)
    table = Chain([ChainBlock((held,), input_bytes=0, pass_ps=1, pass_peak_bytes=0)], num_units=8, unit_bytes=1)

    assert table.breakpoints() == []
    assert table.extra_ps(8) >= UNREACHABLE


# -- equal layers -----------------------------------------------------------------------------------------------------

NUM_LAYERS = 64
DEEP = Chain(equal_chain(NUM_LAYERS), num_units=NUM_LAYERS + 8, unit_bytes=1)


def least_units(num_forwards: int) -> int:
    """The least memory of 64 equal layers in at most so many more forwards; the plan is walked to be sure of it."""
    units = next(units for units in reversed(DEEP.breakpoints()) if DEEP.extra_ps(units) <= num_forwards * NUM_LAYERS)
    time_ps, peak_bytes = walk(DEEP.chain, DEEP.plan(units))
    assert time_ps <= num_forwards * NUM_LAYERS
    assert peak_bytes <= units
    return units


def test_without_recomputing_every_layer_is_held() -> None:
    assert least_units(0) == NUM_LAYERS - 1 + 3  # the last layer's input is there with its two gradients


def test_one_more_forward_brings_the_square_root() -> None:
    assert least_units(1) <= 1.3 * 2 * NUM_LAYERS**0.5


def test_nested_passes_go_below_the_square_root() -> None:
    one, two, four = least_units(1), least_units(2), least_units(4)
    smallest = DEEP.breakpoints()[-1]

    assert four < two < one
    assert two <= 3 * NUM_LAYERS ** (1 / 3) + 3  # Chen et al. 2016, section 4.3: k forwards bring the k+1-th root
    assert depth(DEEP.plan(two)) == 3
    assert smallest <= four
    assert depth(DEEP.plan(smallest)) > 3
