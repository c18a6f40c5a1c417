"""The suite: what follows from its points, what its rivals do to a model, and how a record grows."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import System, gradient_error, reference_gradients
from benchmarks.models import GPT, GPTShape, random_batch
from benchmarks.networks import ExplicitAttention, GroupedLayers, LanguageModel
from benchmarks.peak.models import Model, checkpoint_blocks
from benchmarks.peak.systems import Contender, start, under_budgets
from benchmarks.peak.table import COMPILE, EAGER, REMAT, Point, Record, read_records, write_records
from benchmarks.report import RESULTS, ROOT
from benchmarks.suite import __main__ as program
from benchmarks.suite import measure, systems, table, training
from benchmarks.suite.measure import CRASHED, Bench, Settings, arrangement_error, slope_error
from benchmarks.suite.models import CHARACTERS, MODELS, characters, passages
from benchmarks.suite.table import BLOCKS, FIXED, KNOB, LOOP, TOGETHER
from benchmarks.suite.turns import Turns

MIB = 2**20


def point(
    family: str, peak: float | None, ratio: float | None = None, budget: float | None = None, **more: object
) -> Point:
    """A point in MiB, named by its peak."""
    budget_bytes = None if budget is None else int(budget * MIB)
    peak_bytes = None if peak is None else int(peak * MIB)
    name = f"{family} {peak} {budget}"
    return Point(family, name, budget_bytes, peak_bytes, step_ratio=ratio, **more)  # type: ignore[arg-type]


def record(*points: Point, **more: object) -> Record:
    return Record("m", "a model", points=points, **more)  # type: ignore[arg-type]


PLAIN = point(COMPILE, 100, 1.0, gradient_error=1e-6)


# -- picks and comparisons


def test_pick_is_the_fastest_that_fits() -> None:
    points = [PLAIN, point(KNOB, 60, 1.2), point(BLOCKS, 50, 1.1), point(LOOP, 40, 1.5), point(LOOP, 30)]

    assert table.pick(points, 70 * MIB) == points[2]
    assert table.pick(points, 45 * MIB) == points[3]
    assert table.pick(points, 30 * MIB) is None  # its step was not timed


def test_frontier_is_what_no_other_point_beats_in_both() -> None:
    good = [PLAIN, point(KNOB, 60, 1.1), point(KNOB, 40, 1.3)]
    dominated = [point(KNOB, 90, 1.2), point(KNOB, 60, 1.15), point(KNOB, 100, 1.0)]

    assert table.frontier([*dominated[:2], *good]) == tuple(good)
    assert len(table.frontier([*good, dominated[2]])) == 3


def test_each_budget_is_held_against_the_pick_and_refusals_against_the_smallest_rival() -> None:
    made = record(
        PLAIN,
        point(KNOB, 60, 1.2),
        point(LOOP, 40, 1.5),
        point(REMAT, 100, 1.0, 100),
        point(REMAT, 70, 1.08, 70),
        point(REMAT, 52, 1.5, 50),  # above its budget
        point(REMAT, None, None, 45, failure="refused: too little"),
        point(REMAT, None, None, 35, failure="refused: too little"),
    )

    found = [(c.rival.family, pytest.approx(c.ratio)) for c in table.against_pick(made)]

    assert found == [(COMPILE, 1.0), (KNOB, 0.9)]
    assert [p.budget_bytes for p in table.unreached(made)] == [50 * MIB, 45 * MIB]
    totals = table.totals([made])
    assert (totals.num_asked, totals.num_met, totals.num_wrong_refusals) == (5, 2, 2)
    assert totals.num_above_smallest == 1
    assert totals.pick_share == pytest.approx(0.9**0.5)
    assert totals.worst_share == 1.0


def test_a_family_is_held_against_what_is_asked_for_at_its_own_peaks() -> None:
    made = record(
        PLAIN,
        point(KNOB, 60, 1.2),
        point(KNOB, 80, 1.3),  # its own 60 is better
        point(BLOCKS, 30, 1.4),
        point(REMAT, 58, 1.14, 60),
        point(REMAT, 50, 1.2, 50),
    )

    (knob,) = table.against_group(made, KNOB)

    assert knob.ratio == pytest.approx(0.95)
    assert not list(table.against_group(made, "checkpointing"))  # nobody asked remat for 30 MiB
    assert table.totals([made]).group_shares[LOOP] is None


def test_rivals_with_another_gradient_are_no_rivals() -> None:
    wrong, right = point(LOOP, 30, 1.1, gradient_error=1e-4), point(LOOP, 40, 1.1, gradient_error=5e-6)
    drawn_again = point(KNOB, 20, 1.0, slope_error=0.2)
    made = record(PLAIN, wrong, right, drawn_again)

    assert table.rivals(made) == (PLAIN, right)
    assert [table.verdict(p, made) for p in made.points] == ["-", "OFF", "-", "OFF"]
    in_float64 = record(
        point(COMPILE, 100, 1.0), replace(wrong, gradient_error=1e-3), replace(right, gradient_error=1e-15)
    )
    assert len(table.rivals(in_float64)) == 2


def test_claim_about_the_smallest_peak_is_held_against_the_rivals() -> None:
    made = record(PLAIN, point(LOOP, 40, 1.5))

    assert table.claim_is_right(replace(made, smallest_bytes=39 * MIB)) is True
    assert table.claim_is_right(replace(made, smallest_bytes=41 * MIB)) is False
    assert table.claim_is_right(made) is None


def test_budgets_are_read_off_where_a_rival_is_at_its_best() -> None:
    rivals = [point(KNOB, 60, 1.2), point(KNOB, 60.3, 1.1), point(KNOB, 80, 1.3), point(LOOP, 40, 1.5)]
    made = record(PLAIN, *rivals, point(TOGETHER, 20, 1.6))

    assert table.read_off_bytes(made, 30 * MIB, 100 * MIB) == (20 * MIB, 40 * MIB, 60 * MIB)
    assert table.read_off_bytes(made, 10 * MIB, 100 * MIB) == (20 * MIB, 40 * MIB, 60 * MIB)


def test_chosen_number_is_held_against_the_fastest_that_keeps_the_budget() -> None:
    fixed = [
        point(FIXED, 45, 1.10, 50, num_slices=2),
        replace(point(FIXED, 40, 1.16, 50, num_slices=4), name="four"),
        replace(point(FIXED, 55, 1.00, 50, num_slices=1), name="above its budget"),
    ]
    made = record(PLAIN, point(REMAT, 41, 1.17, 50, num_slices=4), point(REMAT, 80, 1.0, 80, num_slices=1), *fixed)

    (choice,) = table.choices(made)

    assert (choice.chosen, choice.fastest) == (4, 2)
    assert choice.ratio == pytest.approx(1.16 / 1.10)
    assert not choice.is_right
    assert replace(choice, ratio=1.03).is_right
    assert "0 of 1 budgets" in table.sentences([made])[-1]
    assert "--try-n" in table.sentences([record(PLAIN)])[-1]


# -- tables


def whole() -> Record:
    return record(
        PLAIN,
        point(LOOP, 40, 1.5, num_slices=4, gradient_error=1e-6),
        point(REMAT, 50, 1.05, 60, gradient_error=1e-6, compile_s=7.0),
        point(REMAT, None, None, 41, failure="refused: too little"),
        smallest_bytes=45 * MIB,
        is_splittable=True,
        notes=("2026-11-30; a machine",),
        clock="wall",
    )


def test_report_of_a_model_has_every_point_with_its_verdict() -> None:
    report = table.model_report(whole())

    assert [row[table.POINT_COLUMNS.index("verdict")] for row in report.rows] == [
        "-",
        "-",
        "fits",
        "refused, but a rival fits",
    ]
    assert report.rows[1][1] == "4"
    assert report.rows[2][-2:] == (whole().points[1].name, "0.700")
    assert any("45.0 MiB; the smallest of a rival is 40.0 MiB" in note for note in report.notes)
    assert report.notes[-1] == "2026-11-30; a machine"


def test_summary_and_the_block_of_readme_say_the_same(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- results:suite -->\nold\n<!-- /results:suite -->\nafter\n", encoding="utf-8")
    block = table.readme_block([whole()])

    table.write_readme(page, block)
    table.write_readme(page, block)

    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- results:suite -->\n| model |")
    assert text.endswith("\n<!-- /results:suite -->\nafter\n")
    assert "old" not in text
    assert "| m | 1 of 2 | 100.0 | 50.0 | 40.0 (" in text
    assert "Budgets met: 1 of 2. Refused or missed although a rival fits: 1 (promised: 0)." in text
    assert "Rises, measured peaks above that of a higher budget: 0 (promised: 0)." in text
    page.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no place for the results"):
        table.write_readme(page, block)


def test_readme_says_what_was_recorded() -> None:
    records = program.recorded(RESULTS / "suite.json")
    if not records:
        pytest.skip("no results of the suite were recorded")
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    _, _, rest = text.partition(f"<!-- {table.README_MARKER} -->")
    assert rest.partition(f"<!-- /{table.README_MARKER} -->")[0] == table.readme_block(records)


def test_results_are_tables_pictures_and_files(tmp_path: Path) -> None:
    curve = training.Curve(EAGER, EAGER, None, MIB, 0.0, (3.0, 2.0), (0.1, 0.1))

    program.write_results([replace(whole(), model="llama")], [curve], tmp_path)
    program.write_results([replace(whole(), model="gpt-sdpa")], [], tmp_path)

    text = (tmp_path / "suite.md").read_text(encoding="utf-8")
    assert text.index("(gpt-sdpa)") < text.index("(llama)")  # both runs, in the order of the list of models
    assert "Training to a loss" in text
    assert all("<svg" in (tmp_path / f"{n}.svg").read_text(encoding="utf-8") for n in ("suite", "suite-training"))
    assert {r.model for r in read_records(tmp_path / "suite.json")} == {"llama", "gpt-sdpa"}


# -- systems

TINY_SHAPE = GPTShape(2, 16, 2, 32, 4, 8)
LAYERS = Model(
    "layers", "layers", lambda: GroupedLayers(8, 2, 2), lambda: (torch.randn(4, 64, 8), torch.randn(4, 64, 8))
)
TINY = Model("tiny", "a tiny GPT", lambda: GPT(TINY_SHAPE), lambda: random_batch(TINY_SHAPE, 0))


class PerToken(nn.Module):
    """A mean over the targets that there are, with dropout: slices of another number of targets each."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding, self.head, self.dropout = nn.Embedding(16, 8), nn.Linear(8, 16), dropout

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), self.dropout, self.training)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten(), ignore_index=-100)


def masked() -> tuple[Tensor, Tensor]:
    tokens, lengths = torch.randint(16, (4, 8)), torch.tensor([[1], [8], [3], [8]])
    return tokens, tokens.masked_fill(torch.arange(8) >= lengths, -100)


def test_numbers_of_slices_are_powers_of_two_that_divide_the_batch() -> None:
    assert systems.slices_of(8) == (2, 4, 8)
    assert systems.slices_of(12) == (2, 4)
    assert systems.slices_of(4096)[-1] == systems.MAX_SLICES
    assert systems.slices_of(1) == ()


def test_no_two_systems_of_a_model_share_a_name() -> None:
    found, skipped = systems.rivals(GPT(TINY_SHAPE), 4)
    ours = [*under_budgets([50, 40], 100), *systems.in_fixed_numbers(50, 100, 4), *systems.in_fixed_numbers(40, 100, 4)]
    names = [contender.system.name for contender in (*found, *ours)]

    assert len(set(names)) == len(names)
    assert sum(c.family == KNOB for c in found) == 12
    assert [c.num_slices for c in found if c.family == LOOP] == [2, 4]
    assert len([c for c in found if c.family == TOGETHER]) == 2 * 3
    assert all("skipped" in text for text in skipped)
    assert len({c.family for c in systems.one_a_family(found)}) == len(systems.one_a_family(found))
    assert "not measured" in systems.rivals(PerToken(0.0).embedding, 4)[1][0]


@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_gradients_of_checkpointed_loops_are_compared_by_name(num_slices: int) -> None:
    module, batch = TINY.make()
    truth = reference_gradients(module, batch)
    contender = Contender(LOOP, System("loop"), prepare=checkpoint_blocks, num_slices=num_slices)

    trial = start(contender, module, batch)

    assert gradient_error(trial, truth) < 1e-5


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize("backend", [None, "eager"])
def test_fused_loss_has_the_same_gradients(backend: str | None) -> None:
    module, batch = TINY.make()
    truth = reference_gradients(module, batch)
    (contender, _), _ = systems.fused_losses(module)

    trial = start(replace(contender, system=System("fused", backend)), module, batch)

    assert gradient_error(trial, truth) < 1e-5
    assert F.cross_entropy.__name__ == "cross_entropy"
    torch._dynamo.reset()


def test_loops_over_unequal_numbers_of_targets_are_off() -> None:
    torch.manual_seed(0)
    batch = masked()
    model = Model("masked", "masked", lambda: PerToken(0.3), lambda: batch, is_exact=False)

    assert arrangement_error(model, 2) > 0.05
    assert arrangement_error(TINY, 2) < 1e-12
    assert arrangement_error(MODELS["gpt-dropout"], 4) < 1e-12  # its dropout is off while it is asked


class Redrawn(torch.autograd.Function):
    """Dropout whose backward draws another mask."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return F.dropout(gradient, 0.5)


class Drops(nn.Module):
    def __init__(self, drop: object) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 64), nn.Linear(64, 4), drop

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        assert callable(self.drop)
        return F.mse_loss(self.second(self.drop(self.first(x).tanh())), target)


def test_slope_shows_a_backward_that_draws_other_numbers() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(32, 8), torch.randn(32, 4))
    right, wrong = Drops(nn.Dropout(0.5)), Drops(Redrawn.apply)
    trial = start(Contender(EAGER, System(EAGER)), right, batch)
    before = copy.deepcopy(right.state_dict())

    assert slope_error(trial) < table.OFF_SLOPE
    assert all(torch.equal(value, before[name]) for name, value in right.state_dict().items())
    assert slope_error(start(Contender(EAGER, System(EAGER)), wrong, batch)) > table.OFF_SLOPE


def test_slope_of_attention_with_dropout_is_right() -> None:
    model = Model(
        "dropout",
        "dropout",
        lambda: LanguageModel([ExplicitAttention(16, 2, 0.1)], 16, 32, None),
        lambda: random_batch(TINY_SHAPE, 0),
        is_exact=False,
    )

    assert slope_error(start(Contender(EAGER, System(EAGER)), *model.make())) < table.OFF_SLOPE


# -- a record that grows


@pytest.fixture
def eager_compilers(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    """Every compiler runs its graphs as they are, so that a whole model takes a second."""
    monkeypatch.setenv("REMAT_LOWERING", "eager")
    kept = systems.rivals

    def rivals(model: nn.Module, num_samples: int) -> tuple[list[Contender], list[str]]:
        found, skipped = kept(model, num_samples)
        few = [c for c in systems.one_a_family(found) if c.family not in ("auto_chunker", KNOB)]
        return [replace(c, system=System(c.system.name)) for c in few], skipped

    monkeypatch.setattr(measure, "rivals", rivals)
    monkeypatch.setattr(measure, "plain", lambda: tuple(Contender(n, System(n)) for n in (EAGER, COMPILE)))
    monkeypatch.setattr(measure, "warm_inductor_up", lambda: None)


@pytest.mark.usefixtures("eager_compilers")
def test_a_model_is_measured_point_by_point_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, turns = tmp_path / "suite.json", Turns(tmp_path / "turns")
    settings = Settings(num_budgets=1, num_rounds=2, with_fixed=True, is_quick=True)

    rivals_alone = measure.measure_model(LAYERS, path, replace(settings, with_remat=False), turns)
    made = measure.measure_model(LAYERS, path, settings, turns)

    assert rivals_alone.points == made.points[: len(rivals_alone.points)]
    assert not {REMAT, FIXED} & {p.family for p in rivals_alone.points}
    assert made.failure == ""
    assert read_records(path) == (made,)
    assert made.is_splittable
    assert len(table.asked(made)) == 1
    assert all(p.step_ratio and p.measured_ms for p in made.points if not p.failure)
    assert all(p.gradient_error is not None and p.gradient_error < 1e-4 for p in made.points if not p.failure)
    assert {p.num_slices for p in made.family(FIXED)} == {1, 2, 4}
    assert next(p for p in made.points if p.family == LOOP).num_slices == 4
    # a rival that took the process down stays a failure, and only what was not measured yet is measured
    broken = replace(made.points[2], measured_bytes=None, failure=CRASHED)
    write_records(path, [replace(made, points=(*made.points[:2], broken, *made.points[3:-1]))])
    again = measure.measure_model(LAYERS, path, settings, turns)
    assert again.points[:-1] == (*made.points[:2], broken, *made.points[3:-1])
    assert again.points[-1].name == made.points[-1].name
    with pytest.raises(ValueError, match="by the wall clock, and cpu was asked for"):
        measure.measure_model(LAYERS, path, replace(settings, clock="cpu"), turns)


def test_the_others_stand_still_while_one_times(tmp_path: Path) -> None:
    counting = "import sys, time\nwhile True: print(1, flush=True); time.sleep(0.001)"
    turns, seen = Turns(tmp_path / "turns"), tmp_path / "seen"
    with seen.open("w") as out:
        other = subprocess.Popen([sys.executable, "-c", counting], stdout=out, start_new_session=True)
    try:
        turns.join()  # a group does not stop itself
        with turns.held() as file:
            file.write(f"{other.pid}\n")
        wait_for_growth(seen)
        with turns.alone():
            time.sleep(0.05)  # until the signal is there
            size = seen.stat().st_size
            time.sleep(0.1)
            assert seen.stat().st_size == size
        wait_for_growth(seen)
    finally:
        other.kill()
        other.wait()
    turns.tell(signal.SIGTERM)  # nobody is there any more


def wait_for_growth(path: Path) -> None:
    size, deadline = path.stat().st_size, time.monotonic() + 60
    while path.stat().st_size == size:
        assert time.monotonic() < deadline, f"{path.name} does not grow"
        time.sleep(0.01)


def test_a_run_that_is_stopped_leaves_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = Bench(TINY, tmp_path / "suite.json", Settings(), record(), None, Turns(tmp_path / "turns"))
    seen: list[Point] = []

    def stop(contender: Contender) -> Point:
        seen.extend(read_records(bench.path)[0].points)
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "_measured", lambda self, contender: stop(contender))
    with pytest.raises(KeyboardInterrupt):
        bench.add(Contender(LOOP, System(LOOP)))

    assert [p.failure for p in seen] == [CRASHED]  # what a crash would have left
    assert read_records(bench.path)[0].points == ()


def test_points_are_forgotten_to_be_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    made = replace(whole(), points=(*whole().points, point(KNOB, None, failure=CRASHED)))
    kept = {"remat": [COMPILE, LOOP, KNOB], "failed": [COMPILE, LOOP, REMAT, REMAT], "all": []}

    for again, families in kept.items():
        write_records(path, [made])
        measure.without(path, "m", again)
        assert [p.family for p in read_records(path)[0].points] == families
    assert read_records(path)[0].clock == ""  # of the last, so that another clock may be used
    assert read_records(path)[0].smallest_bytes is None
    measure.without(path, "not there", "all")


def test_a_model_goes_on_after_a_crash_of_one_system_and_not_of_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, runs = tmp_path / "suite.json", []

    class Ended:
        def __init__(self, returncode: int) -> None:
            self.returncode = returncode

    def run(command: list[str], **_: object) -> Ended:
        runs.append(command)
        crashed = tuple(replace(point(KNOB, None), name=f"k{n}", failure=CRASHED) for n in range(min(len(runs), 2)))
        write_records(path, [replace(record(*crashed), model="llama")])
        return Ended(-11)

    monkeypatch.setattr(program.subprocess, "run", run)

    found = program.measured(MODELS["llama"], path, Turns(tmp_path / "turns"), [], "wall")

    assert len(runs) == 3  # the third made no progress
    assert found.failure == "the measurement ended with signal 11"
    assert len(found.points) == 2


# -- training


def test_text_is_the_licence_and_batches_are_its_passages() -> None:
    text, num_different = characters()
    tokens, following = passages(torch.Generator().manual_seed(1))

    assert len(text) > 10_000
    assert int(text.max()) + 1 == num_different
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    module, batch = CHARACTERS.make()
    assert module(*batch).isfinite()


def test_target_is_reached_by_the_mean_of_the_last_losses() -> None:
    falling = [3.0] * 5 + [1.0] * 20

    assert training.steps_to_target(falling, 1.0) == 15
    assert training.steps_to_target(falling, 2.0) == 10
    assert training.steps_to_target(falling, 0.9) is None
    assert training.steps_to_target([0.1] * 9, 1.0) is None


def test_a_loop_learns_what_the_whole_step_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "passages", lambda generator: random_batch(TINY_SHAPE, generator.initial_seed()))
    clock = measure.CLOCKS["wall"]
    eager = training.train(Contender(EAGER, System(EAGER)), TINY, clock, max_steps=12)
    loop = training.train(Contender(LOOP, System(LOOP), num_slices=2), TINY, clock, max_steps=12)

    assert len(eager.losses) == len(eager.steps_s) == 12
    assert eager.losses[-1] < eager.losses[0]
    assert training.largest_difference(loop, eager) < 1e-4
    assert training.train(Contender(EAGER, System(EAGER)), TINY, clock, target=9.0).num_steps is None  # by TARGET
    rows = training.training_report([eager, loop], ()).rows
    assert rows[1][3] == "not reached"
    training.write_curves(tmp_path / "curves.json", {c.system: c for c in (eager, loop)})
    assert tuple(training.read_curves(tmp_path / "curves.json").values()) == (eager, loop)
