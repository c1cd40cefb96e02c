"""An engine without a model that repeats the last message, for testing a handler without a policy."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from prorl_trio.types.models import FinishReason

BEGIN: Final = "<|im_start|>assistant\n"
END: Final = "<|im_end|>"
VOCABULARY: Final = 259
CONTEXT_TOKENS: Final = 64_000


@asynccontextmanager
async def open_echo_engine(folder: Path) -> AsyncIterator[str]:
    """Serve at the yielded URL; write the model's tokenizer and template to `folder`. A token is a byte."""
    tiny = make_tiny_model(folder)

    def sample(prompt: list[int]) -> tuple[list[int], list[float], FinishReason]:
        told, _, said = tiny.decode(prompt).rpartition(BEGIN)
        last = told.rstrip().removesuffix(END).rpartition("<|im_start|>")[2].partition("\n")[2]
        ids = tiny.turn(last.replace("<|", "< |"))[len(said.encode()) :]  # a long turn is requested in slices
        return ids, [-1.0] * len(ids), "stop"

    config = FakeEngineConfig(
        model=str(folder),
        vocab_size=VOCABULARY,
        end_of_turn_id=tiny.end_of_turn_id,
        max_model_len=CONTEXT_TOKENS,
        tokenizer_file=str(folder / "tokenizer.json"),
    )
    async with open_fake_engine(script=sample, config=config) as engine:
        yield engine.url
