"""Masks: Booleans between forward and backward, in a type that a CPU's vector units store and load.

Inductor's C++ writes and reads a vector of bool one element at a time: 9 ns an element to write ``x > 0`` and 3 ns to
read it, where the same mask through float and uint8 takes 0.1 and 0.1 (AVX-512, gcc 12, torch 2.13;
``benchmarks/masks.py``). A bool and a uint8 have the same bytes, so no plan is changed by it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

_convert = torch.ops.prims.convert_element_type.default


def pack_masks(
    forward: fx.GraphModule, backward: fx.GraphModule, computed: Collection[str], num_fwd_outputs: int
) -> None:
    """Hand the masks over as uint8 (both modules are changed).

    Args:
        forward: its outputs are those of the step and then what it saves.
        backward: its inputs have the names of what forward saves.
        computed: names of the values that elementwise kernels compute.
        num_fwd_outputs: how many of the outputs are those of the step.
    """
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    received = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    masks = [
        (place, mask)
        for place, mask in enumerate(results[num_fwd_outputs:], num_fwd_outputs)
        if _is_mask(mask, computed) and mask not in results[:num_fwd_outputs] and mask.name in received
    ]
    if not masks:
        return
    for place, mask in masks:
        with forward.graph.inserting_after(mask):
            number = _converted(forward.graph, mask, torch.float32)
        with forward.graph.inserting_after(number):
            packed = results[place] = _converted(forward.graph, number, torch.uint8)
        _unpack(backward.graph, received[mask.name], packed)
    output.args = (type(output.args[0])(results),)
    forward.recompile()
    backward.recompile()


def _is_mask(node: object, computed: Collection[str]) -> bool:
    return isinstance(node, fx.Node) and node.name in computed and node.meta["val"].dtype is torch.bool


def _unpack(graph: fx.Graph, mask: fx.Node, packed: fx.Node) -> None:
    with graph.inserting_before(mask):
        received = graph.placeholder(packed.name)
        received.meta = dict(packed.meta)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        number = _converted(graph, received, torch.float32)
        unpacked = graph.call_function(torch.ops.aten.ne.Scalar, (number, 0))
        unpacked.meta = dict(mask.meta)
    mask.replace_all_uses_with(unpacked)
    graph.erase_node(mask)


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    converted = graph.call_function(_convert, (node, dtype))
    converted.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return converted
