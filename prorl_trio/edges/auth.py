"""Access control of a node's listeners: trainers authenticate by token, and foreign web pages are refused."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import trio

from prorl_ipc.handshake import token_matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_OWN_SITE: Final = frozenset({b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` of a request that no foreign page caused (W3C Fetch Metadata)."""


class Door:
    """The access check that all listeners of a node share.

    **Token.** The token grants full access. It can be replaced while the node runs.

    **Web pages.** A browser lets any page send requests to this machine. It names the page's origin in `Origin`, or
    reports in `Sec-Fetch-Site` that another site caused the request. It sends the name in the address bar as `Host`,
    which exposes a page whose name was made to resolve to this machine (DNS rebinding). An IP address, `localhost`, and
    the names that the operator lists cannot be such a name.

    Args:
        token: the initial token.
        hosts: host names whose pages may use the node, and by which clients without a token may address it.
        names: further names by which such clients may address it, in addition to `localhost` and the machine's name.
    """

    def __init__(self, token: bytes, hosts: Iterable[str] = (), names: Iterable[str] = ()) -> None:
        self._token = token
        self._trusted = frozenset(host.lower() for host in hosts)
        self._names = self._trusted | {name.lower() for name in (*names, socket.gethostname(), "localhost")}
        self._listeners: list[Callable[[], object]] = []
        self._replaced = trio.Event()

    @property
    def token(self) -> bytes:
        return self._token

    def admits(self, offered: str | bytes) -> bool:
        """Return whether the offered token is the node's. Compares in constant time."""
        return token_matches(self._token, offered)

    def on_replaced(self, listener: Callable[[], object]) -> None:
        """Call `listener` each time the token is replaced, so that it closes connections with the previous token."""
        self._listeners.append(listener)

    async def wait_replaced(self) -> None:
        await self._replaced.wait()

    def replace_token(self, token: bytes) -> bool:
        """Use a new token; return False if it is the current one."""
        if token_matches(self._token, token):
            return False
        self._token = token
        for listener in self._listeners:
            listener()
        self._replaced.set()
        self._replaced = trio.Event()
        return True

    def refuse_page(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return why a request comes from a foreign page; empty if it does not.

        `headers` have lower-case names. Programs other than browsers send neither of the two headers.
        """
        headers = list(headers)
        origins = [value for name, value in headers if name == b"origin"]
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        hosts = [value for name, value in headers if name == b"host"]
        if not origins and _OWN_SITE.issuperset(sites):
            return ""
        if len(origins) == 1 and len(hosts) == 1:
            authority = _authority_of(origins[0])
            if _name_of(authority) in self._trusted:
                return ""
            if authority == _text(hosts[0]) and _OWN_SITE.issuperset(sites) and not self.refuse_host(headers):
                return ""
        page = _shown(origins[0]) if origins else "another site"
        return (
            f"a page of {page} may not use this node; for pages and proxies of yours, list their host names in "
            "listen.hosts"
        )

    def refuse_host(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return why a request's host name is not this node's; empty if it is, or if the request names no host.

        `headers` have lower-case names.
        """
        for host in [value for name, value in headers if name == b"host"]:
            name = _name_of(_text(host))
            if name not in self._names and not _is_address(name):
                return (
                    f"without the token, a request must address the node by an IP address, localhost or "
                    f"a name in listen.hosts, not {_shown(host)}"
                )
        return ""


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip().lower()


def _shown(value: bytes) -> str:
    return repr(value[:200].decode("latin-1"))


def _authority_of(origin: bytes) -> str:
    """Return `HOST[:PORT]` of an origin; empty if it is opaque (`null`) or malformed."""
    scheme, separator, authority = _text(origin).partition("://")
    return authority if separator and scheme in ("http", "https") else ""


def _name_of(authority: str) -> str:
    """Return the host of `HOST[:PORT]` without the port, and without the brackets of IPv6; empty if malformed."""
    if not authority or not authority.isascii() or any(character in authority for character in "/\\@?# \t"):
        return ""
    try:
        parts = urlsplit(f"//{authority}")
        parts.port  # noqa: B018 - raises if it is not a port
    except ValueError:
        return ""
    return parts.hostname or ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
