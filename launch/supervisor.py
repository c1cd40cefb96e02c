"""Holds one process tree on a leash: when the other end of standard input closes, everything is ended.

Run as a script by `launch.vllm`: `python supervisor.py GRACE_S COMMAND...`. Standard library only, imports little.

The launcher keeps the write end of our standard input open and never writes. The kernel closes it when the launcher
ends in whatever way, kill -9 included. Then, or on SIGTERM, or when the command ends by itself: SIGTERM to its process
group, up to GRACE_S seconds, SIGKILL to every descendant, wherever it moved (we are the sub-reaper, so none escapes),
and the private temporary folder is removed. Worst case from leash to nothing: GRACE_S plus 1 s.

Standard output gets one line when the command has been started, its pid and that folder. The command's output goes
to our standard error. The exit code is the command's, 128 + n if signal n ended it, 70 if a descendant could not be
killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["EXIT_SURVIVORS", "main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_DEADLINE_S = 1.0
_KILL_ROUND_S = 0.02
EXIT_SURVIVORS = 70


def main(grace_s: float, command: list[str]) -> int:
    """Run `command` on the leash; see the module. Call it in a process of its own with a single thread."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    temporary = tempfile.mkdtemp(prefix="prorl-engine-")
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            env={**os.environ, "TMPDIR": temporary},
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
        os.write(1, f"{child.pid} {temporary}\n".encode())
        os.dup2(2, 1)
        exits = _Exits()
        _wait(wakeup, lambda: child.pid in exits.reap() or _stopped, leash=0)
        if child.pid not in exits:
            os.killpg(child.pid, signal.SIGTERM)
            _wait(wakeup, lambda: child.pid in exits.reap(), timeout_s=grace_s)
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while survivors := _descendants(os.getpid()):
            for pid in survivors:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                print(f"supervisor: cannot kill {survivors}", file=sys.stderr)  # noqa: T201
                return EXIT_SURVIVORS
            _wait(wakeup, lambda: False, timeout_s=_KILL_ROUND_S)
            exits.reap()
        return exits.reap().get(child.pid, EXIT_SURVIVORS)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


_stopped: list[int] = []
"""The signals that asked us to stop."""


class _Exits(dict[int, int]):
    """Exit codes of the children so far, orphans that were handed to us included; none is left a zombie."""

    def reap(self) -> _Exits:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self
            if pid == 0:
                return self
            code = os.waitstatus_to_exitcode(status)
            self[pid] = code if code >= 0 else 128 - code


def _wake_on(*signals: signal.Signals) -> int:
    """A descriptor that becomes readable when one of `signals` has come."""

    def note(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            _stopped.append(number)

    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, note)
    return readable


def _wait(wakeup: int, done: Callable[[], object], *, leash: int | None = None, timeout_s: float | None = None) -> None:
    """Return when `done()` is true (asked again after each signal), the leash is closed, or the time is up."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    sources = [wakeup] if leash is None else [wakeup, leash]
    while not done():
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.select(sources, [], [], left)[0]
        ended = [source for source in ready if not os.read(source, 4096)]  # the leash can: we hold both ends of wakeup
        if not ready or ended:
            return


def _descendants(root: int) -> list[int]:
    """Pids of everything below `root`, zombies left out. The tree may move meanwhile: ask until the answer is empty."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                parents.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
