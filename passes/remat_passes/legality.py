"""What may be saved and what may be recomputed, with the reason for each refusal.

A value may be recomputed only when doing it again in backward gives the same bits: a pure op, on inputs that nobody
changed in between, without a generator that has moved on, without talking to other ranks. A value may be saved only
when what is saved is still the same in backward: not the storage of an input that forward changes in place.

The rules stand in two tables, in the order in which they are asked; the first that fires gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from .joint import JointGraph, Policy, Role, Value
from .ops import OpKind, draws_from_generator, is_builtin, is_collective, op_name, schema_of


@dataclass(frozen=True, slots=True)
class Permission:
    """Why a value may not be saved or not be recomputed; ``None`` where it may.

    ``copy_to_save`` marks an input that forward changes in place: only a copy made before the change can be saved.
    """

    no_save: str | None
    no_recompute: str | None
    copy_to_save: bool = False


Rule = Callable[[JointGraph, Value, fx.Node], "str | None"]


def classify(joint: JointGraph) -> tuple[Permission, ...]:
    """The permission of each value of the graph, by index."""
    return tuple(_permission(joint, value) for value in joint.values)


def _permission(joint: JointGraph, value: Value) -> Permission:
    return Permission(
        no_save=_first(NO_SAVE, joint, value),
        no_recompute=_first(NO_RECOMPUTE, joint, value),
        copy_to_save=value.index in joint.mutated_inputs,
    )


def _first(rules: tuple[Rule, ...], joint: JointGraph, value: Value) -> str | None:
    node = joint.nodes[value.index]
    return next((reason for rule in rules if (reason := rule(joint, value, node)) is not None), None)


def is_region_boundary(joint: JointGraph, value: Value) -> bool:
    """Whether a value leaves the checkpoint region of the user's program that computes it.

    ``torch.utils.checkpoint`` keeps what enters a region, so what one region hands to the next is not bound by the
    region's policy (torch/_functorch/partitioners.py, ``cleanup_recompute_tags``).
    """
    users = [joint.values[user] for user in value.users]
    return any(user.region != value.region and user.side is value.side for user in users)


def must_recompute(joint: JointGraph, value: Value) -> bool:
    """Whether the user's annotation forbids saving the value."""
    return value.policy is Policy.MUST_RECOMPUTE and not is_region_boundary(joint, value)


# -- may not be saved
# ---------------------------------------------------------------------------------------------------


def _marked_recompute(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    return "the user's policy says MUST_RECOMPUTE" if must_recompute(joint, value) else None


def _several_outputs(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    several = isinstance(node.meta.get("val"), (tuple, list))
    return "it has several outputs; they are saved one by one" if several else None


def _is_view(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    if value.base == value.index:
        return None
    return f"a view of {joint.values[value.base].name}: it has no storage of its own"


def _constant(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    return "a constant of the module, there in both graphs" if node.op == "get_attr" else None


def _float_symbol(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    unsavable = isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymBool, float, bool))
    return "a symbolic float or condition; only sizes can be handed to backward" if unsavable else None


def _no_result(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    return "it has no result" if value.kind is OpKind.EFFECT else None


# -- may not be recomputed
# ----------------------------------------------------------------------------------------------


def _is_input(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    return "an input of the step" if value.role is not Role.NONE else None


def _marked_save(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    """A view has nothing to save: its mark binds what it shows."""
    if value.base != value.index:
        return None
    if value.policy is Policy.MUST_SAVE:
        return "the user's policy says MUST_SAVE"
    view = next((view for view in joint.views.get(value.index, ()) if view.policy is Policy.MUST_SAVE), None)
    return f"the user's policy says MUST_SAVE for its view {view.name}" if view is not None else None


def _collective(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    if not is_collective(node) or must_recompute(joint, value):
        return None
    return f"{op_name(node)} talks to other ranks: once a step only"


def _changes_state(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    return f"{op_name(node)} changes its operand" if value.kind is OpKind.EFFECT else None


def _draws(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    if not draws_from_generator(node) or must_recompute(joint, value):
        return None  # under MUST_RECOMPUTE the generator's state is saved and set back around the op
    return f"{op_name(node)} draws random numbers: again would give others"


def _effectful(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    return "it runs under an effect token: once a step only" if op_name(node) == "with_effects" else None


# Higher-order ops that are pure functions of their operands, checked in torch/_higher_order_ops of 2.11 and 2.13.
_PURE_HIGHER_ORDER = frozenset({"flex_attention", "triton_kernel_wrapper_functional", "auto_functionalized_v2"})


def _opaque(joint: JointGraph, value: Value, node: fx.Node) -> str | None:
    if value.kind is not OpKind.EXTERN or node.op != "call_function" or must_recompute(joint, value):
        return None
    if schema_of(node) is not None:
        return None if is_builtin(node) else f"custom op {op_name(node)}: what it does besides its result is not known"
    if op_name(node) in _PURE_HIGHER_ORDER:
        return None
    return f"{op_name(node)} runs a graph of its own: what it does besides its result is not known"


NO_SAVE: tuple[Rule, ...] = (
    _marked_recompute,
    _no_result,
    _several_outputs,
    _is_view,
    _constant,
    _float_symbol,
)
NO_RECOMPUTE: tuple[Rule, ...] = (_is_input, _marked_save, _collective, _changes_state, _draws, _effectful, _opaque)
