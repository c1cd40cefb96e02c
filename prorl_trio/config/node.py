"""node.toml as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from prorl_trio.config.agent import AgentConfig, ModelConfig
from prorl_trio.config.backends import BackendConfig
from prorl_trio.config.fleet import FleetConfig
from prorl_trio.config.listen import MOVED, ListenConfig, RestConfig
from prorl_trio.config.monitoring import MonitoringConfig, TelemetryConfig
from prorl_trio.config.quantities import Count, SecondsOrZero
from prorl_trio.config.sandbox import SandboxConfig, ScoringConfig
from prorl_trio.config.search import SearchConfig
from prorl_trio.config.stages import AdmissionConfig, BudgetConfig, StagesConfig
from prorl_trio.config.storage import ArenaConfig, LedgerConfig
from prorl_trio.config.table import Table
from prorl_trio.config.toml_file import read_toml

if TYPE_CHECKING:
    from pathlib import Path

NODE_ID: Final = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?\Z"

OnHangup = Literal["auto", "drain", "reload"]


class NodeConfig(Table, frozen=True):
    """Everything one node needs.

    Attributes:
        node_id: the name of the node, also of its folder in `ledger.dir`; empty: made of host and process.
        drain_timeout_s: time after the first SIGTERM for live jobs to end by themselves; then they are cancelled. In an
            allocation of Slurm's whose end is known, SIGTERM gives them the time until `fleet.end_margin_s` before it.
        stuck_after_s: a job in a stage to which nothing happens for so long is shown as stuck; its budgets end it.
        on_hangup: at SIGHUP the node drains, or reads its configuration again; `auto`: it drains if it was started from
            a terminal, which is gone then.
        max_undelivered: jobs of one session, running or finished and not acknowledged.
    """

    model: ModelConfig
    node_id: Annotated[str, msgspec.Meta(pattern=NODE_ID)] = ""
    listen: ListenConfig = ListenConfig()
    rest: RestConfig = RestConfig()
    fleet: FleetConfig = FleetConfig()
    ledger: LedgerConfig = LedgerConfig()
    backends: BackendConfig = BackendConfig()
    sandbox: SandboxConfig = SandboxConfig()
    stages: StagesConfig = StagesConfig()
    admission: AdmissionConfig = AdmissionConfig()
    budgets: BudgetConfig = BudgetConfig()
    agent: AgentConfig = AgentConfig()
    scoring: ScoringConfig = ScoringConfig()
    search: SearchConfig = SearchConfig()
    arena: ArenaConfig = ArenaConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    drain_timeout_s: SecondsOrZero = 60.0
    stuck_after_s: SecondsOrZero = 300.0
    on_hangup: OnHangup = "auto"
    max_undelivered: Count = 100_000


def load_config(path: Path) -> NodeConfig:
    """Read `path`.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown or wrong field (named by its path).
    """
    return read_toml(path, NodeConfig, MOVED)
