"""The floor of `perf.engine`: the same prompts in a bare closed loop, and the engine's own metrics."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_trio.http.client import HttpClient
from prorl_trio.http.connection import HttpLimits
from prorl_trio.inference.engines.vllm_api import COMPLETIONS, AnswerPart, CompletionsBody, tokens_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from prorl_trio.types.models import Outcome


class Call(msgspec.Struct, frozen=True):
    """A completion: its start and end in seconds of the run, and its sampled tokens."""

    start_s: float
    end_s: float
    tokens: int

    def tokens_until(self, at_s: float) -> float:
        """Return the number of its tokens until then, if they arrived evenly."""
        if at_s >= self.end_s:
            return self.tokens
        return self.tokens * max(0.0, at_s - self.start_s) / (self.end_s - self.start_s)

    def seconds_until(self, at_s: float) -> float:
        """Return its running time until then."""
        return max(0.0, min(self.end_s, at_s) - self.start_s)


class PlacedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout in its slot, with its calls in order, and the seconds of waiting for tools."""

    start_s: float
    end_s: float
    calls: list[Call]
    tools_s: float = 0.0


def place_calls(start_s: float, end_s: float, turns: Sequence[tuple[float, float, int]]) -> PlacedRollout:
    """Return a rollout with turns of known durations: (seconds of the call, of the tools, tokens) each.

    The remaining time is divided evenly before, between and after the turns.
    """
    rest_s = max(0.0, end_s - start_s - sum(call_s + tools_s for call_s, tools_s, _ in turns))
    gap_s = rest_s / (len(turns) + 1)
    calls, now_s = [], start_s
    for call_s, tools_s, tokens in turns:
        now_s += gap_s
        calls.append(Call(now_s, now_s + call_s, tokens))
        now_s += call_s + tools_s
    return PlacedRollout(start_s=start_s, end_s=end_s, calls=calls, tools_s=sum(tools_s for _, tools_s, _ in turns))


SHARES: Final = {
    "calls": "a completion is under way",
    "tools": "a tool is at work",
    "between": "the node, between the two",
    "unready": "empty: sandboxes start",
    "tail": "empty: no rollout is left",
}
"""Uses of the slots' time."""


def account(rollouts: Sequence[PlacedRollout], slots: int, *, tail: bool) -> dict[str, float]:
    """Return the use of `slots` slots, from second 0 to the end, or without the `tail`.

    The tail begins when the last rollout has started, because slots then become empty. Seconds of tools and between
    calls are assumed to be spread evenly over a rollout.

    Returns:
        The time of slots by its uses, `SHARES`, which add up to 1; `wall_s`; `tokens_per_s`, sampled; and
        `tokens_per_call_s`, the mean tokens per second of a call: the engine's speed for one caller.

    Raises:
        ValueError: all rollouts start at second 0, and the time before the tail is requested.
    """
    last_start_s = max(rollout.start_s for rollout in rollouts)
    end_s = max(rollout.end_s for rollout in rollouts) if tail else last_start_s
    if end_s <= 0:
        raise ValueError(f"{len(rollouts)} rollouts in {slots} slots: all of the run is its tail")
    used_s = dict.fromkeys(SHARES, 0.0)
    tokens = 0.0
    for rollout in rollouts:
        here_s = max(0.0, min(rollout.end_s, end_s) - rollout.start_s)
        calls_s = sum(call.seconds_until(end_s) for call in rollout.calls)
        share = here_s / (rollout.end_s - rollout.start_s) if rollout.end_s > rollout.start_s else 0.0
        tools_s = min(rollout.tools_s * share, here_s - calls_s)
        used_s["calls"] += calls_s
        used_s["tools"] += tools_s
        used_s["between"] += here_s - calls_s - tools_s
        tokens += sum(call.tokens_until(end_s) for call in rollout.calls)
    if tail:
        used_in_tail_s = sum(max(0.0, rollout.end_s - last_start_s) for rollout in rollouts)
        used_s["tail"] = slots * (end_s - last_start_s) - used_in_tail_s
    used_s["unready"] = slots * end_s - sum(used_s.values())
    return {
        **{name: seconds / (slots * end_s) for name, seconds in used_s.items()},
        "wall_s": end_s,
        "tokens_per_s": tokens / end_s,
        "tokens_per_call_s": tokens / used_s["calls"] if used_s["calls"] else 0.0,
    }


CALL_TIMEOUT_S: Final = 600.0
POLL_S: Final = 1.0
POLL_TIMEOUT_S: Final = 30.0
OK: Final = 200


class RecordedTurn(msgspec.Struct, frozen=True):
    """A recorded call: the new tokens in its prompt, and the number of sampled tokens.

    `fresh`: the prompt does not continue the previous call.
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
    """Repeat the same calls directly: `slots` at a time, the calls of a rollout one after the other.

    Each prompt is the recorded one, with this loop's own samples instead of the recorded samples. The engine's prefix
    cache therefore works as in the run, while it would not know recorded ids. Every call samples the recorded number of
    tokens. `salt` separates it from the prefixes of other runs.

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
    """The engine's own figures over a period.

    Attributes:
        polls: number of polls. `busy`: number of polls with a running request.
        running: running requests, summed over the polls.
        latency_s: of finished requests, from arrival to their last token, by the engine's clock.
    """

    polls: int = 0
    busy: int = 0
    running: float = 0.0
    latency_s: float = 0.0

    @property
    def busy_share(self) -> float:
        return self.busy / self.polls if self.polls else 0.0

    @property
    def mean_running(self) -> float:
        return self.running / self.polls if self.polls else 0.0


@asynccontextmanager
async def watch_engine(url: str) -> AsyncIterator[EngineSeen]:
    """Poll vLLM's metrics every second during the block. The figures are complete when it ends."""
    seen, http = EngineSeen(), HttpClient(url)

    async def read() -> tuple[float, float]:
        page = await read_metrics(http)
        names = ("num_requests_running", "e2e_request_latency_seconds_sum")
        running, latency_s = (metric_sum(page, f"vllm:{name}") for name in names)
        return running, latency_s

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


async def read_metrics(http: HttpClient) -> str:
    """Return the metrics page of a vLLM server."""
    return (await http.request("GET", "/metrics", timeout_s=POLL_TIMEOUT_S)).body.decode()


def metric_sum(page: str, name: str) -> float:
    """Return the sum of a metric's values over all its labels; 0 if it is missing."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? +(\S+)", page, re.MULTILINE))
