"""CostTable: measured times of kernels, by what was run and not by where in a graph it stands.

A roofline knows nothing of the library behind an op, of odd shapes and transposed operands. A measured time knows all
that, but holds for one call: this op, these sizes, strides and dtypes, these arguments. That is the key of an entry, so
equal layers share one, the table of one step serves another, and it can be read on a machine that has no such device.
Who fills it is not said here: ``remat_passes`` runs nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .errors import ConfigError, nearest
from .joint import UNBACKED_SIZE, JointGraph, Value
from .json_object import json_object, positive_number
from .ops import OpKind, schema_of

SCHEMA = 1

# What is a kernel of its own. Pointwise work and reductions fuse with their neighbours: a time of their own says
# nothing of what they cost.
KERNELS = frozenset({OpKind.EXTERN, OpKind.SCATTER})


@dataclass(frozen=True)
class CostTable:
    """Times of kernels on one device under one version of torch.

    ``untimed`` holds the kernels that were looked at and not timed, each with the reason: they stay analytic in every
    later plan too, or the second plan of a graph could differ from the first.
    """

    device: str  # the hardware, as it calls itself
    spec: str  # the name of the device spec in use when it was written
    torch_version: str
    times_us: Mapping[str, float] = field(default_factory=dict)  # by ``kernel_key``
    untimed: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self.times_us or key in self.untimed

    def restricted_to(self, keys: Sequence[str]) -> CostTable:
        """The same table with no entries but those of ``keys``."""
        wanted = frozenset(keys)
        return self.with_entries(
            {key: us for key, us in self.times_us.items() if key in wanted},
            {key: why for key, why in self.untimed.items() if key in wanted},
        )

    def with_entries(self, times_us: Mapping[str, float], untimed: Mapping[str, str]) -> CostTable:
        """The same table with these entries instead of its own."""
        return CostTable(self.device, self.spec, self.torch_version, times_us, untimed)

    def to_json(self) -> str:
        """The table file's text: keys sorted, one trailing newline."""
        record = {
            "schema": SCHEMA,
            "device": self.device,
            "spec": self.spec,
            "torch_version": self.torch_version,
            "times_us": dict(self.times_us),
            "untimed": dict(self.untimed),
        }
        return json.dumps(record, sort_keys=True, indent=1) + "\n"

    @property
    def content_hash(self) -> str:
        """Sixteen hex digits that change with every entry: plans depend on the table, so cache keys need it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


# -- keys


def kernels(joint: JointGraph) -> dict[str, list[Value]]:
    """The kernels of a graph by key, in the order in which they first run; those without a key are left out."""
    found: dict[str, list[Value]] = {}
    for value in joint.values:
        key = kernel_key(joint, value)
        if key is not None:
            found.setdefault(key, []).append(value)
    return found


def kernel_key(joint: JointGraph, value: Value) -> str | None:
    """The op with the sizes, strides, dtypes and arguments of one call: ``aten.mm.default(float32[8,4], ...)``.

    Sizes are those that the graph was traced with. ``None`` for what is no kernel of its own, and for calls whose
    operands cannot be written down: sparse tensors, objects.
    """
    node = joint.nodes[value.index]
    if value.kind not in KERNELS or schema_of(node) is None:
        return None
    if not all(_can_be_written(operand) for operand in node.all_input_nodes):
        return None
    texts = [_text(argument, joint.device_type) for argument in node.args]
    texts += [f"{name}={_text(node.kwargs[name], joint.device_type)}" for name in sorted(node.kwargs)]
    return f"{value.op}({', '.join(texts)})"


def dimension_hint(dimension: Any) -> Any:
    """A size or a number as it was traced; ``UNBACKED_SIZE`` for one that depends on the contents of a tensor."""
    if not isinstance(dimension, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return dimension
    return dimension.node.hint if dimension.node.has_hint() else UNBACKED_SIZE


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides as traced; contiguous ones where they depend on the contents of a tensor."""
    if any(isinstance(stride, torch.SymInt) and not stride.node.has_hint() for stride in tensor.stride()):
        return contiguous_strides([dimension_hint(size) for size in tensor.shape])
    return tuple(dimension_hint(stride) for stride in tensor.stride())


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of these sizes without gaps, the last axis innermost."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _can_be_written(operand: fx.Node) -> bool:
    meta = operand.meta.get("val")
    if isinstance(meta, torch.Tensor):
        return meta.layout is torch.strided
    return isinstance(meta, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _text(argument: Any, device_type: str) -> str:
    if isinstance(argument, fx.Node):
        meta = argument.meta["val"]
        return _tensor_text(meta, device_type) if isinstance(meta, torch.Tensor) else repr(dimension_hint(meta))
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_text(entry, device_type) for entry in argument)}]"
    return repr(argument)


def _tensor_text(tensor: torch.Tensor, device_type: str) -> str:
    """``float32[8,4]``, with strides where they are not contiguous and the device where it is not the graph's."""
    sizes = [dimension_hint(size) for size in tensor.shape]
    strides = strides_of(tensor)
    layout = "" if strides == contiguous_strides(sizes) else "{" + ",".join(map(str, strides)) + "}"
    place = "" if tensor.device.type == device_type else f"@{tensor.device.type}"
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, sizes))}]{layout}{place}"


# -- files

_FIELDS = ("schema", "device", "spec", "torch_version", "times_us", "untimed")
_REMEDY = "Write it again with remat_compiler.export_cost_table, or leave cost_model at 'analytic' or 'measured'."


def table_from_json(text: str, origin: str) -> CostTable:
    """Read a table file's text; ``origin`` names it in errors.

    Raises:
        ConfigError: the text is not JSON or of another schema, a field is missing, unknown or of the wrong kind, or a
            time is not a number above 0.
    """
    record = json_object(text, functools.partial(_damaged, origin))
    if record.get("schema") != SCHEMA:
        raise _damaged(origin, f"its schema is {record.get('schema')!r}, this version of remat reads {SCHEMA}")
    for name in record:
        if name not in _FIELDS:
            raise _damaged(origin, f"field {name!r} is unknown", nearest(name, _FIELDS))
    for name in _FIELDS:
        if name not in record:
            raise _damaged(origin, f"field {name!r} is missing")
    times, untimed = _entries(record, "times_us", origin), _entries(record, "untimed", origin)
    return CostTable(
        device=_word(record, "device", origin),
        spec=_word(record, "spec", origin),
        torch_version=_word(record, "torch_version", origin),
        times_us={key: _time_us(key, times[key], origin) for key in sorted(times)},
        untimed={key: _word(untimed, key, origin) for key in sorted(untimed)},
    )


def _damaged(origin: str, what: str, hint: str = "") -> ConfigError:
    return ConfigError(f"{origin} is not a usable cost table: {what}.{hint} {_REMEDY}")


def _entries(record: Mapping[str, object], name: str, origin: str) -> Mapping[str, object]:
    entries = record[name]
    if not isinstance(entries, dict):
        raise _damaged(origin, f"field {name!r} is {entries!r}, expected an object")
    return entries


def _word(record: Mapping[str, object], name: str, origin: str) -> str:
    entry = record[name]
    if not isinstance(entry, str):
        raise _damaged(origin, f"{name!r} is {entry!r}, expected text")
    return entry


def _time_us(key: str, entry: object, origin: str) -> float:
    time_us = positive_number(entry)
    if time_us is None:
        raise _damaged(origin, f"the time of {key!r} is {entry!r}, expected a number of microseconds above 0")
    return time_us
