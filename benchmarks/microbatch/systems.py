"""The systems at one step: eager, torch.compile, a Python loop over slices, Inductor's auto_chunker, and remat.

All of them get the same weights and the same batch, and all are alive at once, so that their steps can take turns.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import click
import torch
from torch import nn
from torch._inductor import metrics

from benchmarks.harness import (
    Batch,
    Clock,
    System,
    Trial,
    by_slices,
    clear_gradients,
    compiled,
    gradient_error,
    interleaved_s,
    measured_total_bytes,
    median_ratio,
    pieces,
    reference_gradients,
    seconds,
    warm_inductor_up,
    warmed_up,
)
from benchmarks.microbatch.table import CHUNKER, COMPILE, EAGER, LOOP, REMAT, Point, find
from benchmarks.models import GPTShape, build_gpt, random_batch
from benchmarks.peak.systems import MANY_VERSIONS
from benchmarks.report import format_mib
from remat_passes.errors import RematError

SEED = 0
NUM_SLICES = (1, 2, 4, 8, 16)
NUM_ROUNDS = 15  # of interleaved steps, as in benchmarks/first.py


@dataclass(frozen=True, slots=True)
class Contender:
    """One system, and in how many slices its step runs; ``is_loop`` where the slices are made in Python."""

    point: Point
    system: System
    is_loop: bool = False


def contenders(slices: Sequence[int], *, with_rivals: bool, lowering: str = "inductor") -> tuple[Contender, ...]:
    """All systems; remat and the Python loop in each number of slices. A loop of one slice is torch.compile."""
    plain = [Contender(Point(EAGER), System(EAGER)), Contender(Point(COMPILE), System(COMPILE, "inductor"))]
    loops = [Contender(Point(LOOP, n), System(f"{LOOP} x{n}", "inductor"), is_loop=True) for n in slices if n > 1]
    ours = [
        Contender(Point(REMAT, n), System(f"{REMAT} x{n}", "remat", {"num_microbatches": n, "lowering": lowering}))
        for n in slices
    ]
    return (*plain, *(loops if with_rivals else ()), *ours, *(chunkers() if with_rivals else ()))


def chunkers() -> tuple[Contender, ...]:
    """Inductor's auto_chunker as it is, and told to take any product that makes its operands larger.

    By default it takes a product whose result is 8 times as large as its operands together
    (torch/_inductor/fx_passes/auto_chunker/core.py, ``find_amplifier_node``).
    """
    enable = {"auto_chunker.enable": True}
    forced = {**enable, "auto_chunker.amplify_ratio_threshold": 1}
    return (
        Contender(Point(CHUNKER), System(CHUNKER, "inductor", enable)),
        Contender(Point(CHUNKER, 1, "any ratio"), System(f"{CHUNKER}, any ratio", "inductor", forced)),
    )


def start(contender: Contender, model: nn.Module, batch: Batch, *, clock: Clock = seconds) -> Trial:
    """Compile and warm up on a copy of ``model``, with an empty cache.

    Raises:
        RematError: remat refused the step.
    """
    model, forward = copy.deepcopy(model), compiled(contender.system)
    parts = pieces(batch, contender.point.num_slices if contender.is_loop else 1)

    def step() -> torch.Tensor:
        clear_gradients(model)
        return by_slices(forward, model, parts)

    return warmed_up(contender.system, model, batch, step, clock=clock)


def measured(contender: Contender, trial: Trial, truth: dict[str, torch.Tensor]) -> Point:
    """Everything about one point but its step time."""
    return replace(
        contender.point,
        projected_bytes=trial.plan.projected_peak_bytes if trial.plan else None,
        measured_bytes=measured_total_bytes(trial),
        gradient_error=gradient_error(trial, truth),
        compile_s=trial.compile_s if trial.system.backend else None,
    )


def try_all(
    model: nn.Module, batch: Batch, listed: Sequence[Contender], clock: Clock = seconds
) -> list[tuple[Point, Trial | None]]:
    """Every system on the same weights and batch; one that fails is a point too."""
    truth = reference_gradients(model, batch)
    found = []
    for contender in listed:
        num_chunkings, trial = metrics.num_auto_chunking, None
        try:
            trial = start(contender, model, batch, clock=clock)
            point = measured(contender, trial, truth)
            if contender.point.family == CHUNKER and metrics.num_auto_chunking == num_chunkings:
                point = replace(point, note="it does not apply to this step, which is torch.compile's")
        except RematError as error:
            point = replace(contender.point, failure=f"refused: {error}")
        except Exception as error:  # one system's crash is its own row, not the end of the table
            traceback.print_exc()
            point = replace(contender.point, failure=f"failed: {type(error).__name__}: {error}".partition("\n")[0])
        click.echo(f"    {point.name:24} {point.failure or format_mib(point.measured_bytes) + ' MiB'}")
        found.append((point, trial))
    return found


# -- step times


def with_times(points: Sequence[Point], times_s: Sequence[Sequence[float]]) -> Iterator[Point]:
    """The points with their step times; ``times_s`` has no seconds for those that failed."""
    by_name = {point.name: own_s for point, own_s in zip(points, times_s, strict=True) if own_s}
    plain = find(points, COMPILE)
    for point in points:
        own_s = by_name.get(point.name)
        loop = find(points, LOOP, point.num_slices) if point.family == REMAT else None
        if own_s is None:
            yield point
            continue
        yield replace(
            point,
            step_ms=min(own_s) * 1e3,
            step_ratio=median_ratio(own_s, by_name[plain.name]) if plain else None,
            loop_ratio=median_ratio(own_s, by_name[loop.name]) if loop else None,
        )


def timed(found: Sequence[tuple[Point, Trial | None]], num_rounds: int, clock: Clock = seconds) -> list[Point]:
    """The points with their step times, from interleaved rounds."""
    points = [point for point, _ in found]
    alive = [trial for point, trial in found if trial and not point.failure]
    taken = iter(interleaved_s([trial.step for trial in alive], num_rounds, clock))
    times_s = [next(taken) if trial and not point.failure else [] for point, trial in found]
    return list(with_times(points, times_s))


def measure_gpt(shape: GPTShape, listed: Sequence[Contender], num_rounds: int, clock: Clock = seconds) -> list[Point]:
    """All systems at the GPT of ``shape``; ``num_rounds`` is 0 without step times."""
    model, batch = build_gpt(shape, SEED), random_batch(shape, SEED)
    with torch._dynamo.config.patch(MANY_VERSIONS):
        warm_inductor_up()
        found = try_all(model, batch, listed, clock)
        return timed(found, num_rounds, clock) if num_rounds else [point for point, _ in found]
