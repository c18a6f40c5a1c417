"""Values that are computed more than once: the unrolled graph is a joint graph, and its steps are right.

A fault here is silent by nature: a copy that reads the wrong pass is the same number all the same, in more memory; and
one that draws its random numbers anew is a wrong gradient. So the graph is checked value by value, its replay against
the table that asked for it, and whole steps against eager ones in fp64, with their memory measured.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from graphs import JointBuilder, Staged, choose, staged, trace, unrolled_problem, values_of
from oracle import (
    FP64,
    Outcome,
    Program,
    assert_close,
    assert_same,
    budgets_between,
    compiled,
    rows,
    run_at,
    run_eager,
    run_steps,
    smallest_peak,
)
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import remat_compiler
from remat_compiler.measure import measure_peak
from remat_passes.again import BACKWARD_PASS, Unrolled, repetition_of, unroll
from remat_passes.chain import Chain, ChainPlan, Drop, Hold
from remat_passes.cut import Cut, cut_of_saved, without_dead_ends
from remat_passes.holds import Holds, boundaries, holds
from remat_passes.joint import JointGraph, Side
from remat_passes.memory import Projection
from remat_passes.plan import RematPlan
from remat_passes.schedule import schedule

aten = torch.ops.aten
COPY = re.compile(r"_again$|_pass\d+$")

# How far the replay of a plan may lie above the memory that the table was asked for: the table takes what a block needs
# from replays of other decisions (docs/decisions/0006-the-chain.md says "within a few percent").
TABLE_ERROR = 0.08


# What a step in the eager lowering takes beyond the budget at most: ATen's CPU ops wrap a Python number in a tensor of
# 8 bytes, two where the op casts it, and the memory model does not count those. Five such ops can follow one another
# before the first of them is freed; a tensor of the networks here has 32 KiB or more.
NUMBERS = 5 * 16

# -- graphs -----------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Equal layers of a product and a GELU, with dropout behind each where ``drop`` says so, and a scalar loss."""

    def __init__(self, num_layers: int, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(num_layers))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), self.drop)
        return x.square().mean()


@torch.library.custom_op("remat_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """A user's op: nothing says that it gives the same again."""
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def products(
    num_layers: int, special: Mapping[int, Callable[[JointBuilder, fx.Node], fx.Node]] | None = None
) -> JointGraph:
    """``h = exp(h @ w)`` with the gradients of all weights; ``special`` has more to do with some layers' results."""
    build = JointBuilder()
    h = build.primal(256, 32)
    weights = [build.primal(32, 32) for _ in range(num_layers)]
    gradient = build.tangent(256, 32)
    layers: list[tuple[fx.Node, fx.Node, fx.Node]] = []
    for number, w in enumerate(weights):
        before, h = h, build.call(aten.exp.default, build.call(aten.mm.default, h, w))
        if special and number in special:
            h = special[number](build, h)
        layers.append((before, w, h))
    gradients = []
    for before, w, after in reversed(layers):
        gradient = build.call(aten.mul.Tensor, gradient, after)
        gradients.append(build.call(aten.mm.default, build.call(aten.t.default, before), gradient))
        gradient = build.call(aten.mm.default, gradient, build.call(aten.t.default, w))
    return build.joint([build.call(aten.sum.default, h)], gradients, static=range(1, num_layers + 1))


def drawn(build: JointBuilder, h: fx.Node) -> fx.Node:
    """Dropout from the generator: the second draw would be another one."""
    return build.call(operator.getitem, build.call(aten.native_dropout.default, h, 0.5, True), 0)


def must_save(build: JointBuilder, h: fx.Node) -> fx.Node:
    return build.call(aten.sin.default, h, recompute=CheckpointPolicy.MUST_SAVE)


def custom(build: JointBuilder, h: fx.Node) -> fx.Node:
    return build.call(torch.ops.remat_tests.halved.default, h)


def viewed(build: JointBuilder, h: fx.Node) -> fx.Node:
    """Views of a value, one shown by the other, and back to its shape."""
    flat = build.call(aten.view.default, build.call(aten.t.default, h), [32, 256])
    return build.call(aten.exp.default, build.call(aten.t.default, flat))


GRAPHS: dict[str, Callable[[], Staged]] = {
    "products": lambda: staged(products(10)),
    "products, fused": lambda: staged(products(10), fuses=True),
    "views": lambda: staged(products(9, dict.fromkeys(range(1, 9, 2), viewed))),
    "random draws": lambda: staged(products(10, {3: drawn, 6: drawn})),
    "must save": lambda: staged(products(10, {3: must_save, 6: must_save})),
    "custom op": lambda: staged(products(10, {3: custom, 6: custom})),
    "every second a custom op": lambda: staged(products(12, dict.fromkeys(range(0, 12, 2), custom))),
    "traced": lambda: staged(trace(Layers(7), torch.ones(256, 32))),
    "traced, fused": lambda: staged(trace(Layers(7), torch.ones(256, 32)), fuses=True),
    "traced, dropout": lambda: staged(trace(Layers(7, drop=0.2), torch.ones(256, 32)), fuses=True),
}
graphs = pytest.mark.parametrize("name", GRAPHS)


# -- plans and what they unroll to ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeating:
    """A plan of the chain, the graph that it asks for, and the decision in it."""

    graph: Staged
    held: Holds
    plan: ChainPlan
    room_bytes: int  # what the table was asked for, above the baseline
    unrolled: Unrolled
    cut: Cut

    @property
    def projection(self) -> Projection:
        return replace(self.graph.model, joint=self.unrolled.joint).project(self.cut)


@functools.cache
def repeating(name: str) -> tuple[Repeating, ...]:
    """Every plan of the graph's chain that computes something once more."""
    graph = GRAPHS[name]()
    problem = without_dead_ends(graph.problem)
    held = holds(graph.joint, problem, graph.model, boundaries(graph.joint, problem), max_cuts=8)
    assert held is not None
    table = Chain(held.blocks, num_units=256, unit_bytes=-(-held.largest_bytes // 256))
    found = []
    for units in table.breakpoints():
        plan = table.plan(units)
        unrolled = unroll(graph.joint, problem, held.chain, held.always_saved, plan)
        if len(unrolled.origin) > len(graph.joint.values):
            cut = cut_of_saved(unrolled_problem(problem, unrolled), unrolled.saved)
            found.append(Repeating(graph, held, plan, units * table.unit_bytes, unrolled, cut))
    return tuple(found)


def passes_over(plan: ChainPlan, block: int) -> int:
    """How often a plan goes over a block, backward not counted."""
    for step in plan.steps:
        if isinstance(step, Hold) and step.first <= block < step.first + step.option.span:
            return 1
        if isinstance(step, Drop) and step.first <= block < step.until:
            return 1 + passes_over(step.again, block)
    raise AssertionError(f"block {block} is left out")


def num_computed(case: Repeating) -> Counter[int]:
    """How often a step computes each value of the original graph."""
    order = schedule(case.unrolled.joint, case.cut, early=False)
    return Counter(case.unrolled.origin[i] for i in (*order.forward, *order.backward))


@graphs
def test_plans_repeat_and_nest(name: str) -> None:
    """Else nothing below says anything."""
    depths = {
        max(passes_over(case.plan, block) for block in range(case.held.chain.num_blocks)) for case in repeating(name)
    }
    assert max(depths) >= 3, depths


@graphs
def test_the_graph_is_a_joint_graph(name: str) -> None:
    for case in repeating(name):
        joint, original, origin = case.unrolled.joint, case.graph.joint, case.unrolled.origin
        readers: dict[int, set[int]] = {value.index: set() for value in joint.values}
        for place, value in enumerate(joint.values):
            assert value.index == place
            assert all(i < place for i in value.inputs), f"{value.name} is computed before what it reads"
            assert tuple(origin[i] for i in value.inputs) == original.values[origin[place]].inputs
            assert joint.nodes[place] is original.nodes[origin[place]]
            for operand in value.inputs:
                readers[operand].add(place)
        assert all(set(value.users) == readers[value.index] for value in joint.values)
        assert all(list(value.users) == sorted(set(value.users)) for value in joint.values)
        names = [value.name for value in joint.values]
        assert len(set(names)) == len(names)


@graphs
def test_views_show_the_storage_of_their_own_operand(name: str) -> None:
    for case in repeating(name):
        joint, original, origin = case.unrolled.joint, case.graph.joint, case.unrolled.origin
        for value in joint.values:
            old = original.values[origin[value.index]]
            assert origin[value.base] == old.base
            if old.base == old.index:
                assert value.base == value.index
            else:
                assert value.base in {joint.values[i].base for i in value.inputs}


@graphs
def test_what_the_step_hands_in_and_out_is_the_same(name: str) -> None:
    for case in repeating(name):
        joint, original, origin = case.unrolled.joint, case.graph.joint, case.unrolled.origin
        assert tuple(origin[i] for i in joint.forward_outputs) == original.forward_outputs
        assert tuple(origin[i] for i in joint.backward_outputs) == original.backward_outputs
        assert not any(joint.values[i].is_copy for i in joint.forward_outputs)
        for found, expected in (
            (joint.static_inputs, original.static_inputs),
            (joint.trained_inputs, original.trained_inputs),
            (joint.mutated_inputs, original.mutated_inputs),
        ):
            assert {origin[i] for i in found} == expected
            assert len(found) == len(expected)


@graphs
def test_what_may_not_be_repeated_is_there_once(name: str) -> None:
    for case in repeating(name):
        original = case.graph.joint
        times = Counter(case.unrolled.origin)
        assert set(times) == {value.index for value in original.values}, "nothing is lost"
        for value in original.values:
            permission = case.graph.permissions[value.index]
            if value.side is Side.BACKWARD or not value.inputs or permission.no_recompute:
                assert times[value.index] == 1, value.name
        computed = num_computed(case)
        once = [v.index for v in original.values if v.side is Side.BACKWARD or permission_bars(case, v.index)]
        assert all(computed[index] <= 1 for index in once)


def permission_bars(case: Repeating, index: int) -> bool:
    return bool(case.graph.permissions[index].no_recompute)


@pytest.mark.parametrize(
    ("name", "op", "count"),
    [
        ("random draws", "aten.native_dropout.default", 2),
        ("must save", "aten.sin.default", 2),
        ("custom op", "remat_tests.halved.default", 2),
        ("traced, dropout", "aten.rand.default", 7),
    ],
)
def test_these_ops_are_there_once(name: str, op: str, count: int) -> None:
    """The rule above, said by op: a fault in the permissions must not hide one here."""
    for case in repeating(name):
        assert len(values_of(case.graph.joint, op)) == count
        assert len(values_of(case.unrolled.joint, op)) == count
        assert all(num_computed(case)[value.index] == 1 for value in values_of(case.graph.joint, op))


@graphs
def test_copies_are_called_copies_and_only_they(name: str) -> None:
    for case in repeating(name):
        seen: set[int] = set()
        for value in case.unrolled.joint.values:
            old = case.graph.joint.values[case.unrolled.origin[value.index]]
            assert value.is_copy == (value.name != old.name) == bool(COPY.search(value.name))
            assert value.side is (Side.EITHER if value.is_copy else old.side)
            assert value.repetition == repetition_of(value.name)
            assert value.is_copy or old.index not in seen
            seen.update([] if value.is_copy else [old.index])


@pytest.mark.parametrize("name", ["products", "products, fused", "traced", "traced, fused"])
def test_the_passes_of_the_plan_are_what_runs(name: str) -> None:
    """A product of a block runs once in each pass over it, and at most once more in the block's backward."""
    most = Counter[int]()
    for case in repeating(name):
        computed = num_computed(case)
        for value in case.graph.joint.values:
            block = case.held.chain.block_of[value.index]
            if value.side is not Side.FORWARD or value.op not in ("aten.mm.default", "aten.addmm.default"):
                continue
            assert block is not None
            passes = passes_over(case.plan, block)
            assert max(1, passes - 1) <= computed[value.index] <= passes + 1, (value.name, passes)
            most[value.index] = max(most[value.index], computed[value.index])
    assert max(most.values()) >= 3


@graphs
def test_the_replay_is_as_small_as_the_table_said(name: str) -> None:
    """What may not be repeated is kept through a drop, and counts: without that it was up to four times as much."""
    for case in repeating(name):
        above = case.projection.peak_bytes - case.graph.model.baseline_bytes
        assert above <= case.room_bytes * (1 + TABLE_ERROR)


@graphs
def test_a_decision_can_be_told_on_the_original_graph(name: str) -> None:
    for case in repeating(name):
        told = case.unrolled.on_original(case.cut)
        assert told.saved == {case.unrolled.origin[i] for i in case.cut.saved}
        assert told.saved_bytes == case.cut.saved_bytes
        assert not told.saved & told.redo
        assert max(told.need) < len(case.graph.joint.values)


def test_the_first_of_two_layers_by_hand() -> None:
    """Three blocks, of which the first two are dropped and passed over again, the first of them once more."""
    graph = staged(products(3))
    problem = without_dead_ends(graph.problem)
    held = holds(graph.joint, problem, graph.model, boundaries(graph.joint, problem), max_cuts=8)
    assert held is not None
    assert held.chain.num_blocks >= 3
    options = [min((o for o in block.options if o.span == 1), key=lambda o: o.held_bytes) for block in held.blocks]
    last = tuple(Hold(k, options[k]) for k in range(2, held.chain.num_blocks))
    inner = ChainPlan((Drop(0, 1, ChainPlan((Hold(0, options[0]),))), Hold(1, options[1])))
    unrolled = unroll(graph.joint, problem, held.chain, held.always_saved, ChainPlan((Drop(0, 2, inner), *last)))
    names = {value.name for value in unrolled.joint.values if value.is_copy}
    first, second = (
        {v.name for v in graph.joint.values if held.chain.block_of[v.index] == k and v.side is not Side.BACKWARD}
        for k in (0, 1)
    )

    assert first
    assert second
    assert {COPY.sub("", name) for name in names} <= first | second
    assert {name for name in first if f"{name}_pass1" in names}, "the second pass goes over the first block"
    assert BACKWARD_PASS not in {repetition_of(name) for name in names}
    saved = {unrolled.origin[i] for i in unrolled.saved}
    kept = {i for step in last for i in step.option.held}
    assert kept <= saved <= kept | held.always_saved, "the blocks that are dropped keep nothing"


def test_names_without_a_pass() -> None:
    assert [repetition_of(name) for name in ("mm", "mm_pass3", "bypass_1", "mm_again", "low_pass", "x_pass12")] == [
        0, 3, 0, 0, 0, 12,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["products", "products, fused"])
def test_the_search_takes_such_a_plan_where_it_pays(name: str) -> None:
    graph = GRAPHS[name]()
    smallest = min(case.projection.peak_bytes for case in repeating(name))
    chosen = choose(graph, smallest).chosen

    assert chosen.unrolled is not None
    assert chosen.projection.peak_bytes <= smallest


@torch.library.custom_op("remat_tests::addmm_pass1", mutates_args=())
def addmm_pass1(x: Tensor) -> Tensor:
    """A user's op whose results have the names of repetitions."""
    return x.clone()


@torch.library.custom_op("remat_tests::addmm_again", mutates_args=())
def addmm_again(x: Tensor) -> Tensor:
    return x.clone()


addmm_pass1.register_fake(torch.empty_like)
addmm_again.register_fake(torch.empty_like)


class Namesakes(nn.Module):
    """Layers, and ops beside them that are called as a layer that is computed once more would be."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            unchanged = addmm_again(addmm_pass1(x)) - x
        loss: Tensor = self.layers(x + unchanged)
        return loss


def test_names_that_ops_of_the_user_have() -> None:
    graph = staged(trace(Namesakes(), torch.ones(256, 32)))
    problem = without_dead_ends(graph.problem)
    held = holds(graph.joint, problem, graph.model, boundaries(graph.joint, problem), max_cuts=8)
    table = Chain(held.blocks, num_units=256, unit_bytes=-(-held.largest_bytes // 256))
    repeated = set()
    for units in table.breakpoints():
        unrolled = unroll(graph.joint, problem, held.chain, held.always_saved, table.plan(units))
        names = [value.name for value in unrolled.joint.values]
        assert len(set(names)) == len(names)
        assert all(value.repetition == repetition_of(value.name) for value in unrolled.joint.values if value.is_copy)
        repeated.update(name for name in names if COPY.search(name))

    assert {"addmm_pass1", "addmm_again"} <= repeated, "the user's"
    assert "addmm_pass1_pass1" in repeated


# -- whole steps ------------------------------------------------------------------------------------------------------


def copies(plan: RematPlan) -> list[str]:
    return [value.name for value in plan.values if COPY.search(value.name)]


def layers(num_layers: int = 8, drop: float = 0.0, dtype: torch.dtype = torch.float64) -> Program:
    return Program(lambda: Layers(num_layers, drop), lambda: (rows(256, 32, requires_grad=False),), dtype)


@dataclass(frozen=True)
class Measured:
    plan: RematPlan
    outcome: Outcome
    peak_bytes: int


def measured(program: Program, budget_bytes: int | None, **options: object) -> Measured:
    """One step's results, and the highest number of bytes in a step of its own."""
    module = program.module()
    before = len(remat_compiler.plans())
    call = compiled(module, memory_budget=budget_bytes, **options)
    [outcome] = run_steps(program, module, call)
    (plan,) = remat_compiler.plans()[before:]
    arguments = program.arguments()
    module.zero_grad(set_to_none=True)

    def step() -> None:
        call(*arguments).backward()

    return Measured(plan, outcome, measure_peak(step, baseline_bytes=plan.baseline_bytes).peak_bytes)


def tight_budgets(program: Program, count: int, **options: object) -> Iterator[int]:
    """From the smallest peak that can be reached up to half of what is between it and plain Inductor's."""
    smallest = smallest_peak(program, **options)
    inductor = measured(program, None, **options).plan.inductor_peak_bytes
    yield from budgets_between((smallest + inductor) // 2, smallest, count)


@pytest.mark.usefixtures("fresh_compiler")
def test_steps_with_copies_are_the_eager_step_within_their_budget() -> None:
    program = layers()
    [truth] = run_eager(program)
    with_copies, passes = 0, set[int]()
    for budget_bytes in tight_budgets(program, count=5):
        found = measured(program, budget_bytes)
        assert_same(found.outcome, truth, FP64)
        assert found.plan.projected_peak_bytes <= budget_bytes
        assert found.peak_bytes <= budget_bytes + NUMBERS, f"{found.peak_bytes} bytes measured in {budget_bytes}"
        with_copies += bool(copies(found.plan))
        passes.update(repetition_of(name) for name in copies(found.plan))
    assert with_copies >= 2
    assert max(passes) >= 3


@pytest.mark.usefixtures("fresh_compiler")
def test_several_steps_with_copies_are_the_same_each_time() -> None:
    program = layers(6)
    run = run_at(program, smallest_peak(program), num_steps=3)
    assert copies(run.plan)
    for found, truth in zip(run.outcomes, run_eager(program, num_steps=3), strict=True):
        assert_same(found, truth, FP64)


@pytest.mark.usefixtures("fresh_compiler")
def test_dropout_is_the_same_in_every_pass() -> None:
    """Under one seed, a plan that goes over a layer again gives the gradients of one that does not."""
    program = layers(7, drop=0.2)
    free = measured(program, None)
    assert not copies(free.plan)
    with_copies = 0
    for budget_bytes in tight_budgets(program, count=4):
        found = measured(program, budget_bytes)
        assert_close(found.outcome, free.outcome, FP64)
        assert torch.equal(found.outcome.rng_state, free.outcome.rng_state)
        assert found.peak_bytes <= budget_bytes + NUMBERS, f"{found.peak_bytes} bytes measured in {budget_bytes}"
        with_copies += bool(copies(found.plan))
    assert with_copies >= 2


@pytest.mark.usefixtures("fresh_compiler")
def test_a_step_with_ops_that_are_called_as_copies_are() -> None:
    program = Program(Namesakes, lambda: (rows(256, 32, requires_grad=False),))
    [truth] = run_eager(program)
    budget = smallest_peak(program, num_microbatches=1)
    run = run_at(program, budget, num_steps=1, num_microbatches=1)

    assert "addmm_pass1_pass1" in copies(run.plan)
    assert_same(run.outcomes[0], truth, FP64)


class Residual(nn.Module):
    """Norm, two products and a residual sum; several outputs leave the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(6))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return x.square().mean(), x.detach().amax(0)


@pytest.mark.usefixtures("fresh_compiler")
def test_residual_blocks_with_copies() -> None:
    program = Program(Residual, lambda: (rows(128, 16),))
    [truth] = run_eager(program)
    run = run_at(program, smallest_peak(program), num_steps=1)

    assert copies(run.plan)
    assert_same(run.outcomes[0], truth, FP64)


@pytest.mark.inductor
@pytest.mark.usefixtures("fresh_compiler")
def test_copies_stay_apart_under_inductor() -> None:
    """Were two passes fused into one, the values between them would be alive all along, and the peak would show it."""
    program = layers(dtype=torch.float32)
    [truth] = run_eager(program.in_dtype(torch.float64))
    smallest = smallest_peak(program, lowering="inductor")
    found = measured(program, smallest, lowering="inductor")

    assert len({repetition_of(name) for name in copies(found.plan)}) >= 2
    assert_close(found.outcome, truth, 1e-4)
    assert found.peak_bytes <= smallest
    assert all(value.decision != "save" for value in found.plan.values if COPY.search(value.name))
