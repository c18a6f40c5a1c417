"""Every rule for how an op carries the batch, by running the op: whole against slices of uneven length."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # registers prims
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from remat_passes import batch_rules
from remat_passes.batch_rules import (
    ACCUMULATIONS,
    PARTIAL,
    POINTWISE,
    RULES,
    Alignment,
    Factor,
    Rule,
    Split,
    alignments,
    is_zeros,
    rules_of,
    tensor_operands,
)
from remat_passes.errors import ConfigError
from remat_passes.microbatch import local_arguments
from remat_passes.ops import op_name

aten, prims = torch.ops.aten, torch.ops.prims
TOLERANCE = 1e-12  # of sums of a few float64 of size 1, in another order
BATCHES = (2, 3, 4)


@dataclass(frozen=True)
class Call:
    """An op with real operands. What it makes is not compared where it is what memory happened to hold."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[..., Any]
    is_filled: bool = True


def call(op: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(op, args, kwargs, op)


def R(*shape: int) -> Tensor:  # noqa: N802
    return torch.randn(shape, dtype=torch.float64)


def P(*shape: int) -> Tensor:  # noqa: N802
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def Int(high: int, *shape: int) -> Tensor:  # noqa: N802
    return torch.randint(high, shape)


def Mask(*shape: int) -> Tensor:  # noqa: N802
    return torch.rand(shape) < 0.5


# -- running an op on a slice


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def node_of(made: Call) -> tuple[fx.Node, list[Tensor], tuple[Any, ...]]:
    """The op as a node of a graph whose values are fake, its real operands, and its results on all of them.

    Operands that are zero in all elements are made by the graph.
    """
    fake, graph, operands = FakeTensorMode(), fx.Graph(), []

    def node_of_leaf(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        operands.append(leaf)
        if leaf.numel() and not leaf.any() and leaf.dtype is torch.float64:
            node = graph.call_function(aten.full.default, (list(leaf.shape), 0), {"dtype": leaf.dtype})
        else:
            node = graph.placeholder(f"x_{len(operands)}")
        node.meta["val"] = fake.from_tensor(leaf)
        return node

    args, kwargs = pytree.tree_map(node_of_leaf, (made.args, made.kwargs))
    node = graph.call_function(made.op, args, kwargs)
    results = made.run(*made.args, **made.kwargs)
    node.meta["val"] = pytree.tree_map(lambda r: fake.from_tensor(r) if is_tensor(r) else r, results)
    return node, operands, tuple(results) if isinstance(results, (tuple, list)) else (results,)


def taken(x: Tensor, split: Split | None, start: int, length: int, batch: int) -> Tensor:
    """The samples from ``start`` on."""
    if split is None:
        return x
    parts = x.unflatten(split.axis, (split.outer, batch, split.inner)).narrow(split.axis + 1, start, length)
    return parts.flatten(split.axis, split.axis + 2).contiguous()  # a view takes no others


def on_slice(
    made: Call, node: fx.Node, operands: list[Tensor], alignment: Alignment, start: int, length: int, batch: int
) -> tuple[Any, ...]:
    """The results of the op on some samples."""
    local = [taken(x, split, start, length, batch) for x, split in zip(operands, alignment.operands, strict=True)]
    following = iter(local)
    args, kwargs = local_arguments(node, alignment, batch, length)
    args, kwargs = pytree.tree_map(lambda leaf: next(following) if isinstance(leaf, fx.Node) else leaf, (args, kwargs))
    results = made.run(*args, **kwargs)
    results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
    if op_name(node) == "mean" and alignment.results[0] == PARTIAL:  # the sum of the slice by the count of the whole
        return (results[0] * local[0].numel() / operands[0].numel(),)
    return results


def assert_same(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.shape == wanted.shape, what
    assert found.dtype == wanted.dtype, what
    if wanted.dtype.is_floating_point or wanted.dtype.is_complex:
        torch.testing.assert_close(
            found, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True, msg=lambda m: what + m
        )
    else:
        assert torch.equal(found, wanted), what


def check(
    made: Call, node: fx.Node, operands: list[Tensor], whole: tuple[Any, ...], alignment: Alignment, batch: int
) -> None:
    """Split results are the whole's slices; partial ones add up to the whole."""
    spans = ((0, batch - 1), (batch - 1, 1))
    slices = [on_slice(made, node, operands, alignment, *span, batch) for span in spans]
    for place, result in enumerate(alignment.results):
        what = f"{made.op} {alignment} result {place} batch {batch}\n"
        if result == PARTIAL:
            total = sum(results[place] for results in slices)
            assert_same(total, whole[place], what)
        if isinstance(result, Split):
            for span, results in zip(spans, slices, strict=True):
                wanted = taken(whole[place], result, *span, batch)
                assert_same(results[place], wanted if made.is_filled else results[place].expand(wanted.shape), what)


def splits_of(size: int) -> Iterator[tuple[Split, int]]:
    for batch, outer in itertools.product(BATCHES, (1, 2)):
        if size and size % (batch * outer) == 0:
            yield Split(0, outer, size // batch // outer), batch


def alignments_of(node: fx.Node, operands: list[Tensor], whole: tuple[Any, ...]) -> dict[tuple[Alignment, int], None]:
    """All ways to slice the op, from each axis of each operand and of each result."""
    places = [(place, x) for place, x in enumerate(operands)]
    places += [(-1 - place, x) for place, x in enumerate(whole) if is_tensor(x)]
    found: dict[tuple[Alignment, int], None] = {}
    for place, x in places:
        for axis, size in enumerate(x.shape):
            for split, batch in splits_of(size):
                at = Split(axis, split.outer, split.inner)
                found |= dict.fromkeys((alignment, batch) for alignment in alignments(node, place, at, batch))
    return found


def check_call(made: Call) -> int:
    """Check all alignments of an op; the number of them.

    Raises:
        AssertionError: a slice is not what the rule says, or a factor was never tried.
    """
    node, operands, whole = node_of(made)
    found = alignments_of(node, operands, whole)
    for alignment, batch in found:
        check(made, node, operands, whole, alignment, batch)
    for rule in rules_of(node):
        assert any(tries(rule, alignment) for alignment, _ in found) or not can_be_split(rule, operands, whole), rule
    return len(found)


def check_calls(calls: list[Call]) -> int:
    """See ``check_call``; of all of them together."""
    return sum(check_call(made) for made in calls)


def tries(rule: Rule, alignment: Alignment) -> bool:
    if not isinstance(rule, Factor):
        return True
    axes = tuple(None if split is None else split.axis for split in alignment.operands)
    results = tuple(result.axis if isinstance(result, Split) else result for result in alignment.results)
    return (axes, results) == (rule.operands, rule.results)


def can_be_split(rule: Rule, operands: list[Tensor], whole: tuple[Any, ...]) -> bool:
    """Whether a loop has one of the sizes that are tried."""
    assert isinstance(rule, Factor)
    sizes = [x.shape[axis] for x, axis in zip(operands, rule.operands, strict=True) if axis is not None]
    sizes += [x.shape[axis] for x, axis in zip(whole, rule.results, strict=True) if isinstance(axis, int)]
    return any(True for _ in splits_of(sizes[0]))


# -- attention that runs on CUDA only: the same mathematics in Python, with results as the kernel's schema has them


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """The output, and the log of the sum of exponentials."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attention_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (q, k, v, *([] if bias is None else [bias]))]
        out, _ = attention(*leaves[:3], leaves[3] if bias is not None else None)
        return list(torch.autograd.grad(out, leaves, grad))


def flash(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Any, ...]:
    return (
        *attention(q, k, v, None),
        torch.zeros(0),
        torch.zeros(0),
        4,
        4,
        torch.zeros(2),
        torch.zeros(()),
        torch.zeros(0),
    )


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Any, ...]:
    return tuple(attention_gradients(grad, q, k, v, None))


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return (*attention(q, k, v, bias), torch.zeros(()), torch.zeros(()))


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Any, ...]:
    made = attention_gradients(grad, q, k, v, bias)
    return (*made, *(None for _ in range(4 - len(made))))


def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return (*attention(q, k, v, bias), None, None, 4, 4, torch.zeros(()), torch.zeros(()), None)


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Any, offset: Any, bias: Any, *_: Any
) -> tuple[Any, ...]:
    return tuple(attention_gradients(grad, q, k, v, bias)[:3])


def _cuda_attention() -> Iterator[tuple[str, Call]]:
    q, k, v, bias, seed = R(4, 2, 4, 3), R(4, 2, 4, 3), R(4, 2, 4, 3), R(4, 2, 4, 4), Int(9)
    one = R(4, 1, 4, 3)  # one head for all queries
    prefix = "_scaled_dot_product_"
    for name, args, run in (
        ("flash_attention", (q, k, v), flash),
        ("flash_attention", (q, one, one, 0.0, True), flash),
        ("efficient_attention", (q, k, v, bias, True), efficient),
        ("efficient_attention", (q, k, v, None, True), efficient),
        ("cudnn_attention", (q, k, v, bias, True), cudnn),
    ):
        yield prefix + name, Call(getattr(aten, prefix + name).default, args, {}, run)
    out, lse = attention(q, k, v, None)
    grad, empty = R(4, 2, 4, 3), torch.zeros(0)
    for name, args, run in (
        ("flash", (grad, q, k, v, out, lse, empty, None, 4, 4, 0.0, False, seed, seed), flash_backward),
        ("efficient", (grad, q, k, v, bias, out, lse, seed, seed, 0.0, [True] * 4), efficient_backward),
        ("efficient", (grad, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False]), efficient_backward),
        ("cudnn", (grad, q, k, v, out, lse, seed, seed, bias, None, None, 4, 4, 0.0, False), cudnn_backward),
    ):
        name = f"{prefix}{name}_attention_backward"
        yield name, Call(getattr(aten, name).default, args, {}, run)


# -- samples of every op that has a rule


def _reductions() -> Iterator[tuple[str, Call]]:
    x = R(4, 6, 3)
    for name in ("sum", "mean"):
        op = getattr(aten, name)
        yield name, call(op.default, x)
        for dim, keepdim in (([0], False), ([-1], True), ([0, 1], True), ([1, 2], False)):
            yield name, call(op.dim if name == "mean" else op.dim_IntList, x, dim, keepdim)
    yield "sum", call(prims.sum.default, x, [1])
    for name in ("amax", "amin"):
        yield name, call(getattr(aten, name).default, x, [-2], True)
        yield name, call(getattr(aten, name).default, x)
        yield name, call(getattr(aten, name).default, x, [0, -1])
    for name in ("any", "all"):
        op = getattr(aten, name)
        yield name, call(op.dim, Mask(4, 6, 3), -1)
        yield name, call(op.dims, Mask(4, 6, 3), [0], True)
        yield name, call(op.default, Mask(4, 6))
    for name in ("argmax", "argmin"):
        yield name, call(getattr(aten, name).default, x, 1)
        yield name, call(getattr(aten, name).default, x, 1, True)
        yield name, call(getattr(aten, name).default, x)
    yield "prod", call(aten.prod.dim_int, x, -1, True)
    yield "prod", call(aten.prod.default, x)
    yield "logsumexp", call(aten.logsumexp.default, x, [1], False)
    for name in ("max", "min"):
        op = getattr(aten, name)
        yield name, call(op.dim, x, -2)
        yield name, call(op.dim, x, 0, True)
        yield name, call(op.default, x)
        yield name, call(op.other, x, R(6, 1))
    for name in ("median", "nanmedian", "mode"):
        op = getattr(aten, name)
        yield name, call(op.default if name == "mode" else op.dim, x, -2)
    yield "median", call(aten.median.default, x)
    yield "kthvalue", call(aten.kthvalue.default, x, 2, 1, True)
    for name in ("var", "std", "var_mean", "std_mean"):
        op = getattr(aten, name)
        yield name, call(op.correction, x, [-1], correction=0)
        yield name, call(op.correction, x, [0, 2], correction=1, keepdim=True)
        yield name, call(op.dim, x, [1], False, True)
        yield name, call(op.default, x, False)
        yield name, call(op.correction, x)
    yield "var", call(prims.var.default, x, [1], 0.0)
    yield "norm", call(aten.norm.ScalarOpt_dim, x, 2, [-1])
    yield "norm", call(aten.norm.Scalar, x, 2)
    yield "linalg_vector_norm", call(aten.linalg_vector_norm.default, x, 3, [0], True)
    yield "linalg_vector_norm", call(aten.linalg_vector_norm.default, x)
    yield "prepare_softmax_online", call(prims.prepare_softmax_online.default, x, 1)


def _along_one_axis() -> Iterator[tuple[str, Call]]:
    x = R(4, 6, 3)
    for name in ("_softmax", "_log_softmax"):
        yield name, call(getattr(aten, name).default, x, -1, False)
        backward = name + "_backward_data"
        yield backward, call(getattr(aten, backward).default, R(4, 6, 3), x.softmax(1), -2, torch.float64)
    for name in ("softmax", "log_softmax"):
        yield name, call(getattr(aten, name).int, x, 1)
    yield "_safe_softmax", call(aten._safe_softmax.default, x, 1)
    for name in ("cumsum", "cumprod", "logcumsumexp"):
        yield name, call(getattr(aten, name).default, x, -1)
    for name in ("cummax", "cummin"):
        yield name, call(getattr(aten, name).default, x, -2)
    yield "flip", call(aten.flip.default, x, [-2, 2])
    yield "rev", call(prims.rev.default, x, [1])
    yield "glu", call(aten.glu.default, x, 1)
    yield "glu_backward", call(aten.glu_backward.default, R(4, 3, 3), x, 1)
    yield "sort", call(aten.sort.default, x, 1)
    yield "sort", call(aten.sort.stable, x, stable=True, dim=0)
    yield "topk", call(aten.topk.default, x, 2, 1)
    yield "roll", call(aten.roll.default, x, [1], [-1])
    yield "rot90", call(aten.rot90.default, R(4, 3, 3), 1, [-1, 1])
    yield "roll", call(aten.roll.default, x, [1])
    yield "renorm", call(aten.renorm.default, x, 2, -2, 1.0)
    yield "linalg_cross", call(aten.linalg_cross.default, x, R(1, 6, 3))


def _products() -> Iterator[tuple[str, Call]]:
    yield "mm", call(aten.mm.default, R(4, 6), R(6, 3))
    for bias in (R(3), R(4, 3), R(1, 3), R(4, 1), R(1)):
        yield "addmm", call(aten.addmm.default, bias, R(4, 6), R(6, 3), beta=0.5)
    yield "bmm", call(aten.bmm.default, R(4, 6, 2), R(4, 2, 3))
    for bias in (R(4, 6, 3), R(3), R(4, 1, 1), R(6, 1)):
        yield "baddbmm", call(aten.baddbmm.default, bias, R(4, 6, 2), R(4, 2, 3))
    yield "mv", call(aten.mv.default, R(4, 6), R(6))
    yield "addmv", call(aten.addmv.default, R(4), R(4, 6), R(6))
    yield "addmv", call(aten.addmv.default, R(1), R(4, 6), R(6))
    yield "dot", call(aten.dot.default, R(6), R(6))
    yield "vdot", call(aten.vdot.default, R(6), R(6))
    yield "linear", call(aten.linear.default, R(4, 6, 3), R(2, 3))
    yield "linear", call(aten.linear.default, R(4, 6, 3), R(2, 3), R(2))
    yield "matmul", call(aten.matmul.default, R(4, 2, 6, 3), R(2, 3, 2))
    yield "matmul", call(aten.matmul.default, R(4, 1, 6, 3), R(1, 2, 3, 2))
    yield "matmul", call(aten.matmul.default, R(4, 3), R(3, 2))
    a, b = R(4, 6, 3), R(4, 2, 3)
    yield "_cdist_forward", call(aten._cdist_forward.default, a, b, 2.0, None)
    yield "_cdist_forward", call(aten._cdist_forward.default, a, R(2, 3), 2.0, None)
    distances = aten._cdist_forward.default(a, b, 2.0, None)
    yield "_cdist_backward", call(aten._cdist_backward.default, R(4, 6, 2), a, b, 2.0, distances)


def _shapes() -> Iterator[tuple[str, Call]]:
    x = R(4, 6, 3)
    for name in ("view", "_unsafe_view", "reshape"):
        for size in ([24, 3], [4, 18], [2, 2, 6, 3], [-1], [2, 12, 3], [4, 6, 1, 3], [8, 9]):
            yield name, call(getattr(aten, name).default, x, size)
    yield "view", call(aten.view.dtype, x, torch.int64)
    yield "as_strided", call(aten.as_strided.default, R(4, 2, 3), [4, 6], [6, 1])
    yield "as_strided", call(aten.as_strided.default, R(4, 6), [4, 2, 3], [6, 3, 1])
    yield "view", call(aten.view.dtype, x, torch.float32)
    yield "view_as_real", call(aten.view_as_real.default, torch.complex(x, x))
    yield "view_as_complex", call(aten.view_as_complex.default, R(4, 6, 2))
    yield "permute", call(aten.permute.default, x, [2, -3, 1])
    yield "t", call(aten.t.default, R(4, 6))
    yield "t", call(aten.t.default, R(4))
    yield "transpose", call(aten.transpose.int, x, -1, 0)
    yield "transpose", call(prims.transpose.default, x, [2, 0, 1])
    yield "unsqueeze", call(aten.unsqueeze.default, x, -2)
    yield "squeeze", call(aten.squeeze.dim, R(4, 1, 3), -2)
    yield "squeeze", call(aten.squeeze.dims, R(4, 1, 3), [0, 1])
    yield "squeeze", call(aten.squeeze.default, R(4, 1, 3))
    yield "expand", call(aten.expand.default, R(1, 6, 1), [4, -1, 3])
    yield "expand", call(aten.expand.default, R(6, 3), [4, 6, 3])
    yield "broadcast_in_dim", call(prims.broadcast_in_dim.default, R(4, 1), [3, 4, 6], [1, 2])
    yield "repeat", call(aten.repeat.default, R(6, 3), [4, 1, 2])
    yield "repeat", call(aten.repeat.default, R(1, 3), [4, 1])
    yield "unfold", call(aten.unfold.default, x, 1, 3, 2)
    yield "unfold_backward", call(aten.unfold_backward.default, R(4, 2, 3, 3), [4, 6, 3], 1, 3, 2)
    y = R(4, 6, 3, 3)
    yield "diagonal", call(aten.diagonal.default, y, 1, -1, -2)
    yield "diagonal", call(aten.diagonal.default, y, 0, 0, 2)
    yield "diagonal_backward", call(aten.diagonal_backward.default, R(4, 6, 3), [4, 6, 3, 3], 0, 2, 3)
    yield "diagonal_scatter", call(aten.diagonal_scatter.default, y, R(4, 6, 3), 0, 2, 3)
    yield "diagonal_scatter", call(aten.diagonal_scatter.default, y, R(6, 3, 3), 0, 0, 2)
    yield "diag_embed", call(aten.diag_embed.default, x)
    yield "diag_embed", call(aten.diag_embed.default, x, 1, 0, 2)


def _parts() -> Iterator[tuple[str, Call]]:
    x = R(4, 6, 3)
    for rest in ((1, 1, 5), (0, 0, 2), (0, 0, 9223372036854775807), (1, 0, 6, 2), (-2, 3, 6), (0, -2, None), (1, 4, 2)):
        yield "slice", call(aten.slice.Tensor, x, *rest)
    yield "select", call(aten.select.int, x, -2, 1)
    yield "unbind", call(aten.unbind.int, x, -2)
    yield "split", call(aten.split.Tensor, x, 4, 1)
    yield "split_with_sizes", call(aten.split_with_sizes.default, x, [2, 4], -2)
    yield "cat", call(aten.cat.default, [x, R(4, 6, 2)], -1)
    yield "cat", call(aten.cat.default, [x, R(4, 6, 3)])
    yield "cat", call(aten.cat.default, [R(0), x])
    yield "stack", call(aten.stack.default, [x, R(4, 6, 3)], -2)
    yield "select_backward", call(aten.select_backward.default, R(4, 3), [4, 6, 3], -2, 1)
    yield "select_scatter", call(aten.select_scatter.default, x, R(4, 3), 1, 1)
    yield "slice_backward", call(aten.slice_backward.default, R(4, 4, 3), [4, 6, 3], 1, 1, 5, 1)
    yield "slice_scatter", call(aten.slice_scatter.default, x, R(4, 4, 3), -2, 1, 5)
    for name in ("triu", "tril"):
        yield name, call(getattr(aten, name).default, R(4, 3, 3), 1)
        yield name, call(getattr(aten, name).default, R(4, 3))
    yield "constant_pad_nd", call(aten.constant_pad_nd.default, x, [1, 2, 0, 0], 1.0)
    yield "constant_pad_nd", call(aten.constant_pad_nd.default, x, [0, 0, -1, 1])


def _made() -> Iterator[tuple[str, Call]]:
    yield "full", call(aten.full.default, [4, 6], 2.0, dtype=torch.float64)
    for name in ("zeros", "ones"):
        yield name, call(getattr(aten, name).default, [4, 6])
    yield "empty", Call(aten.empty.memory_format, ([4, 6],), {}, aten.empty.memory_format, is_filled=False)
    x = R(4, 6)
    yield "full_like", call(aten.full_like.default, x, 2)
    yield "zeros_like", call(aten.zeros_like.default, x)
    yield "ones_like", call(aten.ones_like.default, x)
    yield "empty_like", Call(aten.empty_like.default, (x,), {}, aten.empty_like.default, is_filled=False)
    yield "new_full", call(aten.new_full.default, x, [3, 4], 2.0)
    yield "new_zeros", call(aten.new_zeros.default, x, [4, 3])
    yield "new_ones", call(aten.new_ones.default, x, [4, 6])
    yield "new_empty", Call(aten.new_empty.default, (x, [4, 3]), {}, aten.new_empty.default, is_filled=False)


def _tables() -> Iterator[tuple[str, Call]]:
    x, index = R(4, 6, 3), Int(6, 4, 2, 3)
    yield "embedding", call(aten.embedding.default, R(9, 2), Int(9, 4, 6), 0)
    grad, words = R(4, 6, 2), Int(9, 4, 6)
    for is_scaled in (False, True):
        yield "embedding_dense_backward", call(aten.embedding_dense_backward.default, grad, words, 9, 0, is_scaled)
    yield "gather", call(aten.gather.default, x, -2, index)
    yield "gather", call(aten.gather.default, x, 1, Int(6, 2, 2, 3))
    yield "take", call(aten.take.default, x, Int(72, 4, 3))
    yield "scatter", call(aten.scatter.value, x, 1, index, 2.0)
    rows = torch.stack([torch.randperm(6)[:2] for _ in range(12)]).view(4, 3, 2).mT  # no place is written twice
    yield "scatter", call(aten.scatter.src, x, 1, rows, R(4, 2, 3))
    yield "scatter", call(aten.scatter.src, x, 1, rows[:2], R(4, 2, 3))
    yield "scatter", call(aten.scatter.src, torch.zeros_like(x), 1, rows, R(4, 2, 3))
    for base in (x, torch.zeros_like(x)):
        yield "scatter_add", call(aten.scatter_add.default, base, 1, index, R(4, 2, 3))
        yield "scatter_add", call(aten.scatter_add.default, base, 1, index, R(4, 4, 3))
        yield "scatter_reduce", call(aten.scatter_reduce.two, base, 1, index, R(4, 2, 3), "amax")
        yield "scatter_reduce", call(aten.scatter_reduce.two, base, 1, index, R(4, 2, 3), "sum", include_self=False)
        yield "scatter_reduce", call(aten.scatter_reduce.two, base, 1, index, R(4, 2, 3), "mean")
        yield "index_add", call(aten.index_add.default, base, 1, Int(6, 4), R(4, 4, 3), alpha=2)
    yield "index_select", call(aten.index_select.default, x, -2, Int(6, 4))
    yield "index_copy", call(aten.index_copy.default, x, 1, torch.tensor([4, 1]), R(4, 2, 3))
    yield "index_fill", call(aten.index_fill.int_Scalar, x, 1, Int(6, 2), 2.0)
    yield "index_fill", call(aten.index_fill.int_Tensor, x, 1, Int(6, 2), R())
    yield "bucketize", call(aten.bucketize.Tensor, x, torch.linspace(-1, 1, 5, dtype=torch.float64))
    yield "searchsorted", call(aten.searchsorted.Tensor, torch.linspace(-1, 1, 5, dtype=torch.float64), x)
    yield "searchsorted", call(aten.searchsorted.Tensor, R(4, 6, 2).sort(-1)[0], x)
    yield "isin", call(aten.isin.Tensor_Tensor, words, Int(9, 4))
    yield "isin", call(aten.isin.Tensor_Scalar, words, 3)


def _advanced() -> Iterator[tuple[str, Call]]:
    x = R(4, 6, 3)
    forms: list[list[Tensor | None]] = [
        [Int(4, 2, 3)],
        [None, Int(6, 4)],
        [Int(4, 4), Int(6, 4)],
        [Int(4, 4, 1), Int(6, 2)],
        [Int(4, 4), None, Int(3, 4)],
        [None, Int(6, 2, 1), Int(3, 4)],
    ]
    for indices in forms:
        for name in ("index", "_unsafe_index"):
            yield name, call(getattr(aten, name).Tensor, x, indices)
        made = x[tuple(slice(None) if index is None else index for index in indices)]
        mask = Mask(*made.shape)
        yield "_unsafe_masked_index", call(aten._unsafe_masked_index.default, x, mask, indices, 1.5)
        yield "_unsafe_masked_index", call(aten._unsafe_masked_index.default, x, mask[:1], indices, 0)
        for values, base in itertools.product((R(*made.shape), R(made.shape[-1])), (x, torch.zeros_like(x))):
            for name in ("index_put", "_unsafe_index_put"):
                yield name, call(getattr(aten, name).default, base, indices, values, True)
        values = R(*made.shape)
        for base in (x, torch.zeros_like(x)):
            put = "_unsafe_masked_index_put_accumulate"
            yield put, call(getattr(aten, put).default, base, mask, indices, values)
    yield "index", call(aten.index.Tensor, x, [Mask(4)])
    yield "index_put", call(aten.index_put.default, x, [None, torch.tensor([4, 1])], R(4, 2, 3))
    yield "index_put", call(aten.index_put.default, torch.zeros_like(x), [torch.tensor([3, 1])], R(2, 6, 3))


def _images() -> Iterator[tuple[str, Call]]:
    x = R(4, 2, 4, 4)
    lists = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for bias in (None, R(3)):
        yield "convolution", call(aten.convolution.default, x, R(3, 2, 3, 3), bias, *lists)
    yield "convolution", call(aten.convolution.default, x, R(4, 1, 3, 3), None, *lists[:-1], 2)
    yield "convolution", call(aten.convolution.default, x, R(2, 3, 3, 3), None, *lists[:3], True, [0, 0], 1)
    yield "convolution", call(aten.convolution.default, R(4, 2, 6), R(3, 2, 3), None, [2], [1], [1], False, [0], 1)
    for mask in ([True, True, True], [False, True, False]):
        args = (R(4, 3, 4, 4), x, R(3, 2, 3, 3), [3], *lists, mask)
        yield "convolution_backward", call(aten.convolution_backward.default, *args)
    for n in (1, 2, 3):
        y = R(4, 2, *[4] * n)
        yield from _pools(n, y)
        yield from _resized(n, y)
        for kind in ("reflection_pad", "replication_pad"):
            pad = [1, 2] * n
            padded = getattr(aten, f"{kind}{n}d").default(y, pad)
            yield f"{kind}{n}d", call(getattr(aten, f"{kind}{n}d").default, y, pad)
            name = f"{kind}{n}d_backward"
            yield name, call(getattr(aten, name).default, torch.randn_like(padded), y, pad)
    yield "pixel_shuffle", call(aten.pixel_shuffle.default, R(4, 8, 3, 3), 2)
    yield "pixel_unshuffle", call(aten.pixel_unshuffle.default, x, 2)
    for name in ("channel_shuffle", "native_channel_shuffle"):
        yield name, call(getattr(aten, name).default, R(3, 4, 2, 2), 2)
    yield "im2col", call(aten.im2col.default, x, [3, 3], [1, 1], [0, 0], [1, 1])
    yield "col2im", call(aten.col2im.default, R(4, 18, 4), [4, 4], [3, 3], [1, 1], [0, 0], [1, 1])
    grid = R(4, 3, 3, 2)
    yield "grid_sampler_2d", call(aten.grid_sampler_2d.default, x, grid, 0, 0, False)
    args = (R(4, 2, 3, 3), x, grid, 0, 0, False, [True, True])
    yield "grid_sampler_2d_backward", call(aten.grid_sampler_2d_backward.default, *args)
    volume, places = R(4, 2, 3, 3, 3), R(4, 2, 2, 2, 3)
    yield "grid_sampler_3d", call(aten.grid_sampler_3d.default, volume, places, 0, 0, False)
    args = (R(4, 2, 2, 2, 2), volume, places, 0, 0, False, [True, True])
    yield "grid_sampler_3d_backward", call(aten.grid_sampler_3d_backward.default, *args)
    yield "_fft_r2c", call(aten._fft_r2c.default, x, [3], 0, True)
    yield "_fft_c2c", call(aten._fft_c2c.default, torch.complex(x, x), [2, 3], 0, True)
    yield "_fft_c2r", call(aten._fft_c2r.default, torch.complex(x, x), [3], 0, 6)


def _pools(n: int, x: Tensor) -> Iterator[tuple[str, Call]]:
    two, one, zero = [2] * n, [1] * n, [0] * n
    average, op = f"avg_pool{n}d", aten
    yield average, call(getattr(op, average).default, x, two)
    if n == 1:
        return
    grad = R(4, 2, *two)
    args = (two, two, zero, False, True, None)
    yield f"{average}_backward", call(getattr(op, f"{average}_backward").default, grad, x, *args)
    for kind in ("_adaptive_avg", "adaptive_avg"):
        yield f"{kind}_pool{n}d", call(getattr(op, f"{kind}_pool{n}d").default, x, two)
    yield f"_adaptive_avg_pool{n}d_backward", call(getattr(op, f"_adaptive_avg_pool{n}d_backward").default, grad, x)
    _, places = getattr(op, f"adaptive_max_pool{n}d").default(x, two)
    yield f"adaptive_max_pool{n}d", call(getattr(op, f"adaptive_max_pool{n}d").default, x, two)
    name = f"adaptive_max_pool{n}d_backward"
    yield name, call(getattr(op, name).default, grad, x, places)
    name = f"max_pool{n}d_with_indices"
    largest, places = getattr(op, name).default(x, two)
    yield name, call(getattr(op, name).default, x, two)
    args = (two, two, zero, one, False, places)
    yield f"{name}_backward", call(getattr(op, f"{name}_backward").default, grad, x, *args)
    rest = ([4] * n,) if n == 2 else ([4] * n, two, zero)
    yield f"max_unpool{n}d", call(getattr(op, f"max_unpool{n}d").default, largest, places, *rest)
    if n == 2:
        name = "_low_memory_max_pool_with_offsets"
        args = (two, two, zero, one, False)
        _, offsets = getattr(prims, name).default(x, *args)
        yield name, call(getattr(prims, name).default, x, *args)
        name = "_low_memory_max_pool_offsets_to_indices"
        yield name, call(getattr(prims, name).default, offsets, two, [4, 4], two, zero, one)


def _resized(n: int, x: Tensor) -> Iterator[tuple[str, Call]]:
    size = [6] * n
    corners = {1: ("linear1d",), 2: ("bilinear2d", "bicubic2d"), 3: ("trilinear3d",)}[n]
    names = [(f"upsample_nearest{n}d", ()), (f"_upsample_nearest_exact{n}d", ())]
    names += [(f"upsample_{kind}", (False,)) for kind in corners]
    names += [(f"_upsample_{kind}_aa", (False,)) for kind in corners if n == 2]
    for name, rest in names:
        yield name, call(getattr(aten, name).default, x, size, *rest)
        back = getattr(aten, name + "_backward").default
        yield name + "_backward", call(back, R(4, 2, *size), size, list(x.shape), *rest)
    yield f"upsample_nearest{n}d", call(getattr(aten, f"upsample_nearest{n}d").vec, x, None, [2.0] * n)


def _matrices() -> Iterator[tuple[str, Call]]:
    x = R(4, 3, 3)
    spd = x @ x.mT + torch.eye(3, dtype=torch.float64)
    yield "linalg_inv_ex", call(aten.linalg_inv_ex.default, spd)
    yield "linalg_cholesky_ex", call(aten.linalg_cholesky_ex.default, spd)
    yield "linalg_matrix_exp", call(aten.linalg_matrix_exp.default, x)
    yield "_linalg_det", call(aten._linalg_det.default, x)
    yield "_linalg_slogdet", call(aten._linalg_slogdet.default, x)


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """The gradient of ``x * rstd * weight``, where ``rstd`` is the inverse root of the mean square of a row."""
    scaled = grad if weight is None else grad * weight
    normal = x * rstd
    made = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd
    return made, (grad * normal).sum((0, 1)) if mask[1] else None


def _norms() -> Iterator[tuple[str, Call]]:
    x, w = R(4, 6, 3), R(3)
    for weight, bias in ((w, R(3)), (None, None), (w, None)):
        args = (x, [3], weight, bias, 1e-5)
        yield "native_layer_norm", call(aten.native_layer_norm.default, *args)
        _, mean, rstd = aten.native_layer_norm.default(*args)
        mask = [True, weight is not None, bias is not None]
        back = (R(4, 6, 3), x, [3], mean, rstd, weight, bias, mask)
        yield "native_layer_norm_backward", call(aten.native_layer_norm_backward.default, *back)
    for weight in (w, None):
        yield "_fused_rms_norm", call(aten._fused_rms_norm.default, x, [3], weight, 1e-5)
        _, rstd = aten._fused_rms_norm.default(x, [3], weight, 1e-5)
        back = (R(4, 6, 3), x, [3], rstd, weight, [True, weight is not None])
        op = aten._fused_rms_norm_backward.default
        yield "_fused_rms_norm_backward", Call(op, back, {}, rms_norm_backward)  # there is no kernel for CPU
    image, w = R(4, 6, 2, 2), R(6)
    for weight, bias in ((w, R(6)), (None, None)):
        args = (image, weight, bias, 4, 6, 4, 3, 1e-5)
        yield "native_group_norm", call(aten.native_group_norm.default, *args)
        _, mean, rstd = aten.native_group_norm.default(*args)
        for asked in (True, False):
            mask = [asked, weight is not None, weight is not None]
            back = (R(4, 6, 2, 2), image, mean, rstd, weight, 4, 6, 4, 3, mask)
            yield "native_group_norm_backward", call(aten.native_group_norm_backward.default, *back)
    yield from _batch_norms(image, w)


def _batch_norms(x: Tensor, weight: Tensor) -> Iterator[tuple[str, Call]]:
    mean, var, bias = R(6), P(6), R(6)
    end = (0.1, 1e-5)
    yield "native_batch_norm", call(aten.native_batch_norm.default, x, weight, bias, mean, var, False, *end)
    name = "_native_batch_norm_legit_no_training"
    yield name, call(getattr(aten, name).default, x, weight, None, mean, var, *end)
    for weights in ((weight, bias), (None, None)):
        yield "_native_batch_norm_legit", call(aten._native_batch_norm_legit.no_stats, x, *weights, True, *end)
        for training in (True, False):
            name = "_native_batch_norm_legit_functional"
            yield name, call(getattr(aten, name).default, x, *weights, mean, var, training, *end)
            own = (x.mean((0, 2, 3)), (x.var((0, 2, 3)) + 1e-5).rsqrt()) if training else (R(0), R(0))
            mask = [True, weights[0] is not None, weights[0] is not None]
            args = (R(4, 6, 2, 2), x, weights[0], mean, var, *own, training, 1e-5, mask)
            yield "native_batch_norm_backward", call(aten.native_batch_norm_backward.default, *args)


def _losses() -> Iterator[tuple[str, Call]]:
    x, y, w = P(4, 6), P(4, 6), P(6)
    for reduction in (0, 1, 2):
        shape = (4, 6) if reduction == 0 else ()
        for name in ("mse_loss", "huber_loss", "smooth_l1_loss", "soft_margin_loss"):
            op, back = getattr(aten, name), getattr(aten, name + "_backward")
            rest = (1.0,) if name in ("huber_loss", "smooth_l1_loss") else ()
            yield name, call(op.default, x, y, reduction, *rest)
            yield name + "_backward", call(back.default, R(*shape), x, y, reduction, *rest)
        for weight in (None, w):
            yield "binary_cross_entropy", call(aten.binary_cross_entropy.default, x, y, weight, reduction)
            back = aten.binary_cross_entropy_backward.default
            yield "binary_cross_entropy_backward", call(back, R(*shape), x, y, weight, reduction)
            name = "binary_cross_entropy_with_logits"
            yield name, call(getattr(aten, name).default, x, y, None, weight, reduction)
        for weight in (None, P(3)):
            yield from _nll_losses(reduction, weight)
    yield "mse_loss", call(aten.mse_loss.default, x, y[:1], 2)
    yield "log_sigmoid_forward", call(aten.log_sigmoid_forward.default, R(4, 6))


def _nll_losses(reduction: int, weight: Tensor | None) -> Iterator[tuple[str, Call]]:
    for name, sizes in (("nll_loss", ()), ("nll_loss2d", (6, 2))):
        x, target = R(4, 3, *sizes), Int(3, 4, *sizes)
        op, back = getattr(aten, name + "_forward").default, getattr(aten, name + "_backward").default
        loss, total = op(x, target, weight, reduction, 1)
        yield name + "_forward", call(op, x, target, weight, reduction, 1)
        args = (torch.randn_like(loss), x, target, weight, reduction, 1, total)
        yield name + "_backward", call(back, *args)


def _attentions() -> Iterator[tuple[str, Call]]:
    q, k, v = R(4, 2, 4, 3), R(4, 2, 4, 3), R(4, 2, 4, 3)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    op, back = getattr(aten, name).default, getattr(aten, name + "_backward").default
    for mask, is_causal in ((None, True), (R(4, 1, 4, 4), False), (R(4, 4), False), (R(1, 2, 4, 4), False)):
        yield name, call(op, q, k, v, 0.0, is_causal, attn_mask=mask)
        out, lse = op(q, k, v, 0.0, is_causal, attn_mask=mask)
        args = (R(4, 2, 4, 3), q, k, v, out, lse, 0.0, is_causal)
        yield name + "_backward", call(back, *args, attn_mask=mask)
    for mask in (None, R(4, 1, 4, 4), R(2, 4, 4)):
        math_op = aten._scaled_dot_product_attention_math.default
        yield "_scaled_dot_product_attention_math", call(math_op, q, k, v, mask)
    yield from _cuda_attention()


def _plain_pointwise() -> Iterator[tuple[str, Call]]:
    x, y = R(4, 6), R(6)
    for (
        name
    ) in "clone alias detach lift_fresh_copy hardswish resolve_conj resolve_neg neg sqrt exp log sin cos tanh".split():
        yield name, call(getattr(aten, name).default, x)
    for name in "add sub mul div pow fmod remainder".split():
        yield name, call(getattr(prims, name).default, x, R(4, 6))
    for name in "eq ne lt le gt ge".split():
        yield name, call(getattr(aten, name).Tensor, x, R(4, 1))
    yield "_conj", call(aten._conj.default, torch.complex(x, x))
    yield "_to_copy", call(aten._to_copy.default, x, dtype=torch.float32)
    yield "to", call(aten.to.dtype, x, torch.float32)
    yield "contiguous", call(aten.contiguous.default, R(6, 4).t())
    yield "convert_element_type", call(prims.convert_element_type.default, x, torch.float32)
    yield "copy", call(aten.copy.default, x, y)
    yield "fma", call(prims.fma.default, x, R(4, 6), R(4, 6))
    yield "fill", call(aten.fill.Scalar, x, 2.0)
    yield "fill", call(aten.fill.Tensor, x, R())
    yield "where", call(aten.where.self, Mask(4, 1), x, y)
    yield "where", call(prims.where.default, Mask(4, 6), x, R(4, 6))
    for name in ("hardsigmoid_backward", "hardswish_backward"):
        yield name, call(getattr(aten, name).default, R(4, 6), x)
    yield "hardtanh_backward", call(aten.hardtanh_backward.default, R(4, 6), x, -1.0, 1.0)
    yield "leaky_relu_backward", call(aten.leaky_relu_backward.default, R(4, 6), x, 0.1, False)
    yield "mish_backward", call(aten.mish_backward.default, R(4, 6), x)
    yield "softplus_backward", call(aten.softplus_backward.default, R(4, 6), x, 1.0, 20.0)
    yield "elu_backward", call(aten.elu_backward.default, R(4, 6), 1.0, 1.0, 1.0, False, x)
    _, buffer = aten.log_sigmoid_forward.default(x)
    yield "log_sigmoid_backward", call(aten.log_sigmoid_backward.default, R(4, 6), x, buffer)
    yield "_prelu_kernel", call(aten._prelu_kernel.default, x, R(1, 6))
    yield "_prelu_kernel_backward", call(aten._prelu_kernel_backward.default, R(4, 6), x, R(1, 6))


KINDS = (
    _reductions,
    _along_one_axis,
    _products,
    _shapes,
    _parts,
    _made,
    _tables,
    _advanced,
    _images,
    _matrices,
    _norms,
    _losses,
    _attentions,
    _plain_pointwise,
)


def samples() -> dict[str, list[Call]]:
    """Calls of each op by its name."""
    torch.manual_seed(0)
    found: dict[str, list[Call]] = {}
    for name, made in itertools.chain.from_iterable(kind() for kind in KINDS):
        assert made.op._schema.name.split("::")[-1] == name
        found.setdefault(name, []).append(made)
    return found


SAMPLES = samples()


@pytest.mark.parametrize("name", sorted({*RULES, *POINTWISE}))
def test_a_slice_of_the_op_is_a_slice_of_the_whole(name: str) -> None:
    assert name in SAMPLES, f"{name} has a rule and no sample: add calls of it to one of KINDS"
    assert check_calls(SAMPLES[name]) > 0, f"no rule of {name} was tried"


def test_samples_are_of_ops_with_rules() -> None:
    assert set(SAMPLES) == {*RULES, *POINTWISE}


def test_stand_ins_of_cuda_attention_have_the_shapes_of_the_kernels() -> None:
    """Samples and heads are where PyTorch's own shape functions say."""
    for name, made in _cuda_attention():
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.to("meta") if is_tensor(leaf) else leaf, (made.args, made.kwargs)
        )
        kernel, stand_in = made.op(*args, **kwargs), made.run(*made.args, **made.kwargs)
        assert len(kernel) == len(stand_in), name
        for place in range(3 if name.endswith("backward") else 2):
            assert kernel[place].shape[:2] == stand_in[place].shape[:2], (name, place)


# -- ops that PyTorch calls pointwise

NOT_RUN = frozenset(["rrelu"])  # it may draw


def pointwise_overloads() -> Iterator[Any]:
    for namespace in (aten, prims):
        for name in dir(namespace):
            packet = getattr(namespace, name)
            for overload in packet.overloads() if hasattr(packet, "overloads") else ():
                op = getattr(packet, overload)
                is_plain = not op._schema.is_mutable and name not in NOT_RUN and name not in RULES
                if torch.Tag.pointwise in op.tags and is_plain:
                    yield op


def filled(op: Any, tensors: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an op: these tensors, and 2 or nothing for all that has no default."""
    following, args, kwargs = iter(tensors), [], {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            given: Any = next(following)
        elif argument.has_default_value():
            continue
        else:
            given = 2 if kind in ("number", "int") else None
        if argument.kwarg_only:
            kwargs[argument.name] = given
        else:
            args.append(given)
    return args, kwargs


def runnable(op: Any) -> Call | None:
    """A call of a pointwise op with operands of a dtype that it takes, broadcast where it takes that."""
    for dtype, shapes in itertools.product(
        (torch.float64, torch.int64, torch.bool), (((4, 6), (6,), (4, 1)), ((4, 6),) * 3)
    ):
        made = [(P(*shape) * (1 if dtype.is_floating_point else 9)).to(dtype) for shape in shapes]
        try:
            args, kwargs = filled(op, made)
            result = op(*args, **kwargs)
        except (RuntimeError, TypeError, StopIteration, NotImplementedError, ValueError):
            continue
        return Call(op, tuple(args), kwargs, op) if isinstance(result, (Tensor, tuple)) else None
    return None


@pytest.mark.filterwarnings("ignore")
def test_pointwise_ops_may_be_sliced_along_each_axis() -> None:
    torch.manual_seed(0)
    calls = [made for op in pointwise_overloads() if (made := runnable(op)) is not None]
    assert len(calls) > 200  # of some 280 overloads
    for made in calls:
        assert check_call(made) > 0, made.op


def test_a_test_of_all_elements_is_not_pointwise() -> None:
    node, _, _ = node_of(call(aten.equal.default, R(4, 6), R(4, 6)))
    assert rules_of(node) == ()


# -- the check itself


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mm", Factor((0, 0), (0,))),
        ("mm", Factor((1, 0), (0,))),
        ("mm", Factor((0, None), (PARTIAL,))),
        ("addmm", Factor((None, 1, 0), (PARTIAL,))),
        ("cumsum", Factor((2,), (2,))),
        ("_softmax", Factor((2,), (2,))),
        ("embedding", Factor((0, None), (PARTIAL,))),
        ("amax", Factor((0,), (PARTIAL,))),
        ("native_batch_norm_backward", Factor((0,) * 2 + (None,) * 5, (0, PARTIAL, PARTIAL))),
    ],
)
def test_a_wrong_rule_is_found(name: str, wrong: Factor, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES[name]
    monkeypatch.setitem(RULES, name, lambda *args, **kwargs: [*right(*args, **kwargs), wrong])
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_calls([made for made in SAMPLES[name] if len(node_of(made)[1]) == len(wrong.operands)])


def test_a_factor_that_no_sample_tries_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_rules, "alignments", lambda *_: [])
    monkeypatch.setitem(globals(), "alignments", lambda *_: [])
    with pytest.raises(AssertionError, match="Factor"):
        check_call(SAMPLES["mm"][0])


# -- rules take every overload


def bindable_overloads() -> Iterator[tuple[str, Any]]:
    for name, namespace in itertools.product(sorted(RULES), (aten, prims)):
        packet = getattr(namespace, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            text = str(op._schema)
            if not op._schema.is_mutable and "Dimname" not in text and "Tensor" in text:
                yield name, op


def test_a_rule_takes_the_arguments_of_every_overload() -> None:
    refused = []
    for name, op in bindable_overloads():
        arguments = op._schema.arguments
        positional = [argument.name for argument in arguments if not argument.kwarg_only]
        keywords = {argument.name: None for argument in arguments if argument.kwarg_only}
        least = [argument for argument in arguments if not argument.kwarg_only and not argument.has_default_value()]
        for given in (positional, positional[: len(least)]):
            try:
                inspect.signature(RULES[name]).bind(*given, **keywords)
            except TypeError as error:
                refused.append(f"{op._schema}: {error}")
    assert not refused, "\n".join(refused)


# -- sums into zeros


@torch.library.custom_op("remat_rule_tests::zeros_like", mutates_args=())
def own_zeros(x: Tensor) -> Tensor:
    """Called as one of ATen's, and is not zero."""
    return torch.ones_like(x)


@pytest.mark.parametrize(
    ("make", "is_zero"),
    [
        (lambda g: g.call_function(aten.full.default, ([4], 0)), True),
        (lambda g: g.call_function(aten.full.default, ([4], 0.5)), False),
        (lambda g: g.call_function(aten.zeros.default, ([4],)), True),
        (lambda g: g.call_function(aten.new_full.default, (g.placeholder("x"), [4], 0.0)), True),
        (lambda g: g.call_function(aten.new_zeros.default, (g.placeholder("x"), [4])), True),
        (lambda g: g.call_function(aten.zeros_like.default, (g.placeholder("x"),)), True),
        (lambda g: g.call_function(aten.full_like.default, (g.placeholder("x"), 1)), False),
        (lambda g: g.call_function(aten.empty.memory_format, ([4],)), False),
        (lambda g: g.placeholder("x"), False),
        (lambda g: g.call_function(aten.view.default, (g.call_function(aten.full.default, ([4], 0)), [2, 2])), True),
        (lambda g: g.call_function(aten.clone.default, (g.placeholder("x"),)), False),
        (lambda g: g.call_function(own_zeros._opoverload, (g.placeholder("x"),)), False),
    ],
)
def test_zeros_are_known_by_what_made_them(make: Callable[[fx.Graph], fx.Node], is_zero: bool) -> None:
    assert is_zeros(make(fx.Graph())) is is_zero


@pytest.mark.parametrize("name", sorted(ACCUMULATIONS))
def test_only_what_is_added_into_zeros_adds_up(name: str) -> None:
    adds_up = {True: 0, False: 0}
    for made in SAMPLES[name]:
        node, operands, whole = node_of(made)
        into_zeros = is_zeros(tensor_operands(node)[0])
        found = alignments_of(node, operands, whole)
        adds_up[into_zeros] += sum(PARTIAL in alignment.results for alignment, _ in found)
    assert adds_up[True] > 0
    assert adds_up[False] == 0


# -- what must not be sliced


@pytest.mark.parametrize(
    "made",
    [
        call(aten._softmax.default, R(4), 0, False),
        call(aten.cumsum.default, R(4), -1),
        call(aten.index.Tensor, R(4), [Mask(4)]),
        call(aten.nll_loss_forward.default, R(3), Int(3), None, 1, -100),
        call(aten.mse_loss.default, R(4), R(4)),
        call(aten.sort.default, R(4)),
        call(aten.amax.default, R(4)),
        call(aten.slice.Tensor, R(4), 0, 1, 3, 2),
        call(aten.flip.default, R(4), [0]),
        call(aten.native_dropout.default, R(4), 0.5, True),
        call(aten.as_strided.default, R(4), [2, 2], [1, 1]),
        call(aten.arange.default, 4),
        call(aten.squeeze.default, R(4)),  # a slice of one sample would have no axis
    ],
    ids=lambda made: str(made.op),
)
def test_what_needs_the_whole_batch_has_no_alignment(made: Call) -> None:
    assert not alignments_of(*node_of(made))


def test_dropout_inside_of_attention_is_not_sliced() -> None:
    q = R(4, 2, 4, 3)
    run = lambda *args, **_: (q, q[..., 0])  # noqa: E731
    node = node_of(Call(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, 0.1), {}, run))[0]
    assert rules_of(node) == ()


def test_a_mean_of_a_loss_counts_the_tokens_of_the_whole() -> None:
    """The weights add up; the mean itself is no partial sum, since each slice would divide by its own weights."""
    node, operands, whole = node_of(call(aten.nll_loss_forward.default, R(4, 3), Int(3, 4), P(3), 1, -100))
    results = {alignment.results for alignment, _ in alignments_of(node, operands, whole)}
    assert results == {(None, PARTIAL)}


def test_an_index_of_row_numbers_needs_the_rows_whole() -> None:
    """``x[arange(B), t]``: the index may be sliced, but it then counts rows of the whole."""
    made = call(aten.index.Tensor, R(4, 6), [torch.arange(4), Int(6, 4)])
    assert {alignment.operands[0] for alignment, _ in alignments_of(*node_of(made))} == {None}


@torch.library.custom_op("remat_rule_tests::cumsum", mutates_args=())
def own_cumsum(x: Tensor, dim: int) -> Tensor:
    """Called as one of ATen's, and couples the samples, whatever ``dim`` is."""
    return x.cumsum(0) + dim


def test_a_custom_op_has_no_rule_of_the_op_that_it_is_called_as() -> None:
    assert not alignments_of(*node_of(Call(own_cumsum._opoverload, (R(4, 3), 1), {}, own_cumsum)))
    assert alignments_of(*node_of(call(aten.cumsum.default, R(4, 3), 1)))


@pytest.mark.parametrize("op", [aten.mm, aten.mm.default, aten.sin, aten.add.Tensor, aten.where])
def test_a_rule_for_what_has_one_is_refused(op: Any) -> None:
    with pytest.raises(ConfigError, match=f"a rule for {op}, which remat has a rule of its own for"):
        batch_rules.register(op, lambda *_: [])


def test_a_rule_for_an_op_of_pytorchs_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_rules, "_REGISTERED", {})
    made = call(aten.histc.default, R(4, 3))
    assert not alignments_of(*node_of(made))
    batch_rules.register(aten.histc, lambda x, *_: [((0,), ("partial",))])
    assert {alignment.results for alignment, _ in alignments_of(*node_of(made))} == {(PARTIAL,)}
    batch_rules.register(aten.histc, lambda x, *_: [])  # a later one takes its place
    assert not alignments_of(*node_of(made))


def test_equal_sizes_do_not_confuse_axes() -> None:
    """A mask of (T, T) beside (B, T, T) with T equal to B has no axis for the batch."""
    node, _, _ = node_of(call(aten.add.Tensor, R(4, 4, 4), R(4, 4)))
    (found,) = alignments(node, 0, Split(0), 4)
    assert found.operands == (Split(0), None)
