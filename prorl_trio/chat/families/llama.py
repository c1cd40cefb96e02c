"""Llama's calls: a JSON object as the whole turn, several after one another, or Python calls in a list (Llama 4)."""

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
from prorl_trio.chat.families.syntax import HERMES, CallSyntax, SpokenTurn
from prorl_trio.types.models import ToolCall

__all__ = ["LLAMA"]

_MARK = re.compile(r"<\|python_tag\|>|<\|python_start\|>")
_ENDS = ("<|python_end|>", "<|eom_id|>", "<|eom|>")
_PYTHONIC = re.compile(r"\[\s*[^\W\d][\w.]*\(")
_CALL = re.compile(r"\s*([^\W\d][\w.-]{0,199})\(")
_SEPARATORS = re.compile(r"[\s;,]*")
_EXPECTED = '{"name": "<tool>", "parameters": {...}}'
_EXPECTED_PYTHONIC = "[tool(key=value)]"


def _whole_turn(text: str, tools: Tools) -> SpokenTurn:
    mark = _MARK.search(text)
    if mark is None or text.lstrip().startswith("{"):
        content, body = "", text.strip()
    else:
        content, body = text[: mark.start()].strip(), text[mark.end() :].strip()
    for end in _ENDS:
        body = body.removesuffix(end).rstrip()
    body = body.removeprefix("<|python_tag|>").strip()
    if _PYTHONIC.match(body):
        calls = _read_pythonic(body, tools)
    elif body.startswith("{"):
        calls = _read_objects(body, tools, marked=mark is not None)
    elif mark is not None:
        calls = [failed_call(body, "what follows <|python_tag|> is no JSON object", _EXPECTED)] if body else []
    else:
        calls = []
    if not calls:
        return SpokenTurn(text.strip(), "", [])
    return SpokenTurn(content, "", calls)


def _read_objects(body: str, tools: Tools, *, marked: bool) -> list[ToolCall]:
    """Read objects one after another. Without a mark, what is not a tool's call from end to end is none at all."""
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        start = position
        try:
            value, position = decode_json(body, position)
            if not marked and not (isinstance(value, dict) and _names_a_tool(value, tools)):
                return []
            name, arguments = read_call(value, tools)
        except Malformed as exc:
            if position == start:
                if not (marked or calls or re.match(r'\{\s*"(?:name|type)"\s*:', body)):
                    return []
                return [*calls, failed_call(body[start:], str(exc), _EXPECTED)]
            calls.append(failed_call(body[start:position], str(exc), _EXPECTED))
        else:
            calls.append(ToolCall(name=name, arguments=arguments, raw=body[start:position]))
        separator = _SEPARATORS.match(body, position)
        position = separator.end() if separator else position
    return calls


def _names_a_tool(value: dict[str, object], tools: Tools) -> bool:
    return value.get("name") in tools and bool({"arguments", "parameters"} & value.keys())


def _read_pythonic(body: str, tools: Tools) -> list[ToolCall]:
    """Read `[f(a=1), g()]`. The list is one value: where it is broken or breaks off, none of its calls was made."""
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


LLAMA = CallSyntax(HERMES.opening, HERMES.read, whole_turn=_whole_turn)
