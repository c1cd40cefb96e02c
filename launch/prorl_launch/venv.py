"""A virtual environment that is either complete or rebuilt. Standard library only.

Its state is two files inside. `.installing` exists from the first write to the last. It is then renamed to `.complete`,
with the key for which the environment was made. An environment with a matching `.complete` is left unchanged. An
environment with `.installing` was interrupted and may contain partial packages, so it is emptied. Any other is updated
in place.

uv runs the steps of pip, in seconds instead of minutes. If uv fails, pip runs them. uv has its own environment in
the cache folder.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from prorl_launch import paths
from prorl_launch.locks import locked_pip
from prorl_launch.pip_config import index_options, pip_settings, uv_environment
from prorl_launch.progress import SetupError, run_step, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_COMPLETE = ".complete"
_INSTALLING = ".installing"
_LOCK = ".setup.lock"  # `.lock` in an environment is uv's
_PIP_TIMEOUT_S = 60.0
UV: Final = "uv==0.13.9"


def is_complete(folder: Path, key: str) -> bool:
    """Return whether `folder` is a finished environment made for `key`."""
    try:
        return (folder / _COMPLETE).read_text() == key
    except OSError:
        return False


@contextmanager
def exclusive(folder: Path) -> Iterator[int]:
    """Hold the lock of `folder`, created if missing. Wait while another process holds it.

    Yields the lock's descriptor. A child that inherits it also holds the lock until it ends. If set-up is killed during
    pip, the next one therefore waits for that pip's end.
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
    folder: Path,
    key: str,
    steps: Sequence[tuple[str, Sequence[str]]],
    *,
    log_file: Path,
    hint: str = "",
    by_uv: bool = True,
) -> None:
    """Turn `folder` into the complete environment for `key`: create it if needed, then run each step with its Python.

    Does nothing if it is complete. Safe against a concurrent call and against being killed at any point.

    Args:
        folder: the environment. If it has to be emptied, all its content is removed.
        key: identifies the result of `steps`.
        steps: pairs of a title and the arguments after `python`.
        log_file: the file for all output.
        hint: the remedy, printed when a step fails.
        by_uv: run the steps of pip (`-m pip install ...`) with uv.

    Raises:
        SetupError: this Python cannot create environments, or a step failed.
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
            python, title = str(folder / "bin" / "python"), f"{folder.name}: {title}"
            if by_uv and arguments[:2] == ["-m", "pip"]:
                run_pip(title, python, arguments[2:], log_file=log_file, hint=hint, keep_open=[lock])
            else:
                run_step(title, [python, *arguments], log_file=log_file, hint=hint, keep_open=[lock])
        (folder / _INSTALLING).replace(folder / _COMPLETE)


def run_pip(
    title: str,
    python: str,
    arguments: Sequence[str],
    *,
    log_file: Path,
    hint: str = "",
    keep_open: Sequence[int] = (),
    pip_of: str = "",
) -> None:
    """Run `pip ARGUMENTS`, an install or an uninstall, for `python`, by uv or by the pip of `pip_of` (`python`'s own).

    See `run_step`.

    Raises:
        SetupError: both uv and pip failed; the message is pip's.
    """
    if uv := _uv():
        cache = {"UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(paths.cache_dir() / "uv"))}
        try:
            settings = pip_settings(pip_of or python)
            options = index_options(settings) if arguments[0] == "install" else []
            argv = [str(uv), "pip", arguments[0], "--python", python, *options, *arguments[1:]]
            run_step(title, argv, log_file=log_file, keep_open=keep_open, variables=uv_environment(settings) | cache)
        except (SetupError, OSError, subprocess.TimeoutExpired):
            say(f"{title}: uv could not do it (see {log_file}); pip tries")
        else:
            return
    pip = [pip_of or python, "-m", "pip", "--python", python]
    run_step(title, [*pip, *arguments], log_file=log_file, hint=hint, keep_open=keep_open)


@functools.cache
def _uv() -> Path | None:
    """Return the path of uv, installed first if missing; None if it cannot be installed here."""
    folder = paths.cache_dir() / f"uv-{UV.rpartition('=')[2]}"
    try:
        install(
            folder,
            UV,
            [("uv", locked_pip("uv", [UV]))],
            log_file=paths.cache_dir() / "logs" / "setup-uv.log",
            by_uv=False,
        )
    except (SetupError, OSError) as error:
        say(f"without uv, so by pip, which is slower: {str(error).splitlines()[-1]}")
        return None
    return folder / "bin" / "uv"


def _is_usable(folder: Path) -> bool:
    """Return whether it has this version of Python, and a pip installed at this very path (scripts contain it)."""
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
