"""The models that are measured: small enough to compile in seconds, with activations that outweigh the parameters.

That is what a user who is short of memory has. The two large ones are those of PyTorch's known bad cases: sixteen equal
blocks, where saving fewer bytes can take a higher peak.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks import networks
from benchmarks.models import GPT, GPTShape, random_batch
from benchmarks.networks import (
    Batch,
    EncoderDecoder,
    ExplicitAttention,
    GroupedLayers,
    LanguageModel,
    LlamaBlock,
    MaskedLM,
    ResNet,
    UNet,
    VisionTransformer,
)

SEED = 0
MASKED_SHARE = 0.15  # of the tokens, as in BERT (Devlin et al., 2018, section 3.1)
NO_TARGET = -100  # cross_entropy's default ignore_index


@dataclass(frozen=True, slots=True)
class Model:
    """How to build a model, and the batch of its step; ``forward`` returns the loss."""

    key: str
    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    is_exact: bool = True  # no dropout: gradients can be held against those of float64
    needs: str | None = None  # a package that is not among remat's own

    def make(self) -> tuple[nn.Module, Batch]:
        """The model and its batch: the same weights and inputs each time."""
        torch.manual_seed(SEED)
        model, batch = self.build().train(), self.batch()
        if isinstance(model, WithLoss):
            with torch.no_grad():  # hooks and the kind of loss are settled in the first call: another graph otherwise
                model(*batch)
        return model, batch

    def missing(self) -> str | None:
        """The package that the model needs and that is not installed."""
        return self.needs if self.needs and importlib.util.find_spec(self.needs) is None else None


# -- models of our own


def _language(vocabulary: int, batch: int, tokens: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(vocabulary, (batch, tokens)), torch.randint(vocabulary, (batch, tokens)))


def _masked_language(vocabulary: int, batch: int, tokens: int) -> Batch:
    words = torch.randint(vocabulary, (batch, tokens))
    lengths = torch.randint(tokens // 2, tokens + 1, (batch, 1))
    is_token = torch.arange(tokens) < lengths
    is_target = (torch.rand(batch, tokens) < MASKED_SHARE) & is_token
    return words.masked_fill(is_target, 0), is_token, words.masked_fill(~is_target, NO_TARGET)


def _gpt(shape: GPTShape, key: str, title: str) -> Model:
    return Model(key, title, lambda: GPT(shape), lambda: random_batch(shape, SEED))


def _images(batch: int, size: int, num_classes: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(num_classes, (batch,)))


def _pixels(batch: int, size: int, num_classes: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(num_classes, (batch, size, size)))


def _llama(num_blocks: int, width: int, vocabulary: int) -> LanguageModel:
    blocks: list[nn.Module] = [LlamaBlock(width, 4, 2) for _ in range(num_blocks)]
    return LanguageModel(blocks, width, vocabulary, width // 4)


OWN = (
    _gpt(GPTShape(3, 128, 4, 512, 8, 128), "gpt-sdpa", "GPT, SDPA"),
    Model(
        "gpt-dropout",
        "GPT, explicit softmax and dropout",
        lambda: LanguageModel([ExplicitAttention(128, 4, 0.1) for _ in range(3)], 128, 512, None),
        _language(512, 8, 128),
        is_exact=False,
    ),
    Model("llama", "llama-style", lambda: _llama(3, 128, 512), _language(512, 8, 128)),
    Model(
        "bert",
        "BERT-style masked LM",
        lambda: MaskedLM(128, 4, 3, 512, 128),
        lambda: _masked_language(512, 8, 128),
    ),
    Model("vit", "ViT", lambda: VisionTransformer(128, 4, 3, 64, 8, 10), _images(16, 64, 10)),
    Model("unet", "U-Net, group norm, per-pixel loss", lambda: UNet(16), _pixels(8, 64, 5)),
    Model("resnet", "ResNet, batch norm", lambda: ResNet(32, 4), _images(16, 32, 10)),
    Model(
        "encoder-decoder",
        "encoder-decoder, cross attention",
        lambda: EncoderDecoder(128, 4, 2, 512, 128),
        lambda: (torch.randint(512, (8, 128)), *_language(512, 8, 128)()),
    ),
    Model(
        "mlp-64",
        "MLP, 64 equal layers",
        lambda: GroupedLayers(64, 8, 8),
        lambda: (torch.randn(4096, 64), torch.randn(4096, 64)),
    ),
)

LARGE = (
    _gpt(GPTShape(16, 256, 4, 1024, 2, 1024), "gpt-16", "GPT, 16 blocks, d 256, T 1024"),
    Model("llama-16", "llama-style, 16 blocks, d 256, T 1024", lambda: _llama(16, 256, 1024), _language(1024, 2, 1024)),
)


# -- models of transformers, with random weights: nothing is downloaded


class WithLoss(nn.Module):
    """A model of transformers as a step: named inputs in, the loss out."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**dict(zip(self.names, batch, strict=True))).loss
        return loss


def _of_transformers(model: str, config: str, names: tuple[str, ...], sizes: Mapping[str, Any]) -> WithLoss:
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    if made.loss_type is None:
        made.loss_type = "ForCausalLM"  # what GPT-2 falls back to, with a warning that breaks the graph before the loss
    return WithLoss(made, names)


def _transformers_model(
    key: str,
    title: str,
    classes: tuple[str, str],
    names: tuple[str, ...],
    sizes: Mapping[str, Any],
    batch: Callable[[], Batch],
    *,
    is_exact: bool = False,
) -> Model:
    def build() -> nn.Module:
        return _of_transformers(*classes, names, sizes)

    return Model(key, f"{title} (transformers)", build, batch, is_exact, "transformers")


_WORDS = ("input_ids", "labels")

TRANSFORMERS = (
    _transformers_model(
        "hf-gpt2",
        "GPT-2",
        ("GPT2LMHeadModel", "GPT2Config"),
        _WORDS,
        {
            "n_embd": 128,
            "n_layer": 3,
            "n_head": 4,
            "vocab_size": 512,
            "n_positions": 128,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
        },
        _language(512, 8, 128),
    ),
    _transformers_model(
        "hf-llama",
        "Llama",
        ("LlamaForCausalLM", "LlamaConfig"),
        _WORDS,
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": 128,
            "use_cache": False,
        },
        _language(512, 8, 128),
        is_exact=True,
    ),
    _transformers_model(
        "hf-bert",
        "BERT",
        ("BertForMaskedLM", "BertConfig"),
        ("input_ids", "attention_mask", "labels"),
        {
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": 512,
            "max_position_embeddings": 128,
        },
        lambda: _masked_language(512, 8, 128),
    ),
    _transformers_model(
        "hf-t5",
        "T5",
        ("T5ForConditionalGeneration", "T5Config"),
        _WORDS,
        {
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 512,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 512,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        _language(512, 8, 128),
    ),
    _transformers_model(
        "hf-vit",
        "ViT",
        ("ViTForImageClassification", "ViTConfig"),
        ("pixel_values", "labels"),
        {
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 64,
            "patch_size": 8,
            "num_labels": 10,
        },
        _images(16, 64, 10),
        is_exact=True,
    ),
    _transformers_model(
        "hf-segformer",
        "Segformer",
        ("SegformerForSemanticSegmentation", "SegformerConfig"),
        ("pixel_values", "labels"),
        {
            "num_encoder_blocks": 3,
            "depths": [1, 1, 1],
            "sr_ratios": [4, 2, 1],
            "hidden_sizes": [32, 64, 96],
            "patch_sizes": [7, 3, 3],
            "strides": [4, 2, 2],
            "num_attention_heads": [1, 2, 4],
            "mlp_ratios": [4, 4, 4],
            "decoder_hidden_size": 64,
            "num_labels": 5,
        },
        _pixels(4, 128, 5),
    ),
)

MODELS = {model.key: model for model in (*OWN, *TRANSFORMERS, *LARGE)}


# -- checkpoints by hand: what the rivals do to a model


class Checkpointed(nn.Module):
    """A block that keeps its inputs only and is run again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False)


def checkpoint_blocks(model: nn.Module) -> None:
    """Make every block of ``model`` a checkpoint, in place: what users write around the entries of a ``ModuleList``."""
    if isinstance(model, WithLoss):
        enable: Any = model.model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, block in enumerate(blocks):
            blocks[index] = Checkpointed(block)


_sdpa, _explicit = F.scaled_dot_product_attention, networks.explicit_attention


def _run_sdpa(*args: Any, **keywords: Any) -> Any:  # a checkpoint takes a function of Python, and SDPA is none
    return _sdpa(*args, **keywords)


def _checkpointed_sdpa(*args: Any, **keywords: Any) -> Any:
    return checkpoint(_run_sdpa, *args, use_reentrant=False, **keywords)


def _checkpointed_explicit(*args: Any) -> Any:
    return checkpoint(_explicit, *args, use_reentrant=False)


@contextmanager
def checkpointed_attention() -> Iterator[None]:
    """Recompute the attention core alone: scores, softmax, dropout, and their product with the values.

    As Megatron does ("Reducing Activation Recomputation in Large Transformer Models", 2022, section 5).
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _checkpointed_sdpa))
        stack.enter_context(mock.patch.object(networks, "explicit_attention", _checkpointed_explicit))
        yield
