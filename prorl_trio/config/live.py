"""The fields of node.toml that a running node takes over when it reads the file again."""

from __future__ import annotations

from typing import Final

LIVE: Final = (
    "listen.token",
    "listen.token_file",
    "stages.init_workers",
    "stages.run_workers",
    "stages.eval_workers",
    "stages.init_queue",
    "stages.ready_queue",
    "stages.eval_queue",
    "admission",
    "budgets",
    "agent",
    "monitoring",
    "backends.max_tasks_per_backend",
    "backends.request_timeout_s",
    "backends.slice_tokens",
    "backends.lease_timeout_s",
    "backends.health",
    "backends.load",
    "drain_timeout_s",
    "stuck_after_s",
)
"""Fields, and tables with all their fields, that a running node takes over. Limits apply to what comes next: nothing
that was accepted is dropped, and a worker that is one too many finishes its job."""


def is_live(path: str) -> bool:
    """Return whether `path`, as `backends.health.interval_s`, changes in a running node when the file is read again."""
    return any(path == live or path.startswith(f"{live}.") for live in LIVE)
