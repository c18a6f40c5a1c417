"""The micro-batch benchmark: what it concludes from points made by hand, and that its systems do as they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import System, gradient_error, processor_s, reference_gradients
from benchmarks.microbatch import exact, systems, table
from benchmarks.microbatch.compile_time import of_samples
from benchmarks.microbatch.exact import CASES, Case, exactness
from benchmarks.microbatch.picture import draw_slices
from benchmarks.microbatch.systems import Contender, contenders, interleaved_s, pieces, start, try_all, with_times
from benchmarks.microbatch.table import CHUNKER, COMPILE, EAGER, LOOP, REMAT, CompileTime, Exactness, Point
from benchmarks.models import GPTShape

MIB = 2**20
PLAIN = Point(COMPILE, measured_bytes=200 * MIB, gradient_error=1e-6)


# -- shares


def test_peak_is_a_share_of_torch_compile_s() -> None:
    ours = Point(REMAT, 16, measured_bytes=30 * MIB, projected_bytes=29 * MIB)

    cells = dict(zip(table.COLUMNS, table.row(ours, [PLAIN, ours]), strict=True))

    assert cells["system"] == "remat x16"
    assert cells["measured MiB"] == "30.0"
    assert cells["projected MiB"] == "29.0"
    assert cells["of torch.compile's"] == "0.150"


def test_error_is_held_against_the_same_step_in_one_piece() -> None:
    whole, split = Point(REMAT, 1, gradient_error=2e-6), Point(REMAT, 4, gradient_error=3e-6)
    loop = Point(LOOP, 4, gradient_error=3e-6)
    points = [PLAIN, loop, whole, split]

    assert table.error_share(split, points) == pytest.approx(1.5)
    assert table.error_share(loop, points) == pytest.approx(3)
    assert table.error_share(split, [PLAIN, split]) == pytest.approx(3)  # where remat was not measured in one piece
    assert table.error_share(split, [split]) is None


def test_unsplit_step_that_failed_is_not_compared_to() -> None:
    failed = Point(REMAT, 1, failure="failed: so")
    split = Point(REMAT, 2, gradient_error=3e-6)

    assert table.unsplit(split, [failed, PLAIN, split]) is PLAIN
    assert table.find([failed], REMAT) is None


def test_share_of_nothing_is_not_known() -> None:
    assert table.share(1.0, 0.0) is None
    assert table.share(None, 2.0) is None
    assert table.share(3.0, None) is None
    assert table.share(3.0, 2.0) == 1.5


# -- tables


def test_promises_are_about_the_most_slices() -> None:
    points = [
        PLAIN,
        Point(REMAT, 1, measured_bytes=150 * MIB, gradient_error=1e-6),
        Point(REMAT, 2, measured_bytes=90 * MIB, gradient_error=1.2e-6),
        Point(REMAT, 16, measured_bytes=26 * MIB, gradient_error=1e-6, step_ratio=1.07, loop_ratio=1.01),
        Point(REMAT, 32, failure="refused: too many"),
    ]

    peak, step, errors = table.sentences(points)

    assert "in 16 slices: 0.130 of" in peak
    assert "1.070 of torch.compile's" in step
    assert "1.010 of the Python loop's" in step
    assert "1.200 of the unsplit" in errors  # the largest of all numbers of slices


def test_without_a_split_step_nothing_is_said_of_the_promises() -> None:
    (sentence,) = table.sentences([PLAIN, Point(REMAT, 1, measured_bytes=MIB), Point(REMAT, 2, failure="failed: so")])

    assert "nothing can be said" in sentence


def test_report_has_every_point_and_says_what_failed() -> None:
    chunker = Point(CHUNKER, note="it does not apply")
    failed = Point(REMAT, 2, failure="refused: no batch")

    made = table.report("title", [PLAIN, chunker, failed], ["a note"])

    assert [row[0] for row in made.rows] == [COMPILE, CHUNKER, "remat x2"]
    assert made.rows[2][3] == "refused"
    assert made.notes[1:] == ("auto_chunker: it does not apply", "remat x2: refused: no batch", "a note")
    assert all(len(row) == len(made.columns) for row in made.rows)


def test_no_two_contenders_share_a_name() -> None:
    names = [contender.point.name for contender in contenders((1, 2, 16), with_rivals=True)]

    assert len(set(names)) == len(names)
    assert [name for name in names if name.startswith(LOOP)] == [f"{LOOP} x2", f"{LOOP} x16"]
    assert names[:2] == [EAGER, COMPILE]
    alone = contenders((1, 2), with_rivals=False)
    assert [contender.point.family for contender in alone] == [EAGER, COMPILE, REMAT, REMAT]


@pytest.mark.parametrize(
    ("dtype", "error", "unsplit", "verdict"),
    [
        ("float64", 1e-10, 1e-16, "exact"),
        ("float64", 2e-10, 1e-16, "OFF"),
        ("float32", 1.05e-6, 1e-6, "exact"),
        ("float32", 1.06e-6, 1e-6, "OFF"),
        ("bfloat16", 1.09e-2, 1e-2, "exact"),
        ("bfloat16", 1.11e-2, 1e-2, "OFF"),
        ("float32", float("nan"), 1e-6, "OFF"),
    ],
)
def test_verdict_follows_the_promise_for_the_dtype(dtype: str, error: float, unsplit: float, verdict: str) -> None:
    assert Exactness("m", dtype, 8, 2, error, unsplit).verdict == verdict


def test_exactness_counts_by_dtype_and_names_refusals_once() -> None:
    refused = [Exactness("b", dtype, 8, 2, refusal="refused: batch norm") for dtype in ("float64", "float32")]
    found = [Exactness("a", "float64", 8, 2, 1e-16, 1e-16), Exactness("a", "float64", 8, 3, 1.0, 1e-16), *refused]

    made = table.exact_report(found, ())

    assert [row[-1] for row in made.rows] == ["exact", "OFF", "refused", "refused"]
    assert made.notes == ("float64: 1 of 2 within a relative error of at most 1e-10.", "b: refused: batch norm")


def test_compile_time_is_held_against_two_slices() -> None:
    found = [
        CompileTime("torch.compile", 1, 10.0),
        CompileTime("remat x2", 2, 20.0, 1.0),
        CompileTime("remat x64", 64, 25.0, 1.5),
    ]

    made = table.compile_report("t", found, ())

    assert [row[-1] for row in made.rows] == ["-", "1.00", "1.25"]
    assert "in 64 slices: 1.25 of" in made.notes[0]
    failed = replace(found[2], seconds=None, failure="CannotSplitError: so")
    assert table.compile_report("t", [*found[:2], failed], ()).notes[1] == "remat x64: CannotSplitError: so"


def test_picture_has_a_curve_for_slices_and_a_line_for_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "microbatch.svg"

    draw_slices([PLAIN, Point(REMAT, 2, measured_bytes=MIB), Point(LOOP, 2, failure="failed: so")], path)

    assert "<svg" in path.read_text(encoding="utf-8")


# -- step times


def test_rounds_start_with_another_step_each_time() -> None:
    order: list[str] = []
    steps = [lambda name=name: order.append(name) for name in "abc"]

    def count(step: object) -> float:
        assert callable(step)
        step()
        return float(len(order))

    found = interleaved_s(steps, 2, count)

    assert order == list("abcbca")
    assert found == [[1.0, 6.0], [2.0, 4.0], [3.0, 5.0]]


def test_ratios_are_within_a_round_and_to_the_loop_with_as_many_slices() -> None:
    points = [
        PLAIN,
        Point(LOOP, 2),
        Point(LOOP, 4),
        Point(REMAT, 4),
        Point(REMAT, 8),
        Point(REMAT, 16, failure="failed: so"),
    ]
    rounds = [[1.0, 2.0, 4.0], [1.0, 1.0, 1.0], [2.0, 4.0, 8.0], [3.0, 6.0, 12.0], [1.0, 2.0, 8.0], []]

    plain, loop, _, ours, alone, failed = with_times(points, rounds)

    assert plain.step_ratio == 1.0
    assert loop.loop_ratio is None
    assert ours.step_ratio == 3.0
    assert ours.loop_ratio == 1.5
    assert ours.step_ms == 3000.0
    assert alone.step_ratio == 1.0  # the median of 1, 1 and 2
    assert alone.loop_ratio is None
    assert failed == points[-1]


def test_processor_time_is_that_of_work_and_not_of_waiting() -> None:
    assert processor_s(lambda: torch.cuda.is_available()) < 1
    assert processor_s(lambda: [sum(range(1000)) for _ in range(20000)]) > 0.05


# -- systems


class Tiny(nn.Module):
    """Two layers, with a mean loss over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.first(x).tanh()), target)


def tiny() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Tiny(), (torch.randn(12, 6), torch.randn(12, 3))


def test_slices_are_of_one_size_and_lose_no_sample() -> None:
    x, y = torch.arange(12), torch.arange(24).view(12, 2)

    parts = pieces((x, y), 3)

    assert [len(part[0]) for part in parts] == [4, 4, 4]
    assert torch.equal(torch.cat([part[1] for part in parts]), y)
    with pytest.raises(ValueError, match="12 samples do not make 5 slices"):
        pieces((x, y), 5)


@pytest.mark.parametrize("num_slices", [2, 12])
def test_a_loop_in_python_is_the_whole_step(num_slices: int) -> None:
    model, batch = tiny()
    truth = reference_gradients(model, batch)
    whole = start(Contender(Point(EAGER), System(EAGER)), model, batch)
    loop = start(Contender(Point(LOOP, num_slices), System(LOOP), is_loop=True), model, batch)

    assert gradient_error(loop, truth) < 1e-6
    assert torch.allclose(loop.step(), whole.step())
    assert loop.model is not model  # all systems are alive at once, each with weights of its own


@pytest.mark.usefixtures("fresh_compiler")
def test_failures_are_points_and_the_others_are_measured() -> None:
    model, batch = tiny()
    options = {"num_microbatches": 3, "lowering": "eager"}
    listed = [
        Contender(Point(EAGER), System(EAGER)),
        Contender(Point(REMAT, 13), System("remat x13", "remat", {**options, "num_microbatches": 13})),
        Contender(Point(LOOP, 5), System(LOOP), is_loop=True),
        Contender(Point(REMAT, 3), System("remat x3", "remat", options)),
    ]

    (eager, _), (refused, none), (uneven, _), (ours, trial) = try_all(model, batch, listed)

    assert eager.measured_bytes is not None
    assert refused.failure.startswith("refused: Option num_microbatches is 13")
    assert none is None
    assert uneven.failure.startswith("failed: ValueError: 12 samples")
    assert ours.gradient_error is not None
    assert ours.gradient_error < 1e-6
    assert ours.measured_bytes is not None
    assert trial is not None
    points = systems.timed([(eager, None), (refused, none), (ours, trial), (Point(COMPILE), trial)], 1)
    assert points[1] == refused
    assert points[2].step_ratio is not None


# -- exactness and compile time


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case_is_the_same_each_time_and_in_its_dtype(case: Case) -> None:
    (one, batches), (other, same) = (exact.made(case, 4, torch.bfloat16) for _ in range(2))
    batch, another = batches[:2]

    assert all(torch.equal(a, b) for a, b in zip(batch, same[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(batch, another, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16}
    assert all(len(tensor) == 4 for tensor in batch)
    with torch.no_grad():
        assert one(*batch).isfinite()


@pytest.mark.usefixtures("fresh_compiler")
def test_exactness_of_a_small_network() -> None:
    case = Case("tiny", Tiny, lambda samples: (torch.randn(samples, 6), torch.randn(samples, 3)))

    found = list(exactness(case, torch.float64, 7, (2, 7)))

    assert [(entry.batch, entry.num_slices, entry.verdict) for entry in found] == [(7, 2, "exact"), (7, 7, "exact")]
    assert all(entry.error is not None and entry.error > 0 for entry in found)  # of rounding, so it was compared
    assert all(entry.largest_share is not None and 0 < entry.largest_share < 100 for entry in found)


class Coupled(nn.Module):
    """Batch norm in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).square().mean()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_step_that_cannot_be_split_is_asked_for_once() -> None:
    case = Case("coupled", Coupled, lambda samples: (torch.randn(samples, 6),))

    (entry,) = exactness(case, torch.float32, 8, (2, 4))

    assert entry.verdict == "refused"
    assert "cannot be split" in entry.refusal


def test_more_samples_have_fewer_tokens_each() -> None:
    shape = GPTShape(1, 8, 1, 8, 16, 256)

    assert of_samples(shape, 64) == replace(shape, batch=64, tokens=64)
    assert of_samples(shape, 16) == shape
