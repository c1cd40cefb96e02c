"""Calls functions of a candidate's module, one request per line. It never receives expected values.

`python -c ... SOLUTION_PATH`. The first line of standard input is `{"preamble": CODE}`. Then each line requests a call,
`{"call": NAME, "args": [...], "kwargs": {...}}`, and is answered with `{"value": ...}` or by `{"raised": TYPE,
"message": ...}`. The first answer reports whether the module was loaded. The candidate's output goes to standard error.

Runs in sandboxes: uses only the standard library of Python 3.8.
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any, BinaryIO

from .values import decode, decode_line, encode, encode_line

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MESSAGE_CHARS = 2000
CLASS = "Solution"
"""Methods of this class take precedence over functions of the module, as in LiveCodeBench's grader."""


def main() -> None:
    """Serve requests until the input ends."""
    requests, answers = _take_pipes()
    setup = decode_line(requests.readline())
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    given: dict[str, Any] = {}
    source = ""
    try:
        with open(sys.argv[1], encoding="utf-8") as file:
            source = file.read()
        module.__file__ = sys.argv[1]
        exec(compile(setup["preamble"], "preamble", "exec"), module.__dict__)
        given = dict(module.__dict__)
        exec(compile(source, sys.argv[1], "exec"), module.__dict__)
        loaded = encode_line({"value": None})
    except BaseException as exc:
        loaded = _raised(exc)
    answers.write(loaded)
    answers.flush()
    for line in requests:
        answers.write(_answer(module, decode_line(line), given, source))
        answers.flush()


def _answer(module: types.ModuleType, request: dict[str, Any], given: dict[str, Any], source: str) -> bytes:
    try:
        function = _find(module, request["call"], given, source)
        value = function(*decode(request["args"]), **decode(request["kwargs"]))
        return encode_line({"value": encode(value)})
    except BaseException as exc:
        return _raised(exc)


def _find(module: types.ModuleType, name: str, given: dict[str, Any], source: str) -> Callable[..., Any]:
    """Return a method of `Solution`, or the solution's object of that name. Names of the preamble do not count.

    Raises:
        NameError: the solution defines neither.
    """
    owner = getattr(module, CLASS, None)
    if owner is None or not hasattr(owner, name):
        # An import in the solution may yield the same object as the preamble; then the source contains the name.
        if not hasattr(module, name) or (getattr(module, name) is given.get(name) and name not in source):
            raise NameError(f"the solution does not define {name!r}")
        owner = module
    elif isinstance(owner, type):
        owner = owner()
    function: Callable[..., Any] = getattr(owner, name)
    return function


def _raised(exc: BaseException) -> bytes:
    try:
        message = str(exc)[:MAX_MESSAGE_CHARS]
    except BaseException:
        message = ""
    return encode_line({"raised": type(exc).__name__, "message": message})


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return this process' pipes. The candidate gets an empty input, and its output goes to stderr."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers
