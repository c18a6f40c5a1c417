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
# Its blocks of channels, to which backward pads the weight, and what it allocates besides: in forward 4 KiB and as much
# a thread, in backward up to 12.5 KiB a thread. Measured over 12 shapes with 1 and 2 threads.
CONVOLUTION_CHANNELS = 16
CONVOLUTION_FORWARD_BYTES, CONVOLUTION_BACKWARD_BYTES = 2**12, 13 * 2**10
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


def convolution_bytes(layouts: Sequence[Layout], output_numel: int, dtype: torch.dtype, threads: int) -> int:
    """Of a convolution, whose operands are image and weight, or of its backward: gradient, image and weight.

    oneDNN copies the weight, twice in backward, where one copy is padded, and twice for few outputs; and it copies what
    is not channels-last; for bfloat16 backward transposes an image a thread. Measured over 60 shapes. ``output_numel``
    is the number of elements that the convolution returns, or that its gradient has.
    """
    is_backward = len(layouts) == 3
    *images, weight = layouts
    image = images[-1]
    image_bytes, weight_bytes, output_bytes = (
        numel * dtype.itemsize for numel in (image.numel, weight.numel, output_numel)
    )
    if dtype not in ONEDNN_CONVOLUTION:
        pixels, planes = math.prod(image.sizes[2:]) or 1, image.sizes[0] * weight.sizes[0] or 1
        return image_bytes * (output_numel // planes) // pixels * math.prod(weight.sizes[2:])
    outputs, inputs, *kernel = weight.sizes
    if is_backward:
        padded = [-(-count // CONVOLUTION_CHANNELS) * CONVOLUTION_CHANNELS for count in (outputs, inputs)]
        total = weight_bytes + math.prod((*padded, *kernel)) * dtype.itemsize + threads * CONVOLUTION_BACKWARD_BYTES
    else:
        total = weight_bytes * (2 if outputs < CONVOLUTION_CHANNELS else 1) + (1 + threads) * CONVOLUTION_FORWARD_BYTES
    if dtype is torch.bfloat16 and is_backward:
        total += threads * (image_bytes + output_bytes) // (image.sizes[0] or 1)
    if all(layout.is_channels_last for layout in images):
        return total
    odd = (layout for layout in images if not (layout.is_channels_last or layout.is_contiguous))
    total += sum(layout.numel * dtype.itemsize for layout in odd)
    return total + (image_bytes + output_bytes if is_backward else max(image_bytes, output_bytes))


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
