"""A task on Slurm that runs a command, none of whose processes outlives the task, however it or its parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Self

import trio

from prorl_launch.slurm import detached
from prorl_launch.slurm.pulse import DRAIN
from prorl_trio.sandbox import reaper
from prorl_trio.types.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Container, Sequence
    from pathlib import Path

_PULSE = 0
"""The file descriptor of the pulse: standard input."""
_READ_BYTES = 4096
_END_MARGIN_S = 6.0
"""Seconds beyond the grace period that the supervisor may take to stop everything."""


async def run_leashed(
    command: Sequence[str],
    *,
    local_folder: Path,
    grace_s: float,
    pulse_timeout_s: float | None,
    ignore_term: bool = False,
) -> int:
    """Run `command` until it ends by itself. Return its exit code, 128 + n for signal n.

    SIGTERM and SIGINT are forwarded. The command is stopped (SIGTERM, `grace_s` seconds, SIGKILL to all its
    descendants) in three cases: this process is killed, its parent (slurmstepd) has ended, or no pulse arrived for
    `pulse_timeout_s` seconds. None disables the pulse. Whatever the end, no process, temporary folder or shared memory
    of the command is left. For the main thread only. Use a `RunningClock` in the loop, so that time in which Slurm has
    suspended the job does not count.

    Args:
        command: the command to execute. Its `TMPDIR` is a private folder in `local_folder`.
        local_folder: a folder on a disk of this machine, see `find_local_folder`.
        grace_s: seconds between SIGTERM and SIGKILL.
        pulse_timeout_s: maximum seconds between two lines on standard input. A line may name the machines of the job:
            if this machine is missing, the command is stopped as well. The first line with a drain request sends
            SIGTERM to the command.
        ignore_term: do not forward SIGTERM. The command is then stopped by the end of the pulse.

    Raises:
        InternalError: the supervisor was killed, or cannot stop all processes.
    """
    parent = os.pidfd_open(os.getppid())
    try:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with await _start(command, local_folder, grace_s) as tree, trio.open_nursery() as nursery:
                nursery.start_soon(_end_with, parent, tree)
                nursery.start_soon(tree.forward, signals, {signal.SIGTERM} if ignore_term else set())
                if pulse_timeout_s is not None:
                    nursery.start_soon(_follow_pulse, pulse_timeout_s, tree, ignore_term)
                code = await tree.wait()
                nursery.cancel_scope.cancel("the command has ended")
    finally:
        os.close(parent)
    return code


class _Tree:
    """The command and its descendants, and the leash of its supervisor."""

    def __init__(self, leash: trio.abc.SendStream, report: trio.abc.ReceiveStream, grace_s: float) -> None:
        self._leash = leash
        self._report = report
        self._grace_s = grace_s
        self._received = b""
        self._command: reaper.ProcessId | None = None

    async def __aenter__(self) -> Self:
        await self._read_line(0)
        pid = self._lines()[0].split(b" ")[0] if self._lines() else b""
        self._command = reaper.identify(int(pid)) if pid.isdigit() else None
        return self

    async def __aexit__(self, *_exc: object) -> None:
        with trio.move_on_after(self._grace_s + _END_MARGIN_S, shield=True):
            await self._leash.aclose()
            await self._read_line(1)
        await trio.aclose_forcefully(self._report)

    def _lines(self) -> list[bytes]:
        return self._received.split(b"\n")[:-1]

    async def _read_line(self, number: int) -> None:
        while len(self._lines()) <= number:
            chunk = await self._report.receive_some(_READ_BYTES)
            if not chunk:
                return
            self._received += chunk

    async def wait(self) -> int:
        """Wait until the tree is empty; return the command's exit code."""
        await self._read_line(1)
        if len(self._lines()) < 2:
            raise InternalError(f"the supervisor of {self._command} was killed; what it held has ended with it")
        return int(self._lines()[1])

    async def drop(self, why: str) -> None:
        """Have the supervisor stop everything."""
        print(f"prorl-trio slurm run: {why}: ending the command", file=sys.stderr)  # noqa: T201 - the task's log
        await self._leash.aclose()

    async def forward(self, signals: AsyncIterator[int], ignored: Container[int]) -> None:
        """Forward each of `signals` to the command, except the ignored ones."""
        async for number in signals:
            if number not in ignored:
                self.send(number)

    def send(self, number: int) -> None:
        if self._command is not None and reaper.is_alive(self._command):
            os.kill(self._command.pid, number)


async def _start(command: Sequence[str], local_folder: Path, grace_s: float) -> _Tree:
    argv = [sys.executable, "-I", "-S", detached.__file__, str(grace_s), *command]
    env = {**os.environ, "TMPDIR": str(local_folder)}
    process = await trio.lowlevel.open_process(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert process.stdin is not None
    assert process.stdout is not None
    await process.wait()  # the fork is no longer its child
    return _Tree(process.stdin, process.stdout, grace_s)


async def _end_with(parent: int, tree: _Tree) -> None:
    await trio.lowlevel.wait_readable(parent)
    await tree.drop("slurmstepd has ended")


async def _follow_pulse(timeout_s: float, tree: _Tree, ignore_drain: bool) -> None:
    """Drain at the first request, and stop the tree when the pulse ends or this machine leaves the job."""
    machine = os.environ.get("SLURMD_NODENAME", "")
    received, drains = b"", ignore_drain
    async with trio.lowlevel.FdStream(os.dup(_PULSE)) as stream:
        while True:
            chunk: bytes | None = None
            with trio.move_on_after(timeout_s):
                chunk = bytes(await stream.receive_some(_READ_BYTES))
            if not chunk:
                why = f"no pulse for {timeout_s:g} s" if chunk is None else "the pulse has ended"
                break
            *lines, received = (received + chunk).split(b"\n")
            machines, _, word = lines[-1].decode().partition(" ") if lines else ("", "", "")
            if _without(machine, machines):
                why = f"machine {machine} is no longer of the job"
                break
            if word == DRAIN and not drains:
                drains = True
                tree.send(signal.SIGTERM)
    await tree.drop(why)


def _without(machine: str, machines: str) -> bool:
    """Return whether a line of the pulse names the job's machines, and this machine is missing."""
    return bool(machine) and bool(machines) and machine not in machines.split(",")
