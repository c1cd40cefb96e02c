"""The REST service: the same jobs, sessions and outcomes as over the WebSocket, for `curl` and scripts."""

from __future__ import annotations
