"""The one place that reads msgspec's messages: its errors have no field that says where a value is wrong."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from prorl_trio.types.errors import MalformedJob

__all__ = ["FieldError", "field_error", "malformed_job"]

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
