"""The child side of `scoring`: `python -m prorl_trio.scoring_worker module:name`. Frames on stdin and stdout.

Ends when stdin does, even in the middle of a call: a thread watches it. Whatever the scorer prints goes to stderr.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from prorl_trio.scoring import HEADER, ScoreReply

if TYPE_CHECKING:
    from collections.abc import Callable


def _read_calls(stdin: BinaryIO, calls: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Feed `calls`; end the process when the pool is gone, whatever the main thread is doing."""
    while header := stdin.read(HEADER.size):
        (size,) = HEADER.unpack(header)
        calls.put(msgspec.msgpack.decode(stdin.read(size)))
    os._exit(0)


def _load(target: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is not a function")
    return function  # type: ignore[no-any-return]


def main() -> None:
    """Load the scorer, say ready, then answer calls one at a time."""
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(reply: ScoreReply) -> None:
        raw = msgspec.msgpack.encode(reply)
        stdout.write(HEADER.pack(len(raw)) + raw)
        stdout.flush()

    try:
        function = _load(sys.argv[1])
    except Exception:
        answer(ScoreReply(error=traceback.format_exc(limit=4)))
        return
    calls: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(sys.stdin.buffer, calls), daemon=True).start()
    answer(ScoreReply())
    while True:
        payload = calls.get()
        try:
            reply = ScoreReply(result=function(payload))
        except Exception:
            reply = ScoreReply(error=traceback.format_exc(limit=4))
        answer(reply)


if __name__ == "__main__":
    main()
