"""gpt-oss' turns (the harmony format): messages on channels, some of them addressed to a tool."""

from __future__ import annotations

import re

from prorl_trio.chat.families.call_values import Malformed, Tools, decode_json, failed_call, read_call
from prorl_trio.chat.families.syntax import HERMES, CallSyntax, SpokenTurn
from prorl_trio.types.models import ToolCall

__all__ = ["HARMONY"]

_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?P<role>[^<]{0,300})"
    r"(?:<\|channel\|>(?P<channel>[^<]{0,300}))?"
    r"(?:<\|constrain\|>[^<]{0,100})?<\|message\|>"
)
_END = re.compile(r"(?:<\|end\|>|<\|call\|>|<\|return\|>)(?=\s*(?:<\|start\|>|\Z))")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_EXPECTED = "<|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>"


def _whole_turn(text: str, tools: Tools) -> SpokenTurn:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while position < len(text):
        header = _HEADER.match(text, position)
        if header is None:
            content.append(_headless(text[position:]))
            break
        end = _END.search(text, header.end())
        stop = len(text) if end is None else end.start()
        body = text[header.end() : stop]
        recipient = _RECIPIENT.search(header["role"]) or _RECIPIENT.search(header["channel"] or "")
        channel = (header["channel"] or "").split()
        if recipient is not None:
            name = recipient[1].removeprefix("functions.")
            calls.append(_call(name, body, text[position:stop], tools))
        elif channel[:1] == ["analysis"]:
            reasoning.append(body.strip())
        else:
            content.append(body)
        position = len(text) if end is None else end.end()
    return SpokenTurn("".join(content).strip(), "\n".join(reasoning), calls)


def _headless(rest: str) -> str:
    """Return the content of a message with no usable header: none if it was cut short inside one."""
    return "" if "<|message|>" not in rest and re.match(r"(?:<\|start\|>assistant| to=|<\|channel\|>)", rest) else rest


def _call(name: str, body: str, raw: str, tools: Tools) -> ToolCall:
    try:
        stripped = body.strip()
        arguments, end = decode_json(stripped, 0) if stripped else ({}, 0)
        if end != len(stripped):
            raise Malformed(f"unexpected text after the JSON object: {stripped[end : end + 20]!r}")
        name, arguments = read_call({"name": name, "arguments": arguments}, tools)
    except Malformed as exc:
        return failed_call(raw, str(exc), _EXPECTED, name)
    return ToolCall(name=name, arguments=arguments, raw=raw)


HARMONY = CallSyntax(HERMES.opening, HERMES.read, whole_turn=_whole_turn)
