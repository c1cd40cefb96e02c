"""Calls that are written into text: read where there is one way to read them, else told precisely what is wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_trio.agent.written_calls import CodeBlocks, JsonCalls
from prorl_trio.chat.tool_calls import MAX_TOOL_CALLS_PER_TURN
from prorl_trio.tools import BashTool, FinishTool, IpythonTool, ToolSet

TOOLS = ToolSet([IpythonTool(), BashTool(), FinishTool()], max_observation_chars=100)
JSON = JsonCalls(TOOLS)
CODE = CodeBlocks({"python": ("ipython", "code"), "bash": ("bash", "command")})


def said(reader, text):
    return [(call.name, call.arguments) for call in reader.read(text) if not call.error]


@pytest.mark.parametrize(
    "text",
    [
        'I will compute. {"name": "ipython", "arguments": {"code": "6*7"}} Then I go on.',
        'Thought: compute\nAction: {"action": "ipython", "action_input": {"code": "6*7"}}',
        '```json\n{"tool": "ipython", "args": {"code": "6*7"}}\n```\nand that is it',
        '{"type": "function", "function": {"name": "ipython", "arguments": "{\\"code\\": \\"6*7\\"}"}}'.replace(
            '{"type": "function", ', "{"
        ),
        '{"function": "ipython", "parameters": {"code": "6*7"}}',
        '{ "arguments": {"code": "6*7"}, "name": "ipython"}',
    ],
)
def test_a_call_in_json_is_found_wherever_it_stands(text):
    assert said(JSON, text) == [("ipython", {"code": "6*7"})]
    (call,) = JSON.read(text)
    assert call.raw in text


def test_several_calls_are_read_in_their_order_and_other_json_is_text():
    text = (
        'data {"name": "Bob", "age": 3} {"name": "bash"} x {"tool": "finish", "input": {"answer": "{\\"name\\": 1}"}}'
    )
    assert said(JSON, text) == [("bash", {}), ("finish", {"answer": '{"name": 1}'})]
    assert not [call for call in JSON.read(text) if call.error]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('so: {"name": "ipython", "arguments": {"code": "6*7"}', "invalid JSON at line 1 column 49: Expecting ','"),
        ('{"name": "ipython",\n "arguments": {"code": 6*7}}', "invalid JSON at line 2 column 25: Expecting ','"),
        ("{'name': 'ipython', 'arguments': {}}", "invalid JSON at line 1 column 2: Expecting property name"),
        ('{"name": "ipython", "arguments": {"cod": "1"}}', "the call of ipython has no argument 'code'"),
        ('{"name": "ipython", "code": "1"}', 'the tool call has no "arguments"'),
        ('{"name": "python", "arguments": {}}', "unknown tool 'python'; the tools are: bash, finish, ipython"),
        ('{"name": "ipython", "arguments": [1]}', '"arguments" must be a JSON object, not a list'),
        ('{"arguments": {"code": "1"}}', 'the tool call has no "name"'),
    ],
)
def test_what_is_wrong_is_told_precisely(text, told):
    (call,) = JSON.read(text)
    assert call.error.startswith(told)
    assert call.error.endswith('expected a JSON object {"name": "<tool>", "arguments": {...}}')


def test_broken_json_does_not_swallow_the_next_call():
    text = '```json\n{"name": "ipython", "arguments": {"code": \n``` {"name": "bash", "args": {"command": "ls"}}'
    broken, good = JSON.read(text)
    assert broken.error
    assert (good.name, good.arguments) == ("bash", {"command": "ls"})
    assert not JSON.read('{"name": Bob, and so on')


def test_blocks_of_code_are_calls():
    text = "a\n```python\nprint(1)\n```\nb\n```js\nx\n```\n```bash\nls\n```"
    assert said(CODE, text) == [("ipython", {"code": "print(1)\n"}), ("bash", {"command": "ls\n"})]
    assert not CODE.read("no block, `python` or ```inline``` code")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('```python\nprint("```")\n```', 'print("```")\n'),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\n"),
        ("- so:\n  ```python\n  if 1:\n      print(1)\n  ```", "if 1:\n    print(1)\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("````python\n```\n````", "```\n"),
        ("```Python\nprint(1)\n```", "print(1)\n"),
    ],
)
def test_a_block_ends_at_its_own_fence(text, code):
    assert said(CODE, text) == [("ipython", {"code": code})]


@pytest.mark.parametrize(
    ("text", "told"), [("```python\nprint(1)", "the ```python block is not closed"), ("```bash\n \n```", "is empty")]
)
def test_a_block_that_broke_is_told(text, told):
    (call,) = CODE.read(text)
    assert told in call.error
    assert "```" in call.error.partition("expected ")[2]


_PIECES = st.sampled_from(
    ['{"name": ', '"ipython"', '"arguments": ', '{"code": "1"}', "}", "{", ",", "```python\n", "```", '"', "\n", "\\"]
)


@settings(deadline=None)
@given(st.lists(_PIECES | st.text(max_size=5), max_size=40).map("".join))
def test_no_text_makes_a_reader_raise(text):
    for reader in (JSON, CODE):
        for call in reader.read(text):
            assert call.error or call.name in TOOLS.names
            assert call.raw in text
            json.dumps(call.arguments)


def test_calls_of_a_turn_are_bounded():
    call = '{"name": "bash", "arguments": {}} '
    for calls in (JSON.read(call * 1000), CODE.read("```bash\nls\n```\n" * 1000)):
        *run, rest = calls
        assert len(run) == MAX_TOOL_CALLS_PER_TURN
        assert not any(each.error for each in run)
        assert "more than 64 tool calls" in rest.error


@pytest.mark.parametrize(
    ("read", "text", "error"),
    [
        (JSON.read, '{"name": x} ' * 100 + '{"name": "bash", "arguments": {"command": "ls"}}', "more than 32 broken"),
        (JSON.read, '{"name": 1} ' * 3000 + '{"name": "bash", "arguments": {"command": "ls"}}', "more than 2000 other"),
        (CODE.read, "```\nx\n```\n" * 1000 + "```bash\nls\n```\n", "fenced blocks"),
    ],
)
def test_what_is_not_read_is_said(read, text, error):
    (call,) = read(text)
    assert error in call.error
    assert call.raw.endswith(text[-20:])


def test_broken_objects_that_are_no_calls_stay_text():
    assert JSON.read('{"name": Al, "age": 3} ' * 1000) == []


def test_a_call_behind_a_broken_one_is_read():
    broken, call = JSON.read(
        '{"name": "bash", "arguments": {"command": "ls}} {"name": "bash", "arguments": {"command": "pwd"}}'
    )
    assert broken.error
    assert call.arguments == {"command": "pwd"}
