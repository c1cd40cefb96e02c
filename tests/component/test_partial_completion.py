"""A completion that is cut: what was received is kept, continued, and recorded under the version it was sampled by."""

from __future__ import annotations

from array import array
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.inference.engines.answers import ContractBroken, Prompt, Wanted, logprob_kind
from prorl_trio.inference.engines.completion_stream import MAX_EVENT_BYTES, CompletionStream
from prorl_trio.inference.engines.protocol import Completion, EngineInfo, Guide, RequestRefused, made_by
from prorl_trio.inference.engines.registry import EngineRegistry
from prorl_trio.inference.engines.sglang import SglangClient
from prorl_trio.inference.engines.vllm_api import read_event
from prorl_trio.inference.pool.admission import Admission
from prorl_trio.inference.pool.partial import PartialCompletion, version_name
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.fake_sglang import open_fake_sglang
from prorl_trio.types.backends import PauseBackends, ResumeBackends
from prorl_trio.types.errors import BackendError
from prorl_trio.types.models import SamplingParams
from support.completions import asked, begun

pytestmark = pytest.mark.timeout(30)

PROMPT = [5, 6, 7]
SLOW = FakeEngineConfig(per_token_s=0.02)


def under(version):
    return lambda: msgspec.structs.replace(INFO, policy_version=version)


INFO = EngineInfo(url="u", model="m", max_model_len=100, engine="e", policy_version="0")
COMPLETION = Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", policy_version="0", engine="e")
WANTED = Wanted(prompt=Prompt.of(PROMPT), sampling=SamplingParams(), max_tokens=9, info=INFO)


@asynccontextmanager
async def open_pool(config=SLOW):
    def script(prompt):
        """A story that goes on the same way wherever it is taken up."""
        said = len(prompt) - len(PROMPT)
        return list(range(100 + said, 160)), [-1.0 - index / 100 for index in range(said, 60)], "stop"

    async with open_fake_sglang(script=script, config=config) as engine:
        backends = Backends(made_by(SglangClient))
        await backends.add(engine.url)
        yield backends, engine
        await backends.aclose()


async def test_an_aborted_completion_goes_on_from_what_the_engine_had_sampled():
    got = []
    async with open_pool() as (backends, engine):

        async def sample():
            async with backends.lease("task") as lease:
                partial = begun(asked(PROMPT, 60))
                got.append(await lease.attempt(partial))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sample)
            await engine.wait_until(lambda stats: stats.running == 1)
            await trio.sleep(0.2)
            report = await backends.operate(PauseBackends("abort", 10))
            assert [(backend.engine, backend.in_flight) for backend in report.backends] == [("paused", 0)]
            assert engine.paused == "abort"
            await backends.operate(ResumeBackends("v1"))
            assert (engine.paused, engine.weight_version) == (None, "v1")
    (completion,) = got
    assert [*completion.token_ids] == list(range(100, 160))
    assert completion.logprobs == array("f", [-1.0 - index / 100 for index in range(60)])
    assert [span.policy_version for span in completion.spans] == ["0", "v1"]
    switch = completion.spans[0].end
    assert 0 < switch == completion.spans[1].start < 60
    assert engine.requests[-1].prompt == PROMPT + list(range(100, 100 + switch))
    assert engine.requests[-1].max_tokens == 60 - switch


async def test_an_abort_leaves_alone_the_calls_of_engines_that_answer_by_themselves(autojump_clock):
    admission, ends = Admission(), {}

    async def call(url):
        try:
            await trio.sleep(1 if not ends.get(url) else 0)
        except trio.Cancelled:
            ends[url] = "cancelled"
            raise
        return msgspec.structs.replace(COMPLETION, engine=url)

    async with trio.open_nursery() as nursery:
        for url in ("a", "b"):
            nursery.start_soon(admission.run, partial(str, url), partial(call, url))
        await trio.testing.wait_all_tasks_blocked()
        admission.abort(frozenset({"a"}))
    assert ends == {"b": "cancelled"}


async def test_a_pause_that_changes_nothing_leaves_one_span():
    got = []
    async with open_pool() as (backends, engine):

        async def sample():
            async with backends.lease("task") as lease:
                got.append(await lease.attempt(begun(asked(PROMPT, 60))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sample)
            await engine.wait_until(lambda stats: stats.running == 1)
            await trio.sleep(0.1)
            await backends.operate(PauseBackends("abort", 10))
            await backends.operate(ResumeBackends())
    assert [(span.start, span.end) for span in got[0].spans] == [(0, 60)]


async def test_tokens_streamed_before_a_failure_are_not_sampled_again():
    partial = begun(asked(PROMPT, 9), stream=True)
    assert partial.begin_attempt(under("v1")) is None
    partial.receive([11, 12], [-0.5, -0.25])
    partial.cut()
    assert (list(partial.prompt_token_ids), partial.room) == ([*PROMPT, 11, 12], 7)
    async with open_fake_engine() as engine:
        backends = Backends(EngineRegistry().finder("auto"))
        await backends.add(engine.url)
        await backends.operate(ResumeBackends("v2"))
        async with backends.lease("task") as lease:
            completion = await lease.attempt(partial)
        await backends.aclose()
        assert engine.requests[-1].prompt == [*PROMPT, 11, 12]
    assert [*completion.token_ids[:2]] == [11, 12]
    assert [*completion.logprobs[:2]] == [-0.5, -0.25]
    assert [(span.start, span.policy_version) for span in completion.spans] == [(0, "v1"), (2, "v2")]


@pytest.mark.parametrize(("last", "max_tokens", "reason"), [(2, 9, "stop"), (12, 2, "length")])
def test_nothing_is_asked_for_where_the_cut_came_after_the_end(last, max_tokens, reason):
    partial = begun(asked(PROMPT, max_tokens, sampling=SamplingParams(stop_token_ids=[2])), stream=True)
    assert partial.begin_attempt(under("v1")) is None
    partial.receive([11, last], [-0.5, -0.25])
    partial.cut()
    whole = partial.begin_attempt(under("v1"))
    assert ([*whole.token_ids], whole.finish_reason) == ([11, last], reason)


def test_tokens_streamed_over_a_resume_are_of_the_version_that_was_in_force_when_they_came():
    info = [under("v1")()]
    partial = begun(asked(PROMPT, 9), stream=True)
    assert partial.begin_attempt(lambda: info[0]) is None
    partial.receive([11, 12], [-0.5, -0.5])
    info[0] = under("v2")()
    partial.receive([13], [-0.5])
    partial.cut()
    assert partial.begin_attempt(lambda: info[0]) is None
    partial.receive([14], [-0.5])
    said = Completion(token_ids=[14], logprobs=[-0.5], finish_reason="stop", policy_version="", engine="e")
    completion = partial.add(said)
    assert [(span.start, span.end, span.policy_version) for span in completion.spans] == [(0, 2, "v1"), (2, 4, "v2")]


def test_an_answer_in_one_piece_that_names_no_version_is_of_the_one_that_it_was_begun_under():
    """What crossed a resume was sampled before it, at least in part: it is never said to be newer than it is."""
    info = [known("", "v1")]
    partial = begun(asked(PROMPT, 9))
    assert partial.begin_attempt(lambda: info[0]) is None
    info[0] = known("", "v2")
    said = Completion(token_ids=[11, 12], logprobs=[-0.5, -0.5], finish_reason="stop", policy_version="", engine="e")
    completion = partial.add(said)
    assert [(span.start, span.end, span.policy_version) for span in completion.spans] == [(0, 2, "v1")]


def test_tokens_of_a_whole_stream_are_of_the_versions_that_were_in_force_when_they_came():
    info = [known("", "v1")]
    partial = begun(asked(PROMPT, 9), stream=True)
    assert partial.begin_attempt(lambda: info[0]) is None
    partial.receive([11, 12], [-0.5, -0.5])
    info[0] = known("", "v2")
    partial.receive([13], [-0.5])
    info[0] = known("", "v3")
    said = Completion(token_ids=[11, 12, 13], logprobs=[-0.5] * 3, finish_reason="stop", policy_version="", engine="e")
    completion = partial.add(said)
    assert [(span.start, span.end, span.policy_version) for span in completion.spans] == [(0, 2, "v1"), (2, 3, "v2")]


def test_a_call_that_was_complete_when_its_stream_was_cut_is_not_sampled_further():
    partial = begun(asked(PROMPT, 9), stop=lambda ids: ids[-1] == 12)
    assert partial.begin_attempt(under("v1")) is None
    assert partial.receive([11, 12, 13], [-0.5, -0.5, -0.5]) == 2
    partial.cut()
    whole = partial.begin_attempt(under("v1"))
    assert ([*whole.token_ids], whole.finish_reason) == ([11, 12], "tool_call")


def known(label, policy_version):
    return msgspec.structs.replace(INFO, label=label, policy_version=policy_version)


@pytest.mark.parametrize(
    ("labels", "before", "after", "named"),
    [
        (["0"], ("0", "0"), ("0", "0"), ["0"]),
        (["0"], ("0", "0"), ("0", "7"), ["0"]),  # an engine that is told nothing
        (["0"], ("0", "0"), ("", "7"), ["0"]),
        (["7"], ("0", "0"), ("7", "7"), ["7"]),  # it stood still before its first token
        (["0", "7"], ("0", "0"), ("7", "7"), ["0", "7"]),
        (["0", "6", "7"], ("0", "0"), ("7", "7"), ["0", "6", "7"]),
        (["a", "b"], ("0", "0"), ("0", "0"), ["a", "b"]),  # whoever told the engine did not tell the pool
        (["b"], ("a", "3"), ("a", "3"), ["b"]),
        (["a"], ("a", "3"), ("a", "3"), ["3"]),
        (["a", "b"], ("a", "3"), ("", "4"), ["3", "4"]),  # the trainer told the engine its name, and the pool its own
        (["0"], ("7", "7"), ("7", "7"), ["0"]),  # it was started again
    ],
)
def test_the_engine_knows_where_and_the_pool_what(labels, before, after, named):
    assert [version_name(label, known(*before), known(*after)) for label in labels] == named


# ------------------------------------------------------------ streams


def event(ids, logprobs=None, **choice):
    values = [-1.0] * len(ids) if logprobs is None else logprobs
    body = {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": values}, **choice}]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def open_stream(sink):
    return CompletionStream(msgspec.structs.replace(WANTED, sink=sink), read_event)


def counted(ids, count):
    body = {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}]}
    return b"data: " + msgspec.json.encode(body | {"usage": {"completion_tokens": count}}) + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_a_stream_cut_into_any_pieces_is_the_same_completion():
    whole = event([11]) + event([12, 13], finish_reason="stop") + USAGE + DONE
    for size in (1, 7, 50, len(whole)):
        got = []
        stream = open_stream(lambda ids, _, got=got: got.extend(ids))
        assert not any(stream.feed(whole[at : at + size]) for at in range(0, len(whole), size))
        completion = stream.completion()
        assert got == [*completion.token_ids] == [11, 12, 13]
        assert completion.finish_reason == "stop"


def test_a_stream_stops_at_the_token_that_is_enough():
    stream = open_stream(lambda ids, _: ids.index(12) + 1 if 12 in ids else None)
    assert not stream.feed(event([11]))
    assert stream.feed(event([12, 13]))
    completion = stream.completion()
    assert ([*completion.token_ids], completion.finish_reason) == ([11, 12], "tool_call")
    assert completion.dropped_tokens == 1
    assert len(completion.logprobs) == 2


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (event([11]), BackendError, "ended after 1 tokens"),
        (event([11]) + DONE, ContractBroken, "without the engine's own count"),
        (event([11], finish_reason="stop") + USAGE + DONE, ContractBroken, "counts differ"),
        (event(list(range(10))), ContractBroken, "asked for at most 9 tokens, it sampled 10"),
        (counted([11], 1) + counted([12], 1), ContractBroken, "repeats tokens"),
        (b"data: " + b"x" * MAX_EVENT_BYTES, ContractBroken, "an event of its stream is larger"),
        (b'data: {"object":"error","message":"the core died"}\n\n', BackendError, "the core died"),
        (event([11], []), ContractBroken, "0 logprobs in one event"),
        (event([11], prompt_token_ids=[5, 6]), ContractBroken, "read one of 2"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', BackendError, "out of memory"),
    ],
)
def test_a_stream_that_drops_something_is_not_believed(body, error, says):
    stream = open_stream(lambda _ids, _logprobs: None)

    def read():
        stream.feed(body)
        return stream.completion()

    with pytest.raises(error, match=says):
        read()


# ------------------------------------------------------------ which engine, which log-probabilities


async def test_auto_finds_out_which_engine_answers():
    async with open_fake_sglang() as sglang, open_fake_engine() as vllm:
        for server, name, api in ((sglang, "sglang", "/generate"), (vllm, "vllm", "/v1/completions")):
            client = await EngineRegistry().finder("auto")(server.url, 5)
            info = await client.probe(timeout_s=5)
            assert (info.engine, info.api) == (f"{name} 0.0.fake", api)
            await client.aclose()


@pytest.mark.parametrize("fault", ["drop_logprobs", "count_mismatch", "usage_mismatch", "drop_token_ids"])
async def test_an_sglang_that_drops_something_is_refused(fault):
    async with open_fake_sglang() as engine:
        client = SglangClient(engine.url)
        engine.inject(fault)
        with pytest.raises(BackendError, match="drops") as caught:
            await client.probe(timeout_s=5)
        assert not caught.value.retryable
        await client.aclose()


@pytest.mark.parametrize("incremental", [False, True, "ids"])
@pytest.mark.parametrize("tokens_per_event", [1, 3])
async def test_an_sglang_streams_all_so_far_or_what_is_new(incremental, tokens_per_event):
    got = []
    config = FakeEngineConfig(tokens_per_event=tokens_per_event)
    async with open_fake_sglang(script=lambda _: ([*range(10, 18)], [-0.5] * 8, "stop"), config=config) as engine:
        engine.incremental = incremental
        client = SglangClient(engine.url)
        await client.probe(timeout_s=5)
        completion = await client.generate(asked(PROMPT, 20, sink=lambda ids, _: got.extend(ids)))
        assert got == [*completion.token_ids] == [*range(10, 18)]
        assert (completion.finish_reason, completion.dropped_tokens) == ("stop", 0)
        stopped = await client.generate(asked(PROMPT, 20, sink=lambda ids, _: ids.index(13) + 1 if 13 in ids else None))
        assert ([*stopped.token_ids], stopped.finish_reason) == ([10, 11, 12, 13], "tool_call")
        assert stopped.dropped_tokens == -4 % tokens_per_event
        await client.aclose()


@pytest.mark.parametrize(
    "fault", ["drop_logprobs", "count_mismatch", "usage_mismatch", "drop_token_ids", "null_logprob", "bad_json"]
)
async def test_a_stream_of_an_sglang_that_drops_something_is_refused(fault):
    async with open_fake_sglang() as engine:
        client = SglangClient(engine.url)
        await client.probe(timeout_s=5)
        engine.inject(fault)
        with pytest.raises(BackendError, match="not fit for token-exact rollouts") as caught:
            await client.generate(asked(PROMPT, sink=lambda _ids, _logprobs: None))
        assert not caught.value.retryable
        await client.aclose()


def test_what_log_probabilities_are_of():
    assert logprob_kind([-1.5, -2.0], [-1.5, -3.0]) == "raw"
    assert logprob_kind([0.0, 0.0], [0.0, 0.0]) == "processed"
    assert logprob_kind([-1.5, -2.0], [-2.5, -2.0]) == "processed"


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        (b'{"error": {"message": "no such grammar", "code": 400}}', RequestRefused),
        (b'{"object": "error", "message": "no such grammar", "code": 400}', RequestRefused),
        (b'{"error": {"message": "the engine died", "code": 500}}', BackendError),
        (b'{"error": "odd"}', BackendError),
        (b'{"error"', BackendError),
    ],
)
def test_a_request_that_is_refused_inside_a_stream_is_no_failure_of_the_engine(told, kind):
    with pytest.raises(BackendError) as caught:
        open_stream(lambda *_: None).feed(b"data: " + told + b"\n\n")
    assert type(caught.value) is kind


def test_a_completion_that_is_kept_to_a_form_is_not_continued():
    guided = msgspec.structs.replace(asked(PROMPT, 20), guide=Guide("json", "{}"))
    partial = PartialCompletion(guided, slice_tokens=4)
    assert partial.next_tokens == 20, "nor asked for in slices"
    assert partial.begin_attempt(lambda: INFO) is None
    partial.receive([11, 12], [-1.0, -1.0])
    partial.cut()
    whole = partial.begin_attempt(lambda: INFO)
    assert (list(whole.token_ids), whole.finish_reason) == ([11, 12], "abort")
    assert [span.constraint for span in whole.spans] == ["json"]
