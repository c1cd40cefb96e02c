"""The trainer's side: a trio client, and a blocking one for trainers that do not know trio."""

from __future__ import annotations

from prorl_trio.client.blocking import BlockingClient
from prorl_trio.client.client import EventStream, ResultStream, RolloutClient, connect
from prorl_trio.client.errors import ConnectionLost, SessionLost, SessionReplaced

__all__ = [
    "BlockingClient",
    "ConnectionLost",
    "EventStream",
    "ResultStream",
    "RolloutClient",
    "SessionLost",
    "SessionReplaced",
    "connect",
]
