"""The facts of its model that a node tells trainers: `status()["model"]`."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model whose tokenizer and chat template a node works with.

    Attributes:
        vocabulary: a digest of the ids that tokens have; equal ones mean the same ids. See `vocabulary_digest`.
        vocab_size: every id that the tokenizer knows is below it.
        sampleable: every id that can be sampled is below it: the tokenizer's, and the rows of the embedding; None where
            the node's folder has no `config.json`.
        end_of_turn_ids: ids that end a turn when they are sampled, sorted.
        architecture: the fields of its `config.json` that decide what it computes; see `architecture_of`.
    """

    vocabulary: str
    vocab_size: int
    sampleable: int | None
    end_of_turn_ids: list[int]
    architecture: dict[str, Any] = {}


class TokenizerSample(msgspec.Struct, frozen=True, kw_only=True):
    """Texts with the ids that a node's tokenizer gives them, to compare another tokenizer with.

    Attributes:
        model: the folder that the node's tokenizer is from.
        text: plain text, and markup of many families, which only some tokenizers have tokens for.
        text_ids: its ids.
        control: the tokenizer's own added tokens, one after another.
        control_ids: their ids.
    """

    model: str
    text: str
    text_ids: list[int]
    control: str
    control_ids: list[int]
