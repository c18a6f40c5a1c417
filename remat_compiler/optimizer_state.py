"""The bytes of an optimizer's state, before there is any.

An optimizer makes its state in its first step, behind the first forward and backward: a budget that those two fill has
no room for it. So the bytes have to be known before (option ``reserve``).

A table of formulas would know the classes of one version of torch. Here a copy of the optimizer takes its step on
tensors that have shapes and no memory, and its state is looked at, whatever class it is of.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from remat_passes.errors import ConfigError
from remat_passes.memory import block_bytes, rounded_up

from . import torch_private


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """The bytes that the state of ``optimizer`` takes once it has made a step, on the devices of its parameters.

    See ``remat_compiler.optimizer_state_bytes``.

    Raises:
        ConfigError: it is no optimizer, or its state cannot be worked out without running it.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer_state_bytes was given a {type(optimizer).__name__}: it takes an optimizer, an instance of"
            " torch.optim.Optimizer."
        )
    step = torch_private.unhooked(type(optimizer).step)
    _refuse_closures(type(optimizer).__name__, step)
    with torch_private.shapes_only(_parameters(optimizer)) as copied:
        try:
            copy = _without_hooks(optimizer, copied)
            for parameter, original in zip(_parameters(copy), _parameters(optimizer), strict=True):
                parameter.grad = _gradient(parameter, original, optimizer) if parameter.requires_grad else None
            step(copy)
        except Exception as error:
            raise ConfigError(
                f"The state of {type(optimizer).__name__} cannot be worked out without running it: a step on tensors"
                f" without contents failed ({type(error).__name__}: {error}). Run one step and count the tensors of"
                " optimizer.state instead."
            ) from error
        _refuse_sparse(copy)
        return _held_bytes(copy)


def _refuse_closures(name: str, step: Any) -> None:
    """An optimizer that evaluates the loss itself keeps what its iterations ask for."""
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"The state of {name} cannot be worked out without running it: its step calls a closure as often as it"
            " needs to, and keeps something of each call (LBFGS at most 2 * history_size + 4 times the bytes of the"
            " parameters). Set reserve to a number that you have measured."
        )


def _refuse_sparse(optimizer: Optimizer) -> None:
    """Sparse state, as SGD's momentum of sparse gradients, has as many rows as the gradients will have."""
    if any(tensor.layout is not torch.strided for tensor in _tensors(optimizer.state)):
        raise ConfigError(
            f"The state of {type(optimizer).__name__} cannot be worked out without running it: it is sparse, and grows"
            " with the rows that gradients have. Set reserve to a number that you have measured."
        )


def _without_hooks(optimizer: Optimizer, copied: Any) -> Optimizer:
    """A copy with parameters and state that have no contents.

    Hooks and a ``step`` that was put onto the instance (as learning rate schedulers do) belong to the original.
    """
    own = {name: entry for name, entry in vars(optimizer).items() if name != "step" and not name.endswith("_hooks")}
    functions = {name: entry for name, entry in own.items() if callable(entry)}
    rest = {name: entry for name, entry in own.items() if name not in functions}
    copy = object.__new__(type(optimizer))
    vars(copy).update(functions, **copied(rest))
    return copy


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _gradient(parameter: torch.Tensor, original: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
    """A gradient as the parameter will get: dense, unless it has a sparse one or the optimizer takes no other."""
    is_sparse = original.grad is not None and original.grad.is_sparse
    if not parameter.dim() or not (is_sparse or isinstance(optimizer, torch.optim.SparseAdam)):
        return torch.empty_like(parameter)
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    shape = tuple(parameter.shape)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=True)


def _held_bytes(optimizer: Optimizer) -> int:
    """What the state takes beside parameters and gradients, each storage once and rounded as the allocator does."""
    parameters = list(_parameters(optimizer))
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    devices = {parameter.device for parameter in parameters}
    held = _storages(_tensors(optimizer.state))
    for key in _storages([*parameters, *gradients]):
        held.pop(key, None)
    return sum(_rounded(tensor) for tensor in held.values() if tensor.device in devices)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """A tensor of each storage; what is sparse has none."""
    plain = (part for tensor in tensors for part in torch_private.plain_tensors(tensor))
    return {part.untyped_storage()._cdata: part for part in plain if part.layout is torch.strided}


def _rounded(tensor: torch.Tensor) -> int:
    return rounded_up(tensor.untyped_storage().nbytes(), block_bytes(tensor.device.type))


def _tensors(entry: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors in nested containers and objects."""
    seen = set() if seen is None else seen
    if id(entry) in seen:
        return
    seen.add(id(entry))
    if isinstance(entry, torch.Tensor):
        yield entry
    elif isinstance(entry, Mapping):
        for part in entry.values():
            yield from _tensors(part, seen)
    elif isinstance(entry, (list, tuple, set, frozenset)):
        for part in entry:
            yield from _tensors(part, seen)
    elif hasattr(entry, "__dict__") and not isinstance(entry, type):
        yield from _tensors(vars(entry), seen)
