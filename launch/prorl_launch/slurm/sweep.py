"""Removes what a task of Slurm's has left all of whose processes were killed at once: `prorl-trio-sweep`.

It is for srun's `--task-epilog`. With `proctrack/cgroup`, SIGKILL goes to everything in the control group of a step,
also to what has daemonised, and so to the supervisor that would clear up. slurmstepd is not in there, and afterwards
runs this, outside of that group and for at most 5 s.

Where only the task itself was killed, the supervisor is at work meanwhile, and slurmstepd kills the rest of the group
as soon as we return. So we wait for it; and if that takes too long, we return, and a child of ours goes on to wait.

Standard library only, to be quick.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Final

from prorl_launch.abandoned import sweep, wait_left
from prorl_launch.shared_memory import unlink_unused

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCAL_DIR_VARIABLE: Final = "PRORL_LOCAL_DIR"
"""The folder on each machine below which tasks have theirs, for them and for us; else it is found."""
_VARIABLES: Final = ("SLURM_TMPDIR", "TMPDIR")
_USUAL: Final = ("/tmp", "/var/tmp", "/dev/shm")
_POLL_S: Final = 0.02
"""Time between two looks: to wait for a child has no time-out."""
_PATIENCE_S: Final = 4.0
"""Longest time to hold slurmstepd up for a supervisor that is at work: its grace, and a second."""
_LONGEST_S: Final = 20.0
"""Longest wait for a supervisor to end, killed by slurmstepd or not."""


_USAGE: Final = """\
Usage: prorl-trio-sweep

Remove what a Slurm task of `prorl-trio slurm` has left on this machine. The fleet's script names it as
srun's --task-epilog; it takes no arguments, and is not meant to be run by hand.
"""


def task_of(env: Mapping[str, str]) -> str:
    """Return the name of the task in whose environment this is, among all tasks that run on a machine."""
    return ".".join(env.get(f"SLURM_{part}", "") for part in ("JOB_ID", "STEP_ID", "PROCID"))


def local_candidates(env: Mapping[str, str]) -> list[str]:
    """Return the folders that a task may use on its machine, best first: the one that is named, or the usual ones."""
    if named := env.get(LOCAL_DIR_VARIABLE):
        return [named]
    return list(dict.fromkeys([*(env[name] for name in _VARIABLES if env.get(name)), *_USUAL]))


def main() -> None:
    """Wait until what supervises this task has ended, then remove what it, and others before it, have left."""
    if len(sys.argv) > 1:
        sys.stdout.write(_USAGE)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    begun = time.monotonic()
    child = os.fork()
    if not child:
        os.setsid()  # a script that Slurm takes for too slow is killed with its process group
        nothing = os.open(os.devnull, os.O_RDWR)
        for inherited in range(3):  # who reads what the script prints waits for its end
            os.dup2(nothing, inherited)
        _sweep(begun + _LONGEST_S)
    while child and not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < begun + _PATIENCE_S:
        time.sleep(_POLL_S)


def _sweep(deadline: float) -> None:
    places = local_candidates(os.environ)
    for place in places:
        wait_left(task_of(os.environ), place, deadline)
    for place in places:
        sweep(unlink_unused, place)
