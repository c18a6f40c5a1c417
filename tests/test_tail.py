"""The tail of a step in slices: what follows the last product, with the rest of the step whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from microbatch_programs import (
    BATCH,
    CLASSES,
    LOSSES,
    TIME,
    WIDTH,
    Step,
    TiedWeights,
    flat_cross_entropy,
    ragged_labels,
)
from oracle import FP64, Program, assert_same, run_eager, run_remat
from torch import Tensor, nn

import remat_compiler
from remat_compiler import partitioner
from remat_compiler.weighing import UNSPLIT, Way
from remat_passes.plan import RematPlan

pytestmark = pytest.mark.usefixtures("fresh_compiler")

AMPLE = "8GiB"


@pytest.fixture
def only_tails(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Take the tail in so many slices wherever there is one."""

    def only(num_slices: int) -> None:
        monkeypatch.setattr(
            partitioner, "ladders", lambda axes: [[Way("tail", num_slices) if "tail" in axes else UNSPLIT]]
        )

    return only


def narrow(hidden: int = 3) -> nn.Module:
    """A network whose last layer makes its input more than twice as wide."""
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))


def program_of(loss: str, net: Callable[[], nn.Module] = narrow, batch: int = BATCH) -> Program:
    return Program(
        lambda: Step(net(), LOSSES[loss].of),
        lambda: (torch.randn(batch, TIME, WIDTH), *LOSSES[loss].targets(batch, TIME, CLASSES)),
    )


def checked(program: Program, **options: object) -> RematPlan:
    """The plan of a step that leaves what the same step leaves in eager mode, gradient by gradient."""
    (found,), (expected,) = run_remat(program, memory_budget=AMPLE, **options), run_eager(program)
    assert_same(found, expected, FP64)
    return remat_compiler.plans()[-1]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_the_same(only_tails: Callable[[int], None], loss: str) -> None:
    only_tails(3)
    plan = checked(program_of(loss))
    # These take sums of the batch that the rest of the step needs, or weights, or positions across rows.
    if plan.microbatches is None:
        assert loss in {"smooth l1 and activity"}
        return
    assert plan.microbatches.part == "tail"
    assert sum(plan.microbatches.lengths) == plan.microbatches.batch
    assert plan.num_microbatches == 3


@pytest.mark.parametrize("num_slices", [2, 5, BATCH])
def test_slices_of_any_number(only_tails: Callable[[int], None], num_slices: int) -> None:
    only_tails(num_slices)
    plan = checked(program_of("cross entropy, ignore_index"))
    assert plan.microbatches is not None
    assert len(plan.microbatches.lengths) == num_slices


def test_tied_weights_get_the_gradient_of_both_uses(only_tails: Callable[[int], None]) -> None:
    class Tied(TiedWeights):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(40, WIDTH)

    def tokens() -> tuple[Tensor, ...]:
        return torch.randint(0, 40, (BATCH, TIME)), torch.randint(0, 40, (BATCH, TIME))

    only_tails(4)
    plan = checked(Program(lambda: Step(Tied(), lambda step, logits, y: flat_cross_entropy(logits, y)), tokens))
    assert plan.microbatches is not None


def test_inputs_that_are_their_own_labels(only_tails: Callable[[int], None]) -> None:
    """The tokens are read by the embedding, which stays whole, and by the loss, which does not."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40)

        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.head(torch.tanh(self.embedding(tokens)))
            return flat_cross_entropy(logits[:, :-1], tokens[:, 1:])

    only_tails(4)
    plan = checked(Program(Shifted, lambda: (torch.randint(0, 40, (BATCH, TIME)),)))
    assert plan.microbatches is not None


def test_one_long_sequence_is_split_by_its_tokens(only_tails: Callable[[int], None]) -> None:
    def loss(step: Step, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    only_tails(4)
    program = Program(lambda: Step(narrow(), loss), lambda: (torch.randn(1, 24, WIDTH), *ragged_labels(1, 24, CLASSES)))
    plan = checked(program)
    assert plan.microbatches is not None
    assert plan.microbatches.batch == 24


def test_a_step_with_other_outputs_loops_in_backward_too(only_tails: Callable[[int], None]) -> None:
    def loss(step: Step, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return flat_cross_entropy(logits, y), logits.square().mean()

    only_tails(4)
    program = Program(
        lambda: Step(narrow(), loss), lambda: (torch.randn(BATCH, TIME, WIDTH), *ragged_labels(BATCH, TIME, CLASSES))
    )
    plan = checked(program)
    assert plan.microbatches is not None
    assert plan.microbatches.runs_in == "forward and backward"


def test_float32_gradients_are_no_less_exact(only_tails: Callable[[int], None]) -> None:
    only_tails(4)
    program = program_of("cross entropy, ignore_index").in_dtype(torch.float32)
    (found,), (expected,) = run_remat(program, memory_budget=AMPLE), run_eager(program)
    assert_same(found, expected, 1e-5)


def test_a_large_vocabulary_takes_the_tail_by_itself() -> None:
    """With logits that weigh more than all the rest, only they are run in slices, and the budget is kept."""

    def tokens() -> tuple[Tensor, ...]:
        return torch.randint(0, 3000, (8, 16)), torch.randint(0, 3000, (8, 16))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(3000, 8)
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3))
            )
            self.head = nn.Linear(8, 3000)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return flat_cross_entropy(self.head(self.layers(self.embedding(x))), y)

    program = Program(Model, tokens)
    (found,), (expected,) = run_remat(program, memory_budget="35%"), run_eager(program)
    assert_same(found, expected, FP64)
    plan = remat_compiler.plans()[-1]
    assert plan.microbatches is not None
    assert plan.microbatches.part == "tail"
    assert plan.budget_bytes is not None
    assert plan.projected_peak_bytes <= plan.budget_bytes
    (measured,) = remat_compiler.plan_log.measured_peaks()[-1:]
    assert measured is not None
    assert measured <= plan.budget_bytes
