"""The floor of `perf.engine`: the same prompts in a bare closed loop, and what an engine says of itself meanwhile."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.engine_slots import Call, PlacedRollout
from prorl_trio.http.client import HttpClient, HttpLimits
from prorl_trio.inference.engines.vllm_api import COMPLETIONS, AnswerPart, CompletionsBody, tokens_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from prorl_trio.types.models import Outcome

__all__ = ["EngineSeen", "RecordedTurn", "recorded_turns", "replay", "watch_engine"]

CALL_TIMEOUT_S: Final = 600.0
POLL_S: Final = 1.0
POLL_TIMEOUT_S: Final = 30.0
OK: Final = 200


class RecordedTurn(msgspec.Struct, frozen=True):
    """A call as it was made: the tokens that were new in its prompt, and how many it sampled.

    `fresh`: the prompt does not go on from the call before.
    """

    new_ids: list[int]
    sampled: int
    fresh: bool


def recorded_turns(outcome: Outcome) -> list[RecordedTurn]:
    """Return the calls of a rollout."""
    assert outcome.trajectory is not None
    turns: list[RecordedTurn] = []
    segment, done = -1, 0
    for turn in outcome.trajectory.turns:
        fresh = turn.segment != segment
        segment, start = turn.segment, 0 if fresh else done
        ids = outcome.trajectory.segments[segment].token_ids
        turns.append(
            RecordedTurn(
                ids[start : turn.completion_start].tolist(), turn.completion_end - turn.completion_start, fresh
            )
        )
        done = turn.completion_end
    return turns


async def replay(
    url: str, model: str, rollouts: Sequence[Sequence[RecordedTurn]], slots: int, *, salt: str, temperature: float
) -> list[PlacedRollout]:
    """Make the same calls with nothing in between: `slots` at a time, the calls of a rollout one after the other.

    Each prompt is the recorded one, with what this loop itself sampled in place of what was sampled before: so the
    engine's prefix cache serves it as it served the run, where recorded ids would be strange to it. Every call samples
    as many tokens as the recorded one. `salt` keeps it from the prefixes of other runs.

    Returns the rollouts in the order of their start, in seconds since the beginning.
    """
    placed: list[PlacedRollout] = []
    waiting = iter(rollouts)
    http = HttpClient(url, limits=HttpLimits(max_connections=slots))
    began_s = trio.current_time()

    async def call(prompt: list[int], sampled: int) -> list[int]:
        body = CompletionsBody(
            model=model,
            prompt=msgspec.Raw(msgspec.json.encode(prompt)),
            max_tokens=sampled,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            stop_token_ids=[],
            ignore_eos=True,
            cache_salt=salt,
        )
        response = await http.request(
            "POST",
            COMPLETIONS,
            body=msgspec.json.encode(body),
            headers=[("Content-Type", "application/json")],
            timeout_s=CALL_TIMEOUT_S,
        )
        if response.status != OK:
            raise RuntimeError(f"the engine answered {response.status}: {response.body[:400]!r}")
        return tokens_of(msgspec.json.decode(response.body, type=AnswerPart).choices[0])[0]

    async def work(waiting: Iterator[Sequence[RecordedTurn]]) -> None:
        for turns in waiting:
            start_s = trio.current_time() - began_s
            calls: list[Call] = []
            ids: list[int] = []
            for turn in turns:
                ids = [*([] if turn.fresh else ids), *turn.new_ids]
                call_s = trio.current_time() - began_s
                ids += await call(ids, turn.sampled)
                calls.append(Call(call_s, trio.current_time() - began_s, turn.sampled))
            placed.append(PlacedRollout(start_s=start_s, end_s=trio.current_time() - began_s, calls=calls))

    try:
        async with trio.open_nursery() as nursery:
            for _ in range(slots):
                nursery.start_soon(work, waiting)
    finally:
        http.close()
    return sorted(placed, key=lambda rollout: rollout.start_s)


class EngineSeen(msgspec.Struct):
    """The engine's own figures of a time.

    Attributes:
        polls: how often it was looked at. `busy`: in how many of them it had a request.
        running: requests in it, summed over the polls.
        latency_s: of the requests that ended, from their arrival to their last token, by its own clock.
    """

    polls: int = 0
    busy: int = 0
    running: float = 0.0
    latency_s: float = 0.0

    @property
    def busy_share(self) -> float:
        """Return the share of the time in which it had a request."""
        return self.busy / self.polls if self.polls else 0.0

    @property
    def mean_running(self) -> float:
        """Return the requests that it had at a time."""
        return self.running / self.polls if self.polls else 0.0


@asynccontextmanager
async def watch_engine(url: str) -> AsyncIterator[EngineSeen]:
    """Look at vLLM's metrics each second while the block runs; the figures are complete when it is left."""
    seen, http = EngineSeen(), HttpClient(url)

    async def read() -> tuple[float, float]:
        page = (await http.request("GET", "/metrics", timeout_s=POLL_TIMEOUT_S)).body.decode()
        return _sum(page, "vllm:num_requests_running"), _sum(page, "vllm:e2e_request_latency_seconds_sum")

    async def poll() -> None:
        while True:
            await trio.sleep(POLL_S)
            running, _ = await read()
            seen.polls += 1
            seen.busy += running > 0
            seen.running += running

    try:
        _, before_s = await read()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            yield seen
            nursery.cancel_scope.cancel()
        seen.latency_s = (await read())[1] - before_s
    finally:
        http.close()


def _sum(page: str, name: str) -> float:
    """Return the sum of a metric's values over all its labels; 0 if the page does not have it."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? +(\S+)", page, re.MULTILINE))
