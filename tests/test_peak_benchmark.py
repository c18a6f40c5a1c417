"""The peak benchmark: what it concludes from points made by hand, and that its models and systems do as they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from benchmarks.harness import System
from benchmarks.models import GPT, GPTShape, random_batch
from benchmarks.networks import Batch, ExplicitAttention, GroupedLayers, LanguageModel
from benchmarks.peak import __main__ as program
from benchmarks.peak import systems, table
from benchmarks.peak.models import MODELS, Model, checkpoint_blocks, checkpointed_attention
from benchmarks.peak.systems import Contender, falling_budgets, measure, smallest_feasible_bytes, start, under_budgets
from benchmarks.peak.table import COMPILE, EAGER, REMAT, Point, Record
from remat_passes.errors import BudgetInfeasibleError

MIB = 2**20


def point(budget: int, measured: int, **more: object) -> Point:
    """A plan of remat; both sizes in MiB."""
    made = Point(REMAT, f"remat, {budget}", budget * MIB, measured * MIB)
    return replace(made, **more)  # type: ignore[arg-type]


def record(*points: Point, model: str = "m") -> Record:
    return Record(model, "a model", own_bytes=10 * MIB, gradient_bytes=5 * MIB, points=points)


# -- rises and budgets


def test_peak_above_its_budget_is_found() -> None:
    over, exact = point(90, 91), point(80, 80)

    assert table.over_budget([exact, over]) == [over]


def test_rise_is_found_wherever_the_higher_budget_stands() -> None:
    lowest_first = [point(50, 40), point(60, 45), point(70, 43), point(80, 60)]

    assert table.rises(lowest_first) == [lowest_first[1]]
    assert table.rises(reversed(lowest_first)) == [lowest_first[1]]


def test_rise_is_against_every_higher_budget_and_not_the_next_one_only() -> None:
    points = [point(90, 50), point(80, 70), point(70, 60)]

    assert table.rises(points) == points[1:]


def test_equal_peaks_and_points_that_failed_are_no_rises() -> None:
    failed = Point(REMAT, "remat", 85 * MIB, failure="refused: too little")

    assert table.rises([point(90, 50), failed, point(80, 50)]) == []


# -- frontiers


@pytest.mark.parametrize(
    ("rival", "expected"),
    [
        ((100.0, 1.0), 0.0),  # the same as one of ours
        ((95.0, 1.0), 100 / 95 - 1),  # our nearest needs 5 % more bytes
        ((100.0, 0.9), 1 / 0.9 - 1),
        ((60.0, 1.2), 0.0),  # equal to our slow point in time, and not below its peak
        ((40.0, 1.2), 0.25),  # smaller than all of ours: 50 against 40
        ((200.0, 2.0), 100 / 200 - 1 if 100 / 200 > 1 / 2 else 1 / 2 - 1),  # ours is better in both
    ],
)
def test_excess_is_how_much_worse_our_nearest_point_is(rival: tuple[float, float], expected: float) -> None:
    assert table.excess(rival, [(100.0, 1.0), (50.0, 1.2), (60.0, 1.2)]) == pytest.approx(expected)


def test_rivals_below_our_frontier_are_named_beyond_the_tolerance_only() -> None:
    ours = point(100, 100, step_ratio=1.0)
    near = Point("rival", "near", measured_bytes=98 * MIB, step_ratio=1.0)
    below = Point("rival", "below", measured_bytes=90 * MIB, step_ratio=1.0)
    untimed = Point("rival", "untimed", measured_bytes=1 * MIB)

    ((found, excess),) = table.below_frontier(record(ours, near, below, untimed))

    assert found is below
    assert excess == pytest.approx(1 / 9)


def test_without_times_nothing_is_said_of_the_frontier() -> None:
    untimed = record(point(100, 100), Point("rival", "r", measured_bytes=1))

    assert table.below_frontier(untimed) == []
    assert table.totals([untimed]).num_below is None
    assert any("--times" in sentence for sentence in table.sentences([untimed]))


def test_smallest_peak_is_of_the_points_that_recompute_and_last_no_longer() -> None:
    points = [point(90, 80, num_products=10, step_ratio=1.0), point(60, 50, num_products=14, step_ratio=1.3)]

    assert table.smallest_bytes(points) == 50 * MIB
    assert table.smallest_bytes(points, max_products=13) == 80 * MIB
    assert table.smallest_bytes(points, max_ratio=1.2) == 80 * MIB
    assert table.smallest_bytes(points, max_products=9) is None


# -- verdicts


def test_totals_count_every_broken_promise() -> None:
    points = (
        point(90, 80, projected_bytes=80 * MIB, step_us=100.0, lower_bound_us=98.0),
        point(80, 84, projected_bytes=82 * MIB, step_us=100.0, lower_bound_us=96.0),
        Point(REMAT, "remat, 70", 70 * MIB, failure="refused: too little"),
        Point(COMPILE, COMPILE, measured_bytes=95 * MIB),
    )

    found = table.totals([record(*points), replace(record(), failure="crashed")])

    assert (found.num_points, found.num_over, found.num_rises, found.num_failures) == (2, 1, 1, 2)
    assert found.median_difference == pytest.approx(1 / 84)  # halfway between 0 and 2/84
    assert found.worst_difference == pytest.approx(2 / 84)
    assert found.median_gap == pytest.approx(0.03)


def test_tables_show_what_was_broken() -> None:
    failed = Point(REMAT, "remat, 70", 70 * MIB, failure="refused: too little")
    made = record(point(90, 80), point(85, 81), point(80, 84), failed)
    report = table.model_report(replace(made, failure="exit status 1"))

    assert [row[-1] for row in report.rows] == ["fits", "RISES", "OVER", "refused"]
    assert any("too little" in note for note in report.notes)
    assert any("INCOMPLETE: exit status 1" in note for note in report.notes)


def test_summary_sets_our_smallest_peak_beside_the_rivals() -> None:
    made = record(
        Point(COMPILE, COMPILE, measured_bytes=100 * MIB, num_products=8),
        Point("rival", "r1", measured_bytes=60 * MIB, num_products=12),
        point(50, 50, num_products=12),
        point(40, 40, num_products=16),
    )

    row = table.summary([made], ()).rows[0]

    assert row[-3:] == ("100.0", "40.0", "rival 60.0 (50.0)")


def test_promises_about_single_models() -> None:
    layer = table.LAYER_BYTES
    plain = Point(COMPILE, COMPILE, measured_bytes=200 * MIB, num_products=128)
    ours = Point(REMAT, "remat", 100 * MIB, 15 * MIB + 16 * layer, num_products=192)
    too_much = Point(REMAT, "remat", 50 * MIB, 15 * MIB + 2 * layer, num_products=193)

    (sentence,) = table.targets(record(plain, ours, too_much, model="mlp-64"))

    assert "16.0 layers, 1.00 of" in sentence
    assert table.targets(record(plain, ours)) == ()


def test_promises_about_sixteen_blocks() -> None:
    blocks = Point("checkpoint per block", "b", measured_bytes=120 * MIB, num_products=9, step_ratio=1.3)
    plain = Point(COMPILE, COMPILE, measured_bytes=510 * MIB, step_ratio=1.0)
    ours = (
        point(400, 385, step_ratio=1.02, num_products=4),
        point(110, 107, step_ratio=1.25, num_products=9),
        point(90, 80, step_ratio=1.28, num_products=10),
    )

    at_speed, at_own_speed = table.targets(record(plain, blocks, *ours, model="gpt-16"))
    (same_products,) = table.targets(record(plain, blocks, *ours, model="llama-16"))

    assert "97.0 MiB" in at_speed
    assert "0.75 of its" in at_own_speed
    assert "97.0 MiB, and its is 110.0 MiB" in same_products


# -- records as files


def test_records_of_several_runs_merge(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "peak.json"
    first, second = record(point(90, 80), model="one"), record(point(90, 81), model="two")
    again = record(point(90, 70, step_ratio=1.5, gradient_error=1e-6), model="one")

    table.write_records(path, [first, second])
    table.write_records(path, [again])

    assert set(table.read_records(path)) == {again, second}


def test_record_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peak.json"
    path.write_text('{"schema": 0}', encoding="utf-8")

    with pytest.raises(ValueError, match="schema 0"):
        table.read_records(path)


def test_results_are_a_table_a_picture_and_a_file(tmp_path: Path) -> None:
    made = record(Point(COMPILE, COMPILE, measured_bytes=95 * MIB, num_products=3), point(90, 80, num_products=4))

    program.write_results([replace(made, model="llama")], tmp_path)
    program.write_results([replace(made, model="gpt-sdpa")], tmp_path)

    text = (tmp_path / "peak.md").read_text(encoding="utf-8")
    assert text.index("(gpt-sdpa)") < text.index("(llama)")  # both runs, in the order of the list of models
    assert "<svg" in (tmp_path / "peak.svg").read_text(encoding="utf-8")


def test_a_crash_is_reported_and_loses_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.sys, "executable", "false")

    found = program.measured(MODELS["llama"], [])

    assert found.model == "llama"
    assert "exit status 1" in found.failure


# -- models and systems


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_model_gives_a_finite_loss(model: Model) -> None:
    if model.missing():
        pytest.skip(f"{model.missing()} is not installed")
    module, batch = model.make()

    with torch.no_grad():
        loss = module(*batch)

    assert loss.shape == ()
    assert loss.isfinite()


@pytest.mark.parametrize("key", ["gpt-sdpa", "gpt-dropout", "bert", "mlp-64", "hf-t5"])
def test_model_is_the_same_each_time(key: str) -> None:
    if MODELS[key].missing():
        pytest.skip(f"{MODELS[key].missing()} is not installed")
    (one, batch), (other, same) = MODELS[key].make(), MODELS[key].make()

    assert all(torch.equal(a, b) for a, b in zip(batch, same, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("key", ["hf-gpt2", "hf-vit", "hf-segformer"])
def test_step_of_transformers_is_one_graph(key: str) -> None:
    if MODELS[key].missing():
        pytest.skip(f"{MODELS[key].missing()} is not installed")
    model, batch = MODELS[key].make()
    counter = CompileCounter()
    step = torch.compile(lambda *batch: model(*batch), backend=counter, fullgraph=True)

    for _ in range(2):
        step(*batch).backward()

    assert counter.frame_count == 1


def tiny_gpt() -> tuple[nn.Module, Batch]:
    shape = GPTShape(num_layers=3, width=32, num_heads=2, vocabulary=64, batch=4, tokens=64)
    torch.manual_seed(0)
    return GPT(shape), random_batch(shape, 0)


def tiny_explicit() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = LanguageModel([ExplicitAttention(32, 2, 0.1) for _ in range(3)], 32, 64, None)
    return model, (torch.randint(64, (4, 64)), torch.randint(64, (4, 64)))


def tiny_layers() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return GroupedLayers(16, 4, 4), (torch.randn(512, 16), torch.randn(512, 16))


TINY = Model("tiny", "tiny", lambda: tiny_gpt()[0], lambda: tiny_gpt()[1])


def measured_eager(made: tuple[nn.Module, Batch], contender: Contender) -> Point:
    return measure(contender, start(contender, *made), 0, None)


@pytest.mark.parametrize("make", [tiny_gpt, tiny_explicit, tiny_layers])
def test_checkpoint_per_block_recomputes_and_takes_less(make: object) -> None:
    assert callable(make)
    plain = measured_eager(make(), Contender("plain", System("plain")))
    blocks = measured_eager(make(), Contender("blocks", System("blocks"), prepare=checkpoint_blocks))

    assert blocks.measured_bytes is not None
    assert plain.measured_bytes is not None
    assert blocks.num_products is not None
    assert plain.num_products is not None
    assert blocks.measured_bytes < plain.measured_bytes
    assert blocks.num_products > plain.num_products


def test_checkpoint_of_attention_recomputes_its_two_products_a_block() -> None:
    plain = measured_eager(tiny_explicit(), Contender("plain", System("plain")))
    attention = measured_eager(
        tiny_explicit(), Contender("attention", System("attention"), around=checkpointed_attention)
    )

    assert attention.num_products is not None
    assert plain.num_products is not None
    assert attention.measured_bytes is not None
    assert plain.measured_bytes is not None
    # Scores and their product with the values, in three blocks; a checkpoint need not finish what nobody asks for.
    assert plain.num_products + 3 <= attention.num_products <= plain.num_products + 6
    assert attention.measured_bytes < plain.measured_bytes


@pytest.mark.parametrize("make", [tiny_gpt, tiny_explicit])
def test_checkpoints_of_attention_end_with_their_block(make: object) -> None:
    assert callable(make)
    model, batch = make()
    seen = []

    def note(*_: object) -> None:
        seen.append(torch.nn.functional.scaled_dot_product_attention.__name__)

    model.register_forward_hook(note)
    with checkpointed_attention():
        model(*batch)
    model(*batch)

    assert seen == ["_checkpointed_sdpa", "scaled_dot_product_attention"]


def test_products_of_a_small_step_are_counted() -> None:
    torch.manual_seed(0)
    model = GroupedLayers(8, 1, 3)
    made = measured_eager((model, (torch.randn(16, 8), torch.randn(16, 8))), Contender("eager", System("eager")))

    assert made.num_products == 5  # two a layer, one in the first, whose input asks for no gradient


@pytest.mark.usefixtures("fresh_compiler")
def test_remat_is_measured_with_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_LOWERING", "eager")
    module, batch = tiny_gpt()
    truth = systems.reference_gradients(module, batch)
    smallest = smallest_feasible_bytes(TINY)
    (budget,) = falling_budgets(2 * smallest, smallest, 1)
    (contender,) = under_budgets([budget], budget)

    made = measure(contender, start(contender, module, batch), 1, truth)

    assert made.measured_bytes is not None
    assert made.measured_bytes <= budget
    assert made.difference == pytest.approx(0, abs=0.03)
    assert made.gap is not None
    assert made.gradient_error is not None
    assert made.gradient_error < 1e-4
    with pytest.raises(BudgetInfeasibleError):
        start(under_budgets([smallest // 2], smallest)[0], *tiny_gpt())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_refusal_is_a_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REMAT_LOWERING", "eager")
    bench = systems.Bench(TINY, tmp_path / "record.json", True, Record("tiny", "tiny"), [])

    made = bench.add(under_budgets([1000], 2000)[0], None)

    assert made.failure.startswith("refused: The memory budget of")
    assert table.read_records(tmp_path / "record.json")[0].points == (made,)


def test_budgets_fall_evenly_to_the_smallest() -> None:
    assert falling_budgets(100, 40, 4) == [100, 80, 60, 40]
    assert falling_budgets(100, 100, 4) == [100]
    assert falling_budgets(100, 40, 1) == [100]


def test_times_are_ratios_to_torch_compile() -> None:
    trials = [start(Contender(name, System(name)), *tiny_gpt()) for name in (COMPILE, "eager")]
    failed = Point(REMAT, "remat, 50", failure="refused: too little")
    points = (*(Point(name, name, measured_bytes=1) for name in (COMPILE, "eager")), failed)

    reference, eager, untimed = systems.timed(record(*points), trials, num_rounds=3)

    assert reference.step_ratio == 1.0
    assert eager.step_ratio is not None
    assert eager.step_ratio > 0
    assert eager.measured_ms is not None
    assert untimed == failed


@pytest.mark.usefixtures("fresh_compiler")
def test_without_a_smallest_peak_the_record_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(systems, "plain", lambda: (Contender(COMPILE, System(COMPILE)),))
    monkeypatch.setattr(systems, "smallest_feasible_bytes", lambda model: [][0])

    made = systems.measure_model(TINY, tmp_path / "record.json", 3, [], num_rounds=0)

    assert "the smallest peak is not known: IndexError" in made.failure
    assert table.read_records(tmp_path / "record.json") == (made,)


def test_chosen_rivals_and_budgets_are_measured_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    added: list[Contender] = []

    def add(bench: systems.Bench, contender: Contender, truth: object) -> Point:
        added.append(contender)
        return Point(contender.family, contender.system.name, measured_bytes=100 * MIB)

    monkeypatch.setattr(systems.Bench, "add", add)
    monkeypatch.setattr(systems, "smallest_feasible_bytes", lambda model: MIB)
    listed = [c for c in systems.rivals() if c.family == "checkpoint per block"]

    systems.measure_model(TINY, tmp_path / "record.json", 3, listed, num_rounds=0, asked=[20 * MIB, 50 * MIB])

    assert [c.family for c in added] == [EAGER, COMPILE, "checkpoint per block", REMAT, REMAT]
    assert [c.budget_bytes for c in added[-2:]] == [50 * MIB, 20 * MIB]


def test_budgets_at_the_rivals_peaks_are_asked_for_too() -> None:
    assert systems.with_read_off([100, 70, 40], [50, 70, 120, 40, 30]) == [100, 70, 50, 40]
    rivals = [Point("a", "a1", measured_bytes=60 * MIB), Point("a", "a2", measured_bytes=80 * MIB)]
    plain = Point(COMPILE, COMPILE, measured_bytes=210 * MIB)

    assert table.read_off_bytes(record(plain, *rivals, Point("b", "b", failure="failed: so"))) == (60 * MIB,)
    assert table.read_off_bytes(record(plain, *rivals, model="gpt-16")) == (60 * MIB, 107 * MIB, 160 * MIB)
    assert table.read_off_bytes(record(plain, model="mlp-64")) == (15 * MIB + int(1.3 * 16 * table.LAYER_BYTES),)


class Shifted(nn.Module):
    """Softmax does not see ``shift``, whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(1, 8)), nn.Parameter(torch.rand(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale + self.shift).softmax(-1).square().sum()


def test_error_of_a_gradient_that_is_zero_is_held_against_the_largest() -> None:
    torch.manual_seed(0)
    model, batch = Shifted(), (torch.rand(64, 8),)
    truth = systems.reference_gradients(model, batch)
    trial = start(Contender("eager", System("eager")), model, batch)

    assert truth["shift"].norm() < 1e-15 * truth["scale"].norm()
    trial.step()
    assert (model.shift.grad.double() - truth["shift"]).norm() > truth["shift"].norm()  # of the rounding alone
    assert systems.gradient_error(trial, truth) < 1e-5
    wrong = model.shift.register_hook(lambda gradient: gradient + truth["scale"].norm().float())
    assert systems.gradient_error(trial, truth) == pytest.approx(1, abs=1e-3)
    wrong.remove()
