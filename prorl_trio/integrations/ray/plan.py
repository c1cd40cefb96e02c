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

from prorl_trio.config import NodeConfig, head_tables, listening_at, load_config, node_tables
from prorl_trio.config.node import NODE_ID
from prorl_trio.config.secrets import TOKEN_VARIABLE, agreed_token
from prorl_trio.types.errors import ConfigError

_SECRETS: Final = ("token", "token_file")


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
        return f"fleet {self.name!r}"  # hides the token

    def objection(self, there: FleetPlan) -> str:
        """Return why a running fleet with the plan `there` cannot be used for this plan; empty if it can."""
        if not there.detached:
            return "belongs to another driver"
        fields = [name for name in self.__struct_fields__ if name != "token"]
        different = [name for name in fields if getattr(there, name) != getattr(self, name)]
        return f"has other settings ({', '.join(different)})" if different else ""

    def node_tables(self, node_id: str, address: str, folder: Path, engines: list[str]) -> dict[str, Any]:
        """Return the node.toml of a node at this address, with its files in `folder` and these additional engines."""
        made = node_tables(self.tables, node_id, fleet_dir=str(folder / "fleet"), ledger=str(folder / "ledger"))
        backends = self.tables.get("backends", {})
        urls = [*dict.fromkeys(url.rstrip("/") for url in [*backends.get("urls", []), *engines])]
        return {**_at(made, address), "backends": {**backends, "urls": urls}}

    def head_tables(self, address: str, port: int, folder: Path) -> dict[str, Any]:
        """Return the configuration of the head. `port` 0 is any free port."""
        own = {"listen": {"port": port}}
        made = head_tables(self.tables, own, fleet_dir=str(folder / "fleet"), ledger=str(folder / "ledger"))
        return _at(made, address)


def _at(tables: dict[str, Any], address: str) -> dict[str, Any]:
    return {**tables, "listen": listening_at(tables, address), "fleet": {"advertise": address, **tables["fleet"]}}


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
        tables["listen"] = {key: value for key, value in tables.get("listen", {}).items() if key not in _SECRETS}
        plan = msgspec.convert({**settings, "tables": tables, "token": token}, FleetPlan)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"start_fleet: {exc}") from None
    if not all(number > 0 for number in (plan.nodes, *plan.resources.values())):
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
