"""An engine that is no limit, for nodes on machines with networks of their own.

    python -m perf.fleet_engine FOLDER ENGINE_S ACTION_S

FOLDER gets the model. Each completion takes ENGINE_S seconds, however many there are, and is the same Python block,
which sleeps for ACTION_S seconds. It serves at all addresses of this machine, and ends with its standard input.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import trio

from ipc.nursery import open_single_nursery
from perf.children import raise_file_limit, say_ready
from prorl_trio.testing.fake_engine import FakeEngine, FakeEngineConfig
from prorl_trio.testing.tiny_model import make_tiny_model

__all__ = ["FleetEngine", "turn_text"]

MAX_MODEL_LEN = 8192
BACKLOG = 512


class FleetEngine(msgspec.Struct, frozen=True):
    """The port of it, and the folder of the model that nodes are to have."""

    port: int
    model: str


def turn_text(action_s: float) -> str:
    """Return the text of a turn."""
    return f"```python\nimport time; time.sleep({action_s:g}); print(42)\n```"


async def _main(folder: Path, engine_s: float, action_s: float) -> None:
    raise_file_limit()
    tiny = make_tiny_model(folder / "model")
    ids = tiny.turn(turn_text(action_s))
    logprobs = [-0.25] * len(ids)
    config = FakeEngineConfig(
        vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=MAX_MODEL_LEN, first_token_s=engine_s
    )
    listeners = await trio.open_tcp_listeners(0, host="0.0.0.0", backlog=BACKLOG)
    port: int = listeners[0].socket.getsockname()[1]
    engine = FakeEngine(f"http://0.0.0.0:{port}", config, lambda _: (ids, logprobs, "stop"))
    async with open_single_nursery() as nursery:
        await nursery.start(trio.serve_listeners, engine.serve_connection, listeners)
        say_ready(FleetEngine(port, str(folder / "model")))
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(_main, Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
