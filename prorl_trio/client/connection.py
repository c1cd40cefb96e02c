"""The functions that open a session, on a node or on the head of a fleet."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.session import MAX_MESSAGE_BYTES
from prorl_trio.client.address import HeadFile
from prorl_trio.client.client import connect_node
from prorl_trio.client.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from os import PathLike

    from prorl_trio.client.client import RolloutClient

HEAD_POLL_S: Final = 0.2
"""Interval in seconds at which a client polls for the missing entry of a head."""


@asynccontextmanager
async def connect(
    url: str | None = None,
    token: str = "",
    *,
    endpoint_file: str | PathLike[str] | None = None,
    fleet: str | PathLike[str] | None = None,
    session_id: str | None = None,
    resume_after: int = 0,
    connect_timeout_s: float = 10.0,
    reconnect_timeout_s: float = 300.0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    heartbeat_interval_s: float = 10.0,
    heartbeat_timeout_s: float = 30.0,
    tls_ca: str | PathLike[str] | None = None,
    shared_memory: bool = False,
    max_unacked_outcomes: int = 0,
    max_unacked_bytes: int = 0,
    observe_all: bool = False,
    observe_group: str = "",
) -> AsyncIterator[RolloutClient]:
    """Open a session on the node at `url`: `ws://HOST:PORT`, `wss://HOST:PORT` with TLS, `unix:///PATH`; or on a fleet.

        async with connect("ws://127.0.0.1:8700", token) as client:
            await client.submit(specs)
            async for outcome in client.results():
                ...

    Leaving the block without an exception acknowledges all outcomes that `results` has yielded. After an exception or a
    cancel, the last yielded outcome is kept for the session's next client. In both cases the connection is closed
    within 2 s, and jobs continue.

    With `fleet`, the session is on the head of the fleet in that folder (`prorl-trio fleet`). The client finds the head
    by its entry there, also after a restart on another machine or port. Jobs run where there is capacity. The jobs of a
    lost node run on other nodes as their next attempt, and each outcome comes once.

    Args:
        url: the node's address; `unix://` only on the node's own host.
        token: the node's token. It may be omitted for a fleet, because the head's entry contains it.
        endpoint_file: instead of `url`: the node's `listen.endpoint_file`. It is read again for every connection, so
            that the client finds a node that was restarted on another port. On the node's own host, as the same user,
            the client uses the Unix socket.
        fleet: instead of `url`: the folder of a fleet, the `fleet.dir` of its nodes.
        session_id: a session to resume; its unacknowledged outcomes come first. None: a new session.
        resume_after: the `RolloutClient.cursor` of the last outcome that the caller has. Outcomes up to it are
            acknowledged and not sent again.
        connect_timeout_s: time limit for the first connection, in seconds.
        reconnect_timeout_s: time limit for reconnecting, in seconds. An error page of a proxy does not end the
            attempts.
        max_message_bytes: limit of one message in either direction; at most the limit in the node's configuration.
        heartbeat_interval_s: interval between heartbeats, in seconds.
        heartbeat_timeout_s: the connection counts as lost after this many seconds without any frame.
        tls_ca: for `wss://`, a PEM file with the certificates to trust; None: the system's certificates.
        shared_memory: on the node's own host, map the node's token arrays instead of receiving them. The arrays of an
            outcome are then views of the node's memory. The node reuses this memory once the outcome is acknowledged,
            that is, when the next outcome is requested. Use the arrays before, or keep `outcome.detached()`. After
            that, `outcome.check()` and `pad_batch` raise StaleReference. It changes nothing elsewhere, or with a fleet.
        max_unacked_outcomes: number of outcomes that the node may send beyond the acknowledged ones. 0, or a number
            above the node's own limit: that limit.
        max_unacked_bytes: the same limit in bytes. A single outcome is sent whatever its size.
        observe_all: show the jobs of all other sessions in `observed`.
        observe_group: show the other sessions' jobs of this group in `observed`.

    Raises:
        ConnectionLost: no connection within `connect_timeout_s`; or the fleet lacks a head.
        Unauthorized: the token is wrong or malformed. Calls of the client raise it, too, when the node's token is
            replaced. A fleet's client without a `token` of its own reads the new token from the folder.
        ProtocolError: the other side is not a node, or is a node of another version; its certificate is not trusted; or
            `endpoint_file` was not written by a node.
        AdmissionRejected: the node has too many sessions.
        ConfigError: `tls_ca` cannot be used.
        ValueError: `url` is not valid, or not exactly one of `url`, `endpoint_file` and `fleet` is given.
    """
    if [url, endpoint_file, fleet].count(None) != 2:
        raise ValueError("connect needs the url of a node, its endpoint_file, or a fleet's folder, one of the three")
    head, read_token = None, None
    if fleet is not None:
        head = HeadFile(fleet)
        with trio.move_on_after(connect_timeout_s) as patience:
            found = await _wait_token(head)
        if patience.cancelled_caught:
            raise ConnectionLost(
                f"the fleet in {head.folder} has no head yet, after {connect_timeout_s:g} s (connect_timeout_s); "
                f"start it: prorl-trio fleet --dir {head.folder}"
            )
        if not token:
            token, read_token = found, head.read_token
    async with connect_node(
        url,
        token,
        endpoint_file=endpoint_file,
        head=head,
        read_token=read_token,
        session_id=session_id,
        resume_after=resume_after,
        connect_timeout_s=connect_timeout_s,
        reconnect_timeout_s=reconnect_timeout_s,
        max_message_bytes=max_message_bytes,
        heartbeat_interval_s=heartbeat_interval_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        tls_ca=tls_ca,
        shared_memory=shared_memory,
        max_unacked_outcomes=max_unacked_outcomes,
        max_unacked_bytes=max_unacked_bytes,
        observe_all=observe_all,
        observe_group=observe_group,
    ) as client:
        yield client


async def _wait_token(head: HeadFile) -> str:
    """Return the token of a fleet's head, as soon as a head has been started."""
    while True:
        try:
            return await head.read_token()
        except OSError:
            await trio.sleep(HEAD_POLL_S)
