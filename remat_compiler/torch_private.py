"""Everything private of torch that remat touches, in one place.

Checked on torch 2.11.0 (source), 2.13.0 (all tests) and 2.14.1 (tests of the passes, and a small net under Inductor).
After an upgrade of torch, this file is the one to read again.

What is used, and where it lives:

- ``torch._functorch.partitioners``: classification of outputs, extraction of the two modules, functional random state,
  the default plan (as the yardstick); they work on the joint module in place, so it is theirs once it is handed over.
- ``torch._inductor``: the partitioner hook (``config.custom_partitioner_fn``), the decomposition table, ``compile_fx``.
- ``torch._dynamo.backends.common.aot_autograd``: the eager lowering.
- ``torch._functorch.config``: ``enable_autograd_cache``, ``force_non_lazy_backward_lowering``, ``donated_buffer``; and
  AOTAutograd's list of donated values (``get_donated_idxs``), ``torch._guards`` for a compile in backward.
- ``torch.autograd._enable_profiler_legacy``: the sizes that the CPU allocator hands out, without Kineto.
- ``torch._subclasses.fake_tensor``: steps that are traced and not run.
- ``torch.profiler``'s tree of events: the addresses of what the CPU allocator hands out.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import CompileContext, TracingContext, tracing
from torch._guards import compile_context as resume_compile
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

from remat_passes.again import repetition_of
from remat_passes.cut import Residual

from .readback import Signature, signature

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


# What the graphs that are called by name start with (remat_compiler/microbatches.py).
BODY_PREFIX = "remat_loop_"


def call_subgraph() -> Any:
    """The higher-order op that calls a graph by name; Inductor compiles the graph once for all of its calls."""
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

    return invoke_subgraph


def source_names(module: fx.GraphModule) -> tuple[str, ...]:
    """What Dynamo calls each input of its graph: ``x``, ``batch['y'][0]``, ``L['self']._parameters['weight']``."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = getattr(source, "name", node.name)
        text = str(name() if callable(name) else name)
        names.append(re.sub(r"^L\['(\w+)'\]", r"\1", text))
    return tuple(names)


def input_position(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph a placeholder of the joint graph is.

    ``None`` for what AOTAutograd has put in: effect tokens, which stand before the inputs and are numbered as they are.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    description = node.meta.get("desc")
    return description.idx if isinstance(description, PlainAOTInput) else None


def fix_sizes(inputs: Sequence[Any]) -> None:
    """Make symbolic sizes numbers: guards then have the graph compiled anew for others."""
    for entry in inputs:
        if isinstance(entry, torch.SymInt):
            int(entry)


def num_versions_left() -> int:
    """How many more versions of the function that is compiled now torch.compile will make."""
    compile_id = CompileContext.current_compile_id()
    made = 1 if compile_id is None else (compile_id.frame_compile_id or 0) + 1
    return int(torch._dynamo.config.recompile_limit) - made


def calls_of(graph: fx.Graph) -> dict[int, str]:
    """The calls of graphs by name: their place among the nodes, and whom they call."""
    target = call_subgraph()
    return {place: str(node.args[1]) for place, node in enumerate(graph.nodes) if node.target is target}


def replace_graph(module: fx.GraphModule, name: str, graph: fx.GraphModule) -> None:
    """Exchange the graph that is called by that name, wherever it is called."""
    for inner in list(module.modules()):
        if name in inner._modules:
            setattr(inner, name, graph)


@functools.cache
def lower_random_at() -> None:
    """Tell Inductor how ``remat::random_at`` is computed: as its own random numbers, further on in their sequence."""
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

    register_lowering(torch.ops.remat.random_at.default)(lowered)


def fake_mode_of(module: fx.GraphModule) -> AbstractContextManager[object]:
    """The mode of the fake tensors that a graph was traced with."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), nullcontext())


class _SomeNumber(TorchDispatchMode):
    """A number that is read out of a fake tensor, which holds none, is 0.5, or 1 where it has to be whole.

    Not 0 and not 1.0, which optimizers divide by, or by what is left to 1.
    """

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return 0.5 if dtype.is_floating_point or dtype.is_complex else dtype is torch.bool or 1
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only(tensors: Iterable[torch.Tensor]) -> Iterator[Callable[[Any], Any]]:
    """Inside of it tensors have a shape, a dtype and a device, and take no memory.

    It gives a function that makes deep copies with such tensors. What is read out of them is some number. Where one of
    ``tensors`` is already such a one, the others belong to it.
    """
    known = next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if known is None else known

    def copied(original: Any) -> Any:
        with FakeCopyMode(mode):
            return deepcopy(original)

    with mode, _SomeNumber():  # type: ignore[no-untyped-call]
        yield copied


def unhooked(method: Callable[..., Any]) -> Callable[..., Any]:
    """The ``step`` of an optimizer's class without the hooks that torch has put around it."""
    return getattr(method, "__wrapped__", method) if getattr(method, "hooked", False) else method


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor subclass consists of; of any other itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def outside_of_tracing() -> AbstractContextManager[object]:
    """Neither fake tensors nor other modes of the compile that is going on."""
    return _disable_current_modes()


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
    from torch._inductor.virtualized import V

    def inner(graph: fx.GraphModule, arguments: Sequence[Any], **keywords: Any) -> Any:
        def compile_inner(own: fx.GraphModule) -> Any:
            with V.set_choices_handler(_repetitions_apart(type(V.choices))), _known_results():
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


@contextmanager
def _known_results() -> Iterator[None]:
    """Fake calls of loops' bodies return what the body's graph says of its results.

    Inductor's passes propagate fake tensors several times, and each time run the whole body for each call of it: 12 s
    of 47 for a GPT in 64 micro-batches.
    """
    from torch._higher_order_ops import utils

    call = call_subgraph()
    functions = getattr(utils, "registered_hop_fake_fns", {})
    run = functions.get(call)
    if run is None:
        yield
        return

    def results(graph: Any, name: str, *operands: Any) -> Any:
        known = _results_of(graph) if str(name).startswith(BODY_PREFIX) else None
        if known is None:
            return run(graph, name, *operands)
        return tuple(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in known)

    functions[call] = results
    try:
        yield
    finally:
        functions[call] = run


def _results_of(graph: Any) -> list[torch.Tensor] | None:
    """The fake tensors that a graph returns, where it says so of all."""
    if not isinstance(graph, fx.GraphModule):
        return None
    (output,) = graph.graph.find_nodes(op="output")
    vals = [getattr(node, "meta", {}).get("val") for node in output.args[0]]
    known = [val for val in vals if isinstance(val, torch.Tensor)]
    return known if len(known) == len(vals) else None


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
    from torch._inductor.utils import get_donated_idxs

    def run_as_is(graph: fx.GraphModule, arguments: Sequence[Any], *, is_backward: bool) -> Callable[..., Any]:
        if is_backward:
            (get_donated_idxs() or []).clear()  # nothing is written into here, so the graph may always be kept
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
        self.current_callable: Callable[[list[Any]], Any] = lambda arguments: _Interpreter(graph).boxed_run(arguments)

    def __call__(self, arguments: list[Any]) -> Any:
        return self.current_callable(arguments)


class _Interpreter(fx.Interpreter):
    """Runs a graph; one that it calls is handed the last reference to what is not needed behind the call."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target is not call_subgraph():
            return super().run_node(n)
        graph, operands = n.all_input_nodes[0], n.args[2:]
        called = _Interpreter(self.env[graph])
        values = [self.env[operand] if isinstance(operand, fx.Node) else operand for operand in operands]
        for dying in self.user_to_last_uses.get(n, []):
            self.env[dying] = None
        return called.boxed_run(values)


def prepare_joint_module(joint_module: fx.GraphModule) -> None:
    """Remove dead code and merge equal ops, as torch's own partitioner does before it decides (in place).

    Nobody runs the joint module, so no code is generated for it: for a large graph that takes longer than both passes.
    """
    joint_module.graph.eliminate_dead_code()
    if functorch_config.cse:
        graph = fx_graph_cse(joint_module.graph)
        graph.owning_module = joint_module
        joint_module._graph = graph


def pinned_to_backward(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that must run in backward although no tangent reaches them (changes in place in backward)."""
    return frozenset(node for node in graph.nodes if partitioners._must_be_in_backward(node))


def inductor_saved_names(
    joint_module: fx.GraphModule, num_fwd_outputs: int, static_lifetime_input_indices: Sequence[int]
) -> frozenset[str]:
    """The values that plain Inductor would save of a prepared joint module (see ``prepare_joint_module``).

    Up to the two modules that it cuts, its partitioner only marks nodes. So it is asked on the module itself, and the
    marks are taken off again: a copy and two modules that nobody runs take four fifths of its time. Where its decision
    is not that of one minimum cut, it is run as a whole.
    """
    static = list(static_lifetime_input_indices)
    marks = {node: node.meta.get("recompute") for node in joint_module.graph.nodes}
    try:
        _mark_as_partitioner_does(joint_module)
        found = partitioners.classify_nodes(joint_module, static, num_fwd_outputs)
        if found.required_bw_nodes and _is_one_minimum_cut(joint_module.graph):
            _measure_distances(joint_module.graph, found)
            with mock.patch.object(nx, "minimum_cut", _minimum_cut):
                saved = partitioners.choose_saved_values_set(joint_module.graph, found)
            return frozenset(node.name for node in saved)
    finally:
        for node, mark in marks.items():
            if mark is not None:
                node.meta["recompute"] = mark
            else:
                node.meta.pop("recompute", None)
            node.__dict__.pop("dist_from_bw", None)
    return _saved_by_whole_partitioner(joint_module, num_fwd_outputs, static)


def _mark_as_partitioner_does(joint_module: fx.GraphModule) -> None:
    """What ``min_cut_rematerialization_partition`` marks before it classifies, in its order."""
    if partitioners.has_recomputable_ops(joint_module):
        partitioners.cleanup_recompute_tags(joint_module, is_default_partition=False)
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(joint_module)
    for mark in ("force_save_effectful_ops", "force_save_bw_mutation_src"):  # not in every version
        getattr(partitioners, mark, lambda _module: None)(joint_module)


def _is_one_minimum_cut(graph: fx.Graph) -> bool:
    """Whether nothing but the minimum cut decides: no budget of torch's own, no vote among ranks."""
    annotation = getattr(partitioners, "_get_memory_budget_annotation", lambda _node: None)
    has_budget = functorch_config.activation_memory_budget != 1 or any(
        "memory_budget" in node.meta or annotation(node) is not None for node in graph.nodes
    )
    return not (has_budget or functorch_config._sync_decision_cross_ranks)


def _measure_distances(graph: fx.Graph, found: Any) -> None:
    """How many ops lie between each node and backward, where the partitioner looks for it."""
    far = int(1e9)  # its own figure for "never"
    for node in reversed(graph.nodes):
        if node.op == "output":
            node.dist_from_bw = far
        elif not found.is_required_fw(node):
            node.dist_from_bw = 0
        else:
            node.dist_from_bw = min((user.dist_from_bw + 1 for user in node.users), default=far)
            node.dist_from_bw = min(node.dist_from_bw, far)


def _minimum_cut(graph: nx.DiGraph, source: str, sink: str) -> tuple[int, tuple[set[str], set[str]]]:
    """``networkx.minimum_cut`` for networks of which most edges are infinite: the same cut, since what can still reach
    the sink is the same for every maximum flow.

    What infinite edges tie to the source or to the sink is no part of the flow.

    Raises:
        networkx.NetworkXUnbounded: there is a path of infinite edges alone.
    """
    edges = list(graph.edges(data="capacity", default=math.inf))
    first = _tied(source, ((tail, head) for tail, head, capacity in edges if capacity == math.inf))
    last = _tied(sink, ((head, tail) for tail, head, capacity in edges if capacity == math.inf))
    if sink in first:
        raise nx.NetworkXUnbounded("Infinite capacity path, flow unbounded above.")
    rest: dict[tuple[str, str], int] = {}
    for tail, head, capacity in edges:
        if capacity and tail not in last and head not in first:
            ends = (source if tail in first else tail, sink if head in last else head)
            rest[ends] = rest.get(ends, 0) + capacity
    network = Residual(inf=1 + 3 * sum(rest.values()))  # networkx stops there; no flow is as large
    network.add_nodes_from((source, sink))
    for tail, head in rest:
        network.add_edges_from(((tail, head), (head, tail)), capacity=0)
    for (tail, head), capacity in rest.items():
        network.succ[tail][head]["capacity"] = capacity
    boykov_kolmogorov(network, source, sink, residual=network)
    reaching, stack = set(last), [sink]
    while stack:
        head = stack.pop()
        for tail, edge in network.pred[head].items():
            if tail not in reaching and edge["flow"] < edge["capacity"]:
                reaching.add(tail)
                stack.append(tail)
    return network.graph["flow_value"], (set(graph) - reaching, reaching)


def _tied(start: str, ties: Iterable[tuple[str, str]]) -> set[str]:
    """What ties lead to, from their first end to their second."""
    following: dict[str, list[str]] = {}
    for one, other in ties:
        following.setdefault(one, []).append(other)
    found, stack = {start}, [start]
    while stack:
        for node in following.get(stack.pop(), ()):
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def _saved_by_whole_partitioner(
    joint_module: fx.GraphModule, num_fwd_outputs: int, static: list[int]
) -> frozenset[str]:
    """Its partitioner run on a copy, its answer read back."""
    copy = copy_of(joint_module)
    for node in copy.graph.nodes:
        node.meta = dict(node.meta)
    forward, _backward = partitioners.min_cut_rematerialization_partition(
        copy, (), num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
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
    # Extraction copies a random op wherever its operands are, and no sweep of dead code takes one that draws from a
    # generator (Inductor's fallback_random): a repetition in forward, and in backward what nothing reads, goes here.
    forward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=not repetition_of(node.name)))
    backward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
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


# -- a step that is traced and not run (on_paper.py)

# What fake tensors raise where a script asks for what is in them: a number, or a shape that depends on it.
UNKNOWN_CONTENTS = (DataDependentOutputException, DynamicOutputShapeException)

# A tensor of at most so many elements that is computed without fake ones is real: scripts draw the positions of their
# batches, shuffle their indices and keep their counters in such tensors, and read them.
MOST_REAL_ELEMENTS = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class JointModule:
    """A joint graph as a partitioner is handed it."""

    module: fx.GraphModule
    num_forward_outputs: int
    static_inputs: tuple[int, ...]


class Stopped(BaseException):
    """Ends a compile that is wanted for its joint graph only; no ``except Exception`` of torch's is to stop it."""


class TakesJointModule(CustomPartitionerFn):
    """Keeps the joint graph instead of cutting it."""

    def __init__(self) -> None:
        self.taken: JointModule | None = None

    def __call__(  # type: ignore[override]
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **keywords: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.taken = JointModule(gm, num_fwd_outputs, tuple(static_lifetime_input_indices or ()))
        raise Stopped

    def uuid(self) -> str:
        return "remat: nothing is compiled"


def joint_module_of(module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, object]) -> JointModule | None:
    """The joint graph that ``compile_with_inductor`` would cut, by the same passes; ``None`` where no gradient is
    wanted. Nothing is lowered."""
    from torch._inductor.compile_fx import compile_fx

    def inner(*_arguments: Any, **_keywords: Any) -> Any:
        raise Stopped

    takes = TakesJointModule()
    for node in module.graph.nodes:  # Inductor's passes run what makes constants, on the device that it names
        node.args = fx.node.map_aggregate(node.args, _on_cpu)
        node.kwargs = {name: _on_cpu(_as_device(arg) if name == "device" else arg) for name, arg in node.kwargs.items()}
    with outside_of_tracing(), functorch_config.patch(enable_autograd_cache=False), suppress(Stopped):
        compile_fx(
            module, list(inputs), inner_compile=inner, config_patches={**options, "custom_partitioner_fn": takes}
        )
    return takes.taken


@contextmanager
def tensors_on_paper(*, for_gpu: bool) -> Iterator[None]:
    """Tensors have a shape and no contents, and those of other devices lie on the CPU.

    A torch without CUDA cannot trace a fake CUDA tensor through autograd, one with CUDA only beside a GPU. Small
    tensors are real where nothing fake goes into them. The batches of a ``DataLoader`` are made by this process.

    Args:
        for_gpu: trace attention with dropout as one kernel, as it runs there; a CPU has none with dropout.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dispatch, enter_autocast = FakeTensorMode.__torch_dispatch__, torch.autocast.__init__

    def on_paper(
        own: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(map(_on_cpu, args)), {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if own is not mode or not _are_small((args, kwargs)):
            return dispatch(own, op, types, args, kwargs)
        try:
            result = dispatch(own, op, types, args, kwargs)
        except UNKNOWN_CONTENTS:
            return op(*args, **kwargs)
        return op(*args, **kwargs) if _are_small(result, of_fakes=True) else result

    @functools.wraps(enter_autocast)
    def autocast_on_cpu(
        own: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type != "cpu":
            device_type, dtype = "cpu", torch.get_autocast_dtype(device_type) if dtype is None else dtype
        enter_autocast(own, device_type, dtype, *args, **kwargs)

    def batches(own: Any) -> Iterator[Any]:
        own.num_workers, own.timeout = 0, 0
        with _disable_current_modes():
            iterator = load(own)
        while True:
            with _disable_current_modes():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def staying(to: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(to)
        def stay(own: Any, *args: Any, **kwargs: Any) -> Any:
            found = [_on_cpu(_as_device(arg)) for arg in args]
            return to(own, *found, **{name: _on_cpu(_as_device(value)) for name, value in kwargs.items()})

        return stay

    def take_over(own: torch.Tensor, other: torch.Tensor) -> None:
        own.data = other  # fake tensors are referred to weakly, and such ones cannot be swapped

    def attention(query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0, **kwargs: Any) -> Any:
        mask, dropout = kwargs.pop("attn_mask", mask), kwargs.pop("dropout_p", dropout)
        return attend(query, key, value, mask, 0.0 if for_gpu else dropout, **kwargs)

    def is_available() -> bool:  # no mock: Dynamo reads it
        return False

    def done(*_args: Any, **_kwargs: Any) -> None:
        """What there is nothing to do for."""

    load, attend = torch.utils.data.DataLoader.__iter__, torch.nn.functional.scaled_dot_product_attention
    with (
        mock.patch.object(torch.utils, "swap_tensors", take_over),
        mock.patch.object(torch.Tensor, "to", staying(torch.Tensor.to)),
        mock.patch.object(torch.nn.Module, "to", staying(torch.nn.Module.to)),
        mock.patch.object(torch.Tensor, "cuda", lambda own, *_args, **_kwargs: own),
        mock.patch.object(torch.Tensor, "pin_memory", lambda own, *_args, **_kwargs: own),
        mock.patch.object(FakeTensorMode, "__torch_dispatch__", on_paper),
        mock.patch.object(torch.autocast, "__init__", autocast_on_cpu),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
        mock.patch.multiple(
            torch.cuda, is_available=is_available, set_device=done, synchronize=done, reset_peak_memory_stats=done
        ),
        mock.patch.object(torch.utils.data.DataLoader, "__iter__", batches),
        mode,
    ):
        yield


def _on_cpu(argument: Any) -> Any:
    is_elsewhere = isinstance(argument, torch.device) and argument.type not in ("cpu", "meta")
    return torch.device("cpu") if is_elsewhere else argument


def _as_device(argument: Any) -> Any:
    """What ``to`` takes for a device: a name, or the number of a GPU."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return torch.device("cuda", argument)
    return torch.device(argument) if isinstance(argument, str) else argument


def _are_small(arguments: Any, *, of_fakes: bool = False) -> bool:
    """Whether all tensors are small, and real ones unless it is about what fake ones stand for."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    if not of_fakes and any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    return sum(tensor.numel() for tensor in tensors) <= MOST_REAL_ELEMENTS
