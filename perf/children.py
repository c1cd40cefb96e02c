"""Processes a benchmark works with: each says a line of JSON when it is ready, and ends with its standard input."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import trio

from ipc.nursery import open_single_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

__all__ = ["Child", "open_child", "raise_file_limit", "say_ready"]

START_TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 20.0
MAX_LINE_BYTES: Final = 64 * 1024
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
KIB: Final = 1024

ReadyT = TypeVar("ReadyT")


class Child:
    """A running process, looked at from outside."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._proc = Path("/proc", str(process.pid))

    def cpu_s(self) -> float:
        """Seconds of CPU of all its threads, children not included, to 10 ms."""
        after_name = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) * TICK_S

    def rss_bytes(self) -> int:
        """Resident now."""
        return self._status("VmRSS") * KIB

    def _status(self, name: str) -> int:
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@asynccontextmanager
async def open_child(
    module: str, arguments: Sequence[str], ready_type: type[ReadyT], *, env: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Child, ReadyT]]:
    """Run `python -m MODULE ARGUMENTS` and yield it with what it said when it was ready. It ends with the block.

    `env` is added to this process's environment.

    Raises:
        RuntimeError: it did not get ready in time, or ended.
        subprocess.CalledProcessError: it failed.
    """
    argv = [sys.executable, "-m", module, *arguments]
    async with open_single_nursery() as nursery:
        run = partial(
            trio.run_process, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(env or {})}
        )
        process: trio.Process = await nursery.start(run)
        assert process.stdin is not None
        assert process.stdout is not None
        async with process.stdin, process.stdout:  # trio closes them with none of its ways to end a process
            yield Child(process), await _hear_ready(process.stdout, module, ready_type)
            await process.stdin.aclose()
            with trio.move_on_after(END_TIMEOUT_S):
                await process.wait()
            nursery.cancel_scope.cancel()


async def _hear_ready(stdout: trio.abc.ReceiveStream, module: str, ready_type: type[ReadyT]) -> ReadyT:
    said = bytearray()
    with trio.move_on_after(START_TIMEOUT_S):
        while True:
            piece = await stdout.receive_some()
            said += piece
            if not piece or said.endswith(b"\n") or len(said) >= MAX_LINE_BYTES:
                break
    if not said.endswith(b"\n"):
        raise RuntimeError(f"{module} did not get ready within {START_TIMEOUT_S:g} s")
    return msgspec.json.decode(said, type=ready_type)


def say_ready(ready: Any) -> None:
    """The child's side: one line."""
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()


def raise_file_limit() -> None:
    """Allow this process as many open files as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
