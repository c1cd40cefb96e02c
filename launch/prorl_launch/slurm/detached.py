"""Starts `prorl_launch.supervisor` where Slurm does not look: as a child of init, in a session of its own.

Run as a script by `prorl_launch.slurm.leash`: `python detached.py GRACE_S COMMAND...`. Standard library only. It forks
and ends; the child goes on. Standard input is the leash; standard output gets the supervisor's line (pid, temporary
folder), the exit code of the command in a second one, and is closed when nothing is left.

Why: without cgroups (`proctrack/linuxproc`) slurmstepd ends what it finds below its tasks. It would kill the supervisor
together with what that watches, and would not see what was handed to init meanwhile. This way the task holds nothing
but the leash, whoever kills it drops that, and the supervisor, which is the sub-reaper of all the rest, ends it in
order. With `proctrack/cgroup` all of it is in the cgroup of the step all the same: limits and accounting hold, and
slurmstepd kills all of it at once where it kills at all. Then `prorl_launch.slurm.sweep` clears up.
"""

from __future__ import annotations

import contextlib
import os
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from prorl_launch import supervisor
from prorl_launch.slurm.sweep import task_of

ENDED_VARIABLE = "PRORL_TASKS_ENDED"
"""The folder in which each task leaves a file, named by its number, when all that it ran has ended."""


def main(grace_s: float, command: list[str]) -> None:
    """Fork; in the child, run `command` on the leash and write its exit code. Does not return: the process ends."""
    if os.fork():
        os._exit(0)
    os.setsid()
    keeper = os.getpid()
    code = supervisor.main(grace_s, command, task_of(os.environ))
    if os.getpid() == keeper:  # else this is the supervisor's second process
        _tell(code)
    sys.exit(code)


def _tell(code: int) -> None:
    """Say that nothing is left: to the task, which may be dead, and to the pulse of the job, if it has one."""
    with contextlib.suppress(OSError):
        os.write(1, f"{code}\n".encode())
    if folder := os.environ.get(ENDED_VARIABLE):
        with contextlib.suppress(OSError), open(os.path.join(folder, os.environ.get("SLURM_PROCID", "0")), "x"):
            pass


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
