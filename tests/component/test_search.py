"""Search on the node: what is retried, who is at fault, what a corpus must be, and that no key is told to anybody."""

from __future__ import annotations

import logging
import os
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.config import NodeConfig, SearchConfig
from prorl_trio.http.client import RetryPolicy
from prorl_trio.search.backend import Document, SearchBackend, SearchFailed
from prorl_trio.search.bm25 import open_bm25
from prorl_trio.search.corpus import read_corpus
from prorl_trio.search.service import QueryRefused, Search, open_search
from prorl_trio.testing.fake_http import Answer
from prorl_trio.testing.fake_search import HANG, open_fake_retrieve, open_fake_tavily
from prorl_trio.tools import SearchTool
from prorl_trio.types.errors import ConfigError, SearchUnavailable

DOCUMENTS = [
    Document(document_id="1", title="Water", text="Water boils at 100 degrees Celsius."),
    Document(document_id="2", title="Gold", text="Gold has atomic number 79."),
]
FAST = RetryPolicy(max_attempts=3, first_delay_s=0.001)

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def open_at(server, **fields):
    """A `Search` of the endpoint of a fake server, with fast retries."""
    config = SearchConfig(backend="retrieve", url=server.url, **fields)
    async with open_search(config, None) as search:
        yield Search(search.backend, config, retry=FAST)


# ---------------------------------------------------------------- whose doing


async def test_failures_that_pass_are_retried():
    async with open_fake_retrieve(DOCUMENTS) as server, open_at(server) as search:
        server.faults.extend([Answer(503, b"{}"), Answer(200, b"{}", cut="after_headers")])
        found = await search.find("gold", max_results=5)
        assert [each.title for each in found] == ["Gold"]
        assert search.statistics()["failed_attempts_total"] == 2


async def test_a_backend_that_answers_nobody_is_nobodys_doing():
    async with open_fake_retrieve(DOCUMENTS) as server, open_at(server) as search:
        server.down = True
        with pytest.raises(SearchUnavailable, match="status 503") as caught:
            await search.find("gold", max_results=5)
        assert server.queries == ["gold"] * 3 + ["water"]
    assert (caught.value.cause, caught.value.error_code) == ("node", "search_unavailable")


async def test_a_query_that_alone_breaks_the_backend_is_told_to_the_policy():
    async with open_fake_retrieve(DOCUMENTS) as server, open_at(server) as search:
        server.fails_at = "crash"
        with pytest.raises(QueryRefused, match="put it otherwise"):
            await search.find("crash it", max_results=5)
        assert (await search.find("gold", max_results=5))[0].title == "Gold"
        assert search.statistics()["refused_total"] == 1


async def test_a_query_gets_a_last_attempt_when_the_backend_is_back():
    async with open_fake_retrieve(DOCUMENTS) as server, open_at(server) as search:
        server.faults.extend([Answer(500, b"")] * FAST.max_attempts)
        assert (await search.find("gold", max_results=5))[0].title == "Gold"
        assert server.queries == ["gold", "gold", "gold", "water", "gold"]


async def test_a_backend_that_hangs_is_cut_by_the_time_out():
    async with open_fake_retrieve(DOCUMENTS) as server, open_at(server, attempt_timeout_s=0.05) as search:
        server.faults.extend([HANG] * (FAST.max_attempts + 1))
        with trio.fail_after(30), pytest.raises(SearchUnavailable, match=r"within 0\.05 s"):
            await search.find("gold", max_results=5)


async def test_nothing_is_gained_by_waiting_where_the_backend_refuses_for_good():
    async with open_fake_retrieve(DOCUMENTS, key="k") as server, open_at(server) as search:
        with pytest.raises(SearchUnavailable, match=r"status 401; see search.api_key_file"):
            await search.find("gold", max_results=5)
        assert search.statistics()["failed_attempts_total"] == 2, "one for the query, one for the probe"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"result": []}',
        b'{"result": [[{"score": 1}]]}',
        b'{"result": [[{"document": {"id": 1}}]]}',
        b"\xff",
    ],
)
async def test_an_answer_of_another_form_is_a_failure_that_says_so(body):
    async with open_fake_retrieve(DOCUMENTS) as server, open_at(server) as search:
        server.faults.extend([Answer(200, body)] * 2)
        with pytest.raises(SearchUnavailable, match="another form than documented"):
            await search.find("gold", max_results=5)


async def test_an_answer_of_megabytes_is_refused_before_it_is_read():
    async with open_fake_retrieve(DOCUMENTS) as server, open_at(server, max_response_bytes=1000) as search:
        server.faults.extend([Answer(200, b"x" * 10**6)] * (FAST.max_attempts + 1))
        with pytest.raises(SearchUnavailable, match="exceeds the maximum of 1000"):
            await search.find("gold", max_results=5)


class Slow(SearchBackend):
    """Answers when `free` is set; records how many asked at once."""

    name = "slow"
    max_query_chars = 100

    def __init__(self):
        self.free, self.busy, self.most = trio.Event(), 0, 0

    async def search(self, query, *, max_results, timeout_s):
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            await self.free.wait()
        finally:
            self.busy -= 1
        return DOCUMENTS[:max_results]

    async def aclose(self):
        pass


async def test_no_more_searches_are_at_work_or_wait_than_the_limits_say():
    backend = Slow()
    config = SearchConfig(max_concurrent_searches=2, max_waiting_searches=3, search_timeout_s=5)
    search = Search(backend, config, retry=RetryPolicy(max_attempts=1))
    found = []

    async def ask():
        found.append(len(await search.find("x", max_results=1)))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert (backend.most, search.statistics()["waiting"]) == (2, 3)
            with pytest.raises(SearchUnavailable, match="3 searches wait already"):
                await search.find("x", max_results=1)
            backend.free.set()
    assert found == [1] * 5


# ---------------------------------------------------------------- queries


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("gold\x00\x07 \r\n\tnumber", "gold number"),
        ("gold\ud800\u202e", "gold"),
        ("http://169.254.169.254/gold", "http://169.254.169.254/gold"),
    ],
)
async def test_what_is_no_text_is_left_out_of_a_query(query, asked):
    async with open_fake_retrieve(DOCUMENTS) as server, open_at(server) as search:
        assert (await search.find(query, max_results=5))[0].title == "Gold"
        assert server.queries == [asked]


@pytest.mark.parametrize(
    ("query", "why"),
    [("x" * 5_000_000, "5000000 characters, and may have 1000"), ("\x00 \n", "is empty"), ("", "is empty")],
)
async def test_a_query_that_is_none_is_refused_and_costs_nothing(query, why):
    async with open_fake_retrieve(DOCUMENTS) as server, open_at(server) as search:
        tool = SearchTool(search, trio.CancelScope)
        result = await tool.call({"query": query}, None, timeout_s=1)
        assert (result.outcome, tool.calls, server.queries) == ("error", 0, [])
        assert why in result.text


async def test_a_rollout_has_so_many_searches_and_results_of_such_a_length():
    long = [Document(document_id="L", text="word " * 1000)]
    limits = {"max_calls_per_rollout": 2, "max_result_chars": 50, "max_results": 1}
    async with open_fake_retrieve([*long, *DOCUMENTS]) as server, open_at(server, **limits) as search:
        tool = SearchTool(search, trio.CancelScope)
        first = await tool.call({"query": "word gold water", "max_results": 99}, None, timeout_s=1)
        assert first.text.startswith("[1] ")
        assert "[... 4950 characters left out ...]" in first.text
        assert "[2]" not in first.text
        assert (await tool.call({"query": "qqq"}, None, timeout_s=1)).text == "[nothing found]"
        third = await tool.call({"query": "gold"}, None, timeout_s=1)
        assert (third.outcome, len(server.queries)) == ("error", 2)
        assert "a task may make 2" in third.text
        for wrong in ({"query": 3}, {"query": "x", "max_results": 0}, {"query": "x", "max_results": True}):
            assert (await tool.call(wrong, None, timeout_s=1)).outcome == "error"


# ---------------------------------------------------------------- keys


async def test_a_key_reaches_the_endpoint_and_no_message_or_log(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    key_file = tmp_path / "key"
    key_file.write_text("tvly-SECRET\n")
    async with open_fake_tavily(DOCUMENTS, key="tvly-SECRET") as server:
        config = SearchConfig(backend="tavily", url=server.url, api_key_file=str(key_file), max_attempts=1)
        async with open_search(config, tmp_path) as search:
            assert (await search.find("gold", max_results=5))[0].url == "https://example.org/2"
            server._key = "another"  # it is refused from now on, and quoted by the server
            with pytest.raises(SearchUnavailable, match=r"Bearer \[the key\]") as caught:
                await search.find("gold", max_results=5)
            told = [str(caught.value), repr(caught.value.__cause__), repr(search.backend), repr(search.statistics())]
    assert not [text for text in (*told, caplog.text, repr(config)) if "SECRET" in text]


def test_a_key_that_cannot_be_read_is_told_without_it(tmp_path):
    bad = tmp_path / "key"
    tavily = {"backend": "tavily"}
    with pytest.raises(ConfigError, match=r"search.api_key_env: \$TAVILY is empty"):
        SearchConfig(**tavily, api_key_env="TAVILY").read_api_key({})
    assert SearchConfig(**tavily, api_key_env="TAVILY").read_api_key({"TAVILY": " k "}) == "k"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        SearchConfig(**tavily, api_key_file=str(bad)).read_api_key()
    for content in (b"SECRET with space", b"SECRET\nline", "SECRETé".encode(), b"\xffSECRET"):
        bad.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            SearchConfig(**tavily, api_key_file=str(bad)).read_api_key()
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"backend": "bm25"}, "corpus"),
        ({"backend": "retrieve"}, "url"),
        ({"backend": "tavily"}, "api_key_file or api_key_env"),
        ({"api_key_file": "a", "api_key_env": "b"}, "not both"),
        ({"backend": "google"}, "backend"),
    ],
)
def test_a_configuration_that_lacks_something_says_what(table, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"model": {"path": "/m"}, "search": table}, NodeConfig)


@pytest.mark.parametrize("url", ["ftp://x/retrieve", "retrieve", "http://x/retrieve?key=1", "http://u:p@x/"])
async def test_a_url_that_is_none_is_told(url, tmp_path):
    with pytest.raises(ConfigError, match=r"search\.url"):
        async with open_search(SearchConfig(backend="retrieve", url=url), tmp_path):
            pass


# ---------------------------------------------------------------- the corpus

GOOD = b'{"id": "a", "text": "good"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b"{nonsense}\n", "line 2: no document"),
        (GOOD + b"\n" + GOOD, "line 3: the id 'a' is that of line 1"),
        (b'{"id": "a"}\n', "line 1: it has neither `text` nor `contents`"),
        (b'{"text": " "}\n', "line 1: its text is empty"),
        (b'{"text": "\xff"}\n', "line 1: no document"),
        (b'["text"]\n', "line 1: no document"),
        (b'{"text": 3}\n', "line 1: no document"),
        (b"\n \n", "holds no document"),
        (b"{\n" * 9, "line 5: no document.*; there may be more"),
        (b'{"text": "' + b"x" * 5000 + b'"}', "line 1: longer than 4096 bytes"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_what_to_do(tmp_path, content, message):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        list(read_corpus(corpus, 4096))
    assert str(corpus) in str(caught.value)
    assert ("a line is {" in str(caught.value)) == ("longer" not in message)


async def open_backend(tmp_path, corpus, **fields):
    return await open_bm25(SearchConfig(backend="bm25", corpus=str(corpus), **fields), tmp_path / "indexes")


async def test_an_index_is_made_once_for_each_content(tmp_path):
    corpus, copy = tmp_path / "corpus.jsonl", tmp_path / "copy.jsonl"
    corpus.write_bytes(GOOD)
    copy.write_bytes(GOOD)
    for path in (corpus, copy):
        backend = await open_backend(tmp_path, path)
        facts = backend.statistics()
        assert (facts["documents"], facts["words"], facts["corpus_bytes"]) == (1, 1, len(GOOD))
        assert facts["index_bytes"] > 0
        await backend.aclose()
    assert len(os.listdir(tmp_path / "indexes")) == 1
    corpus.write_bytes(GOOD + b'{"text": "better"}')
    backend = await open_backend(tmp_path, corpus)
    assert (await backend.search("better", max_results=5, timeout_s=5))[0].document_id == "2"
    await backend.aclose()
    assert len(os.listdir(tmp_path / "indexes")) == 2, "nothing half made is left"


async def test_a_corpus_that_cannot_be_used_fails_the_start_with_its_line(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(GOOD + b"oops\n")
    with pytest.raises(ConfigError, match=r"corpus.jsonl, line 2: no document.*Mend or remove them"):
        await open_backend(tmp_path, corpus)
    with pytest.raises(ConfigError, match="No such file"):
        await open_backend(tmp_path, tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"was not made within 1e-05 s \(search.index_timeout_s\)"):
        await open_backend(tmp_path, corpus, index_timeout_s=1e-5)
    assert os.listdir(tmp_path / "indexes") == []


async def test_a_corpus_that_is_written_to_is_noticed(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(GOOD)
    backend = await open_backend(tmp_path, corpus)
    corpus.write_bytes(b'{"id": "b", "text": "evil"}\n')
    os.utime(corpus, ns=(1, 1))
    with pytest.raises(SearchFailed, match=r"is not what was indexed.*restart the node"):
        await backend.search("good", max_results=1, timeout_s=5)
    await backend.aclose()
    with pytest.raises(SearchFailed, match="closed"):
        await backend.search("good", max_results=1, timeout_s=5)
