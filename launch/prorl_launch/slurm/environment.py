"""The environments of Slurm's commands. A user's settings must not change the output that we parse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILTERS: Final = ("SQUEUE_", "SCANCEL_")
"""Prefixes of variables by which squeue and scancel omit jobs, or ask for confirmation."""
_OUTER_JOB: Final = "SLURM_JOB_ID"
_KEPT: Final = frozenset({"SLURM_CONF", "SLURM_JWT"})
"""Variables for reaching slurmctld. They do not belong to a job."""


def asking(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that filter the output of squeue and the jobs of scancel."""
    return {name: value for name, value in env.items() if not name.startswith(_FILTERS)}


def submitting(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables of a surrounding job, because sbatch passes all variables to the new job.

    Slurm overwrites only the variables that it sets. The new job would otherwise inherit the restart count of the other
    job, and its srun the sizes.
    """
    if _OUTER_JOB not in env:
        return dict(env)
    return {name: value for name, value in env.items() if name in _KEPT or not name.startswith(("SLURM_", "SLURMD_"))}
