"""Comparison of a program's output with the expected one, on the evaluator's side. Pure.

Lines and tokens as LiveCodeBench compares them: both texts are stripped and taken line by line; a line is right if it
equals the expected one, or if both are made of as many numbers that are equal as exact decimals. Only a task that says
so has its numbers compared with a tolerance.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

__all__ = ["Tolerance", "same_output", "same_value"]


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The difference that two numbers may have: `absolute`, or `relative` to the expected one, whichever is more."""

    absolute: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        for name in ("absolute", "relative"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative")

    def close(self, value: float, expected: float) -> bool:
        """Return whether `value` is near enough. NaN is near to nothing."""
        return value == expected or abs(value - expected) <= max(self.absolute, self.relative * abs(expected))


def same_output(output: str, expected: str, tolerance: Tolerance | None = None) -> bool:
    """Return whether a program printed what was expected."""
    lines, wanted = _lines(output), _lines(expected)
    return len(lines) == len(wanted) and all(
        line == want or _same_numbers(line, want, tolerance) for line, want in zip(lines, wanted, strict=True)
    )


def same_value(value: Any, expected: Any, tolerance: Tolerance | None = None) -> bool:
    """Return whether a function returned what was expected: plain values, a tuple where a list is expected as well.

    Numbers are equal as Python has it, or within the tolerance; True is not 1 here.
    """
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(same_value(each, want, tolerance) for each, want in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[key], want, tolerance) for key, want in expected.items())
        )
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if tolerance is not None and isinstance(value, int | float) and isinstance(expected, int | float):
        return tolerance.close(float(value), float(expected))
    return bool(value == expected)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_numbers(line: str, expected: str, tolerance: Tolerance | None) -> bool:
    words, wanted = line.split(), expected.split()
    return len(words) == len(wanted) and all(
        _same_number(word, want, tolerance) for word, want in zip(words, wanted, strict=True)
    )


def _same_number(word: str, expected: str, tolerance: Tolerance | None) -> bool:
    if tolerance is not None and word == expected:
        return True
    try:
        if tolerance is not None:
            return tolerance.close(float(word), float(expected))
        return Decimal(word) == Decimal(expected)
    except (ValueError, InvalidOperation):
        return False
