"""The listeners of a node: a TCP port, or inherited listening sockets."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

import trio

from prorl_ipc.tls import server_context
from prorl_trio.config.secrets import open_private
from prorl_trio.file_systems import open_regular
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    import ssl

    from prorl_trio.config import ListenConfig


def load_tls(config: ListenConfig) -> ssl.SSLContext | None:
    """Return the TLS context with the configured certificate; None if TLS is not configured. Blocks on the disk.

    Raises:
        ConfigError: only one of the two files is set, they cannot be used, or others can read the key.
    """
    if not config.tls_cert and not config.tls_key:
        return None
    if not config.tls_cert or not config.tls_key:
        raise ConfigError("listen.tls_cert and listen.tls_key go together; one of them is missing")
    os.close(open_private(config.tls_key, "listen.tls_key"))
    try:
        os.close(open_regular(config.tls_cert))  # OpenSSL would wait for the writer of a named pipe
        return server_context(config.tls_cert, config.tls_key)
    except OSError as exc:  # SSLError is a subclass
        raise ConfigError(
            f"listen.tls_cert {config.tls_cert}, tls_key {config.tls_key}: cannot be used: {exc}"
        ) from exc


async def open_listeners(listen: ListenConfig) -> list[trio.SocketListener]:
    """Return the inherited listeners, and a new one for the port unless an inherited listener is a TCP socket.

    Connections queue in the kernel until they are accepted. The caller closes the listeners. If the host's name has
    several addresses, only the first is bound.

    Raises:
        ConfigError: the address cannot be bound, or a descriptor is not a listening socket.
    """
    listeners = [_inherited(descriptor) for descriptor in listen.descriptors]
    if all(listener.socket.family == trio.socket.AF_UNIX for listener in listeners):
        try:
            listeners.insert(0, await _bind(listen.host, listen.port))
        except BaseException:
            for listener in listeners:
                listener.socket.close()
            raise
    return listeners


async def check_address(listen: ListenConfig) -> None:
    """Bind the host and port briefly, to detect a wrong address before anything starts.

    Inherited sockets are not checked.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if listen.descriptors:
        await trio.lowlevel.checkpoint()
        return
    async with await _bind(listen.host, listen.port):
        pass


async def _bind(host: str, port: int) -> trio.SocketListener:
    if not 0 <= port <= 65_535:
        raise ConfigError(f"listen.port must be 0 (any free one) to 65535, got {port}")
    try:
        first, *others = await trio.open_tcp_listeners(port, host=host)
    except OSError as exc:
        why = f"listen: cannot bind {host}:{port}: {exc.strerror or exc}"
        if exc.errno == errno.EADDRINUSE:
            why += "; end what listens there, or set listen.port to another one (0: any that is free)"
        elif isinstance(exc, socket.gaierror):
            why += "; set listen.host to a name or an address of this machine (0.0.0.0: all of its addresses)"
        elif exc.errno == errno.EADDRNOTAVAIL:
            why += "; set listen.host to an address of this machine (0.0.0.0: all of its addresses)"
        elif exc.errno == errno.EACCES:
            why += "; ports below 1024 are for root: set listen.port to another one"
        raise ConfigError(why) from exc
    except UnicodeError as exc:  # from the codec for host names
        raise ConfigError(f"listen.host: {host!r} is no host name: {exc.__cause__ or exc}") from exc
    for other in others:
        await other.aclose()
    return first


def _inherited(descriptor: int) -> trio.SocketListener:
    """Return a listener over an inherited descriptor. Child processes no longer inherit it."""
    try:
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
    except OSError as exc:
        raise ConfigError(f"listen.descriptors: {descriptor} is no socket of this process: {exc.strerror}") from exc
    listens = sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listens or sock.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        sock.detach()
        raise ConfigError(f"listen.descriptors: {descriptor} is no TCP or Unix socket that listens")
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, so that only processes of this host can connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
