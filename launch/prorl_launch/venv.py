"""A virtual environment that is either complete or made again. Standard library only.

State is two files inside it. `.installing` exists from the first write to the last; renamed to `.complete`, it says for
which key the environment was made. An environment with a matching `.complete` is left alone; one with `.installing` was
interrupted, and pip may have left half a package, so it is emptied; any other is brought up to date in place.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prorl_launch.progress import SetupError, run_step, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_COMPLETE = ".complete"
_INSTALLING = ".installing"
_LOCK = ".lock"
_PIP_TIMEOUT_S = 60.0


def is_complete(folder: Path, key: str) -> bool:
    """Return whether `folder` is a finished environment made for `key`."""
    try:
        return (folder / _COMPLETE).read_text() == key
    except OSError:
        return False


@contextmanager
def exclusive(folder: Path) -> Iterator[int]:
    """Hold the lock of `folder`, made if missing; wait while another process, on any terminal, holds it.

    Yields the lock's descriptor. A child that inherits it keeps the lock until it ends as well, so that a set-up killed
    in the middle of pip is followed only when that pip has gone too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another set-up is at work in {folder}; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def install(
    folder: Path, key: str, steps: Sequence[tuple[str, Sequence[str]]], *, log_file: Path, hint: str = ""
) -> None:
    """Make `folder` the complete environment for `key`: create it where needed, then run each step with its Python.

    Does nothing if it is that already. Safe against a concurrent call and against being killed at any point.

    Args:
        folder: the environment. Anything else in there is removed if it has to be emptied.
        key: names what `steps` install.
        steps: pairs of a title and the arguments after `python`.
        log_file: gets all output.
        hint: what to do, said when a step fails.

    Raises:
        SetupError: this Python cannot make environments, or a step failed.
    """
    if is_complete(folder, key):
        return
    with exclusive(folder) as lock:
        if is_complete(folder, key):
            return
        fresh = (folder / _INSTALLING).exists() or not _is_usable(folder)
        (folder / _INSTALLING).write_text(key)
        (folder / _COMPLETE).unlink(missing_ok=True)
        if fresh:
            _empty(folder)
            _create(folder, log_file, lock)
        for title, arguments in steps:
            argv = [str(folder / "bin" / "python"), *arguments]
            run_step(f"{folder.name}: {title}", argv, log_file=log_file, hint=hint, keep_open=[lock])
        (folder / _INSTALLING).replace(folder / _COMPLETE)


def _is_usable(folder: Path) -> bool:
    """It has this version of Python, and a pip that was installed at this very path (scripts carry it)."""
    try:
        answer = subprocess.run(
            [folder / "bin" / "pip", "--version"], capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    version = f"(python {sys.version_info.major}.{sys.version_info.minor})"
    return f" from {folder.resolve()}{os.sep}" in answer.stdout and version in answer.stdout


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name in {_LOCK, _INSTALLING}:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _create(folder: Path, log_file: Path, lock: int) -> None:
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{sys.executable} (Python {version}) cannot make virtual environments: it lacks venv or ensurepip."
            f"\nOn Debian and Ubuntu: sudo apt-get install python{version}-venv    then run the same command again."
        )
    argv = [sys.executable, "-m", "venv", str(folder)]
    run_step(f"{folder.name}: new virtual environment", argv, log_file=log_file, keep_open=[lock])
