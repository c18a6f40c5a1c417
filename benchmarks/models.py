"""GPT: the model that every measurement trains, plain enough that its parameters can be counted by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class GPTShape:
    """The sizes of one GPT and of its batch."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    batch: int
    tokens: int  # in one sequence

    @property
    def num_parameters(self) -> int:
        """Counted by hand: a block's four weight matrices hold 12 w^2, their biases 9 w and its two norms 4 w."""
        block = 12 * self.width**2 + 13 * self.width
        embeddings = (self.vocabulary + self.tokens) * self.width
        norm_and_head = 2 * self.width + self.vocabulary * self.width
        return self.num_layers * block + embeddings + norm_and_head


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a GELU network four times as wide."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        x = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return projected


class GPT(nn.Module):
    """Token and learned position embeddings, blocks, an untied head; ``forward`` returns the mean cross entropy."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.num_heads) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.token_embedding(idx) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_gpt(shape: GPTShape, seed: int, device: str = "cpu") -> GPT:
    """The GPT of ``shape`` with the weights of ``seed``: equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(shape)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters != shape.num_parameters:
        raise AssertionError(f"{num_parameters} parameters were built where {shape} counts {shape.num_parameters}")
    return model.to(device)


def random_batch(shape: GPTShape, seed: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers and targets for one step, drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1), generator=generator)
    return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
