"""node.toml -> frozen Structs. Every limit is named, with its unit in the name. Errors carry the field's path."""

from __future__ import annotations

from prorl_trio.config.head import HeadConfig, head_tables, listening_at, load_head_config, node_tables
from prorl_trio.config.listen import ListenConfig, RestConfig
from prorl_trio.config.mcp import McpConfig, McpServerConfig
from prorl_trio.config.node import (
    AdmissionConfig,
    AgentConfig,
    ArenaConfig,
    BackendConfig,
    BudgetConfig,
    FleetConfig,
    HealthConfig,
    ImagesConfig,
    LedgerConfig,
    LoadConfig,
    ModelConfig,
    MonitoringConfig,
    NemoGymConfig,
    NodeConfig,
    OnHangup,
    SandboxConfig,
    ScoringConfig,
    SearchConfig,
    StagesConfig,
    TelemetryConfig,
    load_config,
)

__all__ = [
    "AdmissionConfig",
    "AgentConfig",
    "ArenaConfig",
    "BackendConfig",
    "BudgetConfig",
    "FleetConfig",
    "HeadConfig",
    "HealthConfig",
    "ImagesConfig",
    "LedgerConfig",
    "ListenConfig",
    "LoadConfig",
    "McpConfig",
    "McpServerConfig",
    "ModelConfig",
    "MonitoringConfig",
    "NemoGymConfig",
    "NodeConfig",
    "OnHangup",
    "RestConfig",
    "SandboxConfig",
    "ScoringConfig",
    "SearchConfig",
    "StagesConfig",
    "TelemetryConfig",
    "head_tables",
    "listening_at",
    "load_config",
    "load_head_config",
    "node_tables",
]
