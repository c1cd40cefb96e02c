"""Comparison of a program's output with the expected one, on the evaluator's side. Pure.

Lines and tokens as LiveCodeBench compares them: both texts are stripped and taken line by line; a line is right if it
equals the expected one, or if both are made of as many numbers that are equal as exact decimals. Numbers have the
digits 0 to 9, and no underscores. Only a task that says so has its numbers compared with a tolerance.
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
    """The difference that two numbers may have: `absolute`, or `relative` to the expected one, whichever is more.

    With `exact_integers` it is for numbers of which at least one has a fraction or an exponent.
    """

    absolute: float = 0.0
    relative: float = 0.0
    exact_integers: bool = False

    def __post_init__(self) -> None:
        for name in ("absolute", "relative"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative")

    def close(self, value: float, expected: float) -> bool:
        """Return whether `value` is near enough. Nothing is near to infinity or NaN; infinity equals itself."""
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
    """Return whether a program printed what was expected."""
    lines, wanted = _lines(output), _lines(expected)
    return len(lines) == len(wanted) and all(
        line == want or _same_numbers(line, want, tolerance) for line, want in zip(lines, wanted, strict=True)
    )


def same_value(value: Any, expected: Any, tolerance: Tolerance | None = None) -> bool:
    """Return whether a function returned what was expected: plain values, a tuple where a list is expected as well.

    Numbers are equal as Python has it, or within the tolerance; True is not 1 here, and NaN is what NaN asks for. The
    keys of an expected dict may be the texts of numbers, for JSON has no others.
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
        if value.keys() != expected.keys():  # tests come as JSON, which has no keys but texts
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
