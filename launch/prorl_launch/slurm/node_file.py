"""The node.toml of one task: the fleet's, with facts that only the machine knows."""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_trio.config import ListenConfig, head_tables, listening_at
from prorl_trio.config.secrets import TOKEN_VARIABLE, agreed_token
from prorl_trio.edges.tcp import load_tls
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def read_config(path: Path) -> dict[str, Any]:
    """Return the tables of a node.toml.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def check_secrets(common: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    """Check the token and the TLS files in a node.toml, if they are on this machine.

    Return whether it names a token. Blocks on the disk.

    Raises:
        ConfigError: a file cannot be used, others can read it, or `PRORL_TOKEN` is another token.
    """
    try:
        listen = msgspec.convert(common.get("listen", {}), ListenConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"listen: {error}") from error
    named = bool(listen.token or listen.token_file)
    files = [name for name in (listen.token_file, listen.tls_cert, listen.tls_key) if name]
    if all(os.path.exists(name) for name in files):
        agreed_token(listen, env.get(TOKEN_VARIABLE, ""))
        load_tls(listen)
    return named


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that only a machine, or its task, knows.

    Attributes:
        fleet_dir: the folder of the fleet, absolute.
        address: the address by which other machines reach this one.
        folder: a folder on the machine's own disk, removed when the task ends.
        engines: addresses of the node's engines, in addition to the engines in the fleet's node.toml.
        drain_s: the node's default of `drain_timeout_s`, unless the fleet's node.toml sets it; None: the usual default.
    """

    fleet_dir: str
    address: str
    folder: str
    engines: Sequence[str] = ()
    drain_s: float | None = None


def node_config(common: Mapping[str, Any], machine: MachineFacts, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration of this task's node: `common`, the fleet, a name, an address and a free port.

    The name consists of the job's name, or the `node_id` in `common`, and the machine's number in the job. It stays the
    same after a requeue. Settings in `common` for a single node on a machine or a shared disk (`listen.endpoint_file`,
    `listen.unix_socket`) are omitted. An address in `common` is kept unless it is a loopback address.

    The ledger ends with the task, because other nodes take over its jobs. It is kept if `common` has jobs wait for a
    node's next start (`fleet.restart_within_s`), or names a folder. In that folder each node has a subfolder with its
    name.
    """
    fleet = {**common.get("fleet", {}), "dir": machine.fleet_dir}
    name = common.get("node_id") or f"slurm-{env.get('SLURM_JOB_ID', '0')}"
    made = {
        **common,
        "node_id": f"{name}-{env.get('SLURM_NODEID', '0')}",
        "listen": {"port": 0, **listening_at(common, machine.address), "unix_socket": ""},
        "fleet": fleet,
    }
    if machine.drain_s is not None:
        made.setdefault("drain_timeout_s", machine.drain_s)
    ledger = common.get("ledger", {})
    if ledger.get("dir", "auto") not in ("", "auto"):
        made["ledger"] = {**ledger, "dir": f"{ledger['dir']}/{made['node_id']}"}
    elif not fleet.get("restart_within_s"):
        made["ledger"] = {"dir": f"{machine.folder}/ledger", **ledger}
    if machine.engines:
        backends = common.get("backends", {})
        made["backends"] = {**backends, "urls": [*backends.get("urls", []), *machine.engines]}
    return made


def head_config(common: Mapping[str, Any], own: Mapping[str, Any], machine: MachineFacts) -> dict[str, Any]:
    """Return the configuration of the fleet's head on this machine. See `head_tables`.

    By default, its ledger is in the fleet's folder, where its next start finds it on any machine.
    """
    tables = head_tables(common, own, fleet_dir=machine.fleet_dir, ledger=f"{machine.fleet_dir}/head")
    return {**tables, "listen": listening_at(tables, machine.address)}


def address_of_machine(name: str) -> str:
    """Return the IPv4 address by which other machines know this one. Blocks on the name service.

    Raises:
        ConfigError: the machine's own name lacks an address.
    """
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"the name of this machine, {name}, has no address ({error}); mend /etc/hosts or the name service"
        ) from error
