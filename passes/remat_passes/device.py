"""DeviceSpec: the few figures of a device that the roofline needs.

A spec holds what can be *reached*, not what the data sheet promises: data sheets count sparse tensor operations, fused
multiply-adds and an empty memory bus, and a projection made from them is several times too fast. Peak rates are
multiplied by the fractions below, so that a projected time is comparable with a measured one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from .errors import ConfigError, nearest
from .json_object import json_object, positive_number

DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the analytic cost model needs to know of one device.

    Rates are in bytes or operations per microsecond (1e6 of them a second; 1 GB/s is 1_000 bytes/us, 1 TFLOPS is
    1_000_000 flops/us). A matmul's multiply-add counts as two operations, a pointwise instruction as one.
    """

    name: str
    kind: str  # "cpu" or "cuda"
    memory_bytes: int
    bandwidth_bytes_per_us: float  # reachable by a long streaming kernel, bytes read plus bytes written
    matmul_flops_per_us: Mapping[str, float]  # by dtype name (``DTYPES``), reachable by a large GEMM
    pointwise_flops_per_us: float  # fp32 arithmetic of a fused pointwise kernel
    transcendental_flops: float  # pointwise flops that one exp, erf or tanh costs in a fused kernel
    random_flops: float  # pointwise flops that one Philox random number costs in a fused kernel
    launch_us: float  # one kernel, from launch to launch
    convolution_flops_per_us: float  # fp32, reachable by a large convolution; other dtypes are taken for a matmul's
    convolution_launch_us: float  # one pass of a convolution, which a library may look up, lay out and pack for
    source: str  # where the figures come from

    @property
    def overlaps(self) -> bool:
        """Whether a kernel's traffic hides behind its arithmetic.

        On a GPU other warps compute while some wait. A CPU's BLAS copies its operands into packed panels before it
        computes on them (Goto, van de Geijn: Anatomy of High-Performance Matrix Multiplication, TOMS 34(3), 2008), and
        what a core moves through its caches it does not compute with meanwhile (the ECM model: Stengel, Treibig,
        Hager, Wellein, ICS 2015). So the rate of a small product rises with its rows m as r / (1 + n_half / m), which
        is Hockney's law, and n_half follows from rate and bandwidth (docs/cost-model.md has the measurements).
        """
        return self.kind != "cpu"

    def to_json(self) -> str:
        """The spec file's text: keys sorted, one trailing newline."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["matmul_flops_per_us"] = dict(self.matmul_flops_per_us)
        return json.dumps(record, sort_keys=True, indent=1) + "\n"


# What a kernel reaches of the data sheet's figures.

# Streaming kernels measured 0.84 (H100 NVL, BabelStream triad, 3.3 of 3.94 TB/s), 0.88 (A100 40 GB, triad) and 0.93
# (L40, triad; both in te42kyfo/gpu-benches, gpu-stream) and 0.91 (RTX 4090, copy, xytpai/nvbench): the lower end.
BANDWIDTH_FRACTION = 0.85

# The best shapes of a bf16 matmul reach 0.87 (A100 SXM) and 0.80 (H100 SXM, "H200 is the same") in the table of
# stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS". A model's own shapes are not the best
# ones, so this is lower: assumed.
MATMUL_FRACTION = 0.7

# Data sheets count a fused multiply-add as two operations. Pointwise code is adds, multiplies, comparisons and selects:
# one operation an instruction.
POINTWISE_FRACTION = 0.5

# cuLaunchKernel of an empty kernel on a GB200, meta-pytorch/tritonbench pull request 1017. Inductor's wrapper takes
# 6.8 us of the host's time there, but the host runs ahead of the device.
GPU_LAUNCH_US = 3.0

# Counted, not measured. exp is one special-function instruction (16 lanes an SM beside 128 for fp32, so 8 pointwise
# flops) and a multiply; erf and tanh of CUDA's libdevice are a polynomial, one or two such instructions and selects: 20
# to 30 in all.
GPU_TRANSCENDENTAL_FLOPS = 20.0

# Counted, not measured. Philox4x32-10 (Salmon et al., SC11): ten rounds of two wide multiplies (two instructions each),
# two three-input exclusive-ors and two additions, then five to make a float of the result; Triton's ``tl.rand`` keeps
# one of the four words.
PHILOX_INTEGER_INSTRUCTIONS = 10 * (2 * 2 + 2 + 2) + 5


@dataclass(frozen=True, slots=True)
class _DataSheet:
    """A GPU as its vendor describes it: dense rates with fp32 accumulation, multiply-add counted as two."""

    name: str
    memory_gib: int
    bandwidth_gb_per_s: float
    fp32_tflops: float  # without tensor cores
    fp64_matmul_tflops: float  # with tensor cores where they do fp64
    half_matmul_tflops: float  # fp16 and bf16 tensor cores
    fp32_lanes_per_integer_lane: int  # CUDA programming guide: 64 integer lanes an SM, 64 (8.0) or 128 for fp32
    source: str


_DATA_SHEETS = (
    # "NVIDIA A100 Tensor Core GPU" data sheet, 80GB SXM: 2,039 GB/s, FP32 19.5, FP64 tensor 19.5, BF16 and FP16 tensor
    # 312 (624 with sparsity). The PCIe card has 1,935 GB/s and the same rates.
    _DataSheet("a100-80g", 80, 2039, 19.5, 19.5, 312, 1, "NVIDIA A100 80GB SXM data sheet"),
    # "NVIDIA H100 Tensor Core GPU" data sheet, SXM: 3.35 TB/s, FP32 67, FP64 tensor 67, BF16 and FP16 tensor 1,979 with
    # sparsity, which doubles it.
    _DataSheet("h100", 80, 3350, 67, 67, 1979 / 2, 2, "NVIDIA H100 SXM data sheet"),
    # "NVIDIA H200 Tensor Core GPU" data sheet, SXM: the H100's rates, 141 GB at 4.8 TB/s.
    _DataSheet("h200", 141, 4800, 67, 67, 1979 / 2, 2, "NVIDIA H200 SXM data sheet"),
    # "NVIDIA Ada GPU Architecture" white paper, appendix A, RTX 4090: 1,008 GB/s, FP32 82.6, FP16 and BF16 tensor with
    # FP32 accumulate 165.2 (330.4 with sparsity; 330.3 dense with FP16 accumulate), FP64 1/64 of FP32.
    _DataSheet("rtx4090", 24, 1008, 82.6, 82.6 / 64, 165.2, 2, "NVIDIA Ada GPU architecture white paper, appendix A"),
    # "NVIDIA Ampere GA102 GPU Architecture" white paper, appendix A, RTX 3090: 936 GB/s, FP32 35.6, FP16 and BF16
    # tensor with FP32 accumulate 71 (142 with sparsity), FP64 1/64 of FP32.
    _DataSheet("rtx3090", 24, 936, 35.6, 35.6 / 64, 71, 2, "NVIDIA GA102 GPU architecture white paper, appendix A"),
    # "NVIDIA L40S" data sheet: 864 GB/s, FP32 91.6, BF16 and FP16 tensor 362 (733 with sparsity). FP64 is not in it:
    # 1/64 of FP32 as in the RTX 4090, which is the same chip (AD102).
    _DataSheet("l40s", 48, 864, 91.6, 91.6 / 64, 362, 2, "NVIDIA L40S data sheet"),
)


def _reachable(sheet: _DataSheet) -> DeviceSpec:
    """``sheet`` with what kernels reach of it.

    fp32 is the rate without TF32: torch leaves ``torch.backends.cuda.matmul.allow_tf32`` off, so an fp32 matmul runs on
    the fp32 units. Data sheets write GB for the GiB that are on the board.
    """
    tflops = {
        "float32": sheet.fp32_tflops,
        "float64": sheet.fp64_matmul_tflops,
        "bfloat16": sheet.half_matmul_tflops,
        "float16": sheet.half_matmul_tflops,
    }
    rates = {dtype: float(round(rate * 1e6 * MATMUL_FRACTION)) for dtype, rate in tflops.items()}
    return DeviceSpec(
        name=sheet.name,
        kind="cuda",
        memory_bytes=sheet.memory_gib * 2**30,
        bandwidth_bytes_per_us=float(round(sheet.bandwidth_gb_per_s * 1e3 * BANDWIDTH_FRACTION)),
        matmul_flops_per_us=rates,
        pointwise_flops_per_us=float(round(sheet.fp32_tflops * 1e6 * POINTWISE_FRACTION)),
        transcendental_flops=GPU_TRANSCENDENTAL_FLOPS,
        random_flops=float(PHILOX_INTEGER_INSTRUCTIONS * sheet.fp32_lanes_per_integer_lane),
        launch_us=GPU_LAUNCH_US,
        convolution_flops_per_us=rates["float32"],
        convolution_launch_us=GPU_LAUNCH_US,
        source=f"{sheet.source}; {BANDWIDTH_FRACTION} of the bandwidth, {MATMUL_FRACTION} of the dense matmul rates",
    )


BUILT_IN: Mapping[str, DeviceSpec] = {sheet.name: _reachable(sheet) for sheet in _DATA_SHEETS}

# Only for a CPU that cannot be measured: one that can is measured by ``remat_compiler.calibrate``.
GENERIC_CPU = DeviceSpec(
    name="cpu-generic",
    kind="cpu",
    memory_bytes=8 * 2**30,
    bandwidth_bytes_per_us=80_000.0,
    matmul_flops_per_us={"float32": 240_000.0, "float64": 120_000.0, "bfloat16": 890_000.0, "float16": 2_700.0},
    pointwise_flops_per_us=240_000.0,
    transcendental_flops=62.0,
    random_flops=890.0,
    launch_us=3.9,
    convolution_flops_per_us=610_000.0,
    convolution_launch_us=24.0,
    source="remat_compiler.calibrate on two cores of an AMD EPYC (Zen 5, AVX-512), torch 2.13.0; memory assumed",
)


# Spec files.

_REMEDY = (
    "For one to start from: python -c \"from remat_passes.device import BUILT_IN as b; print(b['h200'].to_json())\""
)
_KINDS = ("cpu", "cuda")


def spec_from_json(text: str, origin: str) -> DeviceSpec:
    """Read a spec file's text; ``origin`` names it in errors.

    Raises:
        ConfigError: the text is not JSON, a field is missing, unknown or of the wrong kind, or a number is not above 0.
    """
    record = json_object(text, functools.partial(_damaged, origin))
    _check_names(record, tuple(field.name for field in fields(DeviceSpec)), "field", origin)
    kind = _text(record, "kind", origin)
    if kind not in _KINDS:
        raise _damaged(origin, f"field 'kind' is {kind!r}, expected one of {', '.join(_KINDS)}")
    return DeviceSpec(
        name=_text(record, "name", origin),
        kind=kind,
        memory_bytes=_whole(record, "memory_bytes", origin),
        bandwidth_bytes_per_us=_number(record, "bandwidth_bytes_per_us", origin),
        matmul_flops_per_us=_rates(record["matmul_flops_per_us"], origin),
        pointwise_flops_per_us=_number(record, "pointwise_flops_per_us", origin),
        transcendental_flops=_number(record, "transcendental_flops", origin),
        random_flops=_number(record, "random_flops", origin),
        launch_us=_number(record, "launch_us", origin),
        convolution_flops_per_us=_number(record, "convolution_flops_per_us", origin),
        convolution_launch_us=_number(record, "convolution_launch_us", origin),
        source=_text(record, "source", origin),
    )


def _damaged(origin: str, what: str, hint: str = "") -> ConfigError:
    return ConfigError(f"{origin} is not a usable device spec: {what}.{hint} {_REMEDY}")


def _check_names(record: Mapping[str, object], names: tuple[str, ...], noun: str, origin: str) -> None:
    """Every one of ``names`` and nothing else: a misspelt figure must not be passed over."""
    for name in record:
        if name not in names:
            raise _damaged(origin, f"{noun} {name!r} is unknown, expected {', '.join(names)}", nearest(name, names))
    for name in names:
        if name not in record:
            raise _damaged(origin, f"{noun} {name!r} is missing")


def _text(record: Mapping[str, object], name: str, origin: str) -> str:
    entry = record[name]
    if not isinstance(entry, str):
        raise _damaged(origin, f"field {name!r} is {entry!r}, expected text")
    return entry


def _whole(record: Mapping[str, object], name: str, origin: str) -> int:
    entry = record[name]
    if not isinstance(entry, int) or isinstance(entry, bool) or entry <= 0:
        raise _damaged(origin, f"field {name!r} is {entry!r}, expected a whole number above 0")
    return entry


def _number(record: Mapping[str, object], name: str, origin: str) -> float:
    number = positive_number(record[name])
    if number is None:
        raise _damaged(origin, f"field {name!r} is {record[name]!r}, expected a number above 0")
    return number


def _rates(entry: object, origin: str) -> dict[str, float]:
    dtypes = ", ".join(DTYPES)
    if not isinstance(entry, dict):
        raise _damaged(origin, f"field 'matmul_flops_per_us' is {entry!r}, expected a rate for each of {dtypes}")
    _check_names(entry, DTYPES, "in field 'matmul_flops_per_us' the dtype", origin)
    return {dtype: _number(entry, dtype, origin) for dtype in DTYPES}
