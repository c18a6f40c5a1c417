"""The measured CPU: measured once, kept, and none of the user's state touched."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from remat_compiler import calibrate
from remat_compiler.calibrate import cpu_spec, default_cache_dir, measure_cpu
from remat_passes.device import DTYPES, GENERIC_CPU, DeviceSpec


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a measurement, which costs nothing."""
    calls: list[int] = []

    def measure() -> DeviceSpec:
        calls.append(1)
        return GENERIC_CPU

    monkeypatch.setattr(calibrate, "measure_cpu", measure)
    monkeypatch.setattr(calibrate, "_UNSAVED", {})
    return calls


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_measure_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random_state = torch.get_rng_state()
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):  # as a compile may have them
        spec = measure_cpu()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert list(tmp_path.iterdir()) == []
    assert (spec.name, spec.kind) == ("cpu", "cpu")
    assert set(spec.matmul_flops_per_us) == set(DTYPES)
    # Loose enough for any machine, however busy: a tenth of a GB/s and of a GFLOPS are 100.
    assert spec.bandwidth_bytes_per_us > 100
    assert min(spec.matmul_flops_per_us.values()) > 100
    assert spec.matmul_flops_per_us["float32"] >= spec.pointwise_flops_per_us > 100
    assert spec.transcendental_flops > 1
    assert 0.05 < spec.launch_us < 1000
    for figure in (spec.bandwidth_bytes_per_us, spec.pointwise_flops_per_us, spec.launch_us, spec.random_flops):
        assert figure == float(f"{figure:.2g}")


def test_the_second_call_measures_nothing(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    first = cpu_spec(tmp_path / "cache")
    assert cpu_spec(tmp_path / "cache") == first == GENERIC_CPU
    assert len(measured) == 1
    assert only_file(tmp_path / "cache/device").name.startswith("cpu-")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("damage", ["", "{", "{}", '{"name": "cpu"}', "\ud800"])
def test_a_damaged_file_is_measured_again(tmp_path: Path, measured: list[int], damage: str) -> None:
    cpu_spec(tmp_path)
    path = only_file(tmp_path / "device")
    path.write_bytes(damage.encode("utf-8", "surrogatepass"))
    assert cpu_spec(tmp_path) == GENERIC_CPU
    assert len(measured) == 2
    assert only_file(tmp_path / "device").read_text() == GENERIC_CPU.to_json()


def test_another_thread_count_is_another_machine(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_spec(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    cpu_spec(tmp_path)
    assert len(measured) == 2


def test_the_file_of_another_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start together measure together, and plan with the same figures."""
    theirs = replace(GENERIC_CPU, launch_us=5.0)

    def measure() -> DeviceSpec:
        path = tmp_path / "device" / f"cpu-{calibrate._machine_hash()}.json"
        path.parent.mkdir()
        path.write_text(theirs.to_json())
        return GENERIC_CPU

    monkeypatch.setattr(calibrate, "measure_cpu", measure)
    assert cpu_spec(tmp_path) == theirs
    assert cpu_spec(tmp_path) == theirs


def test_a_cache_that_cannot_be_written(tmp_path: Path, measured: list[int]) -> None:
    (tmp_path / "device").write_text("in the way")
    with pytest.warns(
        UserWarning, match=r"cannot be kept in .*cpu-\w+\.json \((File exists|Not a directory)\)"
    ) as caught:
        assert cpu_spec(tmp_path) == GENERIC_CPU
    assert len(caught) == 1
    assert Path(caught[0].filename) == Path(__file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cpu_spec(tmp_path) == GENERIC_CPU  # kept for this process
    assert len(measured) == 1


def test_a_cpu_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> DeviceSpec:
        raise RuntimeError("no kernels")

    monkeypatch.setattr(calibrate, "measure_cpu", refuse)
    with pytest.warns(
        UserWarning, match=r"The CPU cannot be measured \(no kernels\): remat plans with generic figures"
    ):
        assert cpu_spec(tmp_path) == GENERIC_CPU
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_writing_fails(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibrate.os, "replace", fail)
    with pytest.warns(UserWarning, match="No space left on device"):
        cpu_spec(tmp_path)
    assert list((tmp_path / "device").iterdir()) == []


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}) == Path("/cache/remat")
    assert default_cache_dir({"HOME": "/home/me"}) == Path("/home/me/.cache/remat")
    assert default_cache_dir({"XDG_CACHE_HOME": "", "HOME": "/home/me"}) == Path("/home/me/.cache/remat")
    assert default_cache_dir({"XDG_CACHE_HOME": "cache", "HOME": "/home/me"}) == Path("/home/me/.cache/remat")
    assert default_cache_dir({}).is_absolute()
