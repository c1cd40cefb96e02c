"""The common base of both sides: framing, RPC and the structs on the wire. It imports nothing of this project.

RPC runs over one byte stream: request ids, budgets, cancellation, streamed output (`client` calls, `server` answers;
PROTOCOL.md describes the frames). Guarantees for each call, whatever is cancelled or dies on either side:

* it is sent at most once and ends exactly once: with a reply or with one exception;
* when it has ended at the caller, its handler has ended too, or its connection is closed, which ends the handler;
* it never interrupts another call's frame.
"""
