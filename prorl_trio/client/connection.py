"""The way in: a session on one node, or on all nodes of a fleet."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from ipc.session import MAX_MESSAGE_BYTES
from prorl_trio.client.address import HeadFile
from prorl_trio.client.client import connect_node
from prorl_trio.client.fleet.opening import open_fleet
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from os import PathLike

    from prorl_trio.client.client import RolloutClient

__all__ = ["connect"]


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

    Leaving the block without an exception acknowledges all that `results` has yielded; with an exception or a cancel,
    the outcome yielded last is kept for the session's next client. Either way the connection is closed, within 2 s, and
    jobs go on.

    With `fleet`, the session is on the head of the fleet in that folder, which is found by its entry there, also after
    its next start, on another machine or port. Where no head has ever been started, the session is on all nodes that
    have an entry in the folder, and on those that come. Either way jobs go where there is room, those of a lost node
    run on others as their next attempt, and each outcome comes once.

    Args:
        url: the node's address; `unix://` on its own host only.
        token: the node's token. For a fleet it may be left out: it is in each node's entry.
        endpoint_file: in place of `url`: the node's `listen.endpoint_file`. It is read again for every connection, so
            that the client finds a node that was restarted on another port. On the node's own host, as the same user,
            the client uses the Unix socket.
        fleet: in place of `url`: the folder of a fleet, the `fleet.dir` of its nodes.
        session_id: a session to come back to; its outcomes that were never acknowledged come first. None: a new one.
        resume_after: the `RolloutClient.cursor` of the last outcome that the caller has: the outcomes up to it are not
            sent again, and are acknowledged. Not for a fleet: there what was not acknowledged comes again.
        connect_timeout_s: how long to try for the first connection.
        reconnect_timeout_s: how long to try when a connection is lost. An error page of a proxy does not end the
            attempts. A fleet's node whose heartbeat is missing, or whose process has ended, is given up before; a fleet
            without any node, after so long.
        max_message_bytes: limit of one message in either direction; at most the limit in the node's configuration.
        heartbeat_interval_s: how often to send a heartbeat.
        heartbeat_timeout_s: after so long without any frame, the connection is lost.
        tls_ca: for `wss://`, a PEM file with the certificates to trust; None: those of the system.
        shared_memory: on the node's own host, map the node's token arrays instead of receiving them. The arrays of an
            outcome are then views of the node's memory, which the node uses again once the outcome is acknowledged,
            that is, when the next outcome is asked for: use them before, or keep `outcome.detached()`. After that,
            `outcome.check()` and `pad_batch` raise StaleReference. On other hosts this changes nothing.
            Not for a fleet.
        max_unacked_outcomes: how many outcomes the node may send beyond the acknowledged ones. 0, or more than the
            node's own limit: that limit.
        max_unacked_bytes: the same limit in bytes; one outcome is sent whatever its size.
        observe_all: show the jobs of all other sessions in `observed`.
        observe_group: show the other sessions' jobs of this group in `observed`.

    Raises:
        ConnectionLost: no connection within `connect_timeout_s`.
        Unauthorized: wrong token, or text that cannot be one. Calls of the client raise it, too, when the node's token
            is replaced; a fleet's client without a `token` of its own takes the new one from the folder.
        ProtocolError: the other side is no node, or a node of another version; its certificate is not trusted; or
            `endpoint_file` was not written by a node.
        AdmissionRejected: the node has too many sessions.
        ConfigError: `tls_ca` or the fleet's folder cannot be used, or its nodes are of several models or versions.
        ValueError: `url` is not valid; not exactly one of `url`, `endpoint_file` and `fleet` is given; or what a fleet
            has not is asked of one.
    """
    options = {
        "max_message_bytes": max_message_bytes,
        "heartbeat_interval_s": heartbeat_interval_s,
        "heartbeat_timeout_s": heartbeat_timeout_s,
        "tls_ca": tls_ca,
        "max_unacked_outcomes": max_unacked_outcomes,
        "max_unacked_bytes": max_unacked_bytes,
        "observe_all": observe_all,
        "observe_group": observe_group,
        "session_id": session_id,
        "connect_timeout_s": connect_timeout_s,
        "reconnect_timeout_s": reconnect_timeout_s,
    }
    if fleet is None:
        async with connect_node(
            url,
            token,
            endpoint_file=endpoint_file,
            resume_after=resume_after,
            shared_memory=shared_memory,
            **options,  # type: ignore[arg-type]  # a dict of several types
        ) as client:
            yield client
        return
    if url is not None or endpoint_file is not None:
        raise ValueError("connect needs the url of a node, its endpoint_file, or a fleet's folder, one of the three")
    head = HeadFile(fleet)
    if await trio.to_thread.run_sync(head.has_been):
        token = token or await _token_of(head, connect_timeout_s)
        async with connect_node(
            None,
            token,
            head=head,
            read_token=head.read_token,
            resume_after=resume_after,
            shared_memory=shared_memory,
            **options,  # type: ignore[arg-type]  # the same
        ) as client:
            yield client
        return
    if resume_after or shared_memory:
        raise ValueError("a fleet has no resume_after, as each node counts for itself, and no shared_memory")
    async with open_fleet(fleet, token, **options) as whole:  # type: ignore[arg-type]  # the same
        yield whole


async def _token_of(head: HeadFile, timeout_s: float) -> str:
    """Return the token of a fleet's head.

    Raises:
        ConfigError: its entry cannot be read.
    """
    try:
        with trio.fail_after(timeout_s):
            return await head.read_token()
    except (OSError, trio.TooSlowError) as exc:
        raise ConfigError(f"the token of {head} cannot be read: {exc}") from exc
