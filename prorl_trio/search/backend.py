"""The interface of a search backend, and the documents that it finds."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import msgspec

from prorl_trio.types.errors import ProrlError


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A document that was found. `score` is the backend's own measure: higher is better, and nothing else is said."""

    document_id: str
    text: str
    title: str = ""
    url: str = ""
    score: float = 0.0


class SearchFailed(ProrlError):
    """A backend did not answer. `retryable`: the same call may succeed later, not before `retry_after_s`."""

    def __init__(self, message: str, *, retryable: bool, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class SearchBackend(abc.ABC):
    """A source of answers to searches, of any number of tasks at once.

    `prorl_trio.testing.search_contract` is its suite.
    """

    name: ClassVar[str]
    max_query_chars: ClassVar[int]
    """Length of the longest query that it takes."""

    @abc.abstractmethod
    async def search(self, query: str, *, max_results: int, timeout_s: float) -> list[Document]:
        """Return what was found, best first, at most `max_results` documents; none is an answer, too.

        Args:
            query: valid Unicode without control characters, of 1 to `max_query_chars` characters.
            max_results: at least 1.
            timeout_s: of this attempt. A cancel leaves nothing behind that goes on for longer.

        Raises:
            SearchFailed: there is no answer. Nothing else.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Give back what it holds. Searches in flight fail. Idempotent."""

    def statistics(self) -> dict[str, Any]:
        """Return figures for those who watch the node. Default: none."""
        return {}
