"""Checks of gold answers with the grader's own parser, before compute is spent on a rollout.

`AgentHandler.gold_check` names a scorer that grades a task's gold answer against itself. It is called by a node when a
job is submitted, and by a loader when a task set is read. Each payload is checked once, for any number of rollouts.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_trio.agent.scoring import NotScored
from prorl_trio.types.errors import EvaluationError, MalformedJob, SandboxUnavailable, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prorl_trio.agent.scoring import ScorerPool
    from prorl_trio.tasks.handlers.base import AgentHandler

logger = logging.getLogger(__name__)

PAYLOAD_PATH: Final = "$.instance.payload"
MAX_KNOWN: Final = 100_000
"""Limit on cached verdicts. Beyond it, the oldest is dropped and computed again if needed."""
CALL_TIMEOUT_S: Final = 120.0
"""Wall time of one check. It only ends checks that the CPU limit of scoring processes does not end."""
CALLS_AT_ONCE: Final = 64
MAX_SHOWN_CHARS: Final = 300

_canonical = msgspec.msgpack.Encoder(order="sorted")
Task = tuple["AgentHandler", "Mapping[str, Any]"]


def validate_payload(handler: AgentHandler, payload: Mapping[str, Any]) -> None:
    """Call the handler's `validate`.

    Raises:
        MalformedJob: the handler refuses the payload, or its check raises another exception.
    """
    try:
        handler.validate(payload)
    except ServiceError:
        raise
    except Exception as exc:  # a plug-in's check must not end the node
        raise MalformedJob(
            f"handler {handler.name} cannot read the payload: {type(exc).__name__}: {exc}", path=PAYLOAD_PATH
        ) from exc


class GoldChecks:
    """The verdicts on gold answers, computed in scoring processes and cached by payload.

    A check may be impossible: no process starts, it is killed, or the machine is too slow. The payload then counts as
    sound, a warning is logged, and the evaluation of its rollouts decides. A gold answer that makes the check raise,
    crash or exceed its CPU time is refused, because each evaluation would fail in the same way.
    """

    def __init__(self, scorers: ScorerPool) -> None:
        self.unchecked = 0
        """Number of payloads that count as sound because their check was impossible."""
        self._scorers = scorers
        self._known: dict[bytes, MalformedJob | None] = {}
        self._running: dict[bytes, trio.Event] = {}
        self._examinations: set[trio.CancelScope] = set()
        self._ended = trio.lowlevel.ParkingLot()
        self._closed = False

    def is_unknown(self, handler: AgentHandler, payload: Mapping[str, Any]) -> bool:
        """Return whether `examine` has to compute the verdict about this payload."""
        key = _key(handler, payload)
        return key is not None and key not in self._known

    def refusal(self, handler: AgentHandler, payload: Mapping[str, Any]) -> MalformedJob | None:
        """Return why a payload is refused; None if it is accepted or not yet checked."""
        key = _key(handler, payload)
        return None if key is None else self._known.get(key)

    async def examine(
        self, tasks: Iterable[Task], *, timeout_s: float, on_done: Callable[[], None] = lambda: None
    ) -> None:
        """Compute the missing verdicts on payloads; return when all are available. Safe to cancel.

        Payloads that `validate` refuses are skipped. After `timeout_s` the remaining payloads count as sound. `on_done`
        is called after each payload.
        """
        todo = [] if self._closed else list(tasks)
        left = iter(todo)
        with trio.move_on_after(timeout_s) as scope:
            self._examinations.add(scope)
            try:
                async with trio.open_nursery() as nursery:
                    for _ in range(min(CALLS_AT_ONCE, len(todo))):
                        nursery.start_soon(self._examine_each, left, on_done)
            finally:
                self._examinations.remove(scope)
                self._ended.unpark_all()
        if scope.cancelled_caught and not self._closed:
            self._give_up(todo, timeout_s)

    async def aclose(self) -> None:
        """Cancel running checks, and return when they have ended. Later calls of `examine` do nothing."""
        self._closed = True
        for scope in self._examinations:
            scope.cancel()
        while self._examinations:
            await self._ended.park()

    async def _examine_each(self, tasks: Iterator[Task], on_done: Callable[[], None]) -> None:
        for handler, payload in tasks:
            try:
                validate_payload(handler, payload)
            except ServiceError:
                await trio.lowlevel.checkpoint()
            else:
                if (key := _key(handler, payload)) is not None:
                    await self._examine(key, handler, payload)
            on_done()

    async def _examine(self, key: bytes, handler: AgentHandler, payload: Mapping[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        while key not in self._known:
            if (other := self._running.get(key)) is not None:
                await other.wait()
                continue
            done = self._running[key] = trio.Event()
            try:
                self._remember(key, await self._verdict(handler, payload))
            finally:
                del self._running[key]
                done.set()

    async def _verdict(self, handler: AgentHandler, payload: Mapping[str, Any]) -> MalformedJob | None:
        try:
            found = await self._scorers.score(handler.gold_check, {"payload": dict(payload)}, timeout_s=CALL_TIMEOUT_S)
        except (
            NotScored,
            SandboxUnavailable,
            OSError,
        ) as exc:  # the process failed, not the gold answer
            logger.warning("handler %s: a gold answer is not checked: %s", handler.name, exc)
            self.unchecked += 1
            return None
        except EvaluationError as exc:
            reason = str(exc).strip().splitlines()[-1][:MAX_SHOWN_CHARS]
            return MalformedJob(f"the gold answer cannot be graded: {reason}", PAYLOAD_PATH)
        error, path = found.get("error"), found.get("path")
        if not isinstance(error, str):
            return MalformedJob(f"{handler.gold_check} returned no text as `error`; empty means sound", PAYLOAD_PATH)
        return MalformedJob(str(error), str(path or PAYLOAD_PATH)) if error else None

    def _give_up(self, tasks: Iterable[Task], timeout_s: float) -> None:
        left = {key for handler, payload in tasks if (key := _key(handler, payload)) and key not in self._known}
        for key in left:
            self._remember(key, None)
        self.unchecked += len(left)
        logger.warning("%d gold answers are not checked: not done within %g s", len(left), timeout_s)

    def _remember(self, key: bytes, verdict: MalformedJob | None) -> None:
        self._known[key] = verdict
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]


def _key(handler: AgentHandler, payload: Mapping[str, Any]) -> bytes | None:
    """Return the key of a verdict; None if the handler lacks a check, or the payload cannot be encoded."""
    if not handler.gold_check:
        return None
    try:
        encoded = _canonical.encode((handler.gold_check, payload))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return hashlib.blake2b(encoded, digest_size=16).digest()
