"""The pulse of a job: lines that srun hands to all its tasks, for as long as Slurm says that the job runs.

A task hears by it of what Slurm cannot tell it: its machine is cut off; srun or the batch script was killed; slurmd
died, so that Slurm gave the machine up and started the job elsewhere. One process a job asks slurmctld, whatever its
size.
"""

from __future__ import annotations

import os
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["JobRun", "ask_slurmctld", "beat", "is_over"]

_LIVE_STATES: Final = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)
_QUERY_TIMEOUT_S: Final = 30.0
_STDOUT: Final = 1


class JobRun(msgspec.Struct, frozen=True):
    """A job, and how often it has been started again."""

    job_id: str
    restarts: int


def is_over(run: JobRun, listed: str) -> bool:
    """Return whether `listed`, lines of `JOB|STATE|RESTARTS`, says that this run of the job is over."""
    for line in listed.splitlines():
        job_id, state, restarts, *_ = (field.strip() for field in f"{line}||".split("|"))
        if job_id == run.job_id:
            return state not in _LIVE_STATES or restarts != str(run.restarts)
    return True


async def ask_slurmctld() -> str | None:
    """Return this user's jobs as `is_over` reads them; None if slurmctld does not answer."""
    command = ["squeue", "--noheader", "--me", "--states=all", "--Format=JobID:|,State:|,RestartCnt:|"]
    with trio.move_on_after(_QUERY_TIMEOUT_S):
        done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.DEVNULL, check=False)
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None
    return None


async def beat(
    run: JobRun,
    *,
    interval_s: float,
    query_interval_s: float,
    controller_timeout_s: float,
    ask: Callable[[], Awaitable[str | None]] = ask_slurmctld,
) -> str:
    """Write a line to standard output every `interval_s` seconds until the run is over; return why it ended.

    It ends as well when slurmctld does not answer for `controller_timeout_s` seconds, and when nobody reads any more.
    """
    why = ""

    async def until(ended: Callable[[], Awaitable[str]], scope: trio.CancelScope) -> None:
        nonlocal why
        why = await ended()
        scope.cancel(why)

    watch = partial(_watch, run, ask, query_interval_s, controller_timeout_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(until, watch, nursery.cancel_scope)
        nursery.start_soon(until, partial(_write, interval_s), nursery.cancel_scope)
    return why


async def _write(interval_s: float) -> str:
    async with trio.lowlevel.FdStream(os.dup(_STDOUT)) as stream:
        while True:
            try:
                await stream.send_all(b"\n")
            except trio.BrokenResourceError:
                return "srun has ended"
            await trio.sleep(interval_s)


async def _watch(
    run: JobRun, ask: Callable[[], Awaitable[str | None]], query_interval_s: float, controller_timeout_s: float
) -> str:
    answered_s = trio.current_time()
    while True:
        await trio.sleep(query_interval_s)
        listed = await ask()
        if listed is not None:
            answered_s = trio.current_time()
            if is_over(run, listed):
                return f"Slurm says that run {run.restarts} of job {run.job_id} is over"
        elif trio.current_time() - answered_s > controller_timeout_s:
            return f"slurmctld has not answered for {controller_timeout_s:g} s"
