"""A task's hold on a backend: what the agent's loop calls. Sticky, and moved for a stated reason only."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import trio

from prorl_trio.inference.engines.engine import CannotStream, CompletionRequest, CompletionTimedOut, RequestRefused
from prorl_trio.inference.pool.gate import unseen
from prorl_trio.inference.pool.production import Production
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.inference.engines.engine import Completion, EngineClient, EngineInfo
    from prorl_trio.inference.pool.gate import Waiting
    from prorl_trio.inference.pool.partial import PartialCompletion
    from prorl_trio.inference.pool.placement import Backend, Lease
    from prorl_trio.inference.pool.pool import Backends

__all__ = ["BackendLease"]

ATTEMPTS = ("first", "repinned", "repinned-2", "repinned-3")
"""At one completion, in which nothing came, each on another backend."""
MAX_EMPTY_ABORTS = 3
"""Of one completion, by an engine that nobody had asked for them here."""


def unused(_since_s: float) -> None:
    """Nobody asks when tokens came."""


class BackendLease:
    """A task's hold on one backend, for all its calls. Made by `Backends.lease`."""

    def __init__(self, backends: Backends, lease: Lease) -> None:
        self._backends = backends
        self._lease = lease
        self._failed: list[Backend] = []
        """Those that `repin` left, since a completion succeeded."""

    def __repr__(self) -> str:
        return f"<BackendLease of {self.task_id} on {self.url}>"

    @property
    def task_id(self) -> str:
        """Who holds it."""
        return self._lease.task_id

    @property
    def url(self) -> str:
        """Of the backend held now."""
        return self._lease.backend.url

    @property
    def client(self) -> EngineClient:
        """The backend held now. Ask again after `repin`. Not the task's to close."""
        return self._backends.engine_of(self._lease).client

    @property
    def info(self) -> EngineInfo:
        """What the last probe of the backend held now found."""
        return self._backends.engine_of(self._lease).info

    async def complete(
        self,
        partial: PartialCompletion,
        *,
        waiting: Waiting = unseen,
        calling: Waiting = unseen,
        produced: Callable[[float], None] = unused,
    ) -> Completion:
        """The completion; where a backend fails for good, another one goes on, and so on, each but once.

        Where there is no other, one may go on itself that failed in the middle of an answer, or was too slow for one in
        one piece. Nothing received is sampled again: it stays in `partial`, also if this raises or is cancelled.

        Args:
            partial: what is asked for, and what there is of it.
            waiting: entered while the pool is paused: see `CompletionGate.run`.
            calling: entered for each attempt, with the backend that it begins on.
            produced: told, as tokens come, since when the engine worked on them: see `Production`.

        Raises:
            BackendError: the last one's. Otherwise as `EngineClient.generate`.
        """
        failed = 0
        while True:
            before = len(partial), partial.stream
            try:
                with calling(f"backend {self.url}: completion"):
                    return await self.attempt(partial, ATTEMPTS[failed], waiting=waiting, produced=produced)
            except BackendError as exc:
                went_on = (len(partial), partial.stream) > before  # it has more tokens, or will have them streamed now
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
        """The rest of a completion from the backend held now, once the pool is not paused; see `EngineClient.generate`.

        A pause that aborts has it continued after the resume, from the tokens received: those the engine answered the
        abort with, or those streamed before. So it is with an abort that somebody else asked the engine for, at once.
        The time-out is for one call of the engine, and goes on in a pause that keeps it; the wait for a resume is not
        counted. The spans say which tokens were sampled under which policy version. `name` ends the request's id.
        """
        empty_aborts, in_one_piece = 0, False
        request_id, timeout_s = f"{partial.request.request_id}-{name}", partial.request.timeout_s

        def place() -> str:
            self._backends.place(self._lease, None if partial.begun else partial)
            return self.url

        async def call() -> Completion | None:
            nonlocal empty_aborts, in_one_piece
            engine = self._backends.engine_of(self._lease)
            known = engine.info
            if (whole := partial.begin_attempt(lambda: engine.info)) is not None:
                await trio.lowlevel.checkpoint()
                return whole
            gate, sent_s = self._backends.gate, trio.current_time()
            wanted, closings = partial.next_tokens, gate.closings
            scouts = not in_one_piece and partial.slice_tokens and engine.pace.wants_stream(wanted, timeout_s, sent_s)
            streams = partial.stream or scouts
            wanted = partial.room if streams else wanted
            production = Production(produced, engine.pace, sent_s, gate.opening)

            def receive(token_ids: list[int], logprobs: list[float]) -> int | None:
                production.piece(len(token_ids), trio.current_time(), gate.opening)
                return partial.receive(token_ids, logprobs)

            with self._backends.judged(self._lease.backend):
                try:
                    with engine.pace.scout() if streams else nullcontext():
                        completion = await engine.client.generate(
                            CompletionRequest(
                                prompt_token_ids=partial.prompt_token_ids,
                                sampling=partial.request.sampling,
                                max_tokens=wanted,
                                request_id=request_id,
                                timeout_s=timeout_s,
                                cache_salt=known.policy_version,
                                sink=receive if streams else None,
                            )
                        )
                except CompletionTimedOut:
                    partial.stream = engine.pace.streams
                    if not partial.cut():
                        raise
                    return None  # it is slow, and goes on from there
                except (CannotStream, RequestRefused):
                    if partial.cut() or not scouts:
                        raise
                    in_one_piece = True
                    return None
                except BaseException:
                    partial.cut()
                    raise
                finally:
                    production.ended(trio.current_time())
                if in_one_piece or (streams and not production.streamed):
                    engine.pace.streams = False
                production.answered(len(completion.token_ids), trio.current_time(), gate.opening)
                if completion.finish_reason != "abort" and closings == gate.closings:
                    engine.load.call_ended(trio.current_time() - sent_s)  # it was neither cut nor stood still
                goes_on = completion.finish_reason == "length" and len(completion.token_ids) == wanted < partial.room
                whole = partial.add(completion)
                engine.heard(completion.label, known)
                empty_aborts += completion.finish_reason == "abort" and not completion.token_ids and not gate.closed
                if empty_aborts >= MAX_EMPTY_ABORTS:
                    raise BackendError(
                        f"{engine.client.url}: it aborted a completion before its first token, {empty_aborts} times, "
                        "and no pause was asked for here",
                        retryable=True,
                    )
            return None if goes_on else whole

        completion = await self._backends.gate.run(place, call, waiting)
        self._failed.clear()
        return completion

    def freshen(self, max_staleness: int) -> None:
        """Move to a backend whose weights are fresh enough, if this one's are not, and there is one."""
        if self._backends.behind(self._lease.backend) > max_staleness:
            fresh = self._backends.fresh(max_staleness)
            if fresh:
                self._backends.move(self._lease, "stale", min(fresh, key=lambda backend: backend.in_flight))

    def repin(self) -> bool:
        """Move to the least loaded other backend, after this one failed.

        Not to one that has failed since a completion succeeded: as its tasks left it, it has the least to do.

        Returns:
            False, still on the same backend, if no other one accepts tasks. Never waits.
        """
        self._failed.append(self._lease.backend)
        moved = self._backends.move(self._lease, "failure", besides=self._failed)
        if not moved:
            self._failed.clear()
        return moved
