"""The demo on a small scale: the same training in both ways, and a table and a picture of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

import remat_compiler.backend
from benchmarks import demo
from benchmarks.demo import Training
from benchmarks.harness import System
from benchmarks.models import GPTShape, build_gpt

NUM_STEPS = 4
SHAPE = GPTShape(num_layers=2, width=32, num_heads=2, vocabulary=256, batch=8, tokens=64)
SYSTEMS = (System("eager"), System("remat", "remat", {"memory_budget": "60%", "lowering": "eager"}))


@pytest.fixture(scope="module")
def trainings() -> list[Training]:
    return demo.train(SYSTEMS, SHAPE, NUM_STEPS)


def test_loss_curves_agree_within_float_error(trainings: list[Training]) -> None:
    eager, remat = trainings

    assert len(eager.losses) == NUM_STEPS
    assert remat.losses == pytest.approx(eager.losses, rel=demo.LOSS_TOLERANCE)
    assert demo.loss_difference(trainings) <= demo.LOSS_TOLERANCE


def test_training_learns(trainings: list[Training]) -> None:
    assert trainings[0].losses[-1] < trainings[0].losses[0]


def test_remat_keeps_its_budget_and_eager_would_not(trainings: list[Training]) -> None:
    eager, remat = trainings

    assert remat.plan is not None
    assert remat.plan.budget_bytes is not None
    assert remat.memory.peak_bytes <= remat.plan.budget_bytes < eager.memory.peak_bytes


def test_conclusions_name_a_broken_promise(trainings: list[Training]) -> None:
    kept, sentences = demo.conclusions(trainings)
    eager, remat = trainings
    apart = dataclasses.replace(remat, losses=tuple(loss * 1.01 for loss in remat.losses))
    broken, complaints = demo.conclusions([eager, apart])

    assert kept
    assert "curves agree" in sentences[0]
    assert "kept" in sentences[1]
    assert not broken
    assert "DO NOT AGREE" in complaints[0]


def test_table_has_a_line_for_each_way(trainings: list[Training]) -> None:
    console = Console(width=120, record=True, quiet=False)
    console.print(demo.table(trainings, SHAPE).to_table())
    text = console.export_text()

    assert all(training.name in text for training in trainings)
    assert f"{trainings[1].losses[-1]:.4f}" in text


def test_picture_is_written(trainings: list[Training], tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "memory.png"

    demo.draw(trainings, path)

    assert path.read_bytes().startswith(b"\x89PNG")


def test_batches_are_the_same_every_time() -> None:
    first, second = (list(demo.batches(demo.help_text(), SHAPE, 2, seed=0)) for _ in range(2))

    assert all((a == b).all() for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))
    idx, targets = first[0]
    assert (idx[:, 1:] == targets[:, :-1]).all()


def test_parameters_of_the_demo_are_counted() -> None:
    model = build_gpt(demo.SHAPE, seed=0)

    assert sum(parameter.numel() for parameter in model.parameters()) == demo.SHAPE.num_parameters == 4_935_680


def test_backend_is_the_one_that_torch_finds() -> None:
    assert callable(remat_compiler.backend.remat)
