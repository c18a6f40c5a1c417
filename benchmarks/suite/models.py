"""The models of the suite: those of the peaks, and a GPT that learns the characters of a real text.

The text is remat's own licence, the Apache License 2.0: it lies beside the source, it is free to copy, and it is the
same 11 thousand characters in every checkout, which the documents of a living project are not.
"""

from __future__ import annotations

from functools import cache

import torch

from benchmarks.harness import Batch
from benchmarks.models import GPT, GPTShape
from benchmarks.peak import models as peak
from benchmarks.peak.models import SEED, Model
from benchmarks.report import ROOT

TEXT = ROOT / "LICENSE"
NUM_LAYERS, WIDTH, NUM_HEADS, BATCH, TOKENS = 4, 128, 4, 16, 128


@cache
def characters() -> tuple[torch.Tensor, int]:
    """The text as numbers of characters, and how many different ones there are."""
    text = TEXT.read_text(encoding="utf-8")
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


def passages(generator: torch.Generator) -> Batch:
    """A batch of passages from random places, and the characters that follow each of theirs."""
    text, _ = characters()
    starts = torch.randint(len(text) - TOKENS, (BATCH, 1), generator=generator)
    drawn = text[starts + torch.arange(TOKENS + 1)]
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def _build() -> GPT:
    return GPT(GPTShape(NUM_LAYERS, WIDTH, NUM_HEADS, characters()[1], BATCH, TOKENS))


CHARACTERS = Model(
    "gpt-characters",
    "GPT on the characters of a text",
    _build,
    lambda: passages(torch.Generator().manual_seed(SEED)),
)

MODELS = {**peak.MODELS, CHARACTERS.key: CHARACTERS}
