"""Simulations of several conditions at once, one to a processor."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from perf.harness import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["map_in_processes", "simulate_all"]

PR_SET_PDEATHSIG: Final = 1

ConditionsT = TypeVar("ConditionsT")
ResultT = TypeVar("ResultT")
NameT = TypeVar("NameT")


async def simulate_all(
    simulate: Callable[[ConditionsT], ResultT], conditions: Mapping[NameT, ConditionsT]
) -> dict[NameT, ResultT]:
    """Return what `simulate` makes of each of the conditions, by their names.

    Each runs in a process of its own, which has no loop yet. A cancel waits for those that run.
    """
    tell(f"{len(conditions)} simulated runs on {os.cpu_count()} processors")
    results = await trio.to_thread.run_sync(map_in_processes, simulate, conditions.values())
    return dict(zip(conditions, results, strict=True))


def map_in_processes(simulate: Callable[[ConditionsT], ResultT], conditions: Iterable[ConditionsT]) -> list[ResultT]:
    """Return what `simulate` makes of each of the conditions, in their order. Blocks.

    The processes end with this one, however it ends.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, _end_with_parent, (os.getpid(),)) as processes:
        return list(processes.map(simulate, conditions))


def _end_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process with the thread that started it: the pool's waits for work for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it has ended before that
        os._exit(1)
