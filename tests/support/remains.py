"""Things that processes of one mark have left on this machine: processes, shared memory, files of a folder, mounts.

A sandbox has an empty environment and paths of its own, so no mark: it is known by what it has mounted.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from support.quiet_clock import POLL_S, QuietClock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MEMORY = Path("/dev/shm")
OURS = "prorl-"
"""A part of the names of all our folders."""
SLURM = ("slurmd", "slurmstepd", "munged")


def marked(mark: str) -> list[str]:
    """Return the processes with `mark` in their environment or arguments, zombies left out."""
    found = []
    for place in _processes():
        try:
            text = (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
            if mark.encode() in text and (place / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(_said(place))
        except OSError:
            continue
    return found


def inside(folders: Iterable[Path]) -> list[str]:
    """Return the processes that are in our folders in one of these, or name one, or have one mounted.

    Also those to which a folder of these is mounted elsewhere, as each machine of a cluster has its /tmp.
    """
    places = [(folder, _in_its_file_system(folder)) for folder in folders]
    found = []
    for process in _processes():
        try:
            mounts = (process / "mountinfo").read_text(errors="replace").splitlines()
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            words += f"\0{os.readlink(process / 'cwd')}/\0{os.readlink(process / 'root')}/"
        except OSError:
            continue
        fields = [line.split(" ")[3:5] for line in mounts]
        for folder, root in places:
            seen_as = {str(folder), *(where for what, where in fields if what == root)}
            if any(_has_ours(what, {root}) or _has_ours(where, seen_as) for what, where in fields):
                found.append(f"{_said(process)}, which has mounted something of {folder}")
            elif _has_ours(words, seen_as):
                found.append(f"{_said(process)}, which is in {folder}")
    return found


def in_networks(networks: Iterable[Path]) -> list[str]:
    """Return the processes in these network namespaces, given by their files, but Slurm's own."""
    inodes = {network.stat().st_ino for network in networks}
    found = []
    for place in _processes():
        try:
            if (place / "ns/net").stat().st_ino in inodes and not (place / "comm").read_text().startswith(SLURM):
                found.append(_said(place))
        except OSError:
            continue
    return found


def segments(mark: str) -> list[str]:
    """Return what is in /dev/shm of the programs of this mark."""
    return [str(path) for path in MEMORY.glob(f"{mark}-*")]


def remains(mark: str, folders: Iterable[Path], networks: Iterable[Path] = ()) -> list[str]:
    """Return what there is of a mark, below these folders and in these networks: the latter are to be all ours."""
    places = list(folders)
    left = marked(mark) + segments(mark) + inside(places) + in_networks(networks)
    return left + [str(path) for place in places for path in place.glob(f"*{OURS}*")]


def left_after(
    mark: str, folders: Iterable[Path], timeout_s: float, networks: Iterable[Path] = ()
) -> tuple[list[str], float]:
    """Wait until nothing is left; return what is left all the same after `timeout_s`, and how long it took.

    Both are seconds of a quiet machine.
    """
    clock = QuietClock()
    places, nets = list(folders), list(networks)
    while True:
        left = remains(mark, places, nets)
        took_s = clock.seconds()
        if not left or took_s > timeout_s:
            return left, took_s
        time.sleep(POLL_S)


def _processes() -> Iterator[Path]:
    return (Path("/proc", entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())


def _said(place: Path) -> str:
    return f"{place.name} {(place / 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')[:200]}"


def _in_its_file_system(folder: Path) -> str:
    """Return the path as /proc/PID/mountinfo has it of what is mounted: below the root of its file system."""
    mount = next(parent for parent in (folder, *folder.parents) if parent.is_mount())
    return f"/{folder.relative_to(mount)}"


def _has_ours(text: str, folders: Iterable[str]) -> bool:
    return any(re.search(rf"{re.escape(folder)}/[^/\s\0]*{OURS}", text) for folder in folders)
