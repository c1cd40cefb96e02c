"""The folder of a fleet as Slurm's commands use it: the job in `slurm/`, beside the entries that the nodes write."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from prorl_trio.rendezvous.folder import claim_folder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["open_fleet_folder", "read_job", "write_job"]

_OURS: Final = "slurm"
_JOB: Final = "job_id"


def open_fleet_folder(folder: Path) -> Path:
    """Make the folder of a fleet, for its user alone, and return that of our files in it.

    Raises:
        ConfigError: it cannot be made, or others can enter it.
    """
    files = claim_folder(folder) / _OURS
    files.mkdir(mode=0o700, exist_ok=True)
    return files


def write_job(folder: Path, job_id: str) -> None:
    """Note, whole or not at all, which job the fleet is."""
    draft = folder / _OURS / f".{_JOB}"
    draft.write_text(job_id, encoding="ascii")
    os.replace(draft, folder / _OURS / _JOB)


def read_job(folder: Path) -> str:
    """Return the job that the fleet is, empty if there was none yet."""
    try:
        return (folder / _OURS / _JOB).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
