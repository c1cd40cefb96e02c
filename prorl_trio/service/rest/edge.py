"""The REST service as a whole: application, listener, and expiry of outcomes that nobody takes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import trio

from ipc.nursery import open_single_nursery
from prorl_trio.service.rest.app import make_app
from prorl_trio.service.rest.call import Api
from prorl_trio.service.rest.server import serve_http
from prorl_trio.service.tcp import is_loopback
from prorl_trio.supervision import service_task

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from prorl_trio.config import RestConfig
    from prorl_trio.service.auth import Door
    from prorl_trio.service.rest.call import Endpoint
    from prorl_trio.service.rest.events import EventFeed
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session_table import SessionTable

__all__ = ["serve_rest"]

logger = logging.getLogger(__name__)

MAX_EXPIRY_INTERVAL_S: Final = 60.0


async def serve_rest(  # noqa: ASYNC128 - serve_http calls it
    node: NodeApi,
    config: RestConfig,
    door: Door,
    *,
    sessions: SessionTable,
    feed: EventFeed,
    tls: ssl.SSLContext | None = None,
    metrics: Callable[[], tuple[str, bytes]] | None = None,
    listener: trio.SocketListener | None = None,
    more: Sequence[Endpoint] = (),
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `node` over HTTP, or HTTPS with `tls`, until cancelled. Reports the bound (host, port) to `task_status`.

    On a cancel, requests that wait answer with what they have, within `server.GOODBYE_TIMEOUT_S`. Jobs run on: they
    belong to the node.

    Args:
        node: runs the jobs.
        config: address and limits.
        door: decides who may come in. When its token is replaced, the connections that showed the former one end.
        sessions: the node's sessions, shared with the WebSocket.
        feed: source of the event streams; registered as an observer of the node.
        tls: the node's certificate, or None.
        metrics: returns the content type and bytes of the Prometheus page.
        listener: a bound listener, used in place of the configured address.
        more: endpoints besides the service's own.
        task_status: see `trio.Nursery.start`.

    Raises:
        ConfigError: the address cannot be bound.
    """
    api = Api(node=node, sessions=sessions, config=config, feed=feed, closing=trio.Event(), metrics=metrics)
    app = make_app(api, door, more)
    if tls is None and not is_loopback(config.host):
        logger.warning(
            "REST on %s WITHOUT TLS: the token and everything else can be read on the network; "
            "set listen.tls_cert and listen.tls_key (and rest.tls), or rest.host to 127.0.0.1",
            config.host,
        )
    async with open_single_nursery() as nursery:
        nursery.start_soon(service_task(_expire, "expiry of outcomes"), sessions, config.results_retention_s)
        await serve_http(app, config, api.closing, door, tls=tls, listener=listener, task_status=task_status)


async def _expire(sessions: SessionTable, retention_s: float) -> None:
    """Drop outcomes that are older than the retention, until cancelled."""
    while True:
        await trio.sleep(min(MAX_EXPIRY_INTERVAL_S, retention_s / 2))
        for session in sessions.all():
            if count := session.expire():
                logger.warning("%r: %d outcomes dropped, not taken for %g s", session, count, retention_s)
