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
- ``torch.profiler``'s tree of events: the addresses of what the CPU allocator hands out.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes

from remat_passes.again import repetition_of

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
    """What the user calls each input of a Dynamo graph: ``x``, ``batch['y'][0]``."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = getattr(source, "name", node.name)
        text = str(name() if callable(name) else name)
        names.append(re.sub(r"^L\['(\w+)'\]", r"\1", text))
    return tuple(names)


def input_position(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph a placeholder of the joint graph is."""
    position = getattr(node.meta.get("desc"), "idx", None)
    return position if isinstance(position, int) else None


def fix_sizes(inputs: Sequence[Any]) -> None:
    """Make symbolic sizes numbers: guards then have the graph compiled anew for others."""
    for entry in inputs:
        if isinstance(entry, torch.SymInt):
            int(entry)


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
    first = _tied(source, lambda node: graph.succ[node].items())
    last = _tied(sink, lambda node: graph.pred[node].items())
    if sink in first:
        raise nx.NetworkXUnbounded("Infinite capacity path, flow unbounded above.")
    rest = nx.DiGraph()
    rest.add_nodes_from((source, sink))
    for tail, head, capacity in graph.edges(data="capacity", default=math.inf):
        if capacity and tail not in last and head not in first:
            ends = (source if tail in first else tail, sink if head in last else head)
            before = rest.edges[ends]["capacity"] if rest.has_edge(*ends) else 0
            rest.add_edge(*ends, capacity=before + capacity)
    residual = boykov_kolmogorov(rest, source, sink)
    reaching, stack = set(last), [sink]
    while stack:
        head = stack.pop()
        for tail in residual.pred[head]:
            edge = residual[tail][head]
            if tail not in reaching and edge["flow"] < edge["capacity"]:
                reaching.add(tail)
                stack.append(tail)
    return residual.graph["flow_value"], (set(graph) - reaching, reaching)


def _tied(start: str, edges: Callable[[str], Iterable[tuple[str, Mapping[str, Any]]]]) -> set[str]:
    """What infinite edges lead to."""
    found, stack = {start}, [start]
    while stack:
        for node, edge in edges(stack.pop()):
            if node not in found and edge.get("capacity", math.inf) == math.inf:
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
