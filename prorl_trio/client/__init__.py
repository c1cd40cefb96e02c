"""The trainer's side: a trio client, and a blocking client for trainers without trio."""

from __future__ import annotations

from prorl_trio.client.blocking import BlockingClient
from prorl_trio.client.client import EventStream, ObservedStream, RolloutClient
from prorl_trio.client.connection import connect
from prorl_trio.client.errors import (
    ConnectionLost,
    PolicyUpdateFailed,
    SessionLost,
    SessionReplaced,
)
from prorl_trio.client.policy_update import PolicyUpdate, open_policy_update
from prorl_trio.client.results import ResultStream
from prorl_trio.client.state import Observed
from prorl_trio.weights.errors import WeightsRefused

__all__ = [
    "BlockingClient",
    "ConnectionLost",
    "EventStream",
    "Observed",
    "ObservedStream",
    "PolicyUpdate",
    "PolicyUpdateFailed",
    "ResultStream",
    "RolloutClient",
    "SessionLost",
    "SessionReplaced",
    "WeightsRefused",
    "connect",
    "open_policy_update",
]
