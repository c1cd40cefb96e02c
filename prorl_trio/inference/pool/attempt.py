"""An attempt at a completion on one backend: call after call, until it is whole or the engine fails it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import trio

from prorl_trio.inference.engines.protocol import CannotStream, CompletionRequest, CompletionTimedOut, RequestRefused
from prorl_trio.inference.pool.pace import Production
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.inference.engines.protocol import Completion, EngineInfo
    from prorl_trio.inference.pool.backend import Backend
    from prorl_trio.inference.pool.balancer import LoadBalancer
    from prorl_trio.inference.pool.partial import PartialCompletion
    from prorl_trio.inference.pool.placement import Assignment

MAX_EMPTY_ABORTS = 3
"""The most in one completion, by an engine that nobody had asked for them here."""


class _Call(NamedTuple):
    """A call of an engine that is `known` so, after so many `closings`; `scouts`: streamed to learn the pace."""

    backend: Backend
    known: EngineInfo
    sent_s: float
    closings: int
    tokens: int
    scouts: bool
    streams: bool


class Attempt:
    """An attempt at `partial`. A pause may cut it, and slices have it go on: each time another call is made."""

    def __init__(
        self,
        balancer: LoadBalancer,
        assignment: Assignment,
        partial: PartialCompletion,
        request_id: str,
        produced: Callable[[float], None],
    ) -> None:
        """See `Lease.attempt`."""
        self._balancer = balancer
        self._admission = balancer.admission
        self._assignment = assignment
        self._partial = partial
        self._request_id = request_id
        self._produced = produced
        self._empty_aborts = 0
        self._in_one_piece = False

    def place(self) -> str:
        """Move the task to another backend, before a call, if that is better; return the URL of the one it is on."""
        self._balancer.place(self._assignment, None if self._partial.begun else self._partial)
        return self._assignment.backend.url

    async def call(self) -> Completion | None:
        """Ask the engine for what is missing. None: there is more to come."""
        backend, partial = self._assignment.backend, self._partial
        if (whole := partial.begin_attempt(lambda: backend.info)) is not None:
            await trio.lowlevel.checkpoint()
            return whole
        call = self._begin(backend)
        production = Production(self._produced, backend.pace, call.sent_s, self._admission.opening)
        with self._balancer.judged(backend):
            try:
                completion = await self._ask(call, production)
            except CompletionTimedOut:
                partial.stream = backend.pace.streams
                if not partial.cut():
                    raise
                return None  # it is slow, and goes on from there
            except (CannotStream, RequestRefused):
                if partial.cut() or not call.scouts:
                    raise
                self._in_one_piece = True
                return None
            except BaseException:
                partial.cut()
                raise
            finally:
                production.ended(trio.current_time())
            return self._answered(call, completion, production)

    def _begin(self, backend: Backend) -> _Call:
        """Decide how much the engine is asked for, and whether it is to stream that."""
        partial, sent_s = self._partial, trio.current_time()
        tokens, timeout_s = partial.next_tokens, partial.request.timeout_s
        may_scout = not self._in_one_piece and partial.slice_tokens > 0
        scouts = may_scout and backend.pace.wants_stream(tokens, timeout_s, sent_s)
        streams = partial.stream or scouts
        tokens = partial.room if streams else tokens
        return _Call(backend, backend.info, sent_s, self._admission.closings, tokens, scouts, streams)

    async def _ask(self, call: _Call, production: Production) -> Completion:
        partial = self._partial

        def receive(token_ids: list[int], logprobs: list[float]) -> int | None:
            production.piece(len(token_ids), trio.current_time(), self._admission.opening)
            return partial.receive(token_ids, logprobs)

        with call.backend.pace.scout() if call.streams else nullcontext():
            return await call.backend.client.generate(
                CompletionRequest(
                    prompt_token_ids=partial.prompt_token_ids,
                    sampling=partial.request.sampling,
                    max_tokens=call.tokens,
                    request_id=self._request_id,
                    timeout_s=partial.request.timeout_s,
                    cache_salt=call.known.policy_version,
                    sink=receive if call.streams else None,
                )
            )

    def _answered(self, call: _Call, completion: Completion, production: Production) -> Completion | None:
        """Add the answer to what there is, and learn from how it came. None: there is more to come."""
        backend, admission, now_s = call.backend, self._admission, trio.current_time()
        sampled, aborted = len(completion.token_ids), completion.finish_reason == "abort"
        if self._in_one_piece or (call.streams and not production.streamed):
            backend.pace.cannot_stream()
        production.answered(sampled, now_s, admission.opening)
        if not aborted and call.closings == admission.closings:
            backend.load.call_ended(now_s - call.sent_s)  # it was neither cut nor stood still
        goes_on = completion.finish_reason == "length" and sampled == call.tokens < self._partial.room
        whole = self._partial.add(completion)
        backend.engine.heard(completion.label, call.known)
        self._empty_aborts += aborted and not sampled and not admission.closed
        if self._empty_aborts >= MAX_EMPTY_ABORTS:
            raise BackendError(
                f"{backend.url}: it aborted a completion before its first token, {self._empty_aborts} times, "
                "and no pause was asked for here",
                retryable=True,
            )
        return None if goes_on else whole
