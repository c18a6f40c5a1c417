"""The eager lowering: the graphs as AOTAutograd leaves them, interpreted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ..readback import signature
from .graphs import CompiledGraph, call_subgraph


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
