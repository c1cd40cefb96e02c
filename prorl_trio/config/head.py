"""fleet.toml: the configuration of the head of a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
    from pathlib import Path


class HeadConfig(Table, frozen=True):
    """Everything that the head of a fleet needs. Its tables are those of node.toml.

    Attributes:
        node_id: the name of the head.
        fleet: `dir` is the folder of the fleet's nodes.
        model: of the fleet. Only the ProRL endpoints need it (`rest.prorl_compat`).
        allowed_engines: addresses of engines that may be added by those endpoints, as `backends.allowed` of a node;
            empty: those of this machine.
        arena: memory for outcomes of trainers on the same machine. All of it may hold outcomes that wait
            (`shared_bytes`), as nothing is recorded here; so `room_timeout_s` has no effect.
        ledger: `dir` should be on a disk that the head's next start finds, which `auto` is on the same machine.
        drain_timeout_s: time after the first SIGTERM for live jobs to end by themselves. What is left then is the next
            start's, if the ledger is on a disk; else it is cancelled.
        on_hangup: at SIGHUP the head drains, or reads `listen.token_file` again; `auto`: it drains if it was started
            from a terminal, which is gone then.
        max_undelivered: jobs of one session, running or finished and not acknowledged.
        max_queued: jobs that may wait for a place on a node.
        recovery_timeout_s: time after a start in which the nodes of the folder are joined. Jobs that began before, and
            that no joined node has then, begin their next attempt.
        member_timeout_s: time for which a node keeps its jobs that is cut off from the head, or answers no submit,
            but lives by its entry.
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
