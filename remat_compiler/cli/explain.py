"""``remat explain``: one value in sentences - what was decided, why, and what the other choice would have meant."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from remat_passes.plan import BatchInput, BatchValue, RematPlan, ValuePlan
from remat_passes.units import format_bytes

from .groups import shape_text
from .headline import count, time_text
from .plan_files import WrongUse, read_one_plan
from .slices import OUTSIDE, batch_rows, input_text
from .tables import BOLD, Row, clean, labelled, page_width, print_parts, wrapped, write

NUM_NAMED = 6  # more names than this are counted
NUM_SPELLINGS = 3

WHAT_IT_MEANS = {
    "save": "is saved: it is kept from forward to backward.",
    "recompute": "is recomputed: it is dropped after forward and computed again in backward.",
    "free": "is free: it takes no memory of its own, being an input, an output or a view.",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """One value with its neighbours in the plan."""

    value: ValuePlan
    reads: tuple[ValuePlan, ...]  # what recomputing it reads and backward has
    inputs: tuple[str, ...]  # inputs of the step that recomputing it reads, alive anyway
    missing: tuple[str, ...]  # what recomputing it reads and backward does not have
    needed_by: tuple[ValuePlan, ...]  # recomputed values that read it
    alive_at_peak: bool
    batch: BatchValue | None = None  # how it depends on the batch, where that is split


def explain_value(path: Path, name: str, form: str) -> None:
    """Say on stdout what was decided for the value ``name`` of the plan at ``path``, and how it depends on the batch.

    Raises:
        WrongUse: there is nothing at ``path``, or the plan has no such value.
        PlanFileError: there is no plan at ``path``, or a damaged one.
    """
    plan = read_one_plan(path)
    width = page_width(sys.stdout)
    undecided = None if any(value.name == name for value in plan.values) else batch_entry(plan, name)
    if undecided is None:
        explanation = explained(plan, name)
        record, parts = explanation_record(plan, explanation), sentences(explanation, width)
    else:
        record, parts = batch_record(plan, undecided), batch_sentences(plan, undecided, width)
    if form == "json":
        write(json.dumps(record, sort_keys=True, indent=1) + "\n", sys.stdout)
    else:
        print_parts(parts, sys.stdout)


def batch_entry(plan: RematPlan, name: str) -> BatchValue | BatchInput | None:
    """What is known of a value, or of an input that carries the batch, of a step that is split."""
    if plan.microbatches is None:
        return None
    entries: tuple[BatchValue | BatchInput, ...] = (*plan.microbatches.values, *plan.microbatches.inputs)
    return next((entry for entry in entries if entry.name == name), None)


def explained(plan: RematPlan, name: str) -> Explanation:
    """The value called ``name`` with its neighbours.

    Raises:
        WrongUse: the plan has no such value.
    """
    known = {value.name: value for value in plan.values}
    if name not in known:
        raise WrongUse(_unknown(plan, name, list(dict.fromkeys([*known, *_batch_names(plan)]))))
    value = known[name]
    inputs = tuple(dict.fromkeys(value.inputs))
    return Explanation(
        value=value,
        reads=tuple(known[source] for source in inputs if source in known),
        inputs=tuple(source for source in inputs if source not in known and _is_input(source)),
        missing=tuple(source for source in inputs if source not in known and not _is_input(source)),
        needed_by=tuple(user for user in plan.values if user.decision == "recompute" and name in user.inputs),
        alive_at_peak=any(alive.name == name for alive in plan.peak_values),
        batch=_batch_value(plan, name),
    )


def _batch_names(plan: RematPlan) -> list[str]:
    split = plan.microbatches
    return [] if split is None else [*(given.name for given in split.inputs), *(entry.name for entry in split.values)]


def _batch_value(plan: RematPlan, name: str) -> BatchValue | None:
    entry = batch_entry(plan, name)
    return entry if isinstance(entry, BatchValue) else None


def _spellings(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=NUM_SPELLINGS)
    return f" Did you mean {_either([repr(word) for word in near])}?" if near else ""


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def sentences(explanation: Explanation, width: int) -> list[Text]:
    """The explanation for a person."""
    value = explanation.value
    title = Text.assemble((clean(value.name), BOLD), " ", WHAT_IT_MEANS[value.decision])
    rows: list[Row] = [
        ("why", _or_dash(value.reason)),
        ("what", f"{clean(value.op)} gives {clean(shape_text(value))}, {format_bytes(value.bytes)}"),
        ("module", clean(value.module) or "the top level"),
        ("source", _or_dash(value.source)),
        ("recomputing", _cost(explanation)),
        ("needed by", _needed_by(explanation)),
        ("otherwise", _otherwise(explanation)),
    ]
    if explanation.alive_at_peak:
        rows.append(("at the peak", "it is alive at the projected peak"))
    if explanation.batch is not None:
        rows += batch_rows(explanation.batch)
    return [wrapped(title, width), Text(), labelled(rows, width)]


def batch_sentences(plan: RematPlan, entry: BatchValue | BatchInput, width: int) -> list[Text]:
    """A value about which nothing had to be decided, for a person."""
    if isinstance(entry, BatchInput):
        text = f"{input_text(entry)} is an input that carries the batch: each slice is handed its own part of it."
        return [wrapped(Text(text), width)]
    title = Text.assemble((clean(entry.name), BOLD), " is neither saved nor recomputed: ", _why_undecided(entry))
    size = f", {format_bytes(entry.bytes)} for the full batch" if entry.bytes else ""
    rows: list[Row] = [("what", clean(entry.op) + size), ("source", _or_dash(entry.source)), *batch_rows(entry)]
    if any(alive.name == entry.name for alive in plan.peak_values):
        rows.append(("at the peak", "it is alive at the projected peak"))
    return [wrapped(title, width), Text(), labelled(rows, width)]


def _why_undecided(entry: BatchValue) -> str:
    if entry.where == OUTSIDE:
        return "it is computed outside of the loops."
    return "it is no forward value that backward needs."


def _or_dash(text: str) -> str:
    return clean(text) or "-"


def _cost(explanation: Explanation) -> str:
    value = explanation.value
    if not math.isfinite(value.cost_us):
        return "it cannot be computed again"
    had = _named([f"{read.name} ({read.decision}, {format_bytes(read.bytes)})" for read in explanation.reads])
    what = "an input of the step" if explanation.batch is None else "handed to each slice"
    held = f"{_named(explanation.inputs)} ({what})" if explanation.inputs else ""
    names = ", and ".join(part for part in (had, held, _missing(explanation)) if part)
    return f"costs {time_text(value.cost_us)} and reads {names or 'no other value'}"


def _is_input(name: str) -> bool:
    """AOTAutograd calls the inputs of forward primals."""
    return name.startswith("primals_")


def _unknown(plan: RematPlan, name: str, known: list[str]) -> str:
    if _is_input(name) or any(alive.name == name for alive in plan.peak_values):
        if plan.microbatches is not None:
            return (
                f"Nothing was decided about {name!r} in {plan.graph_id}: it is handed to the loops, or it is a sum or a"
                f" slice of another value.{_spellings(name, known)}"
            )
        return (
            f"Nothing was decided about {name!r} in {plan.graph_id}: backward does not need it from forward."
            " It is an input, or it lives in one half of the step only."
        )
    if plan.microbatches is not None:
        return f"{plan.graph_id} has no value {name!r}.{_spellings(name, known)}"
    return (
        f"{plan.graph_id} has no value {name!r} that backward needs.{_spellings(name, known)}"
        " 'remat dump --all FILE' lists them."
    )


def _missing(explanation: Explanation) -> str:
    return f"{_named(explanation.missing)}, not kept for backward" if explanation.missing else ""


def _named(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = [clean(name) for name in names[:NUM_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _needed_by(explanation: Explanation) -> str:
    users = explanation.needed_by
    if not users:
        return "no recomputed value; only operations of backward itself read it"
    return f"{count(len(users), 'recomputed value')}: {_named([user.name for user in users])}"


def _otherwise(explanation: Explanation) -> str:
    value = explanation.value
    size, cost = format_bytes(value.bytes), time_text(value.cost_us)
    if value.decision == "free":
        return "there is nothing to choose: saving it would take no memory, and recomputing it would free none"
    if value.decision == "recompute":
        return f"saving it would keep {size} more from forward to backward and spare {cost} of recomputing it"
    if not math.isfinite(value.cost_us):
        return "there is no other choice"
    missing = _named(explanation.missing)
    also = f", and {missing} would have to be kept or computed again too" if missing else ""
    return f"recomputing it would keep {size} less from forward to backward and cost {cost}{also}"


def explanation_record(plan: RematPlan, explanation: Explanation) -> dict[str, Any]:
    """The explanation for JSON. Differences are what the other decision would have added to the plan."""
    value = explanation.value
    return {
        "graph_id": plan.graph_id,
        "value": asdict(value),
        "reads": [_neighbour(read) for read in explanation.reads],
        "not_kept_for_backward": list(explanation.missing),
        "needed_by": [_neighbour(user) for user in explanation.needed_by],
        "alive_at_peak": explanation.alive_at_peak,
        "other_decision": _other_decision(value),
        "batch": None if explanation.batch is None else asdict(explanation.batch),
    }


def batch_record(plan: RematPlan, entry: BatchValue | BatchInput) -> dict[str, Any]:
    """The same for a value about which nothing had to be decided."""
    alive = any(alive.name == entry.name for alive in plan.peak_values)
    return {"graph_id": plan.graph_id, "value": None, "alive_at_peak": alive, "batch": asdict(entry)}


def _neighbour(value: ValuePlan) -> dict[str, Any]:
    return {"name": value.name, "decision": value.decision, "bytes": value.bytes}


def _other_decision(value: ValuePlan) -> dict[str, Any] | None:
    if value.decision == "free":
        return None
    if value.decision == "recompute":
        return {"decision": "save", "saved_bytes": value.bytes, "recompute_us": -value.cost_us}
    return {"decision": "recompute", "saved_bytes": -value.bytes, "recompute_us": value.cost_us}
