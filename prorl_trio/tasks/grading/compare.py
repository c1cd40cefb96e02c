"""Comparison of a program's output with the expected output, on the evaluator's side. Pure.

Lines and tokens are compared as in LiveCodeBench. Both texts are stripped and compared line by line. A line is correct
if it equals the expected line, or if both are rows of numbers that are equal as exact decimals. Numbers use the digits
0 to 9, without underscores. A tolerance applies only if the task specifies it.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

_LINE_END = re.compile(r"\r\n|\r|\n")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?)", re.IGNORECASE)


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The allowed difference of two numbers: the larger of `absolute` and `relative` to the expected number.

    With `exact_integers` it applies only if at least one number has a fraction or an exponent.
    """

    absolute: float = 0.0
    relative: float = 0.0
    exact_integers: bool = False

    def __post_init__(self) -> None:
        for name in ("absolute", "relative"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative")

    def close(self, value: float, expected: float) -> bool:
        """Return whether `value` is within the tolerance. Nothing is near infinity or NaN; infinity equals itself."""
        if value == expected:
            return True
        if self.exact_integers and isinstance(value, int) and isinstance(expected, int):
            return False
        try:
            near = abs(value - expected) <= max(self.absolute, self.relative * abs(expected))
            return math.isfinite(value) and math.isfinite(expected) and near
        except OverflowError:  # an integer beyond the range of floats
            return False


def same_output(output: str, expected: str, tolerance: Tolerance | None = None) -> bool:
    """Return whether a program printed the expected output."""
    lines, wanted = _lines(output), _lines(expected)
    return len(lines) == len(wanted) and all(
        line == want or _same_numbers(line, want, tolerance) for line, want in zip(lines, wanted, strict=True)
    )


def same_value(value: Any, expected: Any, tolerance: Tolerance | None = None) -> bool:
    """Return whether a function returned the expected plain value. A tuple may stand for an expected list.

    Numbers are compared as in Python, or within the tolerance. True does not equal 1, and NaN equals NaN. The keys of
    an expected dict may be the texts of numbers, because JSON allows only text keys.
    """
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(same_value(each, want, tolerance) for each, want in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        if value.keys() != expected.keys():  # tests are JSON, in which all keys are texts
            value = {str(key) if isinstance(key, int | float) else key: each for key, each in value.items()}
        return value.keys() == expected.keys() and all(
            same_value(value[key], want, tolerance) for key, want in expected.items()
        )
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) and isinstance(expected, float) and math.isnan(expected):
        return math.isnan(value)
    if tolerance is not None and isinstance(value, int | float) and isinstance(expected, int | float):
        return tolerance.close(value, expected)
    return bool(value == expected)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in _LINE_END.split(text.strip())]


def _same_numbers(line: str, expected: str, tolerance: Tolerance | None) -> bool:
    words, wanted = line.split(), expected.split()
    return len(words) == len(wanted) and all(
        _same_number(word, want, tolerance) for word, want in zip(words, wanted, strict=True)
    )


def _same_number(word: str, expected: str, tolerance: Tolerance | None) -> bool:
    if word == expected:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    try:
        if Decimal(word) == Decimal(expected):
            return True
        return tolerance is not None and tolerance.close(_number(word), _number(expected))
    except (ValueError, InvalidOperation):
        return False


def _number(word: str) -> int | float:
    """Return an integer for a word without a fraction or exponent, else a float.

    Raises:
        ValueError: the word is not a number.
    """
    return int(word) if word.lstrip("+-").isdigit() else float(word)
