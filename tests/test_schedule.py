"""The order of both sides: operands first, and what is recomputed right before the first op that needs it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from graphs import JointBuilder, Staged, chain, saving, staged, trace, value_of
from torch import Tensor, nn

from remat_passes.cut import Cut, between, cut_of_saved, sweep
from remat_passes.joint import JointGraph, Role, Side
from remat_passes.ops import OpKind
from remat_passes.schedule import Schedule, schedule

aten = torch.ops.aten


def names(joint: JointGraph, order: tuple[int, ...]) -> list[str]:
    return [joint.values[index].name for index in order]


# -- by hand ----------------------------------------------------------------------------------------------------------


def chain_order(*saved: str) -> tuple[list[str], list[str]]:
    joint = chain(3, 4, aten.exp.default)
    order = schedule(joint, saving(staged(joint).problem, joint, *saved), early=True)
    return names(joint, order.forward), names(joint, order.backward)


E0, E1, E2 = "exp_default", "exp_default_1", "exp_default_2"
M0, M1, M2 = "mul_tensor", "mul_tensor_1", "mul_tensor_2"


def test_nothing_is_recomputed_where_everything_is_saved() -> None:
    assert chain_order(E0, E1, E2) == ([E0, E1, E2], [M0, M1, M2])


def test_a_recomputed_value_comes_right_before_its_first_reader() -> None:
    assert chain_order(E1, E2) == ([E0, E1, E2], [M0, M1, E0, M2])
    assert chain_order(E0, E2) == ([E0, E1, E2], [M0, E1, M1, M2])


def test_a_recomputed_chain_comes_right_before_the_reader_of_its_end() -> None:
    assert chain_order(E2) == ([E0, E1, E2], [M0, E0, E1, M1, M2])
    assert chain_order() == ([E0, E1, E2], [E0, E1, E2, M0, M1, M2])


def test_what_only_backward_wants_does_not_run_in_forward() -> None:
    joint = trace(lambda x: x.sin().sum(), torch.ones(4, requires_grad=True)).joint
    graph = staged(joint)
    recomputed = schedule(joint, saving(graph.problem, joint), early=True)
    saved = schedule(joint, saving(graph.problem, joint, "cos"), early=True)

    assert "cos" not in names(joint, recomputed.forward)
    assert names(joint, recomputed.backward)[:2] == ["expand", "cos"]
    assert "cos" in names(joint, saved.forward)
    assert "cos" not in names(joint, saved.backward)


def test_forward_leaves_out_what_nobody_reads() -> None:
    build = JointBuilder()
    x = build.primal(4)
    build.call(aten.exp.default, x)
    joint = build.joint([build.call(aten.neg.default, x)], [])

    assert names(joint, schedule(joint, cut_of_saved(staged(joint).problem, frozenset()), early=True).forward) == [
        "neg_default"
    ]


def test_what_only_backward_needs_is_computed_where_its_operands_end() -> None:
    """The slope of an activation, saved instead of what it is made from."""
    build = JointBuilder()
    x, tangent = build.primal(4), build.tangent(4)
    before = build.call(aten.exp.default, x)
    after = build.call(aten.neg.default, before)
    out = build.call(aten.abs.default, after)
    slope = build.call(aten.cos.default, build.call(aten.sin.default, before))
    joint = build.joint([out], [build.call(aten.mul.Tensor, tangent, slope)])
    graph = staged(joint)

    order = names(joint, schedule(joint, saving(graph.problem, joint, "cos_default"), early=True).forward)
    assert order == ["exp_default", "neg_default", "sin_default", "cos_default", "abs_default"]


def test_a_change_in_place_runs_in_forward_after_what_reads_the_old_value() -> None:
    build = JointBuilder()
    x, y = build.primal(4), build.primal(4)
    scale = build.call(aten.exp.default, x)
    build.call(aten.copy_.default, x, build.call(aten.neg.default, x))
    out = build.call(aten.mul.Tensor, y, scale)
    joint = build.joint([out], [])
    order = names(joint, schedule(joint, cut_of_saved(staged(joint).problem, frozenset()), early=True).forward)

    assert order == ["exp_default", "neg_default", "copy__default", "mul_tensor"]


def test_a_gradient_that_is_a_forward_value_is_computed_last() -> None:
    build = JointBuilder()
    x, tangent = build.primal(4), build.tangent(4)
    both = build.call(aten.exp.default, x)
    joint = build.joint([build.call(aten.neg.default, both)], [build.call(aten.neg.default, tangent), both])
    graph = staged(joint)

    assert names(joint, schedule(joint, saving(graph.problem, joint), early=True).backward) == [
        "neg_default_1",
        "exp_default",
    ]
    assert names(joint, schedule(joint, saving(graph.problem, joint, "exp_default"), early=True).backward) == [
        "neg_default_1"
    ]


# -- for every decision on traced steps -------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.grow(self.norm(x))) * torch.exp(self.seen).sum()
        self.seen.add_(1)
        return x + F.dropout(self.shrink(h), 0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.blocks(x)
        return y.softmax(-1), y.topk(2).values


@pytest.fixture(scope="module")
def graph() -> Staged:
    return staged(trace(Net(), torch.ones(4, 8)))


@pytest.fixture(scope="module")
def cuts(graph: Staged) -> list[Cut]:
    """The hull, the points between, and random decisions."""
    found = sweep(graph.problem, 20).vertices
    chance = random.Random(0)
    must = {i for i, value in enumerate(graph.problem) if value.recompute_ps is None and value.save_ps is not None}
    may = [i for i, value in enumerate(graph.problem) if value.save_ps is not None]
    drawn = [must | {i for i in may if chance.random() < share} for share in (0.1, 0.3, 0.5, 0.8) for _ in range(5)]
    cuts = [*found, *(cut for pair in itertools.pairwise(found) for cut in between(graph.problem, *pair))]
    return cuts + [cut_of_saved(graph.problem, frozenset(saved)) for saved in drawn]


def there_before(joint: JointGraph, cut: Cut, *, is_backward: bool) -> set[int]:
    inputs = {value.index for value in joint.values if value.kind is OpKind.INPUT}
    return inputs | (set(cut.saved) if is_backward else set())


def assert_operands_first(joint: JointGraph, order: tuple[int, ...], there: set[int]) -> None:
    for index in order:
        missing = [joint.values[source].name for source in joint.values[index].inputs if source not in there]
        assert not missing, f"{joint.values[index].name} runs before {missing}"
        there.add(index)


def test_operands_precede_their_readers(graph: Staged, cuts: list[Cut]) -> None:
    assert len(cuts) > 20
    for cut in cuts:
        order = schedule(graph.joint, cut, early=True)
        assert_operands_first(graph.joint, order.forward, there_before(graph.joint, cut, is_backward=False))
        assert_operands_first(graph.joint, order.backward, there_before(graph.joint, cut, is_backward=True))


def test_each_value_runs_once_a_side_and_nothing_is_left_out(graph: Staged, cuts: list[Cut]) -> None:
    joint = graph.joint
    backward = {value.index for value in joint.values if value.side is Side.BACKWARD and value.role is Role.NONE}
    effects = {value.index for value in joint.values if value.kind is OpKind.EFFECT}
    for cut in cuts:
        order = schedule(joint, cut, early=True)
        assert len(set(order.forward)) == len(order.forward)
        assert len(set(order.backward)) == len(order.backward)
        assert set(order.backward) == backward | cut.redo
        assert effects <= set(order.forward)
        assert set(joint.forward_outputs) <= set(order.forward)
        assert {i for i in cut.saved if joint.values[i].role is Role.NONE} <= set(order.forward)


def test_forward_keeps_its_order(graph: Staged, cuts: list[Cut]) -> None:
    for cut in cuts:
        order = schedule(graph.joint, cut, early=True)
        own = [index for index in order.forward if graph.joint.values[index].side is Side.FORWARD]
        assert own == sorted(own)
        backward = [index for index in order.backward if graph.joint.values[index].side is Side.BACKWARD]
        assert backward == sorted(backward)


def recomputed_operands(joint: JointGraph, cut: Cut, target: int) -> set[int]:
    """What the op needs that is recomputed, at any depth."""
    found: set[int] = set()
    stack = list(joint.values[target].inputs)
    while stack:
        index = stack.pop()
        if index in cut.redo and index not in found:
            found.add(index)
            stack.extend(joint.values[index].inputs)
    return found


def assert_as_late_as_possible(joint: JointGraph, cut: Cut, order: Schedule) -> None:
    waiting: list[int] = []
    for index in order.backward:
        if index in cut.redo:
            waiting.append(index)
            continue
        wanted = recomputed_operands(joint, cut, index)
        early = [joint.values[i].name for i in waiting if i not in wanted]
        assert not early, f"{early} need not run before {joint.values[index].name}"
        waiting.clear()
    assert set(waiting) <= set(joint.backward_outputs) | set().union(
        *(recomputed_operands(joint, cut, i) for i in joint.backward_outputs)
    )


def test_recomputed_values_come_right_before_the_first_op_that_needs_them(graph: Staged, cuts: list[Cut]) -> None:
    for cut in cuts:
        assert_as_late_as_possible(graph.joint, cut, schedule(graph.joint, cut, early=True))


def test_random_numbers_and_changes_in_place_run_in_forward_only(graph: Staged, cuts: list[Cut]) -> None:
    once = {v.index for v in graph.joint.values if v.op.startswith("aten.rand") or v.kind is OpKind.EFFECT}
    assert len(once) == 4  # two dropouts, two buffers
    for cut in cuts:
        order = schedule(graph.joint, cut, early=True)
        assert once <= set(order.forward)
        assert not once & set(order.backward)


def test_a_saved_input_is_no_op_of_either_side(graph: Staged, cuts: list[Cut]) -> None:
    inputs = {value.index for value in graph.joint.values if value.kind is OpKind.INPUT}
    for cut in cuts:
        order = schedule(graph.joint, cut, early=True)
        assert not inputs & {*order.forward, *order.backward}
    assert value_of(graph.joint, "primals_1").index in inputs
