"""Each API's requests in normal form, its answers and streams, and its own words for problems."""

from __future__ import annotations

import base64
import json
import re
from types import SimpleNamespace

import pytest

from prorl_trio.agent.said import Answer, Said, SaidCall, planted, served_calls
from prorl_trio.edges.gateway import chat, google, messages, responses
from prorl_trio.edges.gateway.wire import Problem
from prorl_trio.types.models import ToolCall

KEY = "0123456789abcdef"
CALL = SaidCall("look", '{"at":  "x"}', planted(KEY, 0))
ANSWER = Answer(
    key=KEY, text="I see.", reasoning="Hm.", calls=[CALL], finish_reason="stop", prompt_tokens=100, completion_tokens=7,
    cached_tokens=60, reasoning_tokens=2,
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
TOLD = [
    Said("system", "Be good."),
    Said("user", "Look.\nNow."),
    Said("assistant", "I see.", "Hm.", [CALL], key=KEY),
    Said("tool", "dark", call_id=planted(KEY, 0)),
]


def of_chat(parts):
    content = [{"type": "text", "text": "Look."}, {"type": "text", "text": "Now."}] if parts else "Look.\nNow."
    said = chat.whole(ANSWER, asked(chat, {"messages": []}))["choices"][0]["message"]
    call_id = said["tool_calls"][0]["id"]
    return {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "Be good."},
            {"role": "user", "content": content},
            said,
            {"role": "tool", "tool_call_id": call_id, "content": "dark"},
        ],
        "tools": [TOOL],
        "max_completion_tokens": 9,
        "temperature": 0.3,
    }


def of_responses(parts):
    content = [{"type": "input_text", "text": "Look."}, {"type": "input_text", "text": "Now."}]
    items = responses.whole(ANSWER, asked(responses, {"input": "x"}))["output"]
    return {
        "model": "m",
        "instructions": "Be good.",
        "input": [
            {"role": "user", "content": content if parts else "Look.\nNow."},
            *items,
            {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "dark"},
        ],
        "tools": [{"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA}],
        "max_output_tokens": 9,
        "temperature": 0.3,
    }


def of_messages(parts):
    content = [{"type": "text", "text": "Look.", "cache_control": {}}, {"type": "text", "text": "Now."}]
    said = messages.whole(ANSWER, asked(messages, {"messages": []}))["content"]
    result = {"type": "tool_result", "tool_use_id": said[-1]["id"], "content": [{"type": "text", "text": "dark"}]}
    return {
        "model": "m",
        "system": [{"type": "text", "text": "Be good."}],
        "messages": [
            {"role": "user", "content": content if parts else "Look.\nNow."},
            {"role": "assistant", "content": said},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}],
        "max_tokens": 9,
        "temperature": 0.3,
    }


def of_google(parts):
    said = google.whole(ANSWER, asked(google, {"contents": []}))["candidates"][0]["content"]
    call = said["parts"][-1]["functionCall"]
    response = {"id": call["id"], "name": "look", "response": {"output": "dark"}}
    return {
        "systemInstruction": {"parts": [{"text": "Be good."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Look.\n"}, {"text": "Now."}] if parts else [{"text": "Look.\nNow."}]},
            said,
            {"role": "user", "parts": [{"functionResponse": response}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "look", "description": "Look.", "parametersJsonSchema": SCHEMA}]}],
        "generationConfig": {"maxOutputTokens": 9},
        "safetySettings": "x",
    }


REQUESTS = {chat: of_chat, responses: of_responses, messages: of_messages, google: of_google}
by_dialect = pytest.mark.parametrize("dialect", REQUESTS, ids=lambda each: each.__name__.rpartition(".")[2])


def asked(dialect, body, **headers):
    return dialect.question(body, headers, "m")


def events(stream):
    """The events of a stream: name and data of each."""
    found = []
    for block in stream.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


@by_dialect
@pytest.mark.parametrize("parts", [False, True])
def test_what_was_served_and_sent_back_is_one_normal_form(dialect, parts):
    got = asked(dialect, REQUESTS[dialect](parts))
    said = got.question.messages
    if dialect is responses:  # an item for each part of the turn
        turn = said[1 + 1 : -1]
        assert {each.key for each in turn} == {KEY}
        assert ("".join(e.text for e in turn), "".join(e.reasoning for e in turn)) == ("I see.", "Hm.")
        said = [*said[:2], TOLD[2], said[-1]]
    assert [(each.role, each.text, each.key) for each in said] == [(each.role, each.text, each.key) for each in TOLD]
    call, result = said[2].calls[0], said[3]
    assert (call.says(), said[2].reasoning) == (CALL.says(), "" if dialect is chat and not said[2].reasoning else "Hm.")
    assert planted(KEY, 0) in result.call_id
    assert (got.question.tools, got.question.max_tokens) == ([TOOL], 9)
    assert got.ignored == (["safetySettings"] if dialect is google else ["temperature"])


def test_a_stream_of_chat_names_each_call_once_and_ends_as_sdks_expect():
    got = asked(chat, {"messages": [], "stream": True, "stream_options": {"include_usage": True}})
    stream = chat.opening(got) + chat.keep_alive(got) + chat.events(ANSWER, got)
    assert stream.endswith(b"data: [DONE]\n\n")
    chunks = [data for _, data in events(stream)]
    assert len({chunk["id"] for chunk in chunks}) == 1
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert [call.get("id") for call in calls] == [f"call_{CALL.id}", None]
    assert "".join(call["function"]["arguments"] for call in calls) == CALL.arguments
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "tool_calls"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], 107)


def test_a_stream_of_messages_is_in_order_and_its_arguments_are_as_sampled():
    got = asked(messages, {"messages": [], "stream": True})
    sent = events(messages.opening(got) + messages.keep_alive(got) + messages.events(ANSWER, got))
    assert all(name == data["type"] for name, data in sent)
    assert sent[0][0] == "message_start"
    indices = [data["index"] for name, data in sent if name == "content_block_start"]
    assert indices == [0, 1, 2]
    deltas = [data["delta"] for name, data in sent if name == "content_block_delta"]
    assert [each["type"] for each in deltas] == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert deltas[-1]["partial_json"] == CALL.arguments
    assert [name for name, _ in sent][-2:] == ["message_delta", "message_stop"]
    assert sent[-2][1]["usage"]["cache_read_input_tokens"] == 60
    assert sent[-2][1]["usage"]["input_tokens"] == 40


def test_a_stream_of_responses_tells_one_truth():
    body = {"input": "x", "tools": [{"type": "namespace", "name": "team", "tools": [{"name": "look"}]}]}
    got = asked(responses, body)
    (tool,) = got.question.tools
    answer = Answer(**{**{f: getattr(ANSWER, f) for f in ANSWER.__struct_fields__}, "calls": [
        SaidCall(tool["function"]["name"], CALL.arguments, CALL.id)
    ]})  # fmt: skip
    sent = events(responses.opening(got) + responses.keep_alive(got) + responses.events(answer, got))
    assert [data["sequence_number"] for _, data in sent] == list(range(len(sent)))
    done = [data["item"] for name, data in sent if name == "response.output_item.done"]
    name, last = sent[-1]
    assert (name, last["response"]["output"]) == ("response.completed", done)
    assert (done[-1]["name"], done[-1]["namespace"], done[-1]["arguments"]) == ("look", "team", CALL.arguments)
    added = [data["item"]["id"] for name, data in sent if name == "response.output_item.added"]
    assert added == [item["id"] for item in done]


def test_codex_is_never_told_that_a_response_is_incomplete():
    long = Answer(
        key=KEY, text="I", reasoning="", calls=[], finish_reason="length", prompt_tokens=1, completion_tokens=1
    )
    others = asked(responses, {"input": "x"})
    codex = asked(responses, {"input": "x"}, **{"x-codex-turn-metadata": "{}"})
    assert responses.whole(long, others)["incomplete_details"] == {"reason": "max_output_tokens"}
    assert responses.whole(long, codex)["status"] == "completed"


def test_google_has_the_key_in_base64_on_the_first_part_that_comes_back():
    (candidate,) = google.whole(ANSWER, asked(google, {"contents": []}))["candidates"]
    thought, text, call = candidate["content"]["parts"]
    assert thought["thought"] is True
    assert base64.b64decode(text["thoughtSignature"]).decode() == planted(KEY)
    assert call["functionCall"]["args"] == {"at": "x"}


def test_arguments_that_claude_code_could_not_parse_come_back_as_they_were_served():
    block = {
        "type": "tool_use",
        "id": "t",
        "name": "look",
        "input": {"__unparsedToolInput": {"raw": "{oops", "len": 5}},
    }
    got = asked(messages, {"messages": [{"role": "assistant", "content": [block]}]})
    assert got.question.messages[0].calls[0].arguments == "{oops"


@by_dialect
def test_an_overflow_is_told_in_the_words_that_clients_look_for(dialect):
    status, body = dialect.problem(Problem("overflow", "", prompt_tokens=213462, limit_tokens=200000))
    text = json.dumps(body)
    assert status == 400
    assert "rate limit" not in text
    wanted = {
        chat: ["context_length_exceeded", "This model's maximum context length is 200000 tokens. However,"],
        responses: ["context_length_exceeded"],
        messages: ["prompt is too long: 213462 tokens > 200000 maximum"],
        google: ["The input token count (213462) exceeds the maximum number of tokens allowed (200000)."],
    }
    assert all(each in text for each in wanted[dialect])


@by_dialect
@pytest.mark.parametrize(
    "body",
    [
        {}, {"messages": 1, "input": 1, "contents": 1}, {"messages": ["x"], "input": ["x"], "contents": ["x"]},
        {"messages": [{"role": 7}], "input": [{"role": 7}], "contents": [{"role": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}],
         "input": [{"role": "user", "content": [{"type": "input_image"}]}],
         "contents": [{"role": "user", "parts": [{"inlineData": {}}]}]},
        {"messages": [], "input": [], "contents": [], "tools": [{"type": "mcp"}]},
        {"messages": [], "input": [], "contents": [], "tools": 3},
        {"messages": [], "input": [], "contents": [], "tool_choice": {"type": "mcp"},
         "toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}},
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(dialect, body):
    with pytest.raises(Problem) as told:
        asked(dialect, body)
    assert told.value.kind == "bad_request"
    assert told.value.message
    assert dialect.problem(told.value)[0] == 400


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ('<tool_call>\n{"name": "sing", "arguments": { "a" : 1 }}\n</tool_call>', '{ "a" : 1 }'),
        ('<tool_call>\n{"name": "look", "arguments": {"at": "x\n</tool_call>', '{"at": "x'),
        ('{"name": "look", "parameters": {"at": ', '{"at": '),
        ("<function=look><parameter=at>x", "<function=look><parameter=at>x"),
    ],
)
def test_arguments_that_cannot_be_read_are_served_as_they_were_sampled(raw, arguments):
    call = ToolCall(name="look", arguments={}, raw=raw, error="!")
    turn = SimpleNamespace(content="", tool_calls=[call])
    assert served_calls(turn, KEY) == ("", [SaidCall("look", arguments, planted(KEY, 0))])


def test_googles_fields_may_be_written_in_either_way():
    camel = of_google(True)
    contents = re.sub("functionCall|functionResponse|thoughtSignature", _snake, json.dumps(camel["contents"]))
    declared = {"name": "look", "description": "Look.", "parameters_json_schema": SCHEMA}
    snake = {
        "system_instruction": camel["systemInstruction"],
        "contents": json.loads(contents),
        "tools": [{"function_declarations": [declared]}],
        "generation_config": {"max_output_tokens": 9},
        "safety_settings": "x",
    }
    assert asked(google, snake).question == asked(google, camel).question
    assert asked(google, snake).ignored == ["safetySettings"]


def _snake(found):
    return re.sub("([A-Z])", lambda letter: "_" + letter[1].lower(), found[0])


@pytest.mark.parametrize("dialect", [chat, responses])
def test_a_refusal_that_comes_back_is_its_text(dialect):
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    body = {"messages": [said]} if dialect is chat else {"input": [{"type": "message", **said}]}
    (message,) = asked(dialect, body).question.messages
    assert (message.role, message.text) == ("assistant", "I cannot.")
