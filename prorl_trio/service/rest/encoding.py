"""Encoding of replies: JSON, or msgpack for clients that accept it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from prorl_trio.threads import run_sync

if TYPE_CHECKING:
    from prorl_trio.service.rest.schema import Arrays

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
IN_THREAD_OUTCOMES: Final = 4
"""Replies with more outcomes than this, or with lists of numbers, are encoded in a thread, not to block the loop."""

_DTYPES: Final = {"token_ids": "<i4", "logprobs": "<f4", "loss_mask": "u1"}
_BINARY: Final = (bytes, memoryview)
_NO_JSON_FORM = (TypeError, ValueError, OverflowError, RecursionError)


async def encode_reply(reply: object, media_type: str, arrays: Arrays, outcomes: int) -> bytes:
    """Encode a reply that holds `outcomes` outcomes; in a thread if that may take long.

    `arrays` is the form of token arrays in JSON; in msgpack they are bytes. Objects without a form in either are
    encoded as their `str`.
    """
    if outcomes > IN_THREAD_OUTCOMES or (outcomes and arrays == "list"):
        return await run_sync(_encode, reply, media_type, arrays)
    return _encode(reply, media_type, arrays)


def _encode(reply: object, media_type: str, arrays: Arrays) -> bytes:
    if media_type == MSGPACK:
        return msgspec.msgpack.encode(reply, enc_hook=str)
    if arrays == "base64":
        try:
            return msgspec.json.encode(reply, enc_hook=str)
        except _NO_JSON_FORM:  # what a handler put into `details` may be msgpack and no JSON
            return msgspec.json.encode(_plain(msgspec.to_builtins(reply, builtin_types=_BINARY, enc_hook=str)))
    return msgspec.json.encode(_plain(msgspec.to_builtins(reply, builtin_types=_BINARY, enc_hook=str), lists=True))


def _plain(value: Any, *, lists: bool = False) -> Any:
    """Return `value` with string keys only and, with `lists`, the token arrays of segments as lists."""
    if isinstance(value, dict):
        segment = lists and all(isinstance(value.get(name), _BINARY) for name in _DTYPES)
        return {
            key if isinstance(key, str) else str(key): (
                np.frombuffer(item, dtype=_DTYPES[key]).tolist()
                if segment and key in _DTYPES
                else _plain(item, lists=lists)
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, lists=lists) for item in value]
    return value
