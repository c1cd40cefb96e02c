"""The folder of a fleet as Slurm's commands use it: the job in `slurm/`, beside the entries that the nodes write."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.rendezvous.folder import claim_folder
from prorl_trio.rendezvous.watch import FleetWatch

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NodeReport", "look_at_nodes", "open_fleet_folder", "read_job", "write_job"]

_OURS: Final = "slurm"
_JOB: Final = "job_id"
_SECRET: Final = "token"


class NodeReport(msgspec.Struct, frozen=True):
    """The nodes of a fleet, as a user may see them.

    Attributes:
        nodes: the entry of each by its name, without its token, and with `life` and `age_s` as in `FoundNode`.
        broken: why files of the folder were left out, by their path.
    """

    nodes: dict[str, dict[str, Any]]
    broken: dict[str, str]


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


def look_at_nodes(folder: Path) -> NodeReport:
    """Return the nodes with an entry in the folder. Blocks on the disk.

    Raises:
        ConfigError: the folder is missing, or others can enter it.
    """
    view = FleetWatch(folder).read()
    nodes: dict[str, dict[str, Any]] = {}
    for name, found in view.nodes.items():
        entry = msgspec.to_builtins(found.entry)
        shown = {field: value for field, value in entry.items() if field != _SECRET}
        nodes[name] = {**shown, "life": found.life, "age_s": round(found.age_s, 1)}
    return NodeReport(nodes, view.broken)
