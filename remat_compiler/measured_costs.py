"""Measured times of kernels: each distinct call of a graph timed once on the device at hand, and kept.

Only what is a kernel of its own is timed (``remat_passes.cost_table.KERNELS``). Pointwise work fuses into its readers,
and a time of it alone says nothing of what it costs there; it keeps the roofline. What cannot be run on made-up
operands keeps it as well, op by op, and the plan says how many.

Times differ from run to run, and plans must not. So a time is kept in the user's cache folder the first time, and so is
the verdict that a kernel is not timed; the second plan of a graph is made from the same table as the first. What is
kept must be true, then: on a CPU a run that had to wait for a core does not count (a product of 0.2 ms was seen to take
12 to 16 ms on two cores beside another busy process), and a kernel none of whose runs counts is left for the next
compile.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from remat_passes.cost import op_time_us, traced_sizes
from remat_passes.cost_table import CostTable, dimension_hint, kernels, strides_of, table_from_json
from remat_passes.device import BUILT_IN, DeviceSpec
from remat_passes.errors import ConfigError
from remat_passes.joint import JointGraph, Value
from remat_passes.ops import OpKind, draws_from_generator, is_builtin, is_collective, op_name, schema_of

from .calibrate import cpu_model, default_cache_dir, timed, write_atomically
from .device_at_hand import GPU_NAMES
from .options import Options
from .torch_private import outside_of_tracing

METHOD = 1  # part of a cache file's name: raise it whenever what is measured changes

# What measuring may take of one compile; the kernels with the largest share of the step come first. A GPT has about 20
# distinct kernels, a ResNet-50 about 150; each takes under LIMIT_US on an idle machine.
TOTAL_LIMIT_S = 10.0
MAX_KERNELS = 256

# One kernel: as in calibrate.py, the fastest run counts, and it is believed once others came near. Fewer need to agree,
# because a kernel's time is one price of many where a device's figure is all of them.
AGREEING_RUNS = 5
AGREEMENT = 1.05
LIMIT_US = 50_000.0
ROUNDS = 2  # over the kernels that were disturbed by other work

# On CUDA, runs between two events: the host enqueues them ahead of the device, so what it needs for one is hidden.
CUDA_SAMPLE_US = 1_000.0
CUDA_MAX_RUNS = 50

# Operands and result of a kernel that is timed. On CUDA a quarter of the free memory, because the kernel's workspace
# and what the allocator holds back come on top: assumed. A CPU cannot say how much is free; this is an eighth of the
# memory that device.py assumes of a CPU (GENERIC_CPU).
CUDA_SHARE = 4
CPU_CAP_BYTES = 2**30

SIGNIFICANT_DIGITS = 3  # repeats agree within a few percent

PATTERN_ELEMENTS = 2**16  # of random numbers, repeated to fill an operand: enough that no kernel finds it special

# Ops whose integer operands only have to lie in a range, by the size that bounds it. Other integers mean something that
# cannot be made up, and on a GPU a wrong one ends the process: such ops stay analytic.
_INDEXED_BY_AXIS = frozenset("scatter scatter_add scatter_reduce index_add index_copy index_reduce".split())
_INDEXED_BY_POSITION = frozenset("index_put _unsafe_index_put".split())
_ANY_INTEGER = frozenset("sort topk kthvalue msort mode median bincount".split())


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """What one graph is priced with beside the roofline, and what its plan says of it."""

    table: CostTable | None  # no entries but those of the graph's own kernels; None: all is analytic
    label: str  # the plan's ``cost_model``
    notes: tuple[str, ...]

    @property
    def content_hash(self) -> str:
        """Part of a cache key: another table may give another plan."""
        return "" if self.table is None else self.table.content_hash


def kernel_times(joint: JointGraph, spec: DeviceSpec, options: Options, cache_dir: Path) -> KernelTimes:
    """The measured times that ``cost_model`` asks for.

    Args:
        joint: the graph whose kernels are wanted.
        spec: the device that prices the rest, and orders the kernels by their share of the step.
        options: ``cost_model`` and ``device_spec`` as the user set them.
        cache_dir: the user's cache folder (``default_cache_dir``).

    Raises:
        ConfigError: the table is of another device or of another torch, its file is damaged, or ``device_spec`` is not
            the device that would be measured.
    """
    if options.cost_model == "analytic":
        return KernelTimes(None, "analytic", ())
    check_cost_model(options, spec, joint.device_type)
    wanted = {key: values for key, values in kernels(joint).items() if _is_run(values[0], options.lowering)}
    if options.cost_model == "measured":
        table, label = _measured(joint, wanted, spec, cache_dir), "measured"
    else:
        table, label = _exported(options.cost_model), Path(options.cost_model).name
    table = table.restricted_to(list(wanted))
    return KernelTimes(table, label, (_note(table, len(wanted), options.cost_model),))


def _is_run(value: Value, lowering: str) -> bool:
    """Whether what would be timed is what will run: Inductor writes its own scatters (torch/_inductor/lowering.py).

    One of 4096 rows of width 256 into 2048 took 475 us in ATen, 151 us in Inductor's code, and 201 us by the roofline.
    """
    return lowering == "eager" or value.kind is OpKind.EXTERN


def check_cost_model(options: Options, spec: DeviceSpec, device_type: str) -> None:
    """Refuse a ``cost_model`` that does not go with the device, before anything is compiled.

    Raises:
        ConfigError: as ``kernel_times``.
    """
    if options.cost_model == "measured":
        _check_is_at_hand(options.device_spec, spec, device_type)
    elif options.cost_model != "analytic":
        _check_goes_with(_exported(options.cost_model), options, spec, device_type)


def export_cost_table(path: str | os.PathLike[str], device_type: str | None = None) -> int:
    """Write what has been measured on the device at hand to ``path``, for ``cost_model=path``; how many times it holds.

    Args:
        path: a file whose name ends in ``.json``; it is replaced.
        device_type: ``"cpu"`` or ``"cuda"``; ``None`` is the GPU where there is one.

    Raises:
        ConfigError: nothing has been measured on that device yet, or the file cannot be written.
    """
    target = Path(path)
    if target.suffix != ".json":
        raise ConfigError(f"A cost table cannot be written to {str(target)!r}: give a file whose name ends in .json.")
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    cache_file = _cache_file(default_cache_dir(os.environ), kind)
    table = _cached(cache_file)
    if table is None:
        raise ConfigError(
            f"Nothing has been measured on {hardware(kind)} yet: compile a training step with"
            " options={'cost_model': 'measured'} first."
        )
    try:
        write_atomically(target, table.to_json())
    except OSError as error:
        raise ConfigError(f"The cost table cannot be written to {str(target)!r} ({error.strerror or error}).") from None
    return len(table.times_us)


def hardware(device_type: str) -> str:
    """The device at hand, as it calls itself, with all that makes its kernels run at another speed."""
    precision = _float32_precision(device_type)
    is_default = precision == _DEFAULT_PRECISION[device_type]
    suffix = "" if is_default else f", float32 as {precision[0]} in products and {precision[1]} in convolutions"
    if device_type == "cuda":
        return torch.cuda.get_device_name() + suffix
    num_threads = torch.get_num_threads()
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return f"{cpu_model()}, {threads}, {torch.backends.cpu.get_cpu_capability()}{suffix}"


# What torch sets by itself: cuDNN's convolutions take TF32, nothing else does.
_DEFAULT_PRECISION = {"cpu": ("ieee", "ieee"), "cuda": ("ieee", "tf32")}


def _float32_precision(device_type: str) -> tuple[str, str]:
    """What float32 products and convolutions may be rounded to.

    Asked of each library: ``torch.get_float32_matmul_precision`` raises where the user has set ``fp32_precision``, as
    torch recommends, and knows nothing of convolutions.
    """
    backends: Any = torch.backends
    if device_type == "cuda":
        set_to = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
    else:
        set_to = (backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision)
    products, convolutions = ("ieee" if precision == "none" else str(precision) for precision in set_to)
    return products, convolutions


def _note(table: CostTable, num_kernels: int, cost_model: str) -> str:
    """One line: how many kernels are priced as measured, and why the others are not."""
    reasons = Counter(table.untimed.values())
    unknown = num_kernels - len(table.times_us) - len(table.untimed)
    if unknown:
        reasons["disturbed by other work" if cost_model == "measured" else "not in the table"] += unknown
    text = f"{len(table.times_us)} of {num_kernels} kernels are priced as measured on {table.device}"
    if not reasons:
        return text
    return f"{text}; the others are analytic: " + ", ".join(f"{reasons[why]} {why}" for why in sorted(reasons))


# -- which table goes with which device


def _check_is_at_hand(named: str | None, spec: DeviceSpec, device_type: str) -> None:
    at_hand = GPU_NAMES.get(torch.cuda.get_device_name()) if device_type == "cuda" else "cpu"
    other_gpu = spec.name in BUILT_IN and spec.name != at_hand
    if spec.kind == device_type and not other_gpu:
        return
    raise ConfigError(
        f"Option cost_model is 'measured', which times kernels on the device at hand ({hardware(device_type)}), and"
        f" device_spec is {named!r}: the two do not go together. Leave device_spec out, or measure on that device,"
        " export the table with remat_compiler.export_cost_table and give its path as cost_model."
    )


def _check_goes_with(table: CostTable, options: Options, spec: DeviceSpec, device_type: str) -> None:
    origin = options.cost_model
    if _release(table.torch_version) != _release(torch.__version__):
        raise ConfigError(
            f"Option cost_model is {origin!r}: that table was measured with torch {table.torch_version}, and this is"
            f" torch {torch.__version__}. Other versions run other kernels: export the table again with this one, or"
            " set cost_model to 'analytic' or 'measured'."
        )
    if options.device_spec is not None and table.spec != spec.name:
        raise ConfigError(
            f"Option cost_model is {origin!r}: that table was measured on {table.device} (device spec {table.spec!r}),"
            f" and device_spec is {options.device_spec!r} ({spec.name!r}). Set device_spec to {table.spec!r}, or take a"
            f" table that was measured on {spec.name!r}."
        )
    if options.device_spec is None and table.device != hardware(device_type):
        raise ConfigError(
            f"Option cost_model is {origin!r}: that table was measured on {table.device}, and the device at hand is"
            f" {hardware(device_type)}. To plan for the other device, set device_spec to {table.spec!r} as well; to"
            " plan for this one, set cost_model to 'measured' or 'analytic'."
        )


def _release(torch_version: str) -> str:
    """``2.13.0`` of ``2.13.0+cu126``: a table of a GPU is read by CPU builds as well."""
    return torch_version.partition("+")[0]


def _exported(path: str) -> CostTable:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ConfigError(
            f"Option cost_model is {path!r}: the table cannot be read ({reason})."
            " remat_compiler.export_cost_table writes one."
        ) from None
    return table_from_json(text, path)


# -- the cache

_UNSAVED: dict[Path, CostTable] = {}  # tables whose file could not be written: all graphs of a process see one table


def _measured(joint: JointGraph, wanted: Mapping[str, list[Value]], spec: DeviceSpec, cache_dir: Path) -> CostTable:
    """The cached table, with what it lacks of ``wanted`` timed now and kept."""
    path = _cache_file(cache_dir, joint.device_type)
    empty = CostTable(hardware(joint.device_type), spec.name, torch.__version__)
    table = _cached(path, warn=True) or empty
    missing = {key: values for key, values in wanted.items() if key not in table}
    if not missing:
        return table
    times_us, untimed = measure_kernels(joint, missing, spec)
    num_disturbed = len(missing) - len(times_us) - len(untimed)
    if num_disturbed:
        warnings.warn(
            f"{num_disturbed} of {len(wanted)} kernels could not be timed, because other work keeps the processor busy:"
            " their costs are analytic in this plan. The next compile times them again, and its plan may differ.",
            stacklevel=4,
        )
    # What another process kept meanwhile wins: the ranks of a job should agree.
    meanwhile = _cached(path) or empty
    merged = {**untimed, **meanwhile.untimed}
    table = empty.with_entries(
        {key: us for key, us in {**times_us, **meanwhile.times_us}.items() if key not in meanwhile.untimed},
        {key: why for key, why in merged.items() if key not in meanwhile.times_us},
    )
    _keep(table, path)
    return table


def _cache_file(cache_dir: Path, device_type: str) -> Path:
    identity = f"{hardware(device_type)}|{torch.__version__}|{METHOD}"
    return cache_dir / "costs" / f"{device_type}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _cached(path: Path, warn: bool = False) -> CostTable | None:
    if path in _UNSAVED:  # holds what the file holds and more
        return _UNSAVED[path]
    try:
        return table_from_json(path.read_text(encoding="utf-8"), str(path))
    except OSError:
        return None
    except (UnicodeDecodeError, ConfigError):
        if warn:
            warnings.warn(f"The kernel times kept in {path} are damaged: they are measured again.", stacklevel=4)
        return None


def _keep(table: CostTable, path: Path) -> None:
    try:
        write_atomically(path, table.to_json())
    except OSError as error:
        if path not in _UNSAVED:
            warnings.warn(
                f"The measured kernel times cannot be kept in {path} ({error.strerror or error}): they are measured"
                " again in each process, and plans may differ. Set XDG_CACHE_HOME to a folder that can be written.",
                stacklevel=4,
            )
        _UNSAVED[path] = table
    else:
        _UNSAVED.pop(path, None)


# -- measuring


def measure_kernels(
    joint: JointGraph, wanted: Mapping[str, list[Value]], spec: DeviceSpec
) -> tuple[dict[str, float], dict[str, str]]:
    """Time kernels now: microseconds by key, and for each that is not to be timed the reason.

    A kernel that other work disturbed in all rounds is in neither.
    """
    times_us: dict[str, float] = {}
    untimed: dict[str, str] = {}
    deadline_s = time.perf_counter() + TOTAL_LIMIT_S
    left = _by_share(joint, wanted, spec)
    for _ in range(ROUNDS):
        for key in left:
            late = time.perf_counter() > deadline_s
            node = joint.nodes[wanted[key][0].index]
            why_not = _too_much(len(times_us), late) or _why_not(node, joint.device_type)
            try:
                with _current_device(node):
                    us = None if why_not else time_kernel(node, joint.device_type)
            except Exception as error:  # whatever a kernel says to operands that are made up
                us, why_not = None, f"failed on made-up operands ({type(error).__name__} of {op_name(node)})"
            if us is not None:
                times_us[key] = _rounded(us)
            elif why_not is not None:
                untimed[key] = why_not
        left = [key for key in left if key not in times_us and key not in untimed]
    return times_us, untimed


def _too_much(num_timed: int, late: bool) -> str | None:
    if num_timed >= MAX_KERNELS:
        return f"beyond the {MAX_KERNELS} that take longest"
    return f"beyond the {TOTAL_LIMIT_S:g} s that measuring may take" if late else None


def time_kernel(node: fx.Node, device_type: str) -> float | None:
    """Microseconds of the op on real tensors made from its fake ones: the fastest of several runs.

    ``None`` when other work disturbed every run.

    Raises:
        Exception: whatever the op raises.
    """
    # The compile that asks has fake tensors, and may have autograd or autocast on.
    with outside_of_tracing(), torch.no_grad(), torch.autocast(device_type, enabled=False):
        args, kwargs = _real_arguments(node)

        def run() -> object:
            return node.target(*args, **kwargs)  # type: ignore[operator]

        return _fastest_us(run, _cuda_us if device_type == "cuda" else _cpu_us)


def _current_device(node: fx.Node) -> contextlib.AbstractContextManager[object]:
    """The GPU of the op as the current one: an event of another GPU does not wait for the op."""
    devices = [tensor.device for tensor in _tensors([node]) if tensor.device.type == "cuda"]
    return torch.cuda.device(devices[0]) if devices else contextlib.nullcontext()


def _by_share(joint: JointGraph, wanted: Mapping[str, list[Value]], spec: DeviceSpec) -> list[str]:
    """The kernels in falling order of what they take of a step by the analytic model."""

    def share_us(key: str) -> float:
        return len(wanted[key]) * float(op_time_us(joint, wanted[key][0], spec, traced_sizes))

    return sorted(wanted, key=lambda key: (-share_us(key), key))


def _why_not(node: fx.Node, device_type: str) -> str | None:
    """Why a kernel is not timed, as the plan's note says it behind a number; ``None`` for one that can be."""
    if not is_builtin(node) or is_collective(node):
        return "custom or collective, whose effects are not known"
    if draws_from_generator(node):
        return "random, which would move the generator"
    if not _integers_can_be_made_up(node):
        return "with integers whose meaning is not known"
    num_bytes, cap_bytes = _bytes_of_call(node), _cap_bytes(device_type)
    return None if num_bytes <= cap_bytes else "too large for the memory that measuring may take"


def _integers_can_be_made_up(node: fx.Node) -> bool:
    name = op_name(node)
    if name in _INDEXED_BY_POSITION:  # a mask stands for as many axes as it has, and for an unknown number of indices
        return not any(tensor.dtype is torch.bool for tensor in _tensors(filter(None, node.args[1])))  # type: ignore
    seeds = _seeds(node)
    operands = [operand for operand in node.all_input_nodes if operand not in seeds]
    integers = any(_is_integer(tensor) for tensor in _tensors(operands))
    return not integers or name in _ANY_INTEGER or name in _INDEXED_BY_AXIS or name == "embedding_dense_backward"


def _seeds(node: fx.Node) -> list[Any]:
    """The operands that a dropout's mask is drawn from; attention takes them without dropout as well."""
    arguments = schema_of(node).arguments  # type: ignore[union-attr]
    return [given for argument, given in zip(arguments, node.args, strict=False) if argument.name.startswith("philox_")]


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool)


def _tensors(nodes: Any) -> list[torch.Tensor]:
    """The fake tensors of nodes, those of ops with several outputs one by one."""
    leaves: list[Any] = []
    for node in nodes:
        meta = node.meta.get("val")
        leaves.extend(meta if isinstance(meta, (list, tuple)) else [meta])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _bytes_of_call(node: fx.Node) -> int:
    return sum(_num_elements(tensor) * tensor.dtype.itemsize for tensor in _tensors([*node.all_input_nodes, node]))


def _num_elements(tensor: torch.Tensor) -> int:
    """Of the storage that shows the tensor: gaps count, expanded axes do not."""
    sizes = [dimension_hint(size) for size in tensor.shape]
    if 0 in sizes:
        return 0
    return 1 + sum((int(size) - 1) * stride for size, stride in zip(sizes, strides_of(tensor), strict=True))


def _cap_bytes(device_type: str) -> int:
    if device_type != "cuda":
        return CPU_CAP_BYTES
    free, _total = torch.cuda.mem_get_info()
    return (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) // CUDA_SHARE


# -- operands


def _real_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bounds = _index_bounds(node)
    made: dict[fx.Node, Any] = {}
    for operand in node.all_input_nodes:
        meta = operand.meta["val"]
        if isinstance(meta, torch.Tensor):
            made[operand] = _made_up(meta, bounds.get(operand, 1))
        else:
            made[operand] = dimension_hint(meta)
    args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
    return tuple(args), dict(kwargs)


def _index_bounds(node: fx.Node) -> dict[fx.Node, int]:
    """How many values each operand that indexes an axis may take."""
    name, args = op_name(node), node.args
    if name in _INDEXED_BY_AXIS:
        source: Any = args[0]
        axis: Any = args[1]
        return {args[2]: dimension_hint(source.meta["val"].shape[axis])}  # type: ignore[dict-item]
    if name in _INDEXED_BY_POSITION:
        source, indices = args[0], args[1]
        shape = source.meta["val"].shape
        return {index: dimension_hint(shape[axis]) for axis, index in enumerate(indices) if index is not None}  # type: ignore
    if name == "embedding_dense_backward":
        return {args[1]: dimension_hint(args[2])}  # type: ignore[dict-item]
    return {}


def _made_up(fake: torch.Tensor, num_indices: int) -> torch.Tensor:
    """A tensor of the fake one's sizes, strides and dtype: numbers in [-1, 1), or indices below ``num_indices``.

    The numbers are random, because sorting and a GPU's clock depend on them, and from a generator of their own. Indices
    go round through all values: one for all would make every thread of a scatter wait for the others.
    """
    num_elements, device = _num_elements(fake), fake.device
    if _is_integer(fake):
        flat = torch.arange(num_elements, dtype=torch.int64, device=device).remainder_(max(num_indices, 1))
    else:
        generator = torch.Generator(device=device).manual_seed(0)
        pattern = torch.rand(PATTERN_ELEMENTS, generator=generator, device=device, dtype=torch.float32).mul_(2).sub_(1)
        pattern = pattern > 0 if fake.dtype is torch.bool else pattern.to(fake.dtype)
        flat = pattern.repeat(math.ceil(num_elements / PATTERN_ELEMENTS))[:num_elements]
    sizes = [dimension_hint(size) for size in fake.shape]
    return flat.to(fake.dtype).as_strided(sizes, strides_of(fake))


# -- clocks


def _fastest_us(run: Callable[[], object], clock: Callable[[Callable[[], object]], float | None]) -> float | None:
    """The fastest run that was not disturbed, after one to warm up: see ``AGREEING_RUNS``."""
    run()
    times_us: list[float] = []  # in ascending order
    deadline_s = time.perf_counter() + LIMIT_US / 1e6
    while True:
        us = clock(run)
        if us is not None:
            bisect.insort(times_us, us)
        if len(times_us) > AGREEING_RUNS and times_us[AGREEING_RUNS] <= times_us[0] * AGREEMENT:
            break
        if time.perf_counter() > deadline_s:
            break
    return times_us[0] if times_us else None


def _cpu_us(run: Callable[[], object]) -> float | None:
    """One run; ``None`` when other work disturbed it."""
    timing = timed(run)
    return None if timing.is_disturbed else timing.us


def _cuda_us(run: Callable[[], object]) -> float:
    """One run's share of as many as fill ``CUDA_SAMPLE_US``."""
    num_runs = math.ceil(CUDA_SAMPLE_US / max(_between_events_us(run, 1), 1.0))
    num_runs = min(num_runs, CUDA_MAX_RUNS)
    return _between_events_us(run, num_runs) / num_runs


def _between_events_us(run: Callable[[], object], num_runs: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_runs):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _rounded(us: float) -> float:
    """``us`` to ``SIGNIFICANT_DIGITS``; never 0, whatever the clock does."""
    us = max(us, 1e-3)
    return float(round(us, SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(us))))
