"""An HTTP endpoint that accepts a query as JSON: the common part of Search-R1 servers and Tavily."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
import trio

from prorl_ipc.wire import UNDECODABLE
from prorl_trio.http.client import RETRYABLE_STATUSES, HttpClient
from prorl_trio.http.connection import HttpError, HttpLimits, TooManyWaiting
from prorl_trio.search.backend import SearchBackend, SearchFailed
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from prorl_trio.config import SearchConfig
    from prorl_trio.http.connection import Response
    from prorl_trio.search.backend import Document

MAX_SHOWN_CHARS: Final = 300
"""Characters of an endpoint's refusal that an error quotes."""


class EndpointBackend(SearchBackend):
    """A backend behind one URL. The key is sent in the header `Authorization` and appears in no message of ours.

    Args:
        url: of the endpoint, `http` or `https`, with its path.
        key: empty for none.
        config: its limits.

    Raises:
        ConfigError: `url` is not a valid URL.
    """

    def __init__(self, url: str, key: str, config: SearchConfig) -> None:
        try:
            parts = urlsplit(url)
            origin = f"{parts.scheme}://{parts.netloc}"
            if parts.query or parts.fragment:
                raise ValueError(f"{url!r} has a query or a fragment: leave it out")
            self._client = HttpClient(
                origin,
                limits=HttpLimits(
                    max_connections=config.max_concurrent_searches,
                    max_waiting_requests=config.max_waiting_searches,
                    max_response_bytes=config.max_response_bytes,
                ),
            )
        except ValueError as exc:
            raise ConfigError(f"search.url: {exc}") from exc
        self._path = parts.path or "/"
        self._key = key

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._client.origin}{self._path}>"

    async def search(self, query: str, *, max_results: int, timeout_s: float) -> list[Document]:
        headers = [("Content-Type", "application/json"), ("Accept", "application/json")]
        if self._key:
            headers.append(("Authorization", f"Bearer {self._key}"))
        body = msgspec.json.encode(self._question(query, max_results))
        try:
            response = await self._client.request("POST", self._path, body=body, headers=headers, timeout_s=timeout_s)
        except HttpError as exc:
            raise SearchFailed(str(exc), retryable=not isinstance(exc, TooManyWaiting)) from exc
        if response.status != 200:
            raise self._refused(response)
        try:
            return self._documents(response.body)[:max_results]
        except UNDECODABLE as exc:
            raise SearchFailed(f"{self!r} answered in another form than documented: {exc}", retryable=False) from exc

    async def aclose(self) -> None:
        """Close the connections."""
        self._client.close()
        await trio.lowlevel.checkpoint()

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of the connections."""
        return msgspec.structs.asdict(self._client.statistics())

    @abc.abstractmethod
    def _question(self, query: str, max_results: int) -> dict[str, Any]:
        """Return the body of the request."""

    @abc.abstractmethod
    def _documents(self, body: bytes) -> list[Document]:
        """Read an answer. Raises msgspec.DecodeError."""

    def _refused(self, response: Response) -> SearchFailed:
        said = response.body.decode(errors="replace")
        if self._key:  # some servers quote the key
            said = said.replace(self._key, "[the key]")
        said = " ".join(said[:MAX_SHOWN_CHARS].split())
        advice = "; see search.api_key_file" if response.status in (401, 403) else ""
        return SearchFailed(
            f"{self!r} answered with status {response.status}{advice}: {said}",
            retryable=response.status in RETRYABLE_STATUSES,
            retry_after_s=_seconds(response.headers.get("retry-after", "")),
        )


def _seconds(header: str) -> float:
    return float(header) if header.isascii() and header.isdigit() and len(header) < 7 else 0.0
