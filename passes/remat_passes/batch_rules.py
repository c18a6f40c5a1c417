"""How each op carries the batch: along which axes it may be computed slice by slice.

An op may be computed on a part of its operands where each result element depends on a part of them only. The parts
are named by *factors*, as in sharding propagation (Shardy; GSPMD, arXiv 2105.04663): a factor is one loop of the op. It
says at which axis each operand and each result runs along it; an operand that does not is needed whole, and a result
that does not is a partial sum, because the loop is added up. ``mm`` has three: rows, columns, and the one that is
summed.

Everything else follows from the shapes alone, never from the sizes of the axes: a mask of (T, T) beside activations of
(B, T, T) has no axis for their factor and is needed whole, whether T equals B or not.

An axis may be outer x batch x inner, so that merged axes, heads before the batch, and two views of a batch one after
another can be sliced as well (``Split``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import fx

from .errors import ConfigError
from .ops import is_builtin, op_name

Partial: TypeAlias = Literal["partial"]
PARTIAL: Partial = "partial"  # the full value is the sum over the slices


@dataclass(frozen=True, slots=True)
class Split:
    """An axis whose size is ``outer * batch * inner``; a slice takes a range of the middle one."""

    axis: int
    outer: int = 1
    inner: int = 1
    is_counted: bool = False  # the numbers of its rows, counted from 0 in each slice (``RowByRow``)

    def local_shape(self, shape: Sequence[int], length: int) -> tuple[int, ...]:
        """The shape of a slice of ``length`` samples of a tensor of ``shape``."""
        local = list(shape)
        local[self.axis] = self.outer * length * self.inner
        return tuple(local)


Result: TypeAlias = Split | Partial | None  # None: the op says nothing of this result


@dataclass(frozen=True, slots=True)
class Alignment:
    """One way to compute an op slice by slice: how each operand is handed in (``None``: whole), what comes out."""

    operands: tuple[Split | None, ...]
    results: tuple[Result, ...]


class Rule(Protocol):
    """A way to slice one op."""

    def align(self, place: int, split: Split, batch: int) -> Alignment | None:
        """The alignment in which tensor operand ``place`` (or result ``-1 - place``) is split so, if there is one."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop of an op: the axis of each tensor operand along it, or ``None`` where the operand has none; likewise for
    each result, ``"partial"`` where the loop is summed, ``None`` where the result is not to be had."""

    operands: tuple[int | None, ...]
    results: tuple[int | Partial | None, ...]

    def align(self, place: int, split: Split, batch: int) -> Alignment | None:
        """See ``Rule``."""
        axis = self.operands[place] if place >= 0 else self.results[-1 - place]
        if axis != split.axis:
            return None
        return Alignment(
            tuple(None if at is None else replace(split, axis=at) for at in self.operands),
            tuple(replace(split, axis=at) if isinstance(at, int) else at for at in self.results),
        )


@dataclass(frozen=True, slots=True)
class RowByRow:
    """A loop in which an index of row numbers picks from (or puts into) the rows of a slice, each its own.

    The whole counts them over the batch, a slice over its own rows: so they are made anew for each slice, which has its
    rows in their order, whatever is before and behind the batch in that axis.
    """

    loop: Factor
    numbers: int  # the operand that holds the row numbers

    def align(self, place: int, split: Split, batch: int) -> Alignment | None:
        """See ``Rule``."""
        aligned = self.loop.align(place, split, batch)
        own = None if aligned is None else aligned.operands[self.numbers]
        if aligned is None or own is None or place == self.numbers:
            return None
        operands = list(aligned.operands)
        operands[self.numbers] = replace(own, is_counted=True)
        return replace(aligned, operands=tuple(operands))


@dataclass(frozen=True, slots=True)
class Reshape:
    """Other axes of the same elements in the same order."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def align(self, place: int, split: Split, batch: int) -> Alignment | None:
        """See ``Rule``."""
        source, target = (self.before, self.after) if place >= 0 else (self.after, self.before)
        moved = _reshaped(source, target, split, batch)
        if moved is None:
            return None
        operand, result = (split, moved) if place >= 0 else (moved, split)
        return Alignment((operand,), (result,))


def _reshaped(source: Sequence[int], target: Sequence[int], split: Split, batch: int) -> Split | None:
    """Where the batch is after a reshape: the axis that has all of it between what is before and what is behind."""
    outer = math.prod(source[: split.axis]) * split.outer
    inner = math.prod(source[split.axis + 1 :]) * split.inner
    for axis, size in enumerate(target):
        before, behind = math.prod(target[:axis]), math.prod(target[axis + 1 :])
        if not before or not behind or outer % before or inner % behind:
            continue
        if size == outer // before * batch * (inner // behind):
            return Split(axis, outer // before, inner // behind, split.is_counted)
    return None


@dataclass(frozen=True, slots=True)
class Counted:
    """Row numbers, from 0 on in each slice. Numbers that count up over the batch are no slice's own."""

    def align(self, place: int, split: Split, batch: int) -> Alignment | None:
        """See ``Rule``."""
        return Alignment((), (split,)) if split.is_counted else None


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Tensors of one size one after another along the axis that carries the batch."""

    axis: int
    sizes: tuple[int, ...]

    def align(self, place: int, split: Split, batch: int) -> Alignment | None:
        """See ``Rule``."""
        count = len(self.sizes)
        if split.axis != self.axis or len(set(self.sizes)) > 1:
            return None
        if place >= 0 and split.outer == 1:
            return Alignment((split,) * count, (replace(split, outer=count),))
        if place < 0 and split.outer == count:
            return Alignment((replace(split, outer=1),) * count, (split,))
        return None


@dataclass(frozen=True, slots=True)
class Narrowing:
    """A range of the axis that carries the batch, which takes whole ones of its outer parts."""

    axis: int
    start: int
    stop: int

    def align(self, place: int, split: Split, batch: int) -> Alignment | None:
        """See ``Rule``."""
        part = batch * split.inner
        if place < 0 or split.axis != self.axis or self.start % part or self.stop % part:
            return None
        return Alignment((split,), (replace(split, outer=(self.stop - self.start) // part),))


# -- asking an op

OpRule: TypeAlias = Callable[..., Iterable[Rule]]  # called as the op is, with tensors that have shapes and no contents


def tensor_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands that are tensors, as often and in the order in which they stand among the arguments."""
    leaves = torch.utils._pytree.arg_tree_leaves(*node.args, **node.kwargs)
    return tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node) and isinstance(_val(leaf), torch.Tensor))


def tensor_results(node: fx.Node) -> tuple[Any, ...]:
    """What the op returns, as a tuple."""
    value = _val(node)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def alignments(node: fx.Node, place: int, split: Split, batch: int) -> list[Alignment]:
    """The ways to compute an op in which one of its tensor operands (or results, from -1 on) is split so.

    An op that no rule speaks of has none.
    """
    found = (rule.align(place, split, batch) for rule in rules_of(node))
    return [alignment for alignment in found if alignment is not None and _is_even(node, alignment, batch)]


def _is_even(node: fx.Node, alignment: Alignment, batch: int) -> bool:
    """Whether each axis that is named is there and has the size that its split says."""
    if len(tensor_operands(node)) != len(alignment.operands) or len(tensor_results(node)) != len(alignment.results):
        raise ConfigError(
            f"{_named(node.target)} speaks of {len(alignment.results)} results, and the op has"
            f" {len(tensor_results(node))}. {_RULE_FORM}"
        )
    splits = [*zip(tensor_operands(node), alignment.operands, strict=True)]
    tensors = [(_val(operand), split) for operand, split in splits if split is not None]
    tensors += [(r, s) for r, s in zip(tensor_results(node), alignment.results, strict=True) if isinstance(s, Split)]
    return all(s.axis < tensor.dim() and tensor.shape[s.axis] == s.outer * batch * s.inner for tensor, s in tensors)


def rules_of(node: fx.Node) -> tuple[Rule, ...]:
    """The ways to slice the op of one node of a joint graph."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _val)
    key = _key(node.target)
    if key in _REGISTERED:
        return tuple(_REGISTERED[key](*args, **kwargs))
    name = op_name(node)
    if name in RULES and is_builtin(node):  # a custom op may be called as one of ATen's is
        told: dict[str, Any] = {"into_zeros": is_zeros(node.args[0])} if name in ACCUMULATIONS else {}
        if name in INDEXINGS:
            told["counting"] = [_counts_along(index) for index in _indices_of(node)]
        return tuple(RULES[name](*args, **kwargs, **told))
    if name == "iota":
        return (Counted(),)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or (name in POINTWISE and is_builtin(node)):
        return tuple(_pointwise(_val(node), tensor_operands(node)))
    return ()


def _val(node: fx.Node) -> Any:
    return node.meta.get("val")


def _key(target: Any) -> str:
    """An op of the dispatcher without its overload: ``"mylib::op"``."""
    schema = getattr(target, "_schema", None)
    return str(schema.name) if schema is not None else str(getattr(target, "_qualified_op_name", target))


_REGISTERED: dict[str, OpRule] = {}


def register(op: Any, rule: Callable[..., Iterable[tuple[Sequence[Any], Sequence[Any]]]]) -> None:
    """Say how a custom op carries the batch (``remat_compiler.register_batch_rule``).

    Raises:
        ConfigError: ``op`` is no op, or one that remat knows itself, or ``rule`` cannot be called.
    """
    op = getattr(op, "_opoverload", op)  # of torch.library.custom_op
    if not hasattr(op, "_schema") and not hasattr(op, "_qualified_op_name"):
        raise ConfigError(f"register_batch_rule was given {op!r}, which is no op. Name one as torch.ops.mylib.op.")
    if not callable(rule):
        raise ConfigError(f"register_batch_rule was given {rule!r} for {op}: a rule is a function called as the op is.")

    if _has_own_rule(op):
        raise ConfigError(
            f"register_batch_rule was given a rule for {op}, which remat has a rule of its own for, checked against the"
            " op. Rules are for custom ops, and for those of PyTorch's that remat does not know."
        )

    def factors(*args: Any, **kwargs: Any) -> Iterator[Factor]:
        try:
            pairs = [tuple(pair) for pair in rule(*args, **kwargs)]
        except Exception as error:
            raise ConfigError(
                f"{_named(op)} could not be asked: {type(error).__name__}: {error}. {_RULE_FORM}"
            ) from error
        for pair in pairs:
            yield _checked_factor(op, pair, _ranks(args, kwargs))

    _REGISTERED[_key(op)] = factors


def _has_own_rule(op: Any) -> bool:
    """Whether the op is PyTorch's and ``rules_of`` has a rule for it."""
    namespace, _, name = _key(op).partition("::")
    packet = getattr(op, "overloadpacket", op)
    overloads = [getattr(packet, each) for each in packet.overloads()] if hasattr(packet, "overloads") else [op]
    is_pointwise = any(torch.Tag.pointwise in getattr(each, "tags", ()) for each in overloads)
    return namespace in ("aten", "prims") and (name in RULES or name in POINTWISE or is_pointwise)


_RULE_FORM = (
    "A rule is called as the op is and gives pairs such as ((0, None), (0,)): an axis or None for each tensor operand,"
    ' and an axis, "partial" or None for each result.'
)


def _named(op: Any) -> str:
    return f"The rule that register_batch_rule was given for {op}"


def _ranks(args: Any, kwargs: Any) -> list[int]:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return [leaf.dim() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _checked_factor(op: Any, pair: tuple[Any, ...], ranks: Sequence[int]) -> Factor:
    """One pair of a user's rule; axes may count from the end."""
    if len(pair) != 2 or not all(isinstance(half, (tuple, list)) for half in pair):
        raise ConfigError(f"{_named(op)} gave {pair!r}. {_RULE_FORM}")
    operands, results = pair
    if len(operands) != len(ranks):
        raise ConfigError(f"{_named(op)} gave {operands!r} for {len(ranks)} tensor operands. {_RULE_FORM}")
    axes: list[int | None] = []
    for axis, rank in zip(operands, ranks, strict=True):
        if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool) or not -rank <= axis < rank):
            raise ConfigError(f"{_named(op)} gave axis {axis!r} for an operand with {rank} axes. {_RULE_FORM}")
        axes.append(None if axis is None else axis % rank)
    for axis in results:
        is_axis = isinstance(axis, int) and not isinstance(axis, bool) and axis >= 0
        if not (axis is None or axis == PARTIAL or is_axis):
            raise ConfigError(f"{_named(op)} gave {axis!r} for a result. {_RULE_FORM}")
    return Factor(tuple(axes), tuple(results))


RULES: dict[str, OpRule] = {}


def _rule(names: str) -> Callable[[OpRule], OpRule]:
    def add(rule: OpRule) -> OpRule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return add


# -- the rules, by kind
#
# Sizes that an op is given as numbers (``view``, ``expand``, ``select_backward``) are those of the whole; whoever runs
# a slice gives it the local ones. A loop that is not surely one that can be sliced is not named.

# Pointwise in what they do, without the tag (torch/_inductor/lowering.py makes them loops without a reduction).
POINTWISE = frozenset(
    "clone _to_copy to convert_element_type copy contiguous alias detach lift_fresh_copy fma fill _conj resolve_conj"
    " resolve_neg elu_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward"
    " leaky_relu_backward mish_backward softplus_backward log_sigmoid_backward _prelu_kernel _prelu_kernel_backward"
    " add sub mul div pow fmod remainder neg sqrt exp log sin cos tanh where eq ne lt le gt ge".split()
)


def _pointwise(result: Any, operands: Sequence[fx.Node]) -> Iterator[Factor]:
    """Each axis of the result; an operand runs along it where it is not broadcast there."""
    results = result if isinstance(result, (tuple, list)) else [result]
    if not all(isinstance(each, torch.Tensor) for each in results):  # ``equal`` tests all elements
        return
    shape = results[0].shape
    for axis in range(len(shape)):
        yield Factor(_runs([_val(operand) for operand in operands], shape, axis), (axis,) * len(results))


def _elementwise(operands: Sequence[torch.Tensor]) -> Iterator[Factor]:
    """Each axis of the broadcast operands."""
    shape = _broadcast(operands)
    for axis in range(len(shape)):
        yield Factor(_runs(operands, shape, axis), (axis,))


def _broadcast(operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The shape to which the operands are broadcast."""
    rank = max((x.dim() for x in operands), default=0)
    padded = [(1,) * (rank - x.dim()) + tuple(x.shape) for x in operands]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def _runs(operands: Sequence[torch.Tensor], shape: Sequence[int], axis: int) -> tuple[int | None, ...]:
    """The axis of each operand along that of the shape to which they are broadcast; ``None`` where it is repeated."""
    places = [axis - len(shape) + x.dim() for x in operands]
    return tuple(
        place if place >= 0 and x.shape[place] == shape[axis] else None
        for place, x in zip(places, operands, strict=True)
    )


def _tensors(*arguments: Any) -> list[torch.Tensor]:
    """The tensors among the arguments, in the order in which they count as operands."""
    leaves = torch.utils._pytree.tree_leaves(arguments)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _axes(dim: Any, rank: int) -> set[int]:
    """The axes that a ``dim`` argument names; all of them where it names none."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return set(range(rank))
    return {axis % rank for axis in (dim if isinstance(dim, (list, tuple)) else [dim])} if rank else set()


def _kept(rank: int, reduced: set[int], keepdim: bool) -> Iterator[tuple[int, int]]:
    """The axes that a reduction keeps, before and after."""
    for axis in range(rank):
        if axis not in reduced:
            yield axis, axis if keepdim else axis - sum(other < axis for other in reduced)


def _reduction(x: torch.Tensor, dim: Any, keepdim: bool, num_results: int = 1) -> Iterator[Factor]:
    """The axes that are not reduced."""
    for axis, after in _kept(x.dim(), _axes(dim, x.dim()), keepdim):
        yield Factor((axis,), (after,) * num_results)


def _same(rank: int, coupled: Iterable[int], num_operands: int = 1, num_results: int = 1) -> Iterator[Factor]:
    """All axes but the coupled ones, at the same place in each operand and result."""
    coupled = set(coupled)
    for axis in range(rank):
        if axis not in coupled:
            yield Factor((axis,) * num_operands, (axis,) * num_results)


# -- reductions


@_rule("sum mean")
def _sum(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Iterator[Factor]:
    """The part of a mean over an axis is the sum of the slice by the count of the whole."""
    yield from _reduction(x, dim, keepdim)
    for axis in sorted(_axes(dim, x.dim())):
        yield Factor((axis,), (PARTIAL,))


@_rule("amax amin any all argmax argmin prod logsumexp")
def _extremum(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Iterator[Factor]:
    return _reduction(x, dim, keepdim)


@_rule("max min")
def _max(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> Iterator[Factor]:
    return _elementwise([x, dim]) if isinstance(dim, torch.Tensor) else _reduction(x, dim, keepdim, num_results=2)


@_rule("median nanmedian mode")
def _median(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> Iterator[Factor]:
    return _reduction(x, dim, keepdim, num_results=2)


@_rule("kthvalue")
def _kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Iterator[Factor]:
    return _reduction(x, dim, keepdim, num_results=2)


def _variance(x: torch.Tensor, dim: Any, unbiased: Any, keepdim: bool, num_results: int) -> Iterator[Factor]:
    """``var(x, unbiased)`` has no ``dim``: a flag in its place means that all axes are reduced."""
    return _reduction(x, None if isinstance(dim, bool) else dim, keepdim, num_results)


@_rule("var std")
def _var(x: torch.Tensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, **_: Any) -> Iterator[Factor]:
    return _variance(x, dim, unbiased, keepdim, 1)


@_rule("var_mean std_mean")
def _var_mean(
    x: torch.Tensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, **_: Any
) -> Iterator[Factor]:
    return _variance(x, dim, unbiased, keepdim, 2)


@_rule("norm linalg_vector_norm")
def _norm(x: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Iterator[Factor]:
    return _reduction(x, dim, keepdim)


@_rule("prepare_softmax_online")
def _softmax_online(x: torch.Tensor, dim: int) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dim, x.dim()), 1, 2)


# -- along one axis: every other is free


@_rule("_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp flip rev softmax log_softmax")
def _along(x: torch.Tensor, dim: Any, *_: Any, **__: Any) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dim, x.dim()))


@_rule("glu")
def _glu(x: torch.Tensor, dim: int = -1) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dim, x.dim()))


@_rule("cummax cummin")
def _cummax(x: torch.Tensor, dim: int) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dim, x.dim()), 1, 2)


@_rule("_softmax_backward_data _log_softmax_backward_data glu_backward")
def _along_backward(grad: torch.Tensor, other: torch.Tensor, dim: int, *_: Any) -> Iterator[Factor]:
    return _same(grad.dim(), _axes(dim, grad.dim()), 2)


@_rule("sort")
def _sort(x: torch.Tensor, dim: int = -1, *_: Any, **__: Any) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dim, x.dim()), 1, 2)


@_rule("topk")
def _topk(x: torch.Tensor, k: int, dim: int = -1, *_: Any) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dim, x.dim()), 1, 2)


@_rule("roll")
def _roll(x: torch.Tensor, shifts: Any, dims: Any = ()) -> Iterator[Factor]:
    """Without ``dims`` the tensor is rolled as one row: all axes are coupled, as ``_axes`` says."""
    return _same(x.dim(), _axes(dims, x.dim()))


@_rule("rot90")
def _rot90(x: torch.Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dims, x.dim()))


@_rule("renorm")
def _renorm(x: torch.Tensor, p: Any, dim: int, maxnorm: Any) -> Iterator[Factor]:
    """Each slice along ``dim`` by itself."""
    axis = dim % x.dim()
    yield Factor((axis,), (axis,))


@_rule("linalg_cross")
def _cross(x: torch.Tensor, other: torch.Tensor, *, dim: int = -1) -> Iterator[Factor]:
    shape = _broadcast([x, other])
    for axis in set(range(len(shape))) - _axes(dim, len(shape)):
        yield Factor(_runs([x, other], shape, axis), (axis,))


# -- matrix products


@_rule("mm")
def _mm(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> Iterator[Factor]:
    yield Factor((0, None), (0,))
    yield Factor((None, 1), (1,))
    yield Factor((1, 0), (PARTIAL,))


@_rule("addmm")
def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> Iterator[Factor]:
    """Not along the loop that is summed: the bias would be added once a slice."""
    (rows,), (columns,) = (_runs([bias], (a.shape[0], b.shape[1]), axis) for axis in (0, 1))
    yield Factor((rows, 0, None), (0,))
    yield Factor((columns, None, 1), (1,))


@_rule("bmm")
def _bmm(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> Iterator[Factor]:
    yield Factor((0, 0), (0,))
    yield Factor((1, None), (1,))
    yield Factor((None, 2), (2,))
    yield Factor((2, 1), (PARTIAL,))


@_rule("baddbmm")
def _baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> Iterator[Factor]:
    """As ``addmm``."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    for axis, pair in enumerate([(0, 0), (1, None), (None, 2)]):
        yield Factor((*_runs([bias], shape, axis), *pair), (axis,))


@_rule("mv")
def _mv(a: torch.Tensor, v: torch.Tensor) -> Iterator[Factor]:
    yield Factor((0, None), (0,))
    yield Factor((1, 0), (PARTIAL,))


@_rule("addmv")
def _addmv(bias: torch.Tensor, a: torch.Tensor, v: torch.Tensor, **_: Any) -> Iterator[Factor]:
    """As ``addmm``."""
    yield Factor((*_runs([bias], a.shape[:1], 0), 0, None), (0,))


@_rule("dot vdot")
def _dot(a: torch.Tensor, b: torch.Tensor) -> Iterator[Factor]:
    yield Factor((0, 0), (PARTIAL,))


@_rule("linear")
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Iterator[Factor]:
    rest = () if bias is None else (0,)
    for axis in range(x.dim() - 1):
        yield Factor((axis, None, *(None for _ in rest)), (axis,))
    if weight.dim() == 2:
        yield Factor((None, 0, *rest), (x.dim() - 1,))
        if bias is None:
            yield Factor((x.dim() - 1, 1), (PARTIAL,))


@_rule("matmul")
def _matmul(a: torch.Tensor, b: torch.Tensor) -> Iterator[Factor]:
    if a.dim() < 2 or b.dim() < 2:
        return
    batch = _broadcast([a[..., 0, 0], b[..., 0, 0]])
    rank = len(batch) + 2
    for axis in range(len(batch)):
        yield Factor(_runs([a[..., 0, 0], b[..., 0, 0]], batch, axis), (axis,))
    yield Factor((a.dim() - 2, None), (rank - 2,))
    yield Factor((None, b.dim() - 1), (rank - 1,))
    yield Factor((a.dim() - 1, b.dim() - 2), (PARTIAL,))


@_rule("_cdist_forward")
def _cdist(a: torch.Tensor, b: torch.Tensor, p: float, *_: Any) -> Iterator[Factor]:
    """Distances between the rows of ``a`` (..., P, M) and those of ``b`` (..., R, M)."""
    batch = _broadcast([a[..., 0, 0], b[..., 0, 0]])
    for axis in range(len(batch)):
        yield Factor(_runs([a[..., 0, 0], b[..., 0, 0]], batch, axis), (axis,))
    yield Factor((a.dim() - 2, None), (len(batch),))
    yield Factor((None, b.dim() - 2), (len(batch) + 1,))


@_rule("_cdist_backward")
def _cdist_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, p: float, distances: torch.Tensor
) -> Iterator[Factor]:
    """The gradient of ``a`` (..., P, M), from that of the distances (..., P, R)."""
    rank = grad.dim()
    if a.dim() != rank or b.dim() != rank or a.shape[:-2] != b.shape[:-2]:
        return
    for axis in range(rank - 2):
        yield Factor((axis,) * 4, (axis,))
    yield Factor((rank - 2, rank - 2, None, rank - 2), (rank - 2,))
    yield Factor((rank - 1, None, rank - 2, rank - 1), (PARTIAL,))


# -- views and other shapes


@_rule("view _unsafe_view reshape")
def _view(x: torch.Tensor, size: Any) -> Iterator[Rule]:
    if isinstance(size, torch.dtype):
        yield from _same(x.dim(), () if size.itemsize == x.dtype.itemsize else {x.dim() - 1})
        return
    yield Reshape(tuple(x.shape), tuple(x.reshape(tuple(size)).shape))


@_rule("view_as_real")
def _view_as_real(x: torch.Tensor) -> Iterator[Factor]:
    return _same(x.dim(), ())


@_rule("view_as_complex")
def _view_as_complex(x: torch.Tensor) -> Iterator[Factor]:
    return _same(x.dim(), {x.dim() - 1})


@_rule("permute")
def _permute(x: torch.Tensor, dims: Sequence[int]) -> Iterator[Factor]:
    for after, before in enumerate(dims):
        yield Factor((before % x.dim(),), (after,))


@_rule("t")
def _t(x: torch.Tensor) -> Iterator[Factor]:
    for axis in range(x.dim()):
        yield Factor((axis,), (x.dim() - 1 - axis,))


@_rule("transpose")
def _transpose(x: torch.Tensor, dim0: Any, dim1: int = 0) -> Iterable[Rule]:
    """``prims.transpose`` is a permutation."""
    if isinstance(dim0, (list, tuple)) or not x.dim():
        return _permute(x, dim0 if x.dim() else ())
    order = list(range(x.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(x, order)


@_rule("unsqueeze")
def _unsqueeze(x: torch.Tensor, dim: int) -> Iterator[Factor]:
    new = dim % (x.dim() + 1)
    for axis in range(x.dim()):
        yield Factor((axis,), (axis + (axis >= new),))


@_rule("squeeze")
def _squeeze(x: torch.Tensor, dim: Any = None) -> Iterator[Factor]:
    """Not along an axis that is named and longer than one: a slice of one sample would lose it."""
    named = _axes(dim, x.dim())
    gone = {axis for axis in named if x.shape[axis] == 1}
    for axis, after in _kept(x.dim(), gone, keepdim=False):
        if axis not in named or isinstance(dim, (list, tuple)):
            yield Factor((axis,), (after,))


@_rule("expand")
def _expand(x: torch.Tensor, size: Sequence[int], **_: Any) -> Iterator[Factor]:
    new = len(size) - x.dim()
    for after in range(len(size)):
        before = after - new
        repeats = before < 0 or (x.shape[before] == 1 and size[after] not in (1, -1))
        yield Factor((None if repeats else before,), (after,))


@_rule("broadcast_in_dim")
def _broadcast_in_dim(x: torch.Tensor, shape: Sequence[int], places: Sequence[int]) -> Iterator[Factor]:
    for after, size in enumerate(shape):
        before = list(places).index(after) if after in places else None
        repeats = before is None or x.shape[before] != size
        yield Factor((None if repeats else before,), (after,))


@_rule("repeat")
def _repeat(x: torch.Tensor, repeats: Sequence[int]) -> Iterator[Factor]:
    """Axes that are repeated once, or made anew: there the number of repeats is a size."""
    new = len(repeats) - x.dim()
    for after, count in enumerate(repeats):
        if after < new or x.shape[after - new] == 1:
            yield Factor((None,), (after,))
        elif count == 1:
            yield Factor((after - new,), (after,))


@_rule("unfold")
def _unfold(x: torch.Tensor, dimension: int, size: int, step: int) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dimension, x.dim()))


@_rule("unfold_backward")
def _unfold_backward(
    grad: torch.Tensor, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> Iterator[Factor]:
    return _same(len(input_sizes), _axes(dim, len(input_sizes)))


def _diagonal_places(rank: int, dim1: int, dim2: int) -> list[tuple[int, int]]:
    """The axes of a stack of matrices that are not the matrices', and where they are beside the diagonal."""
    return list(_kept(rank, {dim1 % rank, dim2 % rank}, keepdim=False))


@_rule("diagonal")
def _diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Iterator[Factor]:
    for axis, after in _diagonal_places(x.dim(), dim1, dim2):
        yield Factor((axis,), (after,))


@_rule("diagonal_backward")
def _diagonal_backward(
    grad: torch.Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Iterator[Factor]:
    for axis, after in _diagonal_places(len(input_sizes), dim1, dim2):
        yield Factor((after,), (axis,))


@_rule("diagonal_scatter")
def _diagonal_scatter(
    x: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Iterator[Factor]:
    for axis, after in _diagonal_places(x.dim(), dim1, dim2):
        yield Factor((axis, after), (axis,))


@_rule("diag_embed")
def _diag_embed(x: torch.Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Iterator[Factor]:
    for axis, after in _diagonal_places(x.dim() + 1, dim1, dim2):
        yield Factor((after,), (axis,))


# -- parts and joins


@_rule("slice")
def _slice(x: torch.Tensor, dim: Any = 0, start: Any = None, end: Any = None, step: int = 1) -> Iterator[Rule]:
    if isinstance(dim, (list, tuple)):  # ``prims.slice`` narrows every axis at once
        return
    dim %= x.dim()
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    yield from _same(x.dim(), () if (first, last, step) == (0, x.shape[dim], 1) else {dim})
    if step == 1:
        yield Narrowing(dim, first, last)


@_rule("select")
def _select(x: torch.Tensor, dim: int, index: Any) -> Iterator[Factor]:
    return _reduction(x, dim, keepdim=False)


@_rule("unbind")
def _unbind(x: torch.Tensor, dim: int = 0) -> Iterator[Factor]:
    return _reduction(x, dim, keepdim=False, num_results=x.shape[dim])


@_rule("split split_with_sizes")
def _split(x: torch.Tensor, sizes: Any, dim: int = 0) -> Iterator[Factor]:
    count = len(sizes) if isinstance(sizes, (list, tuple)) else -(-x.shape[dim] // sizes)
    return _same(x.dim(), _axes(dim, x.dim()), 1, count)


@_rule("cat")
def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Iterator[Rule]:
    rank = tensors[0].dim()
    if any(tensor.dim() != rank for tensor in tensors):  # empty tensors of one axis are skipped, whatever the others'
        return
    yield from _same(rank, _axes(dim, rank), len(tensors))
    yield Concatenation(dim % rank, tuple(tensor.shape[dim] for tensor in tensors))


@_rule("stack")
def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Iterator[Factor]:
    new = dim % (tensors[0].dim() + 1)
    for axis in range(tensors[0].dim()):
        yield Factor((axis,) * len(tensors), (axis + (axis >= new),))


@_rule("select_backward")
def _select_backward(grad: torch.Tensor, input_sizes: Sequence[int], dim: int, index: int) -> Iterator[Factor]:
    for axis, after in _kept(len(input_sizes), _axes(dim, len(input_sizes)), keepdim=False):
        yield Factor((after,), (axis,))


@_rule("select_scatter")
def _select_scatter(x: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> Iterator[Factor]:
    for axis, after in _kept(x.dim(), _axes(dim, x.dim()), keepdim=False):
        yield Factor((axis, after), (axis,))


@_rule("slice_backward")
def _slice_backward(
    grad: torch.Tensor, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Iterator[Factor]:
    return _same(grad.dim(), _axes(dim, grad.dim()))


@_rule("slice_scatter")
def _slice_scatter(x: torch.Tensor, src: torch.Tensor, dim: int = 0, *_: Any) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dim, x.dim()), 2)


@_rule("triu tril")
def _triangle(x: torch.Tensor, diagonal: int = 0) -> Iterator[Factor]:
    return _same(x.dim() - 2, ())


@_rule("constant_pad_nd")
def _pad(x: torch.Tensor, pad: Sequence[int], *_: Any) -> Iterator[Factor]:
    """``pad`` goes from the last axis to the first, two numbers an axis."""
    padded = {x.dim() - 1 - place // 2 for place, count in enumerate(pad) if count != 0}
    return _same(x.dim(), padded)


# -- tensors that are made


@_rule("full zeros ones empty")
def _factory(size: Sequence[int], *_: Any, **__: Any) -> Iterator[Factor]:
    for axis in range(len(size)):
        yield Factor((), (axis,))


@_rule("full_like zeros_like ones_like empty_like")
def _like(x: torch.Tensor, *_: Any, **__: Any) -> Iterator[Factor]:
    return _same(x.dim(), ())


@_rule("new_full new_zeros new_ones new_empty")
def _new(x: torch.Tensor, size: Sequence[int], *_: Any, **__: Any) -> Iterator[Factor]:
    """What the operand holds and its shape do not matter: any of its axes, or none, goes with any of the result's."""
    for after in range(len(size)):
        yield Factor((None,), (after,))
        for axis in range(x.dim()):
            if x.shape[axis] == size[after]:
                yield Factor((axis,), (after,))


# -- tables and indices

# Ops that add into their first operand. A slice may do so by itself where that is zero: the results add up then. This
# can only be seen in the graph, so that these rules are told.
ACCUMULATIONS = frozenset(
    "scatter_add scatter_reduce index_add index_put _unsafe_index_put _unsafe_masked_index_put_accumulate".split()
)

_SAME_ZEROS = frozenset(
    "view _unsafe_view reshape expand permute t transpose unsqueeze squeeze clone alias detach _to_copy"
    " convert_element_type".split()
)
_VALUE_PLACES = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}


def is_zeros(node: Any) -> bool:
    """Whether a value of the graph is zero in all elements, as far as the ops that made it show."""
    while isinstance(node, fx.Node) and op_name(node) in _SAME_ZEROS and is_builtin(node):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_function" or not is_builtin(node):
        return False
    name = op_name(node)
    if name in _VALUE_PLACES and len(node.args) > _VALUE_PLACES[name]:
        value = node.args[_VALUE_PLACES[name]]
        return isinstance(value, (int, float)) and value == 0
    return name in ("zeros", "zeros_like", "new_zeros")


@_rule("embedding")
def _embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> Iterator[Factor]:
    for axis in range(indices.dim()):
        yield Factor((None, axis), (axis,))
    yield Factor((1, None), (indices.dim(),))


@_rule("embedding_dense_backward")
def _embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Iterator[Factor]:
    """Scaled by how often a row was read, it needs all the indices."""
    yield Factor((indices.dim(), None), (1,))
    if not scale_grad_by_freq:
        for axis in range(indices.dim()):
            yield Factor((axis, axis), (PARTIAL,))


@_rule("gather")
def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> Iterator[Factor]:
    if not x.dim() or x.dim() != index.dim():
        return
    along = dim % x.dim()
    for axis in range(x.dim()):
        if axis != along and x.shape[axis] == index.shape[axis]:
            yield Factor((axis, axis), (axis,))
    yield Factor((None, along), (along,))


@_rule("take")
def _take(x: torch.Tensor, index: torch.Tensor) -> Iterator[Factor]:
    for axis in range(index.dim()):
        yield Factor((None, axis), (axis,))


@_rule("scatter scatter_add scatter_reduce")
def _scatter(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: Any, reduce: str = "", into_zeros: bool = False, **_: Any
) -> Iterator[Factor]:
    """Rows beside each other, where index and source have all of them."""
    operands = _tensors(x, index, src)
    if not x.dim() or any(each.dim() != x.dim() for each in operands):
        return
    along = dim % x.dim()
    for axis in range(x.dim()):
        if axis != along and all(each.shape[axis] == x.shape[axis] for each in operands):
            yield Factor((axis,) * len(operands), (axis,))
    if into_zeros and reduce in ("", "sum") and len(operands) == 3 and src.shape[along] == index.shape[along]:
        yield Factor((None, along, along), (PARTIAL,))


@_rule("index_select")
def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Iterator[Factor]:
    if not x.dim() or index.dim() != 1:
        return
    along = dim % x.dim()
    for axis in range(x.dim()):
        yield Factor((None, 0) if axis == along else (axis, None), (axis,))


@_rule("index_add")
def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, into_zeros: bool = False, **_: Any
) -> Iterator[Factor]:
    if not x.dim() or index.dim() != 1 or source.dim() != x.dim():
        return
    along = dim % x.dim()
    for axis in range(x.dim()):
        if axis != along:
            yield Factor((axis, None, axis), (axis,))
    if into_zeros:
        yield Factor((None, 0, along), (PARTIAL,))


@_rule("index_copy")
def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Iterable[Rule]:
    return _index_add(x, dim, index, source)


@_rule("index_fill")
def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Iterator[Factor]:
    rest = (None,) * len(_tensors(index, value))
    for axis in set(range(x.dim())) - _axes(dim, x.dim()):
        yield Factor((axis, *rest), (axis,))


# Ops that are told of each index tensor along which of its axes it counts up from 0, as ``arange(n)[:, None]`` does.
INDEXINGS = frozenset("index _unsafe_index index_put _unsafe_index_put".split())

_SAME_COUNT = frozenset("unsqueeze view _unsafe_view reshape expand clone alias detach".split())


def _indices_of(node: fx.Node) -> list[fx.Node]:
    """The index tensors of an indexing op."""
    indices = node.args[1]
    return [index for index in indices if isinstance(index, fx.Node)] if isinstance(indices, (list, tuple)) else []


def _counts_along(node: fx.Node) -> int | None:
    """The axis along which a tensor of the graph holds 0, 1, 2, ..., the same at all places of its other axes."""
    axis_of: list[fx.Node] = []
    while op_name(node) in _SAME_COUNT and is_builtin(node) and isinstance(node.args[0], fx.Node):
        axis_of.append(node)
        node = node.args[0]
    start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    if op_name(node) != "iota" or not is_builtin(node) or (start, step) != (0, 1):
        return None
    length = _val(node).numel()
    split = Split(0)
    for view in reversed(axis_of):
        found = alignments(view, 0, split, length)
        if len(found) != 1 or not isinstance(found[0].results[0], Split):
            return None
        split = found[0].results[0]
    return split.axis if (split.outer, split.inner) == (1, 1) else None


@dataclass(frozen=True, slots=True)
class _Indexed:
    """Where the axes are of ``x[indices]``, with tensors of integers or ``None`` (all of that axis) in ``indices``."""

    tensors: list[torch.Tensor]
    places: list[int]  # the axes of x that they index
    shape: tuple[int, ...]  # to which the tensors are broadcast
    first: int  # the place of these axes in the result
    free: list[tuple[int, int]]  # the axes without an index, in x and in the result

    @property
    def rank(self) -> int:
        return len(self.shape) + len(self.free)


def _indexed(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> _Indexed | None:
    """``None`` where a mask is among the indices: the size of the result then depends on what it holds.

    The axes of the index stand in the place of the indexed ones where those are neighbours, else in front (as in NumPy,
    "combining advanced and basic indexing").
    """
    tensors = [index for index in indices if index is not None]
    places = [place for place, index in enumerate(indices) if index is not None]
    if not tensors or any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        return None
    shape = _broadcast(tensors)
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    rest = [axis for axis in range(x.dim()) if axis not in places]
    free = [(axis, k if k < first else k + len(shape)) for k, axis in enumerate(rest)]
    return _Indexed(tensors, places, shape, first, free)


@_rule("index _unsafe_index")
def _index(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], *, counting: Sequence[int | None] = ()
) -> Iterator[Rule]:
    """By an index of row numbers, each row by itself too."""
    yield from _masked_index(x, None, indices)
    for place, row, at, k in _row_numbers(x, indices, counting):
        own = (row, *_runs(at.tensors, at.shape, k))
        yield RowByRow(Factor(own, (at.first + k,)), 1 + place)


def _row_numbers(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], counting: Sequence[int | None]
) -> Iterator[tuple[int, int, _Indexed, int]]:
    """For each index tensor that counts the rows of ``x``: its place among them, the axis of ``x`` that it indexes, and
    the axis of the index along which it counts."""
    at = _indexed(x, indices)
    for place, axis in enumerate(counting if at is not None else ()):
        if at is None or axis is None:
            continue
        row, k = at.places[place], axis + len(at.shape) - at.tensors[place].dim()
        if x.shape[row] == at.tensors[place].shape[axis] == at.shape[k]:
            yield place, row, at, k


@_rule("_unsafe_masked_index")
def _masked_index(
    x: torch.Tensor, mask: torch.Tensor | None, indices: Sequence[torch.Tensor | None], fill: Any = None
) -> Iterator[Factor]:
    """``x[indices]``, ``fill`` where the mask, which is broadcast to the result, is not set."""
    at = _indexed(x, indices)
    if at is None:
        return
    masks, shape = _tensors(mask), _indexed_shape(x, at)
    for axis, after in at.free:
        yield Factor((axis, *_runs(masks, shape, after), *(None for _ in at.tensors)), (after,))
    for k in range(len(at.shape)):
        after = at.first + k
        yield Factor((None, *_runs(masks, shape, after), *_runs(at.tensors, at.shape, k)), (after,))


def _indexed_shape(x: torch.Tensor, at: _Indexed) -> tuple[int, ...]:
    """The shape of ``x[indices]``."""
    sizes = {after: x.shape[axis] for axis, after in at.free}
    sizes |= {at.first + k: size for k, size in enumerate(at.shape)}
    return tuple(sizes[axis] for axis in range(at.rank))


@_rule("index_put _unsafe_index_put")
def _index_put(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    *,
    into_zeros: bool = False,
    counting: Sequence[int | None] = (),
) -> Iterator[Rule]:
    """By an index of row numbers, each row by itself too."""
    yield from _put(x, None, indices, values, accumulate and into_zeros)
    for place, row, at, k in _row_numbers(x, indices, counting):
        shape = _indexed_shape(x, at)
        own = (row, *_runs(at.tensors, at.shape, k), *_runs([values], shape, at.first + k))
        yield RowByRow(Factor(own, (row,)), 1 + place)


@_rule("_unsafe_masked_index_put_accumulate")
def _masked_put(
    x: torch.Tensor,
    mask: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    *,
    into_zeros: bool = False,
) -> Iterator[Factor]:
    return _put(x, mask, indices, values, into_zeros)


def _put(
    x: torch.Tensor, mask: torch.Tensor | None, indices: Any, values: torch.Tensor, adds_up: bool
) -> Iterator[Factor]:
    """The axes without an index; those of the index where the results add up."""
    at = _indexed(x, indices)
    if at is None:
        return
    masks, shape = _tensors(mask), _indexed_shape(x, at)
    for axis, after in at.free:
        rest = (*(None for _ in at.tensors), *_runs([values], shape, after))
        yield Factor((axis, *_runs(masks, shape, after), *rest), (axis,))
    for k in range(len(at.shape)) if adds_up else ():
        after = at.first + k
        rest = (*_runs(at.tensors, at.shape, k), *_runs([values], shape, after))
        yield Factor((None, *_runs(masks, shape, after), *rest), (PARTIAL,))


@_rule("bucketize")
def _bucketize(x: Any, boundaries: torch.Tensor, **_: Any) -> Iterator[Factor]:
    for axis in range(x.dim() if isinstance(x, torch.Tensor) else 0):
        yield Factor((axis, None), (axis,))


@_rule("searchsorted")
def _searchsorted(rows: torch.Tensor, x: Any, **keywords: Any) -> Iterator[Factor]:
    """One row for all, or a row for each row."""
    if not isinstance(x, torch.Tensor) or keywords.get("sorter") is not None:
        return
    for axis in range(x.dim()):
        if rows.dim() == 1:
            yield Factor((None, axis), (axis,))
        elif axis < x.dim() - 1:
            yield Factor((axis, axis), (axis,))
    if rows.dim() > 1:
        yield Factor((None, x.dim() - 1), (x.dim() - 1,))


@_rule("isin")
def _isin(elements: Any, tests: Any, **_: Any) -> Iterator[Factor]:
    """Whether each element is one of the tests."""
    for axis in range(elements.dim() if isinstance(elements, torch.Tensor) else 0):
        yield Factor((axis, None) if isinstance(tests, torch.Tensor) else (axis,), (axis,))


# -- convolution, pooling, images: all that are (samples, channels, ...)


@_rule("convolution")
def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Iterator[Factor]:
    """The channels of one group are loops as well: of the weight (out, in, ...), (in, out, ...) when transposed."""
    if x.dim() != weight.dim():
        return
    rest = () if bias is None else (0,)
    yield Factor((0, None, *(None for _ in rest)), (0,))
    if groups == 1:
        made, read = (1, 0) if transposed else (0, 1)
        yield Factor((None, made, *rest), (1,))
        if bias is None:
            yield Factor((1, read), (PARTIAL,))


@_rule("convolution_backward")
def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *rest: Any
) -> Iterator[Factor]:
    if x.dim() == weight.dim():
        yield Factor((0, 0, None), _masked((0, PARTIAL, PARTIAL), rest[-1]))


def _masked(results: Sequence[int | Partial | None], mask: Sequence[bool]) -> tuple[int | Partial | None, ...]:
    """The results that were asked for."""
    return tuple(result if asked else None for result, asked in zip(results, mask, strict=True))


# Ops of images and of stacks of matrices: the last axes belong together, those before them are free. Every operand and
# every result has them at the same place. (The number of last axes, and of results.)
_STACKS: dict[str, tuple[int, int]] = {
    **{f"avg_pool{n}d{back}": (n, 1) for n in (1, 2, 3) for back in ("", "_backward") if n > 1 or not back},
    **{f"{kind}_pool{n}d": (n, 1) for kind in ("_adaptive_avg", "adaptive_avg") for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward": (n, 1) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": (n, 2) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d_backward": (n, 1) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices": (n, 2) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices_backward": (n, 1) for n in (2, 3)},
    **{f"max_unpool{n}d": (n, 1) for n in (2, 3)},
    **{f"{kind}_pad{n}d{back}": (n, 1) for kind in ("reflection", "replication") for n in (1, 2, 3)
       for back in ("", "_backward")},
    **{f"upsample_{kind}{back}": (int(kind[-2]), 1)
       for kind in "nearest1d nearest2d nearest3d linear1d bilinear2d bicubic2d trilinear3d".split()
       for back in ("", "_backward")},
    **{f"_upsample_nearest_exact{n}d{back}": (n, 1) for n in (1, 2, 3) for back in ("", "_backward")},
    **{f"_upsample_{kind}2d_aa{back}": (2, 1) for kind in ("bilinear", "bicubic") for back in ("", "_backward")},
    "pixel_shuffle": (3, 1),
    "pixel_unshuffle": (3, 1),
    "im2col": (3, 1),
    "col2im": (2, 1),
    "linalg_inv_ex": (2, 2),
    "linalg_cholesky_ex": (2, 2),
    "linalg_matrix_exp": (2, 1),
    "_linalg_det": (2, 3),
    "_linalg_slogdet": (2, 4),
}  # fmt: skip


def _stack_rule(num_last: int, num_results: int) -> OpRule:
    def rule(*args: Any, **kwargs: Any) -> Iterator[Factor]:
        operands = _tensors(*args, *kwargs.values())
        rank = operands[0].dim()
        if all(operand.dim() == rank for operand in operands):
            yield from _same(rank - num_last, (), len(operands), num_results)

    return rule


RULES.update({name: _stack_rule(*counts) for name, counts in _STACKS.items()})


@_rule("_low_memory_max_pool_with_offsets")
def _pool_with_offsets(x: torch.Tensor, kernel_size: Sequence[int], *_: Any) -> Iterator[Factor]:
    return _same(x.dim() - len(kernel_size), (), 1, 2)


@_rule("_low_memory_max_pool_offsets_to_indices")
def _pool_offsets(offsets: torch.Tensor, kernel_size: Sequence[int], *_: Any) -> Iterator[Factor]:
    return _same(offsets.dim() - len(kernel_size), ())


@_rule("channel_shuffle native_channel_shuffle")
def _channel_shuffle(x: torch.Tensor, groups: int) -> Iterator[Factor]:
    return _same(x.dim(), {1})


@_rule("grid_sampler_2d grid_sampler_3d")
def _grid_sampler(x: torch.Tensor, grid: torch.Tensor, *_: Any) -> Iterator[Factor]:
    yield Factor((0, 0), (0,))
    yield Factor((1, None), (1,))


@_rule("grid_sampler_2d_backward grid_sampler_3d_backward")
def _grid_sampler_backward(grad: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, *rest: Any) -> Iterator[Factor]:
    yield Factor((0, 0, 0), _masked((0, 0), rest[-1]))
    yield Factor((1, 1, None), _masked((1, PARTIAL), rest[-1]))


@_rule("_fft_c2c _fft_r2c _fft_c2r")
def _fft(x: torch.Tensor, dim: Sequence[int], *_: Any) -> Iterator[Factor]:
    return _same(x.dim(), _axes(dim, x.dim()))


# -- normalisation


def _each(*tensors: torch.Tensor | None) -> tuple[None, ...]:
    """These operands needed whole; an argument that is not given is no operand."""
    return (None,) * len(_tensors(*tensors))


@_rule("native_layer_norm")
def _layer_norm(x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Iterator[Factor]:
    for axis in range(x.dim() - len(shape)):
        yield Factor((axis, *_each(weight, bias)), (axis,) * 3)


@_rule("native_layer_norm_backward")
def _layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Sequence[bool]
) -> Iterator[Factor]:
    for axis in range(x.dim() - len(shape)):
        yield Factor((axis,) * 4 + _each(weight, bias), _masked((axis, PARTIAL, PARTIAL), mask))


@_rule("_fused_rms_norm")
def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: Any, eps: Any) -> Iterator[Factor]:
    for axis in range(x.dim() - len(shape)):
        yield Factor((axis, *_each(weight)), (axis, axis))


@_rule("_fused_rms_norm_backward")
def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], rstd: Any, weight: Any, mask: Sequence[bool]
) -> Iterator[Factor]:
    for axis in range(x.dim() - len(shape)):
        yield Factor((axis, axis, axis, *_each(weight)), _masked((axis, PARTIAL), mask))


@_rule("native_group_norm")
def _group_norm(x: torch.Tensor, weight: Any, bias: Any, *_: Any) -> Iterator[Factor]:
    yield Factor((0, *_each(weight, bias)), (0, 0, 0))


@_rule("native_group_norm_backward")
def _group_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: Any, rstd: Any, weight: Any, *rest: Any
) -> Iterator[Factor]:
    yield Factor((0, 0, 0, 0, *_each(weight)), _masked((0, PARTIAL, PARTIAL), rest[-1]))


def _of_channels(x: torch.Tensor, *stats: Any) -> tuple[int | None, ...]:
    """Vectors of one number a channel run along the channels; those that are empty stand for nothing."""
    return tuple(0 if each.shape == (x.shape[1],) else None for each in _tensors(*stats))


def _but_channels(x: torch.Tensor) -> Iterator[int]:
    return (axis for axis in range(x.dim()) if axis != 1)


@_rule("_native_batch_norm_legit_no_training")
def _batch_norm_eval(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *_: Any) -> Iterator[Factor]:
    """With statistics that are not the batch's, each sample and each place by itself. Two results are empty."""
    for axis in _but_channels(x):
        yield Factor((axis, *_each(weight, bias, mean, var)), (axis, None, None))
    yield Factor((1, *_of_channels(x, weight, bias, mean, var)), (1, None, None))


@_rule("native_batch_norm")
def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> Iterable[Rule]:
    """In training it changes its running statistics in place, which its schema does not say."""
    return () if training else _batch_norm_eval(x, weight, bias, mean, var)


@_rule("_native_batch_norm_legit")
def _batch_norm_no_stats(x: torch.Tensor, weight: Any, bias: Any, training: Any, *_: Any) -> Iterator[Factor]:
    """The overload without running statistics; the other changes them in place."""
    if training is True:
        yield Factor((1, *_of_channels(x, weight, bias)), (1, 0, 0))


@_rule("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> Iterator[Factor]:
    """Statistics of the batch couple the samples; those that are given do not. The last results are the new ones."""
    stats = (weight, bias, mean, var)
    for axis in () if training else _but_channels(x):
        yield Factor((axis, *_each(*stats)), (axis, None, None, None, None))
    made: tuple[int | None, ...] = (0, 0) if training else (None, None)
    yield Factor((1, *_of_channels(x, *stats)), (1, *made, 0, 0))


@_rule("native_batch_norm_backward")
def _batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: Any, mean: Any, var: Any, own_mean: Any, own_rstd: Any, *rest: Any
) -> Iterator[Factor]:
    training, _, mask = rest
    stats = (weight, mean, var, own_mean, own_rstd)
    for axis in () if training else _but_channels(x):
        yield Factor((axis, axis, *_each(*stats)), _masked((axis, PARTIAL, PARTIAL), mask))
    yield Factor((1, 1, *_of_channels(x, *stats)), _masked((1, 0, 0), mask))


# -- losses

# What ATen calls the way in which the elements of a loss are put together (aten/src/ATen/core/Reduction.h). A mean
# divides by the number of elements that it is given, which is that of the slice: no rule.
_NONE, _SUM = 0, 2


def _loss(operands: Sequence[torch.Tensor], reduction: int) -> Iterator[Factor]:
    for factor in _elementwise(operands) if reduction in (_NONE, _SUM) else ():
        yield Factor(factor.operands, factor.results if reduction == _NONE else (PARTIAL,))


def _loss_backward(grad: torch.Tensor, operands: Sequence[torch.Tensor], reduction: int) -> Iterator[Factor]:
    return _elementwise([grad, *operands]) if reduction in (_NONE, _SUM) else iter(())


@_rule("mse_loss huber_loss smooth_l1_loss soft_margin_loss")
def _distance(x: torch.Tensor, target: torch.Tensor, reduction: int = 1, *_: Any) -> Iterator[Factor]:
    return _loss([x, target], reduction)


@_rule("mse_loss_backward huber_loss_backward smooth_l1_loss_backward soft_margin_loss_backward")
def _distance_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, *_: Any
) -> Iterator[Factor]:
    return _loss_backward(grad, [x, target], reduction)


@_rule("binary_cross_entropy")
def _bce(x: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = 1) -> Iterator[Factor]:
    return _loss(_tensors(x, target, weight), reduction)


@_rule("binary_cross_entropy_with_logits")
def _bce_with_logits(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Iterator[Factor]:
    return _loss(_tensors(x, target, weight, pos_weight), reduction)


@_rule("binary_cross_entropy_backward")
def _bce_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = 1
) -> Iterator[Factor]:
    return _loss_backward(grad, _tensors(x, target, weight), reduction)


@_rule("log_sigmoid_forward")
def _log_sigmoid(x: torch.Tensor) -> Iterator[Factor]:
    """The second result is for backward; on CUDA it is empty."""
    for axis in range(x.dim()):
        yield Factor((axis,), (axis, axis if x.device.type == "cpu" else None))


def _target_axes(x: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The axes of (N, C, ...) that its targets (N, ...) have, in both; (C) alone has none."""
    if x.dim() == target.dim() + 1 and target.dim():
        yield from _kept(x.dim(), {1}, keepdim=False)


@_rule("nll_loss_forward nll_loss2d_forward")
def _nll(x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, *_: Any) -> Iterator[Factor]:
    """Of a mean the second result, the sum of the weights, is there; the first would be divided by a slice's."""
    for axis, at in _target_axes(x, target):
        loss: int | Partial | None = at if reduction == _NONE else PARTIAL if reduction == _SUM else None
        yield Factor((axis, at, *_each(weight)), (loss, PARTIAL))


@_rule("nll_loss_backward nll_loss2d_backward")
def _nll_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, *_: Any
) -> Iterator[Factor]:
    """A mean is divided by the sum of the weights that is handed in, that of the whole."""
    for axis, at in _target_axes(x, target):
        yield Factor((at if reduction == _NONE else None, axis, at, *_each(weight), None), (axis,))


# -- attention, of (samples, heads, tokens, size of a head)

_Results: TypeAlias = Callable[[int], tuple[int | Partial | None, ...]]  # given the axis


def _attention_factors(
    heads: Sequence[torch.Tensor], rest: Sequence[torch.Tensor], dropout: float, results: _Results
) -> Iterator[Factor]:
    """Samples, and heads where keys and values have as many as queries. Dropout draws for a sample by its number.

    ``heads`` are the operands that come first and have both axes; ``rest`` are those behind: masks, which are
    broadcast, and seeds.
    """
    if dropout or any(each.dim() != 4 for each in heads[:3]):
        return
    for axis in (0, 1):
        if len({each.shape[axis] for each in heads}) == 1:
            along = _runs(rest, (*heads[0].shape[:2], 0, 0), axis)
            yield Factor((axis,) * len(heads) + along, results(axis))


@_rule("_scaled_dot_product_flash_attention_for_cpu")
def _flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, *_: Any, attn_mask: Any = None, **__: Any
) -> Iterator[Factor]:
    return _attention_factors([q, k, v], _tensors(attn_mask), dropout, lambda axis: (axis, axis))


@_rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def _flash_cpu_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dropout: float, *_: Any, attn_mask: Any = None, **__: Any,
) -> Iterator[Factor]:  # fmt: skip
    return _attention_factors([grad, q, k, v, out, lse], _tensors(attn_mask), dropout, lambda axis: (axis,) * 3)


@_rule("_scaled_dot_product_flash_attention")
def _flash(q: Any, k: Any, v: Any, dropout: Any = 0.0, *_: Any, **__: Any) -> Iterator[Factor]:
    """Not the overload for quantised operands, whose fourth argument is a scale."""
    if isinstance(dropout, float):
        yield from _attention_factors([q, k, v], [], dropout, _with_lse(True, 7))


@_rule("_scaled_dot_product_flash_attention_backward")
def _flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cum_q: Any, cum_k: Any, max_q: Any, max_k: Any,
    dropout: float, is_causal: bool, seed: Any, offset: Any, **_: Any,
) -> Iterator[Factor]:  # fmt: skip
    rest = _tensors(cum_q, cum_k, seed, offset)
    return _attention_factors([grad, q, k, v, out, lse], rest, dropout, lambda axis: (axis,) * 3)


@_rule("_scaled_dot_product_efficient_attention")
def _efficient(
    q: Any, k: Any, v: Any, bias: Any, with_lse: bool, dropout: float = 0.0, *_: Any, **__: Any
) -> Iterator[Factor]:
    return _attention_factors([q, k, v], _tensors(bias), dropout, _with_lse(with_lse, 2))


def _with_lse(is_asked: bool, num_others: int) -> _Results:
    """The output, the log of the sum of exponentials, and what has nothing to do with samples."""
    return lambda axis: (axis, axis if is_asked else None, *(None,) * num_others)


@_rule("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, seed: Any, offset: Any, dropout: float,
    mask: Sequence[bool], *_: Any, **__: Any,
) -> Iterator[Factor]:  # fmt: skip
    for factor in _attention_factors([grad, q, k, v, out, lse], _tensors(bias), dropout, lambda axis: (axis,) * 3):
        heads, along = factor.operands[:6], factor.operands[6:]
        made = (*factor.results, along[0] if along else None)
        yield Factor((*heads[:4], *along, *heads[4:], *_each(seed, offset)), _masked(made, mask))


@_rule("_scaled_dot_product_cudnn_attention")
def _cudnn(
    q: Any, k: Any, v: Any, bias: Any, with_lse: bool, dropout: float = 0.0, *_: Any, **__: Any
) -> Iterator[Factor]:
    return _attention_factors([q, k, v], _tensors(bias), dropout, _with_lse(with_lse, 7))


@_rule("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any, bias: Any, cum_q: Any, cum_k: Any,
    max_q: Any, max_k: Any, dropout: float, *_: Any, **__: Any,
) -> Iterator[Factor]:  # fmt: skip
    rest = _tensors(seed, offset, bias, cum_q, cum_k)
    return _attention_factors([grad, q, k, v, out, lse], rest, dropout, lambda axis: (axis,) * 3)


@_rule("_scaled_dot_product_attention_math")
def _attention_math(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, drawn: Any = None, **_: Any
) -> Iterator[Factor]:
    return _attention_factors([q, k, v], _tensors(mask, drawn), dropout, lambda axis: (axis, axis))


@_rule("as_strided")
def _as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: Any = None) -> Iterator[Rule]:
    """Only where it is a view of one run of elements as another, as in the decomposition of group norm."""
    is_dense = list(stride) == list(torch.empty(tuple(size), device="meta").stride())
    if is_dense and x.is_contiguous() and x.numel() == math.prod(size) and not offset:
        yield Reshape(tuple(x.shape), tuple(size))
