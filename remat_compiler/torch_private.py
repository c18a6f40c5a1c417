"""Everything private of torch that remat touches, in one place.

Checked on torch 2.11.0 (source), 2.13.0 (all tests) and 2.14.1 (tests of the passes, and a small net under Inductor).
After an upgrade of torch, this file is the one to read again.

What is used, and where it lives:

- ``torch._functorch.partitioners``: classification of outputs, extraction of the two modules, functional random state,
  the default plan (as the yardstick); they work on the joint module in place, so it is theirs once it is handed over.
- ``torch._inductor``: the partitioner hook (``config.custom_partitioner_fn``), the decomposition table, ``compile_fx``.
- ``torch._dynamo.backends.common.aot_autograd``: the eager lowering.
- ``torch._functorch.config``: ``enable_autograd_cache``, ``force_non_lazy_backward_lowering``, ``donated_buffer``.
- ``torch.autograd._enable_profiler_legacy``: the sizes that the CPU allocator hands out, without Kineto.
- ``torch.profiler``'s tree of events: the addresses of what the CPU allocator hands out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes

from remat_passes.again import repetition_of

from .readback import Signature, signature


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


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGraph:
    """The forward or the backward of one joint graph, once it is compiled."""

    signature: Signature
    inputs: list[Any]  # what it was compiled for
    is_backward: bool
    source: str  # what Inductor wrote; empty on the eager lowering
    code: Any  # what is called; ``current_callable`` does the work where there is such an attribute


class AllocationLog:
    """The sizes that PyTorch's CPU allocator hands out (positive) and takes back (negative) in this thread, in order.

    torch.profiler counts the same (measure.py). It is not for a step of the user's: Kineto prints to stderr when it
    starts and when it stops, and a session that the user opens meanwhile, in whatever thread, breaks this one or the
    process (tried on 2.13.0). The profiler that it has replaced belongs to one thread and is silent. A block from
    before the log is freed without a size, and with a warning on stderr, so whoever logs keeps those alive.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @staticmethod
    def is_possible() -> bool:
        """Not while a profiler is active."""
        return not (torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())

    def __enter__(self) -> AllocationLog:
        nothing = torch._C._profiler._ExperimentalConfig()
        config = torch.autograd.ProfilerConfig(
            torch.autograd.ProfilerState.CPU, False, True, False, False, False, nothing
        )
        torch.autograd._enable_profiler_legacy(config)
        return self

    def __exit__(self, *_error: object) -> None:
        events = [event for thread in torch.autograd._disable_profiler_legacy() for event in thread]
        self.sizes = [event.cpu_memory_usage() for event in events if event.cpu_memory_usage()]


@dataclass(frozen=True, slots=True)
class Allocation:
    """A call of PyTorch's CPU allocator: positive bytes for a block handed out, negative ones for one taken back."""

    at_ns: int
    place: int  # its address
    bytes: int


def allocations_within(profiler: torch.profiler.profile, name: str) -> tuple[int, int, list[Allocation]]:
    """Start and end of the range of that name in ns, and the CPU allocator's calls between them, in order.

    The profiler's public events have no address. Without it a free cannot be told from one of a block that was there
    before: the allocator's reporter (c10/core/CPUAllocator.cpp) keeps the sizes of blocks that an earlier profile saw
    and whose end it did not, and gives such a size to whatever block lies there later.
    """
    from torch._C._profiler import _ExtraFields_Allocation

    if profiler.profiler is None or profiler.profiler.kineto_results is None:
        raise RuntimeError("torch.profiler recorded nothing; is another profiler active?")
    found = []
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    start_ns = end_ns = 0
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == name:
            start_ns, end_ns = event.start_time_ns, event.end_time_ns
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
            found.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
    found.sort(key=lambda allocation: allocation.at_ns)  # threads stand one after another
    return start_ns, end_ns, [allocation for allocation in found if start_ns <= allocation.at_ns <= end_ns]


def outside_of_tracing() -> AbstractContextManager[object]:
    """Neither fake tensors nor other modes of the compile that is going on."""
    return _disable_current_modes()


def reuses_saved_values() -> bool:
    """Whether backward may write into saved values. Inductor's code depends on it, and its cache does not know that."""
    return bool(functorch_config.donated_buffer)


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
    it is first called.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.virtualized import V

    def inner(graph: fx.GraphModule, arguments: Sequence[Any], **keywords: Any) -> Any:
        before, given = signature(graph), list(arguments)
        with V.set_choices_handler(_repetitions_apart(type(V.choices))):
            code = compile_fx_inner(graph, arguments, **keywords)
        if not keywords.get("is_inference"):
            is_backward, source = bool(keywords.get("is_backward")), getattr(code, "source_code", "")
            compiled(CompiledGraph(before, given, is_backward, source, code))
        return code

    patches = {"allow_buffer_reuse": False, **options, "custom_partitioner_fn": partitioner}
    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        return compile_fx(module, list(inputs), inner_compile=inner, config_patches=patches)  # type: ignore[return-value]


def _repetitions_apart(choices: type[Any]) -> Any:
    """Inductor's choices, but values of one pass over a block do not fuse with those of another: a value that is
    computed twice so as not to be kept in between would be computed once and kept."""

    class Apart(choices):  # type: ignore[misc]
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            apart = _repetitions(node1) != _repetitions(node2)
            return not apart and bool(choices.can_fuse(scheduler, node1, node2, shared_data_score))

        def uuid(self) -> str:
            return "remat: repetitions apart"

    return Apart()


def _repetitions(scheduled: Any) -> frozenset[int]:
    """The passes that the results of a scheduled node belong to."""
    origins = (getattr(part.node, "origin_node", None) for part in scheduled.get_nodes())
    return frozenset(repetition_of(origin.name) for origin in origins if origin is not None) or frozenset((0,))


def compile_plain_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Any]:
    """Compile exactly as ``backend="inductor"`` does."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, list(inputs), config_patches=dict(options))  # type: ignore[return-value]


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """The module with a graph of its own: a compile takes the one that it is given apart."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _copy_output_metadata(module.graph, graph)
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)  # AOTAutograd knows Dynamo's graphs, and which inputs are static, by these three
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = module._param_name_to_source
    for old, new in zip(module.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copy


def compile_with_aot_autograd(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partitioner: CustomPartitionerFn,
    compiled: Callable[[CompiledGraph], None],
) -> Callable[..., Any]:
    """Run the graphs as they are, after the decompositions that Inductor would see.

    ``compiled`` is handed each training graph: the forward at once, the backward when it is first called.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import lowering  # noqa: F401  some decompositions call into it without importing it
    from torch._inductor.decomposition import select_decomp_table

    def run_as_is(graph: fx.GraphModule, arguments: Sequence[Any], *, is_backward: bool) -> Callable[..., Any]:
        code = _AsItIs(graph)
        compiled(CompiledGraph(signature(graph), list(arguments), is_backward, "", code))
        return code

    backend = aot_autograd(
        fw_compiler=functools.partial(run_as_is, is_backward=False),
        bw_compiler=functools.partial(run_as_is, is_backward=True),
        inference_compiler=lambda graph, _arguments: _AsItIs(graph),
        partition_fn=partitioner,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with functorch_config.patch(enable_autograd_cache=False):
        return backend(module, list(inputs))


class _AsItIs:
    """A graph that is interpreted: each value and each argument is freed after its last use."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._boxed_call = True  # on the instance, because Dynamo copies its attributes to what it wraps it with
        self.current_callable: Callable[[list[Any]], Any] = lambda arguments: fx.Interpreter(graph).boxed_run(arguments)

    def __call__(self, arguments: list[Any]) -> Any:
        return self.current_callable(arguments)


def prepare_joint_module(joint_module: fx.GraphModule) -> None:
    """Remove dead code and merge equal ops, as torch's own partitioner does before it decides (in place)."""
    joint_module.graph.eliminate_dead_code()
    if functorch_config.cse:
        joint_module.graph = fx_graph_cse(joint_module.graph)
    joint_module.recompile()


def pinned_to_backward(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that must run in backward although no tangent reaches them (changes in place in backward)."""
    return frozenset(node for node in graph.nodes if partitioners._must_be_in_backward(node))


def inductor_saved_names(
    joint_module: fx.GraphModule, num_fwd_outputs: int, static_lifetime_input_indices: Sequence[int]
) -> frozenset[str]:
    """The values that plain Inductor would save: its partitioner run on a copy, its answer read back."""
    copy = copy_of(joint_module)
    for node in copy.graph.nodes:
        node.meta = dict(node.meta)
    forward, _backward = partitioners.min_cut_rematerialization_partition(
        copy, (), num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=list(static_lifetime_input_indices)
    )
    (outputs,) = forward.graph.find_nodes(op="output")
    flat = torch.utils._pytree.arg_tree_leaves(*outputs.args)
    return frozenset(node.name for node in flat[num_fwd_outputs:] if isinstance(node, fx.Node))


def _copy_output_metadata(source: fx.Graph, target: fx.Graph) -> None:
    (old,), (new,) = source.find_nodes(op="output"), target.find_nodes(op="output")
    new.meta = dict(old.meta)


def extract_modules(
    joint_module: fx.GraphModule,
    saved: Sequence[fx.Node],
    recomputed: frozenset[fx.Node],
    num_fwd_outputs: int,
    static_inputs: Sequence[fx.Node],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules that hand over exactly ``saved``; all else that backward needs is in backward.

    Random ops that the user marked MUST_RECOMPUTE draw the same numbers again: their generator state is saved.
    """
    sizes = [node for node in saved if partitioners.is_sym_node(node)]
    opaque = [node for node in saved if _is_opaque(node)]
    tensors = [node for node in saved if node not in sizes and node not in opaque]
    keywords: dict[str, Any] = {
        "saved_sym_nodes": sizes,
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_nodes": OrderedSet(static_inputs),
    }
    if "saved_opaque_nodes" in inspect.signature(partitioners._extract_fwd_bwd_modules).parameters:
        keywords["saved_opaque_nodes"] = opaque
    else:
        tensors += opaque
    forward, backward = partitioners._extract_fwd_bwd_modules(joint_module, tensors, **keywords)
    if any(_draws_again(node, recomputed) for node in joint_module.graph.nodes):
        forward, backward = partitioners.functionalize_rng_ops(joint_module, forward, backward, len(sizes))
    return forward, backward


def thread_random_state(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Hand the random state of nested graphs to the outer ones, and read parts of results as early as they exist."""
    forward, backward = partitioners.raise_getitems(forward), partitioners.raise_getitems(backward)
    if not hasattr(partitioners, "thread_graphsafe_rng_from_hops"):
        return forward, backward
    return (
        partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False),
        partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True),
    )


def _is_opaque(node: fx.Node) -> bool:
    check = getattr(partitioners, "is_opaque_node", None)
    return bool(check is not None and check(node))


def _draws_again(node: fx.Node, recomputed: frozenset[fx.Node]) -> bool:
    tags = getattr(node.target, "tags", ())
    return node in recomputed and torch.Tag.nondeterministic_seeded in tags and partitioners.must_recompute(node)
