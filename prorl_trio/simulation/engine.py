"""A simulated LLM engine that samples no real tokens: continuous batching, a KV cache with prefixes, one decoder.

It uses trio's clock without I/O, so that with an autojump clock hours pass in seconds. Simplifications: prefill does
not slow down decoding, and a completion's whole context is reserved at its start.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from contextlib import asynccontextmanager
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.inference.engines.load_report import LoadReport
from prorl_trio.inference.engines.protocol import Completion, CompletionRequest, EngineClient, EngineInfo
from prorl_trio.types.errors import BackendError, ContextLengthExceeded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.simulation.config import EngineModel

_SLACK_S: Final = 1e-9
"""Tolerance for clock rounding: work with less than this left is done."""


class _Decoder:
    """Decodes all completions at the same pace, which falls when their total demand exceeds the limit."""

    def __init__(self, max_tokens_per_s: float) -> None:
        self.max_tokens_per_s = max_tokens_per_s
        self.wanted_tokens_per_s = 0.0
        self._served_s = 0.0
        self._at_s = 0.0
        self._line: list[tuple[float, int, float, trio.Event]] = []
        self._order = count()
        self._changed = trio.Event()

    @property
    def pace(self) -> float:
        """Return the speed of each completion, relative to running alone."""
        return min(1.0, self.max_tokens_per_s / self.wanted_tokens_per_s) if self._line else 1.0

    async def decode(self, tokens: int, tokens_per_s: float) -> None:
        """Return when `tokens` are sampled; alone this would take `tokens / tokens_per_s`."""
        self._advance()
        done = trio.Event()
        entry = (self._served_s + tokens / tokens_per_s, next(self._order), tokens_per_s, done)
        heapq.heappush(self._line, entry)
        self.wanted_tokens_per_s += tokens_per_s
        self._changed.set()
        try:
            await done.wait()
        finally:
            if not done.is_set():
                self._advance()
                self._line.remove(entry)
                heapq.heapify(self._line)
                self._leave(tokens_per_s)
                self._changed.set()

    async def serve(self) -> None:
        """Wake finished completions, until cancelled."""
        while True:
            self._changed = trio.Event()
            self._advance()
            while self._line and self._line[0][0] <= self._served_s + _SLACK_S:
                _, _, tokens_per_s, done = heapq.heappop(self._line)
                self._leave(tokens_per_s)
                done.set()
            with trio.CancelScope() as scope:
                if self._line:
                    scope.deadline = self._at_s + (self._line[0][0] - self._served_s) / self.pace
                await self._changed.wait()

    def _advance(self) -> None:
        now_s = trio.current_time()
        self._served_s += (now_s - self._at_s) * self.pace
        self._at_s = now_s

    def _leave(self, tokens_per_s: float) -> None:
        self.wanted_tokens_per_s = self.wanted_tokens_per_s - tokens_per_s if self._line else 0.0


class SimulatedEngine(EngineClient):
    """A simulated backend. Its attributes show its state; use it within `open`.

    Attributes:
        running: number of completions in the batch. `waiting`: number of queued completions.
        reserved_tokens: tokens of the KV cache reserved by running completions.
        prefilling: whether a prefill is in progress.
        completions, tokens_sampled, prompt_tokens, prefix_hits_tokens: totals so far.
    """

    def __init__(
        self,
        url: str,
        model: EngineModel,
        *,
        failure_rate: float,
        seed: str,
        speed: float = 1.0,
        max_answer_s: float = 0.0,
    ) -> None:
        """Create an idle engine.

        Args:
            url: its name.
            model: its performance.
            failure_rate: of completions.
            seed: for random draws.
            speed: a factor of all rates in `model`.
            max_answer_s: maximal duration of probes and reports.
        """
        self.url = url
        self.model = model
        self.decoder = _Decoder(speed * model.max_tokens_per_s)
        self.running = 0
        self.waiting = 0
        self.reserved_tokens = 0
        self.completions = 0
        self.tokens_sampled = 0
        self.prompt_tokens = 0
        self.prefix_hits_tokens = 0
        self._failure_rate = failure_rate
        self._seed = seed
        self._speed = speed
        self._max_answer_s = max_answer_s
        self._answers = Random(f"{seed} answers")
        self._prefill = trio.Lock()
        self._line = trio.Lock()
        self._freed = trio.Event()
        self._cached: OrderedDict[str, int] = OrderedDict()

    @property
    def prefilling(self) -> bool:
        """Return whether a prompt is being processed."""
        return self._prefill.locked()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SimulatedEngine]:
        """Decode within the block."""
        async with open_single_nursery() as nursery:
            nursery.start_soon(self.decoder.serve)
            yield self
            nursery.cancel_scope.cancel()

    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """See `EngineClient.probe`. Always succeeds."""
        del timeout_s
        await self._take_time()
        return EngineInfo(
            url=self.url, model="simulated", max_model_len=self.model.kv_tokens, engine="simulated", policy_version="0"
        )

    async def generate(self, request: CompletionRequest) -> Completion:
        """See `EngineClient.generate`. Samples exactly `max_tokens` zeros.

        The request's id is `JOB-tTURN`, optionally followed by the name of an attempt: each attempt of a turn draws the
        same numbers.
        """
        job_id, _, rest = request.request_id.rpartition("-t")
        random, max_tokens = Random(f"{self._seed} {job_id}-t{rest.partition('-')[0]}"), request.max_tokens
        if random.random() < self._failure_rate:
            await trio.lowlevel.checkpoint()
            raise BackendError(f"{self.url}: simulated failure of {request.request_id}", retryable=True)
        tokens_per_s = self._speed * max(1e-3, self.model.tokens_per_s.draw(random))
        with trio.move_on_after(request.timeout_s) as patience:
            await self._complete(job_id, len(request.prompt_token_ids), max_tokens, tokens_per_s)
        if patience.cancelled_caught:
            raise BackendError(f"{self.url}: no completion within {request.timeout_s:g} s", retryable=True)
        self.completions += 1
        self.tokens_sampled += max_tokens
        return Completion(
            token_ids=array("i", bytes(4 * max_tokens)),
            logprobs=array("f", bytes(4 * max_tokens)),
            finish_reason="stop",
            policy_version="0",
            engine="simulated",
        )

    async def load(self, *, timeout_s: float) -> LoadReport:
        del timeout_s
        await self._take_time()
        read = self.prompt_tokens - self.prefix_hits_tokens
        return LoadReport(
            running=self.running,
            waiting=self.waiting,
            kv_usage=self.reserved_tokens / self.model.kv_tokens,
            prefill_tokens_total=read,
            prefill_s_total=read / self._prefill_tokens_per_s,
        )

    async def aclose(self) -> None:
        """Do nothing."""
        await trio.lowlevel.checkpoint()

    @property
    def _prefill_tokens_per_s(self) -> float:
        return self._speed * self.model.prefill_tokens_per_s

    async def _take_time(self) -> None:
        """Simulate the duration of a probe or report."""
        await trio.sleep(self._answers.random() * self._max_answer_s)

    async def _complete(self, job_id: str, prompt_tokens: int, max_tokens: int, tokens_per_s: float) -> None:
        reserved = prompt_tokens + max_tokens
        if reserved > self.model.kv_tokens:
            await trio.lowlevel.checkpoint()
            raise ContextLengthExceeded(prompt_tokens, self.model.kv_tokens)
        await self._enter(reserved)
        try:
            known = min(prompt_tokens, self._cached.pop(job_id, 0))
            self._evict()
            self.prompt_tokens += prompt_tokens
            self.prefix_hits_tokens += known
            async with self._prefill:
                await trio.sleep((prompt_tokens - known) / self._prefill_tokens_per_s)
            await self.decoder.decode(max_tokens, tokens_per_s)
            self._cached[job_id] = reserved
        finally:
            self.running -= 1
            self.reserved_tokens -= reserved
            self._evict()
            self._freed.set()

    async def _enter(self, reserved: int) -> None:
        """Wait for a place in the batch and room in the cache, in order of arrival."""
        self.waiting += 1
        try:
            async with self._line:
                while self.running == self.model.max_batch or self.reserved_tokens + reserved > self.model.kv_tokens:
                    self._freed = trio.Event()
                    await self._freed.wait()
                self.running += 1
                self.reserved_tokens += reserved
        finally:
            self.waiting -= 1

    def _evict(self) -> None:
        """Evict the least recently used prefixes until there is enough room."""
        room = self.model.kv_tokens - self.reserved_tokens
        kept = sum(self._cached.values())
        while kept > room:
            kept -= self._cached.popitem(last=False)[1]
