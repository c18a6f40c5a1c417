"""RematPlan: what was decided for one captured graph, as data.

One stage writes it, the partitioner obeys it without thinking again, and the command line reads it back from its JSON.
The text of a plan depends on nothing but the graph, the options and the device's figures, so two runs can be compared
byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from .errors import PlanFileError

SCHEMA = 1

Decision = Literal["save", "recompute", "free"]
DECISIONS: tuple[Decision, ...] = ("save", "recompute", "free")

StepSide = Literal["forward", "backward"]
STEP_SIDES: tuple[StepSide, ...] = ("forward", "backward")

# The schedules that ``lower_bound_us`` ranges over (docs/cut.md has the proof).
SCHEDULE_CLASS = "each forward value is saved, or recomputed where backward needs it; backward runs in autograd's order"


@dataclass(frozen=True, slots=True)
class ValuePlan:
    """What happens to one forward value that backward needs.

    ``decision`` is ``save`` (kept from forward to backward), ``recompute`` (dropped, computed again in backward) or
    ``free`` (keeps no memory: an input that is alive anyway, a view of another value in this list, or a value that only
    backward needs and that is computed there once).
    """

    name: str
    op: str
    shape: tuple[int | str, ...]  # a symbolic size is its expression
    dtype: str
    bytes: int
    module: str  # path of the nn.Module, "" at the top level
    source: str  # file:line
    decision: Decision
    reason: str
    cost_us: float  # what recomputing this value costs, whatever was decided
    inputs: tuple[str, ...]  # the forward values that recomputing this one reads


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan that was considered: its projected peak, the bytes it saves and its projected step time."""

    peak_bytes: int  # what the memory model predicts
    saved_bytes: int
    step_us: float
    chosen: bool  # exactly one point of a plan is the plan itself
    num_microbatches: int = 1
    part: str = "step"  # what runs in slices, as in ``StepCandidate``


@dataclass(frozen=True, slots=True)
class StepCandidate:
    """One number of slices that was weighed under the budget, and why it was not taken."""

    num_microbatches: int
    part: str  # what runs in slices: "step", or "tail", which is the last product and the loss
    peak_bytes: int | None  # of its best plan within the budget, where one was worked out
    step_us: float | None
    chosen: bool
    verdict: str


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes that are allocated while one kernel of the step runs, and the op and module that it runs for.

    An op of backward belongs to the module of the forward op that it comes from, ``""`` where that is not known.
    """

    name: str
    module: str
    side: StepSide
    bytes: int


@dataclass(frozen=True, slots=True)
class PeakValue:
    """Something that is alive at the predicted peak, with its bytes; what was there before the step is one entry."""

    name: str
    bytes: int
    module: str


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input of the step that carries the batch, and at which axis."""

    name: str
    axis: int


@dataclass(frozen=True, slots=True)
class BatchValue:
    """How one value of the step depends on the batch, and where it is computed."""

    name: str
    op: str
    bytes: int  # of the full batch; 0 for a view
    source: str
    dependence: str  # the words of ``remat_passes.batch.Dependence``
    axis: int | None  # that carries the batch, where it is split
    where: str  # "loop 0", "outside", or both; "not computed" where nothing needs it
    why: str  # a sentence where it needs the whole batch, else ""


@dataclass(frozen=True, slots=True)
class Microbatches:
    """How a step was split. ``lengths`` has one entry a slice."""

    batch: int
    lengths: tuple[int, ...]
    num_loops: int
    part: str  # what runs in slices: "step", or "tail", which is the last product and the loss
    runs_in: str  # "forward", or "forward and backward" where the tangents are not known before
    inputs: tuple[BatchInput, ...]
    values: tuple[BatchValue, ...]  # all of the step, in its order


@dataclass(frozen=True, slots=True)
class RematPlan:
    """The plan of one captured training graph. Bytes are exact integers, times are projections of the cost model."""

    graph_id: str
    torch_version: str
    device: str  # name of the device spec whose prices were used
    cost_model: str
    lowering: str
    budget_bytes: int | None
    num_microbatches: int
    projected_peak_bytes: int  # read back from Inductor's code where it could be read, else predicted
    predicted_peak_bytes: int  # what the memory model says
    inductor_peak_bytes: int  # projected peak of plain Inductor's plan: what 100% means
    baseline_bytes: int  # parameters, buffers and inputs
    gradient_bytes: int
    saved_bytes: int
    recompute_us: float
    step_us: float
    inductor_step_us: float
    lower_bound_us: float  # of any plan within the budget, without one within plain Inductor's peak
    schedule_class: str  # the schedules among which that bound holds
    values: tuple[ValuePlan, ...]
    # By rising step time; falling peak among those that run in as many slices as the plan, and the plan itself.
    frontier: tuple[FrontierPoint, ...]
    timeline: tuple[Moment, ...]  # as the memory model predicts it, in the order that runs; thinned when it is long
    peak_values: tuple[PeakValue, ...]  # what is alive at the predicted peak, largest first
    symbols: tuple[tuple[str, int], ...]  # symbolic sizes and the values they were planned for
    notes: tuple[str, ...]  # sentences that the user should read
    microbatches: Microbatches | None = None  # how the step was split, where it was
    candidates: tuple[StepCandidate, ...] = ()  # the numbers of slices that were weighed, where the choice was free

    @property
    def gap(self) -> float:
        """The part of the step by which another plan of the class may be faster; 0 where none is."""
        return max(self.step_us - self.lower_bound_us, 0.0) / self.step_us if self.step_us > 0 else 0.0

    @property
    def own_frontier(self) -> tuple[FrontierPoint, ...]:
        """The points that run as the plan itself does."""
        (part,) = {point.part for point in self.frontier if point.chosen} or {"step"}
        return tuple(p for p in self.frontier if (p.num_microbatches, p.part) == (self.num_microbatches, part))

    def to_json(self) -> str:
        """The plan file's text: keys sorted, one trailing newline."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True, indent=1) + "\n"

    def value(self, name: str) -> ValuePlan:
        """The entry called ``name``.

        Raises:
            KeyError: backward does not need a forward value of that name.
        """
        for value in self.values:
            if value.name == name:
                return value
        raise KeyError(name)

    @staticmethod
    def from_json(text: str, origin: str) -> RematPlan:
        """Read a plan file's text back; ``origin`` names it in errors.

        Raises:
            PlanFileError: the text is not JSON, another schema, or a field is missing or of the wrong kind.
        """
        try:
            record = json.loads(text)
        except ValueError as error:
            raise PlanFileError(f"{origin} is not a plan file: {error}. Write it again with REMAT_DUMP_DIR.") from None
        if not isinstance(record, dict) or "schema" not in record:
            raise PlanFileError(f"{origin} is not a plan file: it has no 'schema'. Write it again with REMAT_DUMP_DIR.")
        if record["schema"] != SCHEMA:
            raise PlanFileError(
                f"{origin} has plan schema {record['schema']!r}; this remat reads schema {SCHEMA}."
                " Read it with the version that wrote it, or write it again."
            )
        try:
            return _plan_from_record(record)
        except (KeyError, TypeError, ValueError) as error:
            what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise PlanFileError(
                f"{origin} is a damaged plan file: {what}. Write it again with REMAT_DUMP_DIR."
            ) from None


def read_plan(path: Path) -> RematPlan:
    """Read one plan file.

    Raises:
        PlanFileError: the file cannot be read, or does not hold a plan of this schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanFileError(f"{path} cannot be read: {error}") from None
    return RematPlan.from_json(text, str(path))


_NUMBERS = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": _NUMBERS,
    "bool": bool,
    "str": str,
    "int | None": (int, type(None)),
    "float | None": (*_NUMBERS, type(None)),
    "Decision": str,
    "StepSide": str,
}


def _checked(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``cls`` out of ``record``, scalars checked for their kind."""
    out = {}
    for field in fields(cls):
        entry = record[field.name]
        kind = _KINDS.get(str(field.type))
        if kind is not None and (not isinstance(entry, kind) or (isinstance(entry, bool) and kind is not bool)):
            raise TypeError(f"{field.name!r} is {entry!r}, expected {field.type}")
        if kind is None and not isinstance(entry, list) and not _is_nested(field.type, entry):
            raise TypeError(f"{field.name!r} is {entry!r}, expected a list")
        out[field.name] = entry
    return out


def _is_nested(kind: object, entry: Any) -> bool:
    return str(kind) == "Microbatches | None" and (entry is None or isinstance(entry, dict))


def _microbatches_from_record(record: Mapping[str, Any] | None) -> Microbatches | None:
    if record is None:
        return None
    entry = _checked(Microbatches, record)
    entry["lengths"] = tuple(int(length) for length in entry["lengths"])
    entry["inputs"] = tuple(BatchInput(**_checked(BatchInput, given)) for given in entry["inputs"])
    entry["values"] = tuple(BatchValue(**_checked(BatchValue, value)) for value in entry["values"])
    return Microbatches(**entry)


def _value_from_record(record: Mapping[str, Any]) -> ValuePlan:
    entry = _checked(ValuePlan, record)
    if entry["decision"] not in DECISIONS:
        raise ValueError(f"decision {entry['decision']!r} of value {entry['name']!r} is none of {', '.join(DECISIONS)}")
    return ValuePlan(**{**entry, "shape": tuple(entry["shape"]), "inputs": tuple(entry["inputs"])})


def _moment_from_record(record: Mapping[str, Any]) -> Moment:
    entry = _checked(Moment, record)
    if entry["side"] not in STEP_SIDES:
        raise ValueError(f"side {entry['side']!r} of kernel {entry['name']!r} is none of {', '.join(STEP_SIDES)}")
    return Moment(**entry)


def _plan_from_record(record: Mapping[str, Any]) -> RematPlan:
    entry = _checked(RematPlan, record)
    entry["values"] = tuple(_value_from_record(value) for value in entry["values"])
    entry["frontier"] = tuple(FrontierPoint(**_checked(FrontierPoint, point)) for point in entry["frontier"])
    entry["timeline"] = tuple(_moment_from_record(moment) for moment in entry["timeline"])
    entry["peak_values"] = tuple(PeakValue(**_checked(PeakValue, value)) for value in entry["peak_values"])
    entry["symbols"] = tuple((str(name), int(hint)) for name, hint in entry["symbols"])
    entry["notes"] = tuple(str(note) for note in entry["notes"])
    entry["candidates"] = tuple(StepCandidate(**_checked(StepCandidate, given)) for given in entry["candidates"])
    entry["microbatches"] = _microbatches_from_record(entry["microbatches"])
    return RematPlan(**entry)
