"""What was measured as data, and what follows from it: shares, verdicts, the table. Nothing here measures.

All peaks are totals in bytes: parameters, buffers and inputs, and the measured peak of one step above them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.report import Report, format_mib

REMAT, COMPILE, EAGER, LOOP, CHUNKER = "remat", "torch.compile", "eager", "Python loop", "auto_chunker"

# What was promised of the GPT in 16 slices, as shares: of torch.compile's peak and step, and of the Python loop's step.
PEAK_SHARE, STEP_SHARE, LOOP_STEP_SHARE = 0.15, 1.08, 1.02
ERROR_SHARE = 1.05  # of the unsplit step's error against float64, in float32


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one number of slices; what is not known is ``None``."""

    family: str
    num_slices: int = 1
    variant: str = ""  # of a family at the same number of slices
    projected_bytes: int | None = None
    measured_bytes: int | None = None
    gradient_error: float | None = None  # the largest relative one of a parameter's gradient, against float64
    compile_s: float | None = None
    step_ms: float | None = None  # the fastest
    step_ratio: float | None = None  # to torch.compile, within the same round
    loop_ratio: float | None = None  # to the Python loop with as many slices, within the same round
    failure: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """The system as a line of the table calls it; no two points of one table share it."""
        slices = f" x{self.num_slices}" if self.family in (REMAT, LOOP) else ""
        return f"{self.family}{slices}" + (f", {self.variant}" if self.variant else "")


def find(points: Iterable[Point], family: str, num_slices: int = 1) -> Point | None:
    """The first point of a family with so many slices that did not fail."""
    return next((p for p in points if (p.family, p.num_slices) == (family, num_slices) and not p.failure), None)


def unsplit(point: Point, points: Iterable[Point]) -> Point | None:
    """The same step in one piece: remat's own where it was measured, else torch.compile's."""
    kept = tuple(points)
    own = find(kept, REMAT) if point.family == REMAT else None
    return own or find(kept, COMPILE)


def share(own: float | None, other: float | None) -> float | None:
    """``own`` as a multiple of ``other``; ``None`` where one of them is not known or there is nothing to compare to."""
    return None if own is None or not other else own / other


def error_share(point: Point, points: Iterable[Point]) -> float | None:
    """The error as a multiple of that of the same step in one piece."""
    whole = unsplit(point, points)
    return share(point.gradient_error, whole.gradient_error if whole else None)


COLUMNS = (
    "system",
    "slices",
    "projected MiB",
    "measured MiB",
    "of torch.compile's",
    "step / torch.compile",
    "step / Python loop",
    "fastest step ms",
    "compile s",
    "gradient error",
    "of the unsplit step's",
)


def row(point: Point, points: Sequence[Point]) -> tuple[str, ...]:
    """One line of the table."""
    plain = find(points, COMPILE)
    of_plain = share(point.measured_bytes, plain.measured_bytes if plain else None)
    return (
        point.name,
        str(point.num_slices),
        format_mib(point.projected_bytes),
        format_mib(point.measured_bytes) if not point.failure else point.failure.partition(":")[0],
        _figure(of_plain, ".3f"),
        _figure(point.step_ratio, ".3f"),
        _figure(point.loop_ratio, ".3f"),
        _figure(point.step_ms, ".0f"),
        _figure(point.compile_s, ".1f"),
        _figure(point.gradient_error, ".1e"),
        _figure(error_share(point, points), ".3f"),
    )


def _figure(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def report(title: str, points: Sequence[Point], notes: Sequence[str]) -> Report:
    """All points in one table, and what became of the promises below it."""
    failures = [f"{p.name}: {p.failure}" for p in points if p.failure]
    remarks = [f"{p.name}: {p.note}" for p in points if p.note]
    rows = tuple(row(point, points) for point in points)
    return Report(title, COLUMNS, rows, (*sentences(points), *remarks, *failures, *notes))


def sentences(points: Sequence[Point]) -> tuple[str, ...]:
    """What was promised of the most slices that were measured, each with what was found."""
    most = max((p.num_slices for p in points if p.family == REMAT and not p.failure), default=1)
    ours, plain = find(points, REMAT, most), find(points, COMPILE)
    if ours is None or most == 1:
        return ("No split step of remat was measured, so nothing can be said of the promises.",)
    peak = share(ours.measured_bytes, plain.measured_bytes if plain else None)
    split = [p for p in points if p.family == REMAT and p.num_slices > 1]
    errors = [e for e in (error_share(p, points) for p in split) if e is not None]
    return (
        f"Peak in {most} slices: {_figure(peak, '.3f')} of torch.compile's (promised: {PEAK_SHARE}).",
        f"Step in {most} slices: {_figure(ours.step_ratio, '.3f')} of torch.compile's (promised: {STEP_SHARE}),"
        f" {_figure(ours.loop_ratio, '.3f')} of the Python loop's (promised: {LOOP_STEP_SHARE}).",
        f"Largest error of a gradient against float64: {_figure(max(errors, default=None), '.3f')} of the unsplit"
        f" step's (promised: {ERROR_SHARE}).",
    )


# -- exactness


@dataclass(frozen=True, slots=True)
class Exactness:
    """One model in one dtype and so many slices: how far its gradients are from float64."""

    model: str
    dtype: str
    batch: int
    num_slices: int
    error: float | None = None
    unsplit_error: float | None = None
    largest_share: float | None = None  # of one gradient's error in that of the same gradient of the unsplit step
    refusal: str = ""

    @property
    def verdict(self) -> str:
        """Whether the promise was kept: ``exact``, ``OFF``, or how it ended."""
        if self.refusal:
            return self.refusal.partition(":")[0]
        is_kept = PROMISES[self.dtype].is_kept
        return "exact" if is_kept(self.error or 0.0, self.unsplit_error or 0.0) else "OFF"


@dataclass(frozen=True, slots=True)
class Promise:
    """What may be left of an error against float64, given that of the unsplit step."""

    text: str
    is_kept: Callable[[float, float], bool]


PROMISES = {
    "float64": Promise("a relative error of at most 1e-10", lambda error, _: error <= 1e-10),
    "float32": Promise("at most 1.05 of the unsplit step's error", lambda error, whole: error <= ERROR_SHARE * whole),
    "bfloat16": Promise("at most 1.1 of the unsplit step's error", lambda error, whole: error <= 1.1 * whole),
}

EXACT_COLUMNS = (
    "model",
    "dtype",
    "batch",
    "slices",
    "gradient error",
    "unsplit",
    "of the unsplit step's",
    "one gradient at most",
    "verdict",
)


def exact_report(found: Sequence[Exactness], notes: Sequence[str]) -> Report:
    """One line for each model, dtype and number of slices."""
    counts = {dtype: [entry for entry in found if entry.dtype == dtype and not entry.refusal] for dtype in PROMISES}
    verdicts = [
        f"{dtype}: {sum(e.verdict == 'exact' for e in entries)} of {len(entries)} within {PROMISES[dtype].text}."
        for dtype, entries in counts.items()
        if entries
    ]
    refused = dict.fromkeys(f"{entry.model}: {entry.refusal}" for entry in found if entry.refusal)
    rows = tuple(_exact_row(entry) for entry in found)
    return Report("Split steps against float64", EXACT_COLUMNS, rows, (*verdicts, *refused, *notes))


def _exact_row(entry: Exactness) -> tuple[str, ...]:
    return (
        entry.model,
        entry.dtype,
        str(entry.batch),
        str(entry.num_slices),
        _figure(entry.error, ".1e"),
        _figure(entry.unsplit_error, ".1e"),
        _figure(share(entry.error, entry.unsplit_error), ".3f"),
        _figure(entry.largest_share, ".3f"),
        entry.verdict,
    )


# -- compile time


@dataclass(frozen=True, slots=True)
class CompileTime:
    """What the first step of one system took longer than a warm one."""

    name: str
    num_slices: int
    seconds: float | None
    planning_s: float | None = None
    failure: str = ""


COMPILE_SHARE = 1.3  # of the time that two slices take
COMPILE_COLUMNS = ("system", "slices", "compile s", "planning s", "of 2 slices")


def compile_report(title: str, found: Sequence[CompileTime], notes: Sequence[str]) -> Report:
    """One line for each number of slices, beside two slices."""
    two = next((entry.seconds for entry in found if entry.num_slices == 2), None)
    last = max(found, key=lambda entry: entry.num_slices)
    of_two = _figure(share(last.seconds, two), ".2f")
    rows = tuple(
        (
            entry.name,
            str(entry.num_slices),
            _figure(entry.seconds, ".1f"),
            _figure(entry.planning_s, ".2f"),
            _figure(share(entry.seconds, two) if entry.num_slices > 1 else None, ".2f"),
        )
        for entry in found
    )
    verdict = f"Compile time in {last.num_slices} slices: {of_two} of that in 2 (promised: {COMPILE_SHARE})."
    failures = [f"{entry.name}: {entry.failure}" for entry in found if entry.failure]
    return Report(title, COMPILE_COLUMNS, rows, (verdict, *failures, *notes))
