"""One GPU against the promises: gradients, budgets, slices, prices; in minutes, and within a deadline.

    python -m benchmarks.gpu --into FOLDER

Every row is printed and written to FOLDER/gpu.json as soon as it is there; the tables come last, and into
FOLDER/gpu.md. What the deadline leaves no time for is skipped, and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

import remat_compiler
from benchmarks.gpu import settings
from benchmarks.gpu.exact import CASES
from benchmarks.gpu.settings import CHECKPOINT, COMPILE, KNOB, LOOP, MEDIUM, REMAT, TINY, Place, Setting
from benchmarks.gpu.systems import Row, failed
from benchmarks.gpu.tables import (
    Table,
    budget_sentences,
    costs_table,
    exact_table,
    masks_table,
    plan_sentence,
    systems_table,
    verdict,
)
from benchmarks.gpu.workers import Clock, Local, Worker, WorkerError
from benchmarks.models import GPTShape
from remat_compiler.device_at_hand import GPU_NAMES
from remat_passes.device import BUILT_IN, GENERIC_CPU

DEADLINE_S = 480.0
ROUNDS_S, COSTS_S, REPORT_S = 60.0, 45.0, 10.0  # of the deadline, kept for what comes last
STEPS, MAX_ROUNDS = 3, 7
# What an idle worker keeps on the device beside its weights: CUDA's context and libraries. Assumed.
CONTEXT_BYTES = 3 * 2**29
HOST_BYTES = 2**32  # and in the machine's memory. Assumed.
DTYPES = ("float32", "bfloat16")
PARTS = ("exactness", "budgets", "slices", "costs")


@dataclass(slots=True)
class Results:
    """All rows so far, in the file as soon as they are there."""

    path: Path
    notes: tuple[str, ...]
    exactness: list[Row] = field(default_factory=list)
    masks: list[Row] = field(default_factory=list)
    systems: list[Row] = field(default_factory=list)
    costs: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, part: str, row: Row, text: str) -> None:
        """Keep a row, and print it."""
        with self.lock:
            getattr(self, part).append(row)
            print(f"    {text}", flush=True)
            self.write()

    def skip(self, what: str) -> None:
        """Say what there was no time for."""
        with self.lock:
            self.skipped.append(what)
            print(f"    {what}: skipped", flush=True)

    def write(self) -> None:
        """The file, whole or not at all."""
        record = {name: getattr(self, name) for name in ("notes", "exactness", "masks", "systems", "costs", "skipped")}
        partial = self.path.with_name(self.path.name + ".part")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def tables(self) -> list[Table]:
        """What is printed last."""
        rows = self.systems
        slices = [row for row in rows if row["family"] in (COMPILE, LOOP) or str(row["name"]).startswith(f"{REMAT} x")]
        budgets = [row for row in rows if row["family"] != LOOP and not str(row["name"]).startswith(f"{REMAT} x")]
        return [
            exact_table(self.exactness),
            masks_table(self.masks),
            costs_table(self.costs),
            systems_table("Slices: peak and step of the GPT in N of them", slices, rows),
            systems_table(
                "Budgets: the GPT under each system",
                budgets,
                rows,
                (*budget_sentences(rows), plan_sentence(rows), *(f"Skipped: {what}" for what in self.skipped)),
            ),
        ]


@dataclass(slots=True)
class Bench:
    """The whole measurement."""

    place: Place
    shape: GPTShape
    clock: Clock
    results: Results
    parts: Sequence[str]
    turn_path: Path
    num_parallel: int
    max_kept: int
    is_local: bool
    kept: dict[str, Worker | Local] = field(default_factory=dict)

    def worker(self) -> Worker | Local:
        return Local(self.place) if self.is_local else Worker(self.place, self.turn_path)

    @property
    def left_s(self) -> float:
        """What is left for workers that compile."""
        return self.clock.left_s - ROUNDS_S - COSTS_S - REPORT_S

    # -- one order each

    def exactness(self, name: str, dtype: str, *chosen: Sequence[Setting]) -> None:
        self._small(f"{name}, {dtype}", "exactness", "exactness", name, dtype, *chosen)

    def masks(self, dtype: str, *chosen: Sequence[Setting]) -> None:
        self._small(f"masks, {dtype}", "masks", "masks", dtype, *chosen)

    def _small(self, title: str, part: str, *order: object) -> None:
        if self.left_s <= 0:
            self.results.skip(title)
            return
        worker = self.worker()
        try:
            for row in worker.ask(self.left_s, *order):
                self.results.add(part, row, _small_line(row))
        except WorkerError as error:
            self.results.skip(f"{title}, what is not listed ({error})")
        finally:
            worker.end()

    def measure(self, setting: Setting) -> Row:
        """One system; its worker is kept for the rounds where there is room."""
        if self.left_s <= 0:
            self.results.skip(setting.name)
            return failed(setting, "skipped: no time was left").to_record()
        worker = self.worker()
        try:
            (row,) = worker.ask(self.left_s, "measure", setting, self.shape, STEPS)
        except WorkerError as error:
            row = failed(setting, f"failed: {error}").to_record()
        self.results.add("systems", row, _line(row))
        if row["failure"] or len(self.kept) >= self.max_kept:
            worker.end()
        else:
            self.kept[setting.name] = worker
        return row

    # -- the parts

    def run(self) -> None:
        """All parts, the first first where there is not time for all."""
        with ThreadPoolExecutor(self.num_parallel) as pool:
            yardsticks = [pool.submit(self.measure, setting) for setting in settings.plain()]
            futures: list[Future[object]] = []
            if "exactness" in self.parts:
                futures += [pool.submit(self.masks, dtype) for dtype in DTYPES]
                futures += [pool.submit(self.exactness, name, dtype) for dtype in DTYPES for name in CASES]
            plain = yardsticks[0].result()
            if "budgets" in self.parts:
                futures += self._budgets(pool, plain)
            if "slices" in self.parts:
                listed = [n for n in settings.SLICES if n <= self.shape.batch]
                futures += [pool.submit(self.measure, settings.in_slices(n)) for n in listed]
            elif "costs" in self.parts:
                futures.append(pool.submit(self.measure, settings.in_slices(1)))
            wait([*yardsticks, *futures])
        for future in futures:
            future.result()  # a fault of this script
        if "costs" in self.parts:
            self.costs()
        self.rounds()
        for worker in self.kept.values():
            worker.end()

    def _budgets(self, pool: ThreadPoolExecutor, plain: Row) -> list[Future[object]]:
        """Falling budgets, rivals, and ours under the peak of each rival that found one."""
        full_bytes = plain["measured_bytes"]
        if not isinstance(full_bytes, int):
            self.results.skip("budgets, because torch.compile was not measured")
            return []

        def at_peak_of(setting: Setting) -> None:
            row = self.measure(setting)
            if isinstance(row["measured_bytes"], int) and setting.family in (CHECKPOINT, KNOB):
                self.measure(settings.under_budget(row["measured_bytes"], f"peak of {setting.name}"))

        budgets = [settings.under_budget(full_bytes * percent // 100, f"{percent} %") for percent in settings.PERCENTS]
        return [
            *(pool.submit(self.measure, setting) for setting in budgets),
            *(pool.submit(at_peak_of, setting) for setting in settings.rivals(self.shape.batch)),
        ]

    def costs(self) -> None:
        """The kernels of the graph; asked of the worker that runs remat as it chooses."""
        worker = self.kept.get(settings.in_slices(1).name)
        if worker is None:
            self.results.skip("costs, because remat without a budget was not measured")
            return
        limit_s = max(COSTS_S, self.clock.left_s - ROUNDS_S)
        try:
            for row in worker.ask(min(limit_s, self.clock.left_s), "costs"):
                self.results.add("costs", row, f"{row['kind']}, {row['how']}: {row['measured_us']:.0f} us")
        except WorkerError as error:
            self.results.skip(f"costs, what is not listed ({error})")

    def rounds(self) -> None:
        """Steps of all systems in turns; what counts is the median of the ratios within a round."""
        names, times_ms = list(self.kept), {name: list[float]() for name in self.kept}
        for turn in range(MAX_ROUNDS):
            start_s = self.clock.taken_s
            order = names[turn % len(names) :] + names[: turn % len(names)] if names else []
            try:
                for name in order:
                    (row,) = self.kept[name].ask(self.clock.left_s, "time", STEPS)
                    times_ms[name].append(float(row["step_ms"]))  # type: ignore[arg-type]
            except WorkerError as error:
                self.results.skip(f"rounds of steps from number {turn + 1} on ({error})")
                break
            if self.clock.left_s < 1.2 * (self.clock.taken_s - start_s) + REPORT_S:
                break
        whole = min((len(own) for own in times_ms.values()), default=0)
        plain = times_ms.get(COMPILE, [])[:whole]
        for row in self.results.systems:
            own = times_ms.get(str(row["name"]), [])[:whole]
            if own and plain:
                row["step_ms"] = min(own)
                row["round_ratio"] = statistics.median(a / b for a, b in zip(own, plain, strict=True))
                row["num_rounds"] = whole
        self.results.write()
        print(f"    {whole} rounds of {STEPS} steps, {len(names)} systems in turns", flush=True)


def _small_line(row: Row) -> str:
    network = f"{row['network']}, " if "network" in row else "masks, "
    if row["failure"]:
        told = str(row["failure"])
    elif "error" in row:
        told = f"{row['error']:.1e} {row['verdict']}"
    else:
        told = f"same in forward {row['same_in_forward']}, in backward {row['same_in_backward']}"
    return f"{network}{row['dtype']}, {row['system']}: {told}"


def _line(row: Row) -> str:
    if row["failure"]:
        return f"{row['name']}: {row['failure']}"
    assert isinstance(row["measured_bytes"], int)
    return f"{row['name']}: {row['measured_bytes'] / 2**20:.1f} MiB ({verdict(row)}), {row['step_ms']:.1f} ms"


def notes(place: Place, shape: GPTShape) -> tuple[str, ...]:
    """Where, when and with what this was measured, and what it is."""
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    chip = torch.cuda.get_device_name() if place.device == "cuda" else "CPU, a dry run: the figures say nothing"
    return (
        f"{today}; {chip}; {os.cpu_count()} cores; remat {remat_compiler.__version__}, torch {torch.__version__}, CUDA"
        f" {torch.version.cuda}, Python {platform.python_version()}.",
        f"GPT: {shape.num_layers} layers, width {shape.width}, {shape.num_heads} heads, vocabulary {shape.vocabulary},"
        f" head tied, batch {shape.batch} x {shape.tokens},"
        f" {'bfloat16' if place.device == 'cuda' else 'float32'}.",
        "Measured MiB: torch.cuda.max_memory_allocated of one step in a process of its own; budgets count the same.",
        f"Steps: CUDA events around {STEPS} steps, systems in turns; the ratio is the median within rounds.",
        "Gradient norms: the largest relative difference of one from torch.compile's.",
        *(
            (f"Priced as {place.device_spec}, whose figures come nearest to this device's.",)
            if place.device_spec
            else ()
        ),
    )


def nearest_spec(device_name: str, memory_bytes: int) -> str | None:
    """The figures to price an unknown device by: those of the nearest name, else of the nearest memory."""
    if device_name in GPU_NAMES:
        return None
    alike = [spec for name, spec in GPU_NAMES.items() if device_name.startswith(name)]
    if alike:
        return alike[0]
    return min(BUILT_IN, key=lambda name: abs(BUILT_IN[name].memory_bytes - memory_bytes))


NO_CUDA = (
    "benchmarks.gpu measures a CUDA device, and torch.cuda.is_available() says that there is none (torch {version})."
    " It needs an NVIDIA GPU, torch 2.11 or newer built for CUDA, and numpy; nothing else."
    " '--dry-run' tries the script itself out on a CPU, in tiny sizes."
)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, default=Path("build/benchmarks"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds in all (default: %(default)s)")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; repeatable")
    parser.add_argument("--device-spec", help="price as this device (default: the device at hand)")
    parser.add_argument("--parallel", type=int, help="workers that compile at a time (default: half of the cores)")
    parser.add_argument("--dry-run", action="store_true", help="try the script out on a CPU, in tiny sizes")
    return parser.parse_args(arguments)


def measured_on_cuda(chosen: argparse.Namespace, results: Path, scratch: Path) -> Bench:
    """The measurement of the CUDA device at hand."""
    # For the workers: an empty cache, so that compile times are those of a first compile, which all of them share.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "inductor")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    shape = settings.that_fits(MEDIUM, free_bytes)
    spec = chosen.device_spec or nearest_spec(torch.cuda.get_device_name(), total_bytes)
    place = Place("cuda", "inductor", spec)
    num_parallel = chosen.parallel or max(1, min(10, (os.cpu_count() or 2) // 2))
    idle_bytes = CONTEXT_BYTES + 2 * shape.num_parameters
    room_bytes = free_bytes - settings.eager_bytes(shape)
    num_parallel = max(1, min(num_parallel, int(room_bytes // idle_bytes)))
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    max_kept = int(min(room_bytes // idle_bytes, host_bytes // HOST_BYTES)) - num_parallel
    clock, found = Clock(chosen.deadline), Results(results, notes(place, shape))
    return Bench(
        place, shape, clock, found, chosen.part or PARTS, scratch / "turn", num_parallel, max(1, max_kept), False
    )


def tried_on_cpu(chosen: argparse.Namespace, results: Path, scratch: Path) -> Bench:
    """The same on a CPU in tiny sizes, without Inductor, and in this process."""
    spec = scratch / "device.json"
    spec.write_text(GENERIC_CPU.to_json(), encoding="utf-8")
    place = Place("cpu", "eager", str(spec))
    found = Results(results, notes(replace(place, device_spec=None), TINY))
    return Bench(place, TINY, Clock(chosen.deadline), found, chosen.part or PARTS, scratch / "turn", 1, 100, True)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    if not chosen.dry_run and not torch.cuda.is_available():
        print(NO_CUDA.format(version=torch.__version__), file=sys.stderr)
        return 1
    chosen.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make = tried_on_cpu if chosen.dry_run else measured_on_cuda
        bench = make(chosen, chosen.into / "gpu.json", Path(folder))
        bench.run()
    print_results(bench.results, chosen.into / "gpu.md", bench.clock)
    return 0


def print_results(results: Results, path: Path, clock: Clock) -> None:
    """The tables, last."""
    title = "# One GPU against the promises\n"
    taken = f"{clock.taken_s:.0f} s of {clock.limit_s:.0f} s were taken."
    said: Iterable[str] = (f"- {note}" for note in (*results.notes, taken))
    text = "\n".join([title, *(table.to_markdown() for table in results.tables()), *said]) + "\n"
    path.write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
