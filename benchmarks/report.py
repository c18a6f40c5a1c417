"""Report: one table, on the terminal and as Markdown, with the machine it was measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import remat_compiler

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "benchmarks"  # never tracked
RESULTS = ROOT / "benchmarks" / "results"  # tracked: results that someone chose to keep


@dataclass(frozen=True, slots=True)
class Report:
    """A titled table of texts, the first column on the left and figures on the right, and sentences below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def to_table(self) -> Table:
        """The table for a terminal."""
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """The table and its notes as Markdown."""
        marks = [":--"] + ["--:"] * (len(self.columns) - 1)
        lines = [_markdown_row(cells) for cells in (self.columns, marks, *self.rows)]
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"# {self.title}", "", *lines, "", *notes]) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def machine_notes(device: str = "cpu") -> tuple[str, ...]:
    """When and where something was measured, and with which versions."""
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    chip = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _cpu_name()
    versions = f"remat {remat_compiler.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return (f"{today}; {chip}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; {versions}",)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() is empty or the architecture on Linux
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def show(report: Report, console: Console) -> None:
    """A table and its notes on the terminal."""
    console.print(report.to_table())
    for note in report.notes:
        console.print(note, highlight=False)


def publish(report: Report, name: str, console: Console, *, record: bool) -> None:
    """Print ``report`` and write it as Markdown into build/, and with ``record`` into benchmarks/results/ too."""
    show(report, console)
    for folder in (BUILD, RESULTS) if record else (BUILD,):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.md"
        path.write_text(report.to_markdown(), encoding="utf-8")
        console.print(f"written to {path.relative_to(ROOT)}", highlight=False)


def console_for_output() -> Console:
    """The terminal, or where the output is piped a page wide enough that no table breaks its lines."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def format_mib(num_bytes: int | None) -> str:
    """Bytes as MiB with one decimal; a dash for none."""
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.1f}"
