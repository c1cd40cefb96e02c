"""A whole node on a fake engine, for one test: it serves trainers, with real sandboxes."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import BackendConfig, ListenConfig, ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.edges.endpoints import endpoint_url
from prorl_trio.node.serve import serve_node
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.testing.fake_engine import FakeEngine, FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import JobSpec, Outcome, SamplingParams, TaskInstance
from support.skips import because

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from prorl_trio.types.models import FinishReason

TOKEN = "a-token-for-tests-0123456789"


def usable(provider: str) -> str:
    """Return the name of a provider that works here; skip the test otherwise."""
    try:
        trio.run(choose_provider, SandboxConfig(provider=provider))
    except ConfigError as exc:
        pytest.skip(because(f"{provider} does not work on this machine: {exc}", "prorl-trio doctor"))
    return provider


@asynccontextmanager
async def open_service(
    tmp_path: Path,
    *,
    provider: str = "process",
    says: Sequence[str] = (),
    policy: Callable[[str], str] | None = None,
    max_model_len: int = 4000,
    **config: Any,
) -> AsyncIterator[tuple[str, FakeEngine, Ends]]:
    """A node that serves; yields (url, engine, Ends).

    Its policy says what `says` has, or what `policy` makes of a prompt.
    """
    tiny = make_tiny_model(tmp_path / "model")
    turns = list(says)

    def script(prompt: list[int]) -> tuple[list[int], list[float], FinishReason]:
        next_one = turns.pop(0) if turns else "I do not know."
        ids = tiny.turn(next_one if policy is None else policy(tiny.decode(list(prompt))))
        return ids, [-(place % 7) / 8 for place in range(len(prompt), len(prompt) + len(ids))], "stop"

    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=max_model_len)
    result: list[int] = []
    async with open_fake_engine(script=script, config=engine_config) as engine, trio.open_nursery() as nursery:
        node_config = NodeConfig(
            model=ModelConfig(path=str(tmp_path / "model")),
            listen=ListenConfig(port=0, token=TOKEN, endpoint_file=str(tmp_path / "endpoint.json")),
            backends=BackendConfig(urls=[engine.url]),
            sandbox=SandboxConfig(provider=provider),
            **config,
        )

        async def serve(*, task_status: trio.TaskStatus[Any]) -> None:  # noqa: ASYNC128 - serve_node calls it
            result.append(await serve_node(node_config, task_status=task_status))

        address = await nursery.start(serve)
        ends = Ends(result)
        yield endpoint_url(address), engine, ends
        if not ends.signalled:
            ends.terminate()


class Ends:
    """Signals the node, which is this process, while it listens for signals."""

    def __init__(self, result: list[int]) -> None:
        self.result, self.signalled = result, False

    def terminate(self) -> None:
        assert self.result == []
        self.signalled = True
        os.kill(os.getpid(), signal.SIGTERM)


def job(job_id: str, question: str = "What is 6 * 7?", **fields: Any) -> JobSpec:
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": question, "answer": "42"})
    sampling = SamplingParams(max_output_tokens=200)
    return JobSpec(**{"job_id": job_id, "instance": instance, "sampling": sampling, "max_turns": 3, **fields})


async def outcome_of(url: str, spec: JobSpec) -> Outcome:
    """Submit a job, and return its outcome."""
    with trio.fail_after(90):
        async with connect(url, TOKEN) as client:
            await client.submit([spec])
            async for outcome in client.results(count=1):
                return outcome
    raise AssertionError("the stream of outcomes ended")
