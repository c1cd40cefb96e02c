"""The folders and configurations of the nodes of a local fleet."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_launch.node import head_tables
from prorl_trio.config import load_config, load_head_config
from prorl_trio.config.secrets import TOKEN_VARIABLE, agreed_token
from prorl_trio.edges.tcp import load_tls
from prorl_trio.rendezvous.folder import HEAD, claim_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCAL: Final = "local"
"""The folder of ours in that of the fleet, beside the entries of the nodes."""


class NodeFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the fleet, and the folder with its node.toml, its log and its ledger.

    `has_token`: its node.toml names its token.
    """

    node_id: str
    path: Path
    has_token: bool = False

    @property
    def config_file(self) -> Path:
        """Return the node.toml that the node was, or will be, started with."""
        return self.path / "node.toml"

    @property
    def log_file(self) -> Path:
        """Return the file that gets the node's output."""
        return self.path / "node.log"


def node_tables(common: Mapping[str, Any], node: NodeFolder, fleet: Path) -> dict[str, Any]:
    """Return the configuration of one node: `common`, but for its name, its port, its fleet and its ledger's folder.

    A ledger in memory (`ledger.dir` is empty) stays there.
    """
    ledger = dict(common.get("ledger", {}))
    if ledger.get("dir") != "":
        ledger["dir"] = str(node.path / "ledger")
    listen = {key: value for key, value in common.get("listen", {}).items() if key not in ("endpoint_file", "port")}
    return {
        **common,
        "node_id": node.node_id,
        "listen": {**listen, "port": 0, "unix_socket": ""},
        "fleet": {**common.get("fleet", {}), "dir": str(fleet)},
        "ledger": ledger,
    }


def check_config(config_file: Path) -> None:
    """Check the node.toml of all nodes, and the secrets that it names. Blocks on the disk.

    Raises:
        ConfigError: the file is not a valid node.toml, its token or certificate cannot be used, or `PRORL_TOKEN` is
            another token.
    """
    listen = load_config(config_file).listen
    agreed_token(listen, os.environ.get(TOKEN_VARIABLE, ""))
    load_tls(listen)


def write_plan(config_file: Path, fleet: Path, count: int) -> list[NodeFolder]:
    """Write the node.toml of each of `count` nodes, in a folder of its own below that of the fleet. Blocks.

    The names are the same at the next start, so that each node finds its ledger: `local-0`, `local-1` and so on, with
    the `node_id` of `config_file`, if it has one, in place of `local`.

    Raises:
        ConfigError: the file is not a valid node.toml, or the fleet's folder cannot be used.
    """
    listen = load_config(config_file).listen
    has_token = bool(listen.token or listen.token_file)
    common = tomllib.loads(config_file.read_text(encoding="utf-8"))
    claim_folder(fleet)
    nodes: list[NodeFolder] = []
    for number in range(count):
        node_id = f"{common.get('node_id') or LOCAL}-{number}"
        node = NodeFolder(node_id=node_id, path=fleet / LOCAL / node_id, has_token=has_token)
        _write(node, node_tables(common, node, fleet))
        nodes.append(node)
    return nodes


def write_head(config_file: Path, head_file: Path | None, fleet: Path) -> NodeFolder:
    """Write the configuration of the fleet's head, in a folder of its own below that of the fleet. Blocks.

    Args:
        config_file: the node.toml of all nodes.
        head_file: settings of the head; see `head_tables`.
        fleet: the folder of the fleet.

    Raises:
        ConfigError: a file is not valid, or the fleet's folder cannot be used.
    """
    load_config(config_file)
    common = tomllib.loads(config_file.read_text(encoding="utf-8"))
    own: dict[str, Any] = {}
    if head_file is not None:
        load_head_config(head_file)
        own = tomllib.loads(head_file.read_text(encoding="utf-8"))
    claim_folder(fleet)
    path = fleet / LOCAL / HEAD
    tables = head_tables(common, own, fleet_dir=str(fleet), ledger=str(path / "ledger"))
    listen = tables["listen"]
    head = NodeFolder(node_id=HEAD, path=path, has_token=bool(listen.get("token") or listen.get("token_file")))
    _write(head, tables)
    return head


def _write(node: NodeFolder, tables: Mapping[str, Any]) -> None:
    node.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    node.config_file.touch(mode=0o600)  # it may have the token
    node.config_file.write_bytes(msgspec.toml.encode(tables))
