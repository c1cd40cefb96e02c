"""Mistral's calls: `[TOOL_CALLS]` before a JSON list, or, since its tokenizer v11, before each `name[ARGS]{..}`."""

from __future__ import annotations

import re

from prorl_trio.chat.families.call_values import Malformed, Tools, decode_json, failed_call, read_call, skip_space
from prorl_trio.chat.families.syntax import THINK, CallSyntax
from prorl_trio.types.models import ToolCall

_OPEN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([^\s\[{]{1,200})\s*(?:\[CALL_ID\]\s*([^\s\[{]{1,200})\s*)?(?:\[ARGS\])?\s*(?=\{)")
_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Call ids that its templates accept; a call with another id gets a new one."""
_EXPECTED = f'{_OPEN}tool[ARGS]{{...}} or {_OPEN}[{{"name": "tool", "arguments": {{...}}}}]'


def _read(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    body = skip_space(text, start + len(_OPEN))
    head = _HEAD.match(text, body)
    name = head[1] if head else ""
    try:
        if head is not None:
            arguments, end = decode_json(text, head.end())
            values = [{"name": name, "arguments": arguments, "id": head[2]}]
        elif text[body : body + 1] in ("[", "{"):
            value, end = decode_json(text, body)
            values = value if isinstance(value, list) else [value]
        else:
            raise Malformed("neither a tool's name nor a JSON list follows")
    except Malformed as exc:
        following = text.find(_OPEN, body)
        end = len(text) if following < 0 else following
        return [failed_call(text[start:end], str(exc), _EXPECTED, name)], end
    return [_call(value, text[start:end], tools) for value in values], end


def _call(value: object, raw: str, tools: Tools) -> ToolCall:
    try:
        name, arguments = read_call(value, tools)
    except Malformed as exc:
        named = value.get("name") if isinstance(value, dict) else None
        return failed_call(raw, str(exc), _EXPECTED, named if isinstance(named, str) else "")
    identity = value.get("id") if isinstance(value, dict) else None
    usable = isinstance(identity, str) and _ID.fullmatch(identity) is not None
    return ToolCall(name=name, arguments=arguments, raw=raw, id=str(identity) if usable else "")


MISTRAL = CallSyntax(re.compile(re.escape(_OPEN)), _read, {**THINK, "[THINK]": "[/THINK]"})
