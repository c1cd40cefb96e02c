"""Conversion of a policy's arguments by the schema that the policy sees, with one rule for all tools."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from prorl_trio.chat.families.call_values import Malformed, decode_json

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING = object()
_WORDS = {"true": True, "false": False}


def read_arguments(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return `arguments` converted to the types of the schema `parameters` wherever the meaning is clear. Idempotent.

    Policies write numbers, truth values and lists as strings (`"3"`, `"true"`, `"[1, 2]"`), whole numbers as `3.0`, and
    `null` for omitted values. Values of another type are left unchanged, and so are names outside the schema: the tool
    decides whether to refuse them. Text that `decode_json` refuses is left unchanged as well, and so are integers
    beyond 64 bits. No argument makes this function raise.
    """
    properties: Mapping[str, Any] = parameters.get("properties", {})
    required = parameters.get("required", ())
    return {
        name: _read(value, properties.get(name, {}))
        for name, value in arguments.items()
        if value is not None or name in required or name not in properties
    }


def _read(value: Any, schema: Mapping[str, Any]) -> Any:
    match schema.get("type"):
        case "boolean" if isinstance(value, str):
            return _WORDS.get(value.strip().lower(), value)
        case "integer":
            number = _number(value)
            whole = number is not None and -(2**63) <= number < 2**64 and float(number).is_integer()
            return int(number) if number is not None and whole else value
        case "number":
            number = _number(value)
            return value if number is None else number
        case "array":
            items = _json(value) if isinstance(value, str) else value
            return [_read(item, schema.get("items", {})) for item in items] if isinstance(items, list) else value
        case "object" if isinstance(value, str):
            fields = _json(value)
            return fields if isinstance(fields, dict) else value
        case _:
            return value


def _number(value: Any) -> int | float | None:
    """Return a finite number from a number or its text, else None."""
    found = _json(value) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return found if isinstance(found, int) or math.isfinite(found) else None


def _json(text: str) -> Any:
    text = text.strip()
    try:
        value, end = decode_json(text, 0)
    except Malformed:
        return _NOTHING
    return value if end == len(text) else _NOTHING
