"""The MCP servers of a rollout: which it uses, whether its agent can, and their start."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from prorl_trio.agents.preset import presets
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError, HandlerError
from prorl_trio.types.models import AgentProgram

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.config import McpConfig, McpServerConfig, NodeConfig
    from prorl_trio.tools.mcp.sessions import McpServers
    from prorl_trio.types.models import JobSpec

SESSIONS: Final = "prorl_trio.tools.mcp.sessions"
"""The module that imports the package `mcp`, which takes a second."""


async def prepare_servers(config: McpConfig) -> None:
    """Check the configured servers when a node starts. Raises ConfigError for missing secrets or packages."""
    config.check_secrets()
    if config.servers:
        _check_package()
        await run_sync(import_module, SESSIONS)


def _check_package() -> None:
    if find_spec("mcp") is None:
        raise ConfigError("MCP servers need the extra `mcp`: pip install 'prorl-trio[mcp]'")


def servers_of(config: NodeConfig, spec: JobSpec) -> dict[str, McpServerConfig]:
    """Return the servers of a job by name.

    Raises:
        ConfigError: a name is unknown, the job's agent cannot use a server, or the package `mcp` is missing.
    """
    servers = config.mcp.of_job(spec.mcp)
    if servers:
        _check_package()
    if servers and isinstance(agent := spec.agent, AgentProgram):
        able = [name for name, preset in presets().items() if preset.takes_mcp]
        if agent.preset not in able:
            raise ConfigError(
                f"the agent {agent.name!r} is not given MCP servers; these are: {', '.join(able)}. Set mcp to []"
            )
        for name, server in servers.items():
            if server.secrets or server.where == "node":
                raise ConfigError(f"mcp.servers.{name}: agents in a sandbox do not reach the node or its secrets")
            if server.url and not config.sandbox.network:
                raise ConfigError(f"mcp.servers.{name}: an agent in a sandbox needs sandbox.network for a url")
    return servers


@asynccontextmanager
async def open_servers(context: RolloutContext) -> AsyncIterator[McpServers | None]:
    """Start the servers of a rollout, one of each, which end with the block; None if it uses none.

    Their start is charged to the stage. Servers in the sandbox are started before the policy acts there.

    Raises:
        McpServerLost, SandboxLost: a server could not be started.
        HandlerError: the servers cannot be used.
    """
    config = context.resources.config
    try:
        servers = servers_of(config, context.spec)
    except ConfigError as exc:
        raise HandlerError(str(exc)) from exc
    async with AsyncExitStack() as stack:
        opened = None
        if servers:
            with context.waiting("MCP servers", "node"):
                sessions = await run_sync(import_module, SESSIONS)
                opened = await stack.enter_async_context(
                    sessions.open_sessions(servers, context.sandbox, config.sandbox.run_path)
                )
        yield opened
