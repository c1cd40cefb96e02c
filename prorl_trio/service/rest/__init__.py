"""REST beside the WebSocket: the same jobs, sessions and outcomes for `curl` and scripts."""

from __future__ import annotations
