"""The floor both sides stand on: framing, RPC and the structs on the wire. Imports nothing of this project.

RPC runs over one byte stream: request ids, budgets, cancellation, streamed output (`client` calls, `server` answers;
PROTOCOL.md has the frames). Guarantees, for each call, whatever is cancelled or dies on either side:

* it is sent at most once and ends exactly once: in a reply or in one exception;
* when it has ended at the caller, its handler has ended too, or its connection is closed, which ends the handler;
* it can never tear another call's frame.
"""
