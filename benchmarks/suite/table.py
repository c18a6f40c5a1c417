"""What follows from the points of the suite: picks, comparisons, refusals, tables. Nothing here measures.

The bar is a person who tried every configuration of every rival by hand, and who keeps for each budget the fastest that
fits. That pick is made here, after the fact, from what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.microbatch.table import LOOP, share
from benchmarks.peak.table import COMPILE, EAGER, REMAT, Point, Record, over_budget, smallest_bytes
from benchmarks.peak.table import sentences as plan_sentences
from benchmarks.report import Report, format_mib

KNOB, BLOCKS, ATTENTION = "activation_memory_budget", "checkpoint per block", "checkpoint of attention"
TOGETHER, EAGER_TOGETHER, FUSED = "loop with another", "eager with another", "fused cross entropy"
FIXED = "remat in a fixed number"

# The families that are held against us one by one, and what was promised of the geometric mean against each.
GROUPS = {KNOB: (KNOB,), "checkpointing": (BLOCKS, ATTENTION), LOOP: (LOOP,)}
GROUP_SHARES = {KNOB: 0.90, "checkpointing": 0.92, LOOP: 1.00}
PICK_SHARE, WORST_SHARE = 0.98, 1.05  # of the step of the pick: in the geometric mean, and at worst
SPLIT_PEAK_SHARE = 0.2  # of torch.compile's peak, in the geometric mean over models whose batch splits
CHOICE_TOLERANCE, CHOICE_SHARE = 0.03, 0.9  # what a chosen number may cost, and for how many pairs it has to hold

# A gradient is off where its error is more than ten times torch.compile's: another order of the same sums is within
# that. Where no such error is known, gradients were held against one another in float64, whose rounding is far below.
OFF_SHARE, OFF_ERROR = 10.0, 1e-6
# The slope of the loss along its own gradient is the gradient's norm. A small GPT with dropout of 0.1 was within 4e-6
# of that under torch.compile, and 6 % off at activation_memory_budget 0.0, which draws dropout again in backward. What
# eager is off, whose gradient is right, is how much the loss bends over that distance (3 % for GPT-2 of transformers).
OFF_SLOPE = 0.01
READ_OFF_STEP = 0.01  # budgets closer together than that are not told apart


# -- rivals


def is_off(point: Point, record: Record) -> bool:
    """Whether the point's gradient is not that of the step."""
    bend = max((p.slope_error or 0.0 for p in record.family(EAGER) if p.num_slices == 1), default=0.0)
    if point.slope_error is not None and point.slope_error > OFF_SLOPE + bend:
        return True
    if point.gradient_error is None:
        return False
    plain = next((p.gradient_error for p in record.family(COMPILE) if p.gradient_error is not None), None)
    return point.gradient_error > (OFF_ERROR if plain is None else OFF_SHARE * plain)


def rivals(record: Record, families: Iterable[str] | None = None) -> tuple[Point, ...]:
    """The measured points that are not ours and whose gradient is right; of all families, or of some."""
    named = set(record.families) - {REMAT, FIXED} if families is None else set(families)
    return tuple(p for p in record.points if p.family in named and p.measured_bytes and not is_off(p, record))


def pick(points: Iterable[Point], limit_bytes: int) -> Point | None:
    """The fastest point that was measured to take at most ``limit_bytes``."""
    fitting = [p for p in points if p.measured_bytes and p.measured_bytes <= limit_bytes and p.step_ratio]
    return min(fitting, key=lambda p: (p.step_ratio, p.measured_bytes), default=None)


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no other one beats in both peak and step time, by falling peak."""
    timed = [p for p in points if p.measured_bytes and p.step_ratio]
    found: list[Point] = []
    for point in sorted(timed, key=lambda p: (p.measured_bytes, p.step_ratio)):
        if not found or (point.step_ratio or 0) < (found[-1].step_ratio or 0):
            found.append(point)
    return tuple(reversed(found))


def read_off_bytes(record: Record, smallest: int, full: int) -> tuple[int, ...]:
    """Budgets beside the evenly spaced ones: the peaks at which a rival is at its best, and the smallest of any.

    Between two evenly spaced budgets our frontier is a step, and a rival between them looks better than it is.
    """
    groups = [rivals(record), *(rivals(record, families) for families in GROUPS.values())]
    peaks = {p.measured_bytes or 0 for group in groups for p in frontier(group)}
    kept: list[int] = []
    for peak in sorted(peak for peak in peaks if smallest < peak < full):
        if not kept or peak > (1 + READ_OFF_STEP) * kept[-1]:
            kept.append(peak)
    below = smallest_bytes(rivals(record))
    return ((below,) if below is not None and below < smallest else ()) + tuple(kept)


# -- comparisons


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our step beside a rival's within the same bytes."""

    ours: Point
    rival: Point

    @property
    def ratio(self) -> float:
        """Our step time as a multiple of the rival's."""
        ratio = share(self.ours.step_ratio, self.rival.step_ratio)
        assert ratio is not None, "only points with step times are compared"
        return ratio


def asked(record: Record) -> tuple[Point, ...]:
    """Every budget that was asked of remat, met or not."""
    return tuple(p for p in record.points if p.family == REMAT and p.budget_bytes is not None)


def met(record: Record) -> tuple[Point, ...]:
    """The budgets within which remat was measured, with the right gradient."""
    over = over_budget(record.family(REMAT))
    return tuple(p for p in asked(record) if p.measured_bytes is not None and p not in over and not is_off(p, record))


def against_pick(record: Record) -> Iterator[Comparison]:
    """Each budget that was met beside the fastest of all rivals that fits it; none where no rival does."""
    candidates = rivals(record)
    for ours in met(record):
        best = pick(candidates, ours.budget_bytes or 0)
        if best is not None and ours.step_ratio:
            yield Comparison(ours, best)


def against_group(record: Record, group: str) -> Iterator[Comparison]:
    """Each point at which a family is at its best, beside what a user gets who asks remat for that peak."""
    for rival in frontier(rivals(record, GROUPS[group])):
        peak = rival.measured_bytes or 0
        within = [p for p in met(record) if (p.budget_bytes or 0) <= peak and p.step_ratio]
        if within:
            yield Comparison(max(within, key=lambda p: p.budget_bytes or 0), rival)


def unreached(record: Record) -> tuple[Point, ...]:
    """The refused or failed budgets that a rival fits into: those refusals are wrong."""
    smallest = smallest_bytes(rivals(record))
    kept = met(record)
    return tuple(
        p for p in asked(record) if p not in kept and smallest is not None and smallest <= (p.budget_bytes or 0)
    )


def claim_is_right(record: Record) -> bool | None:
    """Whether no rival goes below what remat says is the smallest peak; ``None`` where one of the two is not known."""
    smallest = smallest_bytes(rivals(record))
    return None if record.smallest_bytes is None or smallest is None else smallest >= record.smallest_bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """The number of micro-batches that remat chose under one budget, and the one that was the fastest."""

    budget_bytes: int
    chosen: int
    fastest: int
    ratio: float  # the chosen plan's step as a multiple of the fastest one's

    @property
    def is_right(self) -> bool:
        """Whether the choice costs no more than times differ from run to run."""
        return self.ratio <= 1 + CHOICE_TOLERANCE


def choices(record: Record) -> Iterator[Choice]:
    """Every budget under which fixed numbers were timed too; those whose peak is above the budget do not count."""
    fixed = [p for p in record.family(FIXED) if p.step_ratio and p not in over_budget([p])]
    for ours in met(record):
        same = [p for p in fixed if p.budget_bytes == ours.budget_bytes]
        if not same or not ours.step_ratio or ours.num_slices is None:
            continue
        best = min(same, key=lambda p: p.step_ratio or 0)
        chosen = next((p for p in same if p.num_slices == ours.num_slices), ours)
        ratio = Comparison(chosen, best).ratio
        yield Choice(ours.budget_bytes or 0, ours.num_slices, best.num_slices or 1, ratio)


# -- over all models


@dataclass(frozen=True, slots=True)
class Totals:
    """The promises over all models."""

    num_asked: int
    num_met: int
    num_wrong_refusals: int
    num_below_claim: int  # models in which a rival goes below the smallest peak that remat says can be reached
    num_above_smallest: int  # models in which our smallest measured peak is above a rival's
    pick_share: float | None
    worst_share: float | None
    num_comparisons: int
    num_alone: int  # budgets that were met and that no rival fits into
    group_shares: dict[str, float | None]
    split_peak_share: float | None
    num_choices: int
    num_right_choices: int


def geometric_mean(numbers: Iterable[float]) -> float | None:
    """The geometric mean; ``None`` of nothing."""
    logarithms = [math.log(number) for number in numbers]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


def totals(records: Sequence[Record]) -> Totals:
    """What became of each promise, over ``records``."""
    ratios = [c.ratio for record in records for c in against_pick(record)]
    chosen = [choice for record in records for choice in choices(record)]
    num_met = sum(len(met(record)) for record in records)
    return Totals(
        num_asked=sum(len(asked(record)) for record in records),
        num_met=num_met,
        num_wrong_refusals=sum(len(unreached(record)) for record in records),
        num_below_claim=sum(claim_is_right(record) is False for record in records),
        num_above_smallest=sum(_is_above_smallest(record) for record in records),
        pick_share=geometric_mean(ratios),
        worst_share=max(ratios, default=None),
        num_comparisons=len(ratios),
        num_alone=sum(pick(rivals(r), p.budget_bytes or 0) is None for r in records for p in met(r)),
        group_shares={
            group: geometric_mean(c.ratio for record in records for c in against_group(record, group))
            for group in GROUPS
        },
        split_peak_share=geometric_mean(s for r in records if r.is_splittable and (s := _peak_share(r)) is not None),
        num_choices=len(chosen),
        num_right_choices=sum(choice.is_right for choice in chosen),
    )


def _is_above_smallest(record: Record) -> bool:
    ours, others = smallest_bytes(record.family(REMAT)), smallest_bytes(rivals(record))
    return ours is not None and others is not None and ours > others


def _peak_share(record: Record) -> float | None:
    return share(smallest_bytes(record.family(REMAT)), smallest_bytes(record.family(COMPILE)))


def sentences(records: Sequence[Record]) -> tuple[str, ...]:
    """The totals as sentences, with what each promise asks for."""
    found = totals(records)
    groups = "; ".join(
        f"{group} {_figure(found.group_shares[group])} (promised: {promised:.2f})"
        for group, promised in GROUP_SHARES.items()
    )
    return (
        f"Budgets met: {found.num_met} of {found.num_asked}. Refused or missed although a rival fits:"
        f" {found.num_wrong_refusals} (promised: 0).",
        f"Models in which a rival goes below the smallest peak that remat says can be reached: {found.num_below_claim};"
        f" below the smallest that was measured: {found.num_above_smallest} (promised: 0).",
        f"Step against the fastest of all rivals that fits the same budget: {_figure(found.pick_share)} in the"
        f" geometric mean over {found.num_comparisons} budgets (promised: {PICK_SHARE}), {_figure(found.worst_share)}"
        f" at worst (promised: {WORST_SHARE}); {found.num_alone} budgets were met that no rival fits.",
        f"Step against each family alone, at the peaks at which it is at its best: {groups}.",
        f"Smallest peak of models whose batch splits: {_figure(found.split_peak_share)} of torch.compile's in the"
        f" geometric mean (promised: {SPLIT_PEAK_SHARE}).",
        f"Chosen number of micro-batches within {CHOICE_TOLERANCE:.0%} of the fastest: {found.num_right_choices} of"
        f" {found.num_choices} budgets (promised: {CHOICE_SHARE:.0%})."
        if found.num_choices
        else "Chosen number of micro-batches against the others: not measured, which takes --try-n.",
    )


# -- tables

POINT_COLUMNS = (
    "system",
    "slices",
    "budget MiB",
    "measured MiB",
    "of torch.compile's",
    "step / torch.compile",
    "fastest step ms",
    "compile s",
    "gradient error",
    "verdict",
    "fastest rival that fits",
    "step / its",
)


def _figure(number: float | None, form: str = ".3f") -> str:
    return "-" if number is None else format(number, form)


def _error(point: Point) -> str:
    if point.gradient_error is None and point.slope_error is not None:
        return f"{point.slope_error:.1e} (slope)"
    return _figure(point.gradient_error, ".1e")


def verdict(point: Point, record: Record) -> str:
    """How the point ended: refused, failed, with a gradient that is off, above its budget, or within it."""
    if point.failure:
        wrong = ", but a rival fits" if point in unreached(record) else ""
        return point.failure.partition(":")[0] + wrong
    if is_off(point, record):
        return "OFF"
    if point.budget_bytes is None:
        return "-"
    return "OVER" if over_budget([point]) else "fits"


def point_row(point: Point, record: Record) -> tuple[str, ...]:
    """One line of a model's table."""
    compared = next((c for c in against_pick(record) if c.ours == point), None)
    return (
        point.name,
        str(point.num_slices or 1),
        format_mib(point.budget_bytes),
        format_mib(point.measured_bytes),
        _figure(share(point.measured_bytes, smallest_bytes(record.family(COMPILE)))),
        _figure(point.step_ratio),
        _figure(point.measured_ms, ".1f"),
        _figure(point.compile_s, ".1f"),
        _error(point),
        verdict(point, record),
        compared.rival.name if compared else "-",
        _figure(compared.ratio if compared else None),
    )


def model_report(record: Record) -> Report:
    """Every point of one model."""
    notes = [
        f"Parameters, buffers and inputs take {format_mib(record.own_bytes)} MiB of each total, gradients"
        f" {format_mib(record.gradient_bytes)} MiB.",
        f"The smallest peak that remat says it can reach is {format_mib(record.smallest_bytes)} MiB; the smallest of a"
        f" rival is {format_mib(smallest_bytes(rivals(record)))} MiB.",
    ]
    if record.is_splittable is not None:
        notes.append("Its batch can be split." if record.is_splittable else "Its batch cannot be split.")
    notes += [f"{p.name}: {p.failure}" for p in record.points if p.failure]
    notes += [
        f"{format_mib(c.budget_bytes)} MiB: N={c.chosen} was chosen, at {c.ratio:.3f} of the fastest, N={c.fastest}."
        for c in choices(record)
    ]
    notes += [f"INCOMPLETE: {record.failure}"] if record.failure else []
    rows = tuple(point_row(point, record) for point in record.points)
    return Report(f"{record.title} ({record.model})", POINT_COLUMNS, rows, (*notes, *record.notes))


SUMMARY_COLUMNS = (
    "model",
    "budgets met",
    "torch.compile MiB",
    "our smallest MiB",
    "rivals' smallest MiB",
    "step / fastest rival",
    "at worst",
    *(f"step / {group}" for group in GROUPS),
)


def summary_row(record: Record) -> tuple[str, ...]:
    """One model in one line; ratios are geometric means."""
    best = min(rivals(record), key=lambda p: p.measured_bytes or 0, default=None)
    ratios = [c.ratio for c in against_pick(record)]
    return (
        record.model,
        f"{len(met(record))} of {len(asked(record))}",
        format_mib(smallest_bytes(record.family(COMPILE))),
        format_mib(smallest_bytes(record.family(REMAT))),
        f"{format_mib(best.measured_bytes)} ({best.name})" if best else "-",
        _figure(geometric_mean(ratios)),
        _figure(max(ratios, default=None)),
        *(_figure(geometric_mean(c.ratio for c in against_group(record, group))) for group in GROUPS),
    )


READING = (
    "Totals: parameters, buffers and inputs, and the measured peak of one forward and backward above them.",
    "Step: the median of ratios to torch.compile, each within a round of one step of both.",
    "Step / fastest rival: at each budget that was met, beside the fastest configuration of any rival that fits it,"
    " picked after the fact. A family alone: at the peaks at which it is at its best.",
    "Gradient error: the largest relative error of one parameter's gradient against eager float64. Where random numbers"
    " hide that gradient: how far the slope of the loss along the gradient is from the gradient's norm, and for loops"
    " the error of the arrangement in eager float64 without random numbers. OFF is not counted as a rival.",
)


def summary(records: Sequence[Record]) -> Report:
    """One line a model, and the promises below."""
    rows = tuple(summary_row(record) for record in records)
    machines = dict.fromkeys(note for record in records for note in record.notes)
    title = "The suite: remat beside everything that a user would pick instead"
    plans = plan_sentences([_with_right_gradients(record) for record in records])
    return Report(title, SUMMARY_COLUMNS, rows, (*sentences(records), *plans, *READING, *machines))


def _with_right_gradients(record: Record) -> Record:
    return replace(record, points=tuple(point for point in record.points if not is_off(point, record)))


# -- the block of README

README_MARKER = "results:suite"


def readme_block(records: Sequence[Record]) -> str:
    """What README says of the results, between its markers: the summary without its title."""
    _, _, body = summary(records).to_markdown().partition("\n\n")
    return f"\n{body.strip()}\n"


def write_readme(page: Path, block: str) -> None:
    """Put ``block`` between the markers of ``page``.

    Raises:
        ValueError: the page does not have both markers, one after the other.
    """
    text = page.read_text(encoding="utf-8")
    start, end = f"<!-- {README_MARKER} -->\n", f"<!-- /{README_MARKER} -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page.name} has no place for the results: put the lines {start.strip()} and {end} into it.")
    page.write_text(before + start + block.lstrip("\n") + end + after, encoding="utf-8")
