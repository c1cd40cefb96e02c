"""The interface of a search backend, and its documents."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import msgspec

from prorl_trio.types.errors import ProrlError


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A document in a search result. `score` is the backend's own measure; higher is better."""

    document_id: str
    text: str
    title: str = ""
    url: str = ""
    score: float = 0.0


class SearchFailed(ProrlError):
    """A backend did not answer. If `retryable`, the same call may succeed later, but not before `retry_after_s`."""

    def __init__(self, message: str, *, retryable: bool, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class SearchBackend(abc.ABC):
    """A source of search results for any number of concurrent tasks.

    Every backend passes the test suite `prorl_trio.testing.search_contract`.
    """

    name: ClassVar[str]
    max_query_chars: ClassVar[int]
    """Maximal length of a query."""

    @abc.abstractmethod
    async def search(self, query: str, *, max_results: int, timeout_s: float) -> list[Document]:
        """Return the best `max_results` documents or fewer, best first. An empty list is a valid answer.

        Args:
            query: valid Unicode without control characters, of 1 to `max_query_chars` characters.
            max_results: at least 1.
            timeout_s: time-out of this attempt. No work continues after a cancel.

        Raises:
            SearchFailed: the backend did not answer. No other exception is raised.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Release all resources. Searches in flight fail. Idempotent."""

    def statistics(self) -> dict[str, Any]:
        """Return figures for monitoring the node. The default is empty."""
        return {}
