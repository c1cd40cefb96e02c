"""The TCP listeners of a node."""

from __future__ import annotations

import errno
import ipaddress
import socket

import trio

from prorl_trio.types.errors import ConfigError

__all__ = ["is_loopback", "open_tcp_listener"]


async def open_tcp_listener(table: str, host: str, port: int) -> trio.SocketListener:
    """Bind a TCP port and return its listener. Connections queue in the kernel until somebody accepts them.

    If the host's name has several addresses, only the first is bound. `table` is the table of node.toml that error
    messages name.

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
        elif isinstance(exc, socket.gaierror):
            why += f"; set {table}.host to a name or an address of this machine (0.0.0.0: all of its addresses)"
        elif exc.errno == errno.EADDRNOTAVAIL:
            why += f"; set {table}.host to an address of this machine (0.0.0.0: all of its addresses)"
        elif exc.errno == errno.EACCES:
            why += f"; ports below 1024 are for root: set {table}.port to another one"
        raise ConfigError(why) from exc
    except UnicodeError as exc:  # of the codec that encodes host names
        raise ConfigError(f"{table}.host: {host!r} is no host name: {exc.__cause__ or exc}") from exc
    for other in others:
        await other.aclose()
    return first


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, so that only processes of this host can connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
