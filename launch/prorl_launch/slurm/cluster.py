"""Facts about this machine for `cluster.sh`: free ports, and whether networks can be created."""

from __future__ import annotations

import secrets
import socket
import subprocess
from pathlib import Path
from typing import Final

SCRIPT: Final = Path(__file__).with_name("cluster.sh")
_FIRST_PORT: Final = 20_000
_STEP: Final = 16
"""Maximum number of ports per cluster, and the distance between clusters. `cluster.sh` derives
network numbers from it."""
_CLUSTERS: Final = 500


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports, at most 16, for the controller and each machine."""
    if not 1 <= count <= _STEP:
        msg = f"a cluster has 1 to {_STEP} ports, not {count}"
        raise ValueError(msg)
    while True:
        first = _FIRST_PORT + _STEP * secrets.randbelow(_CLUSTERS)
        if all(map(_is_free, range(first, first + count))):
            return first


def has_networks() -> bool:
    """Return whether a pair of links can be created, with one end in another network."""
    name = f"prorl{secrets.token_hex(3)}"
    link = f"ip link add {name} type veth peer name eth0 netns {name}"
    command = f"ip netns add {name} && {link}; code=$?; ip netns del {name}; exit $code"
    return subprocess.run(["sh", "-c", command], capture_output=True, check=False).returncode == 0


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True
