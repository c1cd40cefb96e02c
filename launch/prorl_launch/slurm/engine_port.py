"""The port of an engine: unique on its machine, and published to the engine's nodes in the fleet's folder.

Two fleets may have engines on one machine. A node that only knew a fixed port could use, pause and reload the other
fleet's engine. All functions block.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PORT_VARIABLE: Final = "PRORL_ENGINE_PORT"
"""The environment variable with the port for an engine's command."""
DEFAULT_PORT: Final = 8000
_FIRST_FREE: Final = 10_000
_FREE: Final = 20_000
"""Range of candidate ports, below the ephemeral ports of clients."""
_TRIES: Final = 100
_POLL_S: Final = 0.2


class EnginePort(msgspec.Struct, frozen=True, kw_only=True):
    """The port at which an engine will serve, or why there is none."""

    port: int = 0
    problem: str = ""


def take_port(asked: int) -> tuple[int, socket.socket]:
    """Reserve a port of this machine for an engine: `asked`, or a free port for 0. Return the port and its holder.

    Other engines of a fleet cannot reserve it until the holder is closed, here and in all processes that inherited it.
    The holder is a Unix socket in the abstract namespace. Like ports, this namespace belongs to the network, and it
    leaves no file.

    Raises:
        ConfigError: the port belongs to another program or engine.
    """
    if asked:
        holder = _take(asked)
        if holder is None:
            raise ConfigError(
                f"port {asked} of {socket.gethostname()} is in use, as by the engine of another fleet; take another by "
                f"--engine-port, or have a free one in ${PORT_VARIABLE}"
            )
        return asked, holder
    for _ in range(_TRIES):
        port = _FIRST_FREE + secrets.randbelow(_FREE)
        if (holder := _take(port)) is not None:
            return port, holder
    raise ConfigError(f"no free port for an engine was found on {socket.gethostname()} in {_TRIES} tries")


def tell_port(folder: Path, machine: str, told: EnginePort) -> None:
    """Publish the port of the engine on `machine`, atomically."""
    draft = folder / f".{machine}"
    draft.write_bytes(msgspec.json.encode(told))
    os.replace(draft, folder / machine)


def find_ports(folder: Path, machines: Sequence[str], timeout_s: float) -> dict[str, EnginePort]:
    """Wait until the engines of these machines have published their ports, and return them.

    Raises:
        ConfigError: a port was not published within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    found: dict[str, EnginePort] = {}
    while True:
        for machine in machines:
            with suppress(FileNotFoundError):
                found[machine] = msgspec.json.decode((folder / machine).read_bytes(), type=EnginePort)
        lacking = [machine for machine in machines if machine not in found]
        if not lacking:
            return found
        if time.monotonic() > deadline_s:
            raise ConfigError(f"after {timeout_s:g} s no engine has begun on {', '.join(lacking)}; see the job's log")
        time.sleep(_POLL_S)  # others write to a shared disk, which sends no notifications


def _take(port: int) -> socket.socket | None:
    """Return the port's holder if it could be reserved; None if it is taken."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0prorl-trio-engine-{port}")
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an engine that has ended
            trial.bind(("0.0.0.0", port))
            trial.listen(1)
    except OSError:
        holder.close()
        return None
    return holder
