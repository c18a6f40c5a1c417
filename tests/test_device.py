"""Device specs: the built-in figures, spec files, and which spec a graph gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remat_compiler import device_at_hand
from remat_compiler.device_at_hand import GPU_NAMES, device_spec
from remat_passes.device import BUILT_IN, DTYPES, GENERIC_CPU, DeviceSpec, spec_from_json
from remat_passes.errors import ConfigError

REMEDY = (
    "For one to start from: python -c \"from remat_passes.device import BUILT_IN as b; print(b['h200'].to_json())\""
)
NAMES = "cpu, a100-80g, h100, h200, rtx4090, rtx3090, l40s"


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_at_hand, "cpu_spec", lambda cache_dir: GENERIC_CPU)


def at_hand(
    name_or_path: str | None = None,
    device_type: str = "cuda",
    device_name: str | None = None,
    total_memory_bytes: int | None = None,
) -> DeviceSpec:
    return device_spec(name_or_path, device_type, device_name, total_memory_bytes, Path("/nowhere"))


def refusal(name_or_path: str | None = None, device_type: str = "cuda", device_name: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        at_hand(name_or_path, device_type, device_name)
    return str(caught.value)


def test_built_in_specs() -> None:
    assert list(BUILT_IN) == ["a100-80g", "h100", "h200", "rtx4090", "rtx3090", "l40s"]
    for name, spec in BUILT_IN.items():
        assert (spec.name, spec.kind) == (name, "cuda")
        assert tuple(sorted(spec.matmul_flops_per_us)) == tuple(sorted(DTYPES))
        rates = spec.matmul_flops_per_us
        assert rates["float16"] == rates["bfloat16"] > rates["float32"] >= rates["float64"]


def test_reachable_figures_are_below_the_data_sheet() -> None:
    h200 = BUILT_IN["h200"]
    assert h200.bandwidth_bytes_per_us == 4_080_000  # of 4.8 TB/s
    assert h200.matmul_flops_per_us["bfloat16"] == 692_650_000  # of 989.5 TFLOPS
    assert h200.matmul_flops_per_us["float32"] == 46_900_000  # of 67 TFLOPS: no TF32
    assert BUILT_IN["rtx4090"].matmul_flops_per_us["float16"] == 115_640_000  # of 165.2 TFLOPS, fp32 accumulation


@pytest.mark.parametrize("spec", [*BUILT_IN.values(), GENERIC_CPU], ids=lambda spec: spec.name)
def test_json_round_trip(spec: DeviceSpec) -> None:
    text = spec.to_json()
    assert spec_from_json(text, "spec.json") == spec
    assert spec_from_json(text, "spec.json").to_json() == text
    assert text.endswith("}\n")
    assert list(json.loads(text)) == sorted(json.loads(text))


def test_a_whole_number_is_a_rate_too() -> None:
    record = json.loads(GENERIC_CPU.to_json())
    record["launch_us"] = 3
    assert repr(spec_from_json(json.dumps(record), "spec.json").launch_us) == "3.0"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"launch_us": 0}, "field 'launch_us' is 0, expected a number above 0."),
        ({"launch_us": -1.5}, "field 'launch_us' is -1.5, expected a number above 0."),
        ({"launch_us": "3"}, "field 'launch_us' is '3', expected a number above 0."),
        ({"launch_us": True}, "field 'launch_us' is True, expected a number above 0."),
        ({"launch_us": None}, "field 'launch_us' is None, expected a number above 0."),
        ({"launch_us": float("nan")}, "field 'launch_us' is nan, expected a number above 0."),
        ({"launch_us": float("inf")}, "field 'launch_us' is inf, expected a number above 0."),
        ({"random_flops": 10**400}, f"field 'random_flops' is {10**400}, expected a number above 0."),
        ({"memory_bytes": 8e9}, "field 'memory_bytes' is 8000000000.0, expected a whole number above 0."),
        ({"memory_bytes": 0}, "field 'memory_bytes' is 0, expected a whole number above 0."),
        ({"kind": "gpu"}, "field 'kind' is 'gpu', expected one of cpu, cuda."),
        ({"name": 7}, "field 'name' is 7, expected text."),
        (
            {"matmul_flops_per_us": 5},
            "field 'matmul_flops_per_us' is 5, expected a rate for each of float32, float64, bfloat16, float16.",
        ),
        (
            {"matmul_flops_per_us": {"float32": 1.0, "float64": 1.0, "float16": 1.0}},
            "in field 'matmul_flops_per_us' the dtype 'bfloat16' is missing.",
        ),
        (
            {"matmul_flops_per_us": {"float32": 1.0, "float64": 1.0, "float16": 1.0, "bfloat_16": 1.0}},
            "in field 'matmul_flops_per_us' the dtype 'bfloat_16' is unknown,"
            " expected float32, float64, bfloat16, float16. Did you mean 'bfloat16'?",
        ),
        (
            {"matmul_flops_per_us": {"float32": 1.0, "float64": 1.0, "float16": -1.0, "bfloat16": 1.0}},
            "field 'float16' is -1.0, expected a number above 0.",
        ),
    ],
)
def test_damaged_fields(changes: dict[str, object], what: str) -> None:
    record = json.loads(GENERIC_CPU.to_json()) | changes
    with pytest.raises(ConfigError) as caught:
        spec_from_json(json.dumps(record), "spec.json")
    assert str(caught.value) == f"spec.json is not a usable device spec: {what} {REMEDY}"


def test_missing_and_unknown_fields() -> None:
    record = json.loads(GENERIC_CPU.to_json())
    del record["random_flops"]
    with pytest.raises(
        ConfigError, match=r"spec\.json is not a usable device spec: field 'random_flops' is missing\. For"
    ):
        spec_from_json(json.dumps(record), "spec.json")
    with pytest.raises(
        ConfigError, match=r"field 'launch' is unknown, expected name, .*, source\. Did you mean 'launch_us'\?"
    ):
        spec_from_json(json.dumps(record | {"launch": 1}), "spec.json")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "it is not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("[" * 100_000, "it is not JSON ("),
        ("[]", "it is not a JSON object."),
    ],
    ids=["empty", "deep", "list"],
)
def test_text_that_is_no_spec(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_from_json(text, "spec.json")
    assert str(caught.value).startswith(f"spec.json is not a usable device spec: {what}")


@pytest.mark.parametrize(("device_name", "name"), GPU_NAMES.items())
def test_the_gpu_at_hand(device_name: str, name: str) -> None:
    assert at_hand(device_name=device_name) == BUILT_IN[name]
    assert at_hand(device_name=device_name, total_memory_bytes=5).memory_bytes == 5


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 PCIe",
        "NVIDIA H200 MIG 1g.18gb",
        "Tesla T4",
    ],
)
def test_an_unknown_gpu(device_name: str) -> None:
    assert refusal(device_name=device_name) == (
        f"remat has no figures for the device {device_name!r}."
        f" Set option device_spec (REMAT_DEVICE_SPEC) to one of {NAMES}, or to a JSON file."
    )


def test_a_device_that_is_neither_cpu_nor_cuda() -> None:
    assert refusal(device_type="mps").startswith("remat has no figures for the device 'mps'.")
    assert refusal(device_type="xpu", device_name="NVIDIA H200").startswith("remat has no figures")


def test_named_specs_win_over_the_device_at_hand() -> None:
    assert at_hand("h200", "cpu") == BUILT_IN["h200"]
    assert at_hand("cpu", "cuda", "NVIDIA H200") == GENERIC_CPU
    assert at_hand(None, "cpu") == GENERIC_CPU


def test_a_spec_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(BUILT_IN["l40s"].to_json())
    assert at_hand(str(path)) == BUILT_IN["l40s"]
    path.write_text("{}")
    assert refusal(str(path)) == f"{path} is not a usable device spec: field 'name' is missing. {REMEDY}"


def test_a_spec_that_does_not_exist(tmp_path: Path) -> None:
    unreadable = f"it is not one of {NAMES}, and it cannot be read as a JSON file"
    assert refusal("H20O") == (
        f"Option device_spec is 'H20O': {unreadable} (No such file or directory). Did you mean 'h200'?"
    )
    assert refusal("zzz.json") == f"Option device_spec is 'zzz.json': {unreadable} (No such file or directory)."
    assert refusal(str(tmp_path)) == f"Option device_spec is '{tmp_path}': {unreadable} (Is a directory)."
    assert "(embedded null byte)" in refusal("a\0b")
