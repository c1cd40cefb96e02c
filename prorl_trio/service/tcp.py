"""The TCP sockets a node listens on."""

from __future__ import annotations

import errno
import ipaddress

import trio

from prorl_trio.types.errors import ConfigError

__all__ = ["is_loopback", "open_tcp_listener"]


async def open_tcp_listener(table: str, host: str, port: int) -> trio.SocketListener:
    """One listener, also for a name with several addresses: the first. Whoever connects waits until it is served.

    `table` is that of node.toml, for messages.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if not 0 <= port <= 65_535:
        raise ConfigError(f"{table}.port must be 0 (any free one) to 65535, got {port}")
    try:
        first, *others = await trio.open_tcp_listeners(port, host=host)
    except OSError as exc:
        why = f"{table}: cannot bind {host}:{port}: {exc.strerror or exc}"
        if exc.errno == errno.EADDRINUSE:
            why += f"; end what listens there, or set {table}.port to another one (0: any that is free)"
        raise ConfigError(why) from exc
    for other in others:
        await other.aclose()
    return first


def is_loopback(host: str) -> bool:
    """Tell whether only this host's own processes can connect to what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
