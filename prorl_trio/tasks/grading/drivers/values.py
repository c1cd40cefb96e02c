"""Plain values as lines of JSON, for exchange between a candidate and a program that knows the answers.

A value from `decode` contains no code of the other side: no custom class, no `__eq__` that is always true. Runs in
sandboxes: uses only the standard library of Python 3.8.
"""

from __future__ import annotations

import json
import math
import numbers
from collections import Counter
from typing import Any

MAX_DEPTH = 100
_TAG = "\x00"
"""The only key of an object that represents a value without JSON equivalent."""
_MAX_ALIKE = 100
"""Limit on keys with one hash: a table with `n` of these takes time `n * n`, and such numbers are easily found."""
_LONG_BITS = 4096
"""Longer integers are written in hexadecimal: Python reads at most 4,300 decimal digits."""


class Unplain(TypeError):
    """A value that cannot be encoded."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return `value` as JSON; tuples, sets, bytes, complex numbers, NaN and odd dicts are tagged.

    Subclasses and NumPy scalars are encoded as their base types.

    Raises:
        Unplain: the value has another type, or is nested deeper than `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise Unplain(f"a value of more than {MAX_DEPTH} levels")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if number.bit_length() < _LONG_BITS else {_TAG: "int", "is": hex(number)}
    if isinstance(value, numbers.Real) and hasattr(value, "__float__"):
        real = float(value)
        return real if math.isfinite(real) else {_TAG: "float", "is": repr(real)}
    if isinstance(value, complex):
        return {_TAG: "complex", "is": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "is": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(each, depth + 1) for each in list.__iter__(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "is": [encode(each, depth + 1) for each in tuple.__iter__(value)]}
    if isinstance(value, (set, frozenset)):
        return {_TAG: "set", "is": [encode(each, depth + 1) for each in list(value)]}
    if isinstance(value, dict):
        pairs = [[encode(key, depth + 1), encode(each, depth + 1)] for key, each in dict.items(value)]
        if all(isinstance(key, str) and key != _TAG for key, _ in pairs):
            return dict(pairs)
        return {_TAG: "dict", "is": pairs}
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        return encode(value.tolist(), depth + 1)
    raise Unplain(f"a value of type {type(value).__name__}, which is not plain")


def decode(value: Any) -> Any:
    """Return the value that was encoded.

    Raises:
        ValueError: `encode` does not produce this.
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(each) for key, each in value.items()}
    kind: Any = value[_TAG]
    inner: Any = value.get("is")
    try:
        if kind == "int":
            return int(inner, 16)
        if kind == "float":
            return float(inner)
        if kind == "complex":
            return complex(decode(inner[0]), decode(inner[1]))
        if kind == "bytes":
            return bytes.fromhex(inner)
        if kind == "tuple":
            return tuple(decode(each) for each in inner)
        if kind == "set":
            return set(_keys(inner))
        if kind == "dict":
            keys = _keys([key for key, _ in inner])
            return {key: decode(pair[1]) for key, pair in zip(keys, inner)}  # noqa: B905 - Python 3.8
    except (TypeError, IndexError, KeyError) as exc:
        raise ValueError(f"no {kind}: {exc}") from exc
    raise ValueError(f"no kind of value: {kind!r}")


def _keys(encoded: Any) -> list[Any]:
    """Return the decoded keys of a table. Raises ValueError if too many keys have the same hash."""
    keys = [decode(each) for each in encoded]
    if keys and max(Counter(map(hash, keys)).values()) > _MAX_ALIKE:
        raise ValueError("too many keys of one hash")
    return keys


def encode_line(message: dict[str, Any]) -> bytes:
    """Return a message as one line of bytes, with its newline."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """Return the message of a line.

    Raises:
        ValueError: the line is not a JSON object, or is nested too deep.
    """
    try:
        message: Any = json.loads(line)
    except RecursionError as exc:
        raise ValueError("too deep") from exc
    if not isinstance(message, dict):
        raise ValueError("no JSON object")
    return message
