"""A backend, a node and a trainer, each a process, joined over loopback ports that stay the same."""

from __future__ import annotations

import secrets
import signal
import socket
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.testing.tiny_model import make_tiny_model
from support.soak.backend import TURN_S
from support.soak.daemons import SandboxDaemons
from support.soak.journal import JournalLength, read_entries
from support.soak.kept_process import KeptProcess, rig_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from support.soak.journal import Entry

_CONNECT_INTERVAL_S: Final = 0.05
_PACKAGE: Final = "support.soak"


class SoakWorld:
    """The three, running. `temp` is where their temporary files go, `url` and `token` reach the node, and `daemons` are
    those of the node's sandboxes."""

    def __init__(self, folder: Path, jobs: int, details_bytes: int, turn_s: float, config: dict[str, Any]) -> None:
        self.jobs = jobs
        self.temp = folder / "tmp"
        self.temp.mkdir()
        node_port, backend_port = _free_port(), _free_port()
        self.token = secrets.token_hex(16)
        self.url = f"ws://127.0.0.1:{node_port}"
        self._journal = folder / "journal"
        self._length = JournalLength(self._journal)
        node_toml = folder / "node.toml"
        model = folder / "model"
        make_tiny_model(model)
        everything = {
            "node_id": "soak",
            "model": {"path": str(model)},
            "listen": {"port": node_port, "token": self.token},
            "backends": {"urls": [f"http://127.0.0.1:{backend_port}"]},
            **config,
        }
        node_toml.write_bytes(msgspec.toml.encode(everything))
        env = rig_environment(TMPDIR=str(self.temp), XDG_STATE_HOME=str(folder / "state"))
        trainer_arguments = [self.url, self.token, str(self._journal), str(jobs), str(details_bytes)]

        def keep(name: str, arguments: list[str], before: Callable[[], Awaitable[None]]) -> KeptProcess:
            return KeptProcess(
                name, f"{_PACKAGE}.{name}", arguments, env=env, log=folder / f"{name}.log", before=before
            )

        # A node leaves a configured backend out that is down when it starts.
        backend_listens = partial(_wait_listening, backend_port)
        self.backend = keep("backend", [str(model), str(backend_port), str(turn_s)], trio.lowlevel.checkpoint)
        self.node = keep("node", [str(node_toml)], backend_listens)
        self.trainer = keep("trainer", trainer_arguments, trio.lowlevel.checkpoint)
        self.daemons = SandboxDaemons(self.node, self.trainer.done)

    def entries(self) -> list[Entry]:
        """What the trainer has taken so far. Blocking, short."""
        return read_entries(self._journal)

    def progress(self) -> int:
        """How many outcomes the trainer has taken so far. Blocking, short."""
        return self._length.look()


@asynccontextmanager
async def open_world(
    folder: Path, *, jobs: int, details_bytes: int = 0, turn_s: float = TURN_S, **config: Any
) -> AsyncIterator[SoakWorld]:
    """Start all three. On leaving, the node is told to end and does, and the others are killed.

    Args:
        folder: an empty one.
        jobs: how many the trainer submits.
        details_bytes: each of its outcomes has so many besides.
        turn_s: how long the backend takes for a turn, of which a job has two.
        config: sections of the node's configuration.

    Raises:
        RuntimeError: one of them ended by itself and not well.
    """
    world = SoakWorld(folder, jobs, details_bytes, turn_s, config)
    async with open_single_nursery() as nursery:
        nursery.start_soon(world.backend.run)
        nursery.start_soon(world.node.run)
        nursery.start_soon(world.trainer.run)
        yield world
        world.node.send_signal(signal.SIGTERM)
        await world.node.done.wait()
        nursery.cancel_scope.cancel()


async def _wait_listening(port: int) -> None:
    """Return when somebody listens. The caller sets the deadline."""
    while True:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
        except OSError:
            await trio.sleep(_CONNECT_INTERVAL_S)
        else:
            await stream.aclose()
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
