"""Checks of the trainer's tokenizer and model against the node's, before the first rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from prorl_trio.chat.codec import vocabulary_digest
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.model_facts import ModelFacts, architecture_of, differing_field

if TYPE_CHECKING:
    from prorl_trio.client import BlockingClient


def model_facts(client: BlockingClient) -> ModelFacts:
    """Return the facts of the node's model."""
    return msgspec.convert(client.status()["model"], ModelFacts)


def check_tokenizer(tokenizer: Any, facts: ModelFacts) -> None:
    """Check that token ids have the same meaning for the trainer and the node.

    Args:
        tokenizer: the trainer's, of `transformers`.
        facts: the facts of the node's model.

    Raises:
        ConfigError: the tokenizers differ, or the node does not know the trainer's end-of-sequence token as one.
    """
    vocabulary = tokenizer.get_vocab()
    size = max(vocabulary.values()) + 1
    if size != facts.vocab_size:
        raise ConfigError(
            f"the trainer's tokenizer knows ids below {size}, the node's ids below {facts.vocab_size}: they are of "
            "different models, or tokens were added to one of them. Start the node with the folder that the trainer "
            "starts from ([model] path)"
        )
    if vocabulary_digest(vocabulary) != facts.vocabulary:
        raise ConfigError(
            f"the trainer's tokenizer and the node's have {size} ids each and give them to different tokens: they are "
            "of different models. Start the node with the folder that the trainer starts from ([model] path)"
        )
    if tokenizer.eos_token_id not in facts.end_of_turn_ids:
        raise ConfigError(
            f"the trainer's tokenizer ends a sequence with id {tokenizer.eos_token_id} ({tokenizer.eos_token!r}), and "
            f"the node's turns end with {facts.end_of_turn_ids}: every completion would count as cut off. Set "
            "tokenizer.eos_token to the token that ends a turn"
        )


def check_embedding(rows: int, facts: ModelFacts) -> None:
    """Check the number of rows of the trainer's embedding or output layer.

    Raises:
        ConfigError: the engine samples from another number of tokens.
    """
    if facts.sampleable is not None and rows != facts.sampleable:
        raise ConfigError(
            f"the trainer's model has a vocabulary of {rows}, the node's of {facts.sampleable}: log-probabilities over "
            "different vocabularies cannot be compared. Train the model that the engines serve"
        )


def check_config(config: Any, facts: ModelFacts) -> None:
    """Check that the trainer's model uses its weights in the same way as the engine's model.

    Args:
        config: the model's configuration, of `transformers`.
        facts: the facts of the node's model. Missing fields are not compared.

    Raises:
        ConfigError: a field differs.
    """
    ours = architecture_of(config.to_dict())
    if (field := differing_field(ours, facts.architecture)) is not None:
        raise ConfigError(
            f"the trainer's model has {field} {ours[field]!r} in its configuration, the node's "
            f"{facts.architecture[field]!r}: the engines would compute something else from the same weights. Train the "
            "model that the engines serve, and start the node with its folder ([model] path)"
        )
