"""The contract of search backends. Run it on your own backend.

    pytest.register_assert_rewrite("prorl_trio.testing.search_contract")

    class TestMyBackend(SearchContract):
        @pytest.fixture
        async def backend(self):
            ...  # over `DOCUMENTS`
            yield MyBackend(...)

The tests need pytest-trio, or another plugin that runs async tests under trio.
"""

from __future__ import annotations

from typing import Final

import trio

from prorl_trio.search.backend import Document, SearchBackend

TEST_TIMEOUT_S: Final = 60.0
CALL_TIMEOUT_S: Final = 30.0
DOCUMENTS: Final = (
    Document(document_id="gold", title="Gold", text="A chemical element with atomic number 79, dense and soft."),
    Document(document_id="iron", title="Iron", text="A chemical element with atomic number 26. It rusts."),
    Document(document_id="light", title="Speed of light", text="In vacuum exactly 299792458 m/s.\nSecond line."),
    Document(document_id="greek", title="Ελληνικά", text='Δίνη: vortex 🌀 "quoted" \\ back'),
)
"""The only documents of the backend under test."""


class SearchContract:
    """The tests; subclasses define the fixture `backend`."""

    async def test_the_best_document_comes_first_with_its_text(self, backend: SearchBackend) -> None:
        """A document is found by its words and returned completely."""
        found = await _search(backend, "vacuum light speed")
        assert (found[0].title, found[0].text) == (DOCUMENTS[2].title, DOCUMENTS[2].text)
        assert found[0].document_id
        assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)

    async def test_there_are_no_more_results_than_asked_for(self, backend: SearchBackend) -> None:
        """A search returns one document, both, and no more than exist."""
        assert len(await _search(backend, "chemical element", 1)) == 1
        assert {each.title for each in await _search(backend, "chemical element", 2)} == {"Gold", "Iron"}
        assert len(await _search(backend, "chemical element", 20)) <= len(DOCUMENTS)

    async def test_nothing_found_is_an_answer(self, backend: SearchBackend) -> None:
        """No document contains the word."""
        assert await _search(backend, "qwertzuiop") == []

    async def test_a_query_is_text_and_nothing_else(self, backend: SearchBackend) -> None:
        """Addresses, quotes, patterns, code and signs are words or ignored; the next query is answered normally."""
        for query in (
            "http://169.254.169.254/latest",
            '"',
            "\\",
            "{}[]()*+?^$|",
            "'; DROP TABLE x; --",
            "../../etc/passwd",
        ):
            for found in await _search(backend, query):
                assert found.title in {each.title for each in DOCUMENTS}
        assert (await _search(backend, "Δίνη 🌀"))[0].text == DOCUMENTS[3].text

    async def test_the_longest_query_is_answered(self, backend: SearchBackend) -> None:
        """A query of `max_query_chars` is answered."""
        query = ("gold " * backend.max_query_chars)[: backend.max_query_chars - 1] + "x"
        assert (await _search(backend, query))[0].title == "Gold"

    async def test_many_at_once_each_get_their_own(self, backend: SearchBackend) -> None:
        """Answers are not mixed up."""
        titles: dict[int, str] = {}

        async def ask(place: int) -> None:
            query = "gold dense soft" if place % 2 else "iron rusts"
            titles[place] = (await backend.search(query, max_results=1, timeout_s=CALL_TIMEOUT_S))[0].title

        with trio.fail_after(TEST_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for place in range(20):
                    nursery.start_soon(ask, place)
        assert titles == {place: "Gold" if place % 2 else "Iron" for place in range(20)}

    async def test_a_cancelled_search_leaves_the_next_one_alone(self, backend: SearchBackend) -> None:
        """A cancel before the answer is not a failure of the backend."""
        with trio.CancelScope() as scope:
            scope.cancel()
            await backend.search("gold", max_results=1, timeout_s=CALL_TIMEOUT_S)
        assert (await _search(backend, "gold"))[0].title == "Gold"

    async def test_it_may_be_closed_twice(self, backend: SearchBackend) -> None:
        """`aclose` is idempotent."""
        with trio.fail_after(TEST_TIMEOUT_S):
            await backend.aclose()
            await backend.aclose()


async def _search(backend: SearchBackend, query: str, max_results: int = 3) -> list[Document]:
    with trio.fail_after(TEST_TIMEOUT_S):
        return await backend.search(query, max_results=max_results, timeout_s=CALL_TIMEOUT_S)
