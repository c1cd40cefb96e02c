"""A rollout's session on a resources server of NeMo Gym."""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.http.client import HttpClient
from prorl_trio.http.connection import HttpError, HttpLimits
from prorl_trio.types.errors import RolloutError

if TYPE_CHECKING:
    from prorl_trio.http.connection import Response

MAX_SHOWN_CHARS: Final = 500
PROBE_TIMEOUT_S: Final = 5.0
OK: Final = 200


class GymServerUnavailable(RolloutError):
    """A resources server does not answer, which is not the policy's fault."""

    cause = "node"
    error_code = "node"


class GymSession:
    """A session, identified by the cookies that the server sets. It holds no connection between two calls.

    Args:
        name: name of the server in node.toml.
        url: its origin.
        max_response_bytes: limit of one response.
    """

    def __init__(self, name: str, url: str, max_response_bytes: int) -> None:
        self.name = name
        self._url = url
        self._limits = HttpLimits(max_connections=1, max_response_bytes=max_response_bytes)
        self._cookies: dict[str, str] = {}

    async def post(self, path: str, body: Any, *, timeout_s: float) -> Response:
        """Send a request of the session, once, and return its response, whatever its status.

        Raises:
            HttpError: there is no response.
        """
        return await self._request("POST", path, msgspec.json.encode(body), timeout_s)

    async def answers(self) -> bool:
        """Return whether the server answers at all."""
        try:
            await self._request("GET", "/", b"", PROBE_TIMEOUT_S)
        except HttpError:
            return False
        return True

    async def _request(self, method: str, path: str, body: bytes, timeout_s: float) -> Response:
        headers = [("Content-Type", "application/json")]
        if self._cookies:
            headers.append(("Cookie", "; ".join(f"{name}={value}" for name, value in self._cookies.items())))
        client = HttpClient(self._url, limits=self._limits)
        try:
            response = await client.request(method, path, body=body, headers=headers, timeout_s=timeout_s)
        finally:
            client.close()
        try:
            cookies = SimpleCookie(response.headers.get("set-cookie", ""))
        except CookieError:
            return response
        self._cookies.update({name: morsel.coded_value for name, morsel in cookies.items()})
        return response


def shown(response: Response) -> str:
    """Return the status and the beginning of a response, for a message."""
    return f"status {response.status}: {response.body[:MAX_SHOWN_CHARS].decode(errors='replace')}"
