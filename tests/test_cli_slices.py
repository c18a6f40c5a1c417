"""How the command line shows a step that runs in micro-batches: dump, explain, diff, and ``remat run`` end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plan_samples import CONTRASTIVE, MIB, batch_value, contrastive_plan, plan, value

from remat_compiler.cli import main
from remat_compiler.cli.slices import FOLLOWS, WHAT_IT_IS, loops_text, runs_text, slices_text, whole_values
from remat_passes.batch import Dependence
from remat_passes.plan import Microbatches, RematPlan
from remat_passes.split_plan import NOWHERE, OUTSIDE

SPLIT = contrastive_plan()


def remat(*arguments: object, columns: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env={"COLUMNS": columns})


def write_plan(folder: Path, sample: RematPlan) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{sample.graph_id}.plan.json"
    path.write_text(sample.to_json(), encoding="utf-8")
    return path


def dumped(path: Path, *arguments: str, columns: str | None = None) -> str:
    result = remat("dump", path, *arguments, columns=columns)
    assert result.exit_code == 0, result.output
    return result.output


def explained(tmp_path: Path, name: str, *arguments: str) -> Result:
    return remat("explain", write_plan(tmp_path, SPLIT), name, *arguments)


# -- words


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ((2, 2, 2, 2), "4 slices of 2"),
        ((4, 4, 3, 3), "4 slices of 4, 4, 3, 3"),
        ((5,) * 3 + (4,) * 10, "13 slices, 3 of 5 and 10 of 4"),
        ((1,) * 64, "64 slices of 1"),
        ((7,), "1 slice of 7"),
    ],
)
def test_slices(lengths: tuple[int, ...], text: str) -> None:
    assert slices_text(lengths) == text


@pytest.mark.parametrize(
    ("num", "runs_in", "text"),
    [
        (0, "forward", "no loop"),
        (1, "forward", "1 loop in forward"),
        (2, "forward and backward", "2 loops in forward and backward"),
    ],
)
def test_loops(num: int, runs_in: str, text: str) -> None:
    assert loops_text(replace(CONTRASTIVE, num_loops=num, runs_in=runs_in)) == text


def test_the_words_are_those_of_the_plan() -> None:
    """The command line does not import torch, so it has its own copy of them."""
    from remat_compiler.cli import slices

    assert set(WHAT_IT_IS) == {dependence.value for dependence in Dependence}
    assert set(FOLLOWS) == set(WHAT_IT_IS) - {Dependence.SAME.value}
    assert (slices.OUTSIDE, slices.NOWHERE) == (OUTSIDE, NOWHERE)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("loop 0", "in loop 0, once for each slice"),
        ("loop 0 and loop 1", "in loop 0 and in loop 1, once for each slice"),
        ("loop 0 and outside", "in loop 0, once for each slice, and outside of the loops, once"),
        ("outside", "outside of the loops, once"),
        (NOWHERE, "nowhere: nothing needs it in this step"),
    ],
)
def test_where_a_value_runs(where: str, text: str) -> None:
    assert runs_text(batch_value("a", "split", where)) == text


def test_coupled_values_come_first_then_the_largest() -> None:
    names = [entry.name for entry in whole_values(CONTRASTIVE)]

    assert names == ["mm", "mm_1", "scaled", "exp", "count", "ne"]


# -- dump


def test_the_headline_says_the_slices(tmp_path: Path) -> None:
    text = dumped(write_plan(tmp_path, SPLIT))

    assert "  saved                128 B  1 value kept from forward to backward, in each slice\n" in text
    assert "to compute 1 dropped value (128 B) again in each slice\n" in text
    assert "  micro-batches            4  14 samples in 4 slices of 4, 4, 3, 3: 2 loops in forward\n" in text
    assert "What happens to the 3 forward values that backward needs in each slice, by module\n" in text


def test_the_section(tmp_path: Path) -> None:
    text = dumped(write_plan(tmp_path, SPLIT))
    start, end = text.index("How the batch is split"), text.index("What happens to")

    assert text[start:end] == (
        "How the batch is split\n"
        "\n"
        "  slices   14 samples in 4 slices of 4, 4, 3, 3, one after another\n"
        "  loops    2 loops in forward; the gradients are computed there as well, and backward multiplies\n"
        "           them by that of the loss. 2 values of a loop are computed again in a later one\n"
        "  inputs   images (axis 0), texts (axis 1)\n"
        "  inside   6 values: 4 split, 1 added up over the slices, 1 the same in each\n"
        "  outside  6 values: 1 without the batch, 4 with all of it, 1 of sums over it; 3 ops couple the\n"
        "           samples\n"
        "\n"
        "    bytes  value     runs in             why, and where\n"
        "  --------------------------------------------------------------------------------------------------\n"
        "        -  mm, mm_1  outside             aten.mm.default needs the whole batch (model.py:7)\n"
        "           aten.mm\n"
        "        -  scaled    loop 1              aten.mul.Tensor needs mean, which is a sum over the whole\n"
        "           aten.mul                      batch (model.py:7)\n"
        "  2.0 MiB  exp       outside             computed from inputs, or from what is outside (model.py:7)\n"
        "           aten.exp\n"
        "      4 B  count     outside             a sum over the batch, or a view of one (model.py:7)\n"
        "           aten.sum\n"
        "        -  ne        loop 0 and outside  cheap, and needed for all slices at once (model.py:7)\n"
        "           aten.ne\n"
        "\n"
    )


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_no_line_is_wider_than_the_page(tmp_path: Path, columns: int) -> None:
    path = write_plan(tmp_path, SPLIT)
    outputs = [
        dumped(path, columns=str(columns)),
        *(remat("explain", path, name, columns=str(columns)).output for name in ("a", "mm", "images")),
    ]

    assert max(len(line) for text in outputs for line in text.splitlines()) <= columns


def test_a_long_list_is_cut_short_unless_all_is_asked_for(tmp_path: Path) -> None:
    many = tuple(batch_value(f"v{at}", "whole batch", "outside", op=f"aten.op{at}.default") for at in range(15))
    path = write_plan(tmp_path, contrastive_plan(microbatches=replace(CONTRASTIVE, values=many)))

    short, full = dumped(path), dumped(path, "--all")

    assert "  v9 " in short
    assert "  v10 " not in short
    assert "  and 5 values more, which 'remat dump --all' lists\n" in short
    assert "  v14 " in full
    assert "more, which" not in full


def test_sources_are_shown_without_the_folder_that_all_share(tmp_path: Path) -> None:
    folder = "/home/user/projects/clip/"
    split = replace(CONTRASTIVE, values=tuple(replace(v, source=f"{folder}loss.py:7") for v in CONTRASTIVE.values))
    values = tuple(replace(entry, source=f"{folder}model.py:1") for entry in SPLIT.values)

    text = dumped(write_plan(tmp_path, contrastive_plan(values=values, microbatches=split)))

    assert "needs the whole batch (loss.py:7)\n" in text
    assert f"Sources are below {folder}" in " ".join(text.split())


def test_slices_of_the_tail_only(tmp_path: Path) -> None:
    split = replace(CONTRASTIVE, part="tail", batch=112, lengths=(56, 56))
    text = dumped(write_plan(tmp_path, contrastive_plan(microbatches=split, num_microbatches=2)))

    assert (
        "  slices   112 rows of the tail in 2 slices of 56, one after another; the last product and the loss,\n"
        "           and all before them whole\n"
    ) in text


def test_a_plain_training_step_has_nothing_coupled(tmp_path: Path) -> None:
    inside = (batch_value("a", "split", "loop 0"), batch_value("g", "partial sum", "loop 0"))
    split = replace(CONTRASTIVE, num_loops=1, lengths=(7, 7), values=inside)

    text = dumped(write_plan(tmp_path, contrastive_plan(microbatches=split)))

    assert "  slices   14 samples in 2 slices of 7, one after another\n" in text
    assert "  inside   2 values: 1 split, 1 added up over the slices\n  outside  nothing\n\nWhat happens" in text


def test_a_loop_in_backward_and_no_loop(tmp_path: Path) -> None:
    both = replace(CONTRASTIVE, runs_in="forward and backward")
    none = replace(CONTRASTIVE, num_loops=0, values=(), inputs=())

    text = dumped(write_plan(tmp_path / "both", contrastive_plan(microbatches=both)))
    assert "  loops    2 loops in forward and backward. 2 values of a loop are computed again in a later one\n" in text
    text = dumped(write_plan(tmp_path / "none", contrastive_plan(microbatches=none)))
    assert "  loops    no loop: nothing of this graph has to be computed slice by slice\n" in text
    assert "  inputs   none carries the batch\n" in text


def test_a_step_that_is_not_split_has_no_section(tmp_path: Path) -> None:
    text = dumped(write_plan(tmp_path, plan([value("a")])))

    assert "How the batch is split" not in text
    assert "  micro-batches            1  the batch is not split\n" in text


def test_json_has_all_and_can_be_read_back(tmp_path: Path) -> None:
    record = json.loads(dumped(write_plan(tmp_path, SPLIT), "--format", "json"))

    assert record["microbatches"]["lengths"] == [4, 4, 3, 3]
    assert len(record["microbatches"]["values"]) == len(CONTRASTIVE.values)
    assert RematPlan.from_json(json.dumps(record), "here") == SPLIT


def test_a_plan_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    evil = batch_value("mm\x1b[2J", "whole batch", "out\x1bside", why="needs\x1b[31m all")
    split = replace(CONTRASTIVE, values=(evil,), inputs=(replace(CONTRASTIVE.inputs[0], name="x\x1b]0;"),))
    path = write_plan(tmp_path, contrastive_plan(microbatches=split))

    assert "\x1b" not in dumped(path)
    assert "\x1b" not in remat("explain", path, evil.name).output


# -- explain


def test_a_value_of_the_cut_also_says_how_it_is_split(tmp_path: Path) -> None:
    assert explained(tmp_path, "a").output == (
        "a is saved: it is kept from forward to backward.\n"
        "\n"
        "  why          worth its bytes\n"
        "  what         aten.mm.default gives float32[4,8], 128 B\n"
        "  module       the top level\n"
        "  source       model.py:1\n"
        "  recomputing  costs 1.0 us and reads primals_1 (free, 128 B), and primals_2 (handed to each slice)\n"
        "  needed by    1 recomputed value: b\n"
        "  otherwise    recomputing it would keep 128 B less from forward to backward and cost 1.0 us\n"
        "  in slices    split: each slice of the batch has its own part of it, at axis 0\n"
        "  runs         in loop 0 and in loop 1, once for each slice\n"
    )


def test_a_coupled_value(tmp_path: Path) -> None:
    assert explained(tmp_path, "mm").output == (
        "mm is neither saved nor recomputed: it is computed outside of the loops.\n"
        "\n"
        "  what       aten.mm.default\n"
        "  source     model.py:7\n"
        "  in slices  whole: it depends on all samples at once, so no slice of it is computed by itself\n"
        "  runs       outside of the loops, once\n"
        "  coupled    aten.mm.default needs the whole batch\n"
    )


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "exp",
            [
                "what       aten.exp.default, 2.0 MiB for the full batch",
                "runs       outside of the loops, once",
                "outside    it is computed from inputs, or from what is outside",
            ],
        ),
        ("ne", ["outside    it is cheap, and needed for all slices at once"]),
        ("count", ["in slices  a partial sum: what the slices give is added up"]),
        ("grad", ["runs       in loop 1, once for each slice"]),
        ("permute", ["in slices  the same in every slice: it does not depend on the batch"]),
        ("unused", ["runs       nowhere: nothing needs it in this step"]),
        ("scaled", ["coupled    aten.mul.Tensor needs mean, which is a sum over the whole batch"]),
    ],
)
def test_other_values_that_nothing_was_decided_about(tmp_path: Path, name: str, lines: list[str]) -> None:
    result = explained(tmp_path, name)

    assert result.exit_code == 0
    assert [line for line in lines if f"  {line}\n" not in result.output] == []


def test_every_value_of_the_step_is_answered(tmp_path: Path) -> None:
    names = [*(entry.name for entry in CONTRASTIVE.values), *(given.name for given in CONTRASTIVE.inputs)]

    assert {name: explained(tmp_path, name).exit_code for name in names} == dict.fromkeys(names, 0)


def test_an_input_that_carries_the_batch(tmp_path: Path) -> None:
    assert explained(tmp_path, "texts").output == (
        "texts (axis 1) is an input that carries the batch: each slice is handed its own part of it.\n"
    )


def test_explain_as_json(tmp_path: Path) -> None:
    decided = json.loads(explained(tmp_path, "b", "--format", "json").output)
    undecided = json.loads(explained(tmp_path, "mm", "--format", "json").output)

    assert decided["value"]["decision"] == "recompute"
    assert decided["batch"]["axis"] == 1
    assert undecided == {
        "graph_id": "g00-1a2b3c4d",
        "value": None,
        "alive_at_peak": False,
        "batch": {
            "name": "mm",
            "op": "aten.mm.default",
            "bytes": 0,
            "source": "model.py:7",
            "dependence": "whole batch",
            "axis": None,
            "where": "outside",
            "why": "aten.mm.default needs the whole batch",
        },
    }


def test_unknown_names_of_a_split_step(tmp_path: Path) -> None:
    assert explained(tmp_path, "imagse").output == (
        "Error: g00-1a2b3c4d has no value 'imagse'. Did you mean 'images'?\n"
    )
    assert explained(tmp_path, "grad_0").output == (
        "Error: Nothing was decided about 'grad_0' in g00-1a2b3c4d: it is handed to the loops,"
        " or it is a sum or a slice of another value. Did you mean 'grad'?\n"
    )
    assert explained(tmp_path, "grad_0").exit_code == 2


# -- diff


def diff(tmp_path: Path, a: RematPlan, b: RematPlan, *arguments: str) -> str:
    result = remat("diff", write_plan(tmp_path / "a", a), write_plan(tmp_path / "b", b), *arguments)
    assert result.exit_code == 0, result.output
    return result.output


def finer(split: Microbatches) -> Microbatches:
    return replace(
        split,
        lengths=(2,) * 7,
        num_loops=1,
        values=tuple(replace(entry, where=entry.where.replace(" and loop 1", "")) for entry in split.values),
    )


def test_a_change_of_the_number_of_slices(tmp_path: Path) -> None:
    text = diff(tmp_path, SPLIT, contrastive_plan(num_microbatches=7, microbatches=finer(CONTRASTIVE)))

    assert "  micro-batches                  4          7          +3\n" in text
    assert (
        "\nHow the batch is split\n"
        "\n"
        "  slices  14 samples in 4 slices of 4, 4, 3, 3 -> 14 samples in 7 slices of 2\n"
        "  loops   2 loops in forward -> 1 loop in forward\n"
        "  values  2 values computed elsewhere, or of another kind\n"
    ) in text


def test_split_against_not_split(tmp_path: Path) -> None:
    text = diff(tmp_path, plan(SPLIT.values), SPLIT)

    assert "  slices  not split -> 14 samples in 4 slices of 4, 4, 3, 3\n" in text
    assert "  loops   no loop -> 2 loops in forward\n" in text
    assert "  inputs  none -> images (axis 0), texts (axis 1)\n" in text
    assert "values computed elsewhere" not in text


def test_diff_as_json(tmp_path: Path) -> None:
    (pair,) = json.loads(diff(tmp_path, SPLIT, contrastive_plan(microbatches=finer(CONTRASTIVE)), "--format", "json"))[
        "plans"
    ]

    assert not pair["same"]
    assert pair["microbatches"]["a"]["lengths"] == [4, 4, 3, 3]
    assert pair["microbatches"]["b"]["num_loops"] == 1
    assert pair["microbatches"]["values_changed"] == ["a", "b"]
    assert "values" not in pair["microbatches"]["a"]


def test_equal_splits_are_not_mentioned(tmp_path: Path) -> None:
    text = diff(tmp_path, SPLIT, contrastive_plan(step_us=13_000.0))

    assert "How the batch is split" not in text


# -- end to end

TRAIN = """
import sys
import torch
from torch import nn

sys.path.insert(0, {tests!r})
from oracle import installed_backend


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, rows, targets):
        return nn.functional.cross_entropy(self.down(torch.tanh(self.up(rows))), targets)


torch.manual_seed(0)
net = Net()
step = torch.compile(net, backend=installed_backend())
step(torch.randn(10, 8), torch.randint(4, (10,))).backward()
"""


def test_remat_run_in_micro_batches(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(tests=str(Path(__file__).parent)))
    kept = {name: text for name, text in os.environ.items() if not name.startswith("REMAT_") and name != "COLUMNS"}
    command = [sys.executable, "-m", "remat_compiler.cli", "run", "--microbatches", "4", "--dump-dir", "plans"]
    run = subprocess.run(
        [*command, "train.py"],
        cwd=tmp_path,
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "REMAT_LOWERING": "eager",
            "REMAT_DEVICE_SPEC": "h200",
            "REMAT_VERIFY": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert run.returncode == 0, run.stderr
    (path,) = (tmp_path / "plans").glob("*.plan.json")
    graph_id = path.name.split(".")[0]
    assert f"  {graph_id}: verified, " in run.stdout
    text = " ".join(dumped(path).split())  # however wide its columns are
    assert "micro-batches 4 10 samples in 4 slices of 3, 3, 2, 2: 1 loop in forward" in text
    assert "inputs rows (axis 0), targets (axis 0)" in text
    names = [entry["name"] for entry in json.loads(path.read_text())["microbatches"]["values"]]
    assert len(names) > 10
    assert {remat("explain", path, name).exit_code for name in names} == {0}
    points = json.loads(remat("frontier", path, "--format", "json").output)["points"]
    assert [point["chosen"] for point in points].count(True) == 1
    assert max(point["peak_bytes"] for point in points) < 64 * MIB
