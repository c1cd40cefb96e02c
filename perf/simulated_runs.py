"""Simulations of several conditions at once, one to a processor."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import trio

from perf.harness import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["simulate_all"]

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
    results = await trio.to_thread.run_sync(_map, simulate, list(conditions.values()))
    return dict(zip(conditions, results, strict=True))


def _map(simulate: Callable[[ConditionsT], ResultT], conditions: list[ConditionsT]) -> list[ResultT]:
    spawn = multiprocessing.get_context("spawn")
    processes = ProcessPoolExecutor(max_workers=min(len(conditions), os.cpu_count() or 1), mp_context=spawn)
    with processes:
        return list(processes.map(simulate, conditions))
