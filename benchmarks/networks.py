"""Small networks of different kinds, each a step with a loss, for figures that should not hang on one architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Network:
    """How to build a model, and the inputs and targets of its step."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]


class EqualLayers(nn.Module):
    """Linear and GELU, with a mean squared error."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.mse_loss(x, target)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal attention written out, with dropout of its weights; all are (batch, heads, tokens, size of a head)."""
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = F.dropout(scores.masked_fill(future, float("-inf")).softmax(-1), dropout)
    return weights @ v


class GroupedLayers(nn.Module):
    """Equal layers in groups of equal size, so that a group can be checkpointed as one block."""

    def __init__(self, width: int, num_groups: int, group_size: int) -> None:
        super().__init__()
        self.groups = nn.ModuleList(_layers(width, group_size) for _ in range(num_groups))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for group in self.groups:
            x = group(x)
        return F.mse_loss(x, target)


def _layers(width: int, num_layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)))


class ExplicitAttention(nn.Module):
    """A transformer block whose attention is written out, with dropout."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_attention(x)).chunk(3, -1))
        mixed = explicit_attention(q, k, v, self.dropout if self.training else 0.0)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)
        hidden = F.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
        return x + F.dropout(self.down(hidden), self.dropout, self.training)


class RMSNorm(nn.Module):
    """Scaled by the root mean square of each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, grouped heads, SwiGLU."""

    def __init__(self, width: int, num_heads: int, num_groups: int) -> None:
        super().__init__()
        self.num_heads, self.num_groups = num_heads, num_groups
        self.norm_attention, self.norm_mlp = RMSNorm(width), RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width * num_groups // num_heads, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        size = width // self.num_heads
        normed = self.norm_attention(x)
        q = self.query(normed).view(batch, tokens, self.num_heads, size).transpose(1, 2)
        pairs = self.key_value(normed).view(batch, tokens, 2, self.num_groups, size)
        k, v = pairs.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (_rotated(part, cosine, sine) for part in (q, k))
        k, v = (part.repeat_interleave(self.num_heads // self.num_groups, 1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        normed = self.norm_mlp(x)
        mixed: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + mixed


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class LanguageModel(nn.Module):
    """Token embedding, blocks, head and cross entropy; rotary tables go to blocks that take them."""

    def __init__(self, blocks: list[nn.Module], width: int, vocabulary: int, rotary_size: int | None) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(vocabulary, width), nn.ModuleList(blocks)
        self.head, self.rotary_size = nn.Linear(width, vocabulary), rotary_size

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        tables = () if self.rotary_size is None else _rotary_tables(tokens.shape[1], self.rotary_size)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *tables)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def _rotary_tables(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] * (1e4 ** (-torch.arange(0, size, 2) / size))[None]
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Attention of ``x`` to ``memory``; ``mask`` is true where it may look."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key_value, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q = self._heads(self.query(x))
        k, v = (self._heads(part) for part in self.key_value(memory).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return attended

    def _heads(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        return x.view(batch, tokens, self.num_heads, width // self.num_heads).transpose(1, 2)


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class PostNormBlock(nn.Module):
    """The block of BERT: the norms come after the residual sums."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, num_heads), _mlp(width)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm_attention(x + self.attention(x, x, mask))
        normed: Tensor = self.norm_mlp(x + self.mlp(x))
        return normed


class MaskedLM(nn.Module):
    """BERT-style: the loss is over the tokens that were masked, and padding is not looked at."""

    def __init__(self, width: int, num_heads: int, num_blocks: int, vocabulary: int, max_tokens: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(max_tokens, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(PostNormBlock(width, num_heads) for _ in range(num_blocks))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor, is_token: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x, is_token[:, None, None, :])
        logits = F.linear(self.transform(x), self.embedding.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


class PreNormBlock(nn.Module):
    """Attention and a GELU network, each behind a norm and beside a residual; with ``cross`` also to an encoder."""

    def __init__(self, width: int, num_heads: int, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.norm_attention, self.attention = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm_cross = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, num_heads) if cross else None
        self.norm_mlp, self.mlp = nn.LayerNorm(width), _mlp(width)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        normed = self.norm_attention(x)
        x = x + self.attention(normed, normed, causal=self.causal)
        if self.norm_cross is not None and self.cross is not None and encoded is not None:
            x = x + self.cross(self.norm_cross(x), encoded)
        mixed: Tensor = self.mlp(self.norm_mlp(x))
        return x + mixed


class EncoderDecoder(nn.Module):
    """Encoder and decoder with cross attention, as for translation; every decoder block reads the encoder's output."""

    def __init__(self, width: int, num_heads: int, num_blocks: int, vocabulary: int, max_tokens: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(max_tokens, width)
        self.encoder = nn.ModuleList(PreNormBlock(width, num_heads) for _ in range(num_blocks))
        self.decoder = nn.ModuleList(PreNormBlock(width, num_heads, causal=True, cross=True) for _ in range(num_blocks))
        self.norm_encoded, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
        encoded, x = (self.embedding(t) + self.positions.weight[: t.shape[1]] for t in (source, tokens))
        for block in self.encoder:
            encoded = block(encoded)
        encoded = self.norm_encoded(encoded)
        for block in self.decoder:
            x = block(x, encoded)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


class VisionTransformer(nn.Module):
    """Patches, a class token, learned positions, blocks, and a classifier on the class token."""

    def __init__(self, width: int, num_heads: int, num_blocks: int, image: int, patch: int, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1 + (image // patch) ** 2, width) / width**0.5)
        self.blocks = nn.ModuleList(PreNormBlock(width, num_heads) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(images), -1, -1), patches), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), target)


class ResNet(nn.Module):
    """Residual blocks of convolution, batch norm and ReLU, and a classifier."""

    def __init__(self, channels: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(self._block(channels) for _ in range(num_blocks))
        self.head = nn.Linear(channels, 10)

    @staticmethod
    def _block(channels: int) -> nn.Sequential:
        half = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
        other = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
        return nn.Sequential(*half, nn.ReLU(), *other)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), target)


class UNet(nn.Module):
    """Three scales with skips, group norm, and a loss for each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.ModuleList((_twice(3, channels), _twice(channels, 2 * channels)))
        self.bottom = nn.ModuleList((_twice(2 * channels, 4 * channels),))
        self.up = nn.ModuleList((_twice(6 * channels, 2 * channels), _twice(3 * channels, channels)))
        self.head = nn.Conv2d(channels, 5, 1)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        fine = self.down[0](images)
        middle = self.down[1](F.max_pool2d(fine, 2))
        coarse = self.bottom[0](F.max_pool2d(middle, 2))
        middle = self.up[0](torch.cat((middle, F.interpolate(coarse, scale_factor=2)), 1))
        fine = self.up[1](torch.cat((fine, F.interpolate(middle, scale_factor=2)), 1))
        return F.cross_entropy(self.head(fine), target)


def _twice(channels_in: int, channels_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        layers += [nn.Conv2d(channels, channels_out, 3, padding=1), nn.GroupNorm(4, channels_out), nn.SiLU()]
    return nn.Sequential(*layers)


def _tokens(vocabulary: int, batch: int, tokens: int) -> Batch:
    return torch.randint(vocabulary, (batch, tokens)), torch.randint(vocabulary, (batch, tokens))


NETWORKS = (
    Network(
        "MLP, 12 equal layers",
        lambda: EqualLayers(256, 12),
        lambda: (torch.randn(4096, 256), torch.randn(4096, 256)),
    ),
    Network(
        "GPT, explicit softmax, dropout",
        lambda: LanguageModel([ExplicitAttention(128, 4, 0.1) for _ in range(3)], 128, 512, None),
        lambda: _tokens(512, 8, 128),
    ),
    Network(
        "llama-style",
        lambda: LanguageModel([LlamaBlock(256, 4, 2) for _ in range(3)], 256, 1024, 64),
        lambda: _tokens(1024, 4, 256),
    ),
    Network(
        "ResNet, batch norm",
        lambda: ResNet(32, 4),
        lambda: (torch.randn(16, 3, 32, 32), torch.randint(10, (16,))),
    ),
    Network(
        "U-Net, group norm",
        lambda: UNet(16),
        lambda: (torch.randn(8, 3, 64, 64), torch.randint(5, (8, 64, 64))),
    ),
)
