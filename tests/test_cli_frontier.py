"""``remat frontier``: every point, plain Inductor's among them, as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plan_samples import MIB, gpt_plan, plan

from remat_compiler.cli import main
from remat_compiler.cli.frontier import pick_evenly, tradeoffs
from remat_passes.plan import FrontierPoint, RematPlan

POINTS = (
    FrontierPoint(640 * MIB, 500 * MIB, 9_000.0, False),
    FrontierPoint(400 * MIB, 300 * MIB, 10_200.0, False),
    FrontierPoint(240 * MIB, 150 * MIB, 12_500.0, True),
    FrontierPoint(200 * MIB, 90 * MIB, 14_500.0, False),
)
SMALL = plan(frontier=POINTS)


def frontier(path: Path, *arguments: str, columns: str | None = None) -> Result:
    return CliRunner().invoke(main, ["frontier", str(path), *arguments], env={"COLUMNS": columns})


def written(folder: Path, *plans: RematPlan) -> Path:
    for sample in plans:
        (folder / f"{sample.graph_id}.plan.json").write_text(sample.to_json(), encoding="utf-8")
    return folder


def test_one_graph_at_80_columns(tmp_path: Path) -> None:
    result = frontier(written(tmp_path, SMALL), columns="80")

    assert result.exit_code == 0
    assert result.output == (
        "g00-1a2b3c4d\n"
        "\n"
        "Certified: no plan within 256.0 MiB beats 12.00 ms; this one: 12.50 ms,\n"
        "240.0 MiB (gap 4.0%)\n"
        "  by the cost model, among plans where each forward value is saved, or\n"
        "  recomputed where backward needs it; backward runs in autograd's order\n"
        "\n"
        "Peak against step time (4 plans that none of those considered beats)\n"
        "\n"
        "                of                of  per MiB\n"
        "      step   plain       peak  plain   gained\n"
        "  ------------------------------------------------------------------\n"
        "   9.00 ms   90.0%  640.0 MiB   107%        -  #############\n"
        "  10.00 ms  100.0%  600.0 MiB   100%  25.0 us  ############ <- plain\n"
        "  10.20 ms  102.0%  400.0 MiB    67%   1.0 us  ########\n"
        "  12.50 ms  125.0%  240.0 MiB    40%  14.4 us  ##### <- chosen\n"
        "  14.50 ms  145.0%  200.0 MiB    33%  50.0 us  ####\n"
        "  plain: plain Inductor's own plan; per MiB gained: the time that the smaller\n"
        "  peak costs, beside the line above\n"
    )


def test_a_folder_has_one_table_a_graph(tmp_path: Path) -> None:
    written(tmp_path, SMALL, replace(SMALL, graph_id="g01-ffffffff"), plan(graph_id="g02-00000000"))

    text = frontier(tmp_path).output

    assert text.index("g00-1a2b3c4d") < text.index("g01-ffffffff") < text.index("g02-00000000")
    assert text.count("Peak against step time") == 2
    assert text.endswith("The plan file holds no frontier.\n")


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_no_line_is_wider_than_the_page_and_no_bar_is_broken(tmp_path: Path, columns: int) -> None:
    text = frontier(written(tmp_path, gpt_plan()), columns=str(columns)).output

    assert max(map(len, text.splitlines())) <= columns
    assert len([line for line in text.splitlines() if "#" in line]) == 31
    assert [line.split()[-1] for line in text.splitlines() if "<-" in line] == ["plain", "chosen"]


def test_plain_inductor_s_plan_is_marked_where_it_is_one_of_the_points() -> None:
    points = tradeoffs(plan(frontier=POINTS, inductor_peak_bytes=240 * MIB, inductor_step_us=12_500.0))

    assert len(points) == 4
    assert [point.mark for point in points] == ["", "", "<- chosen, plain", ""]


def test_a_point_that_gains_nothing_has_no_rate_and_is_passed_over() -> None:
    points = (POINTS[1], FrontierPoint(420 * MIB, 0, 12_000.0, True), POINTS[3])

    rated = tradeoffs(plan(frontier=points, inductor_peak_bytes=0))

    assert [point.us_per_mib for point in rated] == [None, None, (14_500 - 10_200) / 200]


def test_picking_keeps_the_ends_and_what_is_marked() -> None:
    for one in range(100):
        for other in (0, 37, one, 99):
            picked = pick_evenly(100, {one, other}, 12)
            assert len(picked) == 12
            assert {0, one, other, 99} <= set(picked)
            assert picked == sorted(set(picked))
    assert pick_evenly(12, {3}, 12) == list(range(12))


def test_picking_leaves_no_wide_gap() -> None:
    picked = pick_evenly(100, {50}, 12)

    assert max(after - before for before, after in pairwise(picked)) <= 18


def test_json_of_a_file_is_an_object_and_of_a_folder_an_array(tmp_path: Path) -> None:
    folder = written(tmp_path, SMALL)

    record = json.loads(frontier(folder / "g00-1a2b3c4d.plan.json", "--format", "json").output)

    assert json.loads(frontier(folder, "--format", "json").output) == [record]
    assert {key: record[key] for key in record if key != "points"} == {
        "graph_id": "g00-1a2b3c4d",
        "budget_bytes": 256 * MIB,
        "lower_bound_us": 12_000.0,
        "schedule_class": SMALL.schedule_class,
        "gap": 0.04,
        "inductor_peak_bytes": 600 * MIB,
        "inductor_step_us": 10_000.0,
        "candidates": [],
    }
    assert record["points"][1] == {
        "peak_bytes": 600 * MIB,
        "saved_bytes": None,
        "step_us": 10_000.0,
        "of_inductor_peak": 1.0,
        "of_inductor_step": 1.0,
        "us_per_mib": 25.0,
        "chosen": False,
        "plain_inductor": True,
        "way": "unsplit",
    }
    assert [point["chosen"] for point in record["points"]] == [False, False, False, True, False]


def test_csv_has_a_header_and_a_line_a_point(tmp_path: Path) -> None:
    written(tmp_path, SMALL, replace(SMALL, graph_id="g01,odd"))

    rows = list(csv.DictReader(io.StringIO(frontier(tmp_path, "--format", "csv").output)))

    assert [row["graph_id"] for row in rows] == ["g00-1a2b3c4d"] * 5 + ["g01,odd"] * 5
    assert rows[3] == {
        "graph_id": "g00-1a2b3c4d",
        "peak_bytes": str(240 * MIB),
        "saved_bytes": str(150 * MIB),
        "step_us": "12500.0",
        "of_inductor_peak": "0.4",
        "of_inductor_step": "1.25",
        "us_per_mib": "14.375",
        "chosen": "1",
        "plain_inductor": "0",
        "way": "unsplit",
    }
    assert rows[1]["saved_bytes"] == ""


def test_what_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.plan.json"
    damaged.write_text(SMALL.to_json().replace('"chosen": true', '"chosen": 1'), encoding="utf-8")

    gone, bad, odd = frontier(tmp_path / "gone"), frontier(damaged), frontier(damaged, "--format", "yaml")

    assert (gone.exit_code, bad.exit_code, odd.exit_code) == (2, 1, 2)
    assert gone.output.startswith(f"Error: {tmp_path}/gone does not exist")
    assert bad.output == (
        f"Error: {damaged} is a damaged plan file: 'chosen' is 1, expected bool. Write it again with REMAT_DUMP_DIR.\n"
    )
