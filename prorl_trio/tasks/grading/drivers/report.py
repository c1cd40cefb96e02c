"""The report of a run of tests: lines of JSON, each with a code that proves who wrote it, and in which order.

The evaluator gives the driver a key on its standard input. Each line begins with the HMAC-SHA256 of the code before it
and its own text, so a line that somebody else wrote, changed, moved or removed does not verify, and neither does
anything after it.

Used by the evaluator, and in sandboxes: the syntax and the standard library of Python 3.5.
"""

import hashlib
import hmac
import json
from typing import Any


def _code(key: bytes, before: bytes, text: bytes) -> bytes:
    return hmac.new(key, before + text, hashlib.sha256).hexdigest().encode("ascii")


def open_report(path: str, key: bytes) -> Any:
    """Return a function that appends a message to a new report, and closes the report after `{"end": True}`.

    The key is in a closure, and is forgotten with the end: code that runs at the interpreter's exit finds none.
    """
    file = open(path, "wb")  # noqa: SIM115 - until the end of the run
    state = [key, b""]

    def write(message: Any) -> None:
        if not state:
            return
        text = json.dumps(message, separators=(",", ":")).encode("ascii")
        state[1] = _code(state[0], state[1], text)
        file.write(state[1] + b" " + text + b"\n")
        file.flush()
        if "end" in message:
            state.clear()
            file.close()

    return write


def read_report(content: bytes, key: bytes) -> Any:
    """Return the messages before the end of a report that verify; None if the report has no end that does."""
    messages = []  # type: list[Any]
    before = b""
    for line in content.split(b"\n"):
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, _code(key, before, text)):
            continue
        before = code
        message = json.loads(text.decode("ascii"))
        if "end" in message:
            return messages
        messages.append(message)
    return None
