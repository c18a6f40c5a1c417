"""``remat::kept``: a value that is in memory from here on.

The forward and the backward of a micro-batch are one graph, in which Inductor decides by itself what it writes and what
it computes again where it is read. What the plan saves is written, and written as the plan counts it: without this a
dropout's random numbers were, at four bytes each, and not its mask (a GPT in two slices: 32.7 MiB for 26.5).
"""

from __future__ import annotations

import torch


@torch.library.custom_op("remat::kept", mutates_args=())
def kept(value: torch.Tensor) -> torch.Tensor:
    """The value; a copy of it where the graph is interpreted, because an op returns none of its operands."""
    return value.clone()


@kept.register_fake
def _(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)
