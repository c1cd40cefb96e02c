"""The contract of search backends, over BM25, and over both endpoints by their look-alikes."""

from __future__ import annotations

import msgspec
import pytest

pytest.register_assert_rewrite("prorl_trio.testing.search_contract")

from prorl_trio.config import SearchConfig  # noqa: E402
from prorl_trio.search.bm25 import open_bm25  # noqa: E402
from prorl_trio.search.retrieve import RetrieveBackend  # noqa: E402
from prorl_trio.search.service import TavilyBackend  # noqa: E402
from prorl_trio.testing.fake_search import open_fake_retrieve, open_fake_tavily  # noqa: E402
from prorl_trio.testing.search_contract import DOCUMENTS, SearchContract  # noqa: E402

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("indexes")


class TestBm25(SearchContract):
    @pytest.fixture
    async def backend(self, tmp_path, index_dir):
        corpus = tmp_path / "corpus.jsonl"
        lines = [{"id": each.document_id, "title": each.title, "text": each.text} for each in DOCUMENTS]
        corpus.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
        backend = await open_bm25(SearchConfig(backend="bm25", corpus=str(corpus)), index_dir)
        yield backend
        await backend.aclose()


class TestRetrieve(SearchContract):
    @pytest.fixture
    async def backend(self):
        async with open_fake_retrieve(DOCUMENTS) as server:
            backend = RetrieveBackend(server.url, "", SearchConfig(backend="retrieve", url=server.url))
            yield backend
            await backend.aclose()


class TestTavily(SearchContract):
    @pytest.fixture
    async def backend(self):
        async with open_fake_tavily(DOCUMENTS, key="tvly-secret") as server:
            config = SearchConfig(backend="tavily", url=server.url, api_key_env="TAVILY_API_KEY")
            backend = TavilyBackend("tvly-secret", config)
            yield backend
            await backend.aclose()
