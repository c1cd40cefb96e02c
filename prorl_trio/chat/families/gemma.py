"""Gemma 4's calls, `<|tool_call>call:tool{key:<|"|>value<|"|>}<tool_call|>`. Gemma 3 lacks its own syntax."""

from __future__ import annotations

import re

from prorl_trio.chat.families.call_values import Malformed, Tools, checked_name, failed_call, skip_space
from prorl_trio.chat.families.literals import GEMMA, read_pairs
from prorl_trio.chat.families.syntax import CallSyntax
from prorl_trio.types.models import ToolCall

_OPEN, _CLOSE = "<|tool_call>", "<tool_call|>"
_HEAD = re.compile(r"<\|tool_call>\s*call:\s*([^\s{}<]{1,200})\s*\{")
_EXPECTED = f'{_OPEN}call:tool{{key:<|"|>text<|"|>,other:1}}{_CLOSE}'


def _read(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    head = _HEAD.match(text, start)
    name = head[1] if head else ""
    try:
        if head is None:
            raise Malformed("the call does not begin with the name of a tool")
        arguments, end = read_pairs(text, head.end(), GEMMA, ":", "}")
        end = skip_space(text, end)
        if not text.startswith(_CLOSE, end):
            raise Malformed(f"expected {_CLOSE}, not {text[end : end + 20]!r}")
        checked_name(name, tools)
    except Malformed as exc:
        close = text.find(_CLOSE, start)
        end = len(text) if close < 0 else close + len(_CLOSE)
        return [failed_call(text[start:end], str(exc), _EXPECTED, name)], end
    end += len(_CLOSE)
    return [ToolCall(name=name, arguments=arguments, raw=text[start:end])], end


GEMMA_4 = CallSyntax(
    re.compile(re.escape(_OPEN)),
    _read,
    {"<|channel>thought": "<channel|>", "<think>": "</think>"},
    closing=_CLOSE,
)
