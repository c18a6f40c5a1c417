"""Inductor: its options, a compile with another partitioner, and what the compile must not know or do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import CompileContext, TracingContext, tracing
from torch._guards import compile_context as resume_compile
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ..readback import signature
from .graphs import CompiledGraph, copy_of
from .kernels import kernels_as_planned, known_results

_Code: TypeAlias = Callable[[list[Any]], Any]


def inductor_option_names() -> frozenset[str]:
    """The names that ``torch.compile(options=...)`` may pass on to Inductor."""
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def inductor_mode_options(mode: str) -> dict[str, object]:
    """The Inductor options that ``torch.compile(mode=...)`` stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def inductor_modes() -> tuple[str, ...]:
    """The accepted values of ``torch.compile(mode=...)``."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


@functools.cache
def lower_own_ops() -> None:
    """Tell Inductor how remat's ops are computed: ``random_at`` as its own random numbers, further on in their
    sequence, and ``kept`` by writing its operand."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops

    def lowered(seed: Any, start: Any, size: Sequence[int], mode: str, per_sample: int) -> Any:
        device = seed.get_device_or_error()
        strides = ir.FlexibleLayout.contiguous_strides(size)
        position = ir.FixedLayout(device, torch.float32, list(size), strides).make_indexer()
        load_seed, load_start = seed.make_loader(), start.make_loader()

        def number(index: Sequence[Any]) -> Any:
            first = ops.mul(ops.to_dtype(load_start([]), torch.int32), ops.constant(per_sample, torch.int32))
            return getattr(ops, mode)(load_seed([]), ops.add(ops.index_expr(position(index), torch.int32), first))

        drawn = ir.Pointwise.create(device=device, dtype=torch.float32, inner_fn=number, ranges=list(size))
        drawn.realize()
        return drawn

    def written(value: Any) -> Any:
        value.realize()
        return value

    register_lowering(torch.ops.remat.random_at.default)(lowered)
    register_lowering(torch.ops.remat.kept.default)(written)


def reuses_saved_values() -> bool:
    """Whether backward may write into saved values. Inductor's code depends on it, and its cache does not know that."""
    return bool(functorch_config.donated_buffer)


def graph_is_kept() -> bool:
    """Whether the backward that runs in this thread leaves its graph for another one (``retain_graph=True``)."""
    return torch._C._current_graph_task_id() >= 0 and torch._C._autograd._get_current_graph_task_keep_graph()


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, object],
    partitioner: CustomPartitionerFn,
    compiled: Callable[[CompiledGraph], None],
) -> Callable[..., Any]:
    """Compile as ``backend="inductor"`` does, with another partitioner.

    Inductor's buffer reuse keeps dead buffers for later ones of the same size instead of freeing them, which held up to
    20 MiB of 177 on a 4-layer GPT (docs/decisions/0004-inductor-settings.md); the device's allocator reuses them as
    well, so it is off unless the user sets it.

    AOTAutograd's cache hands out compiled graphs without calling the partitioner, and then nobody could say what was
    decided; it is off. Inductor's own cache, which holds the generated code, stays on.

    ``compiled`` is handed each training graph once it is compiled. So the backward is compiled here too, and not when
    it is first called. Whether its graph is kept is not known here, and where it is, saved values must not be written
    into: then a second code runs, which is compiled when it is first needed. Writing into none at all would be simpler,
    and 1 MiB of 27 on a small GPT, 4 of 75 on an MLP (benchmarks/networks.py).
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.utils import get_donated_idxs

    def inner(graph: fx.GraphModule, arguments: Sequence[Any], **keywords: Any) -> Any:
        def compile_inner(own: fx.GraphModule) -> Any:
            with kernels_as_planned(), known_results():
                return compile_fx_inner(own, given, **keywords)

        before, given = signature(graph), list(arguments)
        donated = get_donated_idxs() if keywords.get("is_backward") else None
        spare = copy_of(graph) if donated else None
        code = compile_inner(graph)
        if spare is not None and donated and hasattr(code, "current_callable"):
            donated.clear()  # AOTAutograd refuses to keep the graph as long as there are any
            settings = {**config.get_config_copy(), "custom_partitioner_fn": _WithoutReuse(partitioner)}
            keeping = _once_in_this_context(lambda: compile_inner(spare), settings)
            code.current_callable = _apart_where_kept(code.current_callable, keeping)
        if not keywords.get("is_inference"):
            is_backward, source = bool(keywords.get("is_backward")), getattr(code, "source_code", "")
            compiled(CompiledGraph(before, given, is_backward, source, code))
        return code

    patches = {"allow_buffer_reuse": False, **options, "custom_partitioner_fn": partitioner}
    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        return compile_fx(module, list(inputs), inner_compile=inner, config_patches=patches)  # type: ignore[return-value]


class _WithoutReuse(CustomPartitionerFn):
    """Stands for a partitioner in the key of Inductor's cache, which does not know what backward may write into."""

    def __init__(self, partitioner: CustomPartitionerFn) -> None:
        self.key = f"{partitioner.uuid()} without reuse"

    def __call__(self, *_arguments: Any, **_keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        raise AssertionError("backward is partitioned already")

    def uuid(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """As what is in Inductor's configuration it is pickled for the key."""
        return (str, (self.key,))


def _once_in_this_context(compile_code: Callable[[], _Code], settings: Mapping[str, object]) -> Callable[[], _Code]:
    """A compile for later, with the sizes, the metadata and Inductor's settings of the one that is going on."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor import config

    context, compile_context = TracingContext.get(), CompileContext.try_get()
    metadata = context.fw_metadata
    found: list[_Code] = []

    def compile_later() -> _Code:
        context.fw_metadata = metadata  # of several graphs in one context, it is the last one's
        same = config.patch(dict(settings))
        with torch.no_grad(), torch._C._DisableAutocast(), tracing(context), resume_compile(compile_context), same:
            return compile_code()

    def code() -> _Code:
        if not found:
            with compile_lock:
                found.extend([] if found else [compile_later()])
        return found[0]

    return code


def _apart_where_kept(code: _Code, keeping: Callable[[], _Code]) -> _Code:
    """A backward that runs ``code``, and where its graph is kept what ``keeping`` gives."""
    return lambda arguments: keeping()(arguments) if graph_is_kept() else code(arguments)


def compile_plain_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """Compile exactly as ``backend="inductor"`` does."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, list(inputs), config_patches=dict(options))  # type: ignore[return-value]
