"""RPC over one byte stream: request ids, budgets, cancellation, streamed output. Text of the protocol: PROTOCOL.md.

Guarantees, for each call, whatever is cancelled or dies on either side:

* it is sent at most once and ends exactly once: in a reply or in one exception;
* when it has ended at the caller, its handler has ended too, or its connection is closed, which ends the handler;
* it can never tear another call's frame.
"""

from __future__ import annotations

from prorl_ipc.client import CANCEL_GRACE_S, RpcClient, RpcClientStatistics, open_rpc_client
from prorl_ipc.handshake import HANDSHAKE_TIMEOUT_S
from prorl_ipc.outbox import MAX_OUTBOX_BYTES
from prorl_ipc.server import MAX_CONCURRENT_CALLS, CallContext, CallError, Handler, serve_rpc

__all__ = [
    "CANCEL_GRACE_S",
    "HANDSHAKE_TIMEOUT_S",
    "MAX_CONCURRENT_CALLS",
    "MAX_OUTBOX_BYTES",
    "CallContext",
    "CallError",
    "Handler",
    "RpcClient",
    "RpcClientStatistics",
    "open_rpc_client",
    "serve_rpc",
]
