"""The backend that ``torch.compile(..., backend="remat")`` finds by entry point."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from remat_passes.device import DeviceSpec
from remat_passes.errors import BudgetInfeasibleError, ConfigError, RematError, RematWarning, nearest
from remat_passes.joint import source_line
from remat_passes.units import format_bytes

from . import torch_private
from .batch_norm import group_counts, settle_batch_norm
from .calibrate import default_cache_dir
from .device_at_hand import device_spec
from .measured_costs import check_cost_model
from .options import Budget, Options, parse_options
from .partitioner import RematPartitioner
from .plan_log import publish, record_fallback
from .step_inputs import StepInputs, step_inputs
from .trials import Work, compile_within_budget
from .verify import Verified


def remat(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Args:
        module: what Dynamo captured.
        inputs: its example inputs.
        options: remat's options (README, "Options"); names that Inductor knows pass on to Inductor.
        mode: as for ``backend="inductor"``.

    Raises:
        ConfigError: an option or the mode is unknown or malformed.
        BudgetInfeasibleError: no plan is within ``memory_budget``.
        CannotPartitionError: backward needs a value that can be neither saved nor recomputed.
    """
    parsed = parse_options(options, os.environ, torch_private.inductor_option_names())
    inductor_options = {**_mode_options(mode), **parsed.inductor}
    spec = _spec(parsed, inputs)
    check_cost_model(parsed, spec, "cpu" if _cuda_device(inputs) is None else "cuda")
    spare = torch_private.copy_of(module) if parsed.fallback == "inductor" else None
    try:
        known = step_inputs(module, inputs, parsed.batch_axes)
        work = Work(module, inputs, inductor_options, parsed, spec, known)
        attempt = _attempt(work)
        compiled, partitioner, known = attempt.compiled, attempt.partitioner, attempt.known
        for made in partitioner.made:
            publish(made, parsed.dump_dir)
        unsplit = attempt.unsplit
        if unsplit is None or not partitioner.made:
            return compiled
        plan = partitioner.made[0].plan
        once = replace(parsed, num_microbatches=1, num_microbatches_auto=False, memory_budget=None, verify=False)

        def reference(budget_bytes: int | None) -> Callable[..., Any]:
            budget = None if budget_bytes is None else Budget("bytes", budget_bytes, str(budget_bytes))
            options = replace(once, memory_budget=budget, reserve_bytes=0)
            return _compile(replace(work, module=unsplit, options=options, known=known))[0]

        dtypes = {value.dtype for made in partitioner.made for value in made.plan.values}
        coarsest = next((getattr(torch, name) for name in ("bfloat16", "float16") if name in dtypes), None)
        needed_bytes = plan.inductor_peak_bytes
        return Verified(compiled, reference, known.names, needed_bytes, plan.graph_id, coarsest)
    except RematError as error:
        if spare is None:
            raise
        warnings.warn(f"remat compiles as plain Inductor would: {error}", RematWarning, stacklevel=2)
        record_fallback(str(error))
        return torch_private.compile_plain_inductor(spare, inputs, inductor_options)


@dataclass(frozen=True)
class _Attempt:
    """A compiled step."""

    compiled: Callable[..., Any]
    partitioner: RematPartitioner
    unsplit: fx.GraphModule | None  # what it is verified against
    known: StepInputs


def _attempt(work: Work) -> _Attempt:
    """Compile the step, in as many slices as the budget asks for where that is free.

    What must be known before the step is traced is tried one after another, and only where the budget asks for it:
    fixed sizes instead of symbolic ones, and the number of groups of a batch norm.
    """
    *ways, last = _ways(work.module, work.inputs, work.options)
    for way in ways:
        with suppress(BudgetInfeasibleError):
            return _compiled_in(replace(work, module=torch_private.copy_of(work.module), options=way))
    try:
        return _compiled_in(replace(work, options=last))
    except BudgetInfeasibleError as refused:
        text = f"{refused}{_hint(work)}{_of_percentage(work, refused.budget_bytes)}"
        raise BudgetInfeasibleError(text, refused.budget_bytes, refused.smallest_bytes) from None


def _ways(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> list[Options]:
    """The options to try, each only where the budget cannot be met by those before."""
    if not options.num_microbatches_auto or options.memory_budget is None:
        return [options]
    whole = replace(options, num_microbatches_auto=False)
    groups = group_counts(module)
    if groups is not None:
        counts = groups if options.batch_norm == "per_microbatch" else ()
        return [whole, *(replace(whole, num_microbatches=count) for count in counts)]
    if any(_marked_dynamic(inputs)):
        return [whole]
    has_symbols = any(isinstance(entry, torch.SymInt) for entry in inputs)
    return [whole, options] if has_symbols else [options]


def _marked_dynamic(inputs: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The inputs and their axes that ``mark_dynamic`` was told of."""
    for place, entry in enumerate(inputs):
        if isinstance(entry, torch.Tensor):
            yield from ((place, axis) for axis in torch_private.marked_dynamic(entry))


_FIXED = (
    " A step in micro-batches has fixed sizes: leave out torch._dynamo.mark_dynamic, or use maybe_mark_dynamic in its"
    " place. A batch of another size is compiled anew."
)


def _check_fixable(inputs: Sequence[Any], known: StepInputs, options: Options) -> None:
    """Refuse to split a step of which the user wants a size to stay open.

    Raises:
        ConfigError: naming the first such size.
    """
    for place, axis in _marked_dynamic(inputs):
        raise ConfigError(
            f"Option num_microbatches is {options.num_microbatches}, and the size of axis {axis} of input"
            f" {known.names[place]!r} was marked as dynamic.{_FIXED}"
        )


def _hint(work: Work) -> str:
    """What could help to meet the budget: an option that is off, a mark."""
    module, options = work.module, work.options
    if options.num_microbatches_auto and group_counts(module) and options.batch_norm == "refuse":
        return (
            " Micro-batches were not weighed, because batch norm in training takes the batch together;"
            ' batch_norm="per_microbatch" (REMAT_BATCH_NORM) takes each micro-batch by itself, as an accumulation loop'
            " does."
        )
    if options.num_microbatches_auto and any(_marked_dynamic(work.inputs)):
        return f" Micro-batches were not weighed, because a size was marked as dynamic.{_FIXED}"
    if options.num_microbatches_auto:
        return ""
    return (
        f' num_microbatches is {options.num_microbatches}: with "auto" (REMAT_NUM_MICROBATCHES) the batch may run in'
        " more slices."
    )


def _of_percentage(work: Work, budget_bytes: int) -> str:
    """Where the bytes that were refused come from, if the user named none."""
    budget = work.options.memory_budget
    if budget is None or budget.kind != "percent":
        return ""
    plain_bytes = round((budget_bytes + work.options.reserve_bytes) * 100 / budget.amount)
    places = (source_line(node) for node in work.module.graph.nodes if node.op not in ("placeholder", "output"))
    place = next((f" at {place}" for place in places if place), "")
    return (
        f" memory_budget is {budget.text!r}, and plain Inductor would need {format_bytes(plain_bytes)} for this graph,"
        f" which starts{place}. Each graph counts by itself, that of a smaller batch and what follows a graph break"
        " too, and of a small one the parameters and their gradients may be most: a number of bytes is the same for"
        " all."
    )


def _compiled_in(work: Work) -> _Attempt:
    options = work.options
    is_free = options.num_microbatches_auto and options.memory_budget is not None
    if options.num_microbatches > 1:
        _check_fixable(work.inputs, work.known, options)
    if options.num_microbatches > 1 or is_free:
        torch_private.fix_sizes(work.inputs)
    if options.num_microbatches > 1:
        module, known = settle_batch_norm(work.module, work.known, options)
        work = replace(work, module=module, known=known)
    unsplit = torch_private.copy_of(work.module) if options.verify else None
    compiled, partitioner = _compile(work)
    if options.memory_budget is not None or options.num_microbatches > 1:
        _warn_of_last_version()
    return _Attempt(compiled, partitioner, unsplit, work.known)


def _warn_of_last_version() -> None:
    """Say so where torch.compile will run the next other batch size by itself, without remat."""
    if torch_private.num_versions_left() > 0:
        return
    warnings.warn(
        "torch.compile makes no more versions of this step (torch._dynamo.config.recompile_limit): a batch of yet"
        " another size will run in eager mode, without remat and its budget. Pad batches to a few sizes, leave out the"
        " last one of an epoch (drop_last=True), or raise the limit.",
        RematWarning,
        stacklevel=2,
    )


def _compile(work: Work) -> tuple[Callable[..., Any], RematPartitioner]:
    if work.options.lowering == "eager":
        partitioner = RematPartitioner(work.options, work.spec, inputs=work.known)
        seen = partitioner.compiled
        return torch_private.compile_with_aot_autograd(work.module, work.inputs, partitioner, seen), partitioner
    return compile_within_budget(work)


def _mode_options(mode: str | None) -> dict[str, object]:
    if mode is None or mode == "default":
        return {}
    modes = torch_private.inductor_modes()
    if mode not in modes:
        raise ConfigError(f"mode {mode!r} is unknown. Accepted: {', '.join(modes)}.{nearest(mode, modes)}")
    return torch_private.inductor_mode_options(mode)


def _spec(options: Options, inputs: Sequence[Any]) -> DeviceSpec:
    """The device whose prices count: the named one, else the one that the graph's inputs are on."""
    cuda = _cuda_device(inputs)
    cache_dir = default_cache_dir(os.environ)
    if cuda is None:
        return device_spec(options.device_spec, "cpu", None, None, cache_dir)
    _fill_library_workspaces(cuda)
    properties = torch.cuda.get_device_properties(cuda)
    return device_spec(options.device_spec, "cuda", properties.name, properties.total_memory, cache_dir)


def _fill_library_workspaces(cuda: torch.device) -> None:
    """Let cuBLAS allocate its workspaces now, one for each thread that computes (32 MiB each on Hopper): they stay, so
    they belong to what is allocated before the step."""
    with torch_private.outside_of_tracing(), torch.enable_grad():
        ones = torch.ones(16, 16, device=cuda, requires_grad=True)
        (ones @ ones).sum().backward()


def _cuda_device(inputs: Sequence[Any]) -> torch.device | None:
    return next((t.device for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda"), None)
