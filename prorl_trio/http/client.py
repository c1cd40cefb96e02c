"""A small HTTP/1.1 client of one origin: a bounded keep-alive pool, FIFO waiting, cancel = close.

Every change of the pool's state is synchronous; `await` happens only on a connection that one task owns. Proxies,
redirects, cookies and compression are not supported, because engines on the cluster's network do not need them.
"""

from __future__ import annotations

import ssl
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11
import msgspec
import trio

from prorl_trio.http.connection import (
    ClientClosed,
    ConnectionLost,
    HttpConnection,
    HttpLimits,
    RequestTimedOut,
    Response,
    TooManyWaiting,
    open_connection,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random


RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A limit on the attempts of a call, and the delay between two attempts.

    The delay doubles after each attempt; the actual wait is random between half and all of it.

    With the defaults a dead backend is given up after 9 to 18 s, so that its tasks can move to another one.
    """

    max_attempts: int = 8
    first_delay_s: float = 0.25
    max_delay_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be >= 1, got {self.max_attempts}")

    def delay_s(self, attempt: int, random: Random) -> float:
        """Return the seconds to wait after failed attempt number `attempt`, counted from 1."""
        ceiling_s = min(self.first_delay_s * 2.0 ** (attempt - 1), self.max_delay_s)
        return ceiling_s * random.uniform(0.5, 1.0)


class HttpStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. `opened_total` counts connections since the start; `stale_total` counts reused ones found dead."""

    busy: int
    idle: int
    waiting: int
    max_connections: int
    requests_total: int
    opened_total: int
    stale_total: int


class HttpClient:
    """A client for requests to one origin, from any number of tasks.

    Idle connections are closed when a later request finds them expired, and at `close`. There is no background task.
    """

    def __init__(
        self, origin: str, *, limits: HttpLimits | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        """Open no connection yet.

        Args:
            origin: `http://host:port` or `https://host:port`, without a path.
            limits: see `HttpLimits`.
            ssl_context: for https; by default the system's certificate authorities are trusted.

        Raises:
            ValueError: `origin` has another form.
        """
        self.origin = origin.rstrip("/")
        self._limits = limits or HttpLimits()
        secure, self._host, self._port, self._authority = split_origin(self.origin)
        self._ssl_context = (ssl_context or ssl.create_default_context()) if secure else None
        self._slots = trio.Semaphore(self._limits.max_connections)
        self._idle: deque[HttpConnection] = deque()  # oldest first; the newest is reused first
        self._busy: set[HttpConnection] = set()
        self._closed = False
        self._requests_total = 0
        self._opened_total = 0
        self._stale_total = 0

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"busy {len(self._busy)}, idle {len(self._idle)}"
        waiting = self._slots.statistics().tasks_waiting
        return f"<HttpClient {self.origin}: {state}, waiting {waiting}, at most {self._limits.max_connections}>"

    def statistics(self) -> HttpStatistics:
        """Return the current state of the pool."""
        return HttpStatistics(
            busy=len(self._busy),
            idle=len(self._idle),
            waiting=self._slots.statistics().tasks_waiting,
            max_connections=self._limits.max_connections,
            requests_total=self._requests_total,
            opened_total=self._opened_total,
            stale_total=self._stale_total,
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Iterable[tuple[str, str]] = (),
        timeout_s: float,
        on_data: Callable[[bytes], bool] | None = None,
    ) -> Response:
        """Send one request and return its complete response, whatever its status.

        If `on_data` is given, it receives the body of a response of status 200 in pieces as they arrive, and the
        response has an empty body. If `on_data` returns True, the exchange ends there. It must not await. Its
        exceptions propagate.

        Waits in FIFO order while `max_connections` are busy. A cancelled or failed request closes its connection at
        once. If a kept-alive connection turns out to be closed before the first byte of the response, it is replaced
        once by a new connection. Nothing else is ever sent twice.

        Raises:
            ClientClosed, ConnectFailed, ConnectionLost, ResponseMalformed, ResponseTooLarge, TooManyWaiting: see the
                classes.
            RequestTimedOut: waiting, connecting and the exchange together took more than `timeout_s`.
        """
        if self._slots.statistics().tasks_waiting >= self._limits.max_waiting_requests:
            raise TooManyWaiting(
                f"{self.origin}: {self._limits.max_waiting_requests} requests wait for one of "
                f"{self._limits.max_connections} connections; raise the limits or add a backend"
            )
        standard = [("Host", self._authority), ("User-Agent", "prorl-trio"), ("Content-Length", str(len(body)))]
        head = h11.Request(method=method, target=path, headers=[*standard, *headers])
        with trio.move_on_after(timeout_s):
            async with self._slots:
                return await self._send(head, body, on_data)
        raise RequestTimedOut(f"{self.origin}: {method} {path} was not answered within {timeout_s:g} s", timeout_s)

    def close(self) -> None:
        """Close every connection. Current, waiting and later requests raise `ClientClosed`. Idempotent."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    async def _send(self, head: h11.Request, body: bytes, on_data: Callable[[bytes], bool] | None) -> Response:
        self._requests_total += 1
        kept = self._take_idle()
        if kept is not None:
            try:
                return await self._exchange(kept, head, body, on_data)
            except ConnectionLost as exc:
                if exc.received_bytes:
                    raise
                self._stale_total += 1
        self._check_open()
        fresh = await open_connection(self._host, self._port, self._limits, self._ssl_context)
        self._opened_total += 1
        return await self._exchange(fresh, head, body, on_data)

    async def _exchange(
        self,
        connection: HttpConnection,
        head: h11.Request,
        body: bytes,
        on_data: Callable[[bytes], bool] | None,
    ) -> Response:
        self._busy.add(connection)
        try:
            if self._closed:
                connection.close()
            response = await connection.exchange(head, body, on_data)
        except ConnectionLost:
            self._check_open()
            raise
        finally:
            self._busy.discard(connection)
        if connection.is_reusable() and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def _take_idle(self) -> HttpConnection | None:
        expired_at_s = trio.current_time() - self._limits.keep_alive_s
        while self._idle and self._idle[0].idle_since_s <= expired_at_s:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable():
                return connection
            self._stale_total += 1
            connection.close()
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed(f"{self.origin}: the client is closed")


def split_path(url: str) -> tuple[str, str]:
    """Return the origin of a server's URL, and the path in front of all its endpoints."""
    url = url.rstrip("/")
    path = urlsplit(url).path
    return url.removesuffix(path), path


def split_origin(origin: str) -> tuple[bool, str, int, str]:
    """Return `(secure, host, port, authority)` of an origin. Raises ValueError for anything else."""
    wrong = f"{origin!r} is not an origin like http://127.0.0.1:8000"
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"{wrong}: {exc}") from None
    if any(character <= " " or character > "~" for character in origin):
        raise ValueError(f"{wrong}: leave out white space, and all that is not printable ASCII")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{wrong}: give the scheme (http or https), the host and the port")
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{wrong}: leave out path, query and credentials")
    secure = parts.scheme == "https"
    return secure, parts.hostname, port or (443 if secure else 80), parts.netloc
