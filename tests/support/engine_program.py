"""An engine of its own process that other machines reach: `python engine_program.py PORT MODEL_FOLDER [SECONDS]`.

It has the tokenizer of `make_tiny_model`, and answers every question with 42. With SECONDS it first calculates, in a
sandbox, for so long.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from prorl_trio.testing.fake_engine import FakeEngine, FakeEngineConfig
from prorl_trio.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from prorl_trio.types.models import FinishReason

ANSWER = r"\boxed{42}"
RESULT = "42"


def answer_at_once() -> str:
    """Return what it says before any tool has answered: the answer."""
    return ANSWER


def calculation(seconds: float) -> str:
    """Return a turn that takes so long in a sandbox, and prints 42."""
    return f"```python\nimport time; time.sleep({seconds:.3f}); print(6 * 7)\n```"


@asynccontextmanager
async def open_engine(port: int, model: Path, begin: Callable[[], str] = answer_at_once) -> AsyncIterator[int]:
    """Serve at all addresses of this machine while the block runs; yield the port, a free one for 0.

    Until 42 is in the dialogue it says what `begin` returns: a `calculation`, for one.
    """
    tiny = make_tiny_model(model)
    config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)

    def speak(prompt: list[int]) -> tuple[list[int], list[float], FinishReason]:
        said = tiny.turn(ANSWER if RESULT in tiny.decode(prompt) else begin())
        return said, [-0.5] * len(said), "stop"

    listeners = await trio.open_tcp_listeners(port, host="0.0.0.0")
    bound: int = listeners[0].socket.getsockname()[1]
    engine = FakeEngine(f"http://0.0.0.0:{bound}", config, speak)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, engine.serve_connection, listeners)
        yield bound
        nursery.cancel_scope.cancel("the block has ended")


async def main() -> None:
    """Serve until this process is ended."""
    begin = (lambda: calculation(float(sys.argv[3]))) if len(sys.argv) > 3 else answer_at_once
    async with open_engine(int(sys.argv[1]), Path(sys.argv[2]), begin):
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main)
