"""Wrapping, widths, colour, and what happens to a pipe that closes."""

from __future__ import annotations

import io
import os

import pytest
from rich.text import Text

from remat_compiler.cli.tables import (
    Column,
    break_offsets,
    clean,
    fit_widths,
    fitted_table,
    page_width,
    render,
    wants_colour,
    wrapped,
    write,
)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def pieces(text: str, width: int) -> list[str]:
    return wrapped(text, width).plain.split("\n")


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("over budget: the cheapest bytes", 16, ["over budget: the", "cheapest bytes"]),
        ("float32[2,1024,4096]", 12, ["float32[2,", "1024,4096]"]),
        ("float32[2,1024,4096]", 9, ["float32[", "2,1024,", "4096]"]),
        ("/home/user/tiny-gpt/model.py:1042", 20, ["/home/user/tiny-gpt/", "model.py:1042"]),
        ("aten.native_layer_norm.default", 20, ["aten.native_layer_", "norm.default"]),
        ("blocks.0-15.mlp", 10, ["blocks.", "0-15.mlp"]),
        ("it takes 12.5 MiB", 13, ["it takes", "12.5 MiB"]),
        ("getitem_123456", 10, ["getitem_", "123456"]),
        ("fits", 4, ["fits"]),
        ("", 4, [""]),
        ("two\nlines that wrap", 10, ["two", "lines that", "wrap"]),
    ],
)
def test_lines_break_at_good_places(text: str, width: int, lines: list[str]) -> None:
    assert pieces(text, width) == lines


@pytest.mark.parametrize("width", range(8, 40))
def test_no_width_cuts_a_number_or_loses_a_character(width: int) -> None:
    text = "saved 123.75 MiB of float32[2,1024,65536] in blocks.10-15.mlp at /a/b/transformer_block.py:1042"
    lines = pieces(text, width)

    assert max(map(len, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    for number in ("123.75 MiB", "1024", "65536", "10-15", "1042"):
        assert any(number in line for line in lines) or len(number) > width, (number, lines)


def test_a_number_wider_than_the_page_is_cut_at_last() -> None:
    assert break_offsets("1234567890", 4) == [4, 8]


def test_styles_survive_wrapping() -> None:
    text = wrapped(Text.assemble(("bold text", "bold"), " plain"), 5)

    assert text.plain == "bold\ntext\nplain"
    assert [str(span.style) for span in text.spans] == ["bold", "bold"]


def test_control_characters_cannot_reach_the_terminal() -> None:
    assert clean("a\x1b[31mred\x07\n next\tline") == "a?[31mred? next line"


def test_flexible_columns_share_what_is_left() -> None:
    columns = [Column("n"), Column("a", flexible=True), Column("b", flexible=True)]

    assert fit_widths(columns, [("12345", "x" * 10, "y" * 100)], 60) == (5, 10, 41)
    assert fit_widths(columns, [("12345", "x" * 100, "y" * 100)], 60) == (5, 25, 26)
    assert fit_widths(columns, [("12345", "x" * 10, "y" * 10)], 60) == (5, 10, 10)


def test_a_table_as_text() -> None:
    columns = [Column("bytes", "right"), Column("of\nplain", "right"), Column("name", flexible=True)]
    rows = [("1.0 MiB", "5%", "first"), ("20.0 MiB", "95%", "a name that needs two lines")]

    assert render([fitted_table(columns, rows, 34)], 34, colour=False) == (
        "               of\n"
        "     bytes  plain  name\n"
        "  --------------------------------\n"
        "   1.0 MiB     5%  first\n"
        "  20.0 MiB    95%  a name that\n"
        "                   needs two lines\n"
    )


def test_markup_in_a_value_is_not_interpreted() -> None:
    assert render([wrapped("[bold]x[/bold] :smile:", 40)], 40, colour=False) == "[bold]x[/bold] :smile:\n"


@pytest.mark.parametrize(
    ("columns", "width"), [("80", 80), ("20", 80), ("500", 140), ("", 100), ("wide", 100), ("0", 100), ("-5", 100)]
)
def test_the_width_of_a_pipe(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    assert page_width(io.StringIO()) == width


def test_colour_is_for_terminals_and_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert (wants_colour(Terminal()), wants_colour(io.StringIO())) == (True, False)

    monkeypatch.setenv("NO_COLOR", "1")
    assert wants_colour(Terminal()) is False


def test_plain_text_has_no_escape_codes_even_where_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    assert render([Text("loud", "bold red")], 80, colour=False) == "loud\n"
    assert render([Text("loud", "bold red")], 80, colour=True) == "\x1b[1;31mloud\x1b[0m\n"


def test_characters_that_the_stream_cannot_show_are_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    write("caf\u00e9 \u2192\n", stream)

    assert stream.buffer.getvalue() == b"caf\\xe9 \\u2192\n"  # type: ignore[attr-defined]


def test_a_closed_stream_is_left_alone() -> None:
    stream = io.StringIO()
    stream.close()

    write("text", stream)
    assert stream.closed


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        write("x" * 100_000, stream)  # and closing the stream must not fail either
    assert stream.closed
