"""The locks: the exact wheels and SHA-256 hashes for each environment of set-up. Standard library only.

`NAME.txt` in this folder is a pip requirements file, made by `python -m prorl_launch.relock` (`make lock`). It covers
all listed Python versions on Linux on x86-64. It names no package index: pip downloads from the configured index and
refuses files with other hashes. A Python or machine without a lock gets versions in the ranges of `pyproject.toml`.
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

LockName = Literal[
    "dev", "engine-cpu", "engine-gpu", "model", "nemo-gym", "train-cpu", "train-gpu", "uv", "verl-cpu", "verl-gpu"
]

WHEELS_ONLY = ("--only-binary", ":all:")
"""Nothing is compiled: if a wheel is missing for this machine, pip fails immediately."""

MACHINE = ("Linux", "x86_64")


def lock_path(name: LockName) -> Path:
    """Return the path of this environment's lock."""
    return Path(__file__).with_name(f"{name}.txt")


def agent_lock(name: str, index: Literal["npm", "pypi"]) -> Path:
    """Return the path of an agent's lock: for npm a `package-lock.json`, otherwise in pip's format."""
    return Path(__file__).parent / "agents" / f"{name}.{'json' if index == 'npm' else 'txt'}"


def is_made_for(lock: str, requirements: Sequence[str]) -> bool:
    """Return whether the text of a lock was made for these requirements."""
    return _header(lock, "requirements") == requirements_key(requirements)


def requirements_key(requirements: Sequence[str]) -> str:
    """Return a key of the requirements in any order, as in the header of their lock.

    The order of a package's bounds does not matter either, because a wheel's metadata sorts them.
    """
    lines = sorted(name + ",".join(sorted(bounds.split(","))) for name, bounds in map(_split, requirements))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def serves(lock: str, version: tuple[int, int], machine: tuple[str, str]) -> bool:
    """Return whether the text of a lock applies to this Python on this machine."""
    return machine == MACHINE and ".".join(map(str, version)) in _header(lock, "python").split()


def locked_pip(name: LockName, requirements: Sequence[str]) -> list[str]:
    """Return arguments for Python that install `requirements` from the lock `name`, wheels only, without resolving.

    Modules are not compiled, because pip would compile them all on one core. If the lock does not cover this Python
    or machine, a message is printed, and the arguments install the newest versions allowed by `requirements`.

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
