"""The one place that reads msgspec's messages: its errors have no field that says where a value is wrong."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from prorl_trio.types.errors import MalformedJob

_WHERE: Final = re.compile(r" - at (?:`key` in )?`(\$[^`]*)`$")
_UNKNOWN: Final = re.compile(r"unknown field `(.+)`$")


class FieldError(NamedTuple):
    """A value that does not have the shape that was asked for.

    Attributes:
        problem: what is wrong, without the place.
        path: the place: `$` for the whole, `$.tags.a` for a field in it.
        unknown: the name of a field that does not exist there; empty if that is not what is wrong.
    """

    problem: str
    path: str = "$"
    unknown: str = ""


def field_error(error: Exception) -> FieldError:
    """Return what msgspec found wrong, and where. `error` is a `DecodeError`, or came from the decoder's depths."""
    message = str(error) or "nested too deeply"
    where = _WHERE.search(message)
    problem = message if where is None else message[: where.start()]
    unknown = _UNKNOWN.search(problem)
    return FieldError(problem, "$" if where is None else where[1], "" if unknown is None else unknown[1])


def malformed_job(error: Exception, *, prefix: str = "$") -> MalformedJob:
    """Return the refusal of a job that could not be read, its path beginning with `prefix` in place of `$`."""
    problem, path, _ = field_error(error)
    path = prefix + path[1:]
    return MalformedJob(problem if path == "$" else f"{problem} - at `{path}`", path)


def unsendable(value: object, path: str = "$") -> FieldError | None:
    """Return the first part of a value that has no form on the wire; None if there is none.

    JSON has integers of any size, and halves of characters; msgpack has neither.
    """
    pending: list[tuple[object, str]] = [(value, path)]
    while pending:
        part, where = pending.pop()
        if isinstance(part, int) and not -(2**63) <= part < 2**64:
            return FieldError(
                f"the integer {_shortened(part)} needs more than 64 bits and cannot be sent to a node; let the task "
                "use its text instead, or leave the row out",
                where,
            )
        if isinstance(part, str) and any("\ud800" <= letter <= "\udfff" for letter in part):
            return FieldError("the text has half of a character (a lone surrogate), which cannot be sent", where)
        if isinstance(part, dict):
            pending += [(each, f"{where}.{key}") for key, each in reversed(part.items())]
            pending += [(key, where) for key in part]
        elif isinstance(part, list | tuple | set | frozenset):
            parts = list(part)
            pending += [(each, f"{where}[{place}]") for place, each in reversed(list(enumerate(parts)))]
        elif not isinstance(part, str | int | float | bytes | None):
            return FieldError(f"a value of the type {type(part).__name__} cannot be sent", where)
    return None


def _shortened(number: int) -> str:
    digits = 1 + int(abs(number).bit_length() * 0.30103)
    return str(number) if digits <= 30 else f"of about {digits} digits"
