"""What people expect of torch.compile goes on working when the backend is remat.

Nearly all on the eager lowering: what is tested is the way through Dynamo and AOTAutograd, which both lowerings share.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    TEST_SPEC,
    Lambda,
    Program,
    assert_same,
    check_at_budgets,
    compiled,
    installed_backend,
    relative_error,
    remat_error,
    rows,
    run_at,
    run_eager,
    run_remat,
    run_steps,
    smallest_peak,
    weighted_sum,
)
from torch import Tensor, fx, nn
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

import remat_compiler
from remat_compiler import BudgetInfeasibleError, ConfigError, RematError, RematWarning, torch_private
from remat_compiler.options import parse_options
from remat_compiler.partitioner import RematPartitioner
from remat_passes.plan import RematPlan, read_plan

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BATCH, WIDTH = 32, 8


def mlp(num_layers: int = 3) -> nn.Sequential:
    parts = [part for _ in range(num_layers) for part in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*parts)


def regression() -> Program:
    return Program(lambda: Lambda(lambda m, x: m.stack(x).square().mean(), stack=mlp()), lambda: (rows(BATCH, WIDTH),))


def new_plans(before: int) -> tuple[RematPlan, ...]:
    return remat_compiler.plans()[before:]


class PlansMade:
    """The plans made since it was created."""

    def __init__(self) -> None:
        self.before = len(remat_compiler.plans())

    def all(self) -> tuple[RematPlan, ...]:
        return remat_compiler.plans()[self.before :]

    def count(self) -> int:
        return len(self.all())


@pytest.fixture
def made(fresh_compiler: None) -> PlansMade:
    return PlansMade()


# -- when there is a plan, and when not


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_plan_where_no_gradient_is_asked_for(context: Callable[[], Any], made: PlansMade) -> None:
    program = regression()
    module = program.module().eval()
    call = compiled(module, memory_budget=1)  # a budget of one byte would be refused if anything were planned

    with context():
        found = call(*program.arguments())

    assert relative_error(found, module(*program.arguments())) < 1e-12
    assert not found.requires_grad
    assert made.count() == 0


def test_training_after_evaluation_and_back(made: PlansMade) -> None:
    program = Program(
        lambda: Lambda(
            lambda m, x: torch.sin(m.norm(F.dropout(x, 0.0, m.training) @ m.weight)).mean(),
            norm=nn.BatchNorm1d(WIDTH),
            weight=rows(WIDTH, WIDTH),
        ),
        lambda: (rows(BATCH, WIDTH),),
    )
    module, truth = program.module(), program.module()
    call = compiled(module)

    for training in (True, False, True, False):
        module.train(training), truth.train(training)
        [found], [expected] = (run_steps(program, m, c) for m, c in ((module, call), (truth, truth)))
        assert_same(found, expected)
    with torch.no_grad():
        assert relative_error(call(*program.arguments()), truth(*program.arguments())) < 1e-12
    assert made.count() == 2


def test_the_second_call_makes_no_new_plan(made: PlansMade) -> None:
    run_remat(regression(), num_steps=4)

    assert made.count() == 1


def test_several_graphs_after_a_graph_break(made: PlansMade) -> None:
    def step(m: nn.Module, x: Tensor) -> Tensor:
        x = m.first(x)
        torch._dynamo.graph_break()
        x = torch.sin(m.second(x))
        print(end="")
        return m.third(x).square().mean()

    program = Program(lambda: Lambda(step, first=mlp(1), second=mlp(1), third=mlp(1)), lambda: (rows(BATCH, WIDTH),))

    for found, expected in zip(run_remat(program, 2), run_eager(program, 2), strict=True):
        assert_same(found, expected)
    assert made.count() == 3
    assert len({plan.graph_id for plan in made.all()}) == 3


def test_fullgraph() -> None:
    program = regression()
    module = program.module()
    call = torch.compile(module, backend=installed_backend(), fullgraph=True, options={"lowering": "eager"})

    [found] = run_steps(program, module, call)

    assert_same(found, run_eager(program)[0])


# -- shapes


def of_batch(program: Program, batch: int) -> Program:
    return dataclasses.replace(program, inputs=lambda: (rows(batch, WIDTH),))


def dropout_free_attention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(-1, 4, 3 * WIDTH).chunk(3, dim=-1)
    return torch.sin(m.out(F.scaled_dot_product_attention(q, k, v))).square().mean()


def symbolic_program() -> Program:
    def build() -> nn.Module:
        return Lambda(dropout_free_attention, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))

    return Program(build, lambda: (rows(BATCH, WIDTH),))


@pytest.mark.parametrize("budget", [None, "100%"])
def test_a_marked_dynamic_size_needs_one_plan(budget: str | None, made: PlansMade) -> None:
    program = symbolic_program()
    module, truth = program.module(), program.module()
    call = compiled(module, memory_budget=budget)

    def marked(x: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return call(x)

    for batch in (32, 64, 12):
        [found] = run_steps(of_batch(program, batch), module, marked)
        [expected] = run_steps(of_batch(program, batch), truth, truth)
        assert_same(found, expected)
    [plan] = made.all()
    assert [hint for _, hint in plan.symbols] == [32]
    assert any("symbolic" in note and "= 32" in note for note in plan.notes)


def test_another_size_makes_the_plan_symbolic(made: PlansMade) -> None:
    program = symbolic_program()
    module, truth = program.module(), program.module()
    call = compiled(module)

    for batch in (32, 48, 64, 20):
        [found] = run_steps(of_batch(program, batch), module, call)
        [expected] = run_steps(of_batch(program, batch), truth, truth)
        assert_same(found, expected)
    static, symbolic = made.all()
    assert static.symbols == ()
    assert [hint for _, hint in symbolic.symbols] == [48]


def test_dynamic_sizes_at_the_smallest_budget() -> None:
    """Sizes have to reach backward too when what carried them is recomputed."""
    program = symbolic_program()
    call_options = {"memory_budget": smallest_peak(program)}
    module, truth = program.module(), program.module()
    torch._dynamo.reset()
    call = torch.compile(
        module, backend=installed_backend(), dynamic=True, options={"lowering": "eager", **call_options}
    )

    for batch in (32, 16, 64):
        [found] = run_steps(of_batch(program, batch), module, call)
        [expected] = run_steps(of_batch(program, batch), truth, truth)
        assert_same(found, expected)


def test_sizes_that_depend_on_contents() -> None:
    def step(m: nn.Module, x: Tensor) -> Tensor:
        chosen = x[x.detach()[:, 0] > 0]
        return torch.sin(m.layer(torch.sin(chosen))).square().sum()

    program = Program(lambda: Lambda(step, layer=nn.Linear(WIDTH, WIDTH)), lambda: (rows(BATCH, WIDTH),))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_at_budgets(program, count=2)


@pytest.mark.parametrize("shape", [(0, WIDTH), (1, WIDTH)])
def test_a_batch_of_none_or_one(shape: tuple[int, ...]) -> None:
    def build() -> nn.Module:
        return Lambda(lambda m, x: torch.sin(m.stack(x)).sum(), stack=mlp(2))

    check_at_budgets(Program(build, lambda: (rows(*shape),)), count=2)


def test_empty_tensors_beside_full_ones() -> None:
    def step(m: nn.Module, x: Tensor, nothing: Tensor) -> Tensor:
        both = torch.cat([torch.sin(x @ m.weight), torch.exp(nothing @ m.weight)])
        return torch.sin(both).sum() + torch.empty(0).sum()

    program = Program(lambda: Lambda(step, weight=rows(WIDTH, WIDTH)), lambda: (rows(BATCH, WIDTH), rows(0, WIDTH)))
    check_at_budgets(program, count=2)


# -- options


class HandedError(RuntimeError):
    """What the backend would have handed to Inductor."""

    def __init__(self, options: dict[str, object], partitioner: RematPartitioner) -> None:
        super().__init__("not compiled: the test only looks")
        self.options, self.partitioner = options, partitioner


@pytest.fixture
def inductor_sees(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HandedError]:
    """Compile a small function and return what reaches Inductor, instead of compiling for seconds."""

    def stop(
        _module: object, _inputs: object, options: dict[str, object], partitioner: RematPartitioner, _read: object
    ) -> None:
        raise HandedError(dict(options), partitioner)

    def compile_with(**keywords: Any) -> HandedError:
        with pytest.raises(Exception, match="only looks") as caught:
            torch.compile(torch.sin, backend=installed_backend(), **keywords)(rows(3))
        handed = remat_error(caught.value)
        assert isinstance(handed, HandedError)
        return handed

    monkeypatch.setattr(torch_private, "compile_with_inductor", stop)
    return compile_with


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"])
def test_a_mode_passes_through(mode: str, inductor_sees: Callable[..., HandedError]) -> None:
    assert inductor_sees(mode=mode).options == torch._inductor.list_mode_options(mode)


def test_the_default_mode_adds_nothing(inductor_sees: Callable[..., HandedError]) -> None:
    assert inductor_sees(mode="default").options == inductor_sees().options == {}


def test_inductor_options_pass_through(inductor_sees: Callable[..., HandedError]) -> None:
    handed = inductor_sees(options={"memory_budget": "90%", "max_autotune": True, "epilogue_fusion": False})

    assert handed.options == {"max_autotune": True, "epilogue_fusion": False}
    assert handed.partitioner.options.memory_budget is not None


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(Exception, match="max-autotun") as caught:
        torch.compile(torch.sin, backend=installed_backend(), mode="max-autotun")(rows(3))

    error = remat_error(caught.value)
    assert isinstance(error, ConfigError)
    assert "Did you mean 'max-autotune'?" in str(caught.value)
    assert "reduce-overhead" in str(error)


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch, made: PlansMade) -> None:
    monkeypatch.setenv("REMAT_MEMORY_BUDGET", "1")
    monkeypatch.setenv("REMAT_LOWERING", "inductor")

    run_remat(regression(), memory_budget="100%", lowering="eager")

    [plan] = made.all()
    assert plan.budget_bytes == plan.inductor_peak_bytes
    assert plan.lowering == "eager"


def test_the_environment_counts_without_options(monkeypatch: pytest.MonkeyPatch, made: PlansMade) -> None:
    monkeypatch.setenv("REMAT_MEMORY_BUDGET", "100%")
    monkeypatch.setenv("REMAT_LOWERING", "eager")
    program = regression()
    module = program.module()

    run_steps(program, module, torch.compile(module, backend=installed_backend()))

    assert made.all()[0].budget_bytes == made.all()[0].inductor_peak_bytes


OPTIONS: list[dict[str, object]] = [
    {},
    {"memory_budget": "1GiB"},
    {"memory_budget": "2GiB"},
    {"memory_budget": "60%"},
    {"num_microbatches": "auto"},
    {"batch_norm": "per_microbatch"},
    {"lowering": "eager"},
    {"fallback": "inductor"},
    {"device_spec": "h200"},
    {"max_autotune": True},
    {"max_autotune": False},
]


def partitioner(options: dict[str, object], **spec: Any) -> RematPartitioner:
    parsed = parse_options(options, {}, torch_private.inductor_option_names())
    return RematPartitioner(parsed, dataclasses.replace(TEST_SPEC, **spec))


def test_the_cache_key_changes_with_each_option_and_figure(tmp_path: Path) -> None:
    options = [*OPTIONS, {"dump_dir": str(tmp_path / "a")}, {"dump_dir": str(tmp_path / "b")}]
    keys = [partitioner(each).uuid() for each in options]
    keys += [
        partitioner({}, name="other").uuid(),
        partitioner({}, bandwidth_bytes_per_us=1.0).uuid(),
        partitioner({}, matmul_flops_per_us={**TEST_SPEC.matmul_flops_per_us, "float32": 1.0}).uuid(),
        partitioner({}, memory_bytes=1).uuid(),
    ]

    assert len(set(keys)) == len(keys)
    assert all(isinstance(key, str) for key in keys)


def test_the_cache_key_is_the_same_for_the_same_options() -> None:
    assert [partitioner(each).uuid() for each in OPTIONS] == [partitioner(dict(each)).uuid() for each in OPTIONS]
    assert partitioner({"memory_budget": "1GiB"}).uuid() == partitioner({"memory_budget": 2**30}).uuid()


# -- what goes in and comes out


def tied(m: nn.Module, tokens: Tensor) -> Tensor:
    hidden = torch.tanh(m.stack(m.embedding(tokens)))
    return F.cross_entropy(m.head(hidden).flatten(0, 1), tokens.roll(-1, 1).flatten())


def build_tied() -> nn.Module:
    module = Lambda(tied, embedding=nn.Embedding(11, WIDTH), stack=mlp(2), head=nn.Linear(WIDTH, 11, bias=False))
    module.get_submodule("head").weight = module.get_submodule("embedding").weight
    return module


def test_tied_weights_get_one_gradient() -> None:
    check_at_budgets(Program(build_tied, lambda: (torch.randint(0, 11, (4, 6)),)))


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return module


@pytest.mark.parametrize("names", [("stack.1",), ("stack.0", "stack.4"), ("stack.3", "stack.7.bias")])
@pytest.mark.parametrize("input_grad", [True, False])
def test_frozen_parameters_get_none(names: tuple[str, ...], input_grad: bool) -> None:
    program = Program(
        lambda: frozen(Lambda(lambda m, x: m.stack(x).square().mean(), stack=mlp()), *names),
        lambda: (rows(BATCH, WIDTH, requires_grad=input_grad),),
    )
    check_at_budgets(program, count=2, num_steps=1)


OUTPUTS: dict[str, Callable[..., Any]] = {
    "several": lambda m, x: (m.stack(x), torch.exp(x), x.square().mean()),
    "a dict": lambda m, x: {"logits": m.stack(x), "loss": m.stack(x).mean()},
    "views": lambda m, x: (lambda y: (y.view(-1), y[0], y.t(), y[:, ::2]))(torch.sin(m.stack(x))),
    "a view and its base": lambda m, x: (lambda y: (y, y[1:3]))(torch.sin(m.stack(x))),
    "aliases of an input": lambda m, x: (x, x.view(-1), torch.sin(m.stack(x)), x[0]),
    "integers": lambda m, x: (m.stack(x).square().mean(), m.stack(x).argmax(1), torch.arange(3)),
    "booleans": lambda m, x: (torch.sin(m.stack(x)), m.stack(x) > 0),
    "one without gradient": lambda m, x: (torch.sin(m.stack(x)), torch.sin(m.stack(x)).detach()),
    "what backward reads": lambda m, x: (lambda y: (y, torch.sin(y).sum()))(torch.exp(m.stack(x))),
    "the same twice": lambda m, x: (lambda y: (y, y))(torch.exp(m.stack(x))),
    "an expanded one": lambda m, x: m.stack(x).mean(0, keepdim=True).expand(5, -1),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_of_every_kind(case: str) -> None:
    program = Program(lambda: Lambda(OUTPUTS[case], stack=mlp(2)), lambda: (rows(BATCH, WIDTH),))

    check_at_budgets(program, count=2)


def test_views_of_outputs_share_storage_as_in_eager() -> None:
    program = Program(lambda: Lambda(OUTPUTS["a view and its base"], stack=mlp(1)), lambda: (rows(BATCH, WIDTH),))
    whole, part = compiled(program.module())(*program.arguments())

    assert part.data_ptr() == whole[1:3].data_ptr()


def test_an_output_that_nobody_differentiates() -> None:
    program = Program(
        lambda: Lambda(lambda m, x: (m.first(x).square().mean(), m.second(x)), first=mlp(1), second=mlp(1)),
        lambda: (rows(BATCH, WIDTH),),
    )
    module, truth = program.module(), program.module()
    compiled(module)(*program.arguments())[0].backward()
    truth(*program.arguments())[0].backward()

    for (name, parameter), expected in zip(module.named_parameters(), truth.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name  # AOTAutograd may hand out zeros
        else:
            assert parameter.grad is not None
            assert relative_error(parameter.grad, expected.grad) < 1e-10, name


def test_keyword_arguments_numbers_and_none() -> None:
    def step(x: Tensor, weight: Tensor, *, scale: float, power: int, bias: Tensor | None = None) -> dict[str, Any]:
        hidden = torch.sin(x @ weight) * scale**power
        return {"loss": hidden.sum(), "bias": bias, "power": power}

    call = compiled(step)
    for scale, power in ((0.5, 2), (0.25, 3), (1.5, 3)):
        x, weight = rows(BATCH, WIDTH), rows(WIDTH, WIDTH)
        found, expected = (function(x, weight, scale=scale, power=power) for function in (call, step))
        grads = [torch.autograd.grad(result["loss"], (x, weight)) for result in (found, expected)]
        assert [relative_error(a, b) for a, b in zip(*grads, strict=True)] == pytest.approx([0, 0], abs=1e-6)
        assert (found["bias"], found["power"]) == (None, power)


def test_complex_numbers() -> None:
    def step(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.fft(torch.sin(x @ m.weight)) * torch.exp(1j * m.phase)
        return torch.fft.ifft(spectrum).abs().square().mean(), spectrum

    program = Program(lambda: Lambda(step, weight=rows(WIDTH, WIDTH), phase=rows(WIDTH)), lambda: (rows(BATCH, WIDTH),))
    check_at_budgets(program, count=2)


@pytest.mark.parametrize(
    "layout",
    [
        lambda: torch.randn(WIDTH, BATCH).t(),
        lambda: torch.randn(BATCH, 2 * WIDTH)[:, ::2],
        lambda: torch.randn(1, WIDTH).expand(BATCH, WIDTH),
        lambda: torch.randn(BATCH * WIDTH + 3)[3:].view(BATCH, WIDTH),
    ],
    ids=["transposed", "strided", "expanded", "offset"],
)
def test_inputs_of_every_layout(layout: Callable[[], Tensor]) -> None:
    program = dataclasses.replace(regression(), inputs=lambda: (layout().requires_grad_(),), dtype=None)

    check_at_budgets(program, count=2, num_steps=1, tolerance=1e-5)


def test_channels_last_convolutions() -> None:
    def build() -> nn.Module:
        stack = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=2), nn.Tanh())
        return Lambda(lambda m, x: m.stack(x).square().mean(), stack=stack)

    def images() -> tuple[Tensor]:
        return (torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last).requires_grad_(),)

    check_at_budgets(Program(build, images), count=2)


# -- calls within calls


def test_one_layer_called_twice_in_one_graph() -> None:
    check_at_budgets(
        Program(
            lambda: Lambda(lambda m, x: m.stack(torch.sin(m.stack(x))).square().mean(), stack=mlp(1)),
            lambda: (rows(BATCH, WIDTH),),
        ),
        count=2,
    )


def test_a_compiled_layer_called_twice_in_one_step() -> None:
    """Two forwards, then two backwards of the same compiled graph."""
    program = Program(
        lambda: Lambda(lambda m, x: m.stack(torch.sin(m.stack(x))).square().mean(), stack=mlp(1)),
        lambda: (rows(BATCH, WIDTH),),
    )
    module = program.module()
    module.stack = compiled(module.stack)
    [found] = run_steps(program, module, module)

    expected = run_eager(program)[0]
    gradients = {name.replace("_orig_mod.", ""): gradient for name, gradient in found.gradients.items()}
    assert_same(dataclasses.replace(found, gradients=gradients), expected)


def test_a_compiled_function_within_a_compiled_one() -> None:
    inner = compiled(lambda x: torch.sin(torch.exp(x)))
    program = Program(
        lambda: Lambda(lambda m, x: (inner(x @ m.weight) + inner(x)).sum(), weight=rows(WIDTH, WIDTH)),
        lambda: (rows(BATCH, WIDTH),),
    )

    for found, expected in zip(run_remat(program, 2), run_eager(program, 2), strict=True):
        assert_same(found, expected)


def test_hooks_on_modules_and_tensors() -> None:
    def doubled(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output * 2

    def build() -> nn.Module:
        stack = mlp(2)
        stack[2].register_forward_hook(doubled)
        stack[4].register_forward_pre_hook(lambda _module, inputs: (torch.sin(inputs[0]),))
        stack[1].weight.register_hook(lambda grad: grad * 3)
        return Lambda(hooked, stack=stack)

    def hooked(m: nn.Module, x: Tensor) -> Tensor:
        hidden = m.stack(x)
        hidden.register_hook(lambda grad: grad * 0.5)
        return torch.sin(hidden).square().mean()

    check_at_budgets(Program(build, lambda: (rows(BATCH, WIDTH),)), count=2)


def test_hooks_after_a_gradient_is_accumulated() -> None:
    seen: list[str] = []

    def build() -> nn.Module:
        module = Lambda(lambda m, x: m.stack(x).square().mean(), stack=mlp(1))
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _parameter, name=name: seen.append(name))
        return module

    run_remat(Program(build, lambda: (rows(BATCH, WIDTH),)))

    assert sorted(seen) == ["stack.0.bias", "stack.0.weight", "stack.1.bias", "stack.1.weight"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_regions(reentrant: bool) -> None:
    def step(m: nn.Module, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) + torch.sin(x)
        return x.square().mean()

    program = Program(
        lambda: Lambda(step, layers=nn.ModuleList([mlp(1) for _ in range(3)])), lambda: (rows(BATCH, WIDTH),)
    )
    for budget in (None, "100%"):
        for found, expected in zip(run_remat(program, 2, memory_budget=budget), run_eager(program, 2), strict=True):
            assert_same(found, expected)


def chosen_branch(m: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.sin(x @ m.weight)
    branch = torch.cond(x.detach().sum() > 0, lambda y: torch.sin(y) * 2, torch.exp, (hidden,))
    return torch.sin(branch @ m.weight).sum()


def scanned_rows(m: nn.Module, x: Tensor) -> Tensor:
    start = torch.zeros(WIDTH, dtype=x.dtype)
    return scan(lambda carry, row: (carry + torch.sin(row), carry * row), start, x @ m.weight)[1].sum()


def assigned_slices(m: nn.Module, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, ::2] = torch.sin(x @ m.weight)[:, ::2]
    y[1:] += torch.exp(x)[1:]
    return torch.sin(y).sum()


GRAPHS: dict[str, Callable[..., Tensor]] = {
    "cond": chosen_branch,
    "scan": scanned_rows,
    "a constant": lambda m, x: torch.sin(torch.sin(x @ m.weight) * torch.tensor([1.0, -1.0] * (WIDTH // 2))).sum(),
    "vmap": lambda m, x: torch.vmap(lambda row: torch.sin(m.weight @ row).sum())(x).square().sum(),
    "assigned slices": assigned_slices,
    "scatter": lambda m, x: (
        torch.zeros(5, WIDTH).double().index_add(0, torch.arange(BATCH) % 5, x @ m.weight).sin().sum()
    ),
    "sort": lambda m, x: (torch.sin(x @ m.weight).sort(0)[0] * torch.arange(BATCH).view(-1, 1)).sum(),
    "einsum": lambda m, x: torch.sin(torch.einsum("bi,ij,bj->b", x, m.weight, torch.sin(x))).sum(),
    "inverse": lambda m, x: (torch.linalg.inv(m.weight @ m.weight.t() + torch.eye(WIDTH)) @ torch.sin(x).t()).sum(),
    "attention": lambda m, x: F.scaled_dot_product_attention(*(torch.sin(x @ m.weight).view(1, 4, 8, 8),) * 3).sum(),
    "pooling": lambda m, x: F.max_pool2d(torch.sin(x @ m.weight).view(1, 4, 8, 8), 3, 2, 1).square().sum(),
    "no_grad inside": lambda m, x: (torch.sin(x @ m.weight) * without_gradient(x @ m.weight)).sum(),
}


@torch.no_grad()
def without_gradient(x: Tensor) -> Tensor:
    return torch.exp(torch.sin(x))


@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_of_many_kinds(graph: str) -> None:
    program = Program(lambda: Lambda(GRAPHS[graph], weight=rows(WIDTH, WIDTH)), lambda: (rows(BATCH, WIDTH),))

    check_at_budgets(program, count=2, num_steps=1)


def test_a_region_that_is_compiled_once_and_called_twice() -> None:
    """AOTAutograd partitions the region's own graphs too, so there is more than one plan."""
    layer = torch.compiler.nested_compile_region(lambda x, weight: torch.sin(torch.sin(x @ weight) @ weight))
    program = Program(
        lambda: Lambda(lambda m, x: layer(layer(x, m.weight), m.weight).sum(), weight=rows(WIDTH, WIDTH)),
        lambda: (rows(BATCH, WIDTH),),
    )

    for budget in (None, "100%"):
        for found, expected in zip(run_remat(program, 2, memory_budget=budget), run_eager(program, 2), strict=True):
            assert_same(found, expected)


def test_a_number_read_from_a_tensor() -> None:
    def step(m: nn.Module, x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x @ m.weight) * x.detach().sum().item()).sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check_at_budgets(
            Program(lambda: Lambda(step, weight=rows(WIDTH, WIDTH)), lambda: (rows(BATCH, WIDTH),)), count=2
        )


def test_a_function_of_the_user_s_own_with_its_backward() -> None:
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            context.save_for_backward(torch.exp(x))
            return x**3

        @staticmethod
        def backward(context: Any, grad: Tensor) -> Tensor:
            return grad * context.saved_tensors[0]  # not the derivative: nothing may be derived anew

    program = Program(
        lambda: Lambda(lambda m, x: torch.sin(Cubed.apply(torch.sin(x) @ m.weight)).sum(), weight=rows(WIDTH, WIDTH)),
        lambda: (rows(BATCH, WIDTH),),
    )
    check_at_budgets(program, count=2)


# -- training


@pytest.mark.parametrize("budget", [None, "100%", 0])
def test_autocast_is_no_further_from_the_truth_than_in_eager(budget: str | int | None) -> None:
    """The truth is fp64; 0 stands for the smallest budget."""
    mixed = regression().in_dtype(torch.float32, autocast=torch.bfloat16)
    [truth] = run_eager(regression())
    [eager] = run_eager(mixed)
    [found] = run_remat(mixed, memory_budget=smallest_peak(mixed) if budget == 0 else budget)

    for name, expected in truth.gradients.items():
        assert expected is not None
        ours, theirs = found.gradients[name], eager.gradients[name]
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == theirs.dtype == torch.float32
        assert relative_error(ours, expected) <= 1.5 * relative_error(theirs, expected) + 1e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_no_further_from_the_truth_than_in_eager(dtype: torch.dtype) -> None:
    narrow = regression().in_dtype(dtype)
    [truth], [eager] = run_eager(regression()), run_eager(narrow)
    [found] = run_remat(narrow, memory_budget=smallest_peak(narrow))

    for name, expected in truth.gradients.items():
        ours, theirs = found.gradients[name], eager.gradients[name]
        assert relative_error(ours, expected) <= 1.5 * relative_error(theirs, expected) + 1e-6, name


def test_gradients_of_two_calls_add_up() -> None:
    program = regression()
    module, truth = program.module(), program.module()
    call = compiled(module, memory_budget=smallest_peak(program))

    for function in (call, truth):
        for batch in (BATCH, BATCH):
            torch.manual_seed(batch)
            function(rows(batch, WIDTH).double()).backward()
    errors = [relative_error(a.grad, b.grad) for a, b in zip(module.parameters(), truth.parameters(), strict=True)]
    assert errors == pytest.approx([0.0] * len(errors), abs=1e-10)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_several_training_steps_equal_eager(make: Callable[..., torch.optim.Optimizer]) -> None:
    program = Program(build_tied, lambda: (torch.randint(0, 11, (4, 6)),))
    smallest = smallest_peak(program)
    module, truth = program.module(), program.module()
    pairs = [(compiled(module, memory_budget=smallest), module), (truth, truth)]
    losses: list[list[float]] = [[], []]

    for kept, (function, parameters) in zip(losses, pairs, strict=True):
        optimizer = make(parameters.parameters(), lr=0.05)
        for _ in range(6):
            loss = function(*program.arguments())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters.parameters(), 1.0)
            optimizer.step()
            kept.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][-1] < losses[0][0]


def test_a_step_that_takes_its_own_gradients() -> None:
    """``torch.autograd.grad`` of a compiled loss, without ``.grad`` fields."""
    program = regression()
    module, truth = program.module(), program.module()
    [x] = program.arguments()

    found, expected = (
        torch.autograd.grad(call(x), [x, *m.parameters()]) for call, m in ((compiled(module), module), (truth, truth))
    )

    assert [relative_error(a, b) for a, b in zip(found, expected, strict=True)] == pytest.approx([0.0] * 13, abs=1e-10)


def test_two_models_in_one_process(made: PlansMade) -> None:
    first, second = regression(), Program(build_tied, lambda: (torch.randint(0, 11, (4, 6)),))
    modules = [first.module(), second.module()]
    calls = [torch.compile(m, backend=installed_backend(), options={"lowering": "eager"}) for m in modules]

    for _ in range(2):
        for program, module, call in zip((first, second), modules, calls, strict=True):
            [found] = run_steps(program, module, call)
            assert_same(found, run_eager(program)[0])
    assert made.count() == 2


def test_a_copy_of_a_compiled_module_trains_by_itself() -> None:
    program = regression()
    module = program.module()
    call = compiled(module)
    run_steps(program, module, call)
    other = copy.deepcopy(module)

    [found] = run_steps(program, other, compiled(other))

    assert_same(found, run_eager(program)[0])


# -- errors and the way out of them


def infeasible(**options: object) -> Exception:
    with pytest.raises(Exception, match="cannot be met") as caught:
        run_remat(regression(), memory_budget=100, **options)
    return caught.value


def test_a_refusal_reaches_the_user_through_dynamo() -> None:
    error = infeasible()
    inner = remat_error(error)

    assert isinstance(inner, BudgetInfeasibleError)
    assert isinstance(inner, RematError)
    assert "100 bytes" in str(error)
    assert "smallest peak" in str(error)
    assert "BudgetInfeasibleError" in str(error)
    assert str(inner) in str(error)


def test_after_a_refusal_a_larger_budget_works() -> None:
    infeasible()

    run = run_at(regression(), smallest_peak(regression()))

    assert_same(run.outcomes[0], run_eager(regression())[0])


def test_a_refused_percentage_says_of_what_it_is_one() -> None:
    """As at the last, smaller batch of an epoch, whose graph is mostly parameters and gradients."""
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    step = torch.compile(
        lambda x: net(x).square().mean(), backend="remat", options={"memory_budget": "60%", "lowering": "eager"}
    )
    step(torch.randn(2048, 64)).backward()
    with pytest.raises(Exception, match="cannot be met") as caught:
        step(torch.randn(4, 64))

    text = str(remat_error(caught.value))
    assert re.search(r"memory_budget is '60%', and plain Inductor would need [\d.]+ \wiB for this graph", text)
    assert re.search(r"which starts at .*test_backend.py:\d+\. Each graph counts by itself", text)
    assert "a number of bytes is the same for all." in text


def test_a_refused_compile_leaves_no_plan(made: PlansMade) -> None:
    infeasible()

    assert made.count() == 0


@pytest.mark.inductor
def test_fallback_warns_and_trains_on(made: PlansMade) -> None:
    """As plain Inductor would, whatever the lowering."""
    program = Program(
        lambda: Lambda(lambda m, x: m.layer(torch.sin(x)).sin().sum(), layer=nn.Linear(WIDTH, WIDTH)),
        lambda: (rows(BATCH, WIDTH),),
    )
    with pytest.warns(RematWarning, match=r"plain Inductor.*cannot be met"):
        outcomes = run_remat(program, num_steps=2, memory_budget=100, fallback="inductor")

    for found, expected in zip(outcomes, run_eager(program, 2), strict=True):
        assert_same(found, expected)
    assert made.count() == 0


def test_fallback_does_nothing_where_nothing_is_wrong(made: PlansMade) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run_remat(regression(), fallback="inductor")

    assert made.count() == 1


# -- plans and their files


def test_the_number_of_slices_is_weighed_with_a_budget_and_only_then() -> None:
    [plan] = plans_of(memory_budget="100%")
    assert len(plan.candidates) > 1

    [plan] = plans_of(num_microbatches="auto")
    assert (plan.num_microbatches, plan.candidates) == (1, ())


def plans_of(program: Program | None = None, **options: object) -> Sequence[RematPlan]:
    made = PlansMade()
    run_remat(program or regression(), **options)
    return made.all()


def test_notes_say_when_nothing_is_gained() -> None:
    """One product: nothing between forward and backward but the inputs."""
    linear = Program(
        lambda: Lambda(lambda m, x: (x @ m.weight).sum(), weight=rows(WIDTH, 4)), lambda: (rows(4, WIDTH),)
    )

    assert any("nothing is gained" in note for note in plans_of(linear)[0].notes)


def test_a_plan_describes_the_step() -> None:
    [plan] = plans_of(memory_budget="100%")

    assert plan.torch_version == torch.__version__
    assert plan.device == TEST_SPEC.name
    assert plan.num_microbatches == 1
    assert plan.gradient_bytes == 8 * (3 * (WIDTH * WIDTH + 3 * WIDTH) + BATCH * WIDTH)
    assert plan.baseline_bytes == plan.gradient_bytes  # here each parameter and input has a gradient
    assert plan.lower_bound_us <= plan.step_us
    assert {value.decision for value in plan.values} == {"save", "recompute", "free"}
    assert all(value.reason for value in plan.values)
    inner = [value for value in plan.values if "mm" in value.op or "rsqrt" in value.op]
    assert inner
    assert all(value.module.startswith("stack.") and "module.py" not in value.source for value in inner)


def test_dumped_plans_read_back_equal_and_nothing_else_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, folder = tmp_path / "working", tmp_path / "plans" / "deep"
    working.mkdir()
    monkeypatch.chdir(working)

    plans = [*plans_of(dump_dir=str(folder)), *plans_of(memory_budget="100%", dump_dir=str(folder))]

    assert list(working.iterdir()) == []
    for plan in plans:
        path = folder / f"{plan.graph_id}.plan.json"
        assert read_plan(path) == plan
        record = json.loads(path.read_text())
        assert list(record) == sorted(record)
        assert record["schema"] == 1
    assert {path.suffix for path in folder.iterdir()} == {".json", ".txt"}
    assert not [path for path in folder.iterdir() if path.name.endswith(".part")]


def test_nothing_is_written_without_a_dump_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    plans_of(memory_budget="100%")

    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_what_forward_hands_to_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry for entry: what is saved goes over, what is recomputed does not."""
    handed: list[set[str]] = []
    original = RematPartitioner.__call__

    def recording(self: RematPartitioner, *arguments: Any, **keywords: Any) -> Any:
        forward, backward = original(self, *arguments, **keywords)
        handed.append({node.name for node in inputs_of(backward)})
        return forward, backward

    monkeypatch.setattr(RematPartitioner, "__call__", recording)
    program = regression()
    smallest = smallest_peak(program, num_microbatches=1)
    plans = [run_at(program, budget, num_microbatches=1).plan for budget in (None, smallest)]

    for plan, names in zip(plans, handed, strict=True):
        assert {value.name for value in plan.values if value.decision == "save"} <= names
        assert not names & {value.name for value in plan.values if value.decision == "recompute"}


def inputs_of(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def test_values_without_a_gradient_path_leave_nothing_to_plan(made: PlansMade) -> None:
    program = regression()
    module = frozen(program.module(), "stack")
    [x] = program.arguments()

    found = compiled(module)(x.detach())

    assert relative_error(found, module(x.detach())) < 1e-12
    assert made.count() == 0


def test_weighted_sum_gives_each_element_its_own_weight() -> None:
    """The oracle itself: permuted gradients must not look right."""
    x = torch.zeros(3, requires_grad=True)
    weighted_sum((x, x * 1)).backward()

    assert x.grad is not None
    assert len(set(x.grad.tolist())) == 3
