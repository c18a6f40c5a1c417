"""The measured CPU: measured once, kept, and none of the user's state touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
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

    def measure() -> tuple[DeviceSpec, bool]:
        calls.append(1)
        return GENERIC_CPU, False

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
        spec, _ = measure_cpu()
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
    assert spec.convolution_flops_per_us > 100
    assert 0.05 < spec.convolution_launch_us < 10_000
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


def test_figures_that_another_version_measured_are_not_read(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with fewer figures is one that this version cannot plan with."""
    with monkeypatch.context() as before:
        before.setattr(calibrate, "METHOD", calibrate.METHOD - 1)
        cpu_spec(tmp_path)
    older = only_file(tmp_path / "device")
    older.write_text(older.read_text().replace(' "convolution_launch_us": 24.0,\n', ""))
    assert cpu_spec(tmp_path) == GENERIC_CPU
    assert len(measured) == 2
    older.write_text("")
    assert cpu_spec(tmp_path) == GENERIC_CPU
    assert len(measured) == 2


def test_another_thread_count_is_another_machine(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_spec(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    cpu_spec(tmp_path)
    assert len(measured) == 2


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_the_file_of_another_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_disturbed: bool) -> None:
    """Ranks that start together measure together, and plan with the same figures."""
    theirs = replace(GENERIC_CPU, launch_us=5.0)

    def measure() -> tuple[DeviceSpec, bool]:
        path = tmp_path / "device" / f"cpu-{calibrate._machine_hash()}.json"
        path.parent.mkdir()
        path.write_text(theirs.to_json())
        return GENERIC_CPU, is_disturbed

    monkeypatch.setattr(calibrate, "measure_cpu", measure)
    monkeypatch.setattr(calibrate, "_UNSAVED", {})
    assert cpu_spec(tmp_path) == theirs
    assert cpu_spec(tmp_path) == theirs


def test_what_was_disturbed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = iter([(replace(GENERIC_CPU, launch_us=9.0), True), (GENERIC_CPU, False)])
    monkeypatch.setattr(calibrate, "measure_cpu", lambda: next(specs))
    monkeypatch.setattr(calibrate, "_UNSAVED", {})
    with pytest.warns(UserWarning, match="could not be measured well, because other work keeps it busy") as caught:
        assert cpu_spec(tmp_path).launch_us == 9.0
    assert len(caught) == 1
    assert Path(caught[0].filename) == Path(__file__)
    assert list(tmp_path.iterdir()) == []
    assert cpu_spec(tmp_path).launch_us == 9.0, "the same for all graphs of a process"
    calibrate._UNSAVED.clear()  # as another process starts
    assert cpu_spec(tmp_path) == GENERIC_CPU
    assert only_file(tmp_path / "device").name.startswith("cpu-")


def test_an_undisturbed_run_counts_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, idle = calibrate.Timing(is_disturbed=True, us=1.0), calibrate.Timing(is_disturbed=False, us=9.0)
    runs = iter([*[busy] * 30, idle, *[busy] * 30, *[calibrate.Timing(is_disturbed=False, us=9.3)] * 10])
    monkeypatch.setattr(calibrate, "timed", lambda run: next(runs))
    assert calibrate._best(lambda: None) == idle
    assert next(runs, None) is None, "disturbed runs that agree are no agreement"

    monkeypatch.setattr(calibrate, "timed", lambda run: busy)
    assert calibrate._best(lambda: None, limit_us=100.0) == busy


def test_a_run_in_which_a_thread_waited_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([5, 10**12, 10**12, 10**12])  # before and after the first run, before and after the second
    monkeypatch.setattr(calibrate, "_waited_ns", lambda: next(waits))
    assert [calibrate.timed(lambda: None).is_disturbed for _ in range(2)] == [True, False]


@pytest.mark.parametrize(("disturbed", "expected"), [(1, True), (2, True), (6, True), (10**6, False)])
def test_one_disturbed_figure_is_enough(monkeypatch: pytest.MonkeyPatch, disturbed: int, expected: bool) -> None:
    """A product, two pointwise kernels of two sizes each, a convolution; what is measured in rounds has others."""
    number = 0

    def best(run: Callable[[], object], limit_us: float = 0.0) -> calibrate.Timing:
        nonlocal number
        number += 1
        return calibrate.Timing(number == disturbed, 100.0)

    monkeypatch.setattr(calibrate, "_best", best)
    assert measure_cpu()[1] is expected


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
