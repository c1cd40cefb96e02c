"""Server-sent events of jobs. Each listener has a bounded buffer; events that do not fit are dropped and counted."""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.portable_text import portable_text
from prorl_trio.edges.responses import Response
from prorl_trio.types.errors import AdmissionRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prorl_trio.edges.responses import Receive, Scope, Send
    from prorl_trio.edges.rest.schema import EventsQuery
    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.types.models import Outcome, Status, Turn

MAX_DETAIL_CHARS: Final = 1000
RECENT_LOGS: Final = 50
"""Number of past warnings that a new listener gets."""
RETRY_AFTER_S: Final = 5.0


class Subscription:
    """A bounded queue of events for one listener."""

    def __init__(self, query: EventsQuery, max_events: int) -> None:
        self.wants_logs = query.logs
        self._query = query
        self._max_events = max_events
        self._events: deque[bytes] = deque()
        self._dropped = 0
        self._arrival = trio.lowlevel.ParkingLot()

    def wants(self, job: JobView) -> bool:
        """Return whether the job matches the listener's filter."""
        query = self._query
        return query.session in (None, job.session_id) and query.group in (None, job.group_id)

    def put(self, event: bytes) -> None:
        """Queue an event; drop and count it if the queue is full."""
        if len(self._events) >= self._max_events:
            self._dropped += 1
        else:
            self._events.append(event)
        self._arrival.unpark_all()

    async def next(self) -> bytes:
        """Wait for at least one event. Return all queued events as they are sent, with the count of dropped ones.

        Safe to cancel: no event is lost.
        """
        await trio.lowlevel.checkpoint()
        while not self._events:
            await self._arrival.park()
        payload = b"".join(self._events)
        self._events.clear()
        if self._dropped:
            payload += _event("dropped", {"count": self._dropped})
            self._dropped = 0
        return payload


class EventFeed:
    """An observer of the node that passes events to all subscribers. See `observer.Observer`."""

    def __init__(self, *, max_streams: int, max_events: int) -> None:
        self._max_streams = max_streams
        self._max_events = max_events
        self._subscriptions: list[Subscription] = []
        self._recent: deque[bytes] = deque(maxlen=RECENT_LOGS)

    def subscribe(self, query: EventsQuery) -> Subscription:
        """Add a listener and return its subscription. Call `unsubscribe` at its end.

        Raises:
            AdmissionRejected: too many listeners.
        """
        if len(self._subscriptions) >= self._max_streams:
            raise AdmissionRejected(
                f"{self._max_streams} event streams are open, the limit (rest.max_event_streams)", RETRY_AFTER_S
            )
        subscription = Subscription(query, self._max_events)
        self._subscriptions.append(subscription)
        for event in self._recent if query.logs else ():
            subscription.put(event)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)

    @contextmanager
    def logs(self) -> Iterator[None]:
        """Publish warnings of this process's log during the block, from any thread."""
        handler = _Passing(self.logged, trio.lowlevel.current_trio_token())
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)

    def logged(self, facts: dict[str, object]) -> None:
        """Publish a line of the log, and keep it for later listeners."""
        event = _event("log", facts)
        self._recent.append(event)
        for subscription in self._subscriptions:
            if subscription.wants_logs:
                subscription.put(event)

    def job_moved(self, job: JobView, status: Status, detail: str) -> None:
        """Publish a job's new stage. See `Observer`."""
        self._publish("job_moved", job, {"status": status, "detail": detail[:MAX_DETAIL_CHARS]})

    def turn_done(self, job: JobView, turn: Turn) -> None:
        """Publish the facts of a turn. See `Observer`.

        Tokens and text are omitted, because the outcome contains them.
        """
        facts = {
            "turn": job.turns,
            "completion_tokens": turn.completion_end - turn.completion_start,
            "finish_reason": turn.finish_reason,
            "tools": [call.name for call in turn.tool_calls],
            "inference_s": turn.inference_s,
            "tools_s": turn.tools_s,
        }
        self._publish("turn_done", job, facts)

    def job_ended(self, job: JobView, outcome: Outcome) -> None:
        """Publish a job's end. See `Observer`."""
        facts = {"status": outcome.status, "reward": outcome.reward, "cause": outcome.cause}
        self._publish("job_ended", job, {**facts, "error": outcome.error[:MAX_DETAIL_CHARS]})

    def _publish(self, kind: str, job: JobView, facts: Mapping[str, object]) -> None:
        listeners = [subscription for subscription in self._subscriptions if subscription.wants(job)]
        if listeners:
            who = {"job_id": job.job_id, "session": job.session_id, "group_id": job.group_id, "age_s": job.age_s}
            who["time_s"] = time.time()  # Unix time
            event = _event(kind, {**who, **facts})
            for subscription in listeners:
                subscription.put(event)


class _Passing(logging.Handler):
    """A handler that passes warnings to a function in the loop."""

    def __init__(self, take: Callable[[dict[str, object]], None], loop: trio.lowlevel.TrioToken) -> None:
        super().__init__(logging.WARNING)
        self._take = take
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = portable_text(record.getMessage()[:MAX_DETAIL_CHARS])
        except Exception:  # its arguments do not fit its text, which logging itself reports elsewhere
            return
        facts = {"time_s": record.created, "level": record.levelname, "logger": record.name, "message": message}
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(self._take, facts)


class EventStream(Response):
    """An answer that continues until the listener disconnects or the server closes.

    Sends a comment after every `heartbeat_interval_s` without an event.
    """

    def __init__(self, feed: EventFeed, query: EventsQuery, closing: trio.Event, heartbeat_interval_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store"}, media_type="text/event-stream; charset=utf-8")
        self._feed = feed
        self._query = query
        self._closing = closing
        self._heartbeat_interval_s = heartbeat_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until cancelled, disconnected or closing; always unsubscribes.

        Raises:
            AdmissionRejected: too many listeners. Nothing has been sent in this case.
        """
        subscription = self._feed.subscribe(self._query)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body"})
                return
            async with open_single_nursery() as nursery:
                nursery.start_soon(_cancel_at_disconnect, receive, nursery.cancel_scope)
                nursery.start_soon(_cancel_at, self._closing, nursery.cancel_scope)
                await self._send_events(subscription, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._feed.unsubscribe(subscription)

    async def _send_events(self, subscription: Subscription, send: Send) -> None:
        await send({"type": "http.response.body", "body": b": connected\n\n", "more_body": True})
        while True:
            payload = b": heartbeat\n\n"
            with trio.move_on_after(self._heartbeat_interval_s):
                payload = await subscription.next()
            await send({"type": "http.response.body", "body": payload, "more_body": True})


async def _cancel_at_disconnect(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _cancel_at(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _event(kind: str, facts: dict[str, object]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(facts))
