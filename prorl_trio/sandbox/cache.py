"""The folder of large reproducible files. Standard library only: it is read before `.venv` exists."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the user's cache folder of this project, without creating it.

    `PRORL_CACHE_DIR` if set; else `prorl-trio` in `XDG_CACHE_HOME` (ignored when relative, as its specification asks);
    else `~/.cache/prorl-trio`.

    Raises:
        FileNotFoundError: it is below the home folder, which the user lacks, as a container's user may.
    """
    try:
        if chosen := os.environ.get("PRORL_CACHE_DIR"):
            return Path(chosen).expanduser().absolute()
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "prorl-trio"
    except RuntimeError as exc:
        why = "this user has no home folder; set PRORL_CACHE_DIR to a folder for the cache"
        raise FileNotFoundError(errno.ENOENT, why, "~") from exc
