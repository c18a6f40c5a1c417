"""Workspace: what ATen's and oneDNN's kernels on CPU allocate for themselves while they run.

Nothing states these bytes: not the graph, not the code that Inductor writes. They were measured with torch 2.13.0 by
the allocator's own count (``remat_compiler.measure``), each rule over the shapes that its comment names, and are meant
to be met or to be a little too high. The prediction (memory.py) and the read-back use the same rules.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
HALF_PRECISION = (torch.bfloat16, torch.float16)

# What oneDNN's GEMMs in half precision allocate for each thread, at most: blocks of the operands in the order of its
# instructions. Measured over 40 shapes of up to 16 MiB on a CPU with AVX512_BF16: up to 1.68 MiB; while rows are short
# enough to stay whole, less: 0.07 MiB and up to 0.66 KiB an element; and where the operands themselves are small, up to
# 2.5 times the largest and 0.02 MiB, or the largest and 0.08 MiB (144 layouts of 16 to 2048 rows and columns, with 1
# and 2 threads).
GEMM_BUFFER_BYTES = 2 * 2**20
GEMM_WHOLE_ROW = 512
GEMM_ROW_BUFFER_BYTES, GEMM_ELEMENT_BUFFER_BYTES = 5 * 2**14, 2**10
GEMM_SMALL = ((3, 2**15), (1, 3 * 2**15))  # times the largest operand, and bytes
# The types whose convolutions oneDNN computes; others go through columns (aten/src/ATen/native/ConvolutionMM2d.cpp).
ONEDNN_CONVOLUTION = (torch.float32, torch.bfloat16)
# What is smaller, of one image, ATen computes by itself in fp32 too: elements (Convolution.cpp, ``use_mkldnn``).
NATIVE_CONVOLUTION = 20480
# Its blocks of channels, to which copies are padded, and what it allocates besides: in forward 4 KiB and as much
# a thread, in backward up to 12.5 KiB a thread. Measured over 12 shapes with 1 and 2 threads.
CONVOLUTION_CHANNELS = 16
CONVOLUTION_FORWARD_BYTES, CONVOLUTION_BACKWARD_BYTES = 2**12, 13 * 2**10
# A transposed convolution with a stride takes up to 28 KiB a thread: 10 layouts.
CONVOLUTION_TRANSPOSED_BYTES = 28 * 2**10
# How ATen's attention on CPU cuts its work: rows of queries, by the fewest tokens, and columns of keys
# (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, ``qSplitSize`` and ``kvSplitSize``).
ATTENTION_ROWS = ((768, 256), (192, 64), (0, 32))
ATTENTION_COLUMNS = 512
# What the GEMMs inside of it allocate for each thread in half precision: 0.02 to 0.23 MiB over 11 shapes.
ATTENTION_GEMM_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and strides of a tensor, in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements from the first to the last; gaps count, expanded dimensions do not."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return 1 + last if math.prod(self.sizes) else 0

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_channels_last(self) -> bool:
        return len(self.sizes) > 2 and self.strides[1] == 1

    @property
    def is_contiguous(self) -> bool:
        return self.strides == contiguous(self.sizes).strides


def contiguous(sizes: tuple[int, ...]) -> Layout:
    """The layout whose last axis runs fastest."""
    steps = itertools.accumulate(reversed(sizes[1:]), operator.mul, initial=1)
    return Layout(sizes, tuple(reversed(list(steps))) if sizes else ())


def channels_last(sizes: tuple[int, ...]) -> Layout:
    """The layout (batch, channels, ...) whose channels run fastest."""
    batch, channels, *rest = sizes
    inner = contiguous((batch, *rest, channels)).strides
    return Layout(sizes, (inner[0], 1, *inner[1:-1]))


def gemm_copies_bytes(operands: Sequence[Layout], itemsize: int) -> int:
    """The copies that a GEMM makes of operands neither whose rows nor whose columns are dense, such as expanded ones
    (aten/src/ATen/native/LinearAlgebra.cpp, ``prepare_batch_matrix_for_mkl``; Blas.cpp)."""
    return sum(layout.numel * itemsize for layout in operands if not _is_dense_matrix(layout))


def _is_dense_matrix(layout: Layout) -> bool:
    (rows, columns), (down, right) = layout.sizes[-2:], layout.strides[-2:]
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


def gemm_bytes(row: int | None, largest_bytes: int, threads: int) -> int:
    """Of a GEMM in half precision.

    Args:
        row: how many elements each sum runs over; ``None`` where it is not known.
        largest_bytes: of its largest operand or result.
        threads: that compute it.
    """
    most = GEMM_BUFFER_BYTES
    if row is not None and row <= GEMM_WHOLE_ROW:
        most = GEMM_ROW_BUFFER_BYTES + GEMM_ELEMENT_BUFFER_BYTES * row
    return threads * min(most, *(times * largest_bytes + more_bytes for times, more_bytes in GEMM_SMALL))


@dataclass(frozen=True, slots=True)
class Convolution:
    """What a convolution is told beside its operands."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    is_transposed: bool
    groups: int
    wants_image: bool = True  # its backward returns the gradient of the image

    @staticmethod
    def of(arguments: Sequence[Any]) -> Convolution:
        """From what follows operands and bias in a call of ``aten.convolution`` or of its backward."""
        stride, padding, dilation, is_transposed, _output_padding, groups, *mask = arguments
        wants_image = bool(mask[0][0]) if mask else True
        windows = (tuple(stride), tuple(padding), tuple(dilation))
        return Convolution(*windows, bool(is_transposed), int(groups), wants_image)

    @property
    def is_strided(self) -> bool:
        return any(step != 1 for step in self.stride)


def convolution_bytes(
    layouts: Sequence[Layout], output_numel: int, dtype: torch.dtype, threads: int, told: Convolution
) -> int:
    """Of a convolution, whose operands are image and weight, or of its backward: gradient, image and weight.

    oneDNN copies the weight, and what is not channels-last, padded to its blocks of channels; for bfloat16 backward
    transposes an image a thread. Measured over 84 shapes, groups and transposed ones among them. ``output_numel`` is
    the number of elements that the convolution returns, or that its gradient has.
    """
    is_backward = len(layouts) == 3
    *images, weight = layouts
    image = images[-1]
    if dtype not in ONEDNN_CONVOLUTION or (dtype is torch.float32 and _is_native(image, weight, threads, told)):
        return _columns(image, weight, output_numel, told) * dtype.itemsize
    is_channels_last = all(layout.is_channels_last for layout in images)
    by_columns = told.is_transposed and told.is_strided and not is_backward
    batch, (outputs, inputs, *kernel) = image.sizes[0] or 1, weight.sizes
    channels = inputs * told.groups if told.is_transposed else outputs
    copied_output = _blocked(output_numel, channels)
    copied_weight = math.prod((_in_blocks(outputs), _in_blocks(inputs), *kernel))

    if is_backward:
        numel = weight.numel + copied_weight
    elif is_channels_last:
        numel = weight.numel * (2 if outputs < CONVOLUTION_CHANNELS else 1)
    else:
        numel = weight.numel if told.groups > 1 else copied_weight
    if is_backward and dtype is torch.bfloat16:
        numel += threads * (image.numel + output_numel) // batch
    if is_channels_last:
        numel += threads * _blocked(image.numel, image.sizes[1]) // batch if by_columns else 0
    else:
        numel += sum(x.numel for x in images if not (x.is_channels_last or x.is_contiguous))
        copied_image = _copied_image(image, kernel, told, is_backward=is_backward)
        if is_backward:
            numel += copied_image + copied_output
        elif by_columns:
            numel += 2 * output_numel
        else:  # the result itself is allocated when the copy of the image is gone
            numel += max(copied_image + copied_output - output_numel, copied_output)

    total = numel * dtype.itemsize
    if is_backward:
        return total + threads * CONVOLUTION_BACKWARD_BYTES
    total += (1 + threads) * CONVOLUTION_FORWARD_BYTES if is_channels_last else 0
    return total + (threads * CONVOLUTION_TRANSPOSED_BYTES if by_columns else 0)


def _copied_image(image: Layout, kernel: Sequence[int], told: Convolution, *, is_backward: bool) -> int:
    """Elements of the copy of an image. A first layer reads its few channels as they are."""
    is_first = told.groups == 1 and image.sizes[1] < CONVOLUTION_CHANNELS and math.prod(kernel) > 1
    is_read_in_place = is_first and not (is_backward and told.wants_image)
    return 0 if is_read_in_place else _blocked(image.numel, image.sizes[1])


def _blocked(numel: int, channels: int) -> int:
    """The elements of an image with so many channels in blocks of channels."""
    return numel // (channels or 1) * _in_blocks(channels)


def _in_blocks(channels: int) -> int:
    return -(-channels // CONVOLUTION_CHANNELS) * CONVOLUTION_CHANNELS


def _is_native(image: Layout, weight: Layout, threads: int, told: Convolution) -> bool:
    """Whether ATen computes a convolution in fp32 by itself because it is small (aten/src/ATen/native/Convolution.cpp,
    ``use_mkldnn``)."""
    batch, kernel = image.sizes[0], weight.sizes[2:][-2:]
    is_strided = told.is_strided or any(step != 1 for step in told.dilation)
    if not is_strided and batch < 16 and all(size == 1 for size in kernel) and threads == 1:
        return True
    is_large = len(kernel) == 2 and all(size > 3 for size in kernel)
    return told.groups == 1 and not is_large and batch == 1 and math.prod(image.sizes[:4]) <= NATIVE_CONVOLUTION


def _columns(image: Layout, weight: Layout, output_numel: int, told: Convolution) -> int:
    """The elements of an image unfolded so that a convolution is a product (aten/src/ATen/native/ConvolutionMM2d.cpp);
    of a transposed one, of the product that is folded (NaiveConvolutionTranspose2d.cpp)."""
    batch, kernel = image.sizes[0] or 1, weight.sizes[2:]
    if told.is_transposed:
        return weight.sizes[1] * told.groups * math.prod(kernel) * (image.numel // (image.sizes[1] or 1))
    if all(size == 1 for size in kernel) and not told.is_strided and not any(told.padding):
        return 0
    pixels = output_numel // (batch * weight.sizes[0] or 1)
    return batch * image.sizes[1] * pixels * math.prod(kernel)


def attention_bytes(query: Layout, key: Layout, dtype: torch.dtype, threads: int) -> int:
    """Of ATen's attention on CPU: the scores of a block a thread, in fp32 and again in half precision, and what it sums
    up (FlashAttentionKernel.cpp)."""
    block, rows = _attention_block(query, key)
    is_half = dtype in HALF_PRECISION
    sums = 4 * (2 * rows + rows * query.sizes[-1])
    return threads * (block * (6 if is_half else 4) + sums + (ATTENTION_GEMM_BYTES if is_half else 0))


def attention_backward_bytes(gradient: Layout, query: Layout, key: Layout, dtype: torch.dtype, threads: int) -> int:
    """Of its backward: the scores of a block a thread and their gradient, and a copy of the incoming gradient where the
    heads of a token do not stand together, because it is read token by token (FlashAttentionKernel.cpp)."""
    block, rows = _attention_block(query, key)
    is_half = dtype in HALF_PRECISION
    copied_bytes = gradient.numel * dtype.itemsize if gradient.strides[1] > gradient.strides[2] else 0
    thread_bytes = 2 * block * (6 if is_half else 4) + 4 * rows + (ATTENTION_GEMM_BYTES if is_half else 0)
    return copied_bytes + threads * thread_bytes


def _attention_block(query: Layout, key: Layout) -> tuple[int, int]:
    """How many scores a thread computes at once, and for how many rows."""
    tokens = query.sizes[-2]
    rows = min(next(rows for fewest, rows in ATTENTION_ROWS if tokens >= fewest), tokens)
    return rows * min(ATTENTION_COLUMNS, key.sizes[-2]), rows
