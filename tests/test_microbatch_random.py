"""Random steps in micro-batches: layers, losses, layouts and sizes that nobody has put together by hand.

A step is equal to the unsplit one, or it is refused; it may be refused only where its samples meet each other. Seeds
are fixed, and the number of a failing test is all that is needed to build its step again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from microbatch_programs import CLASSES, LOSSES, NETS, WIDTH, check_equal_or_refused, perceptron
from oracle import Lambda, Program
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_compiler")

NUM_PROGRAMS = 300
WIDE = 64  # the hidden layer of nets beside which a product of all samples with all is small


def block(function: Callable[..., Tensor], **parts: nn.Module | Tensor) -> nn.Module:
    return Lambda(lambda module, x: function(module, x), **parts)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# Each takes (batch, time, WIDTH) to the same shape, and each sample by itself.
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "leaky relu": nn.LeakyReLU,
    "hardtanh": nn.Hardtanh,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm of a sample": lambda: block(lambda m, x: F.layer_norm(x, x.shape[1:])),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "group norm": lambda: block(lambda m, x: m.norm(x.mT).mT, norm=nn.GroupNorm(2, WIDTH)),
    "instance norm": lambda: block(lambda m, x: m.norm(x.mT).mT, norm=nn.GroupNorm(WIDTH, WIDTH)),
    "unit length": lambda: block(lambda m, x: F.normalize(x, dim=-1)),
    "softmax of features": lambda: block(lambda m, x: x.softmax(-1)),
    "softmax of time": lambda: block(lambda m, x: x.softmax(1)),
    "mean of time": lambda: block(lambda m, x: x - x.mean(1, keepdim=True)),
    "largest of time": lambda: block(lambda m, x: x + x.amax(1, keepdim=True)),
    "sum so far": lambda: block(lambda m, x: x.cumsum(1)),
    "reversed": lambda: block(lambda m, x: x.flip(1)),
    "rolled": lambda: block(lambda m, x: x + x.roll(1, 1)),
    "difference in time": lambda: block(lambda m, x: F.pad(x[:, 1:] - x[:, :-1], (0, 0, 1, 0))),
    "every other": lambda: block(lambda m, x: torch.cat([x[:, ::2], x[:, 1::2]], 1)),
    "chunks": lambda: block(lambda m, x: torch.cat([x.chunk(2, -1)[1] * x.chunk(2, -1)[0].tanh(), x[..., 3:]], -1)),
    "residual": lambda: block(lambda m, x: x + m.net(x), net=perceptron(classes=WIDTH)),
    "gate": lambda: block(lambda m, x: F.glu(m.into(x)), into=nn.Linear(WIDTH, 2 * WIDTH)),
    "convolution": lambda: block(lambda m, x: m.net(x.mT).mT, net=nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "convolution by channel": lambda: block(
        lambda m, x: m.net(x.mT).mT, net=nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
    ),
    "pooling": lambda: block(lambda m, x: F.max_pool1d(x.mT, 3, 1, 1).mT),
    "scores": lambda: block(lambda m, x: (x @ x.mT).tanh() @ x),
    "learned positions": lambda: block(lambda m, x: x + m.table[: x.shape[1]], table=weight(16, WIDTH)),
    "positions": lambda: block(lambda m, x: x * torch.arange(1.0, 1 + x.shape[1], dtype=x.dtype)[:, None].rsqrt()),
    "causal average": lambda: block(
        lambda m, x: torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril().div(x.shape[1]) @ x
    ),
    "einsum": lambda: block(lambda m, x: torch.einsum("btd,dhe,bte->bth", x, m.w, x), w=weight(WIDTH, WIDTH, WIDTH)),
    "outer product": lambda: block(
        lambda m, x: (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(2) @ m.w, w=weight(WIDTH * WIDTH, WIDTH)
    ),
    "merged rows": lambda: block(lambda m, x: m.net(x.reshape(-1, WIDTH)).view(x.shape), net=nn.Linear(WIDTH, WIDTH)),
    "merged features": lambda: block(lambda m, x: x.flatten(1).tanh().unflatten(1, x.shape[1:])),
    "masked": lambda: block(lambda m, x: x.masked_fill(x < -0.5, 0.1)),
    "where": lambda: block(lambda m, x: torch.where(x > 0, x * m.w, x.exp().clamp(max=2.0)), w=weight(WIDTH)),
    "codebook": lambda: block(
        lambda m, x: x + m.table((x @ m.table.weight.detach().T).argmax(-1)), table=nn.Embedding(5, WIDTH)
    ),
    "detached": lambda: block(lambda m, x: x * x.detach().abs().mean(-1, keepdim=True)),
    "experts": lambda: block(
        lambda m, x: torch.einsum("bte,btd,edf->btf", m.gate(x).softmax(-1), x, m.experts),
        gate=nn.Linear(WIDTH, 3),
        experts=weight(3, WIDTH, WIDTH),
    ),
    "low rank": lambda: block(lambda m, x: x @ (m.a @ m.b), a=weight(WIDTH, 2), b=weight(2, WIDTH)),
    "length of weights": lambda: block(lambda m, x: x @ (m.w / m.w.norm()), w=weight(WIDTH, WIDTH)),
}


# Samples meet each other in these: equal or refused, and a wide net beside them.
COUPLINGS: dict[str, Callable[[], nn.Module]] = {
    "mean of the batch": lambda: block(lambda m, x: x - x.mean(0)),
    "softmax of the batch": lambda: block(lambda m, x: x.softmax(0)),
    "batch norm": lambda: block(lambda m, x: m.norm(x.mT).mT, norm=nn.BatchNorm1d(WIDTH)),
    "turned batch": lambda: block(lambda m, x: x + x.flip(0)),
    "attention over the batch": lambda: block(lambda m, x: x + ((x[:, 0] @ x[:, 0].T).softmax(-1) @ x[:, 0])[:, None]),
    "half of the batch": lambda: block(lambda m, x: x + x[: len(x) // 2].mean()),
    "largest of all": lambda: block(lambda m, x: x / x.abs().max()),
    "rows that know each other": lambda: block(lambda m, x: x.reshape(-1, WIDTH).cumsum(0).view(x.shape)),
    "scaled by a norm": lambda: block(lambda m, x: x / (1 + x.norm())),
}


NUM_TARGETS = {name: len(loss.targets(2, 2, CLASSES)) for name, loss in LOSSES.items()}


@dataclass(frozen=True)
class Spec:
    """One random step."""

    seed: int
    batch: int
    time: int
    layout: str  # of the inputs: rows, sequences, or time before batch
    blocks: tuple[str, ...]
    head: str
    losses: tuple[str, ...]
    returns: str
    state: str
    is_input_trained: bool
    num_microbatches: int

    @property
    def couples(self) -> bool:
        return any(name in COUPLINGS for name in self.blocks)


def random_spec(seed: int) -> Spec:
    choose = random.Random(seed)
    batch = choose.randint(2, 7)
    layout = choose.choices(["sequences", "rows", "time first"], [6, 2, 2])[0]
    time = 1 if layout == "rows" else batch if choose.random() < 0.2 else choose.randint(2, 4)
    blocks = [choose.choice(list(BLOCKS)) for _ in range(choose.randint(0, 2))]
    if choose.random() < 0.12:
        blocks.insert(choose.randint(0, len(blocks)), choose.choice(list(COUPLINGS)))
    return Spec(
        seed=seed,
        batch=batch,
        time=time,
        layout=layout,
        blocks=tuple(blocks),
        head=choose.choice(list(NETS)) if choose.random() < 0.3 else "perceptron",
        losses=tuple(choose.sample(list(LOSSES), choose.choice([1, 1, 1, 2]))),
        returns=choose.choices(["loss", "loss and logits", "logits", "dictionary"], [8, 2, 1, 1])[0],
        state=choose.choices(["none", "counter", "average"], [8, 1, 1])[0],
        is_input_trained=choose.random() < 0.2,
        num_microbatches=choose.randint(2, batch),
    )


class RandomStep(nn.Module):
    """The blocks, the head and the losses of one spec."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        wide = [perceptron(classes=WIDTH, hidden=WIDE)] if spec.couples else []
        blocks = [(BLOCKS | COUPLINGS)[name]() for name in spec.blocks]
        head = perceptron() if spec.head == "perceptron" else NETS[spec.head]()
        self.net = nn.Sequential(*wide, *blocks, head)
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, CLASSES))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(CLASSES))

    def forward(self, x: Tensor, *targets: Tensor) -> Any:
        spec = self.spec
        if spec.layout == "time first":
            x, targets = x.transpose(0, 1), tuple(t.transpose(0, 1) if t.dim() > 1 else t for t in targets)
        logits = self.net(x if spec.layout != "rows" else x.unsqueeze(1))
        if spec.state == "counter":
            self.count += 1
        if spec.state == "average":
            self.average.lerp_(logits.detach().mean((0, 1)), 0.1)
        return self._returned(self._loss(logits, targets), logits)

    def _loss(self, logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        total = logits.new_zeros(())
        for place, name in enumerate(self.spec.losses, start=1):
            mine, targets = targets[: NUM_TARGETS[name]], targets[NUM_TARGETS[name] :]
            total = total + LOSSES[name].of(self, logits, *mine) / place
        return total

    def _returned(self, loss: Tensor, logits: Tensor) -> Any:
        match self.spec.returns:
            case "loss":
                return loss
            case "loss and logits":
                return loss, logits
            case "logits":
                return logits
        return {"loss": loss, "best": logits.argmax(-1), "last": logits[:, -1]}


def random_program(spec: Spec) -> Program:
    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(spec.batch, spec.time, WIDTH)
        targets = [t for name in spec.losses for t in LOSSES[name].targets(spec.batch, spec.time, CLASSES)]
        if spec.layout == "time first":
            x = x.transpose(0, 1).contiguous()
            targets = [t.transpose(0, 1).contiguous() if t.dim() > 1 else t for t in targets]
        elif spec.layout == "rows":
            x = x.squeeze(1)
        return (x.requires_grad_(spec.is_input_trained), *targets)

    return Program(lambda: RandomStep(spec), inputs)


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_a_random_step_is_equal_or_refused(seed: int) -> None:
    spec = random_spec(seed)
    is_split = check_equal_or_refused(random_program(spec), spec.num_microbatches)
    assert is_split or spec.couples, f"refused, and no sample meets another one: {spec}"


def test_few_random_steps_may_be_refused() -> None:
    specs = [random_spec(seed) for seed in range(NUM_PROGRAMS)]
    assert 0 < sum(spec.couples for spec in specs) < NUM_PROGRAMS / 4


def test_the_random_steps_have_everything_in_them() -> None:
    specs = [random_spec(seed) for seed in range(NUM_PROGRAMS)]
    assert {name for spec in specs for name in spec.blocks} == {*BLOCKS, *COUPLINGS}
    assert {name for spec in specs for name in spec.losses} == set(LOSSES)
    assert {spec.head for spec in specs} == {"perceptron", *NETS}
