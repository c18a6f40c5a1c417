"""``--plot``: three formats, the labels in the picture, and every refusal; nothing else is written."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plan_samples import MIB, gpt_plan, plan

from remat_compiler.cli import main
from remat_compiler.cli.picture import byte_unit, shortened, spread, time_unit
from remat_passes.plan import RematPlan

GPT = gpt_plan()
STARTS = {"svg": b"<?xml", "pdf": b"%PDF-", "png": b"\x89PNG\r\n"}


def plot(command: str, path: Path, picture: Path) -> Result:
    return CliRunner().invoke(main, [command, str(path), "--plot", str(picture)])


def written(folder: Path, *plans: RematPlan) -> Path:
    folder.mkdir(exist_ok=True)
    for sample in plans:
        (folder / f"{sample.graph_id}.plan.json").write_text(sample.to_json(), encoding="utf-8")
    return folder


def texts(picture: Path) -> list[str]:
    """What stands in an SVG; the lines of one label are texts of their own."""
    return [text.strip() for text in re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", picture.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("command", ["dump", "frontier"])
@pytest.mark.parametrize("form", ["svg", "pdf", "png"])
def test_the_end_of_the_name_says_the_format(tmp_path: Path, command: str, form: str) -> None:
    plans, picture = written(tmp_path / "plans", GPT), tmp_path / f"out.{form.upper()}"

    result = plot(command, plans, picture)

    assert result.exit_code == 0, result.output
    assert "Peak against step time" in result.output  # the text is printed as without --plot
    assert picture.read_bytes().startswith(STARTS[form])
    assert picture.stat().st_size > 5_000
    assert sorted(path.name for path in tmp_path.iterdir()) == [picture.name, "plans"]
    assert len(list(plans.iterdir())) == 1


@pytest.mark.parametrize("command", ["dump", "frontier"])
def test_the_same_plan_gives_the_same_picture(tmp_path: Path, command: str) -> None:
    plans = written(tmp_path / "plans", GPT)

    for name in ("a.svg", "b.svg"):
        plot(command, plans, tmp_path / name)

    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_picture_of_memory_names_what_it_shows(tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"

    plot("dump", written(tmp_path / "plans", GPT), picture)

    shown = texts(picture)
    for label in (
        "Projected memory of one step, g00-1a2b3c4d",
        "allocated, MiB",
        "kernels, in the order that they run",
        "forward",
        "backward",
        "budget 256.0 MiB",
        "plain Inductor's peak 600.0 MiB",
        "peak 240.0 MiB at logits",
        "parameters, inputs",
        "50.0 MiB",
        "head",
        "96.0 MiB",
        "blocks.0-13",
        "blocks.0-5.attn.qkv",
    ):
        assert label in shown, label


def test_a_budget_far_above_is_named_and_not_drawn(tmp_path: Path) -> None:
    roomy = replace(GPT, budget_bytes=64 * 2**30)

    plot("dump", written(tmp_path / "plans", roomy), tmp_path / "memory.svg")
    plot("frontier", tmp_path / "plans", tmp_path / "frontier.svg")

    for name in ("memory.svg", "frontier.svg"):
        shown = texts(tmp_path / name)
        assert "budget 64.0 GiB (above the picture)" in shown
        assert "600" in shown  # the axis still ends at plain Inductor's peak


def test_the_picture_of_the_frontier_names_what_it_shows(tmp_path: Path) -> None:
    picture = tmp_path / "frontier.svg"

    plot("frontier", written(tmp_path / "plans", GPT), picture)

    shown = texts(picture)
    for label in (
        "Projected peak against step time, g00-1a2b3c4d",
        "peak, MiB",
        "step time, ms",
        "% of plain Inductor's",
        "plans considered",
        "chosen: 240.0 MiB, 12.50 ms",
        "plain Inductor: 600.0 MiB, 10.00 ms",
        "budget 256.0 MiB",
        "lower bound: 12.00 ms",
    ):
        assert label in shown, label


def test_figures_that_do_not_fit_each_other_still_fit_the_picture(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    odd = replace(GPT, peak_values=tuple(replace(value, bytes=value.bytes * 50) for value in GPT.peak_values))

    result = plot("dump", written(tmp_path / "plans", odd), tmp_path / "out.svg")

    assert result.exit_code == 0
    assert "4.7 GiB" in texts(tmp_path / "out.svg")
    assert [str(warning.message) for warning in recwarn if "layout" in str(warning.message)] == []


@pytest.mark.parametrize("command", ["dump", "frontier"])
def test_several_graphs_share_one_picture(tmp_path: Path, command: str) -> None:
    odd = replace(GPT, graph_id="g01-$x^$", budget_bytes=None)  # no formula
    plans = written(tmp_path / "plans", GPT, odd, plan(graph_id="g02-empty", inductor_peak_bytes=0))

    result = plot(command, plans, tmp_path / "out.svg")

    assert result.exit_code == 0, result.output
    titles = [text.split(", ")[1] for text in texts(tmp_path / "out.svg") if text.startswith("Projected")]
    assert titles == ["g00-1a2b3c4d", "g01-$x^$", "g02-empty"]


@pytest.mark.parametrize("command", ["dump", "frontier"])
class TestRefusals:
    def test_an_end_that_is_no_format(self, tmp_path: Path, command: str) -> None:
        plans = written(tmp_path / "plans", GPT)

        for name in ("out.gif", "out"):
            result = plot(command, plans, tmp_path / name)
            assert result.exit_code == 2
            assert result.output == (
                f"Error: {tmp_path}/{name} cannot be drawn: its name must end in .svg, .pdf or .png.\n"
            )
            assert not (tmp_path / name).exists()

    def test_a_file_that_cannot_be_written(self, tmp_path: Path, command: str) -> None:
        result = plot(command, written(tmp_path / "plans", GPT), tmp_path / "no" / "out.svg")

        assert result.exit_code == 2
        assert result.output == f"Error: {tmp_path}/no/out.svg cannot be written: No such file or directory.\n"

    def test_matplotlib_is_missing(self, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)

        result = plot(command, written(tmp_path / "plans", GPT), tmp_path / "out.svg")

        assert result.exit_code == 2
        assert result.output == (
            "Error: --plot needs matplotlib, which is not installed: run 'pip install matplotlib'.\n"
        )
        assert not (tmp_path / "out.svg").exists()

    def test_without_plot_nothing_needs_matplotlib(
        self, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        plans = written(tmp_path / "plans", GPT)

        assert CliRunner().invoke(main, [command, str(plans)]).exit_code == 0

    def test_a_damaged_plan_draws_nothing(self, tmp_path: Path, command: str) -> None:
        path = tmp_path / "damaged.plan.json"
        path.write_text(GPT.to_json().replace('"side": "forward"', '"side": "sideways"'), encoding="utf-8")

        result = plot(command, path, tmp_path / "out.svg")

        assert result.exit_code == 1
        assert "side 'sideways' of kernel 'add_0' is none of forward, backward" in result.output
        assert not (tmp_path / "out.svg").exists()

    def test_more_graphs_than_fit(self, tmp_path: Path, command: str) -> None:
        plans = written(tmp_path / "plans", *(plan(graph_id=f"g{at:02d}-a") for at in range(13)))

        result = plot(command, plans, tmp_path / "out.svg")

        assert result.exit_code == 2
        assert result.output == (
            "Error: 13 plans are too many for one picture, which shows 12 at most: name one plan file.\n"
        )


def test_labels_are_spread_within_the_axis() -> None:
    for wanted in ([0.0, 1.0, 1.1, 5.0], [9.0, 9.5, 9.9, 10.0], [5.0], []):
        places = spread(wanted, 2.0, 10.0)
        assert all(after - before >= 2.0 for before, after in pairwise(places))
        assert all(place <= 10.0 for place in places)
    assert spread([1.0, 5.0], 2.0, 10.0) == [1.0, 5.0]


def test_units_and_names_that_fit() -> None:
    assert byte_unit(3 * 2**30) == ("GiB", 2**30)
    assert byte_unit(700 * MIB) == ("MiB", MIB)
    assert byte_unit(0) == ("B", 1)
    assert time_unit(12_500.0) == ("ms", 1e3)
    assert shortened("transformer.h.0-11.attn.c_attn", 18) == "\u2026.0-11.attn.c_attn"
    assert shortened("head", 18) == "head"
