"""One model of the suite, measured point by point into a file, and on from where an earlier run was stopped.

Every system takes turns with torch.compile, step by step, right after it was compiled, and what is kept is the median
of the ratios of two steps side by side. So a point is complete once it is measured, and no two systems but these two
have to be alive at the same time.
"""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch._inductor import config, metrics

import remat_compiler
from benchmarks.harness import (
    CLOCKS,
    Batch,
    Clock,
    System,
    Trial,
    interleaved_s,
    median_ratio,
    pieces,
    reference_gradients,
    warm_inductor_up,
)
from benchmarks.microbatch.table import CHUNKER
from benchmarks.peak.models import SEED, Model
from benchmarks.peak.systems import (
    MANY_VERSIONS,
    NUM_BUDGETS,
    Contender,
    failed,
    falling_budgets,
    first_line,
    measure,
    plain,
    smallest_feasible_bytes,
    start,
    under_budgets,
)
from benchmarks.peak.table import COMPILE, REMAT, Point, Record, read_records, write_records
from benchmarks.report import BUILD, format_mib, machine_notes
from benchmarks.suite.models import CHARACTERS, MODELS
from benchmarks.suite.systems import in_fixed_numbers, one_a_family, rivals
from benchmarks.suite.table import FIXED, read_off_bytes
from benchmarks.suite.training import Curve, read_curves, train, write_curves
from benchmarks.suite.turns import Turns
from remat_compiler.measure import tensor_bytes
from remat_passes.errors import CannotSplitError, RematError

NUM_ROUNDS = 11  # of two steps side by side; the median of fewer ratios moves by more than the 3 % that are to be seen
STEPS_AWAY = 0.01  # how much of the loss the slope is taken over: between rounding and what is no longer linear
TRAINING_SHARE = 0.5  # of torch.compile's peak, the budget to train under
CRASHED = "failed: the process ended while this was measured"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure of a model, and how."""

    num_budgets: int = NUM_BUDGETS
    num_rounds: int = NUM_ROUNDS
    clock: str = "wall"
    with_fixed: bool = False  # remat in each fixed number of micro-batches too
    is_quick: bool = False  # one configuration of each family of rivals, and no training
    with_remat: bool = True  # without it the rivals alone, which do not change when remat does


@dataclass(slots=True)
class Bench:
    """The measurement of one model: its record grows by a point at a time and is written after each."""

    model: Model
    path: Path
    settings: Settings
    record: Record
    truth: dict[str, torch.Tensor] | None
    turns: Turns
    reference: Trial | None = None  # torch.compile, which all take turns with

    @property
    def clock(self) -> Clock:
        """What times a step."""
        return CLOCKS[self.settings.clock]

    def add(self, contender: Contender) -> None:
        """Measure one more point, if it is not there yet; a failure is a point too."""
        name = contender.system.name
        if any(point.name == name for point in self.record.points):
            return
        self._put(failed(contender, CRASHED))  # this is what stays if the process ends here
        try:
            point = self._measured(contender)
        except RematError as error:
            point = failed(contender, f"refused: {error}")
        except Exception as error:  # one system's crash is its own row, not the end of the table
            traceback.print_exc()
            point = failed(contender, f"failed: {first_line(error)}")
        except BaseException:  # someone stops the run: the next one measures this
            self.update(points=tuple(p for p in self.record.points if p.name != name))
            raise
        click.echo(line(point))
        self._put(point)
        gc.collect()

    def update(self, **changes: object) -> None:
        """Change the record, and write it."""
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        with self.turns.held():
            write_records(self.path, [self.record])

    def _put(self, point: Point) -> None:
        others = tuple(p for p in self.record.points if p.name != point.name)
        self.update(points=(*others, point))

    def _measured(self, contender: Contender) -> Point:
        num_plans, num_chunkings = len(remat_compiler.plans()), metrics.num_auto_chunking
        trial = self.start(contender)
        if contender.family == CHUNKER and metrics.num_auto_chunking == num_chunkings:
            return failed(contender, "does not apply: the step is torch.compile's")
        point = measure(contender, trial, len(remat_compiler.plans()) - num_plans, self.truth)
        return replace(self._timed(point, trial), **self._more(contender, trial))  # type: ignore[arg-type]

    def start(self, contender: Contender) -> Trial:
        """The system on a model of its own; of torch.compile the one that all take turns with."""
        if contender.family == COMPILE and self.reference is not None:
            return self.reference
        trial = start(contender, *self.model.make(), clock=self.clock, with_cache=False)
        if contender.family == COMPILE:
            self.reference = trial
        return trial

    def _timed(self, point: Point, trial: Trial) -> Point:
        assert self.reference is not None, "torch.compile is started first"
        with self.turns.alone():
            own_s, other_s = interleaved_s([trial.step, self.reference.step], self.settings.num_rounds, self.clock)
        ratio = 1.0 if trial is self.reference else median_ratio(own_s, other_s)
        return replace(point, measured_ms=min(own_s) * 1e3, step_ratio=ratio)

    def _more(self, contender: Contender, trial: Trial) -> dict[str, object]:
        """What the suite wants to know of a point beside what is measured of every point."""
        more: dict[str, object] = {
            "compile_s": trial.compile_s if trial.system.backend else None,
            "num_slices": trial.plan.num_microbatches if trial.plan else contender.num_slices,
        }
        if self.truth is None:
            more["slope_error"] = slope_error(trial)
            if contender.num_slices > 1:
                more["gradient_error"] = arrangement_error(self.model, contender.num_slices)
        return more


# -- gradients


def slope_error(trial: Trial) -> float:
    """How far the loss's slope along its gradient is from the gradient's norm, which it is by definition.

    The same random numbers are drawn each time. A backward that draws others than its forward, or leaves a part out,
    gives another direction, along which the loss does not rise as fast as it says.
    """
    loss = _seeded(trial)
    gradients = [p.grad.clone() if p.grad is not None else None for p in trial.model.parameters()]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients if g is not None))
    if not norm:
        return 0.0 if loss == 0 else float("inf")
    distance = STEPS_AWAY * abs(loss) / norm
    before = [p.detach().clone() for p in trial.model.parameters()]

    def moved(by: float) -> float:
        with torch.no_grad():
            for parameter, old, gradient in zip(trial.model.parameters(), before, gradients, strict=True):
                parameter.copy_(old if gradient is None else old + by * gradient / norm)
        return _seeded(trial)

    slope = (moved(distance) - moved(-distance)) / (2 * distance)
    moved(0.0)
    return abs(slope - norm) / norm


def _seeded(trial: Trial) -> float:
    torch.manual_seed(SEED)
    return trial.step().double().item()


def arrangement_error(model: Model, num_slices: int) -> float:
    """The largest relative error of a parameter's gradient that comes from taking the batch in slices.

    In eager float64 and without random numbers, so that nothing else differs.
    """
    module, batch = model.make()
    module.double().eval()
    batch = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch)
    whole, sliced = (_gradients(module, pieces(batch, n)) for n in (1, num_slices))
    sizes: list[float] = [gradient.norm().item() for gradient in whole]
    errors: list[float] = [(a - b).norm().item() for a, b in zip(whole, sliced, strict=True)]
    return max(error / max(size, 1e-9 * max(sizes)) for error, size in zip(errors, sizes, strict=True))


def _gradients(module: nn.Module, parts: list[Batch]) -> list[torch.Tensor]:
    module.zero_grad()
    for part in parts:
        (module(*part) / len(parts)).backward()
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


# -- one model


def can_split(model: Model) -> bool:
    """Whether remat can run the step in two slices; it is planned and run as it is, without Inductor.

    Raises:
        RematError: remat refused the step for another reason.
    """
    options = {"num_microbatches": 2, "lowering": "eager"}
    try:
        start(Contender(REMAT, System("remat in two slices", "remat", options)), *model.make())
    except CannotSplitError:
        return False
    return True


def opened(model: Model, path: Path, settings: Settings, turns: Turns) -> Bench:
    """The measurement of ``model``, with what is in ``path`` of it already.

    Raises:
        ValueError: step times of another clock are there.
    """
    module, batch = model.make()
    truth = reference_gradients(module, batch) if model.is_exact else None
    record = next((r for r in read_records(path) if r.model == model.key), None)
    if record is None or not record.clock:
        own_bytes, gradient_bytes = tensor_bytes(module, batch), tensor_bytes(list(module.parameters()))
        record = Record(model.key, model.title, own_bytes, gradient_bytes, clock=settings.clock)
    if record.clock != settings.clock:
        raise ValueError(
            f"{path.name} has step times of {model.key} by the {record.clock} clock, and {settings.clock} was asked"
            " for. Measure all of it again (--again all), or go on with the same clock."
        )
    notes = dict.fromkeys((*record.notes, f"{machine_notes()[0]}; {settings.clock} clock"))
    return Bench(model, path, settings, replace(record, failure="", notes=tuple(notes)), truth, turns)


def measure_model(model: Model, path: Path, settings: Settings, turns: Turns) -> Record:
    """All systems at one model. A record that is complete has no ``failure``.

    Raises:
        ValueError: step times of another clock are in ``path``.
    """
    bench = opened(model, path, settings, turns)
    module, batch = model.make()
    warm_inductor_up()
    _, compiled = plain()
    bench.start(compiled)
    for contender in plain():
        bench.add(contender)
    listed, skipped = rivals(module, len(batch[0]))
    del module
    bench.update(notes=tuple(dict.fromkeys((*bench.record.notes, *skipped))))
    for contender in one_a_family(listed) if settings.is_quick else listed:
        bench.add(contender)
    if not settings.with_remat:
        return bench.record
    try:
        for contender in ours(bench, len(batch[0])):
            bench.add(contender)
        if model is CHARACTERS and not settings.is_quick:
            train_all(bench)
    except Exception as error:
        traceback.print_exc()
        bench.update(failure=f"not all was measured: {first_line(error)}")
    return bench.record


def ours(bench: Bench, num_samples: int) -> Iterator[Contender]:
    """remat under each budget, and where that was asked for under the even ones in every number of micro-batches.

    Raises:
        RematError: remat refused the step whatever the budget.
        ValueError: there is no peak of torch.compile to take shares of.
    """
    full_bytes = next((p.measured_bytes for p in bench.record.family(COMPILE)), None)
    if full_bytes is None:
        raise ValueError("torch.compile could not be measured, so there is nothing to take shares of.")
    if bench.record.smallest_bytes is None:
        bench.update(smallest_bytes=smallest_feasible_bytes(bench.model), is_splittable=can_split(bench.model))
    smallest_bytes = bench.record.smallest_bytes
    assert smallest_bytes is not None
    click.echo(f"    the smallest peak that can be reached is {format_mib(smallest_bytes)} MiB")
    even = falling_budgets(full_bytes, smallest_bytes, bench.settings.num_budgets)
    more = () if bench.settings.is_quick else read_off_bytes(bench.record, smallest_bytes, full_bytes)
    budgets = sorted({*even, *more}, reverse=True)
    yield from under_budgets(budgets, full_bytes)
    for budget_bytes in even if bench.settings.with_fixed else ():
        yield from in_fixed_numbers(budget_bytes, full_bytes, num_samples)


def train_all(bench: Bench) -> None:
    """Train with eager, torch.compile, and remat under half of torch.compile's peak or as little above as it can.

    Raises:
        RematError: remat refused the step.
    """
    path = curves_beside(bench.path)
    curves = read_curves(path)
    full_bytes = next(p.measured_bytes or 0 for p in bench.record.family(COMPILE))
    budget_bytes = max(int(TRAINING_SHARE * full_bytes), bench.record.smallest_bytes or 0)
    for contender in (*plain(), *under_budgets([budget_bytes], full_bytes)):
        if contender.system.name not in curves:
            curve = train(contender, bench.model, bench.clock)
            click.echo(f"    {curve.system:32} {curve.num_steps} steps, {curve.to_target_s} s to the loss")
            curves[curve.system] = curve
            write_curves(path, curves)


def curves_beside(path: Path) -> Path:
    """Where the curves of training are, beside the file of the records."""
    return path.with_name(f"{path.stem}-training.json")


def trained(path: Path) -> tuple[Curve, ...]:
    """The curves beside the file of the records."""
    return tuple(read_curves(curves_beside(path)).values())


def without(path: Path, model: str, again: str) -> None:
    """Forget the points of ``remat``, those that ``failed``, or ``all``, so that they are measured again."""
    record = next((r for r in read_records(path) if r.model == model), None)
    if record is None:
        return
    kept = {
        "remat": [point for point in record.points if point.family not in (REMAT, FIXED)],
        "failed": [point for point in record.points if not point.failure.startswith("failed")],
        "all": [],
    }
    record = replace(record, points=tuple(kept[again]))
    if again != "failed":
        record = replace(record, smallest_bytes=None, is_splittable=None)
    if again == "all":
        record = replace(record, notes=(), clock="")
    write_records(path, [record])
    if model == CHARACTERS.key and again != "failed":
        curves = {curve.system: curve for curve in trained(path) if curve.family != REMAT and again != "all"}
        write_curves(curves_beside(path), curves)


def line(point: Point) -> str:
    """One point for the log."""
    if point.failure:
        return f"    {point.name:44} {point.failure}".partition("\n")[0]
    budget = "" if point.budget_bytes is None else f" of {format_mib(point.budget_bytes)}"
    compile_s = "" if point.compile_s is None else f", {point.compile_s:.1f} s to compile"
    slices = f", N={point.num_slices}" if (point.num_slices or 1) > 1 else ""
    error = point.slope_error if point.gradient_error is None else point.gradient_error
    error_text = "" if error is None else f", error {error:.1e}"
    return (
        f"    {point.name:44} {format_mib(point.measured_bytes)}{budget} MiB, step {point.step_ratio or 0:.3f}"
        f" ({point.measured_ms or 0:.1f} ms){slices}{compile_s}{error_text}"
    )


@click.command(help="Measure one model into a file.")
@click.argument("key", type=click.Choice(list(MODELS)))
@click.option("--into", "path", type=click.Path(path_type=Path), default=BUILD / "suite.json")
@click.option("--budgets", "num_budgets", default=NUM_BUDGETS)
@click.option("--rounds", "num_rounds", default=NUM_ROUNDS)
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall")
@click.option("--try-n", "with_fixed", is_flag=True)
@click.option("--quick", "is_quick", is_flag=True)
@click.option("--no-remat", "with_remat", is_flag=True, flag_value=False, default=True)
@click.option("--turns", "turns_path", type=click.Path(path_type=Path), default=BUILD / "suite.turns")
def main(key: str, path: Path, turns_path: Path, **settings: Any) -> None:
    turns = Turns(turns_path)
    turns.join()
    # With workers that compile, a compile time would hang on how warm they are, and processor time would miss theirs.
    with torch._dynamo.config.patch(MANY_VERSIONS), config.patch(compile_threads=1):
        measure_model(MODELS[key], path, Settings(**settings), turns)


if __name__ == "__main__":
    main()
