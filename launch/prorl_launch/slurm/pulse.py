"""The pulse of a job: lines that srun passes to all its tasks while Slurm reports that the job runs.

It covers cases in which Slurm cannot reach a task. The task's machine may be cut off, or given up because slurmd died.
srun or the batch script may have been killed, or the job restarted elsewhere. One process per job polls slurmctld,
regardless of the job's size. A line names the job's machines. From some point on it also contains `drain`. Each task
reacts to it once, even if it starts later.

In the other direction, tasks whose slurmstepd was killed cannot report their end to srun, which would wait for them
until the time limit. The processes of a task therefore leave a file when they have ended. When all tasks have, srun is
stopped.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_launch.slurm.detached import ENDED_VARIABLE
from prorl_launch.slurm.environment import asking

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

DRAIN: Final = "drain"
"""The second word of a line, after the machines: accept no more work, and stop when the running work is done."""

_LIVE_STATES: Final = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)
_ELSEWHERE: Final = "REVOKED"
"""State of copies of a job in the clusters of a federation that do not run it."""
_TIMES: Final = ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME")
_QUERY_TIMEOUT_S: Final = 30.0
_TASKS_END_S: Final = 6.0
"""Seconds for tasks to end by themselves, including their grace period. Then srun is killed, and Slurm kills them."""
_SRUN_END_S: Final = 3.0
"""Maximum seconds for srun to end after its tasks; then it is killed."""


class JobRun(msgspec.Struct, frozen=True):
    """A job, and its number of restarts."""

    job_id: str
    restarts: int


class PulseRules(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of a pulse, in seconds.

    Attributes:
        interval_s: between two lines to the tasks.
        query_s: between two queries to slurmctld, and two checks for ended tasks.
        controller_timeout_s: without an answer from slurmctld for this time, the job counts as over.
    """

    interval_s: float = 1.0
    query_s: float = 10.0
    controller_timeout_s: float = 300.0


def machines_of(run: JobRun, listed: str) -> str | None:
    """Return the machines of this run of the job, in Slurm's notation; None if it is over.

    `listed` has lines of `JOB|STATE|RESTARTS|MACHINES`.
    """
    for line in listed.splitlines():
        job_id, state, restarts, machines, *_ = (field.strip() for field in f"{line}||||".split("|"))
        if job_id == run.job_id and state != _ELSEWHERE:
            return machines if state in _LIVE_STATES and restarts == str(run.restarts) else None
    return None


async def ask_slurmctld() -> str | None:
    """Return this user's jobs of all partitions in the format of `machines_of`; None if slurmctld does not answer."""
    fields = "JobID:|,State:|,RestartCnt:|,NodeList:|"
    return await _output(["squeue", "--noheader", "--all", "--me", "--states=all", f"--Format={fields}"])


async def _names(machines: str) -> str:
    """Return `n[1-3]` as `n1,n2,n3`; empty if Slurm does not answer."""
    return ",".join((await _output(["scontrol", "show", "hostnames", machines]) or "").split()) if machines else ""


def seconds_of(time: str) -> str:
    """Convert a local time of Slurm, such as `2026-01-31T12:00:00`, to seconds since 1970; empty if unknown."""
    try:
        return str(int(datetime.fromisoformat(time.strip()).timestamp()))
    except ValueError:
        return ""


async def with_times(job_id: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with the job's start and end times, which Slurm itself sets since version 23.02.

    From both, a node knows the length of its allocation, independently of its machine's clock.
    """
    if all(name in env for name in _TIMES):
        await trio.lowlevel.checkpoint()
        return dict(env)
    said = await _output(["squeue", "--noheader", f"--jobs={job_id}", "--format=%S|%e"]) or ""
    first, _, _ = said.partition("\n")  # a heterogeneous job has a line for each of its groups
    asked = {name: seconds_of(time) for name, time in zip(_TIMES, first.split("|"), strict=False)}
    return {**{name: seconds for name, seconds in asked.items() if seconds}, **env}


async def _output(command: Sequence[str]) -> str | None:
    with trio.move_on_after(_QUERY_TIMEOUT_S), suppress(OSError):  # out of memory, or its disk is unavailable
        done = await trio.run_process(
            command, capture_stdout=True, stderr=subprocess.DEVNULL, check=False, env=asking(os.environ)
        )
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None
    return None


class Pulse:
    """The pulse of one srun.

    Args:
        run: the job run that it belongs to.
        rules: its intervals.
        ended: folder in which tasks record their end; created here, and removed at the end.
        tasks: the number of tasks.
        drain: a file whose creation drains the tasks; None: no draining.
        ask: replaces `ask_slurmctld`.
        name: replaces the query of Slurm for machine names.
    """

    def __init__(
        self,
        run: JobRun,
        rules: PulseRules,
        *,
        ended: Path,
        tasks: int,
        drain: Path | None = None,
        ask: Callable[[], Awaitable[str | None]] = ask_slurmctld,
        name: Callable[[str], Awaitable[str]] = _names,
    ) -> None:
        self._run = run
        self._rules = rules
        self._ended = ended
        self._tasks = tasks
        self._drain = drain
        self._ask = ask
        self._name = name
        self._machines = ""
        self._names = ""
        self._is_draining = False
        self._is_over = False
        """The tasks are no longer needed."""

    async def keep(self, command: Sequence[str], env: Mapping[str, str], *, again_after_s: float | None = None) -> int:
        """Run srun, `command`, with a pulse on its standard input. Return its exit code, 128 + n for signal n.

        It is stopped when the run is over, when all tasks have ended unnoticed by srun, when the parent (the batch
        script) has ended, and at SIGUSR1. The reason is printed on standard error. For the main thread only.

        With `again_after_s` it is restarted that many seconds after it ended, unless the run is over, the parent has
        ended, or SIGUSR1 arrived.
        """
        parent = os.pidfd_open(os.getppid())
        await trio.to_thread.run_sync(lambda: self._ended.mkdir(mode=0o700, parents=True, exist_ok=True))
        try:
            with trio.open_signal_receiver(signal.SIGUSR1) as asked:
                while True:
                    srun = await trio.lowlevel.open_process(
                        command, stdin=subprocess.PIPE, env={**env, ENDED_VARIABLE: str(self._ended)}
                    )
                    code = await self._keep_srun(srun, parent, asked)
                    if self._is_over or again_after_s is None:
                        break
                    _say(f"srun has ended with exit code {code}, and is started again")
                    await trio.sleep(again_after_s)
                    await trio.to_thread.run_sync(lambda: _empty(self._ended), abandon_on_cancel=True)
        finally:
            os.close(parent)
            with trio.move_on_after(_SRUN_END_S, shield=True):
                await trio.to_thread.run_sync(
                    lambda: shutil.rmtree(self._ended, ignore_errors=True), abandon_on_cancel=True
                )
        return code if code >= 0 else 128 - code

    async def _keep_srun(self, srun: trio.Process, parent: int, asked: AsyncIterator[int]) -> int:
        assert srun.stdin is not None
        async with srun.stdin, trio.open_nursery() as nursery:
            nursery.start_soon(self._beat, srun.stdin)
            nursery.start_soon(self._watch_drain)
            nursery.start_soon(_end_when, self._wait_all_ended, srun, 0)
            for wait in (self.wait_over, lambda: _wait_parent(parent), lambda: _wait_asked(asked)):
                nursery.start_soon(_end_when, self._noted(wait), srun, _TASKS_END_S)
            code = await srun.wait()
            nursery.cancel_scope.cancel("srun has ended")
        return code

    def _noted(self, wait_verdict: Callable[[], Awaitable[str]]) -> Callable[[], Awaitable[str]]:
        async def wait() -> str:
            why = await wait_verdict()
            self._is_over = True
            return why

        return wait

    async def _beat(self, stdin: trio.abc.SendStream) -> None:
        while True:
            try:
                await stdin.send_all(f"{self._names}{f' {DRAIN}' if self._is_draining else ''}\n".encode())
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await trio.sleep_forever()  # srun ends, or is being stopped
            await trio.sleep(self._rules.interval_s)

    async def _watch_drain(self) -> None:
        while self._drain is not None and not self._is_draining:
            with suppress(OSError):  # the disk is unavailable
                self._is_draining = await trio.to_thread.run_sync(self._drain.exists, abandon_on_cancel=True)
            await trio.sleep(self._rules.interval_s)

    async def wait_over(self) -> str:
        """Wait until slurmctld reports that this run is over, or has not answered for too long. Return which.

        Use a `RunningClock` in the loop, so that time in which this job is suspended does not count.
        """
        unanswered_s = 0.0
        while True:
            asked_s = trio.current_time()
            listed = await self._ask()
            if listed is not None:
                unanswered_s = 0.0
                machines = machines_of(self._run, listed)
                if machines is None:
                    return f"Slurm says that run {self._run.restarts} of job {self._run.job_id} is over"
                if machines != self._machines:
                    self._machines = machines
                    self._names = await self._name(machines)
            elif unanswered_s > self._rules.controller_timeout_s:
                return f"slurmctld has not answered for {self._rules.controller_timeout_s:g} s"
            await trio.sleep(self._rules.query_s)
            unanswered_s += trio.current_time() - asked_s

    async def _wait_all_ended(self) -> str:
        ended = 0
        while ended < self._tasks:
            await trio.sleep(self._rules.query_s)
            with suppress(OSError):  # the disk is unavailable or the folder was removed: srun must notice by itself
                ended = len(await trio.to_thread.run_sync(os.listdir, self._ended, abandon_on_cancel=True))
        await trio.sleep(_SRUN_END_S)
        return f"all {self._tasks} tasks have ended, and srun has not heard of it"


async def _end_when(wait_verdict: Callable[[], Awaitable[str]], srun: trio.Process, patience_s: float) -> None:
    """After the verdict close srun's input, so that its tasks stop. Kill srun after `patience_s` seconds."""
    _say(await wait_verdict())
    assert srun.stdin is not None
    await srun.stdin.aclose()
    await trio.sleep(patience_s)
    srun.kill()


def _say(what: str) -> None:
    print(f"prorl-trio slurm pulse: {what}", file=sys.stderr)  # noqa: T201 - the job's log


def _empty(folder: Path) -> None:
    """Remove the files in a folder. Ignore an unavailable disk."""
    with suppress(OSError):
        for file in folder.iterdir():
            file.unlink(missing_ok=True)


async def _wait_asked(asked: AsyncIterator[int]) -> str:
    await anext(asked)
    return "SIGUSR1: nobody needs these tasks any more"


async def _wait_parent(parent: int) -> str:
    await trio.lowlevel.wait_readable(parent)
    return "the batch script has ended"
