"""Exactness on the device: each gradient of small networks against float64 there, dropout's masks bit for bit.

With dropout float64 has no say, because eager draws other masks than Inductor: there the same step under torch.compile,
from the same seed, is what gradients are held against, and one wrong mask shows as an error of order one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.settings import COMPILE, REMAT, Place, Setting, in_slices
from benchmarks.gpu.systems import SEED, Forward, compiled, remat_refusal
from benchmarks.harness import Batch, clear_gradients, reference_gradients, worst_error
from benchmarks.models import GPT, GPTShape
from benchmarks.networks import LlamaBlock, UNet

SAMPLES, TOKENS, WORDS, WIDTH, HEADS, IMAGE, CHANNELS = 8, 128, 512, 128, 4, 32, 16
DROPOUT = 0.25
SLICES = (2, 4, 8)
SHARES = ("70%", "50%")

# A relative error that is no rounding: masks that differ in one element of a hundred give 0.1.
OTHER_MASKS = 0.1
# How much more than torch.compile's own error counts as rounding: another order of the same sums.
TOLERANCE, FLOOR = 2.0, 1e-6


class DropoutGPT(nn.Module):
    """Two blocks of attention and a GELU network, with dropout of residuals, and of attention weights if asked for."""

    def __init__(self, *, in_attention: bool) -> None:
        super().__init__()
        self.in_attention = in_attention
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
            q, k, v = (part.view(heads).transpose(1, 2) for part in qkv(F.layer_norm(x, (WIDTH,))).chunk(3, -1))
            share = DROPOUT if self.in_attention else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=share, is_causal=True)
            x = x + F.dropout(mixed.transpose(1, 2).reshape(x.shape), DROPOUT)
            x = x + F.dropout(down(F.gelu(up(F.layer_norm(x, (WIDTH,))))), DROPOUT)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Llama(nn.Module):
    """Two llama blocks, two heads a group; rotary tables are buffers, so that they go to the device."""

    cosine: Tensor
    sine: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(WIDTH, HEADS, HEADS // 2) for _ in range(2))
        size = WIDTH // HEADS
        angles = torch.arange(TOKENS)[:, None] * (1e4 ** (-torch.arange(0, size, 2) / size))[None]
        for name, table in (("cosine", angles.cos()), ("sine", angles.sin())):
            self.register_buffer(name, torch.cat((table, table), -1))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def _words() -> Batch:
    return torch.randint(WORDS, (SAMPLES, TOKENS)), torch.randint(WORDS, (SAMPLES, TOKENS))


def _pixels() -> Batch:
    return torch.randn(SAMPLES, 3, IMAGE, IMAGE), torch.randint(5, (SAMPLES, IMAGE, IMAGE))


@dataclass(frozen=True, slots=True)
class Case:
    """A network with the batch of its step."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    has_dropout: bool = False


CASES: Mapping[str, Case] = {
    "GPT, SDPA": Case(lambda: GPT(GPTShape(2, WIDTH, HEADS, WORDS, SAMPLES, TOKENS)), _words),
    "GPT, dropout": Case(lambda: DropoutGPT(in_attention=False), _words, has_dropout=True),
    "GPT, dropout in SDPA": Case(lambda: DropoutGPT(in_attention=True), _words, has_dropout=True),
    "llama-style, grouped heads": Case(Llama, _words),
    "U-Net, group norm": Case(lambda: UNet(CHANNELS), _pixels),
}


@dataclass(frozen=True, slots=True)
class Exactness:
    """The largest relative error of one gradient under one system."""

    network: str
    dtype: str
    system: str
    against: str
    error: float | None = None
    compile_error: float | None = None  # torch.compile's, against the same
    failure: str = ""

    @property
    def verdict(self) -> str:
        if self.failure:
            return self.failure.partition(":")[0]
        assert self.error is not None
        if self.against == COMPILE:
            return "same masks" if self.error < OTHER_MASKS else "OFF"
        return "exact" if self.error <= max(TOLERANCE * (self.compile_error or 0.0), FLOOR) else "OFF"


def settings() -> tuple[Setting, ...]:
    """remat as it chooses, under budgets, and in slices."""
    budgets = [Setting(REMAT, f"{REMAT}, {share}", {"memory_budget": share, "num_microbatches": 1}) for share in SHARES]
    return Setting(REMAT, REMAT), *budgets, *(in_slices(n) for n in SLICES)


def exactness(name: str, dtype_name: str, place: Place, chosen: Sequence[Setting] | None = None) -> Iterator[Exactness]:
    """One network in one dtype under every setting; a refusal or a crash is a row too."""
    torch.backends.cudnn.allow_tf32 = False  # torch's default for convolutions: 1e-3 of error that is not ours
    case, dtype = CASES[name], getattr(torch, dtype_name)
    torch.manual_seed(SEED)
    model = case.build().to(place.device, dtype)
    batch = tuple(t.to(place.device, dtype if t.is_floating_point() else None) for t in case.batch())
    plain = _gradients(model, batch, compiled(Setting(COMPILE, COMPILE), place))
    if case.has_dropout:
        truth, against, compile_error = plain, COMPILE, None
    else:
        truth, against = reference_gradients(model, batch), "float64"
        compile_error = worst_error(plain, truth)
        yield Exactness(name, dtype_name, COMPILE, against, compile_error, compile_error)
    for setting in settings() if chosen is None else chosen:
        row = (name, dtype_name, setting.name, against)
        try:
            gradients = _gradients(model, batch, compiled(setting, place))
            yield Exactness(*row, worst_error(gradients, truth), compile_error)
        except Exception as error:  # one setting's crash is its own row
            yield Exactness(*row, failure=remat_refusal(error))


def _gradients(model: nn.Module, batch: Batch, forward: Forward) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    clear_gradients(own)
    torch.manual_seed(SEED)
    forward(own, *batch).backward()
    return {name: p.grad.double() for name, p in own.named_parameters() if p.grad is not None}


# -- masks


class Masked(nn.Module):
    """Ten dropouts, the last of which can be read off the output, and the first off the gradient of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.dropout(x * self.first, DROPOUT)
        for layer in self.inner:
            x = F.dropout(F.softplus(layer(x)), DROPOUT)
        y = F.dropout(F.softplus(x * self.last), DROPOUT)
        return y.square().sum(), y


@dataclass(frozen=True, slots=True)
class Masks:
    """Whether one system draws torch.compile's masks, in forward and as backward shows them."""

    dtype: str
    system: str
    same_in_forward: bool = False
    same_in_backward: bool = False
    failure: str = ""


def masks(dtype_name: str, place: Place, chosen: Sequence[Setting] | None = None) -> Iterator[Masks]:
    """The masks of every setting beside those of torch.compile, from the same seed."""
    torch.manual_seed(SEED)
    dtype = getattr(torch, dtype_name)
    model, x = Masked().to(place.device, dtype), torch.rand(SAMPLES, TOKENS, WIDTH).to(place.device, dtype) + 0.5
    forward, backward = _masks(model, x, compiled(Setting(COMPILE, COMPILE), place))
    for setting in settings() if chosen is None else chosen:
        try:
            own_forward, own_backward = _masks(model, x, compiled(setting, place))
            same = torch.equal(forward, own_forward), torch.equal(backward, own_backward)
            yield Masks(dtype_name, setting.name, *same)
        except Exception as error:  # one setting's crash is its own row
            yield Masks(dtype_name, setting.name, failure=remat_refusal(error))


def _masks(model: nn.Module, x: Tensor, forward: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    own, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(SEED)
    loss, y = forward(own, x)
    loss.backward()
    assert x.grad is not None
    return y.detach() != 0, x.grad != 0


def as_record(row: Exactness | Masks) -> dict[str, object]:
    """A row as JSON."""
    return {**asdict(row), "verdict": row.verdict} if isinstance(row, Exactness) else asdict(row)
