"""Task sets built by a command on this machine: tasks mined from a package index."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from pathlib import Path

MINED_ROWS: Final = "tasks.jsonl"
"""The rows file of a mined set, in its folder."""
NAME: Final = re.compile(r"[\w.-]+")


def mined_set_folder(name: str) -> Path:
    """Return the folder of a mined task set in the cache folder, which is not visible to sandboxes.

    Does not create it.
    """
    return cache_dir() / "task-sets" / name


def is_mined(name: str) -> bool:
    """Return whether a set of this name was mined on this machine. Blocks on the disk."""
    return NAME.fullmatch(name) is not None and (mined_set_folder(name) / MINED_ROWS).is_file()


def load_mined(name: str) -> list[TaskInstance]:
    """Return the tasks of a set that was mined on this machine. Blocks on the disk.

    Raises:
        ConfigError: it has not been built here; the message contains the command.
    """
    path = mined_set_folder(name) / MINED_ROWS
    try:
        return [msgspec.json.decode(line, type=TaskInstance) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        raise ConfigError(
            f"task set {name} is built on this machine, and {path} is not there; build it, in about half an hour: "
            f"prorl-trio tasks mine {name}"
        ) from None
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path}: {exc}; write it again: prorl-trio tasks mine {name}") from exc


def load_sdist_swe() -> list[TaskInstance]:
    """Return the tasks of the set `sdist-swe`: changes between releases of small packages. See `load_mined`."""
    return load_mined("sdist-swe")
