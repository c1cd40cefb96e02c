"""The parts of a tool-call syntax, and the most common syntax."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from prorl_trio.chat.families.call_values import Malformed, Tools, decode_json, failed_call, read_call, skip_space
from prorl_trio.types.models import ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

THINK = {"<think>": "</think>"}


class SpokenTurn(NamedTuple):
    """A parsed assistant turn. `reasoning` was inside `<think>`; `content` is the rest of the text."""

    content: str
    reasoning: str
    tool_calls: list[ToolCall]


class CallSyntax(NamedTuple):
    """A family's syntax of calls and reasoning.

    Attributes:
        opening: matches where a call, or a bracket around calls, begins.
        read: takes the text, such a position and the tools; returns the calls there and the position after them, which
            is always larger. A bracket contains no calls; an unreadable call has an error. Never raises. None
            means content.
        thoughts: opening and closing tags of reasoning.
        whole_turn: for turns with another structure: takes the text after the initial reasoning, and the tools; returns
            the whole turn, or None for a turn with the usual structure.
        closing: the last sampled text of a call, or of the bracket around calls; empty if only the end of the turn
            marks it. Always ends with `>`.
    """

    opening: re.Pattern[str]
    read: Callable[[str, int, Tools], tuple[list[ToolCall] | None, int]]
    thoughts: Mapping[str, str] = THINK
    whole_turn: Callable[[str, Tools], SpokenTurn | None] | None = None
    closing: str = ""


# ---------------------------------------------------------------- JSON between tags

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_EXPECTED = '<tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>'


def read_tagged_json(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    """Read the call whose `<tool_call>` is at `start`. Return it and the position after it. See `CallSyntax.read`.

    There is always one call; an unreadable call has an `error`. The JSON determines its end, so that arguments may
    contain `</tool_call>`. If the JSON is broken, or other text follows it, the call ends at the closing tag, the next
    `<tool_call>`, or the end of the text, whichever comes first.
    """
    body_start = skip_space(text, start + len(_OPEN))
    end = -1
    try:
        value, end = _decode_call(text, body_start)
        name, arguments = read_call(value, tools)
    except Malformed as exc:
        if end < 0:
            end = _broken_end(text, body_start)
        return [failed_call(text[start:end], str(exc), _EXPECTED)], end
    return [ToolCall(name=name, arguments=arguments, raw=text[start:end])], end


def _decode_call(text: str, body_start: int) -> tuple[Any, int]:
    """Decode the object after a `<tool_call>`; return it and the end of the call. Raises Malformed."""
    value, end = decode_json(text, body_start)
    end = skip_space(text, end)
    if text.startswith(_CLOSE, end):
        return value, end + len(_CLOSE)
    if end == len(text) or text.startswith(_OPEN, end):
        return value, end
    raise Malformed(f"unexpected text after the JSON object: {text[end : end + 20]!r}")


def _broken_end(text: str, body_start: int) -> int:
    """Return the end of a call with broken JSON: its closing tag, else the next call, else the end of the text."""
    close = text.find(_CLOSE, body_start)
    following = text.find(_OPEN, body_start)
    if close >= 0 and not 0 <= following < close:
        return close + len(_CLOSE)
    return following if following >= 0 else len(text)


def read_json_list(text: str, start: int, body: int, closing: str, tools: Tools) -> tuple[list[ToolCall], int]:
    """Read the calls of a JSON list, or of one object, at `body`, in a bracket that begins at `start`.

    They end with `closing`, or with the text. Broken JSON contains no calls.
    """
    try:
        value, end = decode_json(text, body := skip_space(text, body))
        end = skip_space(text, end)
        if end < len(text) and not text.startswith(closing, end):
            raise Malformed(f"unexpected text after the JSON value: {text[end : end + 20]!r}")
    except Malformed as exc:
        close = text.find(closing, body)
        end = len(text) if close < 0 else close + len(closing)
        return [failed_call(text[start:end], str(exc), f'[{{"name": "tool", "arguments": {{...}}}}]{closing}')], end
    end = min(len(text), end + len(closing))
    calls = []
    for each in value if isinstance(value, list) else [value]:
        try:
            name, arguments = read_call(function_of(each), tools)
        except Malformed as exc:
            calls.append(failed_call(text[start:end], str(exc), _EXPECTED, _named(each)))
        else:
            calls.append(ToolCall(name=name, arguments=arguments, raw=text[start:end]))
    return calls, end


def function_of(value: Any) -> Any:
    """Return the call in a decoded object; OpenAI's format has it inside `function`."""
    inner = value.get("function") if isinstance(value, dict) and "name" not in value else None
    return inner if isinstance(inner, dict) else value


def _named(value: Any) -> str:
    name = function_of(value).get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def _read_hermes(text: str, start: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
    """Read a call in `<tool_call>`, or in `<tools>`, which Qwen2.5-Coder also writes; a schema there is not a call."""
    if text.startswith(_OPEN, start):
        return read_tagged_json(text, start, tools)
    body = skip_space(text, start + len(_TOOLS))
    try:
        value, end = decode_json(text, body)
        if not isinstance(value, dict) or not value.keys() <= {"name", "arguments", "id", "type"}:
            raise Malformed("not a call")
        name, arguments = read_call(value, tools)
    except Malformed:
        return None, start + len(_TOOLS)
    end = skip_space(text, end)
    end += len(_END_TOOLS) if text.startswith(_END_TOOLS, end) else 0
    return [ToolCall(name=name, arguments=arguments, raw=text[start:end])], end


_TOOLS, _END_TOOLS = "<tools>", "</tools>"
HERMES = CallSyntax(re.compile(rf"{_OPEN}|{_TOOLS}(?=\s*\{{\s*\")"), _read_hermes, closing=_CLOSE)
"""`<tool_call>` around a JSON object: Qwen2.5, Qwen3, SmolLM, Hermes, and the syntax described in the system message if
a template renders no tools."""
