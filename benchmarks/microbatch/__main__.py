"""One step in N slices: peak, step time, compile time and exactness of remat beside other ways to accumulate.

The GPT of the first benchmark by default; ``--exact`` holds small networks of each kind against float64, and
``--compile`` measures compile time against the number of slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from benchmarks.first import SHAPE
from benchmarks.harness import CLOCKS
from benchmarks.microbatch.compile_time import compile_times
from benchmarks.microbatch.exact import CASES, measure_all
from benchmarks.microbatch.picture import draw_slices
from benchmarks.microbatch.systems import NUM_ROUNDS, NUM_SLICES, contenders, measure_gpt
from benchmarks.microbatch.table import compile_report, exact_report, report
from benchmarks.report import BUILD, RESULTS, ROOT, Report, console_for_output, machine_notes, publish

TITLE = (
    f"Micro-batches: GPT on CPU, {SHAPE.num_layers} layers, width {SHAPE.width}, vocabulary {SHAPE.vocabulary},"
    f" batch {SHAPE.batch} x {SHAPE.tokens}, float32"
)
CLOCK_NOTES = {
    "wall": ("wall time", "of this machine's clock"),
    "cpu": ("processor time", "which other programs on the machine disturb less; it counts every thread"),
}


def notes(num_rounds: int, clock: str) -> tuple[str, ...]:
    """How the figures of the main table are to be read."""
    what, why = CLOCK_NOTES[clock]
    return (
        "Totals: parameters, buffers and inputs, and the measured peak of one forward and backward above them.",
        "Python loop: a compiled loss for each slice, all of one size, by its share of the samples, and backward.",
        "Gradient error: the largest relative error of one parameter's gradient against eager float64. The unsplit step"
        " is remat in one slice for remat, else torch.compile.",
        f"Step: median of {num_rounds} ratios within interleaved rounds; {what}, {why}."
        if num_rounds
        else "No step times were measured, and compile times were taken as they came.",
        *machine_notes(),
    )


def main_table(slices: Sequence[int], num_rounds: int, clock: str, *, with_rivals: bool, keep: bool) -> Report:
    """The GPT in each number of slices, with the picture beside the table."""
    points = measure_gpt(SHAPE, contenders(slices, with_rivals=with_rivals), num_rounds, CLOCKS[clock])
    for folder in (BUILD, RESULTS) if keep else (BUILD,):
        draw_slices(points, folder / "microbatch.svg")
    return report(TITLE, points, notes(num_rounds, clock))


@click.command(help=__doc__)
@click.option("--slices", "slices", multiple=True, type=int, help="Only this number of slices; repeatable.")
@click.option("--no-rivals", is_flag=True, help="Only eager, torch.compile and remat.")
@click.option("--times/--no-times", "with_times", default=True, show_default=True, help="Step times too.")
@click.option("--rounds", "num_rounds", default=NUM_ROUNDS, show_default=True, help="Timed steps of each system.")
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True, help="What is counted.")
@click.option("--exact", is_flag=True, help="Errors of small networks in float64, float32 and bfloat16 instead.")
@click.option("--case", "cases", multiple=True, help="With --exact: only networks with this in their name; repeatable.")
@click.option("--compile", "with_compile", is_flag=True, help="Compile time in 2 and in 64 slices instead.")
@click.option("--record", is_flag=True, help="Keep the result under benchmarks/results/ too.")
def main(
    slices: tuple[int, ...],
    no_rivals: bool,
    with_times: bool,
    num_rounds: int,
    clock: str,
    exact: bool,
    cases: tuple[str, ...],
    with_compile: bool,
    record: bool,
) -> None:
    console = console_for_output()
    if exact:
        chosen = [case for case in CASES if not cases or any(part in case.name for part in cases)]
        publish(exact_report(measure_all(chosen), machine_notes()), "microbatch-exact", console, record=record)
        return
    if with_compile:
        title = f"{TITLE}: compile time"
        found = compile_times(SHAPE, clock=CLOCKS[clock])
        publish(compile_report(title, found, machine_notes()), "microbatch-compile", console, record=record)
        return
    rounds = num_rounds if with_times else 0
    made = main_table(slices or NUM_SLICES, rounds, clock, with_rivals=not no_rivals, keep=record)
    publish(made, "microbatch", console, record=record)
    console.print(f"and {(BUILD / 'microbatch.svg').relative_to(ROOT)}", highlight=False)


if __name__ == "__main__":
    main()
