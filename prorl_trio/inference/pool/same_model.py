"""The proof that an engine serves the node's model: its own tokenizer has the node's ids for the node's texts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.inference.engines.protocol import EngineClient, EngineInfo
    from prorl_trio.types.model_facts import TokenizerSample

logger = logging.getLogger(__name__)


class AnotherModel(BackendError):
    """The engine serves another model than the node's; not retryable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class ModelProof:
    """Compares the tokenizers of engines with the node's. A warning names once each engine that does not offer its own.

    Weights of another model with the same tokenizer cannot be told apart by this: their tokens mean the same.
    """

    def __init__(self, sample: TokenizerSample) -> None:
        self._sample = sample
        self._unproven = set[str]()

    async def prove(self, client: EngineClient, info: EngineInfo, *, timeout_s: float) -> None:
        """Compare the tokenizer of the engine that `info` was found out of, within `timeout_s` per question.

        Raises:
            AnotherModel: it gives a text other ids than the node's tokenizer does.
            BackendError: the engine cannot be reached.
        """
        sample = self._sample
        ids = await client.tokenize(sample.text, timeout_s=timeout_s)
        if ids is None:
            if info.url not in self._unproven:
                logger.warning(
                    "backend %s: the engine does not offer its tokenizer, so there is no proof that it serves the "
                    "model of this node (%s); token ids beyond that model's vocabulary fail their turn",
                    info.url,
                    sample.model,
                )
            self._unproven.add(info.url)
            return
        if ids != sample.text_ids:
            raise self._another(info, sample.text_ids, ids)
        ids = await client.tokenize(sample.control, timeout_s=timeout_s)
        if ids == sample.control_ids:
            return
        # Some tokenizers never read control tokens out of a text (Mistral's own); these can still write them.
        if await client.detokenize(sample.control_ids, timeout_s=timeout_s) != sample.control:
            raise self._another(info, sample.control_ids, ids or [])

    def _another(self, info: EngineInfo, ours: Sequence[int], theirs: Sequence[int]) -> AnotherModel:
        at = next(
            (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        node, engine = list(ours[at : at + 4]), list(theirs[at : at + 4])
        return AnotherModel(
            f"{info.url}: it serves {info.model_folder or info.model}, whose tokenizer is not that of this node's "
            f"model, {self._sample.model}: from position {at} of a text on, it has the ids {engine}, and the node's "
            f"has {node}. Set [model] path to the folder of the model that the engine was started with, or start the "
            "engine with the node's model"
        )
