"""``remat explain``: the sentences, the record, and the nearest spellings."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plan_samples import DEAR, MIB, gpt_plan, plan, value

from remat_compiler.cli import main
from remat_passes.plan import RematPlan

GPT = gpt_plan()


def explain(tmp_path: Path, sample: RematPlan, name: str, *arguments: str, columns: str | None = None) -> Result:
    path = tmp_path / f"{sample.graph_id}.plan.json"
    path.write_text(sample.to_json(), encoding="utf-8")
    return CliRunner().invoke(main, ["explain", str(path), name, *arguments], env={"COLUMNS": columns})


def test_a_recomputed_value(tmp_path: Path) -> None:
    result = explain(tmp_path, GPT, "fc1_3")

    assert result.exit_code == 0
    assert result.output == (
        "fc1_3 is recomputed: it is dropped after forward and computed again in backward.\n"
        "\n"
        "  why          over budget: the cheapest bytes that were still saved\n"
        "  what         aten.addmm.default gives float32[2048,1024], 8.0 MiB\n"
        "  module       blocks.3.mlp\n"
        "  source       /home/user/projects/tiny-gpt/src/model/transformer.py:71\n"
        "  recomputing  costs 55.0 us and reads norm_3 (recompute, 2.0 MiB)\n"
        "  needed by    1 recomputed value: gelu_3\n"
        "  otherwise    saving it would keep 8.0 MiB more from forward to backward and spare 55.0 us of\n"
        "               recomputing it\n"
    )


def test_a_saved_value_at_80_columns(tmp_path: Path) -> None:
    result = explain(tmp_path, GPT, "add_3", columns="80")

    assert result.output == (
        "add_3 is saved: it is kept from forward to backward.\n"
        "\n"
        "  why          narrow point: every path to the loss passes here\n"
        "  what         aten.add.Tensor gives float32[2,1024,256], 2.0 MiB\n"
        "  module       blocks.3\n"
        "  source       /home/user/projects/tiny-gpt/src/model/transformer.py:31\n"
        "  recomputing  costs 1.5 us and reads proj_3 (save, 2.0 MiB), fc2_3 (save,\n"
        "               2.0 MiB)\n"
        "  needed by    1 recomputed value: norm_3\n"
        "  otherwise    recomputing it would keep 2.0 MiB less from forward to backward\n"
        "               and cost 1.5 us\n"
        "  at the peak  it is alive at the projected peak\n"
    )


def test_a_free_value(tmp_path: Path) -> None:
    output = explain(tmp_path, GPT, "primals_1").output

    assert output.startswith("primals_1 is free: it takes no memory of its own, being an input, an output or a view.\n")
    assert "  module       the top level\n" in output
    assert "  recomputing  costs 0.0 us and reads no other value\n" in output
    assert "  needed by    no recomputed value; only operations of backward itself read it\n" in output
    assert (
        "  otherwise    there is nothing to choose: saving it would take no memory, and recomputing it would\n"
        "               free none\n"
    ) in output


def test_inputs_that_backward_does_not_have(tmp_path: Path) -> None:
    sample = plan([value("a", inputs=("b", "gone_1", "gone_2", "b")), value("b")])

    output = explain(tmp_path, sample, "a").output

    assert (
        "  recomputing  costs 1.0 us and reads b (save, 128 B), and gone_1, gone_2, not kept for backward\n"
        "  needed by    no recomputed value; only operations of backward itself read it\n"
        "  otherwise    recomputing it would keep 128 B less from forward to backward and cost 1.0 us, and\n"
        "               gone_1, gone_2 would have to be kept or computed again too\n"
    ) in output


def test_what_cannot_be_recomputed(tmp_path: Path) -> None:
    output = explain(tmp_path, plan([value("a", cost_us=math.inf, source="")]), "a").output

    assert "  recomputing  it cannot be computed again\n" in output
    assert "  otherwise    there is no other choice\n" in output
    assert "  source       -\n" in output


def test_many_names_are_counted(tmp_path: Path) -> None:
    users = [value(f"user_{at}", inputs=("a",), decision="recompute") for at in range(9)]

    output = explain(tmp_path, plan([value("a"), *users]), "a").output

    assert "  needed by    9 recomputed values: user_0, user_1, user_2, user_3, user_4, user_5 and 3 more\n" in output


def test_the_record(tmp_path: Path) -> None:
    record = json.loads(explain(tmp_path, GPT, "fc2_1", "--format", "json").output)

    assert record["value"]["reason"] == DEAR
    del record["value"]
    assert record == {
        "graph_id": "g00-1a2b3c4d",
        "reads": [{"name": "gelu_1", "decision": "recompute", "bytes": 8 * MIB}],
        "not_kept_for_backward": [],
        "needed_by": [],
        "alive_at_peak": False,
        "other_decision": {"decision": "recompute", "saved_bytes": -2 * MIB, "recompute_us": 55.0},
        "batch": None,
    }


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("fc1", {"decision": "save", "saved_bytes": 8 * MIB, "recompute_us": -55.0}),
        ("view", None),
    ],
)
def test_the_other_decision(tmp_path: Path, name: str, other: object) -> None:
    assert json.loads(explain(tmp_path, GPT, name, "--format", "json").output)["other_decision"] == other


def test_an_unknown_value_gets_the_nearest_spellings(tmp_path: Path) -> None:
    result = explain(tmp_path, GPT, "fc1_33")

    assert result.exit_code == 2
    assert result.output == (
        "Error: g00-1a2b3c4d has no value 'fc1_33' that backward needs."
        " Did you mean 'fc1_3', 'fc1_13' or 'fc2_3'? 'remat dump --all FILE' lists them.\n"
    )


def test_an_unknown_value_that_is_like_none(tmp_path: Path) -> None:
    result = explain(tmp_path, GPT, "zzz")

    assert result.exit_code == 2
    assert result.output == (
        "Error: g00-1a2b3c4d has no value 'zzz' that backward needs. 'remat dump --all FILE' lists them.\n"
    )


def test_a_folder_is_taken_when_it_holds_one_plan(tmp_path: Path) -> None:
    explain(tmp_path, GPT, "fc1")
    assert CliRunner().invoke(main, ["explain", str(tmp_path), "fc1"]).exit_code == 0

    explain(tmp_path, plan([value("a")], graph_id="g01-ffffffff"), "a")
    result = CliRunner().invoke(main, ["explain", str(tmp_path), "fc1"])
    assert result.exit_code == 2
    assert result.output == (
        f"Error: {tmp_path} holds 2 plan files: name one of them, such as {tmp_path}/g00-1a2b3c4d.plan.json.\n"
    )


def test_a_missing_and_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "damaged.plan.json").write_text("{}")

    assert CliRunner().invoke(main, ["explain", str(tmp_path / "gone"), "a"]).exit_code == 2
    assert CliRunner().invoke(main, ["explain", str(tmp_path / "damaged.plan.json"), "a"]).exit_code == 1
