"""Cleans up after a Slurm task all of whose processes were killed at once: `prorl-trio-sweep`.

It is for srun's `--task-epilog`. With `proctrack/cgroup`, SIGKILL goes to everything in the control group of a step,
including daemonised processes, and so to the supervisor that would clean up. slurmstepd is outside of the group. It
runs this program afterwards, also outside of that group, for at most 5 s.

If only the task itself was killed, the supervisor is still cleaning up, and slurmstepd kills the rest of the group as
soon as this program returns. It therefore waits for the supervisor. If that takes too long, it returns, and a child
process continues to wait.

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
"""The folder on each machine that contains the tasks' folders, for tasks and for this program;
otherwise it is found."""
_VARIABLES: Final = ("SLURM_TMPDIR", "TMPDIR")
_USUAL: Final = ("/tmp", "/var/tmp", "/dev/shm")
_POLL_S: Final = 0.02
"""Polling interval in seconds, because waiting for a child has no time-out."""
_PATIENCE_S: Final = 4.0
"""Maximum seconds to delay slurmstepd for an active supervisor: its grace period, plus a second."""
_LONGEST_S: Final = 20.0
"""Maximum seconds to wait for a supervisor to end, whether or not slurmstepd kills it."""


_USAGE: Final = """\
Usage: prorl-trio-sweep

Remove what a Slurm task of `prorl-trio slurm` has left on this machine. The fleet's script names it as
srun's --task-epilog; it takes no arguments, and is not meant to be run by hand.
"""


def task_of(env: Mapping[str, str]) -> str:
    """Return the name of the task with this environment, unique among all tasks on a machine."""
    return ".".join(env.get(f"SLURM_{part}", "") for part in ("JOB_ID", "STEP_ID", "PROCID"))


def local_candidates(env: Mapping[str, str]) -> list[str]:
    """Return a task's candidate folders on its machine, best first: the configured one, or the usual ones."""
    if named := env.get(LOCAL_DIR_VARIABLE):
        return [named]
    return list(dict.fromkeys([*(env[name] for name in _VARIABLES if env.get(name)), *_USUAL]))


def main() -> None:
    """Wait until this task's supervisor has ended, then remove the remains of this task and of earlier ones."""
    if len(sys.argv) > 1:
        sys.stdout.write(_USAGE)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    begun = time.monotonic()
    child = os.fork()
    if not child:
        os.setsid()  # Slurm kills a slow script by its process group
        nothing = os.open(os.devnull, os.O_RDWR)
        for inherited in range(3):  # Slurm reads the script's output until it is closed
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
