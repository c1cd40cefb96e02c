"""Tavily's search API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from prorl_trio.search.backend import Document
from prorl_trio.search.endpoint import EndpointBackend

if TYPE_CHECKING:
    from prorl_trio.config import SearchConfig

URL: Final = "https://api.tavily.com/search"


class _Result(msgspec.Struct):
    title: str
    url: str
    content: str
    score: float = 0.0


class _Answer(msgspec.Struct):
    results: list[_Result]


class TavilyBackend(EndpointBackend):
    """`POST /search` of Tavily, with its key as a bearer token: pages of the web, each with an excerpt."""

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
