"""A whole node with a policy that you write as a function. Try a trainer or a handler without a GPU or a model.

    python examples/local_node.py            # prints the exports; then, in another terminal:
    python examples/trainer_loop.py

The engine imitates vLLM, and the model has one token per byte. Node, sandboxes and delivery are real.
"""

from __future__ import annotations

import random
import re
import secrets
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import trio

from prorl_trio.config import NodeConfig
from prorl_trio.node.serve import serve_node
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from prorl_trio import AgentHandler
    from prorl_trio.types.models import FinishReason

VOCABULARY = 259
CONTEXT_TOKENS = 16_000
BEGIN = "<|im_start|>assistant\n"


class LocalNode(NamedTuple):
    """The addresses of a node, and its token."""

    url: str
    rest_url: str
    token: str


@asynccontextmanager
async def open_local_node(
    policy: Callable[[str], str],
    handlers: Sequence[AgentHandler] = (),
    *,
    provider: str = "auto",
    packages: Sequence[str] = (),
    context_tokens: int = CONTEXT_TOKENS,
) -> AsyncIterator[LocalNode]:
    """Run a node in this process for the duration of the block, or until SIGTERM or Ctrl-C.

    `policy` receives the prompt as text, including control tokens, and returns the model's output. By default the node
    uses the handlers of the installed packages. `packages` of this environment are also in the sandboxes' Python. A
    token is a byte, also in `context_tokens`.
    """
    with tempfile.TemporaryDirectory(prefix="prorl-") as folder:
        tiny = make_tiny_model(Path(folder) / "model")

        def sample(prompt: list[int]) -> tuple[list[int], list[float], FinishReason]:
            asked, begin, said = tiny.decode(prompt).rpartition(BEGIN)
            ids = tiny.turn(policy(asked + begin))[len(said.encode()) :]  # a long turn is requested in slices
            return ids, [-random.random() for _ in ids], "stop"

        says = FakeEngineConfig(
            vocab_size=VOCABULARY,
            end_of_turn_id=tiny.end_of_turn_id,
            max_model_len=context_tokens,
            development=True,
            tokenizer_file=f"{folder}/model/tokenizer.json",
        )
        async with open_fake_engine(script=sample, config=says) as engine, trio.open_nursery() as nursery:
            node_toml = {
                "model": {"path": f"{folder}/model"},
                "listen": {"port": 0, "token": secrets.token_hex(8), "endpoint_file": f"{folder}/endpoint.json"},
                "backends": {"urls": [engine.url]},
                "sandbox": {"provider": provider, "packages": [*packages]},
            }
            config = msgspec.convert(node_toml, NodeConfig)

            async def serve(*, task_status: trio.TaskStatus[tuple[str, int]]) -> None:  # noqa: ASYNC128 - serve_node does
                await serve_node(config, HandlerRegistry(handlers) if handlers else None, task_status=task_status)
                nursery.cancel_scope.cancel()

            await nursery.start(serve)
            endpoints = msgspec.json.decode(await trio.Path(config.listen.endpoint_file).read_bytes())
            yield LocalNode(endpoints["url"], endpoints["rest_url"], config.listen.token)
            nursery.cancel_scope.cancel()


def guess(prompt: str) -> str:
    """Multiply, correctly three times out of four."""
    factors = re.findall(r"(\d+) \* (\d+)", prompt)
    right = int(factors[-1][0]) * int(factors[-1][1]) if factors else 0
    return rf"I think it is \boxed{{{right + (random.random() < 0.25)}}}."


async def main(provider: str) -> None:
    """Serve the installed handlers until SIGTERM or Ctrl-C."""
    async with open_local_node(guess, provider=provider) as node:
        sys.stdout.write(
            f"export PRORL_URL={node.url} PRORL_REST={node.rest_url} PRORL_TOKEN={node.token}\n",
        )
        sys.stdout.flush()
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, (sys.argv[1:] or ["auto"])[0])
