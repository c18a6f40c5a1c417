"""What kind of work an op is: the one table that legality, prices and the memory model agree on.

The kinds follow what Inductor does with an op, because that decides what it costs. Pointwise work is inlined into its
readers and is written only when something outside the kernel reads it; a reduction is written but fuses with its
neighbours; everything else is a kernel of its own (torch/_inductor/lowering.py: ``register_pointwise``,
``make_reduction`` and the fallbacks).
"""

from __future__ import annotations

import enum
import operator
from typing import Any

import torch
from torch import fx


class OpKind(enum.Enum):
    """How an op is executed once it is compiled."""

    INPUT = "input"  # a placeholder or an attribute of the module
    VIEW = "view"  # no work: another shape of the same storage
    FACTORY = "factory"  # pointwise without operands: full, iota
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    SCATTER = "scatter"  # writes into a fresh copy of its first operand
    EXTERN = "extern"  # a kernel of its own: GEMM, convolution, attention, sort, custom ops
    PART = "part"  # one output of an op with several
    SYMBOLIC = "symbolic"  # a size, not a tensor
    EFFECT = "effect"  # changes something outside the graph: copy_, asserts


FUSIBLE = frozenset({OpKind.FACTORY, OpKind.POINTWISE, OpKind.REDUCTION})

# Ops that share storage with their first operand although their schema does not say so.
_SILENT_VIEWS = frozenset({"_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"})

_FACTORIES = frozenset(
    "full zeros ones empty arange iota scalar_tensor full_like zeros_like ones_like empty_like new_zeros new_ones"
    " new_full new_empty empty_strided new_empty_strided eye lift_fresh_copy".split()
)

# Inductor lowers these to pointwise loops although they carry no pointwise tag (torch/_inductor/lowering.py).
_POINTWISE = frozenset(
    "embedding gather index index_select cat clone _to_copy to copy convert_element_type where"
    " constant_pad_nd slice_scatter select_scatter as_strided_scatter triu tril flip roll repeat masked_fill"
    " fma device_put contiguous stack upsample_nearest2d upsample_bilinear2d _unsafe_index"
    " _unsafe_masked_index inductor_random inductor_randint inductor_lookup_seed native_dropout"
    " native_dropout_backward _low_memory_max_pool_offsets_to_indices"
    " _low_memory_max_pool_with_offsets avg_pool2d avg_pool2d_backward max_pool2d_with_indices_backward"
    " rand rand_like randn randn_like bernoulli nll_loss_backward broadcast_in_dim select_backward"
    " slice_backward random_at".split()
)

_REDUCTIONS = frozenset(
    "sum mean var var_mean std amax amin max min argmax argmin prod any all logsumexp norm linalg_vector_norm xor_sum"
    " prepare_softmax_online native_layer_norm native_group_norm native_layer_norm_backward _softmax _log_softmax"
    " _softmax_backward_data _log_softmax_backward_data nll_loss_forward _native_batch_norm_legit"
    " _native_batch_norm_legit_functional native_batch_norm native_batch_norm_backward cumsum cumprod"
    " native_group_norm_backward".split()
)

_SCATTERS = frozenset(
    "scatter scatter_add scatter_reduce index_put _unsafe_index_put _unsafe_masked_index_put_accumulate index_add"
    " embedding_dense_backward _scaled_index_put".split()
)

# Pointwise ops whose arithmetic is a polynomial or a table, in units of DeviceSpec.transcendental_flops, which is the
# mean of exp (0.19 ns on one Zen 5 core in a kernel compiled by Inductor), erf (0.42 ns) and tanh (1.02 ns).
_EXP, _ERF, _TANH = 0.35, 0.8, 1.9
_TRANSCENDENTAL = {
    **dict.fromkeys("exp exp2 expm1 log log2 log10 log1p sqrt rsqrt".split(), _EXP),
    **dict.fromkeys("erf erfc erfinv sigmoid silu sigmoid_backward silu_backward sin cos logit".split(), _ERF),
    **dict.fromkeys(
        "gelu gelu_backward softplus softplus_backward log_sigmoid logaddexp elu elu_backward celu".split(), 1.0
    ),
    **dict.fromkeys(
        "tanh tanh_backward tan asin acos atan atan2 sinh cosh pow lgamma digamma mish mish_backward".split(), _TANH
    ),
}

_RANDOM = frozenset("inductor_random inductor_randint random_at".split())


def schema_of(node: fx.Node) -> Any | None:
    """The schema of an operator of the dispatcher; ``None`` for Python functions and higher-order ops."""
    return getattr(node.target, "_schema", None)


def op_name(node: fx.Node) -> str:
    """The op without namespace and overload: ``"mm"`` for ``aten.mm.default``."""
    schema = schema_of(node)
    if schema is not None:
        return str(schema.name).split("::")[-1]
    return getattr(node.target, "__name__", str(node.target))


def op_label(node: fx.Node) -> str:
    """The op as plans name it: ``"aten.mm.default"``, ``"getitem"``, ``"input"``."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "constant"
    if schema_of(node) is not None:
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def is_view(node: fx.Node) -> bool:
    """Whether the result shares the storage of the first operand.

    ``reshape`` and ``contiguous`` may copy: they share only when shape and strides allow it, which the recorded fake
    tensors show.
    """
    schema, name = schema_of(node), op_name(node)
    if schema is None or schema.is_mutable or not schema.returns:
        return False
    if name in ("reshape", "contiguous", "to", "flatten"):
        return _shares_storage(node)
    aliased = schema.returns[0].alias_info is not None
    return aliased or name in _SILENT_VIEWS


def _shares_storage(node: fx.Node) -> bool:
    source = node.args[0]
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return bool(before.untyped_storage()._cdata == after.untyped_storage()._cdata)


def op_kind(node: fx.Node) -> OpKind:
    """The kind of one node of a joint graph."""
    if node.op in ("placeholder", "get_attr"):
        return OpKind.INPUT
    if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
        return OpKind.SYMBOLIC
    if node.target is operator.getitem:
        return _part_kind(node)
    return OpKind.EXTERN if schema_of(node) is None else _overload_kind(node)


def _part_kind(node: fx.Node) -> OpKind:
    source = node.args[0]
    return OpKind.VIEW if isinstance(source, fx.Node) and is_view(source) else OpKind.PART


def _overload_kind(node: fx.Node) -> OpKind:
    schema, name = schema_of(node), op_name(node)
    if schema is None or schema.is_mutable or not schema.returns:
        return OpKind.EFFECT
    if is_view(node):
        return OpKind.VIEW
    if name in _FACTORIES:
        return OpKind.FACTORY
    if name in _REDUCTIONS:
        return OpKind.REDUCTION
    if name in _SCATTERS:
        return OpKind.SCATTER
    if name in _POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return OpKind.POINTWISE
    return OpKind.EXTERN


def transcendental_weight(node: fx.Node) -> float:
    """How many mean transcendentals one element costs; 0 where the op is one instruction."""
    return _TRANSCENDENTAL.get(op_name(node), 0.0)


def is_counter_random(node: fx.Node) -> bool:
    """Whether the op draws numbers that depend on nothing but its seed operand and the element's index."""
    return op_name(node) in _RANDOM


def is_collective(node: fx.Node) -> bool:
    """Whether the op talks to other ranks."""
    return getattr(node.target, "namespace", "") in ("_c10d_functional", "c10d_functional", "_dtensor", "c10d")


def is_builtin(node: fx.Node) -> bool:
    """Whether the op belongs to PyTorch, whose schema says what it reads and changes."""
    return getattr(node.target, "namespace", "") in (
        "aten",
        "prims",
        "prim",
        "_c10d_functional",
        "inductor",
        "quantized",
        "remat",
    )


def draws_from_generator(node: fx.Node) -> bool:
    """Whether running the op twice gives two results, because it draws from a generator that moves on.

    Attention kernels carry the tag for their dropout; at ``dropout_p=0`` they draw nothing.
    """
    if schema_of(node) is None:
        return False
    if op_name(node) in ("inductor_seeds", "inductor_seed"):
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return bool(_argument(node, "dropout_p", 1.0) != 0.0)


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    """The value of the schema argument ``name``, ``default`` when the op has no such argument."""
    for position, argument in enumerate(getattr(schema_of(node), "arguments", ())):
        if argument.name != name:
            continue
        if name in node.kwargs:
            return node.kwargs[name]
        return node.args[position] if position < len(node.args) else argument.default_value
    return default


def written_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands that the op changes in place."""
    schema = schema_of(node)
    if schema is None or not schema.is_mutable:
        return ()
    written = []
    for position, argument in enumerate(schema.arguments):
        operand = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(operand, fx.Node):
            written.append(operand)
    return tuple(written)


def reduces_outer(node: fx.Node) -> bool:
    """Whether a reduction runs over the first axis, as the sum that makes a bias gradient does.

    Its loop nest is the transpose of its neighbours', so it fuses with other such sums rather than with them.
    """
    if op_name(node) not in _REDUCTIONS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    operand = node.args[0].meta.get("val")
    if not isinstance(operand, torch.Tensor) or operand.dim() < 2:
        return False
    axes = _argument(node, "dim", None)
    axes = [axes] if isinstance(axes, int) else axes
    return not axes or any(axis % operand.dim() == 0 for axis in axes)
