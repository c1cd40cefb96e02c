"""Llama's calls: JSON objects, a list of Python calls (Llama 4), or the tags of models that derive from it."""

from __future__ import annotations

import re

from prorl_trio.chat.families.call_values import (
    Malformed,
    Tools,
    checked_name,
    decode_json,
    failed_call,
    read_call,
    skip_space,
)
from prorl_trio.chat.families.literals import PYTHON, read_pairs
from prorl_trio.chat.families.syntax import HERMES, CallSyntax, SpokenTurn, function_of
from prorl_trio.chat.families.xml import QWEN_XML
from prorl_trio.types.models import ToolCall

MAX_CALLS = 200
"""Limit of calls read at once, above the limit for a turn (`tool_calls.MAX_TOOL_CALLS_PER_TURN`)."""
_MARK = re.compile(r"(?:<\|python_tag\|>|<\|python_start\|>)\s*")
_FENCE = re.compile(r"[ \t]*```(?:json)?[ \t]*\n\s*")
_OPENING = re.compile(
    rf"{_MARK.pattern}|<tool_call>|<tools>|<function="
    r"|(?m:^)(?:[ \t]*```(?:json)?[ \t]*\n\s*|[ \t]*)"
    r"(?=(?:\[\s*+)?\{\s*+\"(?:name|type|function|arguments|parameters)\"\s*+:)"
)
_END = re.compile(r"\s*(?:<\|python_end\|>|<\|eom_id\|>|<\|eom\|>)|\s*\Z")
_CLOSED_FENCE = re.compile(r"\s*```[ \t]*(?=\n|\Z)")
_PYTHONIC = re.compile(r"\[\s*[^\W\d][\w.]*\(")
_CALL = re.compile(r"\s*([^\W\d][\w.-]{0,199})\(")
_SEPARATORS = re.compile(r"[\s;,]*+(?:<\|python_tag\|>[\s;,]*+)?(?=[\[{])")
_ATTEMPT = re.compile(r'\[?\s*\{\s*"(?:name|type|function)"\s*:')
_FUNCTION = re.compile(r"<function=([^<>\n]{1,200})>\s*(?=\{)")
_EXPECTED = '{"name": "<tool>", "parameters": {...}}'
_EXPECTED_PYTHONIC = "[tool(key=value)]"


def _read(text: str, start: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
    """Read the calls at `start`. Unmarked JSON is a call if a line begins with it and it names a tool."""
    if text.startswith(("<tool_call>", "<tools>"), start):
        return HERMES.read(text, start, tools)
    if text.startswith("<function=", start):
        return _read_function(text, start, tools)
    mark, fence = _MARK.match(text, start), _FENCE.match(text, start)
    body = mark.end() if mark else fence.end() if fence else skip_space(text, start)
    if mark and _PYTHONIC.match(text, body):
        end = _end_of_mark(text, body)
        return _read_pythonic(text[body:end].rstrip(), tools), _after_end(text, end)
    if mark and not text.startswith(("{", "["), body):
        raw = text[body : _end_of_mark(text, body)].strip()
        failed = [failed_call(raw, "what follows <|python_tag|> is no JSON object", _EXPECTED)] if raw else []
        return failed, len(text)
    calls, end = _read_objects(text, body, tools, marked=mark is not None)
    if not calls:
        return None, end
    closed = _CLOSED_FENCE.match(text, end) if fence else None
    return calls, _after_end(text, closed.end() if closed else end)


def _read_objects(text: str, position: int, tools: Tools, *, marked: bool) -> tuple[list[ToolCall], int]:
    """Read objects, or lists of objects, in sequence. Without calls, the text up to the returned end is content."""
    calls: list[ToolCall] = []
    while True:
        start = position
        try:
            value, position = decode_json(text, start)
        except Malformed as exc:
            if not (marked or _ATTEMPT.match(text, start)):
                return calls, start if calls else max(exc.at, start + 1)
            end = exc.at if text.startswith(("\n{", "\n["), exc.at - 1) else text.find("\n", exc.at)
            position = len(text) if end < 0 or marked else end
            return [*calls, failed_call(text[start:position], str(exc), _EXPECTED)], position
        values = [function_of(each) for each in (value if isinstance(value, list) else [value])]
        are_calls = marked or all(isinstance(each, dict) and _names_a_tool(each, tools) for each in values)
        if not values or not are_calls:
            return calls, start if calls else position
        for each in values:
            try:
                name, arguments = read_call(each, tools)
            except Malformed as exc:
                named = each.get("name") if isinstance(each, dict) else None
                called = named if isinstance(named, str) else ""
                calls.append(failed_call(text[start:position], str(exc), _EXPECTED, called))
            else:
                calls.append(ToolCall(name=name, arguments=arguments, raw=text[start:position]))
        separator = _SEPARATORS.match(text, position)
        if separator is None or len(calls) > MAX_CALLS:
            return calls, position
        position = separator.end()


def _names_a_tool(value: dict[str, object], tools: Tools) -> bool:
    return value.get("name") in tools and bool({"arguments", "parameters"} & value.keys())


def _read_function(text: str, start: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
    """Read `<function=tool>{...}</function>`, or Qwen3-Coder's form, which has the same beginning."""
    head = _FUNCTION.match(text, start)
    if head is None:
        return QWEN_XML.read(text, start, tools)
    close = "</function>"
    try:
        arguments, end = decode_json(text, head.end())
        name, arguments = read_call({"name": head[1].strip(), "arguments": arguments}, tools)
    except Malformed as exc:
        end = text.find(close, head.end())
        end = len(text) if end < 0 else end + len(close)
        return [failed_call(text[start:end], str(exc), "<function=tool>{...}</function>", head[1].strip())], end
    after = skip_space(text, end)
    end = after + len(close) if text.startswith(close, after) else end
    return [ToolCall(name=name, arguments=arguments, raw=text[start:end])], _after_end(text, end)


def _read_lfm2(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    body = start + len(_LFM2_START)
    end = text.find(_LFM2_END, body)
    after = len(text) if end < 0 else end + len(_LFM2_END)
    written = text[body : len(text) if end < 0 else end].strip()
    if not _PYTHONIC.match(written):
        return [failed_call(text[start:after], "what follows is no list of calls", _EXPECTED_PYTHONIC)], after
    return _read_pythonic(written, tools), after


def _end_of_mark(text: str, position: int) -> int:
    end = text.find("<|python_end|>", position)
    end = len(text) if end < 0 else end
    for closing in ("<|eom_id|>", "<|eom|>"):
        if text.endswith(closing, position, end):
            end -= len(closing)
    return end


def _after_end(text: str, position: int) -> int:
    end = _END.match(text, position)
    return end.end() if end else position


def _pythonic_turn(text: str, tools: Tools) -> SpokenTurn | None:
    """Read a turn that consists only of a list of Python calls; None for any other turn."""
    body = text.strip()
    if not _PYTHONIC.match(body):
        return None
    body = body[: _end_of_mark(body, 0)].rstrip()
    return SpokenTurn("", "", _read_pythonic(body, tools))


def _read_pythonic(body: str, tools: Tools) -> list[ToolCall]:
    """Read `[f(a=1), g()]`. The list is one value: if any part is broken or missing, it contains no calls."""
    calls: list[ToolCall] = []
    position = 1
    while True:
        start, name = position, ""
        try:
            head = _CALL.match(body, position)
            if head is None:
                raise Malformed(f"expected a call, not {body[position : position + 20]!r}")
            name = head[1]
            arguments, position = read_pairs(body, head.end(), PYTHON, "=", ")")
            checked_name(name, tools)
        except Malformed as exc:
            return [failed_call(body, str(exc), _EXPECTED_PYTHONIC, name)]
        calls.append(ToolCall(name=name, arguments=arguments, raw=body[start:position].strip()))
        position = skip_space(body, position)
        if not body.startswith(",", position):
            break
        position += 1
    if body[position:].strip() == "]":
        return calls
    return [failed_call(body, "the list of calls does not end with ']'", _EXPECTED_PYTHONIC)]


LLAMA = CallSyntax(_OPENING, _read, whole_turn=_pythonic_turn)

_LFM2_START, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
LFM2 = CallSyntax(re.compile(re.escape(_LFM2_START)), _read_lfm2, closing=_LFM2_END)
