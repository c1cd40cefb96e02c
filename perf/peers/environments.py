"""The peers, what each needs, and the virtual environments that `python -m perf.peers setup` makes."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE = 1
COMPLETE = ".complete"
INSTALL_TIMEOUT_S = 1_200.0
PROBE_TIMEOUT_S = 20.0
ERROR_LINES = 5


class PeerUnavailable(Exception):
    """A peer cannot be had, or failed; the message is what the report says."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A peer.

    Attributes:
        name: of its environment, and of what `worker.py` does in it.
        title: for people.
        requirements: pinned, so that figures of different days tell of the same thing.
        python: the least version its packages take.
        programs: what must be on PATH besides.
        clean_up: what ends processes that a killed peer leaves, in its environment variables.
    """

    name: str
    title: str
    requirements: tuple[str, ...]
    python: tuple[int, int] = (3, 11)
    programs: tuple[str, ...] = ()
    clean_up: tuple[str, ...] = ()

    def folder(self) -> Path:
        """Its virtual environment. Other requirements are another folder."""
        facts = [RECIPE, self.requirements, self.python]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
        return _cache_dir() / "peers" / f"{self.name}-{key}"


def _read_peers() -> dict[str, Peer]:
    table = Path(__file__).with_name("peers.toml").read_text()
    read = msgspec.toml.decode(table.replace("{ipython}", importlib.metadata.version("ipython")))
    return {peer.name: peer for peer in msgspec.convert(read["peer"], list[Peer])}


PEERS = _read_peers()


def peer_python(peer: Peer) -> Path:
    """The interpreter of its environment.

    Raises:
        PeerUnavailable: it was not set up, or a program it needs is missing.
    """
    for program in peer.programs:
        if shutil.which(program) is None:
            raise PeerUnavailable(f"{peer.title} needs the program {program}; install it")
    if not (peer.folder() / COMPLETE).exists():
        raise PeerUnavailable(f"{peer.title} is not installed; run: python -m perf.peers setup {peer.name}")
    return peer.folder() / "bin" / "python"


def install(peer: Peer) -> None:
    """Make its environment. At once when there is one; one process at a time. Blocks, for minutes.

    Raises:
        PeerUnavailable: there is no Python for it, or pip failed; what was made of it is removed.
    """
    with _exclusive(peer.folder().with_suffix(".lock")):
        folder = peer.folder()
        if (folder / COMPLETE).exists():
            return
        python = _find_python(peer)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _run([python, "-m", "venv", str(folder)], peer)
            _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *peer.requirements], peer)
            (folder / COMPLETE).touch()
        finally:
            if not (folder / COMPLETE).exists():
                shutil.rmtree(folder, ignore_errors=True)


def _run(argv: list[str], peer: Peer) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise PeerUnavailable(f"{peer.title}: {' '.join(argv)} took over {INSTALL_TIMEOUT_S:g} s") from exc
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-ERROR_LINES:])
        raise PeerUnavailable(f"{peer.title}: {' '.join(argv)} exited with code {done.returncode}:\n{said}")


def _find_python(peer: Peer) -> str:
    """This Python, or the first of those on PATH and of pyenv's that is new enough and does start."""
    least = ".".join(str(part) for part in peer.python)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    names = [f"python3.{minor}" for minor in range(peer.python[1], peer.python[1] + 3)]
    candidates = [sys.executable, *names, "python3", *sorted(str(path) for path in pyenv.glob("3.*/bin/python3"))]
    for candidate in candidates:
        if _is_at_least(candidate, peer.python):
            return candidate
    raise PeerUnavailable(f"{peer.title} needs Python {least} or newer, with venv: put python{least} on PATH")


def _is_at_least(python: str, version: tuple[int, int]) -> bool:
    check = f"import sys, venv, ensurepip; sys.exit(sys.version_info < {version!r})"
    try:
        done = subprocess.run([python, "-c", check], capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cache_dir() -> Path:
    """The user's cache folder of this project, as `launch` has it: what is on top imports nothing of its like."""
    if chosen := os.environ.get("PRORL_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "prorl-trio"
