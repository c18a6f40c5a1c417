"""The GPU benchmark without a GPU: a dry run of the whole script, its processes, and what its tables conclude."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import TEST_SPEC

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import costs, exact, settings, tables
from benchmarks.gpu.settings import COMPILE, EAGER, KNOB, LOOP, MEDIUM, REMAT, TINY, Place, Setting, in_slices
from benchmarks.gpu.systems import Bench, Measured, failed
from benchmarks.gpu.tables import Table, at_equal_peak, budget_sentences, verdict
from benchmarks.gpu.turn import Turn, waiting
from benchmarks.gpu.workers import Worker, WorkerError
from benchmarks.models import GPTShape
from remat_compiler.device_at_hand import GPU_NAMES
from remat_passes.device import BUILT_IN

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


@pytest.fixture
def place(fresh_compiler: None, tmp_path: Path) -> Place:
    spec = tmp_path / "device.json"
    spec.write_text(TEST_SPEC.to_json(), encoding="utf-8")
    return Place("cpu", "eager", str(spec))


# -- the script


def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    assert script.main(["--into", str(tmp_path / "never")]) == 1
    assert "needs an NVIDIA GPU, torch 2.11 or newer" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_dry_run(
    fresh_compiler: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part, in tiny sizes; fewer networks and budgets than on a GPU."""
    monkeypatch.setattr(script, "CASES", {"GPT, SDPA": exact.CASES["GPT, SDPA"]})
    monkeypatch.setattr(script, "DTYPES", ("float32",))
    monkeypatch.setattr(script, "MAX_ROUNDS", 1)
    monkeypatch.setattr(settings, "PERCENTS", (60, 1))
    monkeypatch.setattr(settings, "RATIOS", (0.5,))
    monkeypatch.setattr(settings, "LOOPS", (4,))
    monkeypatch.setattr(settings, "SLICES", (1, 4))
    monkeypatch.setattr(exact, "SLICES", (2,))
    monkeypatch.setattr(exact, "SHARES", ("70%",))

    assert script.main(["--dry-run", "--into", str(tmp_path)]) == 0

    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    verdicts = {row["name"]: verdict(row) for row in found["systems"]}
    assert verdicts["remat, 60 %"] == "fits", found["systems"]
    assert verdicts["remat, 1 %"] == "refused"
    assert {row["family"] for row in found["systems"]} == {
        COMPILE, EAGER, REMAT, KNOB, LOOP, settings.CHECKPOINT
    }  # fmt: skip
    assert any(name.startswith("remat, peak of checkpoint") for name in verdicts)
    assert not [row for row in found["systems"] if row["failure"].startswith("failed")]
    assert all(row["round_ratio"] > 0 for row in found["systems"] if not row["failure"])
    assert {row["verdict"] for row in found["exactness"]} == {"exact"}
    assert all(row["same_in_forward"] and row["same_in_backward"] for row in found["masks"])
    assert {row["how"] for row in found["costs"]} == {"one by one", "in the step"}
    assert found["skipped"] == []
    assert printed.rstrip().endswith(f"written to {tmp_path / 'gpu.md'}")
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") in printed


def test_what_the_deadline_leaves_no_time_for_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--dry-run", "--into", str(tmp_path), "--deadline", "1"]) == 0

    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert found["systems"] == found["exactness"] == []
    assert f"{COMPILE}" in found["skipped"]
    assert "budgets, because torch.compile was not measured" in found["skipped"]
    assert "Skipped: torch.compile" in capsys.readouterr().out


def test_the_script_needs_neither_click_nor_rich() -> None:
    """A GPU machine may have no more than torch and numpy."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['click', 'rich', 'matplotlib', 'scipy', 'transformers']))"
    modules = "main exact costs workers tables".split()
    imports = "; ".join(f"import benchmarks.gpu.{'__main__' if name == 'main' else name}" for name in modules)
    run = subprocess.run(
        [sys.executable, "-c", f"{blocked}; {imports}; import remat_compiler.backend"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stderr


# -- one system


@pytest.mark.parametrize(
    "setting",
    [Setting(COMPILE, COMPILE), Setting(EAGER, EAGER), Setting(LOOP, "loop", num_slices=2), in_slices(2)],
    ids=lambda setting: setting.name,
)
def test_a_system_s_row(setting: Setting, place: Place) -> None:
    plain = Bench(Setting(EAGER, EAGER), TINY, place).measure(1)

    row = Bench(setting, TINY, place).measure(1)

    assert row.failure == ""
    assert row.loss == pytest.approx(plain.loss, rel=1e-5)
    assert row.gradient_norms == pytest.approx(plain.gradient_norms, rel=1e-3)
    assert "head.weight" not in row.gradient_norms  # tied
    assert row.measured_bytes is not None
    assert (row.projected_bytes is None) == (setting.family != REMAT)
    if row.projected_bytes is not None:
        assert row.measured_bytes == pytest.approx(row.projected_bytes, rel=0.05)


def test_a_worker_measures_in_a_process_of_its_own(place: Place, tmp_path: Path) -> None:
    worker = Worker(place, tmp_path / "turn")
    try:
        (row,) = worker.ask(120, "measure", in_slices(2), TINY, 1)
        (timed,) = worker.ask(60, "time", 1)
        with pytest.raises(WorkerError, match="KeyError"):
            list(worker.ask(60, "no such order"))
        with pytest.raises(WorkerError, match="deadline"):
            list(worker.ask(0, "time", 1000))
    finally:
        worker.end()

    assert row["failure"] == ""
    assert row["num_slices"] == 2
    assert timed["step_ms"] > 0  # type: ignore[operator]


def test_compiled_code_waits_for_its_turn(tmp_path: Path) -> None:
    first, second = Turn(tmp_path / "turn"), Turn(tmp_path / "turn")
    order: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        return lambda: order.append("ran")

    run = waiting(backend, second)(None, None)
    first.take()
    first.take()
    first.give()
    start = time.perf_counter()
    run()
    second.give()
    first.take()
    first.give()

    assert order == ["ran"]
    assert time.perf_counter() - start < 5


# -- sizes


def test_the_gpt_has_about_350_million_parameters() -> None:
    tied = MEDIUM.num_parameters - MEDIUM.vocabulary * MEDIUM.width

    assert tied == pytest.approx(354e6, rel=0.01)


def test_a_smaller_card_gets_a_smaller_batch() -> None:
    shapes: list[GPTShape] = [settings.that_fits(MEDIUM, gib * GIB) for gib in (139, 80, 24, 8, 1)]

    assert shapes[0] == MEDIUM
    assert [shape.batch for shape in shapes] == sorted((shape.batch for shape in shapes), reverse=True)
    assert shapes[2].num_layers == MEDIUM.num_layers
    assert all(settings.eager_bytes(shape) <= gib * GIB for shape, gib in zip(shapes, (139, 80, 24, 8, 1), strict=True))


def test_a_device_without_figures_is_priced_as_its_nearest() -> None:
    assert script.nearest_spec("NVIDIA H200", 141 * GIB) is None
    assert script.nearest_spec("NVIDIA H200 MIG 1g.18gb", 16 * GIB) == "h200"
    assert script.nearest_spec("NVIDIA RTX 6000", 46 * GIB) == "l40s"
    assert set(GPU_NAMES.values()) <= set(BUILT_IN)


# -- tables


def row(name: str, family: str = REMAT, **changes: object) -> dict[str, Any]:
    return {**Measured(family, name, measured_bytes=100, step_ms=10.0).to_record(), **changes}


def test_verdicts() -> None:
    assert verdict(row("a")) == "-"
    assert verdict(row("a", budget_bytes=100)) == "fits"
    assert verdict(row("a", budget_bytes=99)) == "OVER"
    assert verdict(failed(Setting(REMAT, "a", budget_bytes=1), "refused: too little").to_record()) == "refused"


def test_our_step_at_the_peak_of_a_rival() -> None:
    rows = [
        row(COMPILE, COMPILE, measured_bytes=200, step_ms=10.0),
        row("loop", LOOP, measured_bytes=120, step_ms=12.0),
        row("slow", step_ms=11.5),
        row("fast", measured_bytes=119, step_ms=11.0),
        row("too large", measured_bytes=121, step_ms=9.0),
    ]

    assert at_equal_peak(rows, LOOP) == [pytest.approx(11 / 12)]
    assert at_equal_peak(rows, KNOB) == []
    assert any("0.917 of its step" in sentence for sentence in budget_sentences(rows))


def test_interleaved_rounds_win_over_steps_that_were_timed_alone() -> None:
    plain = row(COMPILE, COMPILE)

    assert tables.step_ratio(row("a", step_ms=20.0), plain) == 2.0
    assert tables.step_ratio(row("a", step_ms=20.0, round_ratio=1.5), plain) == 1.5
    assert tables.step_ratio(row("a"), None) is None


def test_gradient_norms_are_compared_one_by_one() -> None:
    plain = row(COMPILE, COMPILE, gradient_norms={"a": 1.0, "b": 2.0, "zero": 0.0})

    assert tables.norm_difference(row("a", gradient_norms={"a": 1.0, "b": 2.2}), plain) == pytest.approx(0.1)
    assert tables.norm_difference(row("a", gradient_norms={"a": 1.0}), plain) == float("inf")


def test_every_row_is_as_long_as_the_header() -> None:
    refused = failed(Setting(REMAT, "b", budget_bytes=1), "refused: too little").to_record()
    cost = costs.ClassCost(costs.GEMM, "one by one", 3, 10.0, 20.0, 0.4, 0.6)
    made = [
        tables.systems_table("t", [row("a"), refused], [row(COMPILE, COMPILE)]),
        tables.costs_table([{**vars_of(cost)}]),
        tables.exact_table([exact.as_record(exact.Exactness("n", "float32", "s", "float64", 1e-6, 1e-6))]),
        tables.masks_table([exact.as_record(exact.Masks("float32", "s", True, False))]),
    ]

    for table in made:
        assert {len(cells) for cells in table.rows} == {len(table.columns)}
        assert table.to_markdown().startswith(f"## {table.title}\n")
    assert made[1].rows[0][5] == "0.50"
    assert made[3].rows[0][2:] == ("same", "OTHER")
    assert "Nothing was measured." in Table("t", ("a",), ()).to_markdown()


def vars_of(cost: costs.ClassCost) -> dict[str, Any]:
    return {name: getattr(cost, name) for name in cost.__dataclass_fields__}


def test_plans_are_held_against_the_clock() -> None:
    assert "0.50 at the median" in tables.plan_sentence([row("a", predicted_us=5000.0)])
    assert "No plan" in tables.plan_sentence([row("a")])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused_addmm_0", costs.INDUCTOR),
        ("nvjet_hsh_128x256_64x4_TNT", costs.GEMM),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", costs.GEMM),
        ("void pytorch_flash::flash_fwd_kernel<...>", costs.ATTENTION),
        ("cudnn::cnn::dgrad2d_grouped_direct_kernel", costs.CONVOLUTION),
        ("void at::native::indexing_backward_kernel", costs.OTHER),
    ],
)
def test_kernels_of_the_device_have_a_class(name: str, kind: str) -> None:
    assert costs.class_of_kernel(name) == kind


def test_exactness_is_held_against_torch_compile_s_own_error() -> None:
    one = exact.Exactness("n", "float32", "s", "float64", 2e-6, 1.5e-6)

    assert one.verdict == "exact"
    assert replace(one, error=1e-3).verdict == "OFF"
    assert replace(one, against=COMPILE, error=0.01).verdict == "same masks"
    assert replace(one, against=COMPILE, error=0.7).verdict == "OFF"
    assert replace(one, failure="refused: why").verdict == "refused"


def test_a_gradient_that_is_zero_by_mathematics_is_held_against_the_largest() -> None:
    truth = {"w": torch.ones(4, dtype=torch.float64) * 100, "bias": torch.full((4,), 1e-17, dtype=torch.float64)}
    own = {"w": truth["w"], "bias": torch.full((4,), 1e-7, dtype=torch.float64)}

    assert exact.worst_error(own, truth) == pytest.approx(1e-9)
    assert exact.worst_error({"w": truth["w"]}, truth) == float("inf")


@pytest.mark.parametrize("name", ["GPT, dropout", "llama-style, grouped heads"])
def test_small_networks(name: str, place: Place) -> None:
    rows = list(exact.exactness(name, "float32", place, [in_slices(2)]))

    assert [row.failure for row in rows] == [""] * len(rows)
    if not exact.CASES[name].has_dropout:  # the eager lowering draws other numbers than torch.compile
        assert {row.verdict for row in rows} == {"exact"}
