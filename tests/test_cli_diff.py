"""``remat diff``: figures side by side, changed decisions folded, folders matched by graph."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plan_samples import MIB, OVER, gpt_plan, plan, value

from remat_compiler.cli import main
from remat_compiler.cli.comparison import graph_hash, pair_up
from remat_compiler.cli.diff import difference_text
from remat_passes.plan import RematPlan

GPT = gpt_plan()
TIGHTER = replace(
    GPT,
    budget_bytes=200 * MIB,
    projected_peak_bytes=190 * MIB,
    saved_bytes=68 * MIB,
    recompute_us=GPT.recompute_us + 15 * 55.0,
    step_us=GPT.step_us + 15 * 55.0,
    device="a100-80g",
    values=(
        *(
            replace(entry, decision="recompute", reason=OVER)
            if entry.name.startswith("fc2") and entry.name != "fc2_15"
            else entry
            for entry in GPT.values
            if entry.name != "embedding"
        ),
        value("extra", module="blocks.3.mlp"),
    ),
)


def folder(path: Path, *plans: RematPlan) -> Path:
    path.mkdir()
    for sample in plans:
        (path / f"{sample.graph_id}.plan.json").write_text(sample.to_json(), encoding="utf-8")
    return path


def diff(a: Path, b: Path, *arguments: str, columns: str | None = None) -> Result:
    return CliRunner().invoke(main, ["diff", str(a), str(b), *arguments], env={"COLUMNS": columns})


def test_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "g00-1a2b3c4d.plan.json"
    folder(tmp_path / "a", GPT)
    folder(tmp_path / "b", TIGHTER)

    result = diff(Path("a") / name, Path("b") / name)

    assert result.exit_code == 0
    assert result.output == (
        "A is a/g00-1a2b3c4d.plan.json, B is b/g00-1a2b3c4d.plan.json\n"
        "\n"
        "g00-1a2b3c4d\n"
        "\n"
        "                                 A          B        difference\n"
        "  -------------------------------------------------------------\n"
        "  budget                 256.0 MiB  200.0 MiB  -56.0 MiB (-22%)\n"
        "  micro-batches                  1          1              same\n"
        "  projected peak         240.0 MiB  190.0 MiB  -50.0 MiB (-21%)\n"
        "  plain Inductor's peak  600.0 MiB  600.0 MiB              same\n"
        "  step time               12.50 ms   13.32 ms   +825.0 us (+7%)\n"
        "  plain Inductor's step   10.00 ms   10.00 ms              same\n"
        "  lower bound             12.00 ms   12.00 ms              same\n"
        "  saved                   98.0 MiB   68.0 MiB  -30.0 MiB (-31%)\n"
        "  recompute                2.52 ms    3.35 ms  +825.0 us (+33%)\n"
        "  before the step         50.0 MiB   50.0 MiB              same\n"
        "  gradients               48.0 MiB   48.0 MiB              same\n"
        "  device                      h200   a100-80g           differs\n"
        "\n"
        "recompute: what computing the value again costs, whatever was decided. x15: so many modules were\n"
        "planned alike; the title adds them up, the lines show the first. Sources are below\n"
        "/home/user/projects/tiny-gpt/src/model/\n"
        "\n"
        "15 values decided differently: save -> recompute 30.0 MiB\n"
        "\n"
        "  A -> B               bytes  recompute  value                         why in B, and where\n"
        "  --------------------------------------------------------------------------------------------------\n"
        "\n"
        "blocks.0-14.mlp x15  save -> recompute 30.0 MiB\n"
        "  save -> recompute  2.0 MiB    55.0 us  fc2                           over budget: the cheapest\n"
        "                                         aten.addmm float32[2048,256]  bytes that were still saved\n"
        "                                                                       (transformer.py:73)\n"
        "\n"
        "1 value only in A\n"
        "\n"
        "  decision    bytes  recompute  value                              why, and where\n"
        "  --------------------------------------------------------------------------------------------------\n"
        "\n"
        "wte  2.0 MiB\n"
        "  save      2.0 MiB     3.0 us  embedding                          narrow point: every path to the\n"
        "                                aten.embedding                     loss passes here\n"
        "                                float32[2,1024,256]                (transformer.py:101)\n"
        "\n"
        "1 value only in B\n"
        "\n"
        "  decision  bytes  recompute  value                 why, and where\n"
        "  ------------------------------------------------------------------------------\n"
        "\n"
        "blocks.3.mlp  128 B\n"
        "  save      128 B     1.0 us  extra                 worth its bytes (model.py:1)\n"
        "                              aten.mm float32[4,8]\n"
    )


@pytest.mark.parametrize("columns", [80, 100])
def test_no_line_is_wider_than_the_page(tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = folder(Path("a"), GPT), folder(Path("b"), TIGHTER)

    assert max(map(len, diff(a, b, columns=str(columns)).output.splitlines())) <= columns


def test_equal_plans_are_the_same(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", GPT), folder(tmp_path / "b", replace(GPT, graph_id="g07-1a2b3c4d"))

    result = diff(a, b)

    assert result.exit_code == 0
    assert result.output.endswith("\nthe plans are the same\n")
    assert json.loads(diff(a, b, "--format", "json").output)["same"] is True


def test_differences_beyond_figures_and_decisions_are_named(tmp_path: Path) -> None:
    other = replace(
        GPT,
        values=tuple(replace(entry, source="moved.py:1") if entry.module == "head" else entry for entry in GPT.values),
        notes=(),
    )

    output = diff(folder(tmp_path / "a", GPT), folder(tmp_path / "b", other)).output

    assert "Every value that both have is decided in the same way.\n" in output
    assert output.endswith("\nAlso different: source of 1 value, notes.\n")


def test_both_directions_of_a_change_are_counted(tmp_path: Path) -> None:
    a = plan([value("x", bytes=MIB), value("y", bytes=3 * MIB, decision="recompute")])
    b = plan([value("x", bytes=MIB, decision="recompute"), value("y", bytes=3 * MIB)])

    output = diff(folder(tmp_path / "a", a), folder(tmp_path / "b", b)).output

    assert "2 values decided differently: recompute -> save 3.0 MiB, save -> recompute 1.0 MiB\n" in output


def test_layers_that_changed_from_different_decisions_stand_apart(tmp_path: Path) -> None:
    b = plan([value("x", module="blocks.0", decision="recompute"), value("y", module="blocks.1", decision="recompute")])
    a = replace(b, values=(replace(b.values[0], decision="save"), replace(b.values[1], decision="free")))

    output = diff(folder(tmp_path / "a", a), folder(tmp_path / "b", b)).output

    assert "\nblocks.0  save -> recompute 128 B\n" in output
    assert "\nblocks.1  free -> recompute 128 B\n" in output


def test_folders_are_matched_by_the_graphs_hash_then_by_order(tmp_path: Path) -> None:
    def sample(graph_id: str) -> RematPlan:
        return plan([value("a")], graph_id=graph_id)

    a = [sample("g00-aaaa"), sample("g01-bbbb"), sample("g02-cccc"), sample("g03-dddd")]
    b = [sample("g00-bbbb"), sample("g01-aaaa"), sample("g02-eeee")]
    pairing = pair_up(a, b)

    assert [(one.graph_id, other.graph_id, match) for one, other, match in pairing.pairs] == [
        ("g00-aaaa", "g01-aaaa", "hash"),
        ("g01-bbbb", "g00-bbbb", "hash"),
        ("g02-cccc", "g02-eeee", "order"),
    ]
    assert [left.graph_id for left in pairing.only_in_a] == ["g03-dddd"]
    assert pairing.only_in_b == ()

    output = diff(folder(tmp_path / "a", *a), folder(tmp_path / "b", *b)).output
    assert "\ng00-aaaa -> g01-aaaa\n  the plans are the same\n" in output
    assert "\ng02-cccc -> g02-eeee  (graphs changed, compared by their order)\n" in output
    assert output.endswith("\nOnly in A: g03-dddd\n")


def test_the_same_graph_twice_is_paired_in_order() -> None:
    twice = [plan(graph_id="g00-aaaa"), plan(graph_id="g01-aaaa")]

    assert [(one.graph_id, other.graph_id) for one, other, _ in pair_up(twice, twice).pairs] == [
        ("g00-aaaa", "g00-aaaa"),
        ("g01-aaaa", "g01-aaaa"),
    ]


@pytest.mark.parametrize(("graph_id", "digest"), [("g00-1a2b", "1a2b"), ("g00-1a-2b", "1a-2b"), ("plain", "plain")])
def test_the_hash_is_what_follows_the_first_dash(graph_id: str, digest: str) -> None:
    assert graph_hash(plan(graph_id=graph_id)) == digest


@pytest.mark.parametrize(
    ("a", "b", "kind", "text"),
    [
        (5, 5, "bytes", "same"),
        (1024, 2048, "bytes", "+1.0 KiB (+100%)"),
        (2048, 1024, "bytes", "-1.0 KiB (-50%)"),
        (0, 1024, "bytes", "+1.0 KiB"),
        (100.0, 1300.0, "us", "+1.20 ms (13x)"),
        (None, 1024, "bytes", "differs"),
        (1000.0, 1500.0, "us", "+500.0 us (+50%)"),
        (1.0, float("inf"), "us", "differs"),
        (1, 4, "count", "+3"),
        ("h200", "cpu", "text", "differs"),
    ],
)
def test_differences(a: object, b: object, kind: str, text: str) -> None:
    assert difference_text(a, b, kind) == text  # type: ignore[arg-type]


def test_json(tmp_path: Path) -> None:
    record = json.loads(diff(folder(tmp_path / "a", GPT), folder(tmp_path / "b", TIGHTER), "--format", "json").output)
    (pair,) = record["plans"]

    assert (record["same"], record["only_in_a"], record["only_in_b"]) == (False, [], [])
    assert (pair["a"], pair["b"], pair["matched_by"], pair["same"]) == ("g00-1a2b3c4d", "g00-1a2b3c4d", "hash", False)
    assert pair["figures"]["saved_bytes"] == {"a": 98 * MIB, "b": 68 * MIB, "difference": -30 * MIB}
    assert pair["figures"]["device"] == {"a": "h200", "b": "a100-80g", "difference": None}
    assert len(pair["decisions_changed"]) == 15
    assert pair["decisions_changed"][0]["name"] == "fc2"
    assert (pair["decisions_changed"][0]["a"], pair["decisions_changed"][0]["b"]) == ("save", "recompute")
    assert [group["label"] for group in pair["groups_changed"]] == ["blocks.0-14.mlp"]
    assert (pair["only_in_a"], pair["only_in_b"]) == (["embedding"], ["extra"])
    assert pair["also_different"] == {"values": {}, "plan": []}


def test_a_file_and_a_folder_do_not_mix(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", GPT)

    result = diff(a, a / "g00-1a2b3c4d.plan.json")

    assert result.exit_code == 2
    assert (
        result.output == "Error: One of the two is a file and the other a folder: give two plan files or two folders.\n"
    )


def test_missing_empty_and_damaged(tmp_path: Path) -> None:
    a, empty = folder(tmp_path / "a", GPT), folder(tmp_path / "empty")
    damaged = tmp_path / "damaged.plan.json"
    damaged.write_text("{}")

    assert diff(a, tmp_path / "gone").exit_code == 2
    assert diff(a, empty).exit_code == 1
    assert diff(a / "g00-1a2b3c4d.plan.json", damaged).exit_code == 1
