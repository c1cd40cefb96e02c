"""Holds one process tree on a leash: when the other end of standard input closes, everything is stopped.

Run as a script by `prorl_launch.supervised`: `python supervisor.py GRACE_S COMMAND...`. Standard library only, with few
imports.

The launcher keeps the write end of our standard input open and never writes. The kernel closes it however the launcher
ends, even by kill -9. Cleanup starts at that point, on SIGTERM, or when the command ends by itself. It sends SIGTERM to
the command's process group, waits up to GRACE_S seconds, and sends SIGKILL to every descendant. No descendant escapes,
because this process is the sub-reaper. It then removes the private temporary folder and the tree's files in /dev/shm
(`shared_memory`). The worst case from leash to empty is GRACE_S plus 5 s.

There are two processes, so that kill -9 of one does not release the tree: the keeper holds the guard, and the guard
holds the command. If the guard is killed, the keeper adopts its orphans and stops them. If the keeper is killed, the
guard stops the tree itself. Only if both are killed at once may processes outside of the command's session survive. The
folder, and the tree's files in /dev/shm, are then removed by Slurm after the task (`slurm.sweep`), or by the next
supervisor on this machine (`abandoned`). The same applies if a killed process takes longer to end: freeing the memory
of a GPU takes seconds.

Standard output receives one line when the command has been started, with its pid and that folder. It is closed when
both processes have ended. The command's output goes to our standard error. The exit code is the command's, 128 + n if
signal n ended it (or the guard), 70 if a descendant could not be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from prorl_launch.abandoned import ClaimedFolder, claim_folder, sweep
from prorl_launch.shared_memory import SharedMemory, unlink_unused

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_LEASH = 0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_DEADLINE_S = 2.5
_KILL_ROUND_S = 0.02
_LOOK_INTERVAL_S = 0.1
"""Minimum seconds between two scans of /dev/shm, because others may create files there continuously."""

EXIT_SURVIVORS = 70


def main(grace_s: float, command: list[str], owner: str = "") -> int:
    """Run `command` on the leash; see the module. Call it in its own process with a single thread.

    `owner` labels the folder for processes that wait for our end.
    """
    sweep(unlink_unused)
    folder = claim_folder(owner)
    try:
        tree, keeper = _Tree(folder), os.getpid()
        guard = os.fork()
        if guard:
            return tree.hold(guard, guard, grace_s + _KILL_DEADLINE_S)
        tree = _Tree(folder)
        _end_with_parent(signal.SIGTERM)
        if os.getppid() != keeper:  # killed before that
            return EXIT_SURVIVORS
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            env={**os.environ, "TMPDIR": folder.path},
            start_new_session=True,
            preexec_fn=lambda: _end_with_parent(signal.SIGKILL),
        )
        os.write(1, f"{child.pid} {folder.path}\n".encode())
        return tree.hold(child.pid, -child.pid, grace_s)
    finally:
        folder.remove()


def _end_with_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


class _Tree:
    """All descendants of this process, with their exit codes and their files in /dev/shm."""

    def __init__(self, folder: ClaimedFolder) -> None:
        self._folder = folder
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._stopped = False
        self._wakeup = self._wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._exits: dict[int, int] = {}
        self._shared_memory = SharedMemory()

    def hold(self, child: int, target: int, grace_s: float) -> int:
        """Wait until `child` ends, the leash is closed, or a signal arrives. Return the exit code of `child`.

        Then everything is stopped, `child` by SIGTERM to `target` first.
        """
        self._wait(lambda: self._has_ended(child) or self._stopped, leash=True)
        self._look()
        if not self._has_ended(child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGTERM)
            self._wait(lambda: self._has_ended(child), timeout_s=grace_s)
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while survivors := self._look():
            for pid in survivors:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                print(f"supervisor: cannot kill {survivors}", file=sys.stderr)  # noqa: T201
                self._shared_memory.unlink(self._folder.noted())
                self._folder.leave()
                return EXIT_SURVIVORS
            self._wait(lambda: False, timeout_s=_KILL_ROUND_S)
            self._reap()
        self._shared_memory.unlink(self._folder.noted())
        return self._exits[child] if self._has_ended(child) else EXIT_SURVIVORS

    def _look(self) -> list[int]:
        """Record the tree's files in /dev/shm. Return the live processes."""
        alive = _descendants(os.getpid())
        if made := self._shared_memory.look(alive):
            self._folder.note(made)
        return alive

    def _has_ended(self, child: int) -> bool:
        self._reap()
        return child in self._exits

    def _reap(self) -> None:
        """Collect the exit codes of all ended children, including adopted orphans."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                self._exits[ended[0]] = code if code >= 0 else 128 - code

    def _wake_on(self, *signals: signal.Signals) -> int:
        """Return a descriptor that becomes readable when one of `signals` has arrived."""

        def note(number: int, _frame: FrameType | None) -> None:
            self._stopped |= number != signal.SIGCHLD

        readable, writable = os.pipe()
        os.set_blocking(readable, False)
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, note)
        return readable

    def _wait(self, done: Callable[[], object], *, leash: bool = False, timeout_s: float | None = None) -> None:
        """Return when `done()` is true (checked after each signal), the leash is closed, or the time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        made = self._shared_memory.fd
        sources = [self._wakeup, *([_LEASH] if leash else []), *([] if made is None else [made])]
        while not done():
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = select.select(sources, [], [], left_s)[0]
            if made in ready:
                self._look()
                time.sleep(_LOOK_INTERVAL_S)
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
            if not ready or (_LEASH in ready and not os.read(_LEASH, 4096)):
                return


def _descendants(root: int) -> list[int]:
    """Return the pids of all descendants of `root`, without zombies. The tree may change: repeat until it is empty."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z" or int(fields[17]) > 1:  # the first thread has ended, others have not
                parents.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
