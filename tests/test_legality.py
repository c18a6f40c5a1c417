"""What may be saved and what may be recomputed, and the reason that the user reads when not."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed  # registers the collectives
import torch.nn.functional as F
from graphs import JointBuilder, Staged, choose, staged, trace, value_of, values_of
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from remat_passes.cut import smallest_price, solve
from remat_passes.errors import CannotPartitionError
from remat_passes.joint import JointGraph, Policy, Value
from remat_passes.legality import Permission, classify
from remat_passes.ops import OpKind

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Dynamo warns about every checkpoint with a policy."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def weight(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def permission_of(joint: JointGraph, name: str) -> Permission:
    return classify(joint)[value_of(joint, name).index]


def permissions(joint: JointGraph, op: str) -> list[Permission]:
    classified = classify(joint)
    return [classified[value.index] for value in values_of(joint, op)]


# -- pure work --------------------------------------------------------------------------------------------------------


def test_pure_ops_may_be_saved_and_recomputed() -> None:
    w = weight(4, 4)
    joint = trace(lambda x: (x @ w).softmax(-1).sum(0).sin().sum(), torch.ones(4, 4)).joint
    classified = classify(joint)
    for value in joint.values:
        if value.op in (
            "aten.mm.default",
            "aten.exp.default",
            "aten.div.Tensor",
            "aten.sin.default",
            "aten.cos.default",
        ):
            assert classified[value.index] == Permission(None, None)


def test_an_input_may_be_saved_only() -> None:
    build = JointBuilder()
    joint = build.joint([build.call(aten.neg.default, build.primal(4))], [])

    assert permission_of(joint, "primals_1") == Permission(None, "an input of the step")


def test_a_view_has_nothing_to_save() -> None:
    build = JointBuilder()
    product = build.call(aten.neg.default, build.primal(4, 4))
    joint = build.joint([build.call(aten.view.default, product, [16])], [])

    assert permission_of(joint, "view_default") == Permission(
        "a view of neg_default: it has no storage of its own", None
    )


def test_an_op_with_several_results_is_saved_part_by_part() -> None:
    build = JointBuilder()
    top = build.call(aten.topk.default, build.primal(4, 8), 2)
    joint = build.joint([build.call(operator.getitem, top, 0)], [])

    assert permission_of(joint, "topk_default") == Permission("it has several outputs; they are saved one by one", None)
    assert permission_of(joint, "getitem") == Permission(None, None)


def test_a_view_that_must_be_saved_binds_what_it_shows() -> None:
    build = JointBuilder()
    product = build.call(aten.neg.default, build.primal(4, 4))
    view = build.call(aten.view.default, product, [16], recompute=CheckpointPolicy.MUST_SAVE)
    joint = build.joint([build.call(aten.view.default, view, [2, 8])], [])

    assert permission_of(joint, "neg_default") == Permission(
        None, "the user's policy says MUST_SAVE for its view view_default"
    )
    assert permission_of(joint, "view_default").no_recompute is None


# -- random numbers ---------------------------------------------------------------------------------------------------


def test_random_numbers_are_not_drawn_again_and_what_is_made_of_them_may_be() -> None:
    w = weight(4, 4)
    joint = trace(lambda x: (F.dropout(x @ w, 0.3) * torch.rand(4)).sum(), torch.ones(4, 4)).joint

    assert (
        permissions(joint, "aten.rand.default")
        == [Permission(None, "rand draws random numbers: again would give others")] * 2
    )
    assert permissions(joint, "aten.gt.Scalar") == [Permission(None, None)]


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.rand_like.default, ()),
        (aten.randn_like.default, ()),
        (aten.bernoulli.p, (0.5,)),
        (aten.multinomial.default, (2,)),
        (aten.native_dropout.default, (0.5, True)),
        (aten.randperm.default, None),
    ],
)
def test_no_op_that_draws_is_recomputed(op: Callable[..., Any], arguments: tuple[Any, ...] | None) -> None:
    build = JointBuilder()
    x = build.primal(4)
    drawn = build.call(op, 8) if arguments is None else build.call(op, x, *arguments)
    joint = build.joint([drawn], [])

    assert "draws random numbers" in str(permission_of(joint, drawn.name).no_recompute)


@pytest.mark.parametrize(("dropout_p", "may_be_recomputed"), [(0.0, True), (0.1, False)])
def test_attention_draws_only_for_its_dropout(dropout_p: float, may_be_recomputed: bool) -> None:
    build = JointBuilder()
    q = build.primal(1, 2, 8, 4)
    attention = build.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q, dropout_p)
    joint = build.joint([build.call(operator.getitem, attention, 0)], [])

    assert (permission_of(joint, attention.name).no_recompute is None) == may_be_recomputed


# -- effects ----------------------------------------------------------------------------------------------------------


def test_a_change_in_place_is_neither_saved_nor_recomputed() -> None:
    build = JointBuilder()
    x = build.primal(4)
    copy = build.call(aten.copy_.default, x, build.call(aten.neg.default, x))
    joint = build.joint([x], [])

    assert permission_of(joint, copy.name) == Permission("it has no result", "copy_ changes its operand")


def test_an_input_that_changes_is_saved_as_a_copy() -> None:
    build = JointBuilder()
    x, y = build.primal(4), build.primal(4)
    build.call(aten.copy_.default, x, build.call(aten.neg.default, x))
    joint = build.joint([y], [])

    assert permission_of(joint, "primals_1").copy_to_save
    assert not permission_of(joint, "primals_2").copy_to_save


def test_a_collective_runs_once_a_step() -> None:
    build = JointBuilder()
    reduced = build.call(torch.ops._c10d_functional.all_reduce.default, build.primal(4), "sum", "0")
    joint = build.joint([reduced], [])

    assert permission_of(joint, reduced.name) == Permission(None, "all_reduce talks to other ranks: once a step only")


@torch.library.custom_op("rematlegality::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: gradient * 2)


@pytest.fixture(scope="module")
def custom() -> Staged:
    w = weight(4, 4)
    return staged(trace(lambda x: twice(x @ w).sin().sum(), torch.ones(4, 4)))


def test_a_custom_op_is_not_recomputed(custom: Staged) -> None:
    reason = "custom op twice: what it does besides its result is not known"
    assert permissions(custom.joint, "rematlegality.twice.default") == [Permission(None, reason)]


def test_a_custom_op_that_backward_needs_is_saved_even_where_bytes_are_all_that_counts(custom: Staged) -> None:
    (op,) = values_of(custom.joint, "rematlegality.twice.default")
    cut = solve(custom.problem, smallest_price(custom.problem))

    assert op.index not in cut.redo
    assert {custom.joint.values[i].op for i in cut.saved} >= {"rematlegality.twice.default"}


# -- the user's policies ----------------------------------------------------------------------------------------------

Step = Callable[[Tensor], Tensor]


def with_policy(region: Step, policies: dict[Any, CheckpointPolicy], default: CheckpointPolicy) -> Step:
    """The region under ``torch.utils.checkpoint`` with these policies for its ops, and a loss behind it."""

    def policy(context: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        return policies.get(op, default)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def step(x: Tensor) -> Tensor:
        return checkpoint(region, x, use_reentrant=False, context_fn=contexts).cos().sum()

    return step


def two_products(policy: CheckpointPolicy) -> Staged:
    w = weight(4, 4)
    step = with_policy(
        lambda x: torch.sin(torch.relu(x @ w) @ w), {aten.mm.default: policy}, CheckpointPolicy.PREFER_RECOMPUTE
    )
    return staged(trace(step, torch.ones(4, 4)))


def marked(joint: JointGraph, policy: Policy) -> list[Value]:
    return [value for value in joint.values if value.policy is policy]


def test_must_save_forbids_recomputing() -> None:
    graph = two_products(CheckpointPolicy.MUST_SAVE)
    products = marked(graph.joint, Policy.MUST_SAVE)
    cut = solve(graph.problem, smallest_price(graph.problem))

    assert [value.name for value in products] == ["mm", "mm_1"]
    assert {graph.permissions[value.index] for value in products} == {
        Permission(None, "the user's policy says MUST_SAVE")
    }
    assert not cut.redo & {value.index for value in products}


def test_must_recompute_forbids_saving() -> None:
    graph = two_products(CheckpointPolicy.MUST_RECOMPUTE)
    products = marked(graph.joint, Policy.MUST_RECOMPUTE)

    assert [value.name for value in products] == ["mm", "mm_1"]
    assert {graph.permissions[value.index] for value in products} == {
        Permission("the user's policy says MUST_RECOMPUTE", None)
    }
    for budget_bytes in (None, graph.inductor.projection.peak_bytes, 2**40):
        assert not choose(graph, budget_bytes).chosen.cut.saved & {value.index for value in products}


def test_preferences_bind_nobody() -> None:
    for policy in (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        graph = two_products(policy)
        assert {value.policy for value in graph.joint.values} == {None}


def test_a_region_under_must_recompute_is_recomputed_from_what_enters_it() -> None:
    w = weight(8, 8)
    step = with_policy(lambda x: F.gelu(x @ w) @ w, {}, CheckpointPolicy.MUST_RECOMPUTE)
    graph = staged(trace(step, torch.ones(4, 8)))
    cut = choose(graph, None).chosen.cut
    region = {value.index for value in marked(graph.joint, Policy.MUST_RECOMPUTE)}

    assert region
    assert {graph.joint.values[i].name for i in cut.saved & region} <= {"mm_1"}  # it leaves the region: not bound


def test_what_leaves_a_region_is_not_bound_by_its_policy() -> None:
    w = weight(4, 4)
    step = with_policy(lambda x: (x @ w).sin(), {}, CheckpointPolicy.MUST_RECOMPUTE)
    joint = trace(step, torch.ones(4, 4)).joint
    inside, leaving = (value for value in marked(joint, Policy.MUST_RECOMPUTE) if value.op != "aten.permute.default")

    assert (inside.op, leaving.op) == ("aten.mm.default", "aten.sin.default")
    assert permission_of(joint, inside.name).no_save == "the user's policy says MUST_RECOMPUTE"
    assert permission_of(joint, leaving.name).no_save is None


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_one_policy_for_every_op_can_be_obeyed(policy: CheckpointPolicy) -> None:
    norm, w = nn.LayerNorm(4), weight(4, 4)
    step = with_policy(lambda x: norm(x @ w).t().reshape(2, 8).split(4, 1)[0].exp(), {}, policy)
    graph = staged(trace(step, torch.ones(4, 4)))
    cut = choose(graph, None).chosen.cut
    if policy is CheckpointPolicy.MUST_SAVE:
        # A view has nothing to save: it is taken again of what is saved. In torch 2.11 the policy also marks the alias
        # of a result that autograd keeps.
        bound = {v.index for v in marked(graph.joint, Policy.MUST_SAVE) if v.kind is not OpKind.VIEW}
        assert bound
        assert not cut.redo & bound


def test_must_recompute_lets_random_numbers_be_drawn_again() -> None:
    w = weight(4, 4)
    step = with_policy(lambda x: (torch.rand_like(x) * (x @ w)).sin(), {}, CheckpointPolicy.MUST_RECOMPUTE)
    joint = trace(step, torch.ones(4, 4)).joint
    (drawn,) = (value for value in joint.values if value.op.startswith("aten.rand"))

    assert permission_of(joint, drawn.name) == Permission("the user's policy says MUST_RECOMPUTE", None)


def contradiction() -> str:
    """The error for a value that must be recomputed while what shows it must be saved."""
    build = JointBuilder()
    x, tangent = build.primal(4), build.tangent(4)
    where = '  File "model.py", line 7, in forward\n    y = x.exp().view(2, 2)'
    exponential = build.call(aten.exp.default, x, recompute=CheckpointPolicy.MUST_RECOMPUTE, stack_trace=where)
    view = build.call(aten.view.default, exponential, [2, 2], recompute=CheckpointPolicy.MUST_SAVE)
    back = build.call(aten.view.default, view, [4])
    joint = build.joint([exponential], [build.call(aten.mul.Tensor, tangent, back)])
    with pytest.raises(CannotPartitionError) as raised:
        choose(staged(joint), None)
    return str(raised.value)


def test_contradicting_rules_are_both_named() -> None:
    message = contradiction()

    assert "exp_default" in message
    assert "the user's policy says MUST_RECOMPUTE" in message
    assert "the user's policy says MUST_SAVE for its view view_default" in message


def test_the_error_for_contradicting_rules_names_the_source_line() -> None:
    assert "model.py:7" in contradiction()
