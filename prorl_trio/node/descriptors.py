"""The limit of open files: raised at startup, and compared with the needs of the configuration."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Final

from prorl_trio.config import NodeConfig
from prorl_trio.edges.websocket.server import LEAVING
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from prorl_trio.config import HeadConfig

OWN: Final = 64
"""Descriptors of the node itself: its loop, ledger, listeners, fork server, reaper and log."""
PER_ROLLOUT: Final = 6
"""Three pipes and the channel of a sandbox, the lock on its image, and a connection to an engine."""
PER_START: Final = 8
"""Further descriptors of a sandbox while it starts: the child's ends of its pipes, its listener, namespaces."""
PER_SCORER: Final = 4


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to its hard limit. Child processes inherit it."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_descriptors(config: NodeConfig | HeadConfig) -> None:
    """Check that the process may open as many files as its workers, sandboxes and connections need together.

    Raises:
        ConfigError: the limit is too low. The message names the fields that need most, the limit, and a remedy.
    """
    listen = config.listen
    needs = {
        "listen.max_sessions": listen.max_sessions + LEAVING,
        "listen.max_connections": listen.max_connections,
        "listen.max_unauthenticated": listen.max_unauthenticated,
        "arena.max_readers": config.arena.max_readers if config.arena.enabled else 0,
    }
    if isinstance(config, NodeConfig):
        needs |= _needs_of_rollouts(config)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN + sum(needs.values())
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return
    field, most = max(needs.items(), key=lambda need: need[1])
    raise ConfigError(
        f"{field}: the configuration may need {needed} open files ({most} of them for this field), and the limit is "
        f"{limit}; raise the limit (`ulimit -Hn`, LimitNOFILE= of systemd, --ulimit nofile= of Docker), or lower "
        f"{', '.join(name for name, count in sorted(needs.items(), key=lambda need: -need[1])[:3] if count)}"
    )


def _needs_of_rollouts(config: NodeConfig) -> dict[str, int]:
    stages, sandbox = config.stages, config.sandbox
    return {
        "stages.run_workers": stages.run_workers * PER_ROLLOUT,
        "stages.init_workers": stages.init_workers * PER_ROLLOUT,
        "stages.ready_queue": stages.ready_queue * PER_ROLLOUT,
        "stages.eval_workers": stages.eval_workers * (PER_ROLLOUT + PER_SCORER),
        "sandbox.max_warm": sandbox.max_warm * PER_ROLLOUT,
        "sandbox.max_concurrent_starts": sandbox.max_concurrent_starts * PER_START,
    }
