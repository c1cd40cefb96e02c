"""The child side of `scoring`: `python -m prorl_trio.agent.scoring_worker MODULE LIMITS`.

It exchanges frames on stdin and stdout.

It ends when stdin closes, even during a call: a thread watches it. The scorer's output goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import queue
import resource
import sys
import threading
import traceback
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from prorl_trio.agent.scoring import HEADER, ScoreCall, ScoreReply
from prorl_trio.config import ScoringConfig

if TYPE_CHECKING:
    from types import ModuleType


def _read_calls(stdin: BinaryIO, calls: queue.SimpleQueue[ScoreCall]) -> None:
    """Fill `calls`; end the process when the pool is gone, even if the main thread is busy."""
    while header := stdin.read(HEADER.size):
        (size,) = HEADER.unpack(header)
        calls.put(msgspec.msgpack.decode(stdin.read(size), type=ScoreCall))
    os._exit(0)


def _reply(module: ModuleType, call: ScoreCall) -> ScoreReply:
    function = getattr(module, call.name, None)
    if not callable(function):
        return ScoreReply(error=f"{module.__name__} has no function {call.name!r}", is_missing=True)
    try:
        return ScoreReply(result=function(call.payload))
    except Exception:
        return ScoreReply(error=traceback.format_exc(limit=4))


def _limit_self(limits: ScoringConfig) -> None:
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_STACK, limits.stack_bytes),
        (resource.RLIMIT_NOFILE, limits.max_open_files),
        (resource.RLIMIT_FSIZE, limits.max_file_bytes),
        (resource.RLIMIT_NPROC, _tasks_of_user() + limits.max_processes),
    ):
        hard = resource.getrlimit(what)[1]
        kept = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (kept, kept))


def _tasks_of_user() -> int:
    """Return the number of processes and threads of this user, which is the number that the kernel limits."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _allow_cpu(seconds: int) -> None:
    """Make the kernel end this process, by SIGXCPU, after this many more seconds of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def main() -> None:
    """Import the module of the scorers, report ready, then answer calls one at a time."""
    limits = msgspec.json.decode(sys.argv[2], type=ScoringConfig)
    _limit_self(limits)
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(reply: ScoreReply) -> None:
        raw = msgspec.msgpack.encode(reply)
        stdout.write(HEADER.pack(len(raw)) + raw)
        stdout.flush()

    try:
        module = importlib.import_module(sys.argv[1])
    except Exception:
        answer(ScoreReply(error=traceback.format_exc(limit=4), is_missing=True))
        return
    calls: queue.SimpleQueue[ScoreCall] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(sys.stdin.buffer, calls), daemon=True).start()
    answer(ScoreReply())
    while True:
        call = calls.get()
        _allow_cpu(limits.cpu_s)
        answer(_reply(module, call))


if __name__ == "__main__":
    main()
