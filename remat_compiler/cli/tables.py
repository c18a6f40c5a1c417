"""Text on a page of a known width: wrapping, tables, and the way to the terminal or the pipe.

rich wraps at spaces and folds a longer word wherever the column ends, which cuts ``float32[2,1024,4096]`` in the middle
of a number; and how its tables share the width changes with its version. So cells are wrapped and set here, broken
where a path, a shape or a dotted name may be, and rich only colours lines that already fit. Rules are drawn with ``-``,
and without a terminal there are no escape codes at all.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TextIO

from rich.console import Console
from rich.text import Text

PIPE_WIDTH = 100
MIN_WIDTH = 80  # below this the figures of a line do not fit beside each other
MAX_WIDTH = 140  # a longer line is hard to follow with the eye
GAP = 2  # blanks between two columns
INDENT = 2  # blanks before a table

BREAK_AFTER = frozenset("/._,-:*+=[)]")
GLUED = re.compile(r"[0-9] (?=(?:B|KiB|MiB|GiB|TiB|us|ms|s)\b)")  # a number and its unit stay on one line

BOLD = "bold"
DIM = "dim"
NOTE = "yellow"
DECISION_STYLES = {"save": "green", "recompute": "yellow", "free": DIM}

Justify = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. A ``flexible`` one is narrowed and wrapped when the page is too narrow."""

    header: str
    justify: Justify = "left"
    flexible: bool = False


Cell = str | Text
Row = Sequence[Cell]


def clean(text: str) -> str:
    """``text`` on one line without control characters: a plan file must not steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def stacked(*lines: tuple[str, str]) -> Text:
    """A cell of several lines, each given as its text and its style; empty ones are left out."""
    cell = Text()
    for text, style in lines:
        if text:
            cell.append("\n" if cell else "").append(clean(text), style)
    return cell


def wrapped(cell: Cell, width: int) -> Text:
    """``cell`` with line breaks so that no line is wider than ``width``; styles are kept."""
    text = cell if isinstance(cell, Text) else Text(cell)
    lines = []
    for line in text.split("\n", allow_blank=True):
        for piece in line.divide(break_offsets(line.plain, width)):
            piece.rstrip()
            lines.append(piece)
    return Text("\n").join(lines)


def break_offsets(line: str, width: int) -> list[int]:
    """Where to break ``line`` so that each piece, without its trailing blank, is at most ``width`` long."""
    offsets: list[int] = []
    start = 0
    while len(line) - start > width:
        start = _next_break(line, start, width)
        offsets.append(start)
    return offsets


def _next_break(line: str, start: int, width: int) -> int:
    """The last good place to break within ``width``: a blank, else a separator, else outside a number."""
    glued = {match.end() for match in GLUED.finditer(line)}
    blanks = [at for at in range(start + 1, start + width + 2) if line[at - 1] == " " and at not in glued]
    if blanks:
        return blanks[-1]
    within = range(start + width, start, -1)
    separators = (at for at in within if line[at - 1] in BREAK_AFTER and not _inside_number(line, at))
    edges = (at for at in within if not _inside_number(line, at))
    return next(separators, None) or next(edges, start + width)


def _inside_number(line: str, at: int) -> bool:
    """Whether a break at ``at`` would cut ``1024``, ``3.5`` or the range ``0-15``. A comma parts a shape's numbers."""
    before, after = line[at - 1], line[at]
    if before.isdigit():
        return after.isdigit() or (after in ".-" and line[at + 1 : at + 2].isdigit())
    return before in ".-" and after.isdigit() and line[at - 2 : at - 1].isdigit()


def fit_widths(columns: Sequence[Column], rows: Sequence[Row], width: int) -> tuple[int, ...]:
    """How wide each column is: as its widest cell, and flexible ones share what is left when that is too much."""
    natural = [_natural_width(column, [row[place] for row in rows]) for place, column in enumerate(columns)]
    left = width - GAP * (len(columns) - 1) - sum(n for n, c in zip(natural, columns, strict=True) if not c.flexible)
    fitted = list(natural)
    flexible = sorted((natural[place], place) for place, column in enumerate(columns) if column.flexible)
    for done, (wanted, place) in enumerate(flexible):  # the narrowest first: what it does not need goes to the others
        fitted[place] = max(min(wanted, left // (len(flexible) - done)), _header_width(columns[place]), 1)
        left -= fitted[place]
    return tuple(fitted)


def _natural_width(column: Column, cells: Iterable[Cell]) -> int:
    lines = (line for cell in cells for line in (cell.plain if isinstance(cell, Text) else cell).split("\n"))
    return max([_header_width(column), *(len(line) for line in lines)])


def _header_width(column: Column) -> int:
    return max(len(line) for line in column.header.split("\n"))


def draw(
    columns: Sequence[Column], rows: Sequence[Row], widths: Sequence[int], *, indent: int = 0, header: bool = True
) -> Text:
    """The table with the given column widths, so that several tables under each other can share theirs."""
    lines: list[Text] = []
    if header:
        tallest = max(column.header.count("\n") for column in columns)
        lifted = ["\n" * (tallest - column.header.count("\n")) + column.header for column in columns]
        lines += _row_lines(columns, [Text(title, BOLD) for title in lifted], widths)  # each stands on the rule
        lines.append(Text("-" * (sum(widths) + GAP * (len(widths) - 1))))
    for row in rows:
        lines += _row_lines(columns, row, widths)
    return Text("\n").join(Text(" " * indent).append_text(line) for line in lines)


def _row_lines(columns: Sequence[Column], row: Row, widths: Sequence[int]) -> list[Text]:
    """The lines of one row: each cell wrapped to its column, the shorter ones filled up below."""
    cells = [wrapped(cell, width).split("\n", allow_blank=True) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for pieces in zip_longest(*cells, fillvalue=Text()):
        line = Text()
        for piece, column, width in zip(pieces, columns, widths, strict=True):
            room = " " * (width - piece.cell_len)
            line.append(" " * GAP if line else "")
            line = Text.assemble(line, room, piece) if column.justify == "right" else Text.assemble(line, piece, room)
        line.rstrip()
        lines.append(line)
    return lines


def fitted_table(columns: Sequence[Column], rows: Sequence[Row], width: int, *, header: bool = True) -> Text:
    """A table on its own: its columns fit a page of ``width``."""
    return draw(columns, rows, fit_widths(columns, rows, width - INDENT), indent=INDENT, header=header)


@dataclass(frozen=True, slots=True)
class Block:
    """One part of a long table: a title line, the rows below it, and what is only counted."""

    title: Text
    rows: Sequence[Row]
    footer: str = ""


def draw_blocks(columns: Sequence[Column], blocks: Sequence[Block], width: int) -> list[Text]:
    """The blocks under each other; their columns stand in line, and the header is written once."""
    widths = fit_widths(columns, [row for block in blocks for row in block.rows], width - INDENT)
    parts: list[Text] = [draw(columns, [], widths, indent=INDENT)]
    for block in blocks:
        parts += [Text(), wrapped(block.title, width)]
        if block.rows:
            parts.append(draw(columns, block.rows, widths, indent=INDENT, header=False))
        if block.footer:
            parts.append(paragraph(Text(block.footer, DIM), width, indent=INDENT))
    return parts


def labelled(rows: Sequence[Row], width: int) -> Text:
    """Label, figures and a sentence beside each other, without a header."""
    columns = [Column(""), *(Column("", "right") for _ in rows[0][2:]), Column("", flexible=True)]
    return fitted_table(columns, rows, width, header=False)


def paragraph(text: Cell, width: int, *, indent: int = 0) -> Text:
    """Running text that fits the page."""
    lines = wrapped(text, width - indent).split("\n", allow_blank=True)
    return Text("\n").join(Text(" " * indent).append_text(line) for line in lines)


def heading(text: str, width: int) -> Text:
    """A blank line and a bold one."""
    return Text("\n").append_text(wrapped(Text(text, BOLD), width))


def page_width(stream: TextIO) -> int:
    """Columns to write for: ``COLUMNS``, else the terminal's, else ``PIPE_WIDTH``."""
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        columns = int(wanted)
    else:
        columns = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns if stream.isatty() else PIPE_WIDTH
    return min(max(columns, MIN_WIDTH), MAX_WIDTH)


def render(parts: Iterable[Text], width: int, *, colour: bool) -> str:
    """The parts under each other as text; without ``colour`` it holds no escape codes and no trailing blanks."""
    page = io.StringIO()
    console = Console(
        file=page,
        width=width,
        force_terminal=colour,
        color_system="auto" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part, no_wrap=True, overflow="ignore", crop=False)
    text = page.getvalue()
    return text if colour else "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def wants_colour(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal and the user did not ask for plain text (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def print_parts(parts: Iterable[Text], stream: TextIO) -> None:
    """Print the parts for whoever reads ``stream``. They must have been built for its ``page_width``."""
    write(render(parts, page_width(stream), colour=wants_colour(stream)), stream)


def write(text: str, stream: TextIO) -> None:
    """Write and flush. A reader that has gone (``| head``) is no error, nor is a character that it cannot show."""
    if stream.closed:  # by the script that was run
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Send what is still buffered nowhere, or Python complains about it when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
