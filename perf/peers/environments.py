"""The peers, their requirements, and the virtual environments that `python -m perf.peers setup` makes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from pathlib import Path

import msgspec

from prorl_launch.bundle import find_interpreter
from prorl_launch.progress import SetupError, run_step
from prorl_launch.venv import exclusive, run_pip
from prorl_trio.sandbox.cache import cache_dir

RECIPE = 1
COMPLETE = ".complete"


class PeerUnavailable(Exception):
    """A peer is unavailable, or failed. The message is printed in the report."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A peer.

    Attributes:
        name: the name of its environment, and of its part in `worker.py`.
        title: its title, for people.
        requirements: pinned, so that figures of different days are comparable.
        python: the minimum version for its packages.
        programs: further programs that must be on PATH.
        clean_up: a command that ends the processes of a killed peer, by its environment variables.
    """

    name: str
    title: str
    requirements: tuple[str, ...]
    python: tuple[int, int] = (3, 11)
    programs: tuple[str, ...] = ()
    clean_up: tuple[str, ...] = ()

    def folder(self) -> Path:
        """Return its virtual environment. It depends on the requirements."""
        facts = [RECIPE, self.requirements, self.python]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
        return cache_dir() / "peers" / f"{self.name}-{key}"


def _read_peers() -> dict[str, Peer]:
    table = Path(__file__).with_name("peers.toml").read_text()
    read = msgspec.toml.decode(table.replace("{ipython}", importlib.metadata.version("ipython")))
    return {peer.name: peer for peer in msgspec.convert(read["peer"], list[Peer])}


PEERS = _read_peers()


def peer_python(peer: Peer) -> Path:
    """Return the interpreter of its environment.

    Raises:
        PeerUnavailable: it was not set up, or a required program is missing.
    """
    for program in peer.programs:
        if shutil.which(program) is None:
            raise PeerUnavailable(f"{peer.title} needs the program {program}; install it")
    if not (peer.folder() / COMPLETE).exists():
        raise PeerUnavailable(f"{peer.title} is not installed; run: python -m perf.peers setup {peer.name}")
    return peer.folder() / "bin" / "python"


def install(peer: Peer) -> None:
    """Make its environment, one process at a time. An existing one is reused. Blocks for minutes.

    Raises:
        PeerUnavailable: a suitable Python is missing, or pip failed; the incomplete environment is removed.
    """
    folder = peer.folder()
    log_file, complete = folder.with_suffix(".log"), folder / COMPLETE
    with exclusive(folder.with_suffix(".lock")):
        if complete.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            python = str(find_interpreter(peer.python).program)
            run_step(peer.title, [python, "-m", "venv", str(folder)], log_file=log_file)
            run_pip(peer.title, str(folder / "bin" / "python"), ["install", *peer.requirements], log_file=log_file)
            complete.touch()
        except SetupError as exc:
            raise PeerUnavailable(f"{peer.title}: {exc}") from exc
        finally:
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)
