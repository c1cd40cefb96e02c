"""The gateway over HTTP: who may ask, what a client is told of limits and failures, streams, and clients that leave."""

from __future__ import annotations

import gzip
import json
import threading

import msgspec
import pytest
import requests
import trio

from prorl_trio.agent.gateway import Gateway
from prorl_trio.edges.gateway import app as app_module
from prorl_trio.edges.gateway import chat
from prorl_trio.edges.gateway.app import GatewayTable
from prorl_trio.types.backends import PauseBackends, ResumeBackends
from support.gateway_client import PATHS, serving

pytestmark = pytest.mark.timeout(30)


def slow(rig, seconds):
    rig.engine.config = msgspec.structs.replace(rig.engine.config, first_token_s=seconds)


STREAMS = {**PATHS, "/v1beta/models/m:streamGenerateContent": PATHS["/v1beta/models/m:generateContent"]}
del STREAMS["/v1beta/models/m:generateContent"]
by_path = pytest.mark.parametrize("path", PATHS)


@by_path
async def test_each_api_is_answered_and_told_what_is_wrong_in_its_own_words(rig, path):
    async with rig.open(), serving(rig, "Hello.", max_turns=1) as (gateway, tally, client):
        good = await client.post(path, json=PATHS[path])
        assert (good.status_code, "Hello." in good.text) == (200, True)
        for bad, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b"{}", 400)):
            told = await client.post(path, data=bad)
            assert told.status_code == status
            assert "error" in told.json()
            assert told.headers["x-should-retry"] == "false"
        gateway.end("all is over")
        over = await client.post(path, json={**PATHS[path], "extra": 1})
        assert (over.status_code, "all is over" in over.text) == (403, True)
        (counts,) = tally.statistics()["requests"].values()
        assert counts == {"ok_total": 1, "bad_request_total": 4, "over_total": 1}


@by_path
async def test_a_context_that_is_full_is_told_as_a_bad_request(rig, path):
    long = json.loads(json.dumps(PATHS[path]).replace("Hi", "blah " * 2000))
    async with rig.open(), serving(rig) as (_gateway, _tally, client):
        told = await client.post(path, json=long)
        assert told.status_code == 400
        assert "4000" in told.text


async def test_bodies_may_be_packed_and_bombs_are_not_unpacked(rig, monkeypatch):
    body = json.dumps(PATHS["/v1/messages"]).encode()
    async with rig.open(), serving(rig, "Hello.") as (_gateway, _tally, client):
        answer = await client.post("/v1/messages", data=gzip.compress(body), headers={"content-encoding": "gzip"})
        assert "Hello." in answer.text
        for content, coding, status in ((body, "gzip", 400), (body, "br", 400)):
            told = await client.post("/v1/messages", data=content, headers={"content-encoding": coding})
            assert told.status_code == status
        monkeypatch.setattr(app_module, "MAX_BODY_BYTES", 1000)
        bomb = gzip.compress(b" " * 1_000_000)
        told = await client.post("/v1/messages", data=bomb[:990], headers={"content-encoding": "gzip"})
        assert told.status_code in (400, 413)


async def test_models_and_token_counts(rig):
    async with rig.open(), serving(rig) as (_gateway, _tally, client):
        listed = (await client.get("/v1/models")).json()
        assert [each["id"] for each in listed["data"]] == ["policy"]
        anthropic = (await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert anthropic["data"][0]["type"] == "model"
        google = (await client.get("/v1beta/models")).json()
        assert google["models"][0]["name"] == "models/policy"
        counts = [
            (await client.post(path, json=body)).json()[name]
            for path, body, name in (
                ("/v1/messages/count_tokens", PATHS["/v1/messages"], "input_tokens"),
                ("/v1/responses/input_tokens", PATHS["/v1/responses"], "input_tokens"),
                ("/v1beta/models/m:countTokens", PATHS["/v1beta/models/m:generateContent"], "totalTokens"),
            )
        ]
        assert len(set(counts)) == 1
        assert counts[0] > 10
        unknown = await client.post("/v1/nothing", json={})
        assert unknown.status_code == 404
        assert (await client.send("HEAD", "/")).status_code == 200


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_lives_while_the_policy_thinks_and_ends_as_its_clients_expect(rig, path, monkeypatch):
    monkeypatch.setattr(app_module, "KEEP_ALIVE_S", 0.05)
    async with rig.open(), serving(rig, "Hello.") as (_gateway, _tally, client):
        slow(rig, 0.4)
        answer = await client.post(path, json={**STREAMS[path], "stream": True})
        assert answer.headers["content-type"] == "text/event-stream"
        received = answer.content
        assert b"Hello." in received
        end = {"chat": b"[DONE]", "resp": b"response.completed", "mess": b"message_stop", "mode": b"STOP"}
        assert end[path.split("/")[2][:4]] in received


LIVES = {"chat": b": \n\n", "resp": b"response.in_progress", "mess": b"event: ping", "mode": b"\n"}
"""How each API says in a stream that it lives."""


@pytest.mark.parametrize("path", STREAMS)
async def test_a_weight_update_holds_a_call_whose_stream_lives_and_whose_tokens_are_of_the_new_weights(
    rig, path, monkeypatch
):
    monkeypatch.setattr(app_module, "KEEP_ALIVE_S", 0.02)
    received = []
    async with rig.open(), serving(rig, "Before.", "After.") as (gateway, _tally, client):
        await client.post(path, json={**STREAMS[path], "stream": True})
        pool = rig.resources.backends
        await pool.operate(PauseBackends("wait", 5))

        async def ask():
            body = json.loads(json.dumps(STREAMS[path]).replace("Hi", "And then?"))
            answer = await client.post(path, json={**body, "stream": True})
            received.append(answer.content)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.3)
            assert not received
            await pool.operate(ResumeBackends("7"))
        versions = [span.policy_version for segment in gateway.context.trajectory().segments for span in segment.spans]
    before, _, _ = received[0].partition(b"After.")
    assert before.count(LIVES[path.split("/")[2][:4]]) >= 5
    assert versions == ["0", "7"]


async def test_on_the_nodes_own_port_the_id_and_the_secret_have_to_match(rig):
    table = GatewayTable()
    body = PATHS["/v1/chat/completions"]
    async with rig.open(), serving(rig, "One.", "Two.", table=table) as (gateway, _tally, client):
        table.add("abc", gateway, "secret")
        for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}, {"x-goog-api-key": "secret"}):
            answer = await client.post("/s/abc/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
        for path, headers, status in (
            ("/s/abc/v1/chat/completions", {}, 401),
            ("/s/abc/v1/chat/completions", {"x-api-key": "secret2"}, 401),
            ("/s/abd/v1/chat/completions", {"x-api-key": "secret"}, 404),
            ("/v1/chat/completions", {"x-api-key": "secret"}, 404),
        ):
            assert (await client.post(path, json=body, headers=headers)).status_code == status
        table.remove("abc")
        over = await client.post("/s/abc/v1/chat/completions", json=body, headers={"x-api-key": "secret"})
        assert (over.status_code, over.headers["x-should-retry"]) == (403, "false")


async def test_a_client_that_leaves_and_asks_again_gets_the_turn_that_it_left(rig):
    async with rig.open(), serving(rig, "One.", "Two.") as (gateway, _tally, client):
        slow(rig, 0.5)
        with pytest.raises(requests.ReadTimeout):
            await client.post("/v1/messages", json=PATHS["/v1/messages"], timeout=0.1)
        answer = await client.post("/v1/messages", json={**PATHS["/v1/messages"], "max_tokens": 40})
        assert "One." in answer.text
        assert gateway.joined == 1


USER = {"role": "user", "content": "Hi"}
REFUSED = [
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions", "use tools"),
    (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, USER]},
        "messages[1].function_call",
        "use tool_calls",
    ),
    ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens", "leave it out"),
    ("/v1/chat/completions", {"max_completion_tokens": -1}, "max_completion_tokens", "leave it out"),
    ("/v1/chat/completions", {"stop": ["x"] * 65}, "stop", "at most 64"),
    ("/v1/chat/completions", {"messages": []}, "", "no message"),
    ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "content": "I"}]}, "", "end with a user's"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "messages[0].content",
        "expected a text",
    ),
    ("/v1/responses", {"conversation": "c"}, "conversation", "send the whole input"),
    ("/v1/responses", {"prompt": {"id": "p"}}, "prompt", "send the whole input"),
    ("/v1/responses", {"input": []}, "", "no message"),
    ("/v1/messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers", "offer their tools"),
    ("/v1/messages", {"max_tokens": 0}, "max_tokens", "leave it out"),
    ("/v1/messages", {"stop_sequences": ["x" * 1001]}, "stop_sequences", "1000 characters"),
    ("/v1beta/models/m:generateContent", {"cachedContent": "c"}, "cachedContent", "send the whole contents"),
]
TOOL = {"name": "f", "strict": True}
IGNORED = [
    ("/v1/chat/completions", {"seed": 1, "stream_options": {"include_obfuscation": True}}),
    ("/v1/chat/completions", {"parallel_tool_calls": False, "tools": [{"type": "function", "function": TOOL}]}),
    (
        "/v1/responses",
        {"store": True, "include": ["x"], "text": {"verbosity": "low"}, "tools": [{"type": "web_search"}]},
    ),
    ("/v1/responses", {"store": False, "include": ["reasoning.encrypted_content"]}),
    (
        "/v1/messages",
        {
            "output_config": {"effort": "low"},
            "tools": [TOOL],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ),
    (
        "/v1beta/models/m:generateContent",
        {
            "generation_config": {"temperature": 0, "max_output_tokens": 9},
            "tools": [{"functionDeclarations": [{"name": "f"}], "googleSearch": {}}],
            "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}},
        },
    ),
]
NAMES = [
    {"seed", "stream_options.include_obfuscation"},
    {"parallel_tool_calls", "tools.strict"},
    {"store", "include", "text.verbosity", "tools.web_search"},
    set(),
    {"output_config.effort", "tools.strict", "tool_choice.disable_parallel_tool_use"},
    {"generationConfig.temperature", "tools.googleSearch", "toolConfig.functionCallingConfig"},
]


async def test_what_cannot_be_honoured_is_refused_with_the_field_and_a_remedy_or_counted(rig):
    async with rig.open(), serving(rig, max_turns=50) as (_gateway, tally, client):
        for path, fields, field, remedy in REFUSED:
            told = await client.post(path, json={**PATHS[path], **fields})
            assert (told.status_code, field in told.text, remedy in told.text) == (400, True, True), told.text
        for (path, fields), names in zip(IGNORED, NAMES, strict=True):
            tally.ignored.clear()
            answer = await client.post(path, json={**PATHS[path], **fields})
            assert (answer.status_code, set(tally.ignored)) == (200, names), answer.text


async def test_a_program_that_invents_fields_does_not_grow_the_node(rig):
    async with rig.open(), serving(rig) as (_gateway, tally, client):
        path = "/v1/chat/completions"
        await client.post(path, json={**PATHS[path], "x" * 1000: 1, **dict.fromkeys(map(str, range(5000)), 1)})
        assert len(tally.ignored) <= app_module.MAX_NAMES + 1
        assert tally.ignored.total() == 5001


async def test_what_takes_long_to_read_is_read_in_a_thread_and_too_many_parts_not_at_all(rig, monkeypatch):
    path, loop, threads = "/v1/chat/completions", threading.get_ident(), []
    render, read = Gateway._render, chat.question

    def seen(call):
        def spy(*args):
            threads.append(threading.get_ident())
            return call(*args)

        return spy

    monkeypatch.setattr(Gateway, "_render", seen(render))
    monkeypatch.setattr(chat, "question", seen(read))
    tools = [{"type": "function", "function": {"name": "f"}}]
    used = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "x" * 20_000}}]}
    async with rig.open(), serving(rig, max_turns=50) as (_gateway, _tally, client):
        await client.post(path, json=PATHS[path])
        assert threads == [loop, loop]
        for big in ({"messages": [USER] * 500}, {"messages": [USER], "tools": tools * 50}, {"messages": [used, USER]}):
            threads.clear()
            await client.post(path, json=big)
            assert threads[1] != loop, big
        threads.clear()
        told = await client.post(path, json={"messages": [{"role": "user", "content": ""}] * 5000})
        assert (told.status_code, told.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert len(threads) == 1, "it was read in a thread, and not rendered"
        assert threads[0] != loop
        packed = gzip.compress(json.dumps(PATHS[path]).encode())
        threads.clear()
        await client.post(path, data=packed, headers={"content-encoding": "gzip"})
        assert threads[0] != loop, "what a packed one holds is not known"
