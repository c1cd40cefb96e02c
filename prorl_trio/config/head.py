"""fleet.toml: the configuration of the head of a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from prorl_trio.config.listen import ListenConfig, RestConfig
from prorl_trio.config.node import (
    NODE_ID,
    AdmissionConfig,
    ArenaConfig,
    FleetConfig,
    LedgerConfig,
    ModelConfig,
    MonitoringConfig,
    OnHangup,
    TelemetryConfig,
)
from prorl_trio.config.quantities import Count, Seconds, SecondsOrZero, Table
from prorl_trio.config.toml_file import read_toml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class HeadConfig(Table, frozen=True):
    """All settings of the head of a fleet. Its tables are also in node.toml.

    Attributes:
        node_id: name of the head.
        fleet: `dir` is the folder of the fleet's nodes.
        model: the fleet's model. Only the ProRL endpoints need it (`rest.prorl_compat`).
        allowed_engines: engines that these endpoints may add, as in `backends.allowed` of a node. Empty: engines of
            this machine.
        arena: memory for outcomes of trainers on the same machine. All of it may hold waiting outcomes
            (`shared_bytes`), and `room_timeout_s` has no effect.
        ledger: `dir` should be on a disk that the head's next start finds. `auto` works on the same machine.
        drain_timeout_s: time after the first SIGTERM for live jobs to end. The next start runs the others if the ledger
            is on a disk. Otherwise they are cancelled.
        on_hangup: at SIGHUP, `drain`, or `reload` only `listen.token_file`. `auto`: drain if the head was started from
            a terminal, which has then closed.
        max_undelivered: running or unacknowledged jobs of one session.
        max_queued: jobs that may wait for a place on a node.
        recovery_timeout_s: time after a start to join the nodes of the folder. Then older jobs without a node begin
            their next attempt.
        member_timeout_s: time until a live node loses its jobs, if the head cannot reach it or its submits time out.
    """

    node_id: Annotated[str, msgspec.Meta(pattern=NODE_ID)] = "head"
    listen: ListenConfig = ListenConfig()
    rest: RestConfig = RestConfig()
    fleet: FleetConfig = FleetConfig()
    model: ModelConfig | None = None
    allowed_engines: list[str] = msgspec.field(default_factory=list)
    arena: ArenaConfig = ArenaConfig()
    ledger: LedgerConfig = LedgerConfig()
    admission: AdmissionConfig = AdmissionConfig(max_live=200_000, max_live_per_session=200_000)
    monitoring: MonitoringConfig = MonitoringConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    drain_timeout_s: SecondsOrZero = 60.0
    on_hangup: OnHangup = "auto"
    max_undelivered: Count = 100_000
    max_queued: Count = 100_000
    recovery_timeout_s: SecondsOrZero = 60.0
    member_timeout_s: Seconds = 300.0


def load_head_config(path: Path) -> HeadConfig:
    """Read `path`.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown or wrong field (named by its path).
    """
    return read_toml(path, HeadConfig)


def head_tables(common: Mapping[str, Any], own: Mapping[str, Any], *, fleet_dir: str, ledger: str) -> dict[str, Any]:
    """Return the configuration of a fleet's head: its `own`, with defaults from the nodes' configuration.

    Args:
        common: the node.toml of all nodes. The head uses its `listen`, `fleet` and `ledger`, without paths that belong
            to a single node.
        own: the content of `prorl-trio fleet --config`; empty without a file.
        fleet_dir: the folder of the fleet.
        ledger: the folder of its ledger, unless `own` names another.
    """
    listen = {key: value for key, value in common.get("listen", {}).items() if key not in ("endpoint_file", "port")}
    return {
        **own,
        "listen": {**listen, "port": 0, "unix_socket": "auto", **own.get("listen", {})},
        "fleet": {**common.get("fleet", {}), **own.get("fleet", {}), "dir": fleet_dir},
        "ledger": {**common.get("ledger", {}), "dir": ledger, **own.get("ledger", {})},
    }


def node_tables(common: Mapping[str, Any], node_id: str, *, fleet_dir: str, ledger: str) -> dict[str, Any]:
    """Return the configuration of one node of a fleet: `common` with its own name, a free port, and its folders.

    A ledger in memory (`ledger.dir` is empty) stays in memory.
    """
    own_ledger = dict(common.get("ledger", {}))
    if own_ledger.get("dir") != "":
        own_ledger["dir"] = ledger
    listen = {key: value for key, value in common.get("listen", {}).items() if key not in ("endpoint_file", "port")}
    return {
        **common,
        "node_id": node_id,
        "listen": {**listen, "port": 0, "unix_socket": ""},
        "fleet": {**common.get("fleet", {}), "dir": fleet_dir},
        "ledger": own_ledger,
    }


def listening_at(tables: Mapping[str, Any], address: str) -> dict[str, Any]:
    """Return the table `listen` for a machine with this address. An address in it is kept unless it is a loopback."""
    listen = {key: value for key, value in tables.get("listen", {}).items() if key != "endpoint_file"}
    if listen.get("host", _LOOPBACK[0]) in _LOOPBACK:
        listen["host"] = address
    return listen
