"""The Slurm commands that a fleet needs. All functions block; use them in a command, not in a node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_launch.slurm.environment import asking, submitting
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TIMEOUT_S: Final = 60.0
_FORMAT: Final = "%A|%T|%N|%L|%r"


class SlurmFailed(ConfigError):
    """A Slurm command failed, with its output. slurmctld may be busy, and execute it later."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job in Slurm's queue: `left` is its remaining time, and `reason` why it waits, both in Slurm's notation."""

    job_id: str
    state: str
    machines: str
    left: str
    reason: str


def submit(script: Path, groups: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Submit a batch script. Return the job id and sbatch's output. With `--test-only` the id is empty.

    The options of a job with one group are also on the command line, because the user's environment (`SBATCH_PARTITION`
    and so on) overrides the script's. For several groups see `check_options`.

    Args:
        script: the script, with these options in it.
        groups: the options of each group of the job.

    Raises:
        SlurmFailed: Slurm refuses it.
    """
    options = groups[0] if len(groups) == 1 else []
    done = _done(["sbatch", "--parsable", *options, str(script)], submitting(os.environ))
    said = f"{done.stdout}{done.stderr}".strip()
    if "--test-only" in groups[0]:
        return "", said
    found = re.match(r"\d+", done.stdout)
    if found is None:
        raise ConfigError(f"sbatch has not told the id of a job, but {said!r}")
    return found[0], said


def submitted_as(script: Path) -> str:
    """Return the id of the live job that was submitted with this script; empty if there is none.

    An sbatch that failed or was killed may still have submitted it, if slurmctld answered late.
    """
    rows = [line.partition("|") for line in _queue("%A|%o").splitlines()]
    return min((job_id for job_id, _, command in rows if command == str(script)), key=int, default="")


def find_jobs(job_ids: Sequence[str]) -> list[Job]:
    """Return the given jobs that Slurm still knows and that have not ended."""
    rows = [line.split("|", 4) for line in _queue(_FORMAT).splitlines()]
    jobs = [Job(job_id=row[0], state=row[1], machines=row[2], left=row[3], reason=row[4]) for row in rows]
    return [job for job in jobs if job.job_id in job_ids]


def live(job_ids: Sequence[str]) -> set[str]:
    """Return the ids of the given jobs that have not ended."""
    return {job.job_id for job in find_jobs(job_ids)}


def drain(job_id: str) -> None:
    """Send SIGTERM to the batch script of a job, as Slurm's warning before the time limit does.

    The script then drains its tasks. A second signal has no effect.
    """
    _run(["scancel", "--batch", "--signal=TERM", job_id])


def cancel(job_id: str) -> None:
    """Cancel a job: SIGTERM to its tasks, and SIGKILL after the cluster's KillWait."""
    _run(["scancel", job_id])


def _queue(format_: str) -> str:
    return _run(["squeue", "--noheader", "--all", "--me", f"--format={format_}"])


def _run(command: list[str]) -> str:
    return _done(command, asking(os.environ)).stdout.strip()


def _done(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no {command[0]} here: this takes a machine on which Slurm's commands are installed"
        )
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmFailed(f"{command[0]} has not answered within {TIMEOUT_S:g} s: does slurmctld run?") from error
    if done.returncode != 0:
        raise SlurmFailed(f"{command[0]} failed with exit code {done.returncode}: {done.stderr.strip()}")
    return done
