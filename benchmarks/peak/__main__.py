"""Measured peaks against budgets: remat beside every other way to save memory under torch.compile.

Each model is measured in a process of its own, so a crash loses one model and no memory is carried over.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.peak.models import MODELS, Model
from benchmarks.peak.picture import draw_peaks
from benchmarks.peak.systems import NUM_BUDGETS, NUM_ROUNDS, rivals
from benchmarks.peak.table import Record, model_report, read_records, summary, write_records
from benchmarks.report import BUILD, RESULTS, ROOT, Report, console_for_output, machine_notes, show
from remat_passes.units import parse_bytes

FAMILIES = tuple(dict.fromkeys(contender.family for contender in rivals()))


def measured(model: Model, arguments: Sequence[str]) -> Record:
    """The record of ``model``, from a process of its own; of a crash what was measured before it, and that it was."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        command = [sys.executable, "-m", "benchmarks.peak.systems", model.key, "--into", str(path), *arguments]
        code = subprocess.run(command, cwd=ROOT).returncode
        records = read_records(path)
    record = records[0] if records else Record(model.key, model.title)
    if code == 0:
        return record
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return replace(record, failure=f"the measurement ended with {how}")


def write_results(records: Sequence[Record], folder: Path) -> tuple[Record, ...]:
    """Write peak.json, peak.md and peak.svg into ``folder``, merged with the models that are there."""
    write_records(folder / "peak.json", records)
    merged = {record.model: record for record in read_records(folder / "peak.json")}
    ordered = tuple(merged[key] for key in MODELS if key in merged)
    reports: list[Report] = [summary(ordered, machine_notes()), *(model_report(record) for record in ordered)]
    text = "\n".join(report.to_markdown() for report in reports)
    (folder / "peak.md").write_text(text, encoding="utf-8")
    draw_peaks(ordered, folder / "peak.svg")
    return ordered


@click.command(help=__doc__)
@click.option("--model", "keys", multiple=True, type=click.Choice(list(MODELS)), help="Only this model; repeatable.")
@click.option("--budgets", "num_budgets", default=NUM_BUDGETS, show_default=True, help="Budgets a model.")
@click.option("--budget", "asked", multiple=True, help="This budget in their place, such as 97MiB; repeatable.")
@click.option("--rival", "families", multiple=True, type=click.Choice(FAMILIES), help="Only these; repeatable.")
@click.option("--no-rivals", is_flag=True, help="Only eager, torch.compile and remat.")
@click.option("--times", "with_times", is_flag=True, help="Step times too: every system is kept alive.")
@click.option("--rounds", "num_rounds", default=NUM_ROUNDS, show_default=True, help="Timed steps of each system.")
@click.option("--record", "keep", is_flag=True, help="Keep the results under benchmarks/results/ too.")
def main(
    keys: tuple[str, ...],
    num_budgets: int,
    asked: tuple[str, ...],
    families: tuple[str, ...],
    no_rivals: bool,
    with_times: bool,
    num_rounds: int,
    keep: bool,
) -> None:
    console = console_for_output()
    arguments = ["--budgets", str(num_budgets), "--no-rivals" if no_rivals else "--rivals"]
    arguments += ["--rounds", str(num_rounds if with_times else 0)]
    arguments += [argument for family in families for argument in ("--rival", family)]
    arguments += [argument for budget in asked for argument in ("--budget", str(parse_bytes(budget)))]
    records = []
    for model in [MODELS[key] for key in keys] or MODELS.values():
        if model.missing():
            console.print(f"{model.key}: skipped, {model.missing()} is not installed (pip install '.[bench]')")
            continue
        console.print(f"{model.key}: {model.title}", highlight=False)
        record = measured(model, arguments)
        records.append(record)
        for folder in (BUILD, RESULTS) if keep else (BUILD,):
            write_results([record], folder)
        show(model_report(record), console)
    show(summary(records, machine_notes()), console)
    for folder in (BUILD, RESULTS) if keep else (BUILD,):
        console.print(f"written to {(folder / 'peak.md').relative_to(ROOT)}, peak.json and peak.svg", highlight=False)


if __name__ == "__main__":
    main()
