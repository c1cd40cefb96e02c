"""The report of a test run: lines of JSON, each with a code that proves its author and its position.

The evaluator sends the driver a key on standard input. Each line begins with the HMAC-SHA256 of the previous code and
the line's own text. A line that was forged, changed, moved or removed does not verify, and neither do the lines after
it.

Used by the evaluator and in sandboxes: it uses only the syntax and the standard library of Python 3.5.
"""

import hashlib
import hmac
import json
from typing import Any


def _code(key: bytes, before: bytes, text: bytes) -> bytes:
    return hmac.new(key, before + text, hashlib.sha256).hexdigest().encode("ascii")


def open_report(path: str, key: bytes) -> Any:
    """Return a function that appends a message to a new report, and closes the report after `{"end": True}`.

    The key is kept in a closure and deleted at the end, so that code running at the interpreter's exit cannot find it.
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
    """Return the verified messages before the end of a report; None if the report lacks a verified end."""
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
