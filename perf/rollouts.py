"""Jobs, engines and nodes that benchmarks share."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from itertools import repeat
from operator import mul
from typing import TYPE_CHECKING, Any, Final

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.session import Accepted
from prorl_trio.edges.endpoints import endpoint_url
from prorl_trio.node.garbage import open_garbage_searches
from prorl_trio.node.serve import serve_node
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from pathlib import Path

    from prorl_trio.client import RolloutClient
    from prorl_trio.config import NodeConfig
    from prorl_trio.sandbox.provider import SandboxProvider
    from prorl_trio.tasks.handlers.base import AgentHandler
    from prorl_trio.testing.fake_engine import FakeEngine
    from prorl_trio.testing.fake_sampling import Script
    from prorl_trio.types.models import Outcome

TOKEN: Final = "a-token-of-the-benchmark"
VOCABULARY: Final = 259
LOGPROB: Final = -0.25
SAMPLING: Final = SamplingParams(max_output_tokens=200)


def math_job(job_id: str, *, max_turns: int = 8, question: str = "6 * 7?", answer: str = "42") -> JobSpec:
    """Return a job of the mathematics handler."""
    instance = TaskInstance(instance_id=job_id, handler="math", payload={"question": question, "answer": answer})
    return JobSpec(job_id=job_id, instance=instance, sampling=SAMPLING, max_turns=max_turns)


async def submit_all(client: RolloutClient, jobs: Sequence[JobSpec]) -> None:
    """Submit jobs.

    Raises:
        RuntimeError: a job was rejected.
    """
    for answer in await client.submit(jobs):
        if not isinstance(answer, Accepted):
            raise RuntimeError(f"job {answer.job_id} was rejected: {answer.message}")


def run_span(outcome: Outcome, now_s: float) -> tuple[float, float]:
    """Return the start and end of a rollout's RUN. They follow from `now_s`, when its outcome arrives."""
    end_s = now_s - outcome.timing.eval_s - outcome.timing.queued_eval_s
    return end_s - outcome.timing.run_s, end_s


def steady_rate(spans: Iterable[tuple[float, float]], until_s: float, amounts: Iterable[float] | None = None) -> float:
    """Return the rollouts per second until the last one starts, so without the tail, in which slots become empty.

    A rollout that is then running counts for its elapsed share.

    Args:
        spans: start and end of each rollout, in seconds after the first one could start.
        until_s: start of the last rollout. The rate is 0 if that is at once.
        amounts: an amount for each rollout, such as its tokens, assumed to arrive evenly. The result is then their
            rate. The default is 1.
    """
    if until_s <= 0:
        return 0.0
    shares = (min(1.0, max(0.0, (until_s - start_s) / max(end_s - start_s, 1e-9))) for start_s, end_s in spans)
    return float(sum(map(mul, shares, repeat(1.0) if amounts is None else amounts))) / until_s


def engine_of(
    folder: Path, text: str, *, first_token_s: float = 0.0, max_model_len: int = 32_768
) -> tuple[FakeEngineConfig, Script]:
    """Write a tiny model to `folder`. Return the configuration and script of an engine that answers `text`. Blocks."""
    tiny = make_tiny_model(folder)
    ids = tiny.turn(text)
    logprobs = [LOGPROB] * len(ids)
    config = FakeEngineConfig(
        vocab_size=VOCABULARY,
        end_of_turn_id=tiny.end_of_turn_id,
        max_model_len=max_model_len,
        first_token_s=first_token_s,
    )
    return config, lambda _: (ids, logprobs, "stop")


@asynccontextmanager
async def open_engine(folder: Path, text: str, *, first_token_s: float = 0.0) -> AsyncIterator[FakeEngine]:
    """Serve a fake engine of a tiny model, which is written to `folder`. Every turn is `text`."""
    config, script = await trio.to_thread.run_sync(lambda: engine_of(folder, text, first_token_s=first_token_s))
    async with open_fake_engine(script=script, config=config) as engine:
        yield engine


@asynccontextmanager
async def serve_handler(
    config: NodeConfig, handler: AgentHandler, provider: SandboxProvider | None = None
) -> AsyncIterator[str]:
    """Serve a node with only this handler, as the `serve` command does; yield its URL.

    Run it in a separate process, which gets SIGTERM when the block is left.
    """

    async def serve(*, task_status: trio.TaskStatus[Any]) -> None:  # noqa: ASYNC128 - serve_node does
        await serve_node(config, HandlerRegistry([handler]), provider=provider, task_status=task_status)

    async with open_garbage_searches(), open_single_nursery() as nursery:
        yield endpoint_url(await nursery.start(serve))
        os.kill(os.getpid(), signal.SIGTERM)
