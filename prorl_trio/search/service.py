"""A node's search: bounded and retried. It distinguishes a failing backend from a query that makes it fail."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import trio

from prorl_trio.http.client import RetryPolicy
from prorl_trio.search.backend import Document, SearchFailed
from prorl_trio.search.endpoint import EndpointBackend
from prorl_trio.types.errors import SearchUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.config import SearchConfig
    from prorl_trio.search.backend import SearchBackend


URL: Final = "https://api.tavily.com/search"


class _Result(msgspec.Struct):
    title: str
    url: str
    content: str
    score: float = 0.0


class _Answer(msgspec.Struct):
    results: list[_Result]


class TavilyBackend(EndpointBackend):
    """`POST /search` of Tavily, with its key as a bearer token. It returns web pages, each with an excerpt."""

    name = "tavily"
    max_query_chars: ClassVar[int] = 400

    def __init__(self, key: str, config: SearchConfig) -> None:
        super().__init__(config.url or URL, key, config)

    def _question(self, query: str, max_results: int) -> dict[str, Any]:
        return {"query": query, "max_results": min(max_results, 20), "search_depth": "basic", "include_answer": False}

    def _documents(self, body: bytes) -> list[Document]:
        found = msgspec.json.decode(body, type=_Answer).results
        return [
            Document(document_id=each.url, title=each.title, text=each.content, url=each.url, score=each.score)
            for each in found
        ]


class QueryRefused(Exception):
    """The query is at fault: the policy gets an error and continues."""


class Search:
    """The service behind the tool `search`. Any number of tasks may use it at once; create it with `open_search`."""

    def __init__(self, backend: SearchBackend, config: SearchConfig, *, retry: RetryPolicy | None = None) -> None:
        self.backend = backend
        self.config = config
        self._retry = retry or RetryPolicy(max_attempts=config.max_attempts)
        self._random = Random()
        self._slots = trio.Semaphore(config.max_concurrent_searches)
        self._searches_total = 0
        self._failed_attempts_total = 0
        self._refused_total = 0
        self._unavailable_total = 0

    def statistics(self) -> dict[str, Any]:
        """Return counters since the start, and the backend's own statistics."""
        return {
            "backend": self.backend.name,
            "searches_total": self._searches_total,
            "failed_attempts_total": self._failed_attempts_total,
            "refused_total": self._refused_total,
            "unavailable_total": self._unavailable_total,
            "waiting": self._slots.statistics().tasks_waiting,
            **self.backend.statistics(),
        }

    def check(self, query: str) -> str:
        """Return a policy's query with control characters and lone surrogates replaced by spaces.

        Raises:
            QueryRefused: the query is empty or too long; the message contains the limit.
        """
        limit = min(self.config.max_query_chars, self.backend.max_query_chars)
        if len(query) > limit:
            raise QueryRefused(f"the query has {len(query)} characters, and may have {limit}: ask for less at once.")
        plain = " ".join("".join(each if _is_text(each) else " " for each in query).split())
        if not plain:
            raise QueryRefused("the query is empty: say what to look for.")
        return plain

    async def find(self, query: str, *, max_results: int) -> list[Document]:
        """Return the documents for a policy's query, best first, at most `search.max_results`.

        Transient failures are retried within `search.search_timeout_s`. If there is still no answer, another query
        (`search.probe_query`) determines whether the backend is at fault. The first query then gets one last attempt.

        Raises:
            QueryRefused: see `check`; or the backend answers the other query, but not this one.
            SearchUnavailable: the backend answers neither query.
        """
        query = self.check(query)
        max_results = min(max_results, self.config.max_results)
        self._searches_total += 1
        failure = await self._ask(query, max_results, self._retry.max_attempts)
        if not isinstance(failure, SearchFailed):
            return failure
        probed = await self._ask(self.config.probe_query, 1)
        if isinstance(probed, SearchFailed):
            self._unavailable_total += 1
            raise SearchUnavailable(f"search by {self.backend.name} does not work: {failure}") from failure
        last = await self._ask(query, max_results)
        if isinstance(last, SearchFailed):
            self._refused_total += 1
            raise QueryRefused("the search cannot answer this query, but others: put it otherwise.") from last
        return last

    async def _ask(self, query: str, max_results: int, max_attempts: int = 1) -> list[Document] | SearchFailed:
        """Return the answer, or the failure of the last attempt, within `search.search_timeout_s`."""
        failure = SearchFailed("there was no turn for it within search.search_timeout_s", retryable=True)
        with trio.move_on_after(self.config.search_timeout_s):
            await trio.lowlevel.checkpoint()
            for attempt in range(1, max_attempts + 1):
                try:
                    return await self._attempt(query, max_results)
                except SearchFailed as exc:
                    failure = exc
                if not failure.retryable or attempt == max_attempts:
                    break
                await trio.sleep(max(failure.retry_after_s, self._retry.delay_s(attempt, self._random)))
        return failure

    async def _attempt(self, query: str, max_results: int) -> list[Document]:
        timeout_s = self.config.attempt_timeout_s
        if self._slots.statistics().tasks_waiting >= self.config.max_waiting_searches:
            raise SearchFailed(
                f"{self.config.max_waiting_searches} searches wait already (search.max_waiting_searches)",
                retryable=True,
            )
        async with self._slots:
            try:
                with trio.move_on_after(timeout_s):
                    return await self.backend.search(query, max_results=max_results, timeout_s=timeout_s)
                raise SearchFailed(f"no answer within {timeout_s:g} s (search.attempt_timeout_s)", retryable=True)
            except SearchFailed:
                self._failed_attempts_total += 1
                raise


def _is_text(character: str) -> bool:
    return character.isprintable() or character == " "


async def _open_backend(config: SearchConfig, index_dir: Path) -> SearchBackend:
    # Imported on demand, because not every node needs BM25 and TLS.
    if config.backend == "bm25":
        from prorl_trio.search.bm25 import open_bm25

        return await open_bm25(config, index_dir)
    key = await trio.to_thread.run_sync(config.read_api_key)
    if config.backend == "tavily":
        from prorl_trio.search.service import TavilyBackend

        return TavilyBackend(key, config)
    from prorl_trio.search.retrieve import RetrieveBackend

    return RetrieveBackend(config.url, key, config)


@asynccontextmanager
async def open_search(config: SearchConfig, index_dir: Path) -> AsyncIterator[Search | None]:
    """Open the configured backend for the block; yield None if no backend is configured.

    `index_dir` is the default folder for indexes. An endpoint is not contacted yet.

    Raises:
        ConfigError: the corpus, the URL or the key cannot be used; the message contains the remedy.
    """
    if config.backend == "none":
        await trio.lowlevel.checkpoint()
        yield None
        return
    backend = await _open_backend(config, Path(config.index_dir) if config.index_dir else index_dir)
    try:
        yield Search(backend, config)
    finally:
        with trio.CancelScope(shield=True):  # this does not block
            await backend.aclose()
