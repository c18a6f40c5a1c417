"""The tables: what was measured as rows of text, and what follows from it. Nothing here measures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.settings import CHECKPOINT, COMPILE, EAGER, KNOB, LOOP, REMAT

Record = Mapping[str, Any]
MIB = 2**20
RIVALS = (EAGER, COMPILE, CHECKPOINT, KNOB, LOOP)


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of texts, and sentences below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        """The table as Markdown with columns of one width, so that it reads on a terminal too."""
        marks = (":--", *["--:"] * (len(self.columns) - 1))
        cells = [tuple(cell.replace("|", "/") for cell in row) for row in (self.columns, marks, *self.rows)]
        widths = [max(len(row[at]) for row in cells) for at in range(len(self.columns))]
        lines = [f"| {' | '.join(_padded(row, widths))} |" for row in cells] if self.rows else ["Nothing was measured."]
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"## {self.title}", "", *lines, *(["", *notes] if notes else [])]) + "\n"


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.ljust(w) if at == 0 else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))]


def _figure(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:.1f}"


def _share(own: float | None, other: float | None) -> float | None:
    return None if own is None or not other else own / other


def _reason(row: Record) -> str:
    return str(row["failure"]).partition(":")[0]


def find(rows: Iterable[Record], family: str) -> Record | None:
    """The first row of a family that was measured."""
    return next((row for row in rows if row["family"] == family and not row["failure"]), None)


# -- exactness


def exact_table(rows: Sequence[Record]) -> Table:
    """Each network in each dtype under each setting."""
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("exact", "same masks", "OFF")}
    off = [f"OFF: {row['network']}, {row['dtype']}, {row['system']}" for row in rows if row["verdict"] == "OFF"]
    said = [f"{row['network']}, {row['dtype']}, {row['system']}: {row['failure']}" for row in rows if row["failure"]]
    return Table(
        "Gradients on the device: the largest relative error of one",
        ("network", "dtype", "system", "against", "error", "of torch.compile's", "verdict"),
        tuple(
            (
                row["network"],
                row["dtype"],
                row["system"],
                row["against"],
                _figure(row["error"], ".1e"),
                _figure(_share(row["error"], row["compile_error"]), ".2f"),
                row["verdict"],
            )
            for row in rows
        ),
        (", ".join(f"{count} {verdict}" for verdict, count in counts.items()), *off, *said),
    )


def masks_table(rows: Sequence[Record]) -> Table:
    """Whether dropout draws the same."""
    return Table(
        "Dropout's masks beside torch.compile's, bit for bit",
        ("system", "dtype", "in forward", "in backward"),
        tuple(
            (row["system"], row["dtype"], *_masks(row["failure"], row["same_in_forward"], row["same_in_backward"]))
            for row in rows
        ),
        tuple(f"{row['system']}, {row['dtype']}: {row['failure']}" for row in rows if row["failure"]),
    )


def _masks(failure: str, *same: bool) -> tuple[str, ...]:
    return tuple(failure.partition(":")[0] if failure else "same" if each else "OTHER" for each in same)


# -- peaks and times


def verdict(row: Record) -> str:
    """Whether the budget was met."""
    if row["failure"]:
        return _reason(row)
    if row["budget_bytes"] is None:
        return "-"
    return "fits" if row["measured_bytes"] <= row["budget_bytes"] else "OVER"


def step_ratio(row: Record, plain: Record | None) -> float | None:
    """The step as a multiple of torch.compile's: within interleaved rounds, else as both were timed alone."""
    if row.get("round_ratio") is not None:
        return float(row["round_ratio"])
    return _share(row["step_ms"], plain["step_ms"] if plain else None)


def norm_difference(row: Record, plain: Record | None) -> float | None:
    """The largest relative difference of the norm of one gradient from torch.compile's."""
    if plain is None or not row["gradient_norms"]:
        return None
    own, other = row["gradient_norms"], plain["gradient_norms"]
    return max(abs(own.get(name, math.inf) / norm - 1) for name, norm in other.items() if norm)


def systems_table(title: str, rows: Sequence[Record], every: Sequence[Record], notes: Sequence[str] = ()) -> Table:
    """One row a system; ``every`` has torch.compile among it."""
    plain = find(every, COMPILE)
    columns = (
        "system",
        "slices",
        "budget MiB",
        "projected MiB",
        "measured MiB",
        "of torch.compile's",
        "verdict",
        "step ms",
        "/ torch.compile",
        "projected / step",
        "compile s",
        "planning s",
        "gradient norms",
    )
    cells = tuple(
        (
            row["name"],
            str(row["num_slices"]),
            _mib(row["budget_bytes"]),
            _mib(row["projected_bytes"]),
            _mib(row["measured_bytes"]),
            _figure(_share(row["measured_bytes"], plain["measured_bytes"] if plain else None), ".3f"),
            verdict(row),
            _figure(row["step_ms"], ".1f"),
            _figure(step_ratio(row, plain), ".3f"),
            _figure(_share(row["predicted_us"], row["step_ms"] and row["step_ms"] * 1e3), ".2f"),
            _figure(row["compile_s"], ".0f"),
            _figure(row["planning_s"], ".1f"),
            _figure(norm_difference(row, plain), ".1e"),
        )
        for row in rows
    )
    said = tuple(f"{row['name']}: {row['failure']}" for row in rows if row["failure"])
    return Table(title, columns, cells, (*said, *notes))


def budget_sentences(rows: Sequence[Record]) -> tuple[str, ...]:
    """Budgets met of asked, the smallest peaks, and the step at the peaks of the rivals."""
    asked = [row for row in rows if row["family"] == REMAT and row["budget_bytes"] is not None]
    measured = [row for row in rows if row["measured_bytes"] is not None]
    counts = [f"{sum(verdict(row) == kind for row in asked)} {kind}" for kind in ("fits", "OVER", "refused")]
    counts.append(f"{sum(verdict(row) not in ('fits', 'OVER', 'refused') for row in asked)} not measured")
    sentences = [f"Budgets: {len(asked)} asked, {', '.join(counts)}."]
    smallest = {
        family: min((row["measured_bytes"] for row in measured if row["family"] == family), default=None)
        for family in (REMAT, *RIVALS)
    }
    sentences.append("Smallest peaks: " + ", ".join(f"{f} {_mib(b)} MiB" for f, b in smallest.items() if b) + ".")
    for family in (CHECKPOINT, KNOB, LOOP):
        ratios = at_equal_peak(measured, family)
        if ratios:
            sentences.append(
                f"Step at the peaks of {family}: {statistics.geometric_mean(ratios):.3f} of its step"
                f" in the geometric mean, {max(ratios):.3f} at worst, {len(ratios)} points."
            )
    return tuple(sentences)


def at_equal_peak(measured: Sequence[Record], family: str) -> list[float]:
    """For each point of a rival our fastest step at no higher peak, as a multiple of the rival's."""
    plain = find(measured, COMPILE)
    ratios = []
    for rival in (row for row in measured if row["family"] == family):
        own = [
            ratio
            for row in measured
            if row["family"] == REMAT
            and row["measured_bytes"] <= rival["measured_bytes"]
            and (ratio := step_ratio(row, plain)) is not None
        ]
        other = step_ratio(rival, plain)
        if own and other:
            ratios.append(min(own) / other)
    return ratios


# -- costs


def costs_table(rows: Sequence[Record]) -> Table:
    """Each class of kernels, one by one and in the step."""
    return Table(
        "Cost model against measured time: torch.compile's graph of the GPT, kernels by class",
        ("kernels", "how", "number", "projected ms", "measured ms", "projected / measured", "of single kernels"),
        tuple(
            (
                row["kind"],
                row["how"],
                str(row["num_kernels"]),
                _figure(row["projected_us"] and row["projected_us"] / 1e3, ".2f"),
                _figure(row["measured_us"] / 1e3, ".2f"),
                _figure(_share(row["projected_us"], row["measured_us"]), ".2f"),
                "-" if row["lowest_ratio"] is None else f"{row['lowest_ratio']:.2f} to {row['highest_ratio']:.2f}",
            )
            for row in rows
        ),
    )


def plan_sentence(rows: Sequence[Record]) -> str:
    """Projected against measured step time over all plans."""
    ratios = [row["predicted_us"] / (row["step_ms"] * 1e3) for row in rows if row["predicted_us"] and row["step_ms"]]
    if not ratios:
        return "No plan has both a projected and a measured step time."
    return (
        f"Projected / measured step time over {len(ratios)} plans: {statistics.median(ratios):.2f} at the median,"
        f" {min(ratios):.2f} to {max(ratios):.2f}."
    )
