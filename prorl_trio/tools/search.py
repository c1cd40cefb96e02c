"""The tool `search`: it runs on the node, never in the sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from prorl_trio.search.service import QueryRefused
from prorl_trio.tools.base import Observation, Tool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.search.backend import Document
    from prorl_trio.search.service import Search


class SearchTool(Tool):
    """Searches documents. Made for one rollout, whose calls it counts; what it finds is text, and nothing is fetched.

    Args:
        search: the node's.
        asking: a block around each search, which sees to what its time is charged to (`agent.loop.asking_service`).
    """

    name = "search"
    description = "Search documents for words and see the best excerpts. It finds text: it opens no address."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for: words that the text will have."},
            "max_results": {"type": "integer", "description": "The number of excerpts. Give it for fewer than usual."},
        },
        "required": ["query"],
    }

    def __init__(self, search: Search, asking: Callable[[], AbstractContextManager[None]]) -> None:
        self._search = search
        self._asking = asking
        self.calls = 0
        """Searches that were made; those that were refused for their form are not counted."""

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Raises SearchUnavailable when the backend answers nobody. Its time-out is `search.search_timeout_s`."""
        del sandbox, timeout_s
        config = self._search.config
        query, max_results = arguments["query"], arguments.get("max_results", config.max_results)
        if not isinstance(query, str):
            return Observation.refused("the argument 'query' must be a string.")
        if isinstance(max_results, bool) or not isinstance(max_results, int) or max_results < 1:
            return Observation.refused("the argument 'max_results' must be a positive whole number.")
        if self.calls >= config.max_calls_per_rollout:
            return Observation.refused(
                f"no more searches: a task may make {config.max_calls_per_rollout}. Answer with what you know."
            )
        try:
            self._search.check(query)
            self.calls += 1
            with self._asking():
                documents = await self._search.find(query, max_results=max_results)
        except QueryRefused as exc:
            return Observation.refused(str(exc))
        return Observation(text=render_documents(documents, config.max_result_chars))


def render_documents(documents: list[Document], max_chars: int) -> str:
    """Return what the policy sees of documents: number, title and source of each, and its text, cut at `max_chars`."""
    return (
        "\n\n".join(_render(number, each, max_chars) for number, each in enumerate(documents, 1)) or "[nothing found]"
    )


def _render(number: int, document: Document, max_chars: int) -> str:
    source = document.url or document.document_id
    title = f"{document.title} ({source})" if document.title else source
    left_out = len(document.text) - max_chars
    cut = f"\n[... {left_out} characters left out ...]" if left_out > 0 else ""
    return f"[{number}] {title[:max_chars]}\n{document.text[:max_chars].strip()}{cut}"
