"""A Llama of 8 billion parameters in training, for ``remat plan``: the question that needs no card to be answered.

    remat plan benchmarks/plan_llama_8b.py --budget 120GiB --device h200
    remat plan benchmarks/plan_llama_8b.py:step --device rtx4090

The sizes are those of Llama 3 8B; the network is written here, in the plainest way. It trains with AdamW in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of one network and of its batch."""

    num_layers: int = 32
    width: int = 4096
    num_heads: int = 32
    num_groups: int = 8  # heads of keys and values
    hidden: int = 14336
    vocabulary: int = 128256
    tokens: int = 8192  # in one sequence
    batch: int = 16


class Attention(nn.Module):
    """Causal attention with rotary positions; several heads of queries share one of keys and values."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width // shape.num_heads
        self.q = nn.Linear(shape.width, shape.num_heads * width, bias=False)
        self.k = nn.Linear(shape.width, shape.num_groups * width, bias=False)
        self.v = nn.Linear(shape.width, shape.num_groups * width, bias=False)
        self.out = nn.Linear(shape.num_heads * width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape

        def heads(projected: torch.Tensor, num: int) -> torch.Tensor:
            return projected.view(batch, tokens, num, -1).transpose(1, 2)

        q = rotated(heads(self.q(x), self.shape.num_heads), cosine, sine)
        k = rotated(heads(self.k(x), self.shape.num_groups), cosine, sine)
        v = heads(self.v(x), self.shape.num_groups)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return result


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Each pair of features turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Block(nn.Module):
    """Attention and a gated network, each behind a norm and added to the residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.network_norm = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        y = self.network_norm(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """The network; ``forward`` returns the mean cross entropy of the next token."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        half = shape.width // shape.num_heads // 2
        frequencies = 500_000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(shape.tokens), frequencies)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def step() -> None:
    """One training step."""
    shape = LlamaShape()
    model = Llama(shape).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1), device="cuda")
    compiled = torch.compile(model, backend="remat")
    compiled(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
    optimizer.step()


if __name__ == "__main__":
    step()
