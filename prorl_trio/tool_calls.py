"""What an assistant's text says: reasoning, content and tool calls. Total functions: no input makes them raise.

The format is the one ChatML models are trained on: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any
number of times. A call that cannot be understood is a `ToolCall` with an `error` to show to the policy, never nothing.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from prorl_trio.models import ToolCall

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["MAX_ARGUMENT_NESTING", "MAX_TOOL_CALLS_PER_TURN", "SpokenTurn", "parse_tool_calls", "parse_turn"]

MAX_TOOL_CALLS_PER_TURN = 64
"""Calls parsed of one turn. What follows is one more call, with an error."""

MAX_ARGUMENT_NESTING = 64
"""Levels of lists and objects inside arguments."""

_EXPECTED = '<tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>'
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,200})"')
_SPACE = re.compile(r"[ \t\r\n]*")


class SpokenTurn(NamedTuple):
    """One assistant turn taken apart. `reasoning` was inside `<think>`; `content` is what is left of the text."""

    content: str
    reasoning: str
    tool_calls: list[ToolCall]


class _Malformed(Exception):
    """A call that cannot be understood; the message is for the policy."""


def parse_tool_calls(text: str, known_tools: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Return the content outside tool calls and reasoning, and the calls in their order. See `parse_turn`."""
    turn = parse_turn(text, known_tools)
    return turn.content, turn.tool_calls


def parse_turn(text: str, known_tools: Collection[str], *, opened_thinking: bool = False) -> SpokenTurn:
    """Take an assistant's text apart. Never raises.

    Lenient only where there is one way to read it: arguments given as a JSON string, `parameters` for `arguments`, raw
    newlines inside strings, a missing `</tool_call>` after a complete object, and, where there is no `<tool_call>`
    at all, a bare object as the whole text or in a fenced block, if it names one of `known_tools`.

    Args:
        text: without special tokens.
        known_tools: the names a call may have; any other is an error that lists these.
        opened_thinking: the prompt ended with `<think>`, so the text starts inside it.
    """
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    if opened_thinking:
        position = _take_reasoning(text, 0, reasoning)
    while text.startswith(_THINK, _skip_space(text, position)):
        position = _take_reasoning(text, _skip_space(text, position) + len(_THINK), reasoning)
    if (call := _bare_call(text[position:], known_tools)) is not None:  # whatever tags its strings contain
        return SpokenTurn("", "\n".join(reasoning), [call])
    while (start := _next_tag(text, position)) >= 0:
        content.append(text[position:start])
        if text.startswith(_THINK, start):
            position = _take_reasoning(text, start + len(_THINK), reasoning)
        elif len(calls) == MAX_TOOL_CALLS_PER_TURN:
            error = f"more than {MAX_TOOL_CALLS_PER_TURN} tool calls in one turn; these and what follows were not run"
            calls.append(ToolCall(name="", arguments={}, raw=text[start:], error=error))
            position = len(text)
        else:
            call, position = _parse_tagged(text, start, known_tools)
            calls.append(call)
    content.append(text[position:])
    said = "".join(content).strip()
    if not calls:
        said, calls = _parse_fences(said, known_tools)
    return SpokenTurn(said, "\n".join(reasoning), calls)


def _next_tag(text: str, position: int) -> int:
    """Return where the next `<think>` or `<tool_call>` starts, or -1."""
    found = [at for at in (text.find(_THINK, position), text.find(_OPEN, position)) if at >= 0]
    return min(found, default=-1)


def _take_reasoning(text: str, start: int, reasoning: list[str]) -> int:
    """Append the reasoning that starts at `start`, return where the text goes on; unclosed, it takes all the rest."""
    end = text.find(_END_THINK, start)
    if end < 0:
        reasoning.append(text[start:].strip())
        return len(text)
    reasoning.append(text[start:end].strip())
    return end + len(_END_THINK)


def _parse_tagged(text: str, start: int, known_tools: Collection[str]) -> tuple[ToolCall, int]:
    """Parse the call whose `<tool_call>` is at `start`; return it and where the text goes on.

    The JSON decides where a call ends, so that arguments may contain `</tool_call>`; the tag does only where the JSON
    is broken.
    """
    body_start = _skip_space(text, start + len(_OPEN))
    end = -1
    try:
        value, end = _decode_call(text, body_start)
        name, arguments = _read_call(value, known_tools)
    except _Malformed as exc:
        if end < 0:
            end = _broken_end(text, body_start)
        raw = text[start:end]
        named = _NAME.search(raw)
        error = f"{exc}; expected {_EXPECTED}"
        return ToolCall(name=named[1] if named else "", arguments={}, raw=raw, error=error), end
    return ToolCall(name=name, arguments=arguments, raw=text[start:end]), end


def _decode_call(text: str, body_start: int) -> tuple[Any, int]:
    """Decode the object after a `<tool_call>`; return it and where the call ends. Raises _Malformed."""
    value, end = _decode_json(text, body_start)
    end = _skip_space(text, end)
    if text.startswith(_CLOSE, end):
        return value, end + len(_CLOSE)
    if end == len(text) or text.startswith(_OPEN, end):
        return value, end
    raise _Malformed(f"unexpected text after the JSON object: {text[end : end + 20]!r}")


def _broken_end(text: str, body_start: int) -> int:
    """Return the end of a call with broken JSON: its closing tag, else the next call, else the end of the text."""
    close = text.find(_CLOSE, body_start)
    following = text.find(_OPEN, body_start)
    if close >= 0 and not 0 <= following < close:
        return close + len(_CLOSE)
    return following if following >= 0 else len(text)


def _parse_fences(said: str, known_tools: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Find calls written as fenced blocks instead of with `<tool_call>`. Whatever else is there, is content."""
    calls: list[ToolCall] = []

    def take(fence: re.Match[str]) -> str:
        call = _bare_call(fence[1], known_tools) if len(calls) < MAX_TOOL_CALLS_PER_TURN else None
        if call is None:
            return fence[0]
        calls.append(call)
        return ""

    return _FENCE.sub(take, said).strip(), calls


def _bare_call(text: str, known_tools: Collection[str]) -> ToolCall | None:
    """Return the call that `text` is as a whole, or None: without a tag, broken JSON is no attempt at a call."""
    text = text.strip()
    if not text.startswith("{"):
        return None
    try:
        value, end = _decode_json(text, 0)
    except _Malformed:
        return None
    if end != len(text) or not isinstance(value, dict) or not {"arguments", "parameters"} & value.keys():
        return None
    name = value.get("name")
    if not isinstance(name, str) or name not in known_tools:
        return None
    try:
        name, arguments = _read_call(value, known_tools)
    except _Malformed as exc:
        return ToolCall(name=name, arguments={}, raw=text, error=f"{exc}; expected {_EXPECTED}")
    return ToolCall(name=name, arguments=arguments, raw=text)


def _read_call(value: Any, known_tools: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a decoded call. Raises _Malformed."""
    if not isinstance(value, dict):
        raise _Malformed(f"a tool call is a JSON object, not {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _Malformed('the tool call has no "name"')
    if name not in known_tools:
        known = ", ".join(sorted(known_tools)) or "none"
        raise _Malformed(f"unknown tool {name[:100]!r}; the tools are: {known}")
    if "arguments" in value or "parameters" in value:
        arguments = value["arguments"] if "arguments" in value else value["parameters"]
    elif len(value) == 1:
        arguments = {}
    else:
        raise _Malformed('the tool call has no "arguments"')
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            text = arguments.strip()
            arguments, end = _decode_json(text, 0)
            if end < len(text):
                raise _Malformed(f"unexpected text after the JSON object: {text[end : end + 20]!r}")
        except _Malformed as exc:
            raise _Malformed(f'"arguments" must be a JSON object; it is a string with {exc}') from exc
    if not isinstance(arguments, dict):
        raise _Malformed(f'"arguments" must be a JSON object, not {_kind(arguments)}')
    return name, arguments


def _kind(value: Any) -> str:
    """Return JSON's word for the type of `value`."""
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


# ---------------------------------------------------------------- JSON that can travel


def _decode_json(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value at `start`; return it and where it ends. Raises _Malformed, with the position in the value.

    Stricter than JSON in one way: what could not be sent on in msgpack (64-bit integers, finite floats, valid Unicode)
    is refused here, where the policy can be told.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as exc:
        line = text.count("\n", start, exc.pos) + 1
        column = exc.pos - max(text.rfind("\n", start, exc.pos), start - 1)
        raise _Malformed(f"invalid JSON at line {line} column {column}: {exc.msg}") from exc
    except RecursionError as exc:
        raise _Malformed(f"invalid JSON: nested deeper than {MAX_ARGUMENT_NESTING} levels") from exc
    _check_portable(value, MAX_ARGUMENT_NESTING)
    return value, end


def _check_portable(value: Any, levels_left: int) -> None:
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise _Malformed("invalid JSON: half of a surrogate pair in a string")
    elif isinstance(value, dict | list):
        if levels_left == 0:
            raise _Malformed(f"invalid JSON: nested deeper than {MAX_ARGUMENT_NESTING} levels")
        if isinstance(value, dict):
            for key in value:
                _check_portable(key, levels_left)
        for item in value.values() if isinstance(value, dict) else value:
            _check_portable(item, levels_left - 1)


def _parse_int(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise _Malformed(f"invalid JSON: the integer {digits[:24]} does not fit in 64 bits")
    return int(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _Malformed(f"invalid JSON: the number {digits[:24]} is out of range")
    return number


def _refuse_constant(name: str) -> float:
    raise _Malformed(f"invalid JSON: {name} is not a JSON number")


_DECODER = json.JSONDecoder(
    strict=False, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant
)
