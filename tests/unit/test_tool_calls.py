"""Tool calls and reasoning in an assistant's text."""

from __future__ import annotations

import json
import time

import pytest

from prorl_trio.chat.families.call_values import MAX_ARGUMENT_NESTING
from prorl_trio.chat.tool_calls import MAX_TOOL_CALLS_PER_TURN, parse_tool_calls, parse_turn
from prorl_trio.types.models import ToolCall

TOOLS = {"ipython", "finish"}


def one(text: str) -> ToolCall:
    _content, calls = parse_tool_calls(text, TOOLS)
    (call,) = calls
    return call


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_a_call_between_text():
    call_text = tagged('{"name": "ipython", "arguments": {"code": "1 + 1"}}')
    content, calls = parse_tool_calls(f"Let me see.\n{call_text}\nDone.", TOOLS)
    assert content == "Let me see.\n\nDone."
    assert calls == [ToolCall(name="ipython", arguments={"code": "1 + 1"}, raw=call_text)]


def test_several_calls_keep_their_order():
    content, calls = parse_tool_calls(
        tagged('{"name": "ipython", "arguments": {"n": 1}}') * 2 + tagged('{"name": "finish", "arguments": {}}'), TOOLS
    )
    assert content == ""
    assert [call.name for call in calls] == ["ipython", "ipython", "finish"]
    assert not any(call.error for call in calls)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "ipython", "arguments": "{\\"code\\": \\"x\\"}"}', {"code": "x"}),
        ('{"name": "ipython", "parameters": {"code": "x"}}', {"code": "x"}),
        ('{"arguments": {"code": "x"}, "name": "ipython"}', {"code": "x"}),
        ('{"name": "ipython", "arguments": {"code": "a\nb\tc"}}', {"code": "a\nb\tc"}),
        ('{"name": "ipython", "arguments": null}', {}),
        ('{"name": "ipython"}', {}),
        ('{"name": "ipython", "arguments": {"code": "print(\'</tool_call>\')"}}', {"code": "print('</tool_call>')"}),
        ('{"name": "ipython", "arguments": {"code": "<think>"}}', {"code": "<think>"}),
    ],
)
def test_what_can_be_read_one_way_only_is_accepted(body, arguments):
    call = one(tagged(body))
    assert (call.name, call.arguments, call.error) == ("ipython", arguments, "")


def test_a_complete_object_needs_no_closing_tag():
    text = '<tool_call>{"name": "ipython", "arguments": {"code": "1"}}'
    assert one(text) == ToolCall(name="ipython", arguments={"code": "1"}, raw=text)
    _content, calls = parse_tool_calls(text + text, TOOLS)
    assert [call.error for call in calls] == ["", ""]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>\n{"name": "ipython", "arguments": {"code": "pri', "Unterminated string"),
        ("<tool_call>", "line 1 column 1"),
        (tagged('{"name": "ipython",\n "arguments": {code: 1}}'), "line 2 column 16"),
        (tagged('{"name": "ipython", "arguments": {}}}'), "unexpected text after the JSON object: '}"),
        (tagged('{"name": "browse", "arguments": {}}'), "unknown tool 'browse'; the tools are: finish, ipython"),
        (tagged('{"arguments": {}}'), 'has no "name"'),
        (tagged('{"name": 3, "arguments": {}}'), 'has no "name"'),
        (tagged('{"name": "ipython", "code": "1"}'), 'has no "arguments"'),
        (tagged('{"name": "ipython", "arguments": [1]}'), "must be a JSON object, not a list"),
        (tagged('{"name": "ipython", "arguments": 1}'), "must be a JSON object, not a number"),
        (tagged('{"name": "ipython", "arguments": "1 + 1"}'), "it is a string with unexpected text"),
        (tagged('{"name": "ipython", "arguments": "{} {}"}'), "unexpected text after"),
        (tagged('[{"name": "ipython"}]'), "not a list"),
        (tagged('"ipython"'), "not a string"),
        (tagged('{"name": "ipython", "arguments": {"n": NaN}}'), "NaN is not a JSON number"),
        (tagged('{"name": "ipython", "arguments": {"n": 1e999}}'), "out of range"),
        (tagged(f'{{"name": "ipython", "arguments": {{"n": {10**30}}}}}'), "does not fit in 64 bits"),
        (tagged('{"name": "ipython", "arguments": {"s": "\\ud800"}}'), "surrogate"),
        (tagged('{"name": "ipython", "arguments": {"s": ' + "[" * 80 + "]" * 80 + "}}"), str(MAX_ARGUMENT_NESTING)),
        (tagged('{"name": "ipython", "arguments": ' + "[" * 100_000), "nested deeper"),
        (tagged('{"name": "ipython", "arguments": {"code": "1", "code": "2"}}'), "'code' is there twice"),
        (tagged('{"name": "ipython", "name": "finish", "arguments": {}}'), "'name' is there twice"),
    ],
)
def test_what_cannot_be_read_is_a_call_with_an_error(text, error):
    call = one(text)
    assert error in call.error
    assert "expected <tool_call>" in call.error
    assert call.arguments == {}
    assert call.raw == text


def test_a_broken_call_keeps_the_name_it_has():
    assert one('<tool_call>{"name": "ipython", "arguments": {').name == "ipython"


def test_a_broken_call_ends_at_its_tag_or_the_next_call():
    good = tagged('{"name": "finish", "arguments": {}}')
    for broken in ("<tool_call>{oops}</tool_call>", "<tool_call>{oops\n"):
        content, calls = parse_tool_calls(broken + good + " bye", TOOLS)
        assert content == "bye"
        assert [(bool(call.error), call.name) for call in calls] == [(True, ""), (False, "finish")]


def test_calls_inside_reasoning_are_not_calls():
    turn = parse_turn(f"<think>\nI could {tagged('{}')}\n</think>\n\nNo.", TOOLS)
    assert turn.content == "No."
    assert turn.tool_calls == []
    assert turn.reasoning.startswith("I could <tool_call>")
    assert parse_turn("<think>endless <tool_call>", TOOLS) == ("", "endless <tool_call>", [])


def test_reasoning_that_the_prompt_opened():
    call = tagged('{"name": "finish", "arguments": {}}')
    turn = parse_turn(f"so {call}\n</think>\n\n{call}", TOOLS, opened_thinking=True)
    assert turn.reasoning == f"so {call}"
    assert [call.name for call in turn.tool_calls] == ["finish"]
    assert parse_turn("still thinking", TOOLS, opened_thinking=True) == ("", "still thinking", [])


def test_bare_json_is_a_call_if_it_is_all_there_is():
    body = '{"name": "ipython", "parameters": {"code": "1"}}'
    assert parse_tool_calls(f"\n{body} ", TOOLS) == (
        "",
        [ToolCall(name="ipython", arguments={"code": "1"}, raw=body)],
    )
    assert parse_tool_calls(f"<think>hm</think>{body}", TOOLS)[1][0].arguments == {"code": "1"}


def test_bare_json_in_fences():
    body = '{"name": "ipython", "arguments": {"code": "%d"}}'
    text = f"First:\n```json\n{body % 1}\n```\nthen\n```\n{body % 2}\n```\n```python\nx = 1\n```"
    content, calls = parse_tool_calls(text, TOOLS)
    assert [call.arguments["code"] for call in calls] == ["1", "2"]
    assert content == "First:\n\nthen\n\n```python\nx = 1\n```"


def test_bare_json_with_wrong_arguments_is_an_error_call():
    _content, (call,) = parse_tool_calls('{"name": "ipython", "arguments": 7}', TOOLS)
    assert "not a number" in call.error


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 4.",
        '{"name": "browse", "arguments": {}}',
        '{"name": "ipython"}',
        '{"name": "ipython", "arguments": {',
        'Use {"name": "ipython", "arguments": {}} now',
        '```json\n{"name": "Bob", "arguments": {}}\n```',
        "```json\n[1, 2]\n```",
        "</tool_call>",
    ],
)
def test_what_is_no_attempt_at_a_call_is_content(text):
    assert parse_tool_calls(text, TOOLS) == (text, [])


def test_the_number_of_calls_is_bounded():
    call = tagged('{"name": "finish", "arguments": {}}')
    _content, calls = parse_tool_calls(call * (MAX_TOOL_CALLS_PER_TURN + 5), TOOLS)
    assert len(calls) == MAX_TOOL_CALLS_PER_TURN + 1
    assert [bool(each.error) for each in calls] == [False] * MAX_TOOL_CALLS_PER_TURN + [True]
    assert calls[-1].raw == call * 5


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        '<tool_call>"' * 20_000,
        "```\n" + " " * 200_000,
        "```" * 60_000,
        "<think>" * 30_000,
        "{" * 200_000,
        '<tool_call>{"name": "' + "\\" * 100_000,
        "<tool_call>" + " " * 200_000,
    ],
    ids=lambda text: text[:12],
)
def test_hostile_text_takes_no_quadratic_time(text):
    started_s = time.thread_time()
    parse_turn(text, TOOLS)
    assert time.thread_time() - started_s < 2.0  # milliseconds; the bound only tells linear from quadratic


def test_arguments_survive_any_escaping():
    arguments = {"code": 'print("é\n\\ </tool_call> <tool_call>")', "n": -(2**63), "x": [1.5, None, True, {"a": []}]}
    body = json.dumps({"name": "ipython", "arguments": arguments})
    assert one(tagged(body)).arguments == arguments
