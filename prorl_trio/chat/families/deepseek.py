"""DeepSeek's calls: between special tokens in V3, R1 and V3.1, in DSML from V3.2 on."""

from __future__ import annotations

import re

from prorl_trio.chat.families.call_values import Malformed, Tools, decode_json, failed_call, read_call, skip_space
from prorl_trio.chat.families.syntax import CallSyntax
from prorl_trio.chat.families.xml import read_dsml
from prorl_trio.types.models import ToolCall

_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_HEAD = re.compile(
    f"{_CALL}(?:function<｜tool▁sep｜>([^\\n<]{{1,200}})\\n```json\\n|([^\\n<]{{1,200}})<｜tool▁sep｜>)\\s*"
)
_TAIL = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>")
_STRAY = re.compile("<｜tool▁call(?:▁end｜>|s▁end｜>|(?=▁begin｜>))")
_EXPECTED = f"{_CALLS}{_CALL}function<｜tool▁sep｜>tool\n```json\n{{...}}\n```{_END_CALL}{_END_CALLS}"


def _read(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    if text.startswith(_CALL, start):
        return _read_call(text, start, tools)
    if text.startswith("<｜DSML｜", start) and "invoke" in text[start : start + 20]:
        return read_dsml(text, start, tools)
    bracket = _BRACKET.match(text, start)
    assert bracket is not None
    end = bracket.end()
    if bracket[0] == _CALLS and not text.startswith(_CALL, skip_space(text, end)):
        close = text.find(_END_CALLS, end)
        end = len(text) if close < 0 else close + len(_END_CALLS)
        return [failed_call(text[start:end], f"{_CALLS} without {_CALL}", _EXPECTED)], end
    return [], end


def _read_call(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    head = _HEAD.match(text, start)
    name = (head[1] or head[2]).strip() if head else ""
    try:
        if head is None:
            raise Malformed("the call does not begin with the name of a tool")
        arguments, end = decode_json(text, head.end())
        tail = _TAIL.match(text, end)
        if tail is None:
            raise Malformed(f"unexpected text after the JSON object: {text[end : end + 20]!r}")
        name, arguments = read_call({"name": name, "arguments": arguments}, tools)
    except Malformed as exc:
        stray = _STRAY.search(text, head.end() if head else start + len(_CALL))
        end = stray.end() if stray else len(text)
        return [failed_call(text[start:end], str(exc), _EXPECTED, name)], end
    return [ToolCall(name=name, arguments=arguments, raw=text[start : tail.end()])], tail.end()


_BRACKET = re.compile(f"{_CALLS}|{_END_CALLS}|</?｜DSML｜ ?\\w*calls>")

DEEPSEEK = CallSyntax(re.compile(f"{_BRACKET.pattern}|{_CALL}|<｜DSML｜ ?invoke"), _read, closing=_END_CALLS)
