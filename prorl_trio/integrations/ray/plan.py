"""The settings of a fleet in a Ray cluster, and the configurations that follow from them. Does not need Ray."""

from __future__ import annotations

import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from prorl_trio.config import NodeConfig, head_tables, load_config
from prorl_trio.config.node import NODE_ID
from prorl_trio.config.secrets import TOKEN_VARIABLE, agreed_token
from prorl_trio.types.errors import ConfigError

_OF_ONE_PROCESS: Final = frozenset({"endpoint_file", "unix_socket", "token", "token_file"})
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a fleet: see `start_fleet`. `tables` is the content of node.toml without the token."""

    name: str
    nodes: int
    tables: dict[str, Any]
    dir: str
    backends: list[str]
    backend_method: str
    handlers: list[str]
    resources: dict[str, float]
    detached: bool
    token: str

    def __repr__(self) -> str:
        return f"<FleetPlan {self.name!r} of {self.nodes} nodes>"  # hides the token

    def node_tables(self, node_id: str, address: str, folder: Path, engines: list[str]) -> dict[str, Any]:
        """Return the node.toml of a node at this address, with its files in `folder` and these additional engines."""
        backends, ledger = self.tables.get("backends", {}), self.tables.get("ledger", {})
        urls = [*dict.fromkeys([*backends.get("urls", []), *engines])]
        if ledger.get("dir") != "":  # else it stays in memory
            ledger = {**ledger, "dir": str(folder / "ledger")}
        made = {**self.tables, "node_id": node_id, "ledger": ledger, "backends": {**backends, "urls": urls}}
        return {**made, **self._addresses(address, 0, folder)}

    def head_tables(self, address: str, port: int, folder: Path) -> dict[str, Any]:
        """Return the configuration of the head. `port` 0 is any free port."""
        made = head_tables(self.tables, {}, fleet_dir="", ledger=str(folder / "ledger"))
        return {**made, **self._addresses(address, port, folder)}

    def _addresses(self, address: str, port: int, folder: Path) -> dict[str, Any]:
        listen = {**self.tables["listen"], "port": port}
        if listen.get("host", "localhost") in _LOOPBACK:
            listen["host"] = address
        fleet = {"advertise": address, **self.tables.get("fleet", {}), "dir": str(folder / "fleet")}
        return {"listen": listen, "fleet": fleet}


def make_plan(config: str | os.PathLike[str] | Mapping[str, Any], **settings: Any) -> FleetPlan:
    """Check the settings of a fleet, and return its plan. Blocks on the disk.

    Raises:
        ConfigError: a setting is wrong; the message names it.
    """
    try:
        if isinstance(config, Mapping):
            tables, listen = dict(config), msgspec.convert(config, NodeConfig).listen
        else:
            listen = load_config(Path(config)).listen
            tables = tomllib.loads(Path(config).read_text(encoding="utf-8-sig"))
        token = agreed_token(listen, os.environ.get(TOKEN_VARIABLE, "")) or secrets.token_urlsafe(32)
        tables["listen"] = {key: value for key, value in tables.get("listen", {}).items() if key not in _OF_ONE_PROCESS}
        plan = msgspec.convert({**settings, "tables": tables, "token": token}, FleetPlan)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"start_fleet: {exc}") from None
    if plan.nodes < 1 or not all(amount > 0 for amount in plan.resources.values()):
        raise ConfigError("start_fleet: nodes and the amounts of resources must be above 0")
    if not plan.name or not re.match(NODE_ID, plan.name):
        raise ConfigError(f"start_fleet: name {plan.name!r} has other characters than letters, digits, '.', '_', '-'")
    if urls := [each for each in plan.backends if "://" in each]:
        raise ConfigError(f"start_fleet: backends are names of actors; put {urls[0]} into backends.urls of the config")
    return plan


def engine_url(answer: Any) -> str:
    """Return the URL in the answer of an engine's actor: a URL, `HOST:PORT`, a host and a port, or an object's `url`.

    Raises:
        ConfigError: the answer is none of these.
    """
    match getattr(answer, "url", answer):
        case str(url) if "://" in url:
            return url.rstrip("/").removesuffix("/v1")
        case str(authority) if authority.rpartition(":")[2].isdecimal():
            return f"http://{authority}"
        case [str(host), (int() | str()) as port]:
            return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    raise ConfigError(f"its answer {answer!r:.80} is not the address of an engine; name another backend_method")
