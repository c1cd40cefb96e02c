"""Names and arguments of tool calls: checked, typed, and encodable in msgpack."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from prorl_trio.types.models import ToolCall

MAX_ARGUMENT_NESTING = 64
"""Levels of lists and objects inside arguments."""

Tools = Collection[str]
"""The names that a call may have. A mapping also has the JSON schema of each tool's parameters, which determines the
types of unquoted values."""

_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
SHORT_DIGITS = 19
"""An integer with fewer digits fits in 64 bits."""
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,200})"')
_SPACE = re.compile(r"[ \t\r\n]*")
_LITERALS = {"True": True, "False": False, "None": None}


class Malformed(Exception):
    """A call that cannot be parsed; the message is for the policy.

    Attributes:
        at: the position of the error in the text, or 0 if unknown.
    """

    def __init__(self, message: str, at: int = 0) -> None:
        super().__init__(message)
        self.at = at


def skip_space(text: str, position: int) -> int:
    """Return where the white space at `position` ends."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def failed_call(raw: str, reason: str, expected: str, name: str = "") -> ToolCall:
    """Return `raw` as a failed call, with an error that shows the policy how to write it."""
    named = _NAME.search(raw)
    return ToolCall(
        name=name or (named[1] if named else ""), arguments={}, raw=raw, error=f"{reason}; expected {expected}"
    )


def checked_name(name: Any, tools: Tools) -> str:
    """Return `name` if a tool has it. Raises Malformed with the existing names."""
    if not isinstance(name, str) or not name:
        raise Malformed('the tool call has no "name"')
    if name not in tools:
        known = ", ".join(sorted(tools)) or "none"
        raise Malformed(f"unknown tool {name[:100]!r}; the tools are: {known}")
    return name


def read_call(value: Any, tools: Tools) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call given as a decoded JSON object. Raises Malformed."""
    if not isinstance(value, dict):
        raise Malformed(f"a tool call is a JSON object, not {_kind(value)}")
    name = checked_name(value.get("name"), tools)
    if "arguments" in value or "parameters" in value:
        arguments = value["arguments"] if "arguments" in value else value["parameters"]
    elif value.keys() <= {"name", "type", "id"}:
        arguments = {}
    else:
        raise Malformed('the tool call has no "arguments"')
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            text = arguments.strip()
            arguments, end = decode_json(text, 0)
            if end < len(text):
                raise Malformed(f"unexpected text after the JSON object: {text[end : end + 20]!r}")
        except Malformed as exc:
            raise Malformed(f'"arguments" must be a JSON object; it is a string with {exc}') from exc
    if not isinstance(arguments, dict):
        raise Malformed(f'"arguments" must be a JSON object, not {_kind(arguments)}')
    return name, arguments


def typed_value(text: str, tools: Tools, name: str, key: str) -> Any:
    """Return the argument written as `text` without quotes, with the type in the tool's schema.

    Text for a parameter that may only be a string is left unchanged. Otherwise it is parsed as JSON. If it is not JSON,
    or has a type that is not allowed while a string is, it is a string. Raises Malformed if msgpack cannot encode it.
    """
    check_portable(text)
    types = _schema_types(tools, name, key)
    if types == {"string"}:
        return text
    stripped = text.strip()
    try:
        value, end = (_LITERALS[stripped], len(stripped)) if stripped in _LITERALS else decode_json(stripped, 0)
    except Malformed:
        return text
    if end != len(stripped) or ("string" in types and not _json_types(value) & types):
        return text
    return value


def _schema_types(tools: Tools, name: str, key: str) -> set[str]:
    """Return the JSON types that the schema allows for a parameter; empty if unspecified."""
    schema = tools.get(name) if isinstance(tools, Mapping) else None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return _types(properties.get(key)) if isinstance(properties, Mapping) else set()


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for alternative in ("anyOf", "oneOf"):
        for each in schema.get(alternative) or ():
            found |= _types(each)
    if not found and isinstance(schema.get("enum"), list):
        found = set().union(*map(_json_types, schema["enum"]))
    return found


def _json_types(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {{str: "string", float: "number", list: "array", dict: "object"}.get(type(value), "null")}


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


# ---------------------------------------------------------------- JSON that msgpack can encode


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value at `start`; return it and its end. Raises Malformed, with the position in the value.

    A reader that searches a text for JSON continues after the error (`Malformed.at`), so that it reads no text twice.

    It is stricter than JSON: values that msgpack cannot encode are refused here, where the policy sees the error. They
    need 64-bit integers, finite floats and valid Unicode.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as exc:
        line = text.count("\n", start, exc.pos) + 1
        column = exc.pos - max(text.rfind("\n", start, exc.pos), start - 1)
        raise Malformed(f"invalid JSON at line {line} column {column}: {exc.msg}", exc.pos) from exc
    except RecursionError as exc:
        raise Malformed(f"invalid JSON: nested deeper than {MAX_ARGUMENT_NESTING} levels", len(text)) from exc
    check_portable(value)
    return value, end


def check_portable(value: Any, levels_left: int = MAX_ARGUMENT_NESTING) -> None:
    """Raise Malformed if msgpack cannot encode `value`, or if it has too many levels of lists and objects."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise Malformed("invalid JSON: half of a surrogate pair in a string")
    elif isinstance(value, dict | list):
        if levels_left == 0:
            raise Malformed(f"invalid JSON: nested deeper than {MAX_ARGUMENT_NESTING} levels")
        if isinstance(value, dict):
            for key in value:
                check_portable(key, levels_left)
        for item in value.values() if isinstance(value, dict) else value:
            check_portable(item, levels_left - 1)
    elif isinstance(value, int):
        if not _MIN_INTEGER <= value <= _MAX_INTEGER:
            raise Malformed("invalid JSON: an integer that does not fit in 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise Malformed("invalid JSON: a number that is not finite")


def _parse_int(digits: str) -> int:
    if len(digits) < SHORT_DIGITS:
        return int(digits)
    if len(digits) > 20 or not _MIN_INTEGER <= int(digits) <= _MAX_INTEGER:
        raise Malformed(f"invalid JSON: the integer {digits[:24]} does not fit in 64 bits")
    return int(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise Malformed(f"invalid JSON: the number {digits[:24]} is out of range")
    return number


def _refuse_constant(name: str) -> float:
    raise Malformed(f"invalid JSON: {name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    decoded: dict[str, Any] = {}
    for key, value in pairs:
        add_once(decoded, key, value)
    return decoded


def add_once(arguments: dict[str, Any], key: str, value: Any) -> None:
    """Set an argument. Raises Malformed if it is already set, because the intended value is ambiguous."""
    if key in arguments:
        raise Malformed(f"{key[:40]!r} is there twice")
    arguments[key] = value


_DECODER = json.JSONDecoder(
    strict=False,
    object_pairs_hook=_object,
    parse_int=_parse_int,
    parse_float=_parse_float,
    parse_constant=_refuse_constant,
)
