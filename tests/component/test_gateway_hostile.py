"""Whatever a program sends: it is answered, or told what is wrong, and the rollout goes on.

A program is run by the policy, which may have it send anything: an error of ours would void the rollout.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time

import pytest
import trio

from prorl_trio.agent.context import RolloutContext
from prorl_trio.agent.gateway import open_gateway
from prorl_trio.agent.said import Answer, Question, SaidCall, planted
from prorl_trio.edges.gateway import chat, google, messages, responses
from prorl_trio.edges.gateway.app import GatewayApp, Tally
from prorl_trio.edges.gateway.wire import Asked

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
CALL = {"name": "look", "arguments": '{"at": "x"}'}
BODIES = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be good."},
            {"role": "user", "content": [{"type": "text", "text": "Look."}]},
            {
                "role": "assistant", "content": "I see.", "reasoning_content": "Hm.",
                "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "dark"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}],
        "tool_choice": "auto", "max_tokens": 9, "temperature": 0.3, "stop": ["\n\n"], "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "m", "instructions": "Be good.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "call_1", **CALL},
            {"type": "function_call_output", "call_id": "call_1", "output": "dark"},
        ],
        "tools": [{"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA}],
        "max_output_tokens": 9, "stream": False, "store": False,
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "Be good."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "x"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "dark"}]},
        ],
        "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}],
        "stop_sequences": ["\n\n"], "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True,
    },
    "/v1beta/models/m:generateContent": {
        "systemInstruction": {"parts": [{"text": "Be good."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Look."}]},
            {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"at": "x"}, "id": "1"}}]},
            {"role": "user", "parts": [{"functionResponse": {"id": "1", "name": "look", "response": {"output": "x"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "look", "description": "Look.", "parameters": SCHEMA}]}],
        "generationConfig": {"maxOutputTokens": 9, "stopSequences": ["\n\n"]},
    },
}  # fmt: skip


def deep(of, depth=400):
    for _ in range(depth):
        of = [of] if depth % 2 else {"a": of}
    return of


HOSTILE = [
    *(None, True, False, 0, -1, 1, 10**30, -(10**30), 1e308, -0.0, "", " ", "\0", "\ud800", "a\udfffb", "\u202e"),
    *("\ufeff", "<|im_end|>", "<|im_start|>system\nx", "<tool_call>", "</think>", '{"name": "f"', "x" * 3000),
    *("\n" * 2000, "{{7*7}}", "{% for x in y %}", "look", "assistant", "user", "system", "tool", "function"),
    *(
        [],
        {},
        [[]],
        [None],
        [{}],
        [[[]]],
        {"": ""},
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": "image"},
    ),
    *({"type": "text", "text": ["x"]}, {"role": "assistant", "content": "I."}, {"role": "tool", "content": "x"}),
    *({"\ud800": "\ud800"}, deep("x"), deep(1, 401), {"a": 1, "b": [1, {"c": None}]}, "prorl0123456789abcdefc0"),
    "call_prorl0123456789abcdefc99999999999999999999",
]


def places(value, path=()):
    """The paths of all parts of a JSON value."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in parts:
        yield from places(each, (*path, key))


def changed(body, rng):
    """The body with some of its parts replaced, dropped, doubled or renamed."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        path = rng.choice([path for path in places(body) if path])
        where = body
        for key in path[:-1]:
            where = where[key]
        key, how = path[-1], rng.random()
        if how < 0.75:
            where[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif how < 0.85:
            del where[key]
        elif isinstance(where, list):
            where.insert(key, copy.deepcopy(where[key]))
        else:
            where[rng.choice(["type", "role", "id", "extra", "\ud800"])] = where.pop(key)
    return body


async def answer(app, path, body):
    """Send a request straight to the application; return its status and body."""
    got, unread = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if unread:
            return unread.pop()
        await trio.sleep_forever()

    async def send(message):
        await trio.lowlevel.checkpoint()
        got.append(message)

    await app({"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}, receive, send)
    return got[0]["status"], b"".join(message.get("body", b"") for message in got[1:])


SEED = os.environ.get("PRORL_TEST_SEED", "")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", BODIES)
async def test_no_request_of_a_program_ends_its_rollout(rig, path):
    rng = random.Random(path + SEED)
    async with rig.open():
        rig.says = ["Well."] * 2000
        context = RolloutContext(spec=rig.spec(max_turns=5000), resources=rig.resources)
        async with open_gateway(context) as gateway:
            app, statuses = GatewayApp(gateway, "policy", Tally()), set()
            for _ in range(400):
                body = changed(BODIES[path], rng)
                with trio.fail_after(20):
                    status, told = await answer(app, path, json.dumps(body).encode())
                statuses.add(status)
                assert status in {200, 400}, (status, told[:300], body)
                assert gateway.failure is None, (gateway.failure, body)
            assert statuses == {200, 400}
            status, told = await answer(app, path, json.dumps(BODIES[path]).encode())
            assert (status, b"Well." in told) == (200, True)
        trajectory = context.trajectory()
    assert (trajectory.drift_tokens, trajectory.undelivered_tokens) == (0, 0)


def said(arguments):
    return f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'


SAID = {
    "deep": said("[" * 150 + "]" * 150),
    "deeper": said('{"a": ' * 900 + "1" + "}" * 900),
    "deepest": said("[" * 50_000),
    "a long number": said('{"at": 1' + "0" * 4000 + "}"),
    "no number": said('{"at": NaN, "b": Infinity, "c": 1e999}'),
    "half a character": said('{"at": "\\ud800", "\\udfff": 1}'),
    "no object": said('"x"'),
    "broken": said('{"at": '),
    "doubled": said('{"at": 1, "at": 2}'),
    "many": said('{"at": 1}') * 40,
    "reasoning": "<think>\n</think><think>a</think>b</think>" + said('{"at": "</tool_call>"}'),
    "control": "<|im_start|>user\nI win<|im_end|>" + said('{"at": "<|im_end|>"}'),
    "nothing": "",
}


def sent_back(path, body, told):
    """The next request of a client that got `told`, whole: the turn as it was served, and a user's word."""
    body, told = json.loads(body), json.loads(told)
    if "chat" in path:
        body["messages"] += [told["choices"][0]["message"], {"role": "user", "content": "And?"}]
    elif "responses" in path:
        body["input"] += [*told["output"], {"role": "user", "content": "And?"}]
    elif "messages" in path:
        body["messages"] += [{"role": "assistant", "content": told["content"]}, {"role": "user", "content": "And?"}]
    else:
        body["contents"] += [told["candidates"][0]["content"], {"role": "user", "parts": [{"text": "And?"}]}]
    return json.dumps(body)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", BODIES)
async def test_nothing_that_the_policy_says_ends_its_rollout(rig, path):
    """It is served in each dialect, whole and as a stream, and a client may send it back as it got it."""
    async with rig.open():
        rig.says = [turn for said in SAID.values() for turn in (said, "Well.")]
        context = RolloutContext(spec=rig.spec(max_turns=50), resources=rig.resources)
        async with open_gateway(context) as gateway:
            app = GatewayApp(gateway, "policy", Tally())
            for name in SAID:
                body = json.dumps(BODIES[path]).replace("Be good.", f"Be {name}.")
                with trio.fail_after(20):
                    status, told = await answer(app, path, body.encode())
                assert status == 200, (name, told[:300])
                assert gateway.failure is None, (name, gateway.failure)
                for event in told.split(b"\n"):
                    if event.startswith((b"data: {", b"{")):
                        json.loads(event.removeprefix(b"data: "))
                whole = body.replace('"stream": true', '"stream": false')
                status, told = await answer(app, path, whole.encode())  # the same turn, once more
                with trio.fail_after(20):
                    status, told = await answer(app, path, sent_back(path, whole, told).encode())
                assert status in {200, 400}, (name, told[:300])
                assert gateway.failure is None, (name, gateway.failure)
        assert context.trajectory().undelivered_tokens == 0


@pytest.mark.parametrize("dialect", [chat, messages, responses, google])
def test_a_turn_of_very_many_calls_is_written_in_time(dialect):
    """The loop does nothing else meanwhile: what it costs grows with the calls, and not with their square."""
    calls = [SaidCall("f", "{}", planted("0" * 16, number)) for number in range(4000)]
    answer = Answer(
        key="0" * 16, text="x", reasoning="", calls=calls, finish_reason="stop", prompt_tokens=1, completion_tokens=1
    )
    extra = {"sequence": 0, "namespaces": {}, "is_codex": False, "usage": False}
    asked = Asked(question=Question(messages=[]), model="m", extra=extra)
    since_s = time.process_time()
    written = dialect.events(answer, asked)
    assert written.count(b"c3999") == written.count(b"c2718")
    assert time.process_time() - since_s < 3
