"""How true the memory model is: projected against measured peaks over networks of different kinds, on CPU."""

from __future__ import annotations

import click
import torch

import remat_compiler
from benchmarks.harness import clear_gradients, refusals
from benchmarks.networks import NETWORKS, Network
from benchmarks.report import Report, console_for_output, format_mib, machine_notes, publish
from remat_compiler.measure import measure_peak
from remat_passes.errors import RematError

BUDGETS = (None, "85%", "70%", "60%")
COLUMNS = ("network", "budget", "budget MiB", "projected MiB", "measured MiB", "projected - measured", "verdict")


def row(network: Network, budget: str | None) -> tuple[str, ...]:
    """Compile, run once, and measure the second step."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, batch = network.build(), network.batch()
    options = {} if budget is None else {"memory_budget": budget}
    step = torch.compile(model, backend="remat", options=options)
    try:
        with refusals():
            step(*batch).backward()
    except RematError:
        return (network.name, budget or "none", "-", "-", "-", "-", "refused")
    clear_gradients(model)
    trace = measure_peak(lambda: step(*batch).backward())
    plan = remat_compiler.plans()[-1]
    measured = trace.above_baseline_bytes + plan.baseline_bytes
    fits = "-" if plan.budget_bytes is None else "fits" if measured <= plan.budget_bytes else "over"
    difference = f"{100 * (plan.projected_peak_bytes / measured - 1):+.1f} %"
    shown = (format_mib(size) for size in (plan.budget_bytes, plan.projected_peak_bytes, measured))
    return (network.name, budget or "none", *shown, difference, fits)


@click.command(help=__doc__)
@click.option("--record", is_flag=True, help="Keep the table under benchmarks/results/ too.")
def main(record: bool) -> None:
    console = console_for_output()
    rows = []
    for network in NETWORKS:
        for budget in BUDGETS:
            console.print(f"measuring {network.name}, budget {budget or 'none'}")
            rows.append(row(network, budget))
    title = "Projected and measured peaks, Inductor on CPU"
    notes = (*machine_notes(), "Percentages are of what plain Inductor's plan is projected to need.")
    publish(Report(title, COLUMNS, tuple(rows), notes), "projection", console, record=record)


if __name__ == "__main__":
    main()
