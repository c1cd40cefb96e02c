"""A fake engine in a process of its own: `PYTHONPATH=tests python -m support.soak.backend MODEL_FOLDER PORT TURN_S`.

Each of its rollouts calls bash once and finishes with what that said. It keeps no state, so it may be killed at any
moment. Ends when its parent does.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import TinyTokenizer, make_tiny_model
from support.soak.parent import end_with_parent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.testing.fake_engine import FakeEngine
    from prorl_trio.types.models import FinishReason

OUTPUT: Final = "bash-said-42"
TURN_S: Final = 0.02
MAX_MODEL_LEN: Final = 4096
_CALL: Final = '<tool_call>{"name": "bash", "arguments": {"command": "echo bash-said-$((6 * 7))"}}</tool_call>'
_FINISH: Final = '<tool_call>{"name": "finish", "arguments": {"answer": "42"}}</tool_call>'


def _script(tiny: TinyTokenizer, prompt_token_ids: list[int]) -> tuple[list[int], list[float], FinishReason]:
    ids = tiny.turn(_FINISH if OUTPUT in tiny.decode(prompt_token_ids) else _CALL)
    return ids, [-0.5] * len(ids), "stop"


@asynccontextmanager
async def open_backend(model: Path, port: int = 0, turn_s: float = TURN_S) -> AsyncIterator[FakeEngine]:
    """Serve the tiny model in the folder, which is made; each turn takes `turn_s`. Port 0 takes a free one."""
    tiny = make_tiny_model(model)
    config = FakeEngineConfig(
        vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=MAX_MODEL_LEN, first_token_s=turn_s
    )
    async with open_fake_engine(script=partial(_script, tiny), config=config, port=port) as engine:
        yield engine


async def _main(model: Path, port: int, turn_s: float) -> None:
    async with open_backend(model, port, turn_s):
        await trio.sleep_forever()


if __name__ == "__main__":
    end_with_parent()
    trio.run(_main, Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
