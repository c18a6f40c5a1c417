"""The measured peak against allocations that can be added up by hand."""

from __future__ import annotations

import pytest
import torch

from remat_compiler.measure import MemoryTrace, measure_peak, tensor_bytes

KIB = 1024


def empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def totals(trace: MemoryTrace) -> list[int]:
    return [total for _, total in trace.timeline]


def test_peak_is_the_highest_sum_not_the_last() -> None:
    def step() -> torch.Tensor:
        first, second = empty(100 * KIB), empty(200 * KIB)
        del first
        third = empty(50 * KIB)
        del second
        return third

    trace = measure_peak(step)

    assert totals(trace) == [0, 100 * KIB, 300 * KIB, 200 * KIB, 250 * KIB, 50 * KIB]
    assert trace.peak_bytes == trace.above_baseline_bytes == 300 * KIB


def test_baseline_is_added_to_every_instant() -> None:
    trace = measure_peak(lambda: empty(64), baseline_bytes=1000)

    assert totals(trace) == [1000, 1064]
    assert (trace.baseline_bytes, trace.peak_bytes, trace.above_baseline_bytes) == (1000, 1064, 64)


def test_a_free_of_what_was_there_before_is_not_seen_on_cpu() -> None:
    held = [empty(4 * KIB)]

    trace = measure_peak(lambda: (held.clear(), empty(KIB))[1], baseline_bytes=4 * KIB)

    assert totals(trace) == [4 * KIB, 5 * KIB]


def test_a_size_that_the_allocator_remembers_of_an_earlier_block_is_not_taken_for_this_one() -> None:
    earlier: list[torch.Tensor] = []
    measure_peak(lambda: earlier.extend(empty(8 * KIB) for _ in range(30)))
    earlier.clear()  # unseen, so that the allocator's reporter still has 8 KiB at these addresses
    for held in [[empty(4 * KIB)] for _ in range(30)]:
        trace = measure_peak(lambda held=held: (held.clear(), empty(KIB))[1], baseline_bytes=4 * KIB)  # type: ignore[misc]

        assert totals(trace) == [4 * KIB, 5 * KIB]


def test_bytes_are_counted_as_asked_for_and_not_rounded() -> None:
    # CPU's allocator aligns addresses to 64 bytes (c10::gAlignment); it reports the size that was asked for.
    assert measure_peak(lambda: (empty(1), empty(65))).peak_bytes == 66


def test_what_the_step_returns_lives_until_the_end() -> None:
    assert totals(measure_peak(lambda: [empty(KIB), empty(KIB)])) == [0, KIB, 2 * KIB]


def test_views_and_in_place_updates_allocate_nothing() -> None:
    tensor = torch.zeros(256, dtype=torch.float32)

    assert measure_peak(lambda: tensor.view(16, 16).t().zero_()).peak_bytes == 0


def test_forward_and_backward_of_one_product() -> None:
    x, w = torch.ones(64, 32), torch.ones(32, 16, requires_grad=True)

    def step() -> None:
        (x @ w).sum().backward()

    step()
    w.grad = None
    trace = measure_peak(step)

    product, gradient, scalar = 64 * 16 * 4, 32 * 16 * 4, 4
    # The product is alive when the sum is made; the gradient is the only thing left. In between, the product's own
    # gradient (an expanded scalar) may or may not be made dense, so the peak has two bounds.
    assert product + scalar <= trace.peak_bytes <= 2 * product + gradient + 3 * scalar
    assert totals(trace)[-1] == gradient


def test_time_runs_forward_and_stays_inside_the_step() -> None:
    trace = measure_peak(lambda: [empty(64) for _ in range(10)])
    times_us = [time_us for time_us, _ in trace.timeline]

    assert times_us == sorted(times_us)
    assert times_us[0] == 0 <= times_us[-1] <= trace.duration_us


def test_each_step_is_measured_by_itself() -> None:
    assert [measure_peak(lambda: empty(KIB)).peak_bytes for _ in range(3)] == [KIB] * 3


def test_an_error_in_the_step_reaches_the_caller() -> None:
    def step() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_peak(step)
    assert measure_peak(lambda: empty(64)).peak_bytes == 64


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'meta'"):
        measure_peak(lambda: None, "meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_peak_counts_what_was_there() -> None:
    held = torch.empty(2**20, dtype=torch.uint8, device="cuda")

    trace = measure_peak(lambda: (held.clone(), None)[1], "cuda")

    assert trace.baseline_bytes >= 2**20
    assert trace.above_baseline_bytes == 2**20
    assert trace.timeline == ()


def test_each_storage_counts_once() -> None:
    tensor = torch.empty(100, dtype=torch.float32)

    assert tensor_bytes(tensor, tensor[:10], tensor.view(10, 10)) == 400
    assert tensor_bytes(tensor[:10]) == 400  # a view keeps its whole storage alive


def test_module_counts_parameters_and_buffers_but_no_gradients() -> None:
    module = torch.nn.BatchNorm1d(8)  # weight, bias, running mean and variance of 8 floats, one int64 counter
    module(torch.ones(4, 8)).sum().backward()

    assert tensor_bytes(module) == 4 * 8 * 4 + 8


def test_tied_weights_count_once() -> None:
    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight

    assert tensor_bytes(torch.nn.ModuleList([embedding, head])) == 160


def test_nested_containers_are_walked_and_other_objects_have_no_bytes() -> None:
    assert tensor_bytes({"x": [torch.empty(2), (torch.empty(3), "text", 5)]}, None) == 20
