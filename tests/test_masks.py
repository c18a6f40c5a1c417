"""Masks go from forward to backward in a type that a CPU stores a vector of at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import TEST_SPEC
from oracle import FP32, Program, assert_same, compiled, rows, run_eager, run_steps
from torch import Tensor, fx, nn

from remat_compiler import torch_private
from remat_compiler.options import parse_options
from remat_compiler.partitioner import RematPartitioner


class Masked(nn.Module):
    """A mask that is cheaper to save than what it comes from; ``shows`` it to the caller too."""

    def __init__(self, shows: bool = False) -> None:
        super().__init__()
        self.shows = shows
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        mask = self.first(x).detach().sin() > 0
        out = torch.where(mask, self.second(x), 0.0).square().mean()
        return (out, mask) if self.shows else out


def partitioned(
    module: nn.Module, x: Tensor, lowering: str
) -> tuple[fx.GraphModule, fx.GraphModule, list[object], int]:
    traced = torch_private.traced_step(module, x)
    options = parse_options({"lowering": lowering, "num_microbatches": 1}, {}, frozenset())
    num_outputs, static = traced.num_forward_outputs, list(traced.static_inputs)
    forward, backward = RematPartitioner(options, TEST_SPEC)(
        torch_private.copy_of(traced.module), (), num_fwd_outputs=num_outputs, static_lifetime_input_indices=static
    )
    return forward, backward, list(traced.inputs), num_outputs


def handed_over(forward: fx.GraphModule, num_outputs: int) -> list[torch.dtype]:
    (output,) = forward.graph.find_nodes(op="output")
    return [node.meta["val"].dtype for node in output.args[0][num_outputs:]]


def gradients(module: nn.Module, x: Tensor, lowering: str) -> list[Tensor | None]:
    forward, backward, inputs, num_outputs = partitioned(module, x, lowering)
    with torch.no_grad():
        results = fx.Interpreter(forward).run(*inputs)
        found = fx.Interpreter(backward).run(*results[num_outputs:], torch.ones_like(results[0]))
    return list(found)


@pytest.mark.parametrize(("lowering", "mask"), [("inductor", torch.uint8), ("eager", torch.bool)])
def test_a_saved_mask_is_packed_where_inductor_writes_it(lowering: str, mask: torch.dtype) -> None:
    forward, _, _, num_outputs = partitioned(Masked(), torch.randn(64, 32), lowering)
    assert {torch.uint8, torch.bool} & set(handed_over(forward, num_outputs)) == {mask}


def test_a_packed_mask_gives_the_same_gradients() -> None:
    module, x = Masked(), torch.randn(64, 32)
    for packed, plain in zip(gradients(module, x, "inductor"), gradients(module, x, "eager"), strict=True):
        assert (packed is None) == (plain is None)
        assert packed is None or torch.equal(packed, plain)


def test_a_mask_that_the_caller_has_is_handed_over_as_it_is() -> None:
    forward, _, _, num_outputs = partitioned(Masked(shows=True), torch.randn(64, 32), "inductor")
    assert torch.uint8 not in handed_over(forward, num_outputs)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x)) * (layer(x).detach() > 0.1)
        return x.square().mean()


@pytest.mark.inductor
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_compiled_steps_with_masks_are_the_eager_step(num_microbatches: int) -> None:
    program = Program(Dropped, lambda: (rows(12, 32, requires_grad=False),), torch.float32)
    module = program.module()
    call = compiled(module, lowering="inductor", num_microbatches=num_microbatches)
    [found] = run_steps(program, module, call)
    [truth] = run_eager(program)
    assert_same(found, truth, FP32)
