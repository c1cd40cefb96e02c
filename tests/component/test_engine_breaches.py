"""Engines, and what stands before them, that answer otherwise than they should: told apart, and never believed."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec
import pytest
import trio

from prorl_trio.http.client import HttpClient, HttpLimits, RetryPolicy
from prorl_trio.inference.engines.completion_stream import EventLines
from prorl_trio.inference.engines.load_report import LoadReader, LoadReport
from prorl_trio.inference.engines.protocol import EnginePaused, RequestRefused
from prorl_trio.inference.engines.registry import EngineRegistry
from prorl_trio.inference.engines.sglang import SglangClient
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.testing.fake_engine import FakeEngine, open_fake_engine, open_look_alike
from prorl_trio.testing.fake_http import Answer, serve_http
from prorl_trio.testing.fake_sglang import FakeSglang, open_fake_sglang
from prorl_trio.types.errors import BackendError, ContextLengthExceeded
from support.completions import asked

pytestmark = pytest.mark.timeout(30)

PROMPT = [5, 6, 7]
STORY = list(range(10, 18))


def tell(_prompt):
    return STORY, [-0.5] * len(STORY), "stop"


def read_load(page):
    reader = LoadReader()
    assert not reader.feed(page)
    return reader.load()


def never_enough(_ids, _logprobs):
    return None


async def ask(client, sink=never_enough, max_tokens=20):
    return await client.generate(asked(PROMPT, max_tokens, timeout_s=5, sink=sink))


@asynccontextmanager
async def probed(client):
    try:
        with trio.fail_after(20):
            await client.probe(timeout_s=5)
            yield client
    finally:
        await client.aclose()


# ------------------------------------------------------------ streams


@pytest.mark.parametrize(
    ("open_engine", "kind"), [(open_fake_engine, VllmClient), (open_fake_sglang, SglangClient)], ids=["vllm", "sglang"]
)
async def test_an_event_that_comes_twice_is_noticed_before_an_early_stop(open_engine, kind):
    """An engine's count comes with each event: the one at the end would be too late for a stream that is left."""

    def stop_at_twelve(ids, _logprobs):
        return ids.index(12) + 1 if 12 in ids else None

    async with open_engine(script=tell) as engine, probed(kind(engine.url)) as client:
        if isinstance(engine, FakeSglang):
            engine.incremental = True
        engine.inject("repeated_event")
        with pytest.raises(BackendError, match="counts differ: 3 ids, 2 in its usage") as caught:
            await ask(client, stop_at_twelve)
        assert not caught.value.retryable
        assert [*(await ask(client, stop_at_twelve)).token_ids] == [10, 11, 12]


async def test_a_stream_that_ends_early_may_be_continued():
    async with open_fake_engine(script=tell) as engine, probed(VllmClient(engine.url)) as client:
        engine.inject("no_done")
        with pytest.raises(BackendError, match="ended after 8 tokens") as caught:
            await ask(client)
        assert caught.value.retryable


class Flood(FakeEngine):
    """Streams on and on, whatever it was asked for."""

    def _run_script(self, request):
        return super()._run_script(request if request.ignore_eos else msgspec.structs.replace(request, max_tokens=2000))


async def test_an_engine_that_does_not_stop_is_left_at_once():
    def script(_prompt):
        return [9] * 5000, [-1.0] * 5000, "stop"

    async with open_look_alike(Flood, script, None, 0) as engine, probed(VllmClient(engine.url)) as client:
        got = []
        with pytest.raises(BackendError, match="asked for at most 20 tokens, it sampled 21 and goes on"):
            await ask(client, lambda ids, _: got.extend(ids))
        assert len(got) == 20
        await engine.wait_until(lambda stats: stats.running == 0)


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_events_are_split_wherever_the_pieces_are(size):
    stream = b": ping\r\n\r\ndata: " + b"x" * 50_000 + b"\r\n\r\nevent: more\ndata:y\n\ndata: rest"
    lines, got = EventLines(), []
    for at in range(0, len(stream), size):
        got += lines.feed(stream[at : at + size])
    assert got == [b"x" * 50_000, b"y"]


async def test_a_stream_may_be_longer_than_an_answer_that_is_kept():
    """Of an SGLang each event has all tokens so far: together they are much larger than any of them."""

    async def answer(call):
        async def stream(send):
            for _ in range(50):
                await send(b"z" * 1000)
            return False

        await trio.lowlevel.checkpoint()
        return Answer(200, b"", "text/event-stream", stream=stream) if call.path == "/s" else Answer(200, b"k" * 5000)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        await nursery.start(trio.serve_listeners, lambda stream: serve_http(stream, answer), listeners)
        http = HttpClient(f"http://127.0.0.1:{port}", limits=HttpLimits(max_response_bytes=4000))
        got = bytearray()

        def take(piece):
            got.extend(piece)
            return False

        await http.request("GET", "/s", timeout_s=5, on_data=take)
        assert len(got) == 50_000
        http.close()
        nursery.cancel_scope.cancel()


# ------------------------------------------------------------ SGLang's errors, and its versions


def sglang_event(reason):
    return msgspec.json.encode({"meta_info": {"completion_tokens": 0, "finish_reason": reason}, "output_ids": []})


class Aborting(FakeSglang):
    """Answers with an abort that is an error, as the scheduler makes them."""

    reason: ClassVar = {}

    def _event(self, request, sampled, start, end, fault):
        if request.ignore_eos:
            return super()._event(request, sampled, start, end, fault)
        return b"data: " + sglang_event(self.reason) + b"\n\n"


@pytest.mark.parametrize(
    ("status", "message", "error", "retryable"),
    [
        (503, "the queue is full", BackendError, True),
        (500, "NaN in the logits", BackendError, True),
        (400, "stop_token_ids: not a list", RequestRefused, False),
        (
            400,
            "The input (9 tokens) is longer than the model's context length (8 tokens).",
            ContextLengthExceeded,
            None,
        ),
    ],
)
async def test_an_abort_with_a_status_is_an_error_and_no_end_of_a_turn(status, message, error, retryable):
    async with open_look_alike(Aborting, tell, None, 0) as engine, probed(SglangClient(engine.url)) as client:
        engine.reason = {"type": "abort", "message": message, "status_code": status}
        with pytest.raises(error, match="8" if retryable is None else message) as caught:
            await ask(client)
        assert getattr(caught.value, "retryable", None) == retryable


@pytest.mark.parametrize("sink", [None, never_enough])
async def test_an_sglang_says_what_its_weights_are_called(sink):
    async with open_fake_sglang(script=tell) as engine:
        client = SglangClient(engine.url)
        assert (await client.probe(timeout_s=5)).label == "0"
        engine.weight_version = "step-8"
        completion = await ask(client, sink)
        assert (completion.label, completion.versions_told) == ("step-8", False)
        await client.aclose()


class Spans(FakeSglang):
    """A newer one: it tells which tokens are of which weights."""

    def _as_sglang(self, completion):
        answer = super()._as_sglang(completion)
        count = answer["meta_info"]["completion_tokens"]
        cut = min(3, count)
        runs = [("default", 0, cut), ("w2", cut, count)] if count > cut else [("default", 0, count)]
        answer["meta_info"]["weight_versions"] = [
            {"version": version, "start": start, "end": end} for version, start, end in runs
        ]
        return answer


@pytest.mark.parametrize("stop_at", [None, 11, 14])
async def test_an_sglangs_spans_are_kept_up_to_an_early_stop(stop_at):
    def sink(ids, _logprobs):
        return ids.index(stop_at) + 1 if stop_at in ids else None

    async with open_look_alike(Spans, tell, None, 0) as engine, probed(SglangClient(engine.url)) as client:
        completion = await ask(client, sink)
        count = len(STORY) if stop_at is None else STORY.index(stop_at) + 1
        told = [(span.policy_version, span.start, span.end) for span in completion.spans]
        assert told == ([("0", 0, 3), ("w2", 3, count)] if count > 3 else [("0", 0, count)])
        assert completion.versions_told


# ------------------------------------------------------------ what is said of the server


class Odd:
    """Behind something that has its own answers for some paths."""

    own: ClassVar = {}

    async def _answer(self, call):
        if call.path in self.own:
            await trio.lowlevel.checkpoint()
            return self.own[call.path]
        return await super()._answer(call)


class OddEngine(Odd, FakeEngine):
    pass


class OddSglang(Odd, FakeSglang):
    pass


@asynccontextmanager
async def open_odd(kind=OddEngine, **own):
    async with open_look_alike(kind, tell, None, 0) as engine:
        engine.own = {f"/{path.replace('__', '/')}": answer for path, answer in own.items()}
        yield engine


async def test_a_gateway_that_forbids_what_is_optional_hides_no_engine():
    forbidden = Answer(403, b'{"error": {"message": "no such route"}}')
    paths = ["version", "weight_info", "metrics", "is_paused", "model_info", "get_model_info", "pause?mode=abort"]
    async with open_odd(**dict.fromkeys(paths, forbidden)) as engine:
        client = await EngineRegistry().finder("auto")(engine.url, 5)
        info = await client.probe(timeout_s=5)
        assert (info.engine, info.pausable, info.prefix_caching) == ("vllm", False, None)
        assert await client.load(timeout_s=5) is None
        assert await client.pause("abort", timeout_s=5) is False
        await client.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        Answer(422, b'{"error": {"message": "extra inputs are not permitted"}}'),
        Answer(200, b'{"choices": [{"token_ids": [5, 6], "logprobs": null}]}'),
        Answer(501, b"not here"),
    ],
    ids=["refused", "without logprobs", "not there"],
)
async def test_a_generate_endpoint_of_another_form_is_passed_over(answer):
    """By a server whose /v1/completions is fit."""
    async with open_odd(inference__v1__generate=answer) as engine, probed(VllmClient(engine.url)) as client:
        assert (await client.probe(timeout_s=5)).api == "/v1/completions"
        assert [*(await ask(client)).token_ids] == STORY


async def test_adapters_listed_before_the_model_are_not_taken_for_it():
    cards = [
        {"id": "adapter", "parent": "fake-model", "max_model_len": None},
        {"id": "fake-model", "max_model_len": 99},
    ]
    listed = Answer(200, msgspec.json.encode({"data": cards}))
    async with open_odd(v1__models=listed) as engine, probed(VllmClient(engine.url)) as client:
        info = await client.probe(timeout_s=5)
        assert (info.model, info.max_model_len) == ("fake-model", 99)


async def test_one_that_is_paused_says_so_instead_of_holding_the_probe():
    async with open_odd(is_paused=Answer(200, b'{"is_paused":true}')) as engine:
        client = VllmClient(engine.url)
        with pytest.raises(EnginePaused, match=r"POST http.*/resume"):
            await client.probe(timeout_s=5)
        await client.aclose()


async def test_a_probe_that_fails_leaves_the_engine_what_it_was_found_to_be():
    """An SGLang that is starting may not have its own endpoints yet: it does not become a vLLM by that."""
    async with open_odd(OddSglang) as engine, probed(await EngineRegistry().finder("auto")(engine.url, 5)) as client:
        engine.own = dict.fromkeys(["/model_info", "/get_model_info"], Answer(404, b"{}"))
        with pytest.raises(BackendError):
            await client.probe(timeout_s=5)
        assert [*(await ask(client)).token_ids] == STORY


@pytest.mark.parametrize(("status", "kind"), [(400, RequestRefused), (422, RequestRefused), (500, BackendError)])
async def test_whose_fault_a_status_is(status, kind):
    async with open_odd() as engine, probed(VllmClient(engine.url, retry=RetryPolicy(max_attempts=1))) as client:
        engine.own = {"/v1/completions": Answer(status, b'{"error": {"message": "because"}}')}
        with pytest.raises(kind, match="because") as caught:
            await ask(client, None)
        assert isinstance(caught.value, RequestRefused) == (status < 500)


async def test_a_page_of_megabytes_is_read_as_it_comes():
    """So it stalls nobody, and no limit of what is kept applies."""
    others = b"".join(b'vllm:latency_bucket{engine="0",le="%d"} 1.0\n' % n for n in range(50_000))
    page = others + b'vllm:num_requests_running{engine="0"} 3\n' + others + b"vllm:num_requests_waiting{} 2"
    pieces = [page[at : at + 60_000] for at in range(0, len(page), 60_000)]
    reader = LoadReader()
    assert not any(map(reader.feed, pieces))
    assert reader.load() == read_load(page) == LoadReport(running=3, waiting=2)
    async with open_odd(metrics=Answer(200, page, "text/plain")) as engine, probed(VllmClient(engine.url)) as client:
        client._http._limits = HttpLimits(max_response_bytes=100_000)
        assert await client.load(timeout_s=5) == LoadReport(running=3, waiting=2)


@pytest.mark.parametrize("value", ["-1", "1e308", "NaN", "-inf", "1e15"])
def test_numbers_that_no_engine_has_are_not_believed(value):
    """Two that are finite add up to infinity; a negative one would divide by zero."""
    lines = [f'vllm:num_requests_running{{engine="{n}"}} {value}\n' for n in range(2)]
    page = "".join(lines) + f"vllm:num_requests_waiting {value}\n"
    assert read_load(page.encode()) is None
    assert read_load(b"vllm:num_requests_running" + b"{" + b"}" * 100_000 + b" 1\n" + page.encode()) is None
    one_good = read_load((page + "vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n").encode())
    assert (one_good.running, one_good.waiting) == (3, 2)
