"""The folder of a fleet as Slurm's commands use it: the job in `slurm/`, beside the entries that the nodes write."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["open_fleet_folder", "read_job", "read_nodes", "write_job"]

_OURS: Final = "slurm"
_JOB: Final = "job_id"
_SECRET: Final = "token"


def open_fleet_folder(folder: Path) -> Path:
    """Make the folder of a fleet, for its user alone, and return that of our files in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = folder / _OURS
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


def read_nodes(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of the fleet's nodes, without their tokens. One that is no JSON is left out."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError):
            continue
        found.append({name: value for name, value in entry.items() if name != _SECRET})
    return found
