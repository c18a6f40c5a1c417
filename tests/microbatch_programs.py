"""Steps that must not change when they run in micro-batches, and what is asked of each.

The cases that users reported and the random programs are built from the same losses and layers, and held to the same:
equal to the unsplit step, or refused in words that help.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import FP64, Outcome, Program, assert_same, remat_error, run_eager, run_remat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat_compiler
from remat_compiler import CannotSplitError

BATCH, TIME, WIDTH, CLASSES = 8, 5, 6, 7
NUMBERS = (2, 3, 4, BATCH)  # of micro-batches; 3 does not divide the batch
IGNORED = -100  # the default of ignore_index


# -- what is asked of a step -----------------------------------------------------------------------------------------


def run_split(program: Program, num_microbatches: int, num_steps: int = 1, **options: object) -> list[Outcome]:
    """The program in micro-batches, and nothing else: its plans say so."""
    before = len(remat_compiler.plans())
    outcomes = run_remat(program, num_steps, num_microbatches=num_microbatches, **options)
    numbers = [plan.num_microbatches for plan in remat_compiler.plans()[before:]]
    assert numbers, "nothing was planned"
    assert set(numbers) == {num_microbatches}, f"asked for {num_microbatches} micro-batches, got plans of {numbers}"
    return outcomes


def check_split(
    program: Program, num_microbatches: int, num_steps: int = 1, tolerance: float = FP64, **options: object
) -> list[Outcome]:
    """Outputs, each gradient and the buffers of the split step are those of the unsplit one as Python runs it."""
    outcomes = run_split(program, num_microbatches, num_steps, **options)
    for found, expected in zip(outcomes, run_eager(program, num_steps), strict=True):
        assert_same(found, expected, tolerance)
    return outcomes


def refusal(program: Program, num_microbatches: int, match: str = "cannot be split", **options: object) -> str:
    """What the user is told of a step that cannot be split."""
    with pytest.raises(Exception, match=match) as caught:
        run_remat(program, num_microbatches=num_microbatches, **options)
    error = remat_error(caught.value)
    assert isinstance(error, CannotSplitError)
    return str(error)


def check_refusal(text: str, op: str, line: str) -> None:
    """The refusal names the op and its source line, and says what would help.

    Without an input that can carry the batch there is no op to name.
    """
    assert HELP.search(text), f"no help in: {text}"
    if "none of its inputs can carry the batch" in text:
        return
    assert re.search(op, text), f"{op} is not named in: {text}"
    assert line in text, f"{line} is not named in: {text}"


HELP = re.compile(r"batch_norm=|register_batch_rule|outside of the compiled step|num_microbatches|Pass the batch in")


def line_of(function: Callable[..., Any], fragment: str) -> str:
    """``file.py:line`` of the line of ``function`` that has ``fragment`` in it."""
    lines, first = inspect.getsourcelines(function)
    (place,) = [first + offset for offset, line in enumerate(lines) if fragment in line]
    path = inspect.getsourcefile(function)
    assert path is not None
    return f"{path.rpartition('/')[2]}:{place}"


def check_equal_or_refused(program: Program, num_microbatches: int, **options: object) -> bool:
    """Whether the step was split, and then it is equal; else it was refused by name."""
    try:
        found = run_remat(program, num_microbatches=num_microbatches, **options)
    except Exception as caught:
        error = remat_error(caught)
        if not isinstance(error, CannotSplitError):
            raise
        check_refusal(str(error), r"\w", ".py:")
        return False
    for one, expected in zip(found, run_eager(program), strict=True):
        assert_same(without_noise(one), without_noise(expected))
    return True


def without_noise(outcome: Outcome) -> Outcome:
    """Gradients that are nothing but rounding errors set to 0, as that of a bias that a norm takes away again.

    They are below the largest gradient by three orders of magnitude more than fp64's tolerance.
    """
    norms = [gradient.norm().item() for gradient in outcome.gradients.values() if gradient is not None]
    least = 1e-3 * FP64 * max((norm for norm in norms if norm == norm), default=0.0)
    gradients = {
        name: gradient if gradient is None or not gradient.norm() < least else torch.zeros_like(gradient)
        for name, gradient in outcome.gradients.items()
    }
    return replace(outcome, gradients=gradients)


# -- losses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A loss of logits (batch, time, classes): ``targets(batch, time, classes)`` makes what it is handed besides."""

    of: Callable[..., Tensor]  # (step, logits, *targets)
    targets: Callable[[int, int, int], tuple[Tensor, ...]]


class Step(nn.Module):
    """A network and its loss; the loss may read the step's own buffers and weights."""

    def __init__(self, net: nn.Module, loss: Callable[..., Any], classes: int = CLASSES) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, classes))

    def forward(self, x: Tensor, *targets: Tensor) -> Any:
        return self.loss(self, self.net(x), *targets)


def labels(batch: int, time: int, classes: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, classes, (batch, time)),)


def ragged_labels(batch: int, time: int, classes: int) -> tuple[Tensor, ...]:
    """The rows have 1, 2, ... valid labels, over and over."""
    (found,) = labels(batch, time, classes)
    lengths = 1 + torch.arange(batch) % time
    return (found.masked_fill(torch.arange(time) >= lengths[:, None], IGNORED),)


def probabilities(batch: int, time: int, classes: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, time, classes).softmax(-1),)


def values(batch: int, time: int, classes: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, time, classes),)


def bits(batch: int, time: int, classes: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 2, (batch, time, classes)).double(),)


def signs(batch: int, time: int, classes: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 2, (batch, time)) * 2.0 - 1.0,)


def labels_and_mask(batch: int, time: int, classes: int) -> tuple[Tensor, ...]:
    """A mask of 0 and 1 whose rows have different sums, none of them 0."""
    mask = torch.rand(batch, time) < 0.6
    mask[:, 0] = True
    return (*labels(batch, time, classes), mask.double())


def labels_and_row_weights(batch: int, time: int, classes: int) -> tuple[Tensor, ...]:
    return (*labels(batch, time, classes), torch.rand(batch) + 0.5)


def flat_cross_entropy(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), **options)


def per_token(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none")


def weighted_cross_entropy(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    return flat_cross_entropy(logits, y, weight=step.class_weights)


def smooth_weighted_cross_entropy(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    return flat_cross_entropy(logits, y, weight=step.class_weights, label_smoothing=0.1)


def soft_cross_entropy(step: Step, logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(0, 1), **options)


def soft_weighted_cross_entropy(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    return soft_cross_entropy(step, logits, y, weight=step.class_weights, label_smoothing=0.2)


def causal_cross_entropy(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    return flat_cross_entropy(logits[:, :-1], y[:, 1:])


def contiguous_causal_cross_entropy(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    shifted, following = logits[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), following.view(-1))


def padded_causal_cross_entropy(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    """As transformers shifts since version 4.45: the labels move, the logits stay."""
    following = F.pad(y, (0, 1), value=IGNORED)[:, 1:]
    count = (following != IGNORED).sum()
    return flat_cross_entropy(logits, following, reduction="sum") / count


def z_loss(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    return flat_cross_entropy(logits, y) + 1e-2 * logits.logsumexp(-1).square().mean()


def masked_z_loss(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    valid = (y != IGNORED).to(logits.dtype)
    return flat_cross_entropy(logits, y) + 1e-2 * (logits.logsumexp(-1).square() * valid).sum() / valid.sum()


def soft_cap(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    return flat_cross_entropy(3.0 * torch.tanh(logits / 3.0), y)


def token_mean(step: Step, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (per_token(logits, y) * mask).sum() / mask.sum()


def clamped_token_mean(step: Step, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (per_token(logits, y) * mask).sum() / mask.sum().clamp(min=1.0)


def sequence_mean(step: Step, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return ((per_token(logits, y) * mask).sum(1) / mask.sum(1)).mean()


def row_weighted(step: Step, logits: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    return (per_token(logits, y).mean(1) * weights).sum() / weights.sum()


def binary_cross_entropy(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, y, pos_weight=step.class_weights)


def focal(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    loss = per_token(logits, y)
    return ((1.0 - torch.exp(-loss)) ** 2 * loss).mean()


def several(step: Step, logits: Tensor, y: Tensor, other: Tensor) -> Tensor:
    """Three losses, each with a mean over another number of elements."""
    valid = y != IGNORED
    lengths = valid.sum(1).to(logits.dtype)
    last = (logits.mean((1, 2)) - lengths).square().mean()
    return flat_cross_entropy(logits, y) + 0.3 * F.mse_loss(logits, other) + 0.1 * last


def with_weight_decay(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    decay = sum(weight.square().sum() for weight in step.net.parameters())
    return flat_cross_entropy(logits, y) + 1e-2 * decay


def with_norms_of_weights(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    norms = [weight.norm() for weight in step.net.parameters()] + [
        weight.abs().sum() for weight in step.net.parameters()
    ]
    return flat_cross_entropy(logits, y, reduction="sum") + torch.stack(norms).sum()


def with_activity(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(logits, y, beta=0.5) + 0.1 * logits.abs().mean() + 0.01 * logits.square().sum()


def hinge(step: Step, logits: Tensor, y: Tensor) -> Tensor:
    return F.relu(1.0 - y * logits[..., 0]).mean()


def token_loss(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return lambda step, logits, y: function(logits, y, **options)


def log_softmax_of(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return lambda step, logits, y: function(logits.log_softmax(-1), y, **options)


LOSSES: dict[str, Loss] = {
    "cross entropy": Loss(token_loss(flat_cross_entropy), labels),
    "cross entropy, ignore_index": Loss(token_loss(flat_cross_entropy), ragged_labels),
    "cross entropy, ignored class": Loss(token_loss(flat_cross_entropy, ignore_index=3), labels),
    "cross entropy, class weights": Loss(weighted_cross_entropy, ragged_labels),
    "cross entropy, label smoothing": Loss(token_loss(flat_cross_entropy, label_smoothing=0.1), ragged_labels),
    "cross entropy, smoothing and weights": Loss(smooth_weighted_cross_entropy, ragged_labels),
    "cross entropy, soft targets": Loss(soft_cross_entropy, probabilities),
    "cross entropy, soft targets, smoothing and weights": Loss(soft_weighted_cross_entropy, probabilities),
    "cross entropy, sum": Loss(token_loss(flat_cross_entropy, reduction="sum"), ragged_labels),
    "cross entropy, none": Loss(lambda step, logits, y: per_token(logits, y).mean(), ragged_labels),
    "cross entropy, none then weighted by row": Loss(row_weighted, labels_and_row_weights),
    "cross entropy, causal shift": Loss(causal_cross_entropy, ragged_labels),
    "cross entropy, causal shift, contiguous": Loss(contiguous_causal_cross_entropy, ragged_labels),
    "cross entropy, causal shift, padded": Loss(padded_causal_cross_entropy, ragged_labels),
    "cross entropy, z-loss": Loss(z_loss, ragged_labels),
    "cross entropy, z-loss of valid tokens": Loss(masked_z_loss, ragged_labels),
    "cross entropy, soft-cap": Loss(soft_cap, ragged_labels),
    "nll": Loss(log_softmax_of(lambda p, y: F.nll_loss(p.transpose(1, 2), y)), ragged_labels),
    "token mean": Loss(token_mean, labels_and_mask),
    "token mean, clamped count": Loss(clamped_token_mean, labels_and_mask),
    "sequence mean": Loss(sequence_mean, labels_and_mask),
    "focal": Loss(focal, labels),
    "binary cross entropy, pos_weight": Loss(binary_cross_entropy, bits),
    "binary cross entropy of probabilities": Loss(lambda s, p, y: F.binary_cross_entropy(p.sigmoid(), y), bits),
    "mse": Loss(token_loss(F.mse_loss), values),
    "mse, sum": Loss(token_loss(F.mse_loss, reduction="sum"), values),
    "l1": Loss(token_loss(F.l1_loss), values),
    "huber": Loss(token_loss(F.huber_loss, delta=0.7), values),
    "smooth l1 and activity": Loss(with_activity, values),
    "kl, batchmean": Loss(log_softmax_of(F.kl_div, reduction="batchmean"), probabilities),
    "kl, mean": Loss(log_softmax_of(F.kl_div, reduction="mean"), probabilities),
    "kl, sum, log target": Loss(
        lambda s, p, y: F.kl_div(p.log_softmax(-1), y.log_softmax(-1), reduction="sum", log_target=True), values
    ),
    "poisson nll": Loss(token_loss(F.poisson_nll_loss), bits),
    "hinge": Loss(hinge, signs),
    "cosine": Loss(lambda s, p, y: (1.0 - F.cosine_similarity(p, y, dim=-1)).mean(), values),
    "several": Loss(several, lambda b, t, c: (*ragged_labels(b, t, c), *values(b, t, c))),
    "weight decay": Loss(with_weight_decay, ragged_labels),
    "norms of weights": Loss(with_norms_of_weights, ragged_labels),
}


def perceptron(width: int = WIDTH, classes: int = CLASSES, hidden: int = 9) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, classes))


# -- networks --------------------------------------------------------------------------------------------------------
# Each takes (batch, time, WIDTH) to (batch, time, CLASSES), but TiedWeights, which takes tokens.


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.gelu(self.hidden(self.embedding(tokens))) @ self.embedding.weight.T


class Attention(nn.Module):
    """Two heads; ``how`` is the form that users write attention in."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, time, 3, 2, width // 2)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, time, width of a head)
        return self.out(ATTENTIONS[self.how](q, k, v, padding).transpose(1, 2).reshape(batch, time, width))


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None, :], -1e9)
    return scores.softmax(-1) @ v


def heads_before_batch(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
    """The heads are the outer part of the axis that also carries the batch."""
    batch, heads, time, width = q.shape
    q, k, v = (t.transpose(0, 1).reshape(heads * batch, time, width) for t in (q, k, v))
    attended = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
    return attended.view(heads, batch, time, width).transpose(0, 1)


def merged_heads(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
    batch, heads, time, width = q.shape
    q, k, v = (t.reshape(batch * heads, time, width) for t in (q, k, v))
    weights = torch.baddbmm(torch.zeros((), dtype=q.dtype), q, k.mT, beta=0, alpha=0.5).softmax(-1)
    return torch.bmm(weights, v).view(batch, heads, time, width)


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "fused": lambda q, k, v, padding: F.scaled_dot_product_attention(q, k, v),
    "fused, causal": lambda q, k, v, padding: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "fused, padding": lambda q, k, v, padding: F.scaled_dot_product_attention(
        q, k, v, attn_mask=~padding[:, None, None, :]
    ),
    "explicit": explicit_attention,
    "heads before batch": heads_before_batch,
    "merged heads": merged_heads,
}


class Unrolled(nn.Module):
    """A recurrent cell over the time axis."""

    def __init__(self, cell: str) -> None:
        super().__init__()
        self.cell = getattr(nn, cell)(WIDTH, CLASSES)
        self.is_lstm = cell == "LSTMCell"

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if self.is_lstm else state)
        return torch.stack(outputs, 1)


class Recurrent(nn.Module):
    """A recurrent layer of torch's own."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = getattr(nn, layer)(WIDTH, CLASSES, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


class Prefixed(nn.Module):
    """A learned token in front of each sequence, learned positions, a norm and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Embedding(16, WIDTH)
        self.norm, self.gate, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)
        x = x + self.positions(torch.arange(x.shape[1]))
        return self.out(F.glu(self.gate(self.norm(x))))[:, 1:]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = perceptron(), perceptron(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(checkpoint(self.first, x, use_reentrant=False))
        return output


class PartlyTrained(nn.Module):
    """One layer is frozen, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused, self.out = nn.Linear(3, 3), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(torch.tanh(self.frozen(x)))
        return output


class ConvNet(nn.Module):
    """(batch, time, width) as signals with ``width`` channels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(WIDTH, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=4),
            nn.AvgPool1d(3, stride=1, padding=1),
            nn.ConvTranspose1d(8, CLASSES, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x.mT).mT
        return output


class WeightNormed(nn.Module):
    """What is made of the weights alone is the same in every slice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 9))
        self.low, self.high = nn.Parameter(torch.randn(2, 9)), nn.Parameter(torch.randn(CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.sin(self.layer(x)), self.high @ self.low)


class SortedTime(nn.Module):
    """Ops along the time axis that need all of it: sort, cumsum, topk, max."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        best = x.topk(2, dim=1).values.mean(1, keepdim=True).expand_as(x)
        largest = x.max(1, keepdim=True).values.expand_as(x)
        output: Tensor = self.out(torch.cat([x.sort(1).values, x.cumsum(1), best, largest], -1))
        return output


NETS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.LayerNorm(9), nn.ELU(), nn.Linear(9, CLASSES)),
    "convolutions": ConvNet,
    "RNN cell": lambda: Unrolled("RNNCell"),
    "GRU cell": lambda: Unrolled("GRUCell"),
    "LSTM cell": lambda: Unrolled("LSTMCell"),
    "prefix and positions": Prefixed,
    "checkpoint": Checkpointed,
    "frozen and unused": PartlyTrained,
    "weight norm": WeightNormed,
    **{f"attention, {how}": lambda how=how: Attention(how) for how in ATTENTIONS if how != "fused, padding"},
}


def loss_program(name: str, batch: int = BATCH, net: Callable[[], nn.Module] = perceptron) -> Program:
    """A small network under one of the losses."""
    loss = LOSSES[name]
    return Program(
        lambda: Step(net(), loss.of),
        lambda: (torch.randn(batch, TIME, WIDTH), *loss.targets(batch, TIME, CLASSES)),
    )
