"""Starts a command under `prorl_launch.supervisor` and owns its whole process tree.

No other code starts or stops it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from prorl_launch import supervisor
from prorl_trio.types.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

_START_TIMEOUT_S = 10.0
_STOP_MARGIN_S = 4.0
_KILL_TIMEOUT_S = 1.0
_KILL_ROUND_S = 0.02
_REPORT_READ_BYTES = 4096


class Supervised:
    """A running command. `pid` leads its process group and session; 0 if the command could not be executed."""

    def __init__(self, pid: int, supervisor_process: trio.Process) -> None:
        self.pid = pid
        self._supervisor = supervisor_process

    async def wait(self) -> int:
        """Wait until the command has ended and its tree is empty. Return its exit code, 128 + n for signal n."""
        return await self._supervisor.wait()


@asynccontextmanager
async def open_supervised(
    command: Sequence[str], *, env: Mapping[str, str], log_file: Path, grace_s: float
) -> AsyncIterator[Supervised]:
    """Run `command` in its own session, with a private temporary folder. Stop its whole tree on leaving.

    When the block is left, whether by return, error or cancellation, the tree is gone: SIGTERM to the group, `grace_s`
    seconds, SIGKILL to all. Its files in /dev/shm are removed as well. Leaving takes at most `grace_s` + 6 s. If this
    process is killed, the tree ends within `grace_s` + 2 s.

    Args:
        command: the command to execute.
        env: its whole environment; `TMPDIR` is replaced.
        log_file: its output and error are appended here. The folder must exist.
        grace_s: seconds between SIGTERM and SIGKILL.

    Raises:
        InternalError: a process of the tree could not be killed (names it), or the supervisor hangs.
    """
    argv = [sys.executable, "-I", "-S", supervisor.__file__, str(grace_s), *command]
    log = await trio.to_thread.run_sync(lambda: log_file.open("ab"))
    with log:
        process = await trio.lowlevel.open_process(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=dict(env), start_new_session=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    pid, folder = 0, ""
    try:
        pid, folder = await _read_report(process.stdout)
        yield Supervised(pid, process)
    finally:
        with trio.move_on_after(grace_s + _STOP_MARGIN_S, shield=True):
            try:
                await process.stdin.aclose()  # drops the leash
                while await process.stdout.receive_some():  # closes when the supervisor's last process has ended
                    pass
                await process.wait()
            finally:
                await trio.aclose_forcefully(process.stdout)
        if process.returncode is None or process.returncode in (-signal.SIGKILL, supervisor.EXIT_SURVIVORS):
            with trio.move_on_after(2 * _KILL_TIMEOUT_S, shield=True):
                await _kill(process, pid)
                if folder:
                    await trio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))


async def _read_report(stdout: trio.abc.ReceiveStream) -> tuple[int, str]:
    """Return the command's pid and temporary folder; 0 and empty if the supervisor ended without having started it."""
    report = b""
    with trio.move_on_after(_START_TIMEOUT_S):
        while True:
            chunk = await stdout.receive_some(_REPORT_READ_BYTES)
            report += chunk
            if not chunk or report.endswith(b"\n"):
                break
        pid, _, folder = report.decode().rstrip("\n").partition(" ")
        return int(pid or 0), folder
    raise InternalError(f"the supervisor has not started its command within {_START_TIMEOUT_S:g} s")


async def _kill(process: trio.Process, session: int) -> None:
    """Kill a stuck or killed supervisor and all members of the command's session."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    sessions = {process.pid, session} - {0}
    deadline = trio.current_time() + _KILL_TIMEOUT_S
    while members := _session_members(sessions):
        if trio.current_time() > deadline:
            raise InternalError(f"processes {members} of sessions {sorted(sessions)} survived SIGKILL")
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await trio.sleep(_KILL_ROUND_S)


def _session_members(sessions: set[int]) -> list[int]:
    """Return the pids in these sessions, without zombies."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit():
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if int(fields[3]) in sessions and (fields[0] != b"Z" or int(fields[17]) > 1):
                    found.append(int(entry))
    return found
