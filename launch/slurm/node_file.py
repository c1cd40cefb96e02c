"""The node.toml of one task: that of the fleet, with what only the machine knows."""

from __future__ import annotations

import socket
import tomllib
from typing import TYPE_CHECKING, Any

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["address_of_machine", "node_config", "read_config"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def read_config(path: Path) -> dict[str, Any]:
    """Return the tables of a node.toml.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def node_config(common: Mapping[str, Any], *, fleet_dir: str, address: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration of the node of this task: `common`, the fleet, a name, an address and a free port.

    The name is that of the job and the machine's number in it: the same after a requeue, so that the node finds its
    ledger again. An address that `common` sets, other than the loopback's, stays.
    """
    listen = {"port": 0, **common.get("listen", {})}
    if listen.get("host", _LOOPBACK[0]) in _LOOPBACK:
        listen["host"] = address
    rest = dict(common.get("rest", {}))
    if rest.get("host", _LOOPBACK[0]) in _LOOPBACK:
        rest["host"] = address
    rest.setdefault("port", 0)
    node_id = f"slurm-{env.get('SLURM_JOB_ID', '0')}-{env.get('SLURM_NODEID', '0')}"
    return {
        "node_id": node_id,
        **common,
        "listen": listen,
        "rest": rest,
        "fleet": {**common.get("fleet", {}), "dir": fleet_dir},
    }


def address_of_machine(name: str) -> str:
    """Return the IPv4 address by which other machines know this one. Blocks, for the name service.

    Raises:
        ConfigError: the machine's own name has no address.
    """
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"the name of this machine, {name}, has no address ({error}); mend /etc/hosts or the name service"
        ) from error
