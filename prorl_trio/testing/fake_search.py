"""Look-alikes of search endpoints, for tests: a Search-R1 retrieval server, and Tavily.

Example:
    async with open_fake_retrieve([Document(document_id="1", text="Water boils.")]) as server:
        config = SearchConfig(backend="retrieve", url=server.url)
"""

from __future__ import annotations

import abc
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.search.words import words_of
from prorl_trio.testing.fake_http import Answer, HttpCall, serve_http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from prorl_trio.search.backend import Document

HANG = Answer(0, b"")
"""Put this into `FakeSearchServer.faults`: the next request is not answered until the client disconnects."""


class FakeSearchServer(abc.ABC):
    """A running server that finds the documents containing a word of the query, most matching words first.

    Attributes:
        url: of its endpoint.
        queries: the received queries, in order.
        faults: the answers to the next requests, instead of its own.
        fails_at: a query with this word is answered with status 500; empty for none.
        down: every request is answered with status 503.
    """

    path: ClassVar[str]

    def __init__(self, origin: str, documents: Sequence[Document], key: str) -> None:
        self.url = origin + self.path
        self.queries: list[str] = []
        self.faults: deque[Answer] = deque()
        self.fails_at = ""
        self.down = False
        self.headers: list[dict[str, str]] = []
        self._documents = documents
        self._key = key

    async def serve_connection(self, stream: trio.SocketStream) -> None:
        """Answer the requests on one connection."""
        async with stream:
            await serve_http(stream, self._answer)

    async def _answer(self, call: HttpCall) -> Answer:
        await trio.lowlevel.checkpoint()
        self.headers.append(call.headers)
        if (call.method, call.path) != ("POST", self.path):
            return Answer(404, b'{"detail":"Not Found"}')
        if self._key and call.headers.get("authorization") != f"Bearer {self._key}":
            given = call.headers.get("authorization", "")
            return Answer(401, msgspec.json.encode({"detail": {"error": f"Unauthorized: invalid key {given}"}}))
        try:
            query, count = self._read(msgspec.json.decode(call.body))
        except (msgspec.DecodeError, KeyError, ValueError) as exc:
            return Answer(422, msgspec.json.encode({"detail": str(exc)}))
        self.queries.append(query)
        if self.faults:
            fault = self.faults.popleft()
            if fault is HANG:
                await trio.sleep_forever()
            return fault
        if self.down:
            return Answer(503, b'{"detail":"down"}')
        if self.fails_at and self.fails_at in words_of(query):
            return Answer(500, b'{"detail":"KeyError"}')
        return Answer(200, msgspec.json.encode(self._body(self._find(query)[:count])))

    def _find(self, query: str) -> list[tuple[Document, float]]:
        wanted = set(words_of(query))
        scored = [(each, len(wanted & set(words_of(f"{each.title} {each.text}")))) for each in self._documents]
        return [(each, float(score)) for each, score in sorted(scored, key=lambda pair: -pair[1]) if score]

    @abc.abstractmethod
    def _read(self, asked: dict[str, Any]) -> tuple[str, int]:
        """Return the query and the requested number of results. Raises KeyError, ValueError."""

    @abc.abstractmethod
    def _body(self, found: list[tuple[Document, float]]) -> object:
        """Return the answer."""


class FakeRetrieve(FakeSearchServer):
    """A Search-R1 retrieval server."""

    path = "/retrieve"

    def _read(self, asked: dict[str, Any]) -> tuple[str, int]:
        (query,) = asked["queries"]
        if not asked["return_scores"]:
            raise ValueError("without scores the answer has another form")
        return query, asked["topk"]

    def _body(self, found: list[tuple[Document, float]]) -> object:
        return {
            "result": [
                [
                    {"document": {"id": each.document_id, "contents": f'"{each.title}"\n{each.text}'}, "score": score}
                    for each, score in found
                ]
            ]
        }


class FakeTavily(FakeSearchServer):
    """Tavily's `/search`. A query has at most 400 characters, an answer at most 20 results."""

    path = "/search"

    def _read(self, asked: dict[str, Any]) -> tuple[str, int]:
        if len(asked["query"]) > 400 or not 0 <= asked["max_results"] <= 20:
            raise ValueError("Query is too long. Max query length is 400 characters.")
        return asked["query"], asked["max_results"]

    def _body(self, found: list[tuple[Document, float]]) -> object:
        results = [
            {
                "title": each.title,
                "url": each.url or f"https://example.org/{each.document_id}",
                "content": each.text,
                "score": score,
                "raw_content": None,
            }
            for each, score in found
        ]
        return {"query": "", "follow_up_questions": None, "answer": None, "images": [], "results": results}


@asynccontextmanager
async def _serve(
    kind: type[FakeSearchServer], documents: Sequence[Document], key: str
) -> AsyncIterator[FakeSearchServer]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server = kind(f"http://127.0.0.1:{listener.socket.getsockname()[1]}", documents, key)
    async with open_single_nursery() as nursery:
        await nursery.start(trio.serve_listeners, server.serve_connection, [listener])
        yield server
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_fake_retrieve(documents: Sequence[Document], *, key: str = "") -> AsyncIterator[FakeSearchServer]:
    """Serve a `FakeRetrieve` on a free port of 127.0.0.1 for the block; requests must contain `key` if given."""
    async with _serve(FakeRetrieve, documents, key) as server:
        yield server


@asynccontextmanager
async def open_fake_tavily(documents: Sequence[Document], *, key: str = "tvly-key") -> AsyncIterator[FakeSearchServer]:
    """Serve a `FakeTavily` on a free port of 127.0.0.1 for the block; requests must contain `key`."""
    async with _serve(FakeTavily, documents, key) as server:
        yield server
