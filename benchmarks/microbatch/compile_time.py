"""Compile time against the number of slices: the body is compiled once, so more slices are to cost next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch._inductor import config

from benchmarks.harness import Clock, System, seconds, warm_inductor_up
from benchmarks.microbatch.systems import SEED, Contender, start
from benchmarks.microbatch.table import COMPILE, REMAT, CompileTime, Point
from benchmarks.models import GPTShape, build_gpt, random_batch
from benchmarks.peak.systems import MANY_VERSIONS

SLICES = (2, 64)


def of_samples(shape: GPTShape, samples: int) -> GPTShape:
    """The shape with so many samples at least, and as many tokens in all as before."""
    if shape.batch >= samples:
        return shape
    return replace(shape, batch=samples, tokens=shape.batch * shape.tokens // samples)


def compile_times(shape: GPTShape, slices: Sequence[int] = SLICES, clock: Clock = seconds) -> list[CompileTime]:
    """torch.compile, and remat in each number of slices; each with an empty cache, and compiled in this process alone.

    Inductor's workers would start before the first system is compiled and be warm for the second.
    """
    shape = of_samples(shape, max(slices))
    model, batch = build_gpt(shape, SEED), random_batch(shape, SEED)
    listed = [Contender(Point(COMPILE), System(COMPILE, "inductor"))]
    listed += [Contender(Point(REMAT, n), System(f"{REMAT} x{n}", "remat", {"num_microbatches": n})) for n in slices]
    found = []
    with torch._dynamo.config.patch(MANY_VERSIONS), config.patch(compile_threads=1):
        warm_inductor_up()
        for contender in listed:
            point = contender.point
            try:
                trial = start(contender, model, batch, clock=clock)
                found.append(CompileTime(point.name, point.num_slices, trial.compile_s, trial.planning_s))
            except Exception as error:  # a crash or a refusal is a row of its own
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                found.append(CompileTime(point.name, point.num_slices, None, failure=text))
    return found
