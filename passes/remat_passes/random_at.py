"""``remat::random_at``: the random numbers that a slice of the batch has in the step that is not split.

Inductor's generator is counter based: a number depends on the seed and on the element's flat index alone. A slice that
is told where it starts draws the numbers that the full batch has there, so dropout's masks are the same, bit for bit.
Inductor's own op (``inductor_prims.random``) has no argument for that although its lowering has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.library.custom_op("remat::random_at", mutates_args=())
def random_at(seed: torch.Tensor, start: torch.Tensor, size: Sequence[int], mode: str, per_sample: int) -> torch.Tensor:
    """Numbers of shape ``size``, fp32: those from flat index ``start * per_sample`` on. ``mode`` is rand or randn."""
    raise NotImplementedError("remat::random_at has no implementation but the one that Inductor compiles")


@random_at.register_fake
def _(seed: torch.Tensor, start: torch.Tensor, size: Sequence[int], mode: str, per_sample: int) -> torch.Tensor:
    return seed.new_empty(size, dtype=torch.float32)
