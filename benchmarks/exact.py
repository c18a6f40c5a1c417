"""How good the planner is: its plans beside the least time that HiGHS finds or proves, on joint graphs of real models.

HiGHS answers for decisions that recompute each value at most once, under the eager lowering (tests/exact_peak.py).
Where its time is up its bound stands in for the optimum: the true ratio is then smaller than the one that is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import click
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks import (
    Batch,
    EncoderDecoder,
    EqualLayers,
    ExplicitAttention,
    LanguageModel,
    LlamaBlock,
    Network,
    PreNormBlock,
    RMSNorm,
    UNet,
)
from benchmarks.report import ROOT, Report, console_for_output, format_mib, machine_notes, publish
from remat_passes.errors import BudgetInfeasibleError
from remat_passes.search import Candidate, Choice

sys.path.append(str(ROOT / "tests"))  # the solver is a test's oracle, and the graphs are traced as tests trace them

from exact_peak import Optimum, optimum
from graphs import Staged, choose, staged, trace
from oracle import TEST_SPEC

FRACTIONS = (0.1, 0.4, 0.7)  # of the way from the smallest peak of the planner to what plain Inductor needs
NEGLIGIBLE = 0.02  # of the largest value: storages that HiGHS does not count (its bound stays a bound)
GAP = 0.002  # at which HiGHS may stop
COLUMNS = (
    "network",
    "nodes",
    "budget MiB",
    "planner us",
    "HiGHS us",
    "bound us",
    "proven",
    "step / optimum",
    "added / optimum",
    "planner s",
    "HiGHS s",
    "times faster",
)


class TanhLayers(nn.Module):
    """Linear and tanh, with a mean squared error: two values a layer."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(x, target)


class NormedLayers(nn.Module):
    """RMSNorm, two Linear, residual, over and over."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(RMSNorm(width), nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, target)


def _rows() -> Batch:
    return torch.randn(1024, 256), torch.randn(1024, 256)


def _tokens(count: int = 1) -> Batch:
    return tuple(torch.randint(256, (4, 128)) for _ in range(count))


NETWORKS = (
    Network("12 x (Linear, tanh)", lambda: TanhLayers(256, 12), _rows),
    Network("12 x (Linear, GELU)", lambda: EqualLayers(256, 12), _rows),
    Network("4 x (RMSNorm, 2 Linear)", lambda: NormedLayers(256, 4), _rows),
    Network("6 x (RMSNorm, 2 Linear)", lambda: NormedLayers(256, 6), _rows),
    Network("8 x (RMSNorm, 2 Linear)", lambda: NormedLayers(256, 8), _rows),
    Network(
        "GPT, 1 block, softmax, dropout",
        lambda: LanguageModel([ExplicitAttention(128, 4, 0.1)], 128, 256, None),
        lambda: _tokens(2),
    ),
    Network(
        "GPT, 2 blocks, SDPA",
        lambda: LanguageModel([PreNormBlock(128, 4, causal=True) for _ in range(2)], 128, 256, None),
        lambda: _tokens(2),
    ),
    Network("llama-style, 1 block", lambda: LanguageModel([LlamaBlock(128, 4, 2)], 128, 256, 32), lambda: _tokens(2)),
    Network(
        "llama-style, 2 blocks",
        lambda: LanguageModel([LlamaBlock(128, 4, 2) for _ in range(2)], 128, 256, 32),
        lambda: _tokens(2),
    ),
    Network("encoder-decoder, 1 block each", lambda: EncoderDecoder(64, 4, 1, 256, 128), lambda: _tokens(3)),
    Network("U-Net, group norm", lambda: UNet(8), lambda: (torch.randn(4, 3, 32, 32), torch.randint(5, (4, 32, 32)))),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One budget of one network."""

    network: str
    graph: Staged
    budget_bytes: int
    planner: Candidate | None  # None: refused
    planner_s: float
    exact: Optimum

    @property
    def step_ratio(self) -> float | None:
        """The whole step of the plan, in what no decision can be faster than; ``None`` where one of them has none."""
        if self.planner is None or self.exact.is_infeasible:
            return None
        fixed_ps = self.graph.costs.fixed_ps
        return (fixed_ps + self.planner.cut.time_ps) / (fixed_ps + self.exact.bound_ps)

    @property
    def added_ratio(self) -> float | None:
        """The same of what the decision adds alone: saving and recomputing."""
        if self.planner is None or self.exact.is_infeasible or self.exact.bound_ps <= 0:
            return None
        return self.planner.cut.time_ps / self.exact.bound_ps

    def cells(self) -> tuple[str, ...]:
        exact = self.exact
        chosen = None if self.planner is None else self.planner.cut.time_ps
        again = "" if self.planner is None or self.planner.unrolled is None else " *"
        return (
            self.network,
            str(len(self.graph.joint.values)),
            format_mib(self.budget_bytes),
            "refused" if chosen is None else f"{chosen / 1e6:.0f}{again}",
            "none" if exact.is_infeasible else "-" if exact.best is None else f"{exact.best.cut.time_ps / 1e6:.0f}",
            "none" if exact.is_infeasible else f"{exact.bound_ps / 1e6:.0f}",
            "yes" if exact.is_proven else "no",
            "-" if self.step_ratio is None else f"{self.step_ratio:.4f}",
            "-" if self.added_ratio is None else f"{self.added_ratio:.3f}",
            f"{self.planner_s:.2f}",
            f"{exact.seconds:.1f}",
            f"{exact.seconds / self.planner_s:.0f}",
        )


def timed(call: Callable[[], Choice]) -> tuple[Candidate | None, float]:
    """What the planner chooses, ``None`` where it refuses, and how long it takes."""
    started = time.perf_counter()
    try:
        chosen: Candidate | None = call().chosen
    except BudgetInfeasibleError:
        chosen = None
    return chosen, time.perf_counter() - started


def smallest_peak(graph: Staged) -> int:
    """What the planner says can be reached."""
    try:
        return choose(graph, 1).chosen.projection.peak_bytes
    except BudgetInfeasibleError as refused:
        return refused.smallest_bytes


def rows(network: Network, time_limit_s: float, fractions: tuple[float, ...] = FRACTIONS) -> list[Row]:
    """The budgets of one network; ``fractions`` as ``FRACTIONS``."""
    torch.manual_seed(0)
    graph = staged(trace(network.build(), *network.batch()), spec=TEST_SPEC)
    smallest, most = smallest_peak(graph), graph.inductor.projection.peak_bytes
    found = []
    for fraction in fractions:
        budget_bytes = smallest + round(fraction * (most - smallest))
        planner, planner_s = timed(lambda budget_bytes=budget_bytes: choose(graph, budget_bytes))  # type: ignore[misc]
        negligible_bytes = int(NEGLIGIBLE * max(graph.model.sizes))
        exact = optimum(
            graph.joint,
            graph.problem,
            graph.model,
            budget_bytes,
            time_limit_s,
            negligible_bytes=negligible_bytes,
            gap=GAP,
        )
        found.append(Row(network.name, graph, budget_bytes, planner, planner_s, exact))
    return found


def measure(names: tuple[str, ...], time_limit_s: float, console: Console) -> list[tuple[str, ...]]:
    cells = []
    for network in NETWORKS:
        if names and not any(name in network.name for name in names):
            continue
        console.print(f"solving {network.name}")
        for row in rows(network, time_limit_s):
            cells.append(row.cells())
            console.print("  " + " | ".join(cells[-1]), highlight=False)
    return cells


@click.command(help=__doc__)
@click.option("--seconds", default=60.0, help="Time that HiGHS gets for one budget.", show_default=True)
@click.option("--network", "names", multiple=True, help="Only networks with this in their name.")
@click.option("--record", is_flag=True, help="Keep the table under benchmarks/results/ too.")
def main(seconds: float, names: tuple[str, ...], record: bool) -> None:
    console = console_for_output()
    cells = measure(names, seconds, console)
    notes = (
        *machine_notes(),
        "Eager lowering; prices of a 2-core server. Microseconds are what a plan adds to the work that every plan has.",
        f"HiGHS had {seconds:.0f} s a budget. Ratios are to its bound: where it proved nothing the truth is better.",
        "HiGHS us: the fastest decision that it found and that fits when it is replayed. none: no decision fits.",
        "*: computes a value more than once, which is no decision of the kind that HiGHS was asked for.",
    )
    publish(Report("The planner and an exact solver", COLUMNS, tuple(cells), notes), "exact", console, record=record)


if __name__ == "__main__":
    main()
