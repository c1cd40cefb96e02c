"""A task's lease of a backend, called by the agent's loop. It is sticky, and moves only for a stated reason."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import trio

from prorl_trio.inference.engines.protocol import CannotStream, CompletionRequest, CompletionTimedOut, RequestRefused
from prorl_trio.inference.pool.admission import unseen
from prorl_trio.inference.pool.pace import Production
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.inference.engines.protocol import Completion, EngineClient, EngineInfo
    from prorl_trio.inference.pool.admission import Waiting
    from prorl_trio.inference.pool.backend import Backend
    from prorl_trio.inference.pool.balancer import LoadBalancer
    from prorl_trio.inference.pool.partial import PartialCompletion
    from prorl_trio.inference.pool.placement import Assignment


ATTEMPTS = ("first", "repinned", "repinned-2", "repinned-3")
"""Names of the attempts at one completion without any tokens, each on another backend."""

MAX_EMPTY_ABORTS = 3
"""Maximal number of empty aborts in one completion by an engine that this pool did not ask to abort."""


class _Call(NamedTuple):
    """A call of an engine with the `known` facts, after `closings` closings; `scouts`: streamed to measure the pace."""

    backend: Backend
    known: EngineInfo
    sent_s: float
    closings: int
    tokens: int
    scouts: bool
    streams: bool


class Attempt:
    """An attempt at `partial`. Pauses and slices split it into several calls."""

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
        """Before a call, move the task to another backend if that is better; return the URL of its backend."""
        self._balancer.place(self._assignment, None if self._partial.begun else self._partial)
        return self._assignment.backend.url

    async def call(self) -> Completion | None:
        """Ask the engine for the missing tokens. Returns None if more calls are needed."""
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
                return None  # the engine is slow; another call continues from there
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
        """Decide how many tokens to request, and whether to stream them."""
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
                    guide=partial.request.guide,
                )
            )

    def _answered(self, call: _Call, completion: Completion, production: Production) -> Completion | None:
        """Add the answer to the tokens so far, and update the estimates. Returns None if more calls are needed."""
        backend, admission, now_s = call.backend, self._admission, trio.current_time()
        sampled, aborted = len(completion.token_ids), completion.finish_reason == "abort"
        if self._in_one_piece or (call.streams and not production.streamed):
            backend.pace.cannot_stream()
        production.answered(sampled, now_s, admission.opening)
        if not aborted and call.closings == admission.closings:
            backend.load.call_ended(now_s - call.sent_s)  # it was neither cut nor stalled
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


def unused(_since_s: float) -> None:
    """Ignore the production time of tokens."""


class Lease:
    """A task's lease of one backend, for all its calls. Created by `Backends.lease`."""

    def __init__(self, balancer: LoadBalancer, assignment: Assignment) -> None:
        self._balancer = balancer
        self._assignment = assignment
        self._failed: list[Backend] = []
        """The backends that `repin` has left since the last successful completion."""

    def __repr__(self) -> str:
        return f"<Lease of {self.task_id} on {self.url}>"

    @property
    def task_id(self) -> str:
        return self._assignment.task_id

    @property
    def url(self) -> str:
        return self._assignment.backend.url

    @property
    def client(self) -> EngineClient:
        """Return the client of the current backend; it changes with `repin`. The task must not close it."""
        return self._assignment.backend.client

    @property
    def info(self) -> EngineInfo:
        """Return the results of the current backend's last probe."""
        return self._assignment.backend.info

    async def complete(
        self,
        partial: PartialCompletion,
        *,
        waiting: Waiting = unseen,
        calling: Waiting = unseen,
        produced: Callable[[float], None] = unused,
    ) -> Completion:
        """Complete `partial`. If a backend fails for good, continue on another; each backend is tried once.

        If no other backend is available, the same one may continue if it failed in the middle of an answer, or was too
        slow for an unstreamed answer. Received tokens are never sampled again: they stay in `partial`, even if this
        raises or is cancelled.

        Args:
            partial: the request, and the tokens so far.
            waiting: entered while the pool is paused: see `Admission.run`.
            calling: entered for each attempt, with its first backend.
            produced: called as tokens arrive, with the time at which the engine began to produce them: see
                `Production`.

        Raises:
            BackendError: the last backend's error. Otherwise as `EngineClient.generate`.
        """
        failed = 0
        while True:
            before = len(partial), partial.stream
            try:
                with calling(f"backend {self.url}: completion"):
                    return await self.attempt(partial, ATTEMPTS[failed], waiting=waiting, produced=produced)
            except BackendError as exc:
                went_on = (len(partial), partial.stream) > before  # it has more tokens, or will now stream
                failed = 0 if went_on else failed + 1
                if failed == len(ATTEMPTS) or not exc.retryable or not (self.repin() or went_on):
                    raise
            await trio.lowlevel.checkpoint()

    async def attempt(
        self,
        partial: PartialCompletion,
        name: str = ATTEMPTS[0],
        *,
        waiting: Waiting = unseen,
        produced: Callable[[float], None] = unused,
    ) -> Completion:
        """Ask the current backend for the rest of a completion, once the pool is not paused.

        See `EngineClient.generate`.

        If a pause aborts the completion, it continues after the resume from the tokens received, streamed or in the
        answer to the abort. After an abort by another client of the engine, it continues at once. The time-out applies
        to one call of the engine. It runs on during a pause that keeps the call, but not while waiting for a resume.
        The spans record the policy version of each token. `name` ends the request's id.
        """
        request_id = f"{partial.request.request_id}-{name}"
        attempt = Attempt(self._balancer, self._assignment, partial, request_id, produced)
        completion = await self._balancer.admission.run(attempt.place, attempt.call, waiting)
        self._failed.clear()
        return completion

    def freshen(self, max_staleness: int) -> None:
        """Move to another backend if this one's weights are more than `max_staleness` updates behind the trainer's.

        The target is the fresh backend with the fewest tasks; if there is none, nothing happens.
        """
        self._balancer.freshen(self._assignment, max_staleness)

    def repin(self) -> bool:
        """Move to the least loaded other backend, after this one failed.

        Backends that failed since the last successful completion are excluded: they have few tasks because tasks left
        them.

        Returns:
            False, still on the same backend, if no other one accepts tasks. Never waits.
        """
        self._failed.append(self._assignment.backend)
        moved = self._balancer.move(self._assignment, "failure", besides=self._failed)
        if not moved:
            self._failed.clear()
        return moved
