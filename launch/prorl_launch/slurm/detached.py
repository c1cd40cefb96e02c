"""Starts `prorl_launch.supervisor` outside of Slurm's view: as a child of init, in its own session.

Run as a script by `prorl_launch.slurm.leash`: `python detached.py GRACE_S COMMAND...`. Standard library only. It forks
and exits; the child continues. Standard input is the leash. Standard output receives the supervisor's line (pid,
temporary folder), and the exit code of the command in a second line. It is closed when no process is left.

Without cgroups (`proctrack/linuxproc`), slurmstepd kills the descendants of its tasks. It would kill the supervisor
together with the supervised processes, and would miss processes already adopted by init. In this design the task holds
only the leash. Killing the task drops the leash, and the supervisor, the sub-reaper of all other processes, stops them
in order. With `proctrack/cgroup` all of them are still in the cgroup of the step: limits and accounting apply, and
slurmstepd kills all at once if it kills at all. Then `prorl_launch.slurm.sweep` cleans up.
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
"""The folder in which each task creates a file, named by its number, when all of its processes have ended."""


def main(grace_s: float, command: list[str]) -> None:
    """Fork. In the child, run `command` on the leash and write its exit code. Does not return: the process exits."""
    if os.fork():
        os._exit(0)
    os.setsid()
    keeper = os.getpid()
    code = supervisor.main(grace_s, command, task_of(os.environ))
    if os.getpid() == keeper:  # otherwise this is the supervisor's second process
        _tell(code)
    sys.exit(code)


def _tell(code: int) -> None:
    """Report that no process is left, to the task (which may be dead) and to the job's pulse, if any."""
    with contextlib.suppress(OSError):
        os.write(1, f"{code}\n".encode())
    if folder := os.environ.get(ENDED_VARIABLE):
        with contextlib.suppress(OSError), open(os.path.join(folder, os.environ.get("SLURM_PROCID", "0")), "x"):
            pass


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
