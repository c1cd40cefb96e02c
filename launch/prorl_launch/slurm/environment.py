"""The environments in which Slurm's commands run: a user's own settings for them must not change what they tell us."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILTERS: Final = ("SQUEUE_", "SCANCEL_")
"""Beginnings of the names of variables by which squeue and scancel leave jobs out, or ask back."""
_OUTER_JOB: Final = "SLURM_JOB_ID"
_KEPT: Final = frozenset({"SLURM_CONF", "SLURM_JWT"})
"""Variables by which slurmctld is reached: they are no job's."""


def asking(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that filter what squeue shows and what scancel ends."""
    return {name: value for name, value in env.items() if not name.startswith(_FILTERS)}


def submitting(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without what belongs to the job in which we may run, for sbatch hands all of it to the new one.

    Slurm overwrites only what it sets: the new job would count the restarts of the other one, and its srun would take
    that one's sizes.
    """
    if _OUTER_JOB not in env:
        return dict(env)
    return {name: value for name, value in env.items() if name in _KEPT or not name.startswith(("SLURM_", "SLURMD_"))}
