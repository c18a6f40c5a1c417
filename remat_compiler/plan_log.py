"""The plans of this process, and their files.

The one place with state: a compiler that is called by Dynamo has nobody to return its plans to.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from remat_passes.errors import ConfigError
from remat_passes.plan import RematPlan

if TYPE_CHECKING:
    from .partitioner import Made


@dataclass(frozen=True, slots=True)
class Entry:
    """One plan and how long it took to make."""

    plan: RematPlan
    planning_seconds: float


_entries: list[Entry] = []
_fallbacks: list[str] = []
_verifications: list[str] = []
_measured: dict[int, int] = {}  # by the number of the plan
_lock = threading.Lock()


def recorded() -> tuple[Entry, ...]:
    """All plans so far, in the order of their compilation."""
    with _lock:
        return tuple(_entries)


def next_graph_number() -> int:
    """The number that the next plan's ``graph_id`` starts with."""
    with _lock:
        return len(_entries)


def publish(made: Made, folder: Path | None) -> None:
    """Keep the plan of a graph that was compiled, and write its files where the user wants them.

    Raises:
        ConfigError: the folder cannot be written.
    """
    plan = made.final_plan
    number = record(plan, made.planning_seconds)
    if folder is not None:
        write_plan_files(folder, plan, made.texts)
    made.first_step.watch(plan, number)


def record(plan: RematPlan, planning_seconds: float) -> int:
    """Keep a plan for ``remat_compiler.plans()``, and give its place there."""
    with _lock:
        _entries.append(Entry(plan, planning_seconds))
        return len(_entries) - 1


def record_measurement(number: int, peak_bytes: int) -> None:
    """Keep the peak that was measured in the first real step of plan ``number``."""
    with _lock:
        _measured[number] = peak_bytes


def measured_peaks() -> tuple[int | None, ...]:
    """For each plan the measured peak of its first real step in bytes; ``None`` where no step could be measured."""
    with _lock:
        return tuple(_measured.get(number) for number in range(len(_entries)))


def record_fallback(reason: str) -> None:
    """Keep why a graph was compiled as plain Inductor would."""
    with _lock:
        _fallbacks.append(reason)


def fallbacks() -> tuple[str, ...]:
    """Why graphs of this process were compiled as plain Inductor would, one sentence each."""
    with _lock:
        return tuple(_fallbacks)


def record_verification(result: str) -> None:
    """Keep what came of running a first step both ways."""
    with _lock:
        _verifications.append(result)


def verifications() -> tuple[str, ...]:
    """What came of each first step of this process that ran both ways, one sentence each."""
    with _lock:
        return tuple(_verifications)


def write_plan_files(folder: Path, plan: RematPlan, graphs: dict[str, str]) -> None:
    """Write ``<graph>.plan.json`` and the graphs as text, each file whole or not at all.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{plan.graph_id}.plan.json", plan.to_json())
        for name, text in graphs.items():
            _write(folder / f"{plan.graph_id}.{name}.txt", text)
    except OSError as error:
        raise ConfigError(f"dump_dir {str(folder)!r} cannot be written: {error}. Name a folder that can.") from None


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
