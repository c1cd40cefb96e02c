"""Runs tests that know the answers. The functions under test are in another sandbox, and each call is one line.

The first line of standard input is `{"setup": CODE, "code": CODE, "functions": [NAME, ...]}`, which is answered with
`{"ready": true}`. Each `{"run": CODE}` runs a test. This program writes `{"call": NAME, "args": [...], "kwargs":
{...}}` and reads the answer in the format of `candidate`, or `{"lost": WHY}`. After the test it writes `{"status":
"passed" | "failed" | "error", "message": ...}`.

Runs in sandboxes: uses only the standard library of Python 3.8.
"""

from __future__ import annotations

import builtins
import os
import re
import traceback
from typing import TYPE_CHECKING, Any

from .values import Unplain, decode, decode_line, encode, encode_line

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MESSAGE_CHARS = 2000
_CONTROL = (StopIteration, StopAsyncIteration, Warning)
_ALL = ("Exception", "BaseException", "object")


class CandidateRaised(Exception):
    """The candidate raised an exception, or did not answer."""


class _CannotCross(BaseException):
    """The test passes a value to the candidate that is not plain. Tests do not catch this exception."""


def main() -> None:
    """Run the tests in order."""
    questions = os.fdopen(os.dup(1), "wb")
    answers = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    task = decode_line(answers.readline())

    def proxy(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                question = encode_line({"call": name, "args": encode(list(args)), "kwargs": encode(kwargs)})
            except Unplain as exc:
                raise _CannotCross(f"an argument of {name}: {exc}") from None
            questions.write(question)
            questions.flush()
            return _result(answers.readline(), expected)

        call.__name__ = name
        return call

    named = _words(task["setup"]) | _words(task["code"])
    expected: set[str] = set()
    namespace: dict[str, Any] = {"__name__": "checker"}
    exec(compile(task["setup"], "setup", "exec"), namespace)
    exec(compile(task["code"], "tests", "exec"), namespace)
    for name in task["functions"]:
        namespace[name] = proxy(name)
    namespace["candidate"] = namespace[task["functions"][0]]
    result: dict[str, Any] = {"ready": True}
    while True:
        questions.write(encode_line(result))
        questions.flush()
        line = answers.readline()
        if not line:
            return
        test = decode_line(line)["run"]
        expected = named | _words(test)
        result = _run(test, dict(namespace))


def _run(test: str, namespace: dict[str, Any]) -> dict[str, Any]:
    try:
        exec(compile(test, "test", "exec"), namespace)
    except AssertionError as exc:
        return {
            "status": "failed",
            "message": str(exc)[:MAX_MESSAGE_CHARS] or traceback.format_exc()[-MAX_MESSAGE_CHARS:],
        }
    except _CannotCross as exc:
        return {"status": "error", "message": str(exc)[:MAX_MESSAGE_CHARS], "cannot_cross": True}
    except BaseException as exc:
        return {"status": "error", "message": f"{type(exc).__name__}: {exc}"[:MAX_MESSAGE_CHARS]}
    return {"status": "passed", "message": ""}


def _words(code: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]+", code))


def _result(line: bytes, expected: set[str]) -> Any:
    """Return the value of an answer, or raise the candidate's exception.

    A test may expect a built-in exception class. The name of the class or its base is then in the task's code, whose
    words are `expected`, and this raises a subclass. Everything else is raised as a class without effect on control
    flow: a `StopIteration` would end a `map` in the test, an `IndexError` its loop over a sequence.
    """
    try:
        answer = decode_line(line)
        if "value" in answer:
            return decode(answer["value"])
    except (ValueError, RecursionError) as exc:
        raise CandidateRaised(f"no answer: {exc}") from None
    name, message = str(answer.get("raised", "")), str(answer.get("message", ""))
    kind = getattr(builtins, name, None)
    if (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, _CONTROL)
        and any(each.__name__ in expected for each in kind.__mro__ if each.__name__ not in _ALL)
    ):
        try:
            raised = type(name, (CandidateRaised, kind), {})(message)
        except TypeError:  # the class takes other arguments, or its layout conflicts
            raised = CandidateRaised(f"{name}: {message}")
        raise raised
    raise CandidateRaised(f"{name or 'no answer'}: {message}{answer.get('lost', '')}")
