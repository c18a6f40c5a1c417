"""JointGraph: the forward and backward graph of one step, as values.

AOTAutograd traces forward and backward into one FX graph. This stage reads it once and writes down, for each value,
what the later stages need: its bytes, the storage it shares, where in the user's program it comes from, and on which
side of the step it can be computed. Nothing later looks at names or metadata again.
"""

from __future__ import annotations

import enum
import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import sympy
import torch
from torch import fx

from .ops import OpKind, is_collective, is_view, op_kind, op_label, written_operands

Size: TypeAlias = int | sympy.Expr  # a dimension that may be symbolic


class Side(enum.Enum):
    """Where a value is computed before anything is decided."""

    FORWARD = "forward"  # an output of the forward depends on it
    BACKWARD = "backward"  # it depends on a tangent
    EITHER = "either"  # neither: backward needs it, and it can be computed on both sides


class Role(enum.Enum):
    """What a placeholder stands for."""

    PRIMAL = "primal"
    TANGENT = "tangent"
    SEED = "seed"
    STATE = "state"
    NONE = "none"


class Policy(enum.Enum):
    """The user's annotation (``torch.utils.checkpoint.CheckpointPolicy``), where it binds."""

    MUST_SAVE = "MUST_SAVE"
    MUST_RECOMPUTE = "MUST_RECOMPUTE"


@dataclass(frozen=True, slots=True)
class Value:
    """One node of the joint graph.

    ``bytes`` counts the node's own storage: 0 for a view and for a size. The parts of an op with several outputs carry
    their own bytes, the op those of outputs that nobody reads. ``base`` is the value whose storage this one shows,
    itself when it owns one.
    """

    index: int
    name: str
    op: str
    kind: OpKind
    role: Role
    side: Side
    inputs: tuple[int, ...]
    users: tuple[int, ...]
    base: int
    shape: tuple[Size, ...]
    sizes: tuple[int, ...]  # the shape that the graph was traced with
    dtype: torch.dtype | None
    bytes: int
    module: str
    source: str
    policy: Policy | None
    region: int | None  # the checkpoint region of the user's program, if any
    repetition: int = 0  # which pass over its block computes it again (again.py); 0: none, the step itself
    is_copy: bool = False  # computed once more than in the graph that was captured

    @property
    def numel(self) -> int:
        return math.prod(self.sizes) if self.dtype is not None else 0

    @property
    def is_float(self) -> bool:
        return self.dtype is not None and self.dtype.is_floating_point


@dataclass(frozen=True)
class JointGraph:
    """The values of one joint graph in topological order, and what the step hands in and out."""

    values: tuple[Value, ...]
    nodes: tuple[fx.Node, ...]  # nodes[i] computes values[i]
    forward_outputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    static_inputs: frozenset[int]  # parameters and buffers
    trained_inputs: frozenset[int]  # inputs that get a gradient
    mutated_inputs: frozenset[int]  # inputs that forward changes in place, in the graph or right after it
    symbols: tuple[tuple[str, int], ...]  # symbolic sizes and their hints
    device_type: str

    @cached_property
    def fingerprint(self) -> str:
        """Eight hex digits that depend on ops, shapes and edges alone."""
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(f"{value.op}|{value.inputs}|{value.shape}|{value.dtype}|{value.side.value}\n".encode())
        return digest.hexdigest()[:8]

    @cached_property
    def views(self) -> dict[int, tuple[Value, ...]]:
        """The views of each storage."""
        found: dict[int, list[Value]] = {}
        for value in self.values:
            if value.base != value.index:
                found.setdefault(value.base, []).append(value)
        return {base: tuple(views) for base, views in found.items()}

    @cached_property
    def backward_values(self) -> tuple[int, ...]:
        """What depends on a tangent, in order."""
        return tuple(value.index for value in self.values if value.side is Side.BACKWARD)

    @cached_property
    def inputs(self) -> frozenset[int]:
        """What no op computes: placeholders and constants of the module."""
        return frozenset(value.index for value in self.values if value.kind is OpKind.INPUT)

    @cached_property
    def forward_effects(self) -> tuple[int, ...]:
        """Forward's ops that change something outside the graph."""
        return tuple(v.index for v in self.values if v.kind is OpKind.EFFECT and v.side is Side.FORWARD)

    @cached_property
    def backward_targets(self) -> tuple[int, ...]:
        """What backward has to compute, in order; ops that change something last: nothing reads the old value after
        them."""
        ops = [i for i in self.backward_values if self.values[i].role is Role.NONE]
        effects = [i for i in ops if self.values[i].kind is OpKind.EFFECT]
        pure = [i for i in ops if self.values[i].kind is not OpKind.EFFECT]
        return (*pure, *self.backward_outputs, *effects)

    @cached_property
    def required(self) -> frozenset[int]:
        """Forward or either values that backward itself reads or returns."""
        read = {i for b in self.backward_values for i in self.values[b].inputs}
        return frozenset(i for i in read | set(self.backward_outputs) if self.values[i].side is not Side.BACKWARD)

    @cached_property
    def positional(self) -> frozenset[int]:
        """Integers and Booleans that are computed elementwise from positions and constants alone: causal masks."""
        elementwise = (OpKind.FACTORY, OpKind.POINTWISE, OpKind.VIEW)
        found: set[int] = set()
        for value in self.values:
            is_exact = value.dtype is not None and not value.dtype.is_floating_point and not value.dtype.is_complex
            has_source = bool(value.inputs) or value.kind is OpKind.FACTORY
            if value.kind in elementwise and is_exact and has_source and found.issuperset(value.inputs):
                found.add(value.index)
        return frozenset(found)

    @cached_property
    def activations(self) -> frozenset[int]:
        """Forward floating-point values that depend on a parameter and on an input of the step.

        Masks, positions and casts of weights are not among them: they can be had again without the layers below. In a
        step that is handed its weights as plain inputs, those that get a gradient are the parameters.
        """
        primals = {v.index for v in self.values if v.role is Role.PRIMAL}
        weight = set(self.static_inputs or self.trained_inputs)
        batch = primals - weight or set(weight)
        for value in self.values:
            weight.update([value.index] if weight.intersection(value.inputs) else [])
            batch.update([value.index] if batch.intersection(value.inputs) else [])
        return frozenset(i for i in weight & batch if self.values[i].side is Side.FORWARD and self._is_activation(i))

    def _is_activation(self, index: int) -> bool:
        value = self.values[index]
        return value.is_float or value.dtype is None


def capture(
    graph: fx.Graph,
    num_forward_outputs: int,
    static_input_indices: Sequence[int],
    pinned_to_backward: frozenset[fx.Node],
) -> JointGraph:
    """Read an FX joint graph.

    Args:
        graph: dead code removed; placeholders called ``tangents_*`` are tangents.
        num_forward_outputs: how many of the outputs belong to forward.
        static_input_indices: positions of parameters and buffers among the primals.
        pinned_to_backward: nodes that must run in backward although no tangent reaches them.
    """
    nodes = tuple(node for node in graph.nodes if node.op != "output")
    position = {node: index for index, node in enumerate(nodes)}
    outputs = _flat_outputs(graph)
    forward_nodes, backward_nodes = outputs[:num_forward_outputs], outputs[num_forward_outputs:]
    roles = {node: _role(node) for node in nodes}
    sides = _sides(nodes, roles, forward_nodes, pinned_to_backward)
    kinds = {node: op_kind(node) for node in nodes}
    bases = _bases(nodes, kinds)
    values = tuple(_value(node, position, roles[node], sides[node], kinds[node], bases[node]) for node in nodes)
    primals = [node for node in nodes if roles[node] is Role.PRIMAL]
    return JointGraph(
        values=values,
        nodes=nodes,
        forward_outputs=tuple(position[node] for node in forward_nodes if node is not None),
        backward_outputs=tuple(position[node] for node in backward_nodes if node is not None),
        static_inputs=frozenset(position[primals[i]] for i in static_input_indices if i < len(primals)),
        trained_inputs=frozenset(position[p] for p, g in zip(primals, backward_nodes, strict=False) if g is not None),
        mutated_inputs=frozenset(position[node] for node in _mutated(graph, sides, primals, num_forward_outputs)),
        symbols=_symbols(nodes),
        device_type=_device_type(nodes),
    )


def _flat_outputs(graph: fx.Graph) -> list[fx.Node | None]:
    (output,) = graph.find_nodes(op="output")
    flat: list[fx.Node | None] = []
    stack = list(reversed(output.args))
    while stack:
        entry = stack.pop()
        if isinstance(entry, (list, tuple)):
            stack.extend(reversed(entry))
        else:
            flat.append(entry if isinstance(entry, fx.Node) else None)
    return flat


def _role(node: fx.Node) -> Role:
    if node.op != "placeholder":
        return Role.NONE
    target = str(node.target)
    if "tangents" in target:
        return Role.TANGENT
    if "bwd_seed" in target or "bwd_base_offset" in target:
        return Role.TANGENT
    if "fwd_seed" in target or "fwd_base_offset" in target:
        return Role.SEED
    if type(node.meta.get("desc")).__name__ == "ForwardTokenAOTInput":  # stands before the inputs
        return Role.STATE
    if type(node.meta.get("val")).__name__ == "BackwardState":
        return Role.STATE
    return Role.PRIMAL


def _sides(
    nodes: Sequence[fx.Node],
    roles: dict[fx.Node, Role],
    forward_outputs: Sequence[fx.Node | None],
    pinned_to_backward: frozenset[fx.Node],
) -> dict[fx.Node, Side]:
    backward: set[fx.Node] = set()
    for node in nodes:
        if roles[node] is Role.TANGENT or node in pinned_to_backward or backward.intersection(node.all_input_nodes):
            backward.add(node)
    forward = {node for node in nodes if roles[node] in (Role.PRIMAL, Role.SEED, Role.STATE)}
    stack = [node for node in forward_outputs if node is not None]
    stack += [node for node in nodes if node not in backward and op_kind(node) is OpKind.EFFECT]
    while stack:
        node = stack.pop()
        if node not in forward and node not in backward:
            forward.add(node)
            stack.extend(node.all_input_nodes)
    sides = dict.fromkeys(nodes, Side.EITHER)
    sides.update(dict.fromkeys(forward, Side.FORWARD))
    sides.update(dict.fromkeys(backward, Side.BACKWARD))
    return sides


def _bases(nodes: Sequence[fx.Node], kinds: dict[fx.Node, OpKind]) -> dict[fx.Node, fx.Node]:
    bases: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, (list, tuple)):
            source = source[0] if source else None
        shares = kinds[node] in (OpKind.VIEW, OpKind.EFFECT)  # what changes its operand in place returns that operand
        bases[node] = bases[source] if shares and isinstance(source, fx.Node) else node
    return bases


def _value(node: fx.Node, position: dict[fx.Node, int], role: Role, side: Side, kind: OpKind, base: fx.Node) -> Value:
    tensor = node.meta.get("val")
    shape = tuple(_size(d) for d in tensor.shape) if isinstance(tensor, torch.Tensor) else ()
    sizes = tuple(_dimension_hint(d) for d in tensor.shape) if isinstance(tensor, torch.Tensor) else ()
    return Value(
        index=position[node],
        name=node.name,
        op=op_label(node),
        kind=kind,
        role=role,
        side=side,
        inputs=tuple(position[source] for source in node.all_input_nodes),
        users=tuple(sorted(position[user] for user in node.users if user in position)),
        base=position[base],
        shape=shape,
        sizes=sizes,
        dtype=tensor.dtype if isinstance(tensor, torch.Tensor) else None,
        bytes=_own_bytes(node) if base is node else 0,
        module=module_path(node),
        source=source_line(node),
        policy=_policy(node),
        region=node.meta.get("ac_graph_id"),
    )


def _size(dimension: int | torch.SymInt) -> Size:
    return dimension if isinstance(dimension, int) else sympy.sympify(dimension.node.expr)


# What a size that depends on the contents of a tensor counts as; Inductor uses the same
# (torch/_inductor/config.py, ``unbacked_symint_fallback``).
UNBACKED_SIZE = 8192


def _dimension_hint(dimension: int | torch.SymInt) -> int:
    """A dimension as an integer: the one that the graph was traced with."""
    if isinstance(dimension, int):
        return dimension
    return int(dimension.node.hint) if dimension.node.has_hint() else UNBACKED_SIZE


def _own_bytes(node: fx.Node) -> int:
    results = node.meta.get("val")
    if not isinstance(results, (tuple, list)):
        return _storage_bytes(results)
    if is_view(node):
        return 0
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    return sum(_storage_bytes(result) for position, result in enumerate(results) if position not in read)


def _storage_bytes(tensor: object) -> int:
    """Bytes that the tensor's own storage takes; strides with gaps count, expanded dimensions do not."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    numel = math.prod(_dimension_hint(d) for d in tensor.shape)
    if any(isinstance(d, torch.SymInt) for d in (*tensor.shape, *_strides(tensor))):
        return numel * tensor.dtype.itemsize
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, _strides(tensor), strict=False))
    return (min(numel, extent) if 0 in _strides(tensor) else max(numel, extent)) * tensor.dtype.itemsize if numel else 0


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout is torch.strided else ()


def module_path(node: fx.Node) -> str:
    """The path of the innermost nn.Module, as the user would write it: ``blocks.0.ln1``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    for root in ("L['self']", "L['fn']"):  # what Dynamo calls the compiled module itself
        path = path.removeprefix(root)
    for old, new in (("['", "."), ("']", ""), ("[", "."), ("]", ""), ("_modules.", "")):
        path = path.replace(old, new)
    return str(path.removeprefix("L.").removeprefix("G.").strip("."))


def source_line(node: fx.Node) -> str:
    """``file:line`` of the innermost frame of the user's program."""
    frames = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")
    ]
    if not frames:
        return ""
    name, line = frames[-1].split(",")[:2]
    return f"{name.removeprefix('File ').strip(chr(34))}:{line.strip().removeprefix('line ')}"


def _policy(node: fx.Node) -> Policy | None:
    policy = getattr(node.meta.get("recompute"), "name", None)
    return Policy(policy) if policy in ("MUST_SAVE", "MUST_RECOMPUTE") else None


def _mutated(
    graph: fx.Graph, sides: dict[fx.Node, Side], primals: Sequence[fx.Node], num_forward_outputs: int
) -> set[fx.Node]:
    """Primals that forward changes in place: by a ``copy_`` in the graph, or by AOTAutograd's copy right after it."""
    writers = [node for node in sides if sides[node] is not Side.BACKWARD]
    mutated = {operand for node in writers for operand in written_operands(node)}
    (output,) = graph.find_nodes(op="output")
    by_description = {repr(node.meta["desc"]): node for node in primals if node.meta.get("desc") is not None}
    for description in _flat_descriptions(output)[:num_forward_outputs]:
        source = getattr(description, "mutated_input", None)
        if source is not None and repr(source) in by_description:
            mutated.add(by_description[repr(source)])
    return mutated.intersection(primals)


def _flat_descriptions(output: fx.Node) -> list[object]:
    descriptions = output.meta.get("desc") or []
    return [entry for part in descriptions for entry in (part if isinstance(part, (list, tuple)) else [part])]


def _symbols(nodes: Sequence[fx.Node]) -> tuple[tuple[str, int], ...]:
    hints: dict[str, int] = {}
    for node in nodes:
        size = node.meta.get("val")
        if (
            node.op != "placeholder"
            or not isinstance(size, torch.SymInt)
            or not isinstance(size.node.expr, sympy.Symbol)
        ):
            continue
        if size.node.has_hint():
            hints[str(size.node.expr)] = int(size.node.hint)
    return tuple(sorted(hints.items()))


def _device_type(nodes: Sequence[fx.Node]) -> str:
    """The accelerator that the graph's tensors live on; ``cpu`` when none of them is on one."""
    types = {
        node.meta["val"].device.type
        for node in nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and not is_collective(node)
    }
    accelerators = sorted(types - {"cpu", "meta"})
    return accelerators[0] if accelerators else "cpu"


__all__ = ["JointGraph", "Policy", "Role", "Side", "Size", "Value", "capture"]
