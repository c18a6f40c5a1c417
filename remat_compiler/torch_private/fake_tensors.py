"""Tensors without contents, for steps and optimizers that are traced and not run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

# What fake tensors raise where a script asks for what is in them: a number, or a shape that depends on it.
UNKNOWN_CONTENTS = (DataDependentOutputException, DynamicOutputShapeException)


# A tensor of at most so many elements that is computed without fake ones is real: scripts draw the positions of their
# batches, shuffle their indices and keep their counters in such tensors, and read them.
MOST_REAL_ELEMENTS = 2**16


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
        args, kwargs = tuple(map(on_cpu, args)), {name: on_cpu(value) for name, value in (kwargs or {}).items()}
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
            found = [on_cpu(as_device(arg)) for arg in args]
            return to(own, *found, **{name: on_cpu(as_device(value)) for name, value in kwargs.items()})

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


def on_cpu(argument: Any) -> Any:
    is_elsewhere = isinstance(argument, torch.device) and argument.type not in ("cpu", "meta")
    return torch.device("cpu") if is_elsewhere else argument


def as_device(argument: Any) -> Any:
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
