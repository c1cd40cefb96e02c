"""Runs tests that know the answers. The functions under test are in another sandbox, and are asked by a line each.

The first line of standard input is `{"setup": CODE, "code": CODE, "functions": [NAME, ...], "tests": [CODE, ...]}`.
This writes `{"call": NAME, "args": [...], "kwargs": {...}}` and reads the answer, as `candidate` gives it, or
`{"lost": WHY}`; and after each test `{"test": NUMBER, "status": "passed" | "failed" | "error", "message": ...}`.

Runs in sandboxes: standard library of Python 3.8.
"""

from __future__ import annotations

import builtins
import os
import traceback
from typing import TYPE_CHECKING, Any

from .values import decode, decode_line, encode, encode_line

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

MAX_MESSAGE_CHARS = 2000


class CandidateRaised(Exception):
    """The candidate raised something that is no built-in exception."""


def main() -> None:
    """Run the tests in order."""
    questions = os.fdopen(os.dup(1), "wb")
    answers = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    task = decode_line(answers.readline())

    def proxy(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            questions.write(encode_line({"call": name, "args": encode(list(args)), "kwargs": encode(kwargs)}))
            questions.flush()
            return _result(decode_line(answers.readline()))

        call.__name__ = name
        return call

    namespace: dict[str, Any] = {"__name__": "checker"}
    exec(compile(task["setup"], "setup", "exec"), namespace)
    exec(compile(task["code"], "tests", "exec"), namespace)
    for name in task["functions"]:
        namespace[name] = proxy(name)
    namespace["candidate"] = namespace[task["functions"][0]]
    for number, test in enumerate(task["tests"]):
        questions.write(encode_line({"test": number, **_run(test, dict(namespace))}))
        questions.flush()


def _run(test: str, namespace: dict[str, Any]) -> dict[str, Any]:
    try:
        exec(compile(test, "test", "exec"), namespace)
    except AssertionError as exc:
        return {
            "status": "failed",
            "message": str(exc)[:MAX_MESSAGE_CHARS] or traceback.format_exc()[-MAX_MESSAGE_CHARS:],
        }
    except BaseException as exc:
        return {"status": "error", "message": f"{type(exc).__name__}: {exc}"[:MAX_MESSAGE_CHARS]}
    return {"status": "passed", "message": ""}


def _result(answer: dict[str, Any]) -> Any:
    if "value" in answer:
        return decode(answer["value"])
    name = str(answer.get("raised", ""))
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        raise kind(answer.get("message"))
    raise CandidateRaised(f"{name or 'no answer'}: {answer.get('message', '')}{answer.get('lost', '')}")
