"""Kimi's calls: JSON after `functions.tool:0` in K2, one element for each argument in K3."""

from __future__ import annotations

import re
from typing import Any

from prorl_trio.chat.families.call_values import (
    Malformed,
    Tools,
    add_once,
    checked_name,
    decode_json,
    failed_call,
    read_call,
    skip_space,
    typed_value,
)
from prorl_trio.chat.families.syntax import CallSyntax
from prorl_trio.types.models import ToolCall

_CALL, _END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(r"<\|tool_call_begin\|>\s*([^<\s]{1,200})\s*<\|tool_call_argument_begin\|>\s*")
_STRAY = re.compile(r"<\|tool_call(?:_end\|>|(?=_begin\|>)|(?=s_section_end\|>))")
_EXPECTED = f"{_CALL}functions.tool:0<|tool_call_argument_begin|>{{...}}{_END_CALL}"


def _read_k2(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    if not text.startswith(_CALL, start):
        return [], text.index(">", start) + 1
    head = _HEAD.match(text, start)
    identity = head[1] if head else ""
    name = identity.split(":")[0].removeprefix("functions.")
    try:
        if head is None:
            raise Malformed("the call does not begin with the name of a tool")
        arguments, end = ({}, head.end()) if text.startswith(_END_CALL, head.end()) else decode_json(text, head.end())
        end = skip_space(text, end)
        if not text.startswith(_END_CALL, end):
            raise Malformed(f"unexpected text after the JSON object: {text[end : end + 20]!r}")
        name, arguments = read_call({"name": name, "arguments": arguments}, tools)
    except Malformed as exc:
        stray = _STRAY.search(text, head.end() if head else start + len(_CALL))
        end = stray.end() if stray else len(text)
        return [failed_call(text[start:end], str(exc), _EXPECTED, name)], end
    end += len(_END_CALL)
    return [ToolCall(name=name, arguments=arguments, raw=text[start:end], id=identity)], end


KIMI_K2 = CallSyntax(
    re.compile(r"<\|tool_calls_section_(?:begin|end)\|>|<\|tool_call_begin\|>"),
    _read_k2,
    closing="<|tool_calls_section_end|>",
)

_K3_OPENING = re.compile(r"<\|(?:open|close)\|>\s*(?:tools|response|message)\s*<\|sep\|>|<\|open\|>\s*call(?=[\s<])")
_K3_HEAD = re.compile(r"<\|open\|>\s*call\s+([^<\n]{1,400})<\|sep\|>\s*")
_K3_ARGUMENT = re.compile(r"<\|open\|>\s*argument\s+([^<\n]{1,400})<\|sep\|>")
_K3_VALUE_END = re.compile(r"<\|close\|>\s*argument\s*<\|sep\|>\s*(?=<\|open\|>\s*argument|<\|close\|>\s*call)")
_K3_END = re.compile(r"<\|close\|>\s*call\s*<\|sep\|>")
_K3_STRAY = re.compile(r"<\|close\|>\s*call\s*<\|sep\|>|(?=<\|open\|>\s*call\s|<\|close\|>\s*tools\s*<)")
_K3_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_K3_EXPECTED = (
    '<|open|>call tool="tool" index="1"<|sep|><|open|>argument key="key" type="string"<|sep|>value'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)


def _read_k3(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    head = _K3_HEAD.match(text, start)
    bracket = _K3_OPENING.match(text, start)
    assert bracket is not None
    if head is None and not bracket[0].endswith("call"):
        return [], bracket.end()
    name = _attributes(head[1]).get("tool", "") if head else ""
    try:
        if head is None:
            raise Malformed("the call does not begin with the name of a tool")
        arguments, end = _k3_arguments(text, head.end(), tools, name)
        checked_name(name, tools)
    except Malformed as exc:
        stray = _K3_STRAY.search(text, head.end() if head else bracket.end())
        end = stray.end() if stray else len(text)
        return [failed_call(text[start:end], str(exc), _K3_EXPECTED, name)], end
    return [ToolCall(name=name, arguments=arguments, raw=text[start:end])], end


def _k3_arguments(text: str, position: int, tools: Tools, name: str) -> tuple[dict[str, Any], int]:
    arguments: dict[str, Any] = {}
    while (opened := _K3_ARGUMENT.match(text, position)) is not None:
        attributes = _attributes(opened[1])
        key = attributes.get("key", "")
        closed = _K3_VALUE_END.search(text, opened.end())
        value = "" if closed is None else text[opened.end() : closed.start()]
        if closed is None or _K3_STRAY.search(value):
            raise Malformed(f"the value of {key!r} does not end")
        stated = {name: {"properties": {key: {"type": "string"}}}} if attributes.get("type") == "string" else tools
        add_once(arguments, key, typed_value(value, stated, name, key))
        position = closed.end()
    end = _K3_END.match(text, position)
    if end is None:
        raise Malformed(f"unexpected text in the call: {text[position : position + 20]!r}")
    return arguments, end.end()


def _attributes(text: str) -> dict[str, str]:
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _K3_ATTRIBUTE.findall(text)}


KIMI_K3 = CallSyntax(
    _K3_OPENING,
    _read_k3,
    {"<|open|>think<|sep|>": "<|close|>think<|sep|>"},
    closing="<|close|>tools<|sep|>",
)
