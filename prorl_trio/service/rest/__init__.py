"""REST beside the WebSocket: the same jobs, sessions and outcomes for `curl` and scripts."""

from __future__ import annotations

from prorl_trio.service.rest.edge import serve_rest

__all__ = ["serve_rest"]
