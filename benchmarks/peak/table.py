"""What was measured as data, and what follows from it: rises, verdicts, frontiers. Nothing here measures.

All peaks are totals in bytes: parameters, buffers and inputs, and the measured peak of one step above them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.report import Report, format_mib

SCHEMA = 1
REMAT, COMPILE, EAGER = "remat", "torch.compile", "eager"

# How far a rival may lie below our frontier: step times of equal code differ by up to so much from run to run.
FRONTIER_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one setting on one model; what is not known is ``None``."""

    family: str  # remat, torch.compile, eager, or a rival
    name: str
    budget_bytes: int | None = None
    measured_bytes: int | None = None
    projected_bytes: int | None = None
    predicted_bytes: int | None = None  # what the memory model said before Inductor's code was read
    step_us: float | None = None  # projected
    lower_bound_us: float | None = None
    num_products: int | None = None  # matrix products and convolutions that ran in backward
    gradient_error: float | None = None
    planning_s: float | None = None
    num_graphs: int | None = None
    measured_ms: float | None = None  # the fastest step
    step_ratio: float | None = None  # to torch.compile, within the same round
    compile_s: float | None = None
    num_slices: int | None = None  # of a loop, or the number of micro-batches that remat chose
    slope_error: float | None = None  # of the loss along its gradient, where random numbers hide the true gradient
    failure: str = ""

    @property
    def gap(self) -> float | None:
        """By what share of its step the plan may be slower than the best one within its budget."""
        if not self.step_us or self.lower_bound_us is None:
            return None
        return (self.step_us - self.lower_bound_us) / self.step_us

    @property
    def difference(self) -> float | None:
        """The projected peak over the measured one, less one."""
        if self.projected_bytes is None or not self.measured_bytes:
            return None
        return self.projected_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True)
class Record:
    """All points of one model."""

    model: str
    title: str
    own_bytes: int = 0  # parameters, buffers and inputs
    gradient_bytes: int = 0
    smallest_bytes: int | None = None  # what remat says is the smallest peak that can be reached
    points: tuple[Point, ...] = ()
    failure: str = ""  # why nothing, or not all, was measured
    notes: tuple[str, ...] = field(default=())  # the machine and the versions
    is_splittable: bool | None = None  # whether remat can run the batch in slices
    clock: str = ""  # by which step times were taken

    def family(self, name: str) -> tuple[Point, ...]:
        """The points of one family that were measured, in the order in which they were."""
        return tuple(point for point in self.points if point.family == name and point.measured_bytes is not None)

    @property
    def families(self) -> tuple[str, ...]:
        """All families, in the order in which they were measured."""
        return tuple(dict.fromkeys(point.family for point in self.points))


# -- the records as JSON


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write ``records`` into ``path``; a model that is there already is replaced, the others stay."""
    merged = {record.model: record for record in (*read_records(path), *records)}
    entries = {name: asdict(record) for name, record in merged.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps({"schema": SCHEMA, "models": entries}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def read_records(path: Path) -> tuple[Record, ...]:
    """The records in ``path``; none where there is no such file.

    Raises:
        ValueError: the file is of another schema.
    """
    if not path.exists():
        return ()
    read = json.loads(path.read_text(encoding="utf-8"))
    if read.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {read.get('schema')!r}, and this benchmark reads {SCHEMA}. Delete it.")
    return tuple(_record(entry) for entry in read["models"].values())


def _record(entry: Mapping[str, Any]) -> Record:
    known = {f.name for f in fields(Point)}
    points = tuple(Point(**{k: v for k, v in point.items() if k in known}) for point in entry["points"])
    return Record(**{**entry, "points": points, "notes": tuple(entry["notes"])})


# -- what follows


def over_budget(points: Iterable[Point]) -> list[Point]:
    """The points whose measured peak is above their budget."""
    return [p for p in points if p.budget_bytes is not None and (p.measured_bytes or 0) > p.budget_bytes]


def rises(points: Iterable[Point]) -> list[Point]:
    """The points whose measured peak is above that of a point with a higher budget."""
    with_budget = [(p.budget_bytes, p.measured_bytes, p) for p in points if p.budget_bytes and p.measured_bytes]
    found, lowest = [], None
    for _, measured_bytes, point in sorted(with_budget, key=lambda entry: -entry[0]):
        if lowest is not None and measured_bytes > lowest:
            found.append(point)
        lowest = measured_bytes if lowest is None else min(lowest, measured_bytes)
    return found


def excess(rival: tuple[float, float], ours: Sequence[tuple[float, float]]) -> float:
    """How far a rival's (peak, step time) lies below the frontier of ``ours``.

    The smallest e such that one of our points has at most (1 + e) times the rival's peak at at most (1 + e) times its
    time: 0.05 where our nearest is 5 % worse in one of the two, below 0 where ours is better in both.
    """
    peak, time = rival
    return min(max(own_peak / peak, own_time / time) - 1 for own_peak, own_time in ours)


def below_frontier(record: Record) -> list[tuple[Point, float]]:
    """The rivals' points that lie below our frontier by more than the tolerance, with how far; none without times."""
    ours = _peaks_and_times(record.family(REMAT))
    if not ours:
        return []
    rivals = [p for family in record.families if family != REMAT for p in record.family(family)]
    found = [(p, excess(at[0], ours)) for p in rivals if (at := _peaks_and_times([p]))]
    return [(point, e) for point, e in found if e > FRONTIER_TOLERANCE]


def _peaks_and_times(points: Iterable[Point]) -> list[tuple[float, float]]:
    return [(p.measured_bytes, p.step_ratio) for p in points if p.measured_bytes and p.step_ratio]


def smallest_bytes(
    points: Iterable[Point], max_products: int | None = None, max_ratio: float | None = None
) -> int | None:
    """The lowest measured peak, of the points with at most so many products in backward and so long a step."""
    found = [
        p.measured_bytes
        for p in points
        if p.measured_bytes is not None
        and (max_products is None or (p.num_products is not None and p.num_products <= max_products))
        and (max_ratio is None or (p.step_ratio is not None and p.step_ratio <= max_ratio))
    ]
    return min(found, default=None)


def _percent(share: float | None, sign: str = "+") -> str:
    return "-" if share is None else f"{100 * share:{sign}.1f} %"


@dataclass(frozen=True, slots=True)
class Totals:
    """The promises over all models."""

    num_points: int
    num_over: int
    num_rises: int
    num_failures: int
    median_difference: float | None
    worst_difference: float | None
    median_gap: float | None
    num_below: int | None  # rivals' points below our frontier; None without times


def totals(records: Sequence[Record]) -> Totals:
    """What became of each promise, counted over ``records``."""
    ours = [point for record in records for point in record.family(REMAT)]
    differences = [abs(p.difference) for p in ours if p.difference is not None]
    gaps = [p.gap for p in ours if p.gap is not None and p.budget_bytes is not None]
    is_timed = any(p.step_ratio for p in ours)
    return Totals(
        num_points=len(ours),
        num_over=sum(len(over_budget(record.family(REMAT))) for record in records),
        num_rises=sum(len(rises(record.family(REMAT))) for record in records),
        num_failures=sum(
            bool(r.failure) + sum(p.family == REMAT and bool(p.failure) for p in r.points) for r in records
        ),
        median_difference=statistics.median(differences) if differences else None,
        worst_difference=max(differences, default=None),
        median_gap=statistics.median(gaps) if gaps else None,
        num_below=sum(len(below_frontier(record)) for record in records) if is_timed else None,
    )


def sentences(records: Sequence[Record]) -> tuple[str, ...]:
    """The totals as sentences, with what each promise asks for."""
    found = totals(records)
    return (
        f"{len(records)} models, {found.num_points} plans of remat measured.",
        f"Measured peaks above their budget: {found.num_over} (promised: 0).",
        f"Rises, measured peaks above that of a higher budget: {found.num_rises} (promised: 0).",
        f"Projected against measured peak: {_percent(found.median_difference, '')} at the median,"
        f" {_percent(found.worst_difference, '')} at worst (promised: 3 % and 8 %).",
        f"Certified gap to the best plan: {_percent(found.median_gap, '')} at the median (promised: 2 %).",
        f"Refused or failed: {found.num_failures}.",
        "Rivals' points below our frontier: not measured, which takes --times."
        if found.num_below is None
        else f"Rivals' points more than {FRONTIER_TOLERANCE:.0%} below our frontier: {found.num_below} (promised: 0).",
    )


# -- tables

POINT_COLUMNS = (
    "system",
    "budget MiB",
    "projected MiB",
    "measured MiB",
    "projected - measured",
    "gap",
    "products in backward",
    "step / torch.compile",
    "gradient error",
    "verdict",
)


def point_row(point: Point, risen: Sequence[Point]) -> tuple[str, ...]:
    """One line of a model's table."""
    return (
        point.name,
        format_mib(point.budget_bytes),
        format_mib(point.projected_bytes),
        format_mib(point.measured_bytes),
        _percent(point.difference),
        _percent(point.gap, "") if point.budget_bytes is not None else "-",
        "-" if point.num_products is None else str(point.num_products),
        "-" if point.step_ratio is None else f"{point.step_ratio:.3f}",
        "-" if point.gradient_error is None else f"{point.gradient_error:.1e}",
        _verdict(point, risen),
    )


def _verdict(point: Point, risen: Sequence[Point]) -> str:
    if point.failure:
        return point.failure.partition(":")[0]
    if point.budget_bytes is None or point.measured_bytes is None:
        return "-"
    if point.measured_bytes > point.budget_bytes:
        return "OVER"
    return "RISES" if point in risen else "fits"


def model_report(record: Record) -> Report:
    """Every point of one model."""
    risen = rises(record.family(REMAT))
    graphs = sorted({p.num_graphs for p in record.points if p.num_graphs})
    notes = [
        f"Parameters, buffers and inputs take {format_mib(record.own_bytes)} MiB of each total, gradients"
        f" {format_mib(record.gradient_bytes)} MiB."
    ]
    if graphs and graphs != [1]:
        notes.append(f"The step is compiled as {graphs} graphs, so it has no projected peak of its own.")
    notes += [f"{p.name}: {p.failure}" for p in record.points if p.failure]
    notes += [f"{p.name} lies {_percent(e)} below our frontier" for p, e in below_frontier(record)]
    notes += ([f"INCOMPLETE: {record.failure}"] if record.failure else []) + list(targets(record))
    return Report(
        f"{record.title} ({record.model})",
        POINT_COLUMNS,
        tuple(point_row(p, risen) for p in record.points),
        tuple(notes),
    )


SUMMARY_COLUMNS = (
    "model",
    "plans",
    "over",
    "rises",
    "difference median",
    "worst",
    "gap median",
    "torch.compile MiB",
    "our smallest MiB",
    "rivals' smallest MiB (ours at no more products)",
)


def summary_row(record: Record) -> tuple[str, ...]:
    """One model in one line."""
    found, ours = totals([record]), record.family(REMAT)
    rivals = [family for family in record.families if family not in (REMAT, COMPILE, EAGER)]
    return (
        record.model,
        str(found.num_points) + (f" + {found.num_failures} failed" if found.num_failures else ""),
        str(found.num_over),
        str(found.num_rises),
        _percent(found.median_difference, ""),
        _percent(found.worst_difference, ""),
        _percent(found.median_gap, ""),
        format_mib(smallest_bytes(record.family(COMPILE))),
        format_mib(smallest_bytes(ours)),
        "; ".join(_rival_cell(record.family(family), family, ours) for family in rivals) or "-",
    )


def _rival_cell(points: Sequence[Point], family: str, ours: Sequence[Point]) -> str:
    if not points:
        return f"{family} -"
    best = min(points, key=lambda p: p.measured_bytes or 0)
    at_most = smallest_bytes(ours, max_products=best.num_products) if best.num_products is not None else None
    return f"{family} {format_mib(best.measured_bytes)} ({format_mib(at_most)})"


def summary(records: Sequence[Record], notes: Sequence[str]) -> Report:
    """One line a model, and the promises below."""
    rows = tuple(summary_row(record) for record in records)
    return Report("Budgets against measured peaks, Inductor", SUMMARY_COLUMNS, rows, (*sentences(records), *notes))


# -- promises about single models

GPT_BYTES = 97 * 2**20  # above the parameters, at most 0.97 of the step of a checkpoint per block
GPT_SHARE = 0.75  # of torch.compile's peak above the parameters, at torch.compile's own speed
NUM_LAYERS = 64
LAYER_BYTES = 4096 * 64 * 4  # one activation of mlp-64: rows, width, float32
LAYERS_SHARE = 1.3  # of 2*sqrt(NUM_LAYERS), the layers that are alive at one more forward


def read_off_bytes(record: Record) -> tuple[int, ...]:
    """Budgets beside the evenly spaced ones: the smallest peak of each rival, and what was promised of this model.

    Between two evenly spaced budgets our frontier is a step, and a rival between them looks better than it is.
    """
    rivals = [smallest_bytes(record.family(name)) for name in record.families if name not in (REMAT, COMPILE, EAGER)]
    full, own = smallest_bytes(record.family(COMPILE)) or 0, record.own_bytes
    promised = {
        "gpt-16": (own + GPT_BYTES, own + int(GPT_SHARE * (full - own))),
        "mlp-64": (own + record.gradient_bytes + int(LAYERS_SHARE * 2 * NUM_LAYERS**0.5 * LAYER_BYTES),),
    }
    return (*(peak for peak in rivals if peak is not None), *promised.get(record.model, ()))


def targets(record: Record) -> tuple[str, ...]:
    """What was promised of this model alone, with what was measured."""
    checks = {"gpt-16": _gpt_sixteen, "llama-16": _llama_sixteen, "mlp-64": _equal_layers}
    return checks[record.model](record) if record.model in checks else ()


def _above(record: Record, num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{format_mib(num_bytes - record.own_bytes)} MiB"


def _gpt_sixteen(record: Record) -> tuple[str, ...]:
    blocks = record.family("checkpoint per block")
    full = smallest_bytes(record.family(COMPILE))
    if not blocks or full is None or blocks[0].step_ratio is None:
        return ()
    ours = record.family(REMAT)
    fast = smallest_bytes(ours, max_ratio=0.97 * blocks[0].step_ratio)
    same = smallest_bytes(ours, max_ratio=1.02)
    share = "-" if same is None else f"{(same - record.own_bytes) / (full - record.own_bytes):.2f}"
    return (
        f"At 0.97 of the step of a checkpoint per block the peak above the parameters is {_above(record, fast)}"
        f" (promised: {format_mib(GPT_BYTES)} MiB).",
        f"At 1.02 of torch.compile's step the peak above the parameters is {share} of its (promised: {GPT_SHARE}).",
    )


def _llama_sixteen(record: Record) -> tuple[str, ...]:
    blocks = record.family("checkpoint per block")
    if not blocks or blocks[0].num_products is None:
        return ()
    ours = smallest_bytes(record.family(REMAT), max_products=blocks[0].num_products)
    return (
        f"At no more products in backward than a checkpoint per block ({blocks[0].num_products}) the peak above the"
        f" parameters is {_above(record, ours)}, and its is {_above(record, blocks[0].measured_bytes)}.",
    )


def _equal_layers(record: Record) -> tuple[str, ...]:
    plain = record.family(COMPILE)
    if not plain or plain[0].num_products is None:
        return ()
    ours = smallest_bytes(record.family(REMAT), max_products=plain[0].num_products + NUM_LAYERS)
    if ours is None:
        return ()
    layers = (ours - record.own_bytes - record.gradient_bytes) / LAYER_BYTES
    ideal = 2 * NUM_LAYERS**0.5
    return (
        f"At one more forward the activations take {layers:.1f} layers, {layers / ideal:.2f} of 2*sqrt({NUM_LAYERS})"
        f" (promised: {LAYERS_SHARE}).",
    )
