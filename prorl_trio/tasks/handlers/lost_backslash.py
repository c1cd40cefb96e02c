"""Detects LaTeX that lost a backslash in a JSON or Python string: `"\\frac"` becomes a form feed and `rac`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from prorl_trio.types.errors import MalformedJob

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOST: Final = re.compile(
    r"[\a\b\v](?=[a-z])"
    r"|\f(?=rac|orall|box|rown|lat)"
    r"|\t(?=imes|ext(?:bf|it|rm)?\{|heta|riangle|frac|ilde|an[({\\^]|au\b)"
    r"|\r(?=ight|ho\b|angle|ceil|floor|vert)"
    r"|\n(?=eq\s?[-\d\\]|abla\b|otin\b|u[_^\\$])"
)
_ESCAPES: Final = {"\a": "a", "\b": "b", "\t": "t", "\n": "n", "\v": "v", "\f": "f", "\r": "r"}


def find_lost_backslash(value: Any, path: str = "") -> tuple[str, str]:
    """Find a control character in the place of a LaTeX backslash and letter.

    Texts are also searched in lists and objects. A control character counts only before the rest of a LaTeX command.
    Tabs, line ends and page breaks may be part of questions, and so may harmless remains of other programs.

    Returns:
        The problem and the remedy in one sentence, and the place below `path`, such as `payload.choices[0]`. Both are
            empty if nothing is found.
    """
    if isinstance(value, str) and (found := _LOST.search(value)):
        letter = _ESCAPES[found[0]]
        rest = re.match(r"[A-Za-z]*", value[found.end() :])
        command = f"\\{letter}{rest[0] if rest else ''}"[:40]
        return f"it has the control character `\\{letter}` where `{command}` was meant; write `\\{command}`", path
    if isinstance(value, dict):
        inner = [(each, f"{path}.{name}") for name, each in value.items()]
    elif isinstance(value, list):
        inner = [(each, f"{path}[{place}]") for place, each in enumerate(value)]
    else:
        return "", ""
    for each, place in inner:
        if (said := find_lost_backslash(each, place))[0]:
            return said
    return "", ""


def check_backslashes(payload: Mapping[str, Any]) -> None:
    """Raise MalformedJob with the field's path if a text of a payload has lost a backslash."""
    problem, path = find_lost_backslash(dict(payload), "$.instance.payload")
    if problem:
        raise MalformedJob(problem, path)
