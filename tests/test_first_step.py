"""The first real step is measured, once, whatever the user does around it; and what is off is said."""

from __future__ import annotations

import json
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import compiled
from plan_samples import MIB, plan, value
from torch import Tensor, nn
from torch.profiler import profile

import remat_compiler
from remat_compiler import first_step
from remat_compiler.cli.run import plan_table, plans_json
from remat_compiler.first_step import MAX_FORWARDS, FirstStep, difference
from remat_compiler.measure import measure_peak
from remat_compiler.plan_log import measured_peaks, record, record_measurement
from remat_compiler.readback import Signature
from remat_compiler.torch_private import AllocationLog, CompiledGraph
from remat_passes.errors import RematWarning
from remat_passes.plan import RematPlan

WIDTH, ROWS, CLASSES = 64, 512, 300


def no_profiler_is_left() -> bool:
    return AllocationLog.is_possible()


# Through torch.compile.


class Step:
    """A model whose loss is outside of the compiled graph, so that a large tangent enters backward."""

    def __init__(self, **options: Any) -> None:
        blocks = [(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
        self.model = nn.Sequential(*(part for block in blocks for part in block), nn.Linear(WIDTH, CLASSES))
        self.before = len(measured_peaks())
        self.call = compiled(self.model, **options)
        self.x, self.target = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))

    def forward(self) -> Tensor:
        logits: Tensor = self.call(self.x)
        return logits

    def run(self) -> None:
        F.cross_entropy(self.forward(), self.target).backward()

    def measured(self) -> tuple[int | None, ...]:
        return measured_peaks()[self.before :]

    def plan(self) -> RematPlan:
        return remat_compiler.plans()[self.before]


@pytest.fixture
def step(fresh_compiler: None) -> Step:
    return Step()


def test_the_first_step_is_measured(step: Step, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.run()

    assert capfd.readouterr() == ("", "")
    [peak] = step.measured()
    assert peak is not None
    assert peak == pytest.approx(step.plan().projected_peak_bytes, rel=0.001)
    assert no_profiler_is_left()


def test_a_loss_inside_of_the_graph(fresh_compiler: None) -> None:
    step = Step()
    call = compiled(lambda x, target: F.cross_entropy(step.model(x), target))
    call(step.x, step.target).backward()
    [peak] = step.measured()
    for parameter in step.model.parameters():
        parameter.grad = None
    trace = measure_peak(lambda: call(step.x, step.target).backward())

    assert peak == trace.above_baseline_bytes + step.plan().baseline_bytes


def test_an_output_that_nobody_keeps(fresh_compiler: None) -> None:
    """Tanh saves what it returns, and the loss does not keep it: backward would free it early, unlike projected."""
    before = len(measured_peaks())
    call = compiled(nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Tanh()))
    call(torch.randn(ROWS, WIDTH)).square().sum().backward()

    assert measured_peaks()[before] == pytest.approx(remat_compiler.plans()[before].projected_peak_bytes, rel=0.001)


def test_gradients_are_those_of_an_unmeasured_step(step: Step) -> None:
    step.run()
    first = [parameter.grad for parameter in step.model.parameters()]
    for parameter in step.model.parameters():
        parameter.grad = None
    step.run()

    assert step.measured() != (None,)
    for parameter, gradient in zip(step.model.parameters(), first, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


def test_only_the_first_step(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    step.run()
    found = step.measured()
    monkeypatch.setattr(first_step, "_Counted", None)
    step.run()

    assert step.measured() == found


def test_forwards_without_gradients_come_first(step: Step) -> None:
    with torch.no_grad():
        step.forward()
        step.forward()
    step.run()

    assert None not in step.measured()


def test_a_forward_that_no_backward_follows(step: Step) -> None:
    step.forward()
    kept = step.forward()
    assert no_profiler_is_left()
    with profile() as own:
        torch.ones(3)
    assert own.events()
    step.run()

    assert kept.shape == (ROWS, CLASSES)
    assert None not in step.measured()


def test_the_backward_of_an_earlier_forward_is_not_counted(step: Step) -> None:
    earlier, later = step.forward(), step.forward()
    F.cross_entropy(earlier, step.target).backward()
    assert step.measured() == (None,)
    F.cross_entropy(later, step.target).backward()
    assert step.measured() == (None,)
    step.run()

    assert None not in step.measured()


def test_the_user_profiles_the_first_step(step: Step) -> None:
    with profile(profile_memory=True) as own:
        step.run()
    assert step.measured() == (None,)
    assert any("mm" in event.name for event in own.events())
    step.run()

    assert None not in step.measured()


def test_the_user_profiles_from_forward_to_backward_only(step: Step) -> None:
    logits = step.forward()
    with profile(profile_memory=True) as own:
        F.cross_entropy(logits, step.target).backward()
    assert own.events()
    assert step.measured() == (None,)
    step.run()

    assert None not in step.measured()


def test_tangents_under_vmap(step: Step) -> None:
    """A Jacobian's rows at once: their tensors have no storage."""
    logits = step.forward()
    rows = torch.randn(2, ROWS, CLASSES)
    bias = step.model[-1].bias
    [together] = torch.autograd.grad(logits, bias, rows, is_grads_batched=True, retain_graph=True)
    [alone] = torch.autograd.grad(logits, bias, rows[1])

    assert torch.equal(together[1], alone)
    assert step.measured() == (None,)
    step.run()
    assert None not in step.measured()


def test_several_threads_at_once(step: Step) -> None:
    step.forward()  # compiled
    start, errors = threading.Barrier(3), []

    def run() -> None:
        start.wait()
        try:
            step.run()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert no_profiler_is_left()
    step.run()

    [peak] = step.measured()
    assert peak is None or peak == pytest.approx(step.plan().projected_peak_bytes, rel=0.001)


def test_another_thread(step: Step) -> None:
    thread = threading.Thread(target=step.run)
    thread.start()
    thread.join()

    assert None not in step.measured()


def test_two_graphs_of_one_step_keep_apart(fresh_compiler: None) -> None:
    before = len(remat_compiler.plans())
    first, second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def step(x: Tensor) -> Tensor:
        hidden = first(x).exp().sin()
        torch._dynamo.graph_break()
        loss: Tensor = second(hidden.exp().sin()).square().sum()
        return loss

    call = compiled(step)
    call(torch.randn(ROWS, WIDTH)).backward()

    for graph, peak in zip(remat_compiler.plans()[before:], measured_peaks()[before:], strict=True):
        assert peak == pytest.approx(graph.projected_peak_bytes, rel=0.02)
    assert len(measured_peaks()) == before + 2


def test_a_graph_that_is_kept_is_not_measured(step: Step) -> None:
    """It keeps what it has saved to the end, which the plan does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = F.cross_entropy(step.forward(), step.target)
        loss.backward(retain_graph=True)
        loss.backward()
        assert step.measured() == (None,)
        step.run()

    [peak] = step.measured()
    assert peak == pytest.approx(step.plan().projected_peak_bytes, rel=0.001)


def rows_that_are_set(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    loss: Tensor = model(x)[mask.nonzero().squeeze(1)].exp().sum()
    return loss


def as_many_as_are_set(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Only a number that backward reads depends on the mask, and no tensor of the plan."""
    loss: Tensor = model(x).exp().sum() * mask.nonzero().shape[0]
    return loss


@pytest.mark.parametrize("loss", [rows_that_are_set, as_many_as_are_set])
@pytest.mark.usefixtures("fresh_compiler")
def test_sizes_that_depend_on_contents_say_nothing_of_a_budget(loss: Callable[..., Tensor]) -> None:
    model, mask = nn.Linear(WIDTH, WIDTH), torch.arange(32) % 2 == 0  # fewer rows than would hide the guess
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(lambda x: loss(model, x, mask))
        with pytest.warns(RematWarning, match=r"projected as 8192 each, so nothing can be concluded") as caught:
            call(torch.randn(32, WIDTH)).backward()

    [warning] = [str(entry.message) for entry in caught if entry.category is RematWarning]
    assert "memory_budget" not in warning


@pytest.mark.inductor
def test_inductor(fresh_compiler: None, capfd: pytest.CaptureFixture[str]) -> None:
    step = Step(lowering="inductor", memory_budget="80%")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)
        step.run()
    captured = capfd.readouterr()

    assert "profiler" not in captured.err
    assert "Memory block" not in captured.err
    [peak] = step.measured()
    assert peak == pytest.approx(step.plan().projected_peak_bytes, rel=0.01)


# The watch alone.


class Code:
    """What a compiler hands out."""

    def __init__(self, current_callable: Callable[[list[Any]], Any]) -> None:
        self.current_callable = current_callable


KIB = 1024


def block(num_kib: int) -> Tensor:
    return torch.empty(num_kib * KIB, dtype=torch.uint8)


class Graphs:
    """A forward that needs 30 KiB and keeps 20, of which backward frees 10 before it needs 25; it returns 5."""

    def __init__(
        self, device_type: str = "cpu", projected_kib: int = 130, number: int = -1, num_outputs: int = 1
    ) -> None:
        self.number = record(plan(), 0.1) if number < 0 else number
        self.inputs = [block(100)]
        self.forward, self.backward = Code(self._forward), Code(self._backward)
        self.originals = (self.forward.current_callable, self.backward.current_callable)
        self.watch = FirstStep(device_type, num_outputs)
        of_forward = Signature(("primals_1", "primals_2"), ("out", "saved"), {})
        of_backward = Signature(("saved", "primals_1", "tangents_1"), ("gradient",), {})
        self.watch.add(CompiledGraph(of_forward, [self.inputs[0], 7], False, "", self.forward))
        own = replace(plan(), baseline_bytes=100 * KIB, budget_bytes=None, projected_peak_bytes=projected_kib * KIB)
        self.watch.watch(own, self.number)
        self.watch.add(CompiledGraph(of_backward, [], True, "", self.backward))

    def _forward(self, arguments: list[Any]) -> list[Tensor]:
        arguments.clear()
        results = [block(10), block(10)]
        block(10)
        return results

    def _backward(self, arguments: list[Any]) -> list[Tensor]:
        gradient = block(5)
        arguments.clear()
        block(25)
        return [gradient]

    def run_forward(self, size: int = 7) -> list[Tensor]:
        results: list[Tensor] = self.forward.current_callable([self.inputs[0], size])
        return results

    def run_backward(self, results: list[Tensor], tangent: Tensor) -> list[Tensor]:
        arguments = [results.pop(), self.inputs[0], tangent]
        del tangent
        gradients: list[Tensor] = self.backward.current_callable(arguments)
        return gradients

    @property
    def is_watched(self) -> bool:
        return (self.forward.current_callable, self.backward.current_callable) != self.originals

    @property
    def measured(self) -> int | None:
        return measured_peaks()[self.number]


def test_bytes_are_those_of_the_graph() -> None:
    """100 of inputs, 10 that stay, 5 of the gradient and 25: the saved value and the tangent are gone."""
    graphs = Graphs(projected_kib=140)
    graphs.run_backward(graphs.run_forward(), block(10))

    assert graphs.measured == 140 * KIB
    assert not graphs.is_watched


def test_an_output_that_is_saved_and_that_nobody_has_kept_counts_to_the_end() -> None:
    """As in the projection: the 10 of the saved value are there beside the 140."""
    graphs = Graphs(projected_kib=150, num_outputs=2)
    graphs.run_backward(graphs.run_forward(), block(10))

    assert graphs.measured == 150 * KIB


@pytest.mark.parametrize("storageless", [lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to_mkldnn()])
def test_a_tangent_without_storage_is_not_measured(storageless: Callable[[], Tensor]) -> None:
    graphs = Graphs(projected_kib=140)
    graphs.run_backward(graphs.run_forward(), storageless())
    assert graphs.measured is None
    graphs.run_backward(graphs.run_forward(), block(10))

    assert graphs.measured == 140 * KIB


def test_a_tangent_that_autograd_holds() -> None:
    graphs = Graphs(projected_kib=140)
    graphs.run_backward(graphs.run_forward(), torch.ones(()))

    assert graphs.measured == 140 * KIB + 4
    assert not graphs.is_watched


def test_what_is_off_is_a_warning() -> None:
    graphs = Graphs(projected_kib=120)
    with pytest.warns(RematWarning, match=r"g00-1a2b3c4d: the first step took 140.0 KiB at its peak, and 120.0 KiB"):
        graphs.run_backward(graphs.run_forward(), block(10))


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_an_error_leaves_no_profiler_and_goes_on(side: str) -> None:
    graphs = Graphs(projected_kib=140)
    code = graphs.forward if side == "forward" else graphs.backward

    def fail(_arguments: list[Any]) -> None:
        raise RuntimeError("out of luck")

    broken = FirstStep("cpu")
    signature = Signature(("primals_1",) if side == "forward" else ("saved", "primals_1", "tangents_1"), (), {})
    other = Code(fail)
    broken.watch(plan(), graphs.number)
    broken.add(CompiledGraph(signature, [None], side == "backward", "", other))
    if side == "backward":
        results = graphs.run_forward()
        broken.forward = graphs.watch.forward
        arguments = [results[1], graphs.inputs[0], block(10)]
    else:
        arguments = [graphs.inputs[0]]
    with pytest.raises(RuntimeError, match="out of luck"):
        other.current_callable(arguments)

    assert no_profiler_is_left()
    assert graphs.measured is None
    assert code.current_callable is not None
    graphs.run_backward(graphs.run_forward(), block(10))
    assert graphs.measured == 140 * KIB


def test_a_graph_that_never_trains_is_left_alone() -> None:
    graphs = Graphs()
    for _ in range(MAX_FORWARDS):
        graphs.run_forward()
    assert graphs.is_watched
    results = graphs.run_forward()
    assert not graphs.is_watched
    graphs.run_backward(results, block(10))

    assert graphs.measured is None


def test_sizes_that_were_not_planned_for_are_not_held_against_the_plan() -> None:
    graphs = Graphs(projected_kib=140)
    graphs.run_backward(graphs.run_forward(size=8), block(10))
    assert graphs.measured is None
    graphs.run_backward(graphs.run_forward(), block(10))

    assert graphs.measured == 140 * KIB


def test_a_tangent_with_gaps_keeps_its_layout() -> None:
    graphs = Graphs(projected_kib=160)  # nothing is freed before the end
    tangent = block(10)[::2]
    seen = []
    original = graphs.backward.current_callable

    def look(arguments: list[Any]) -> Any:
        seen.append((arguments[2].stride(), arguments[2].data_ptr()))
        return original(arguments)

    graphs.watch.originals.clear()
    graphs.watch._exchange(
        CompiledGraph(Signature(("saved", "primals_1", "tangents_1"), (), {}), [], True, "", Code(look))
    )
    code, _ = graphs.watch.originals[0]
    results = graphs.run_forward()
    code.current_callable([results[1], graphs.inputs[0], tangent])

    assert seen == [((2,), tangent.data_ptr())]


class Counter:
    """CUDA's peak counter."""

    def __init__(self, *peaks_bytes: int) -> None:
        self.peaks_bytes = list(peaks_bytes)

    def __call__(self, device: torch.device) -> int:
        assert device == torch.device("cuda")
        return self.peaks_bytes.pop(0)


def test_cuda_reads_the_peak_and_resets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", Counter(50, 60, 60, 130 * KIB))
    graphs = Graphs("cuda")
    graphs.run_backward(graphs.run_forward(), block(10))

    assert graphs.measured == 130 * KIB


def test_cuda_knows_nothing_below_an_earlier_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", Counter(*[900 * KIB] * 4))
    graphs = Graphs("cuda", projected_kib=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs.run_backward(graphs.run_forward(), block(10))

    assert graphs.measured is None
    assert not graphs.is_watched


def test_cuda_knows_forwards_peak_where_backward_stays_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", Counter(50, 130 * KIB, 130 * KIB, 130 * KIB))
    graphs = Graphs("cuda")
    graphs.run_backward(graphs.run_forward(), block(10))

    assert graphs.measured == 130 * KIB


def test_cuda_knows_nothing_below_a_peak_between_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward may need more than the forward, and less than the loss outside of the graph."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", Counter(50, 60 * KIB, 900 * KIB, 900 * KIB))
    graphs = Graphs("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs.run_backward(graphs.run_forward(), block(10))

    assert graphs.measured is None
    assert not graphs.is_watched


def test_cuda_peak_that_the_user_resets_inside_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", Counter(50, 130 * KIB, 70, 80 * KIB))
    graphs = Graphs("cuda")
    graphs.run_backward(graphs.run_forward(), block(10))

    assert graphs.measured == 130 * KIB


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_only_the_log_of_cpu_needs_inputs_held(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is nearly full, an input that lives longer than it must is an error of the first step."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", Counter(1, 1, 1, 1))
    graphs = Graphs(device_type)
    graphs.watch.graphs.clear()  # a compiler's own example inputs hold no memory
    alive: list[bool] = []
    results = graphs.run_forward()
    saved, given = results[1], weakref.ref(graphs.inputs[0])

    def look(arguments: list[Any]) -> list[Tensor]:
        arguments.clear()
        alive.append(given() is not None)
        return []

    code = Code(look)
    graphs.watch.add(CompiledGraph(Signature(("saved", "primals_1", "tangents_1"), (), {}), [], True, "", code))
    arguments = [saved, graphs.inputs.pop(), block(10)]
    code.current_callable(arguments)

    assert alive == [device_type == "cpu"]


# What is said.


@pytest.mark.parametrize("measured_mib", [100, 95, 105])
def test_nothing_is_said_within_five_percent(measured_mib: int) -> None:
    own = replace(plan(), projected_peak_bytes=100 * MIB, budget_bytes=120 * MIB)

    assert difference(own, measured_mib * MIB) is None


def test_nothing_is_said_of_a_few_scalars() -> None:
    own = replace(plan(), projected_peak_bytes=92, budget_bytes=100)

    assert difference(own, 112) is None
    assert difference(own, 92 + 65) is not None
    assert difference(replace(own, projected_peak_bytes=MIB, budget_bytes=MIB), MIB + 64) is None
    assert difference(replace(own, projected_peak_bytes=MIB, budget_bytes=MIB), MIB + 65) is not None


def test_over_the_budget_is_said_at_once() -> None:
    own = replace(plan(), projected_peak_bytes=100 * MIB, budget_bytes=100 * MIB)

    assert difference(own, 101 * MIB) == (
        "g00-1a2b3c4d: the first step took 101.0 MiB at its peak, and 100.0 MiB were projected (+1.0 %); that is"
        " 1.0 MiB over the budget of 100.0 MiB. memory_budget=103819405 (99.0 MiB) leaves room for the difference."
    )


def test_more_than_projected_within_the_budget() -> None:
    own = replace(plan(), projected_peak_bytes=100 * MIB, budget_bytes=120 * MIB)

    text = difference(own, 110 * MIB)
    assert text is not None
    assert text.endswith("(+10.0 %). The budget of 120.0 MiB holds all the same.")


def test_less_than_projected_leaves_room() -> None:
    own = replace(plan(), projected_peak_bytes=100 * MIB, budget_bytes=100 * MIB)

    text = difference(own, 80 * MIB)
    assert text is not None
    assert "(-20.0 %)" in text
    assert f"memory_budget={125 * MIB} (125.0 MiB) would give a faster plan" in text


def test_without_a_budget() -> None:
    own = replace(plan(), projected_peak_bytes=100 * MIB, budget_bytes=None)

    text = difference(own, 110 * MIB)
    assert text is not None
    assert text.endswith("A memory_budget would be off by as much: leave that much room.")

    text = difference(own, 90 * MIB)
    assert text is not None
    assert text.endswith("A memory_budget would be off by as much: it could be that much higher.")


@pytest.mark.parametrize(
    ("measured_mib", "verdict"), [(120, "(+20.0 %), 10.0 MiB over the budget."), (50, "(-50.0 %).")]
)
def test_a_budget_and_sizes_that_depend_on_contents(measured_mib: int, verdict: str) -> None:
    own = replace(plan(), projected_peak_bytes=100 * MIB, budget_bytes=110 * MIB)

    text = difference(own, measured_mib * MIB, is_guess=True)
    assert text is not None
    assert f"{verdict} Some of its sizes depend on the contents of tensors" in text
    assert "memory_budget" not in text
    assert difference(own, 101 * MIB, is_guess=True) is None


def test_such_a_size_among_the_values_of_the_plan() -> None:
    sizes = value("mm", shape=("2*u10 + 1", 16))
    own = replace(plan(), projected_peak_bytes=100 * MIB, budget_bytes=None, values=(sizes,))
    named = replace(own, values=(replace(sizes, shape=("s10", 16)),))

    assert "nothing can be concluded" in str(difference(own, 50 * MIB))
    assert "nothing can be concluded" not in str(difference(named, 50 * MIB))


# From Python.


def test_what_the_package_exports() -> None:
    assert remat_compiler.RematWarning is RematWarning
    assert {"RematWarning", "measured_peaks"} <= set(remat_compiler.__all__)
    assert all(hasattr(remat_compiler, name) for name in remat_compiler.__all__)
    number = record(plan(), 0.1)
    record_measurement(number, 5)
    assert remat_compiler.measured_peaks()[number] == 5
    assert len(remat_compiler.measured_peaks()) == len(remat_compiler.plans())


# What ``remat run`` ends with.


def printed(measured_bytes: int | None, budget_bytes: int | None) -> str:
    own = replace(plan(), projected_peak_bytes=100 * MIB, budget_bytes=budget_bytes)
    return "\n".join(text.plain for text in plan_table([own], [measured_bytes], [], None, 100))


def test_the_plan_table_holds_projected_and_measured() -> None:
    figures = "g00-1a2b3c4d took 101.0 MiB in its first step, projected were 100.0 MiB (+1.0%)"

    assert f"\n  {figures}\n" in printed(101 * MIB, None)
    assert f"\n  {figures}, within the budget\n" in printed(101 * MIB, 101 * MIB)
    assert f"\n  {figures}, over the budget\n" in printed(101 * MIB, 100 * MIB)
    assert "in its first step" not in printed(None, 100 * MIB)


def test_the_json_holds_the_measured_peak() -> None:
    plans = [plan(), plan()]
    records = json.loads(plans_json(plans, [5, None], []))

    assert [entry["measured_peak_bytes"] for entry in records] == [5, None]
    assert [RematPlan.from_json(json.dumps(entry), "here") for entry in records] == plans
