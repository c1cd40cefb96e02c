"""The head of a request, read strictly: whatever two readers could delimit in two ways is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

import h11

from prorl_trio.service.guard import Refusal

if TYPE_CHECKING:
    from prorl_trio.service.guard import Headers

WEBSOCKET_PATH: Final = "/"

_BARE: Final = re.compile(rb"(?<!\r)\n")
_FOLDED: Final = re.compile(rb"\r\n[ \t]")
_LENGTHS: Final = re.compile(rb"\r\ncontent-length:[ \t]*([^\r\n]*?)[ \t]*(?=\r\n)", re.IGNORECASE)
_CODED: Final = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)


class Request(NamedTuple):
    """The head of a request.

    Attributes:
        method: as it was sent, in capitals for all methods that there are.
        path: decoded, without the query string.
        target: as it was sent, without scheme and authority.
        query: the query string, not decoded.
        version: `1.0` or `1.1`.
        headers: the fields.
        websocket: it asks for the WebSocket.
        body_bytes: the announced length of the body; 0 if none is.
    """

    method: str
    path: str
    target: bytes
    query: bytes
    version: str
    headers: Headers
    websocket: bool
    body_bytes: int


def starts_request(received: bytes | bytearray) -> bool:
    """Return whether the first byte may begin a request. The first byte of TLS and of HTTP/2 frames may not."""
    return _TOKEN.match(received) is not None


def is_bare(received: bytes | bytearray, start: int, end: int) -> bool:
    """Return whether a line that ends between `start` and `end` ends with a line feed alone."""
    return _BARE.search(received, start, end) is not None


def parse_head(connection: h11.Connection, head: bytes) -> Request:
    """Parse a head, with the empty line that ends it. `connection` is new, and reads the body afterwards.

    Raises:
        Refusal: it is malformed, or not to be served.
    """
    if _FOLDED.search(head):
        raise Refusal(400, "malformed", "a header field goes on in a second line, which HTTP/1.1 no longer allows")
    lengths, coded = _LENGTHS.findall(head), _CODED.search(head)
    if coded and lengths:
        raise Refusal(400, "malformed", "Transfer-Encoding beside a Content-Length: where the body ends is not certain")
    # h11 merges repeated lengths, which another reader may not.
    if len(lengths) > 1 or not all(map(bytes.isdigit, lengths)):
        raise Refusal(400, "malformed", "a request has one Content-Length, in digits")
    try:
        connection.receive_data(head)
        event = connection.next_event()
    except h11.RemoteProtocolError as exc:
        raise Refusal(exc.error_status_hint, "malformed", str(exc)) from None
    assert isinstance(event, h11.Request), event
    version = event.http_version.decode()
    if version not in ("1.0", "1.1"):
        raise Refusal(505, "malformed", "this port speaks HTTP/1.1")
    if coded and version == "1.0":
        raise Refusal(400, "malformed", "Transfer-Encoding in HTTP/1.0: where the body ends is not certain")
    headers = list(event.headers)
    target = _origin_form(event.method, event.target, headers)
    raw_path, _, query = target.partition(b"?")
    method, path = event.method.decode(), unquote(raw_path.decode("ascii"))
    websocket = any(name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in headers)
    if websocket and (method, path, version) != ("GET", WEBSOCKET_PATH, "1.1"):
        raise Refusal(403, "protocol", f"the WebSocket of this port is GET {WEBSOCKET_PATH}")
    body_bytes = int(lengths[0]) if lengths else 0
    return Request(method, path, target, query, version, headers, websocket, body_bytes)


def _origin_form(method: bytes, target: bytes, headers: Headers) -> bytes:
    """Return the target without scheme and authority, which must be those of `Host`.

    Raises:
        Refusal: it is neither a path nor a URL of this host nor, for OPTIONS, `*`.
    """
    if target.startswith(b"/") or (method == b"OPTIONS" and target == b"*"):
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise Refusal(400, "malformed", "the target of a request is a path, which begins with /, or a URL")
    authority, rest = absolute.groups()
    if any(name == b"host" and value.strip().lower() != authority.lower() for name, value in headers):
        raise Refusal(400, "malformed", "the target of a request and its Host name two different hosts")
    return rest if rest.startswith(b"/") else b"/" + rest
