"""The processes of a benchmark: children that serve it, and the CPU time of each process."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.sandbox.reaper import descendants, stat_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from prorl_launch.supervised import Supervised

START_TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 20.0
MAX_LINE_BYTES: Final = 64 * 1024
KIB: Final = 1024
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
IDLE_FIELDS: Final = (3, 4)
"""Positions of idle time and disk wait in the first line of /proc/stat."""
PARENT_FIELD: Final = 1
TIME_FIELDS: Final = slice(11, 15)
"""Positions of a process's times in /proc/PID/stat, counted from the state."""

ReadyT = TypeVar("ReadyT")


# ---------------------------------------------------------------- CPU time


class ProcessTime(NamedTuple):
    """CPU seconds of living processes, and of the children that they have waited for."""

    own_s: float
    ended_s: float

    @property
    def all_s(self) -> float:
        return self.own_s + self.ended_s

    def since(self, before: ProcessTime) -> ProcessTime:
        return ProcessTime(self.own_s - before.own_s, self.ended_s - before.ended_s)


class MachineTime(msgspec.Struct, frozen=True):
    """Seconds of all processors since the machine's start: busy, and in total."""

    busy_s: float
    all_s: float

    def busy_share_since(self, before: MachineTime) -> float:
        return (self.busy_s - before.busy_s) / max(TICK_S, self.all_s - before.all_s)


def machine_time(stat: Path = Path("/proc/stat")) -> MachineTime:
    """Return the current times of all processors, to 10 ms. A host's time includes its guests'."""
    ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
    idle = sum(ticks[field] for field in IDLE_FIELDS)
    return MachineTime((sum(ticks) - idle) * TICK_S, sum(ticks) * TICK_S)


def parent_of(pid: int) -> int:
    """Return the parent of a process.

    Raises:
        ProcessLookupError: the process does not exist.
    """
    if (fields := stat_fields(pid)) is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return int(fields[PARENT_FIELD])


def process_time(pid: int) -> ProcessTime:
    """Return the CPU seconds of a process without its living children; 0 if it does not exist."""
    if (fields := stat_fields(pid)) is None:
        return ProcessTime(0.0, 0.0)
    user, system, ended_user, ended_system = (int(field) * TICK_S for field in fields[TIME_FIELDS])
    return ProcessTime(user + system, ended_user + ended_system)


def tree_time(root: int) -> ProcessTime:
    """Return the CPU seconds of a process and all its living descendants, to 10 ms each.

    The root must be the sub-reaper of its tree, or no process in the tree may be orphaned. Other orphans are missed.
    """
    times = [process_time(pid) for pid in (root, *(process.pid for process in descendants(root)))]
    return ProcessTime(sum(time.own_s for time in times), sum(time.ended_s for time in times))


def tree_cpu(root: int) -> tuple[float, float]:
    """Return the CPU seconds of a process, and of all processes that it started, ended ones included."""
    own_s = process_time(root).own_s
    return own_s, tree_time(root).all_s - own_s


# ---------------------------------------------------------------- children


class Child:
    """A running process, observed from outside."""

    def __init__(self, process: trio.Process | Supervised) -> None:
        self._pid = process.pid

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its threads, without children, to 10 ms."""
        return process_time(self._pid).own_s

    def rss_bytes(self) -> int:
        lines = Path("/proc", str(self._pid), "status").read_text().splitlines()
        return KIB * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


async def gets_ready(process: Supervised, ready: Callable[[], Awaitable[None]], timeout_s: float) -> bool:
    """Return whether `ready` returns before the process ends, and within `timeout_s`."""
    with trio.move_on_after(timeout_s) as patience:
        async with trio.open_nursery() as nursery:

            async def give_up() -> None:
                await process.wait()
                patience.cancel()

            nursery.start_soon(give_up)
            await ready()
            nursery.cancel_scope.cancel()
    return not patience.cancelled_caught


@asynccontextmanager
async def open_child(
    service: Callable[..., AbstractAsyncContextManager[Any]],
    *arguments: object,
    ready: type[ReadyT],
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> AsyncIterator[tuple[Child, ReadyT]]:
    """Enter `service(*arguments)` in a separate process. Yield the process and the service's value, a `ready`.

    The service ends with the block. It is a function of a module, and its arguments are plain values. `env` extends
    this process's environment.

    Raises:
        RuntimeError: it ended, or was not ready in time.
        subprocess.CalledProcessError: it failed.
    """
    module, name = sys.modules[service.__module__].__spec__, service.__name__  # also for the module of `python -m`
    assert module is not None
    argv = [sys.executable, "-m", __name__, module.name, name, msgspec.json.encode(arguments).decode()]
    async with open_single_nursery() as nursery:
        run = partial(
            trio.run_process, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(env or {})}
        )
        process: trio.Process = await nursery.start(run)
        assert process.stdin is not None
        assert process.stdout is not None
        async with process.stdin, process.stdout:  # trio's own ways to end a process do not close them
            yield Child(process), await _hear_ready(process.stdout, name, ready, timeout_s)
            await process.stdin.aclose()
            with trio.move_on_after(END_TIMEOUT_S):
                await process.wait()
            nursery.cancel_scope.cancel()


async def _hear_ready(stdout: trio.abc.ReceiveStream, name: str, ready: type[ReadyT], timeout_s: float) -> ReadyT:
    said = bytearray()
    with trio.move_on_after(timeout_s):
        while True:
            piece = await stdout.receive_some()
            said += piece
            if not piece or said.endswith(b"\n") or len(said) >= MAX_LINE_BYTES:
                break
    if not said.endswith(b"\n"):
        raise RuntimeError(f"{name} did not get ready within {timeout_s:g} s")
    return msgspec.json.decode(said, type=ready)


async def _serve(service: Callable[..., AbstractAsyncContextManager[Any]], arguments: list[Any]) -> None:
    """Run as the child: print the service's value on a line, and end with standard input."""
    raise_file_limit()
    async with service(*arguments) as ready:
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the system's maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    trio.run(_serve, getattr(importlib.import_module(sys.argv[1]), sys.argv[2]), msgspec.json.decode(sys.argv[3]))
