"""The locks: for each environment that set-up makes, the exact wheels and their SHA-256. Standard library only.

`NAME.txt` beside this file is a requirements file of pip's, made by `python -m prorl_launch.relock` (`make lock`) for
all Pythons that it names, on Linux on x86-64. It names no package index: pip takes the files from wherever it is told
to, and refuses any that is another. A Python or machine without a lock gets what the ranges of `pyproject.toml` allow.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prorl_launch.progress import SetupError, say

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MACHINE",
    "WHEELS_ONLY",
    "LockName",
    "agent_lock",
    "is_made_for",
    "lock_path",
    "locked_pip",
    "requirements_key",
    "serves",
]

LockName = Literal["dev", "engine-cpu", "engine-gpu", "model", "train-cpu", "train-gpu", "uv", "verl-cpu", "verl-gpu"]

WHEELS_ONLY = ("--only-binary", ":all:")
"""Nothing is compiled: what has no wheel for this machine is an error of pip's, said at once."""

MACHINE = ("Linux", "x86_64")


def lock_path(name: LockName) -> Path:
    """Return the path of the lock of this environment."""
    return Path(__file__).with_name(f"{name}.txt")


def agent_lock(name: str, index: Literal["npm", "pypi"]) -> Path:
    """Return the path of the lock of an agent: of npm's (`package-lock.json`), or as the others are."""
    return Path(__file__).parent / "agents" / f"{name}.{'json' if index == 'npm' else 'txt'}"


def is_made_for(lock: str, requirements: Sequence[str]) -> bool:
    """Return whether the text of a lock is that of these requirements."""
    return _header(lock, "requirements") == requirements_key(requirements)


def requirements_key(requirements: Sequence[str]) -> str:
    """Equal for the same requirements in any order: what a lock was made for, as its header has it.

    Bounds of one package count in any order as well, since a wheel's metadata sorts them.
    """
    lines = sorted(name + ",".join(sorted(bounds.split(","))) for name, bounds in map(_split, requirements))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def serves(lock: str, version: tuple[int, int], machine: tuple[str, str]) -> bool:
    """Return whether the text of a lock is for this Python on this machine."""
    return machine == MACHINE and ".".join(map(str, version)) in _header(lock, "python").split()


def locked_pip(name: LockName, requirements: Sequence[str]) -> list[str]:
    """Arguments for Python that install `requirements` as the lock `name` has them, wheels only, resolving nothing.

    They leave modules uncompiled: pip would compile all of them, on one core. Where no lock is for this Python or
    machine, says so, and they install the newest that `requirements` allow.

    Raises:
        SetupError: the lock was made for other requirements.
    """
    pip = ["-m", "pip", "install", "--no-compile", *WHEELS_ONLY]
    lock = lock_path(name).read_text()
    version = sys.version_info[:2]
    machine = (platform.system(), platform.machine())
    if not serves(lock, version, machine):
        say(
            f"no lock of {name} for Python {version[0]}.{version[1]} on {' '.join(machine)} (there is one for "
            f"{_header(lock, 'python')} on {' '.join(MACHINE)}): taking the newest packages that fit"
        )
        return [*pip, *requirements]
    if not is_made_for(lock, requirements):
        raise SetupError(
            f"{lock_path(name)} was made for other requirements than there are now; in a checkout run: make lock"
        )
    return [*pip, "--no-deps", "--require-hashes", "--requirement", str(lock_path(name))]


def _split(requirement: str) -> tuple[str, str]:
    name = re.match(r"[\w.-]+(\[[^]]*\])?", requirement)
    end = name.end() if name else 0
    return requirement[:end], requirement[end:]


def _header(lock: str, field: str) -> str:
    found = re.search(rf"^# {field}: (.*)$", lock, re.MULTILINE)
    return found[1] if found else ""
