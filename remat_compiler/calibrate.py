"""The CPU's device spec, measured once and kept.

CPUs have no data sheet that a projection could start from: what one reaches depends on its threads, on its memory and
on the vector instructions that torch uses. So it is measured, for under three seconds, and the figures are rounded and
kept in a file: measured again for each graph, noise would change plans from run to run.

Other work on the machine is the enemy. A parallel run beside a busy process waits for its slowest thread and shows a
fiftieth of the true rate (seen here), so every run is short, there are many, spread over rounds, and the fastest of
those in which no thread had to wait for a core counts. Where there was no such run, the figures are for this process
only: what is kept must be true.
"""

from __future__ import annotations

import bisect
import contextlib
import glob
import hashlib
import itertools
import math
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from remat_passes.device import DTYPES, GENERIC_CPU, DeviceSpec, spec_from_json
from remat_passes.errors import ConfigError

from .torch_private import outside_of_tracing

METHOD = 3  # part of a cache file's name: raise it whenever what is measured changes

# ATen stays on one thread below this many elements (at::internal::GRAIN_SIZE), and the pointwise measurements below it:
# on all threads a run this short would be the start of a parallel region and little else.
GRAIN_ELEMENTS = 2**15

STREAM_BYTES = 64 * 2**20  # of one array: with the other two, beyond the last-level cache that a process gets mostly
STREAM_SLICE_ELEMENTS = (2**21, GRAIN_ELEMENTS - 1)  # of one run: on all threads, and on one, which waits for no other

GEMM_INNER, GEMM_COLUMNS = 512, 512  # a small model's linear layer
GEMM_MIN_ROWS, GEMM_MAX_ROWS = 64, 2048  # a dtype without instructions of its own is too slow for more than the fewest
GEMM_RUN_US = 500.0  # rows are added until a run takes this long: enough to keep many threads busy, still short

# A launch is what a product this small takes beyond its arithmetic: the call, a result to allocate, a view of an
# operand, and with several threads the start and the end of a parallel region, which is most of it. The loops that
# Inductor compiles pay the same (4 to 6 us on two Zen 5 cores, 2 on one).
LAUNCH_ROWS, LAUNCH_EXTENT = 16, 64

# Images, channels in and out, rows and columns of a 3x3 convolution inside a small network, and of one with next to no
# work: its launch. oneDNN looks a kernel up and packs the weight for it in each call (25 us on one Zen 5 core, where a
# product takes 2), and uses vector instructions that MKL does not on an AMD (270 flops/ns to 116). For a single small
# image ATen goes around oneDNN.
CONVOLUTION = (4, 32, 32)
SMALL_CONVOLUTION = (2, 4, 4)
WINDOW = 3

# A fastest time that AGREEING_RUNS others come near to is believed, else the limit ends the search. On a busy machine
# every measurement uses its limit up, and rounds end early so that all stays under three seconds.
AGREEING_RUNS = 10
AGREEMENT = 1.05
LIMIT_US = 60_000.0
WAITED_SHARE = 0.05  # of a run's time, what a thread may have waited for a core: runs on an idle machine wait for 0
ROUNDS = 3
ROUNDS_LIMIT_S = 1.5

POINTWISE_ELEMENTS = 2**14  # two inputs and an output are 192 KiB, inside a second-level cache

# Huber loss without reduction, in ATen's BinaryOpsKernel.cpp: subtract, absolute value, two multiplies on the one
# branch, a subtract and a multiply on the other, compare, select. It stands for a fused kernel because its intermediate
# results stay in registers: a lone multiply spends its time on loads and stores (on two Zen 5 cores 20 flops/ns, this
# 240, a chain of 32 operations compiled by Inductor 185).
HUBER_FLOPS = 8

# Softplus is an exp and a log1p of SLEEF's, which compiled code calls as well, while ``torch.erf`` takes MKL's. On one
# Zen 5 core half of it takes 0.53 ns; in kernels compiled by Inductor exp takes 0.19, erf 0.42 and tanh 1.02: 0.54.
SOFTPLUS_TRANSCENDENTALS = 2

# One thread, one number. Not measured here, because only compiled code draws from Philox: ``torch.compile`` of
# ``torch.rand_like`` on 2**17 to 2**20 elements took 7.2 to 7.6 ns on an AMD EPYC (Zen 5), torch 2.13.0. Inductor's C++
# calls the generator for one number at a time, so vector instructions do not help and the clock is what counts.
RANDOM_US = 7.4e-3

SIGNIFICANT_DIGITS = 2  # best-of-several repeats within a few percent


def cpu_spec(cache_dir: Path) -> DeviceSpec:
    """This machine's CPU with ``torch.get_num_threads()`` threads, from ``cache_dir`` or measured.

    A cache file that is damaged is measured again. Where none can be written, and where other work disturbed all runs
    of a measurement, the spec is kept for this process.
    """
    path = cache_dir / "device" / f"cpu-{_machine_hash()}.json"
    spec = _cached(path)
    if spec is not None:
        return spec
    try:
        spec, is_disturbed = measure_cpu()
    except RuntimeError as error:
        warnings.warn(f"The CPU cannot be measured ({error}): remat plans with generic figures.", stacklevel=2)
        return GENERIC_CPU
    meanwhile = _cached(path)
    if meanwhile is not None:  # from another process: the ranks of a job should agree
        return meanwhile
    if not is_disturbed:
        return _kept(spec, path)
    _UNSAVED[path] = spec
    warnings.warn(
        "The CPU could not be measured well, because other work keeps it busy: the figures are for this process only."
        " The next one measures again, and its plans may differ.",
        stacklevel=2,
    )
    return spec


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/remat``, or ``~/.cache/remat`` (XDG Base Directory Specification)."""
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification: a relative path is invalid and to be ignored
        return Path(base) / "remat"
    home = environ.get("HOME", "") or os.path.expanduser("~")
    return Path(home) / ".cache" / "remat"


def measure_cpu() -> tuple[DeviceSpec, bool]:
    """Measure the CPU now; the spec, and whether other work disturbed all runs of a measurement.

    Raises:
        RuntimeError: torch does not run plain CPU tensors here.
    """
    num_threads = torch.get_num_threads()
    # The compile that asks may have fake tensors, autograd or autocast on. A thread of its own would have none of them,
    # but once the main thread has run in parallel, matmuls in another one were seen to stay on one core.
    with outside_of_tracing(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        product, huber, softplus = _small_product(), _per_element(_huber), _per_element(_softplus)
        convolution = _convolution(*SMALL_CONVOLUTION)
        units = _parallel_units(convolution.us)
    thread_flops_per_us = HUBER_FLOPS / huber.us
    transcendental_us = softplus.us / SOFTPLUS_TRANSCENDENTALS
    rates = {name: 1 / unit.us for name, unit in units.items()}
    pointwise_flops_per_us = thread_flops_per_us * num_threads
    # A multiply-add is two operations and one instruction, so a matmul below this was disturbed by other work.
    rates["float32"] = max(rates["float32"], pointwise_flops_per_us)
    rates["float64"] = max(rates["float64"], pointwise_flops_per_us / 2)
    arithmetic_us = 2 * LAUNCH_ROWS * LAUNCH_EXTENT**2 / rates["float32"]
    launch_us = max(product.us - arithmetic_us, product.us / 10)  # never 0, whatever the clock does
    spec = DeviceSpec(
        name="cpu",
        kind="cpu",
        memory_bytes=_memory_bytes(),
        bandwidth_bytes_per_us=_rounded(rates["stream"]),
        matmul_flops_per_us={dtype: _rounded(rates[dtype]) for dtype in DTYPES},
        pointwise_flops_per_us=_rounded(pointwise_flops_per_us),
        transcendental_flops=_rounded(transcendental_us * thread_flops_per_us),
        random_flops=_rounded(RANDOM_US * thread_flops_per_us),
        launch_us=_rounded(launch_us),
        convolution_flops_per_us=_rounded(rates["convolution"]),
        convolution_launch_us=_rounded(convolution.us),
        source=f"measured by remat_compiler.calibrate on {cpu_model()}, {num_threads} threads, {_torch_version()}",
    )
    return spec, any(time.is_disturbed for time in (product, huber, softplus, convolution, *units.values()))


# Measurements.


@dataclass(frozen=True, slots=True, order=True)
class Timing:
    """How long a run took. What no other work disturbed is the better time, however long it is."""

    is_disturbed: bool  # a thread had to wait for a core meanwhile
    us: float

    def each_of(self, number: int) -> Timing:
        """The share of one of so many equal parts."""
        return Timing(self.is_disturbed, self.us / number)


def timed(run: Callable[[], object]) -> Timing:
    """One run on CPU."""
    waited_ns, start_ns = _waited_ns(), time.perf_counter_ns()
    run()
    elapsed_ns = time.perf_counter_ns() - start_ns
    return Timing(_waited_ns() - waited_ns > elapsed_ns * WAITED_SHARE, elapsed_ns / 1e3)


def _waited_ns() -> int:
    """How long the threads of this process were ready to run and had no core; 0 where the system does not count it.

    The second field of ``schedstat`` (Linux, Documentation/scheduler/sched-stats.rst).
    """
    waited_ns = 0
    for path in glob.iglob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError), open(path, encoding="ascii") as file:
            waited_ns += int(file.read().split()[1])
    return waited_ns


def _best(run: Callable[[], object], limit_us: float = LIMIT_US) -> Timing:
    """The best run, after one to warm up: see ``AGREEING_RUNS``."""
    run()
    runs: list[Timing] = []  # the best first
    deadline_s = time.perf_counter() + limit_us / 1e6
    while len(runs) < 2 or time.perf_counter() < deadline_s:
        bisect.insort(runs, timed(run))
        if len(runs) > AGREEING_RUNS and runs[AGREEING_RUNS] <= Timing(False, runs[0].us * AGREEMENT):
            break
    return runs[0]


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Plain data: random numbers would move the user's generator."""
    return torch.ones(shape, dtype=dtype, device="cpu")


def _parallel_units(convolution_launch_us: float) -> dict[str, Timing]:
    """A byte ("stream"), a flop of a product (by dtype name) and one of a convolution, of all threads: of each the best
    of all rounds."""
    arrays = [_ones(STREAM_BYTES // 4) for _ in range(3)]
    found: dict[str, list[Timing]] = {name: [] for name in ("stream", *DTYPES, "convolution")}
    start_s = time.perf_counter()
    for done in range(ROUNDS):
        if done and time.perf_counter() - start_s > ROUNDS_LIMIT_S:
            break
        found["stream"].extend(_stream_bytes(arrays))
        byte_us = min(found["stream"]).us
        for dtype in DTYPES:
            found[dtype].append(_gemm_flop(getattr(torch, dtype), byte_us))
        found["convolution"].append(_convolution_flop(convolution_launch_us, byte_us))
    return {name: min(timings) for name, timings in found.items()}


def _stream_bytes(arrays: Sequence[torch.Tensor]) -> Iterable[Timing]:
    """Of an addition, which reads two arrays and writes one, slice by slice so that no run finds its cache warm."""
    for num_elements in STREAM_SLICE_ELEMENTS:
        slices = itertools.cycle(zip(*(array.split(num_elements)[:-1] for array in arrays), strict=True))

        def run(slices: Iterator[tuple[torch.Tensor, ...]] = slices) -> None:
            left, right, out = next(slices)
            torch.add(left, right, out=out)

        yield _best(run).each_of(3 * 4 * num_elements)


def _gemm_flop(dtype: torch.dtype, byte_us: float) -> Timing:
    """Of a product, without its traffic: the two follow one another (``DeviceSpec.overlaps``)."""
    weight = _ones(GEMM_INNER, GEMM_COLUMNS, dtype=dtype)

    def best(rows: int, limit_us: float) -> Timing:
        return _best(partial(torch.mm, _ones(rows, GEMM_INNER, dtype=dtype), weight), limit_us)

    rows = GEMM_MIN_ROWS
    while rows < GEMM_MAX_ROWS and best(rows, LIMIT_US / 20).us < GEMM_RUN_US:
        rows *= 2
    num_elements = rows * GEMM_INNER + GEMM_INNER * GEMM_COLUMNS + rows * GEMM_COLUMNS
    arithmetic = _without(best(rows, LIMIT_US), num_elements * dtype.itemsize * byte_us)
    return arithmetic.each_of(2 * rows * GEMM_INNER * GEMM_COLUMNS)


def _convolution_flop(launch_us: float, byte_us: float) -> Timing:
    """Of a convolution, without its launch and its traffic."""
    images, channels, extent = CONVOLUTION
    num_elements = 2 * images * channels * extent**2 + (channels * WINDOW) ** 2
    arithmetic = _without(_convolution(*CONVOLUTION), launch_us + num_elements * 4 * byte_us)
    return arithmetic.each_of(2 * images * (channels * extent * WINDOW) ** 2)


def _without(timing: Timing, other_us: float) -> Timing:
    """What is left of a run that ``other_us`` is a small part of, whatever the clock says."""
    return Timing(timing.is_disturbed, max(timing.us - other_us, timing.us / 2))


def _convolution(images: int, channels: int, extent: int) -> Timing:
    layout = {"memory_format": torch.channels_last}
    batch = _ones(images, channels, extent, extent).contiguous(**layout)
    weight = _ones(channels, channels, WINDOW, WINDOW).contiguous(**layout)
    return _best(lambda: torch.conv2d(batch, weight, padding=WINDOW // 2))


def _small_product() -> Timing:
    rows, weight = _ones(LAUNCH_ROWS, LAUNCH_EXTENT), _ones(LAUNCH_EXTENT, LAUNCH_EXTENT)
    return _best(lambda: torch.mm(rows, weight.t()))


def _per_element(kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> Timing:
    """Of one thread, without what a launch takes."""
    long, short = (
        _best(partial(kernel, *(_ones(num_elements) for _ in range(3)))) for num_elements in (POINTWISE_ELEMENTS, 1)
    )
    us = max(long.us - short.us, long.us / 10)  # never 0, whatever the clock does
    return Timing(long.is_disturbed or short.is_disturbed, us).each_of(POINTWISE_ELEMENTS)


def _huber(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> object:
    return torch.ops.aten.huber_loss.out(left, right, 0, 1.0, out=out)


def _softplus(left: torch.Tensor, _: torch.Tensor, out: torch.Tensor) -> object:
    return torch.ops.aten.softplus.out(left, out=out)


def _rounded(figure: float) -> float:
    """``figure`` to ``SIGNIFICANT_DIGITS``."""
    digits = SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(figure))
    return float(round(figure, digits))


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX
        return GENERIC_CPU.memory_bytes


# The cache.

_UNSAVED: dict[Path, DeviceSpec] = {}  # specs that have no file: all graphs of a process see one device


def _cached(path: Path) -> DeviceSpec | None:
    if path in _UNSAVED:
        return _UNSAVED[path]
    try:
        return spec_from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None


def _kept(spec: DeviceSpec, path: Path) -> DeviceSpec:
    """``spec``, written to ``path``."""
    try:
        write_atomically(path, spec.to_json())
    except OSError as error:
        _UNSAVED[path] = spec
        warnings.warn(
            f"The CPU's measured figures cannot be kept in {path} ({error.strerror or error}):"
            " they are measured again in each process. Set XDG_CACHE_HOME to a folder that can be written.",
            stacklevel=3,
        )
    return spec


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _machine_hash() -> str:
    """Whatever moves the figures: another CPU, thread count, instruction set, torch, or way of measuring."""
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    identity = f"{cpu_model()}|{threads}|{capability}|{_torch_version()}|{METHOD}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
