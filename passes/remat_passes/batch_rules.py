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
from .ops import op_name

Partial: TypeAlias = Literal["partial"]
PARTIAL: Partial = "partial"  # the full value is the sum over the slices


@dataclass(frozen=True, slots=True)
class Split:
    """An axis whose size is ``outer * batch * inner``; a slice takes a range of the middle one."""

    axis: int
    outer: int = 1
    inner: int = 1

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
            return Split(axis, outer // before, inner // behind)
    return None


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
    """Whether each axis that is named has the size that its split says."""
    splits = [*zip(tensor_operands(node), alignment.operands, strict=True)]
    tensors = [(_val(operand), split) for operand, split in splits if split is not None]
    tensors += [(r, s) for r, s in zip(tensor_results(node), alignment.results, strict=True) if isinstance(s, Split)]
    return all(tensor.shape[s.axis] == s.outer * batch * s.inner for tensor, s in tensors)


def rules_of(node: fx.Node) -> tuple[Rule, ...]:
    """The ways to slice the op of one node of a joint graph."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _val)
    key = _key(node.target)
    if key in _REGISTERED:
        return tuple(_REGISTERED[key](*args, **kwargs))
    name = op_name(node)
    if name in RULES:
        return tuple(RULES[name](*args, **kwargs))
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or name in POINTWISE:
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
        ConfigError: ``op`` is no op, or ``rule`` cannot be called.
    """
    op = getattr(op, "_opoverload", op)  # of torch.library.custom_op
    if not hasattr(op, "_schema") and not hasattr(op, "_qualified_op_name"):
        raise ConfigError(f"register_batch_rule was given {op!r}, which is no op. Name one as torch.ops.mylib.op.")
    if not callable(rule):
        raise ConfigError(f"register_batch_rule was given {rule!r} for {op}: a rule is a function, called as the op is.")

    def factors(*args: Any, **kwargs: Any) -> Iterator[Factor]:
        for operands, results in rule(*args, **kwargs):
            yield Factor(tuple(operands), tuple(results))

    _REGISTERED[_key(op)] = factors


RULES: dict[str, OpRule] = {}


def _rule(names: str) -> Callable[[OpRule], OpRule]:
    def add(rule: OpRule) -> OpRule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return add


# -- the rules, by kind

# Pointwise in what they do, without the tag.
POINTWISE = frozenset("clone _to_copy to convert_element_type copy contiguous alias detach lift_fresh_copy fma".split())


def _pointwise(result: torch.Tensor, operands: Sequence[fx.Node]) -> Iterator[Factor]:
    """Each axis of the result; an operand runs along it where it is not broadcast there."""
    for axis in range(result.dim()):
        places = [axis - result.dim() + _val(operand).dim() for operand in operands]
        yield Factor(
            tuple(
                place if place >= 0 and _val(operand).shape[place] == result.shape[axis] else None
                for place, operand in zip(places, operands, strict=True)
            ),
            (axis,),
        )


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


@_rule("sum mean")
def _sum(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Iterator[Factor]:
    reduced = _axes(dim, x.dim())
    for axis, after in _kept(x.dim(), reduced, keepdim):
        yield Factor((axis,), (after,))
    for axis in sorted(reduced):
        yield Factor((axis,), (PARTIAL,))


@_rule("mm")
def _mm(a: torch.Tensor, b: torch.Tensor, **_: Any) -> Iterator[Factor]:
    yield Factor((0, None), (0,))
    yield Factor((None, 1), (1,))
    yield Factor((1, 0), (PARTIAL,))


@_rule("addmm")
def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any) -> Iterator[Factor]:
    """Not along the loop that is summed: the bias would be added once a slice."""
    rows = 0 if bias.dim() == 2 and bias.shape[0] == a.shape[0] else None
    columns = bias.dim() - 1 if bias.dim() and bias.shape[-1] == b.shape[1] else None
    yield Factor((rows, 0, None), (0,))
    yield Factor((columns, None, 1), (1,))


@_rule("bmm")
def _bmm(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> Iterator[Factor]:
    yield Factor((0, 0), (0,))
    yield Factor((1, None), (1,))
    yield Factor((None, 2), (2,))
    yield Factor((2, 1), (PARTIAL,))


@_rule("view _unsafe_view reshape")
def _view(x: torch.Tensor, size: Sequence[int]) -> Iterator[Rule]:
    yield Reshape(tuple(x.shape), tuple(x.reshape(tuple(size)).shape))


@_rule("permute")
def _permute(x: torch.Tensor, dims: Sequence[int]) -> Iterator[Factor]:
    for after, before in enumerate(dims):
        yield Factor((before % x.dim(),), (after,))


@_rule("t")
def _t(x: torch.Tensor) -> Iterator[Factor]:
    for axis in range(x.dim()):
        yield Factor((axis,), (x.dim() - 1 - axis,))


@_rule("transpose")
def _transpose(x: torch.Tensor, dim0: int, dim1: int) -> Iterator[Factor]:
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
    gone = {axis for axis in _axes(dim, x.dim()) if x.shape[axis] == 1}
    for axis, after in _kept(x.dim(), gone, keepdim=False):
        yield Factor((axis,), (after,))


@_rule("expand")
def _expand(x: torch.Tensor, size: Sequence[int], **_: Any) -> Iterator[Factor]:
    new = len(size) - x.dim()
    for after in range(len(size)):
        before = after - new
        repeats = before < 0 or (x.shape[before] == 1 and size[after] not in (1, -1))
        yield Factor((None if repeats else before,), (after,))


@_rule("slice")
def _slice(x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Iterator[Rule]:
    dim %= x.dim()
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    for axis in range(x.dim()):
        if axis != dim or (first, last, step) == (0, x.shape[dim], 1):
            yield Factor((axis,), (axis,))
    if step == 1:
        yield Narrowing(dim, first, last)


@_rule("select")
def _select(x: torch.Tensor, dim: int, index: int) -> Iterator[Factor]:
    for axis, after in _kept(x.dim(), {dim % x.dim()}, keepdim=False):
        yield Factor((axis,), (after,))


@_rule("unbind")
def _unbind(x: torch.Tensor, dim: int = 0) -> Iterator[Factor]:
    for axis, after in _kept(x.dim(), {dim % x.dim()}, keepdim=False):
        yield Factor((axis,), (after,) * x.shape[dim])


@_rule("split split_with_sizes")
def _split(x: torch.Tensor, sizes: Any, dim: int = 0) -> Iterator[Factor]:
    count = len(sizes) if isinstance(sizes, (list, tuple)) else -(-x.shape[dim] // sizes)
    for axis in range(x.dim()):
        if axis != dim % x.dim():
            yield Factor((axis,), (axis,) * count)


@_rule("cat")
def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Iterator[Rule]:
    dim %= tensors[0].dim()
    for axis in range(tensors[0].dim()):
        if axis != dim:
            yield Factor((axis,) * len(tensors), (axis,))
    yield Concatenation(dim, tuple(tensor.shape[dim] for tensor in tensors))


@_rule("full zeros ones empty")
def _factory(size: Sequence[int], *_: Any, **__: Any) -> Iterator[Factor]:
    for axis in range(len(size)):
        yield Factor((), (axis,))
