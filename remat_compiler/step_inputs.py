"""StepInputs: what the user calls the inputs of a step, and which of them were said to carry the batch.

A mark belongs to a tensor and not to an argument's name, so it works for tensors inside of dicts and objects too.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from remat_passes.errors import ConfigError

from . import torch_private


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one Dynamo graph, by position: their names, and the axes that were said to carry the batch."""

    names: tuple[str, ...] = ()
    batch_axes: tuple[tuple[int, int], ...] = ()
    num_groups: int | None = None  # the batch consists of so many groups that must not be split (batch_norm.py)
    batch_norm: str = ""  # what is said against slices where most of the step meets batch norm in training
    is_part: bool = False  # torch.compile broke the step into several graphs, and these are the inputs of one


_marks = WeakTensorKeyDictionary()
_lock = threading.Lock()


def mark_batch(tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Say that ``tensor`` carries the batch at ``axis``, before the step is compiled with it; gives it back.

    Raises:
        ConfigError: the tensor has no such axis.
    """
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch.nn.Parameter):
        raise ConfigError(f"mark_batch was given a {type(tensor).__name__}: only tensors of inputs carry the batch.")
    with _lock:
        _marks[tensor] = _checked_axis("the tensor that mark_batch was given", tensor, axis)
    return tensor


def _checked_axis(name: str, tensor: torch.Tensor, axis: int) -> int:
    if not isinstance(axis, Integral) or isinstance(axis, bool):
        raise ConfigError(f"The axis of {name} that carries the batch is {axis!r}: it is not an int.")
    axis = int(axis)
    if -tensor.dim() <= axis < tensor.dim():
        return axis % tensor.dim()
    shape = ", ".join(map(str, tensor.shape))
    has = f"axes 0 to {tensor.dim() - 1}" if tensor.dim() else "no axes"
    raise ConfigError(f"The batch was said to be at axis {axis} of {name}, whose shape is ({shape}): it has {has}.")


def step_inputs(module: fx.GraphModule, inputs: Sequence[Any], named: Sequence[tuple[str, int]]) -> StepInputs:
    """What is known of the inputs of a Dynamo graph.

    Args:
        module: the graph.
        inputs: what it is compiled for.
        named: option ``batch_axes``.

    Raises:
        ConfigError: there is no input of that name, or it has no such axis, or sizes of the batch differ.
    """
    sources = torch_private.source_names(module)
    names = user_names(sources)
    tensors = {place: entry for place, entry in enumerate(inputs) if isinstance(entry, torch.Tensor)}
    with _lock:
        found = {place: _marks[tensor] for place, tensor in tensors.items() if tensor in _marks}
    by = {place: f"{axis} by mark_batch" for place, axis in found.items()}
    own = [names[place] for place, tensor in tensors.items() if not _is_state(sources[place], tensor)]
    is_part = torch_private.is_part(module)
    for name, axis in named:
        place = _named(name, {names[place]: place for place in tensors}, own, is_part=is_part)
        axis = _checked_axis(f"input {names[place]!r}", tensors[place], axis)
        if found.setdefault(place, axis) != axis:
            raise ConfigError(
                f"The batch was said to be at axis {by[place]} and at axis {axis} by option batch_axes ({name!r}), of"
                f" one and the same input {names[place]!r}. Say it once."
            )
        by[place] = f"{axis} by option batch_axes ({name!r})"
    sizes = {names[place]: int(tensors[place].shape[axis]) for place, axis in found.items()}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ConfigError(f"The inputs that were said to carry the batch disagree on its size: {said}.")
    return StepInputs(names, tuple(sorted(found.items())), is_part=is_part)


def _named(name: str, places: Mapping[str, int], own: Sequence[str], *, is_part: bool) -> int:
    plain = {_plain(known): place for known, place in places.items()}
    if _plain(name) in plain:
        return plain[_plain(name)]
    raise ConfigError(
        f"Option batch_axes names the input {name!r}, and the compiled step has none of that name."
        f"{_nearest(name, own)} Its inputs are {', '.join(own) or 'parameters and buffers only'}."
        f"{_OF_A_PART if is_part else ''}"
    )


_OF_A_PART = (
    " torch.compile broke the step into several graphs (TORCH_LOGS=graph_breaks shows where), and this is about one of"
    " them. mark_batch on the tensor says the same to those alone that are handed it."
)


def _nearest(name: str, own: Sequence[str]) -> str:
    """A hint: the input that ends in that name (``batch['y']`` for ``y``), else the one that is spelt most like it."""
    wanted = _plain(name).lower()
    by_plain = {_plain(known).lower(): known for known in own}
    ends = [plain for plain in by_plain if plain.endswith(f"_{wanted}")]
    found = ends or difflib.get_close_matches(wanted, by_plain, n=1)
    return f" Did you mean {by_plain[found[0]]!r}?" if found else ""


# Dynamo's expressions for what belongs to a module, as ``L['self']._modules['blocks']._modules['0']._buffers['mask']``.
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_ROOT = re.compile(r"^(?:(?:self|fn)\.|G\['(\w+)'\])")  # the compiled module or the object of a method; a global


def _is_state(source: str, tensor: torch.Tensor) -> bool:
    """Whether an input is a parameter or a buffer."""
    return isinstance(tensor, torch.nn.Parameter) or bool(_MEMBER.search(source))


def user_names(sources: Sequence[str]) -> tuple[str, ...]:
    """What the user calls the inputs: ``blocks.0.weight`` where Dynamo's expression goes through the modules.

    Names that two inputs would share, as the weights of two models that one function uses, stay as Dynamo has them.
    """
    short = [_user_name(source) for source in sources]
    return tuple(name if short.count(name) == 1 else source for name, source in zip(short, sources, strict=True))


def _user_name(source: str) -> str:
    name = _MEMBER.sub(r".\1", source)
    return _ROOT.sub(r"\1", name) if name != source or source.startswith("G[") else source


def _plain(name: str) -> str:
    """``batch['y'][0]``, ``batch.y.0`` and ``batch_y_0`` are one name."""
    return "_".join(re.findall(r"\w+", name))
