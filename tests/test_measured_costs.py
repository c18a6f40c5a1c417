"""Measured kernel times: timed once, kept, carried to another machine; and what happens when that cannot be."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import SPEC, JointBuilder, trace
from oracle import TEST_SPEC, installed_backend
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import remat_compiler
from remat_compiler import calibrate, measured_costs
from remat_compiler.calibrate import write_atomically
from remat_compiler.measured_costs import check_cost_model, export_cost_table, hardware, kernel_times, time_kernel
from remat_compiler.options import Options, parse_options
from remat_compiler.partitioner import RematPartitioner
from remat_passes.cost import PS_PER_US, price
from remat_passes.cost_table import CostTable, kernel_key, kernels, table_from_json
from remat_passes.device import BUILT_IN
from remat_passes.errors import ConfigError
from remat_passes.joint import JointGraph, capture
from remat_passes.plan import RematPlan

aten = torch.ops.aten
MEASURED = Options(cost_model="measured")
EAGER = dataclasses.replace(MEASURED, lowering="eager")
MM, BMM = "aten.mm.default(float32[8,4], float32[4,2])", "aten.bmm.default(float32[3,8,4], float32[3,4,2])"


def two_products() -> JointGraph:
    """Two equal products, a batched one, and a relu."""
    build = JointBuilder()
    x, w = build.primal(8, 4), build.primal(4, 2)
    batched = build.call(aten.bmm.default, build.primal(3, 8, 4), build.primal(3, 4, 2))
    first = build.call(aten.mm.default, x, w)
    second = build.call(aten.mm.default, x, build.primal(4, 2))
    return build.joint([build.call(aten.relu.default, first), second, batched], [])


def one_call(op: Callable[..., Any], *operands: tuple[tuple[int, ...], torch.dtype] | object) -> fx.Node:
    """The node of one call; operands are (shape, dtype), other arguments themselves."""
    build = JointBuilder()

    def argument(given: Any) -> Any:
        if isinstance(given, list):
            return [argument(entry) for entry in given]
        is_tensor = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], torch.dtype)
        return build.primal(*given[0], dtype=given[1]) if is_tensor else given

    return build.call(op, *(argument(given) for given in operands))


def graph_of(op: Callable[..., Any], *operands: Any) -> JointGraph:
    """A graph of nothing but that call."""
    node = one_call(op, *operands)
    node.graph.output((node,))
    return capture(node.graph, 1, [], frozenset())


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_costs, "_UNSAVED", {})


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that were timed, in order; each takes 1,000 us, and no time."""
    calls: list[str] = []

    def clock(node: fx.Node, device_type: str) -> float:
        calls.append(node.name)
        return 1_000.0

    monkeypatch.setattr(measured_costs, "time_kernel", clock)
    return calls


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread ever waits for a core, whatever else runs on the machine of the tests."""
    monkeypatch.setattr(calibrate, "_waited_ns", lambda: 0)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def cached(cache_dir: Path) -> CostTable:
    path = only_file(cache_dir / "costs")
    return table_from_json(path.read_text(encoding="utf-8"), str(path))


# -- keys and tables --------------------------------------------------------------------------------------------------


def test_equal_calls_share_a_key_and_pointwise_work_has_none() -> None:
    joint = two_products()
    assert {key: len(values) for key, values in kernels(joint).items()} == {BMM: 1, MM: 2}
    assert [kernel_key(joint, value) for value in joint.values if value.op == "aten.relu.default"] == [None]


def test_a_key_holds_sizes_strides_dtypes_and_arguments() -> None:
    def key(*shape: int, transposed: bool = False, dtype: torch.dtype = torch.float32, largest: bool = True) -> str:
        build = JointBuilder()
        x = build.primal(*shape, dtype=dtype)
        x = build.call(aten.t.default, x) if transposed else x
        node = build.call(aten.topk.default, x, 2, 0, largest)
        joint = build.joint([node], [])
        found = kernel_key(joint, joint.values[-1])
        assert found is not None
        return found

    assert key(6, 6) == "aten.topk.default(float32[6,6], 2, 0, True)"
    assert key(6, 6, transposed=True) == "aten.topk.default(float32[6,6]{1,6}, 2, 0, True)"
    assert len({key(6, 6), key(6, 7), key(6, 6, dtype=torch.float64), key(6, 6, largest=False)}) == 4


def test_optional_and_listed_operands_are_in_the_key() -> None:
    index = ((3,), torch.int64)
    joint = graph_of(aten.index_put.default, ((8, 8), torch.float32), [None, index], ((8, 3), torch.float32), True)
    expected = "aten.index_put.default(float32[8,8], [None, int64[3]], float32[8,3], True)"
    assert list(kernels(joint)) == [expected]


def test_symbolic_sizes_have_the_key_of_the_traced_ones() -> None:
    layer = nn.Linear(4, 2)

    def step(x: Tensor) -> Tensor:
        return layer(x).square().sum()

    fixed, dynamic = (trace(step, torch.ones(8, 4), dynamic=dynamic).joint for dynamic in (False, True))
    assert dynamic.symbols
    assert list(kernels(dynamic)) == list(kernels(fixed))
    assert kernels(fixed)


TABLE = CostTable("A chip, 2 threads", "by-hand", "2.13.0+cpu", {MM: 12.5}, {BMM: "too large"})


def test_a_table_survives_its_file() -> None:
    text = TABLE.to_json()
    assert table_from_json(text, "t.json") == TABLE
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"


def test_the_hash_changes_with_every_part() -> None:
    changed = [
        dataclasses.replace(TABLE, device="other"),
        dataclasses.replace(TABLE, torch_version="2.14.0"),
        TABLE.with_entries({MM: 12.6}, TABLE.untimed),
        TABLE.with_entries(TABLE.times_us, {}),
        TABLE.restricted_to([BMM]),
    ]
    assert len({TABLE.content_hash, *(table.content_hash for table in changed)}) == len(changed) + 1
    assert TABLE.restricted_to([MM, BMM]).content_hash == TABLE.content_hash


def damaged(**changes: object) -> str:
    return json.dumps({name: v for name, v in {**json.loads(TABLE.to_json()), **changes}.items() if v is not ...})


DAMAGES = {
    "": "it is not JSON (Expecting value: line 1 column 1 (char 0)).",
    "[]": "it is not a JSON object.",
    damaged(schema=2): "its schema is 2, this version of remat reads 1.",
    damaged(device=...): "field 'device' is missing.",
    damaged(time_us={}): "field 'time_us' is unknown. Did you mean 'times_us'?",
    damaged(spec=3): "'spec' is 3, expected text.",
    damaged(times_us=[]): "field 'times_us' is [], expected an object.",
    damaged(times_us={"k": 0}): "the time of 'k' is 0, expected a number of microseconds above 0.",
    damaged(times_us={"k": True}): "the time of 'k' is True, expected a number of microseconds above 0.",
    damaged(times_us={"k": math.inf}): "the time of 'k' is inf, expected a number of microseconds above 0.",
    damaged(times_us={"k": math.nan}): "the time of 'k' is nan, expected a number of microseconds above 0.",
    damaged(untimed={"k": 1}): "'k' is 1, expected text.",
}


@pytest.mark.parametrize("text", DAMAGES)
def test_a_damaged_table_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        table_from_json(text, "t.json")
    assert str(refused.value).startswith(f"t.json is not a usable cost table: {DAMAGES[text]} Write it again with")


# -- prices -----------------------------------------------------------------------------------------------------------


def test_what_the_table_has_counts_as_measured_and_all_else_as_before() -> None:
    joint = two_products()
    analytic, measured = price(joint, SPEC), price(joint, SPEC, CostTable("d", "s", "v", {MM: 77.0}))
    for value, before, after in zip(joint.values, analytic.values, measured.values, strict=True):
        if value.op == "aten.mm.default":
            assert after.recompute_ps == 77 * PS_PER_US != before.recompute_ps
        else:
            assert after == before
    products = [before for value, before in zip(joint.values, analytic.values, strict=True) if "mm.default" in value.op]
    mm_ps = [cost.recompute_ps for cost in products][1]
    assert measured.fixed_ps - analytic.fixed_ps == 2 * (77 * PS_PER_US - mm_ps)


# -- measuring and keeping --------------------------------------------------------------------------------------------


def test_each_distinct_kernel_is_timed_once_and_never_again(tmp_path: Path, timed: list[str]) -> None:
    joint = two_products()
    first = kernel_times(joint, SPEC, MEASURED, tmp_path)
    assert first.table is not None
    assert sorted(timed) == ["bmm_default", "mm_default"]
    assert first.table.times_us == {MM: 1_000.0, BMM: 1_000.0}
    assert first.label == "measured"
    assert first.notes == (f"2 of 2 kernels are priced as measured on {hardware('cpu')}",)
    assert kernel_times(joint, SPEC, MEASURED, tmp_path) == first
    assert len(timed) == 2
    assert cached(tmp_path) == first.table


def test_another_graph_adds_its_own_and_gets_no_more(tmp_path: Path, timed: list[str]) -> None:
    joint, other = two_products(), graph_of(aten.mm.default, ((2, 2), torch.float32), ((2, 2), torch.float32))
    first = kernel_times(joint, SPEC, MEASURED, tmp_path)
    second = kernel_times(other, SPEC, MEASURED, tmp_path)
    assert second.table is not None
    assert list(second.table.times_us) == ["aten.mm.default(float32[2,2], float32[2,2])"]
    assert len(cached(tmp_path).times_us) == 3
    again = kernel_times(joint, SPEC, MEASURED, tmp_path)
    assert again.content_hash == first.content_hash != second.content_hash


def test_analytic_measures_nothing(tmp_path: Path, timed: list[str]) -> None:
    times = kernel_times(two_products(), SPEC, Options(), tmp_path)
    assert (times.table, times.label, times.notes, times.content_hash) == (None, "analytic", (), "")
    assert timed == []
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_under_the_cap_stays_analytic_for_good(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mm_bytes = (8 * 4 + 4 * 2 + 8 * 2) * 4
    monkeypatch.setattr(measured_costs, "CPU_CAP_BYTES", mm_bytes)
    times = kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    assert times.table is not None
    assert list(times.table.times_us) == [MM]
    why = "too large for the memory that measuring may take"
    assert times.table.untimed == {BMM: why}
    assert times.notes[0].endswith(f"; the others are analytic: 1 {why}")
    monkeypatch.setattr(measured_costs, "CPU_CAP_BYTES", 10 * mm_bytes)
    assert kernel_times(two_products(), SPEC, MEASURED, tmp_path) == times
    assert timed == ["mm_default"]


def test_a_view_of_a_larger_storage_counts_with_its_gaps() -> None:
    build = JointBuilder()
    column = build.call(aten.slice.Tensor, build.primal(100, 64), 1, 0, 1)
    node = build.call(aten.mm.default, column, build.primal(1, 5))
    assert measured_costs._bytes_of_call(node) == (99 * 64 + 1 + 5 + 500) * 4


def test_measuring_is_bounded_in_number_and_time(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_costs, "MAX_KERNELS", 1)
    times = kernel_times(two_products(), SPEC, MEASURED, tmp_path / "number")
    assert times.table is not None
    # the two products take 2 * 2.2 us of the step by SPEC, the batched one 2.7
    assert (list(times.table.times_us), list(times.table.untimed)) == ([MM], [BMM])
    assert times.table.untimed[BMM] == "beyond the 1 that take longest"
    monkeypatch.setattr(measured_costs, "TOTAL_LIMIT_S", 0)
    times = kernel_times(two_products(), SPEC, MEASURED, tmp_path / "time")
    assert times.table is not None
    assert set(times.table.untimed.values()) == {"beyond the 0 s that measuring may take"}
    assert len(timed) == 1


@pytest.mark.usefixtures("idle")
def test_a_kernel_that_fails_stays_analytic_and_the_others_are_timed(tmp_path: Path) -> None:
    build = JointBuilder()
    factor = build.call(aten.linalg_cholesky_ex.default, build.primal(4, 4))
    factor.kwargs = {"check_errors": True}  # of random numbers, which are not positive definite
    product = build.call(aten.mm.default, build.primal(4, 4), build.primal(4, 4))
    joint = build.joint([factor, product], [])

    times = kernel_times(joint, SPEC, MEASURED, tmp_path)
    assert times.table is not None
    assert list(times.table.times_us) == ["aten.mm.default(float32[4,4], float32[4,4])"]
    assert list(times.table.untimed.values()) == ["failed on made-up operands (_LinAlgError of linalg_cholesky_ex)"]
    assert price(joint, SPEC, times.table).values[1].recompute_ps == price(joint, SPEC).values[1].recompute_ps


F32, I64 = torch.float32, torch.int64
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize(
    ("op", "operands", "why"),
    [
        (ATTENTION, [((1, 2, 8, 4), F32)] * 3 + [0.5], "random, which would move the generator"),
        (
            aten._embedding_bag.default,
            [((9, 4), F32), ((6,), I64), ((2,), I64)],
            "with integers whose meaning is not known",
        ),
        (
            aten.index_put.default,
            [((8, 8), F32), [((8,), torch.bool), ((3,), I64)], ((3,), F32)],
            "with integers whose meaning is not known",
        ),
    ],
)
def test_what_is_never_run(
    tmp_path: Path, timed: list[str], op: Callable[..., Any], operands: list[Any], why: str
) -> None:
    times = kernel_times(graph_of(op, *operands), SPEC, EAGER, tmp_path)
    assert times.table is not None
    assert list(times.table.untimed.values()) == [why]
    assert timed == []


def test_custom_ops_are_never_run(tmp_path: Path) -> None:
    runs: list[int] = []

    @torch.library.custom_op("remat_test::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        runs.append(1)
        return x.clone()

    counted.register_fake(torch.empty_like)
    joint = graph_of(torch.ops.remat_test.counted.default, ((4,), F32))
    times = kernel_times(joint, SPEC, MEASURED, tmp_path)
    assert times.table is not None
    assert list(times.table.untimed.values()) == ["custom or collective, whose effects are not known"]
    assert runs == []


CALLS: list[tuple[Callable[..., Any], list[Any]]] = [
    (aten.mm.default, [((8, 4), F32), ((4, 2), F32)]),
    (aten.bmm.default, [((2, 8, 4), torch.bfloat16), ((2, 4, 2), torch.bfloat16)]),
    (aten.mm.default, [((8, 4), torch.complex64), ((4, 2), torch.complex64)]),
    (
        aten.convolution.default,
        [((2, 3, 8, 8), F32), ((4, 3, 3, 3), F32), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1],
    ),
    (ATTENTION, [((1, 2, 8, 4), F32)] * 3),
    (aten.sort.default, [((5, 7), I64)]),
    (aten.scatter.src, [((5, 7), F32), 1, ((5, 3), I64), ((5, 3), F32)]),
    (aten.scatter_add.default, [((5, 7), F32), -1, ((5, 30), I64), ((5, 30), F32)]),
    (aten.index_add.default, [((5, 7), F32), 0, ((40,), torch.int32), ((40, 7), F32)]),
    (aten.index_put.default, [((5, 7), F32), [None, ((90,), I64)], ((5, 90), F32), True]),
    (aten.embedding_dense_backward.default, [((60, 4), F32), ((60,), I64), 10, -1, False]),
    (aten.mm.default, [((0, 4), F32), ((4, 2), F32)]),
]


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(("op", "operands"), CALLS, ids=[str(op) for op, _ in CALLS])
def test_ops_run_on_operands_that_are_made_up(
    monkeypatch: pytest.MonkeyPatch, op: Callable[..., Any], operands: list[Any]
) -> None:
    monkeypatch.setattr(measured_costs, "LIMIT_US", 0.0)
    node = one_call(op, *operands)
    assert measured_costs._why_not(node, "cpu") is None
    random_state = torch.get_rng_state()
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):  # as a compile may have them
        us = time_kernel(node, "cpu")
    assert us is not None
    assert 0 < us < 1e6
    assert torch.equal(torch.get_rng_state(), random_state)


def test_made_up_operands_have_the_layout_of_the_fake_ones() -> None:
    build = JointBuilder()
    x = build.call(aten.expand.default, build.call(aten.t.default, build.primal(6, 4)), [3, 4, 6])
    fake = x.meta["val"]
    real = measured_costs._made_up(fake, 1)
    assert type(real) is Tensor
    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    assert real.abs().max() <= 1
    assert real.std() > 0.1
    mask = measured_costs._made_up(one_call(aten.sort.default, ((99,), torch.bool)).args[0].meta["val"], 1)  # type: ignore
    assert mask.any()
    assert not mask.all()


def test_indices_go_round_through_the_axis() -> None:
    index = ((3, 4), I64)
    node = one_call(aten.scatter.src, ((5, 7), F32), 1, index, ((3, 4), F32))
    (_, _, indices, _), _ = measured_costs._real_arguments(node)
    assert indices.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]


# -- other work on the machine ----------------------------------------------------------------------------------------


def test_a_run_that_waited_for_a_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([0, 10**12, 0, 0])  # before and after the first run, before and after the second
    monkeypatch.setattr(calibrate, "_waited_ns", lambda: next(waits))
    assert measured_costs._cpu_us(lambda: None) is None
    assert measured_costs._cpu_us(lambda: None) is not None


def test_the_fastest_of_the_runs_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[float | None] = iter([9.0, None, 5.0, 5.1, 5.2, 5.1, 5.1, 5.0])
    assert measured_costs._fastest_us(lambda: None, lambda run: next(times)) == 5.0
    assert next(times, "all taken") == "all taken"
    monkeypatch.setattr(measured_costs, "LIMIT_US", 1_000.0)
    assert measured_costs._fastest_us(lambda: time.sleep(1e-4), lambda run: run()) is None  # type: ignore[arg-type]


def test_what_was_disturbed_is_said_not_kept_and_timed_again(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = measured_costs.time_kernel
    monkeypatch.setattr(
        measured_costs,
        "time_kernel",
        lambda node, device: None if node.target is aten.bmm.default else undisturbed(node, device),
    )
    with pytest.warns(UserWarning, match=r"^1 of 2 kernels could not be timed, because other work keeps the processor"):
        times = kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    assert times.notes[0].endswith("; the others are analytic: 1 disturbed by other work")
    assert (list(cached(tmp_path).times_us), cached(tmp_path).untimed) == ([MM], {})
    monkeypatch.setattr(measured_costs, "time_kernel", undisturbed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    assert timed == ["mm_default", "bmm_default"]
    assert set(cached(tmp_path).times_us) == {MM, BMM}


# -- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["", "{", "{}", "\ud800"])
def test_a_damaged_cache_is_measured_again_with_a_sentence(tmp_path: Path, timed: list[str], damage: str) -> None:
    kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    path = only_file(tmp_path / "costs")
    whole = path.read_text()
    path.write_bytes(damage.encode("utf-8", "surrogatepass"))
    with pytest.warns(UserWarning, match="are damaged: they are measured again"):
        kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    assert len(timed) == 4
    assert path.read_text() == whole


def test_a_cache_that_cannot_be_written_holds_for_the_process(tmp_path: Path, timed: list[str]) -> None:
    (tmp_path / "costs").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"cannot be kept in .* Set XDG_CACHE_HOME to a folder that can be written"):
        first = kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_times(two_products(), SPEC, MEASURED, tmp_path) == first
    assert len(timed) == 2


def test_what_another_process_kept_meanwhile_wins(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    path = only_file(tmp_path / "costs")
    theirs = cached(tmp_path).with_entries({MM: 5.0, "theirs": 6.0}, {BMM: "too large"})
    path.unlink()

    def meanwhile(node: fx.Node, device_type: str) -> float:
        path.write_text(theirs.to_json(), encoding="utf-8")
        return 1_000.0

    monkeypatch.setattr(measured_costs, "time_kernel", meanwhile)
    times = kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    assert times.table is not None
    assert (times.table.times_us, times.table.untimed) == ({MM: 5.0}, {BMM: "too large"})
    assert cached(tmp_path) == theirs


def test_other_settings_of_the_device_have_a_table_of_their_own(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    monkeypatch.setattr(measured_costs, "_float32_precision", lambda _: ("bf16", "ieee"))
    kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    assert len(list((tmp_path / "costs").iterdir())) == 3
    assert len(timed) == 6


def test_a_cache_that_can_be_read_and_not_written_holds_for_the_process(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_times(graph_of(aten.mm.default, ((2, 2), F32), ((2, 2), F32)), SPEC, MEASURED, tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(measured_costs, "write_atomically", refuse)
    with pytest.warns(UserWarning, match="cannot be kept in"):
        first = kernel_times(two_products(), SPEC, MEASURED, tmp_path)
    assert kernel_times(two_products(), SPEC, MEASURED, tmp_path) == first
    assert len(timed) == 3
    monkeypatch.setattr(measured_costs, "write_atomically", write_atomically)  # it can be written again
    monkeypatch.setattr(measured_costs, "time_kernel", lambda *_: 7.0)
    more = graph_of(aten.mm.default, ((3, 3), F32), ((3, 3), F32))
    kernel_times(more, SPEC, MEASURED, tmp_path)
    assert len(cached(tmp_path).times_us) == 4
    monkeypatch.setattr(measured_costs, "time_kernel", lambda *_: pytest.fail("it was timed before"))
    kernel_times(more, SPEC, MEASURED, tmp_path)


@pytest.mark.parametrize(
    "setting",
    ["fp32_precision = 'tf32'", "mkldnn.matmul.fp32_precision = 'bf16'", "mkldnn.conv.fp32_precision = 'bf16'"],
)
def test_a_precision_that_is_set_library_by_library_is_part_of_the_device(setting: str) -> None:
    script = (
        "import torch; from remat_compiler.measured_costs import hardware; before = hardware('cpu');"
        f"torch.backends.{setting}; after = hardware('cpu'); assert after != before, after; print(after)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_scatter_is_timed_only_where_it_runs_as_it_is(tmp_path: Path, timed: list[str]) -> None:
    joint = graph_of(aten.scatter.src, ((5, 7), F32), 1, ((5, 3), I64), ((5, 3), F32))
    times = kernel_times(joint, SPEC, MEASURED, tmp_path)
    assert times.notes[0].startswith("0 of 0 kernels")
    assert timed == []
    as_it_is, by_inductor = (kernel_times(joint, SPEC, options, tmp_path).table for options in (EAGER, MEASURED))
    assert as_it_is is not None
    assert by_inductor is not None
    assert (len(as_it_is.times_us), len(by_inductor.times_us)) == (1, 0)


def test_seeds_of_attention_can_be_made_up() -> None:
    build = JointBuilder()
    sequence = [build.primal(1, 2, 8, 4) for _ in range(5)]
    seed = [build.primal(1, dtype=I64) for _ in range(2)]
    node = build.graph.call_function(
        aten._scaled_dot_product_flash_attention_backward.default,
        (*sequence, build.primal(1, 2, 8), None, None, 8, 8, 0.0, True, *seed),
    )
    node.meta["val"] = tuple(operand.meta["val"] for operand in sequence[1:4])
    assert measured_costs._why_not(node, "cpu") is None
    args, _ = measured_costs._real_arguments(node)
    assert [seed.tolist() for seed in args[-2:]] == [[0], [0]]
    node.args = (
        *node.args[:6],
        build.primal(2, dtype=I64),
        None,
        *node.args[8:],
    )  # offsets of sequences mean something
    assert measured_costs._why_not(node, "cpu") == "with integers whose meaning is not known"


class OnSecondGpu:
    device = torch.device("cuda:1")


def test_a_kernel_is_timed_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    @contextlib.contextmanager
    def device(of: torch.device) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(measured_costs, "_tensors", lambda nodes: [OnSecondGpu])
    monkeypatch.setattr(measured_costs, "_why_not", lambda *_: None)
    seen: list[torch.device] = []

    def clock(*_: object) -> float:
        seen.append(current[-1])
        return 1.0

    monkeypatch.setattr(measured_costs, "time_kernel", clock)
    joint = two_products()
    measured_costs.measure_kernels(joint, kernels(joint), SPEC)
    assert seen == [torch.device("cuda:1")] * 2


# -- tables from elsewhere --------------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table of ``two_products``, as it was exported on this device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel_times(two_products(), SPEC, MEASURED, tmp_path / "cache/remat")
    assert export_cost_table(tmp_path / "table.json", "cpu") == 2
    return tmp_path / "table.json"


def changed(path: Path, **changes: str) -> Options:
    """Options that name the table, after something in it was changed."""
    record = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(record), encoding="utf-8")
    return Options(cost_model=str(path))


def refusal(options: Options, device_type: str = "cpu") -> str:
    with pytest.raises(ConfigError) as refused:
        check_cost_model(options, SPEC, device_type)
    return str(refused.value)


def test_an_exported_table_prices_as_the_measured_one_did(exported: Path, timed: list[str], tmp_path: Path) -> None:
    measured = kernel_times(two_products(), SPEC, MEASURED, tmp_path / "cache/remat")
    read = kernel_times(two_products(), SPEC, Options(cost_model=str(exported)), tmp_path / "nowhere")
    assert read.table == measured.table
    assert (read.label, read.notes) == ("table.json", measured.notes)
    assert len(timed) == 2
    assert not (tmp_path / "nowhere").exists()


def test_a_kernel_that_the_table_lacks_is_analytic(exported: Path, timed: list[str], tmp_path: Path) -> None:
    joint = graph_of(aten.mm.default, ((2, 2), F32), ((2, 2), F32))
    times = kernel_times(joint, SPEC, Options(cost_model=str(exported)), tmp_path)
    assert times.notes[0].startswith("0 of 1 kernels")
    assert times.notes[0].endswith("; the others are analytic: 1 not in the table")
    assert price(joint, SPEC, times.table) == price(joint, SPEC)
    assert len(timed) == 2


def test_a_table_of_another_device_needs_its_device_spec(exported: Path) -> None:
    options = changed(exported, device="NVIDIA H200", spec="h200")
    assert refusal(options) == (
        f"Option cost_model is {str(exported)!r}: that table was measured on NVIDIA H200, and the device at hand is"
        f" {hardware('cpu')}. To plan for the other device, set device_spec to 'h200' as well; to plan for this one,"
        " set cost_model to 'measured' or 'analytic'."
    )
    named = dataclasses.replace(options, device_spec="h200")
    check_cost_model(named, BUILT_IN["h200"], "cpu")
    times = kernel_times(two_products(), BUILT_IN["h200"], named, Path("unused"))
    assert times.notes == ("2 of 2 kernels are priced as measured on NVIDIA H200",)
    with pytest.raises(ConfigError, match=r"device_spec is 'a100-80g' .* Set device_spec to 'h200', or take a table"):
        check_cost_model(dataclasses.replace(options, device_spec="a100-80g"), BUILT_IN["a100-80g"], "cpu")


def test_a_table_of_another_torch_is_refused_and_of_another_build_is_not(exported: Path) -> None:
    text = refusal(changed(exported, torch_version="2.3.1"))
    assert text.startswith(
        f"Option cost_model is {str(exported)!r}: that table was measured with torch 2.3.1, and this is torch"
        f" {torch.__version__}. Other versions run other kernels: export the table again"
    )
    release = torch.__version__.partition("+")[0]
    check_cost_model(changed(exported, torch_version=f"{release}+cu126"), SPEC, "cpu")


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    assert refusal(Options(cost_model=str(missing))) == (
        f"Option cost_model is {str(missing)!r}: the table cannot be read (No such file or directory)."
        " remat_compiler.export_cost_table writes one."
    )
    missing.write_text("{")
    assert "is not a usable cost table: it is not JSON" in refusal(Options(cost_model=str(missing)))


def test_measured_is_about_the_device_at_hand() -> None:
    with pytest.raises(ConfigError) as refused:
        check_cost_model(dataclasses.replace(MEASURED, device_spec="h200"), BUILT_IN["h200"], "cpu")
    assert str(refused.value).startswith(
        f"Option cost_model is 'measured', which times kernels on the device at hand ({hardware('cpu')}), and"
        " device_spec is 'h200': the two do not go together."
    )
    check_cost_model(dataclasses.replace(MEASURED, device_spec="mine.json"), SPEC, "cpu")


def test_nothing_is_exported_before_something_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^Nothing has been measured on .* yet: compile a training step with"):
        export_cost_table(tmp_path / "table.json", "cpu")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_cannot_be_written(exported: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written to .* give a file whose name ends in \.json"):
        export_cost_table(exported.with_suffix(".txt"), "cpu")
    with pytest.raises(ConfigError, match="cannot be written to"):
        export_cost_table(exported / "below-a-file.json", "cpu")


# -- the option -------------------------------------------------------------------------------------------------------


def parsed(**environ: str) -> str:
    return parse_options(None, environ, ()).cost_model


def test_the_option_takes_names_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parsed() == "analytic"
    assert parsed(REMAT_COST_MODEL="measured") == "measured"
    assert parsed(REMAT_COST_MODEL="h200.json") == str(tmp_path / "h200.json")
    assert parse_options({"cost_model": tmp_path / "t.json"}, {}, ()).cost_model == str(tmp_path / "t.json")


@pytest.mark.parametrize("value", ["measurd", 3, ["measured"], "table.txt"])
def test_the_option_refuses_the_rest(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_options({"cost_model": value}, {}, ())
    text = str(refused.value)
    assert text.startswith(f"Option cost_model is {value!r}: there is no such choice. Accepted: ")
    assert text.endswith("Did you mean 'measured'?") == (value == "measurd")


# -- from end to end --------------------------------------------------------------------------------------------------


class Tail(nn.Module):
    """A product whose result backward reads, and no kernel of its own: keep it, or compute it again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 64, bias=False), nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale).mean()


def planned(**options: object) -> RematPlan:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tail()
    compiled = torch.compile(model, backend=installed_backend(), options={"lowering": "eager", **options})
    compiled(torch.ones(32, 16)).backward()
    return remat_compiler.plans()[-1]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_table_written_by_hand_changes_the_plan(tmp_path: Path) -> None:
    decisions = {}
    key = "aten.mm.default(float32[32,16], float32[16,64]{1,16})"
    for us in (1e-3, 1e6):
        path = tmp_path / f"{us:g}.json"
        table = CostTable("a device", TEST_SPEC.name, torch.__version__, {key: us})
        path.write_text(table.to_json(), encoding="utf-8")
        plan = planned(cost_model=str(path))
        assert plan.cost_model == path.name
        assert any("kernels are priced as measured on a device" in note for note in plan.notes)
        products = [value for value in plan.values if value.op == "aten.mm.default"]
        decisions[us] = [(value.decision, value.cost_us) for value in products]
    assert decisions == {1e-3: [("recompute", 1e-3)], 1e6: [("save", 1e6)]}


@pytest.mark.usefixtures("fresh_compiler", "idle")
def test_a_step_is_measured_once_and_planned_alike_ever_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = planned(cost_model="measured")
    kept = cached(tmp_path / "remat")
    assert kept.times_us
    monkeypatch.setattr(measured_costs, "time_kernel", lambda *_: pytest.fail("it was timed before"))
    second = planned(cost_model="measured")
    assert dataclasses.replace(second, graph_id=first.graph_id) == first
    assert first.cost_model == "measured"
    exported = tmp_path / "table.json"
    assert remat_compiler.export_cost_table(exported, "cpu") == len(kept.times_us)
    assert planned(cost_model=str(exported)).values == first.values


@pytest.mark.usefixtures("fresh_compiler")
def test_a_table_that_does_not_go_with_the_device_is_refused_even_with_a_fallback(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(CostTable("A GPU", "h200", torch.__version__).to_json(), encoding="utf-8")
    with pytest.raises(Exception, match="Set device_spec to 'h200', or take a table that was measured on 'cpu'"):
        planned(cost_model=str(path), fallback="inductor")


def test_the_key_of_a_cached_compile_holds_the_table() -> None:
    partitioner = RematPartitioner(MEASURED, SPEC)
    before = partitioner.uuid()
    partitioner.table_hashes.append(TABLE.content_hash)
    assert partitioner.uuid() != before
