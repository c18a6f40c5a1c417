"""remat under falling budgets beside everything that a user would pick instead: peaks, step times, gradients.

Each model is measured in a process of its own, and every point is kept in build/benchmarks/suite.json as soon as it is
there. A run that was stopped goes on where it stopped; a rival that takes the process down with it is a row that
failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.harness import CLOCKS
from benchmarks.peak.models import Model
from benchmarks.peak.picture import draw_peaks
from benchmarks.peak.systems import NUM_BUDGETS
from benchmarks.peak.table import Record, read_records, write_records
from benchmarks.report import BUILD, RESULTS, ROOT, Report, console_for_output, show
from benchmarks.suite.measure import CRASHED, NUM_ROUNDS, curves_beside, trained, without
from benchmarks.suite.models import MODELS
from benchmarks.suite.table import FIXED, model_report, readme_block, summary, write_readme
from benchmarks.suite.training import Curve, draw_curves, training_report, write_curves
from benchmarks.suite.turns import Turns

README = ROOT / "README.md"
QUICK_MODEL, QUICK_BUDGETS, QUICK_ROUNDS = "gpt-sdpa", 3, 3


def measured(model: Model, path: Path, turns: Turns, arguments: Sequence[str], clock: str) -> Record:
    """The record of ``model``, from a process of its own; started again after a system that ended it."""
    command = [sys.executable, "-m", "benchmarks.suite.measure", model.key, "--into", str(path), "--clock", clock]
    command += ["--turns", str(turns.path), *arguments]
    threads = {"OMP_NUM_THREADS": "1"} if clock == "cpu" else {}  # the time of all threads says little of several
    num_crashes = -1
    while True:
        process = subprocess.run(command, cwd=ROOT, env={**os.environ, **threads}, start_new_session=True)
        code, record = process.returncode, _record(model, path)
        if code == 0:
            return record
        crashes = sum(point.failure == CRASHED for point in record.points)
        if crashes <= num_crashes or not crashes:  # it did not end in a system that can be left out the next time
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            return replace(record, failure=f"the measurement ended with {how}")
        num_crashes = crashes


def _record(model: Model, path: Path) -> Record:
    return next((r for r in read_records(path) if r.model == model.key), Record(model.key, model.title))


def reports(records: Sequence[Record], curves: Sequence[Curve]) -> list[Report]:
    """The summary first, then training, then each model."""
    training = [training_report(curves, ())] if curves else []
    return [summary(records), *training, *(model_report(record) for record in records)]


def recorded(path: Path) -> tuple[Record, ...]:
    """The records in ``path``, in the order of the list of models."""
    records = {record.model: record for record in read_records(path)}
    return tuple(records[key] for key in MODELS if key in records)


def write_results(records: Sequence[Record], curves: Sequence[Curve], folder: Path) -> tuple[Record, ...]:
    """Write suite.json, suite.md, suite.svg and the curves of training into ``folder``, merged with what is there."""
    path = folder / "suite.json"
    write_records(path, records)
    ordered = recorded(path)
    if curves:
        write_curves(curves_beside(path), {curve.system: curve for curve in curves})
    kept = trained(path)
    text = "\n".join(report.to_markdown() for report in reports(ordered, kept))
    (folder / "suite.md").write_text(text, encoding="utf-8")
    draw_peaks([_drawn(record) for record in ordered], folder / "suite.svg")
    if kept:
        draw_curves(kept, folder / "suite-training.svg")
    return ordered


def _drawn(record: Record) -> Record:
    """Without the plans in fixed numbers of micro-batches: they are ours, and not what the frontier is about."""
    return replace(record, points=tuple(point for point in record.points if point.family != FIXED))


@click.command(help=__doc__)
@click.option("--model", "keys", multiple=True, type=click.Choice(list(MODELS)), help="Only this model; repeatable.")
@click.option("--budgets", "num_budgets", default=NUM_BUDGETS, show_default=True, help="Evenly spaced budgets a model.")
@click.option("--rounds", "num_rounds", default=NUM_ROUNDS, show_default=True, help="Timed steps of each system.")
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True)
@click.option("--try-n", "with_fixed", is_flag=True, help="remat in each fixed number of micro-batches too.")
@click.option(
    "--again",
    type=click.Choice(["remat", "failed", "all"]),
    help="Measure these points again. Without it only what is not there yet is measured.",
)
@click.option("--jobs", "num_jobs", default=1, show_default=True, help="Models at a time; several take --clock cpu.")
@click.option("--no-remat", is_flag=True, help="Only the rivals, which stay as they are when remat changes.")
@click.option("--quick", "is_quick", is_flag=True, help="One model, three budgets, one configuration a family.")
@click.option("--record", "keep", is_flag=True, help="Keep the results under benchmarks/results/ and in README too.")
def main(
    keys: tuple[str, ...],
    num_budgets: int,
    num_rounds: int,
    clock: str,
    with_fixed: bool,
    again: str | None,
    num_jobs: int,
    no_remat: bool,
    is_quick: bool,
    keep: bool,
) -> None:
    if is_quick and keep:
        raise click.UsageError("--quick is for seeing that everything runs, and is not recorded.")
    if num_jobs > 1 and clock != "cpu":
        raise click.UsageError("Models that are measured side by side wait for one another: --jobs takes --clock cpu.")
    if is_quick:
        keys, num_budgets, num_rounds = keys or (QUICK_MODEL,), QUICK_BUDGETS, QUICK_ROUNDS
    console = console_for_output()
    folder = BUILD / "quick" if is_quick else BUILD
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "suite.json"
    turns = Turns(folder / "suite.turns")
    turns.path.write_text("", encoding="utf-8")
    arguments = ["--budgets", str(num_budgets), "--rounds", str(num_rounds)]
    given = {"--try-n": with_fixed, "--quick": is_quick, "--no-remat": no_remat}
    arguments += [name for name, is_given in given.items() if is_given]

    def measure_one(model: Model) -> Record:
        console.print(f"{model.key}: {model.title}", highlight=False)
        if again:
            with turns.held():
                without(path, model.key, again)
        return measured(model, path, turns, arguments, clock)

    chosen = [MODELS[key] for key in keys] or list(MODELS.values())
    for model in chosen:
        if model.missing():
            console.print(f"{model.key}: skipped, {model.missing()} is not installed (pip install '.[bench]')")
    records: list[Record] = []
    with ThreadPoolExecutor(num_jobs) as pool:
        try:
            for record in pool.map(measure_one, [model for model in chosen if not model.missing()]):
                records.append(record)
                with turns.held():
                    for into in (folder, RESULTS) if keep else (folder,):
                        write_results([record], trained(path), into)
                show(model_report(record), console)
        except BaseException:  # they are in process groups of their own, which the keyboard does not reach
            pool.shutdown(wait=False, cancel_futures=True)
            turns.tell(signal.SIGINT)
            raise
    for report in reports(records, trained(path))[: 2 if trained(path) else 1]:
        show(report, console)
    if keep:
        write_readme(README, readme_block(recorded(RESULTS / "suite.json")))
    for into in (folder, RESULTS) if keep else (folder,):
        console.print(f"written to {into.relative_to(ROOT)}: suite.md, suite.json and suite.svg", highlight=False)


if __name__ == "__main__":
    main()
