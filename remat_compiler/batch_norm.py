"""Batch norm by micro-batch: the same statistics that an accumulation loop's batch norm takes.

Batch norm in training normalises the samples of a batch together, so a step that runs in micro-batches is another
function unless the whole batch's statistics are known. With ``batch_norm="per_microbatch"`` the user accepts that. The
step is then rewritten *before* it is traced: the batch becomes N groups, each with its own mean and variance (known as
ghost batch norm, Hoffer et al., arXiv 1705.08741). What is split afterwards is that step, exactly, with a group for a
sample, so no later stage knows of batch norm, and the running statistics see one group after another as in a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from remat_passes.errors import CannotSplitError
from remat_passes.joint import module_path, source_line

from . import torch_private
from .options import Options
from .step_inputs import StepInputs


def settle_batch_norm(module: fx.GraphModule, known: StepInputs, options: Options) -> tuple[fx.GraphModule, StepInputs]:
    """A step that will run in slices, with batch norm by slice where the user wants it and there is any.

    Where the user does not want it, what is said against it is kept: it matters where most of the step meets it.

    Raises:
        CannotSplitError: it cannot be had by slice.
    """
    if options.batch_norm == "refuse":
        return module, replace(known, batch_norm=_refusal(module))
    grouped = by_group(module, options.num_microbatches)
    if grouped is None:
        return module, known
    return grouped, replace(known, num_groups=options.num_microbatches)


def _refusal(module: fx.GraphModule) -> str:
    """What is said against slices of a Dynamo graph with batch norm in training, naming the first one."""
    for node in module.graph.nodes:
        if _is_in_training(node):
            place = f" at {source_line(node)}" if source_line(node) else ""
            path = f" (module {module_path(node)})" if module_path(node) else ""
            return (
                f"The step cannot be split into micro-batches: batch_norm in training normalises the samples of a batch"
                f" together, so that a smaller batch is another function, in {node.name}{place}{path}."
                ' batch_norm="per_microbatch" (REMAT_BATCH_NORM) takes each micro-batch by itself, as an accumulation'
                " loop does; group norm, or the module in eval mode, does without the batch."
            )
    return ""


def group_counts(module: fx.GraphModule) -> tuple[int, ...] | None:
    """The numbers of groups above one that batch norm in training can be taken by, rising; ``None`` without any."""
    shapes = [node.args[0].meta["example_value"].shape for node in module.graph.nodes if _is_in_training(node)]
    if not shapes:
        return None
    batch = math.gcd(*(int(shape[0]) for shape in shapes))
    per_sample = min(math.prod(map(int, shape[2:])) for shape in shapes)
    return tuple(n for n in range(2, batch + 1) if batch % n == 0 and batch // n * per_sample > 1)


def by_group(module: fx.GraphModule, num_groups: int) -> fx.GraphModule | None:
    """The Dynamo graph with each batch norm in training taken by group; ``None`` where it has none.

    Raises:
        CannotSplitError: the batch does not divide into groups of one size.
    """
    copy = torch_private.copy_of(module)
    found = [node for node in copy.graph.nodes if _is_in_training(node)]
    for node in found:
        batch = int(node.args[0].meta["example_value"].shape[0])
        if batch % num_groups:
            raise CannotSplitError(
                f'With batch_norm="per_microbatch" the micro-batches have to be of one size: {num_groups} of them do'
                f" not divide a batch of {batch}, in {node.name}. Use a num_microbatches that divides it."
            )
        if node.args[0].meta["example_value"].numel() == num_groups * int(node.args[0].meta["example_value"].shape[1]):
            raise CannotSplitError(
                f'With batch_norm="per_microbatch" and {num_groups} micro-batches, each has one value a channel in'
                f" {node.name}, of which there is no variance. Use fewer."
            )
        node.target = grouped_batch_norm(num_groups)
    if not found:
        return None
    for node in copy.graph.nodes:
        if node.op == "call_method" and node.target == "add_" and _counts_batches(node.args[0]):
            node.args = (node.args[0], node.args[1] * num_groups)
    copy.recompile()
    return copy


def _is_in_training(node: fx.Node) -> bool:
    if node.target not in (F.batch_norm, torch.batch_norm):
        return False
    return bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("training", False))


def _counts_batches(node: Any) -> bool:
    return isinstance(node, fx.Node) and "num_batches_tracked" in node.name


def grouped_batch_norm(num_groups: int) -> Callable[..., torch.Tensor]:
    """``torch.nn.functional.batch_norm`` in training, of each of ``num_groups`` equal parts of the batch by itself.

    The running statistics are those after the parts were seen one after another: each moves them by ``momentum``, so
    part i of N counts ``momentum * (1 - momentum) ** (N - 1 - i)``.
    """

    def batch_norm(
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        channels = input.shape[1]
        grouped = input.reshape(num_groups, input.shape[0] // num_groups, *input.shape[1:])
        exact = grouped.to(torch.promote_types(input.dtype, torch.float32))
        axes = [1, *range(3, grouped.dim())]
        var, mean = torch.var_mean(exact, dim=axes, correction=0, keepdim=True)
        normal = (exact - mean) * torch.rsqrt(var + eps)
        shape = [1, 1, channels] + [1] * (grouped.dim() - 3)
        normal = normal if weight is None else normal * weight.reshape(shape)
        normal = normal if bias is None else normal + bias.reshape(shape)
        count = exact.numel() // (num_groups * channels)
        _move(running_mean, mean.detach().reshape(num_groups, channels), momentum)
        unbiased = var.detach().reshape(num_groups, channels) * (count / max(count - 1, 1))
        _move(running_var, unbiased, momentum)
        return normal.to(input.dtype).reshape(input.shape)

    return batch_norm


def _move(running: torch.Tensor | None, seen: torch.Tensor, momentum: float) -> None:
    """Move a running statistic towards each row of ``seen``, in turn."""
    if running is None:
        return
    num_groups = seen.shape[0]
    later = torch.arange(num_groups - 1, -1, -1, device=seen.device, dtype=seen.dtype)
    weights = momentum * (1.0 - momentum) ** later
    moved = (weights.unsqueeze(1) * seen).sum(0)
    with torch.no_grad():
        running.copy_(running * (1.0 - momentum) ** num_groups + moved)
