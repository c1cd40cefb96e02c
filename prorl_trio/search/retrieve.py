"""The `/retrieve` endpoint of Search-R1's retrieval servers."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from prorl_trio.search.backend import Document
from prorl_trio.search.endpoint import EndpointBackend


class _Found(msgspec.Struct):
    id: str | int | None = None
    title: str = ""
    contents: str | None = None
    text: str | None = None
    url: str = ""


class _Scored(msgspec.Struct):
    document: _Found
    score: float = 0.0


class _Answer(msgspec.Struct):
    result: list[list[_Scored]]


class RetrieveBackend(EndpointBackend):
    """`POST {"queries": [...], "topk": N, "return_scores": true}`, answered with a list of documents for each query."""

    name = "retrieve"
    max_query_chars: ClassVar[int] = 100_000

    def _question(self, query: str, max_results: int) -> dict[str, Any]:
        return {"queries": [query], "topk": max_results, "return_scores": True}

    def _documents(self, body: bytes) -> list[Document]:
        answer = msgspec.json.decode(body, type=_Answer).result
        if len(answer) != 1:
            raise msgspec.ValidationError(f"lists of results for {len(answer)} queries, of which there was 1")
        return [_document(place, each) for place, each in enumerate(answer[0], start=1)]


def _document(place: int, scored: _Scored) -> Document:
    found = scored.document
    text = found.text if found.text is not None else found.contents
    if text is None:
        raise msgspec.ValidationError(f"document {place} has neither `contents` nor `text`")
    title = found.title
    first, newline, rest = text.partition("\n")
    if not title and newline and len(first) > 1 and first[0] == first[-1] == '"':
        title, text = first[1:-1], rest
    document_id = str(place) if found.id is None else str(found.id)
    return Document(document_id=document_id, title=title, text=text, url=found.url, score=scored.score)
