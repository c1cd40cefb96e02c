"""Errors of Unix-socket channels and of shared memory.

Every message says what, the limit, the actual value, what to do.
"""

from __future__ import annotations


class IpcError(Exception):
    """Root of this package's errors."""


class FrameTooLarge(IpcError):
    """A frame announces, or would have, more bytes than the channel's maximum. The channel is unusable afterwards."""

    def __init__(self, size_bytes: int, max_frame_bytes: int) -> None:
        super().__init__(f"frame of {size_bytes} bytes exceeds the maximum of {max_frame_bytes}; send it in pieces")
        self.size_bytes = size_bytes
        self.max_frame_bytes = max_frame_bytes


class Unencodable(IpcError):
    """A message holds a value that has no form on the wire: a larger integer, a lone surrogate. Nothing was sent."""


class ProtocolViolation(IpcError):
    """The peer sent bytes that are not a message of this protocol. The channel is unusable afterwards."""


class ChannelBroken(IpcError):
    """The channel ended or was poisoned: the peer closed it, or a send failed or was cancelled half-way."""


class HandshakeRefused(IpcError):
    """The peer refused the connection: wrong token or another protocol version. `code` is machine-readable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class CallFailed(IpcError):
    """The remote handler raised. `code` is machine-readable, the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class CallTimedOut(IpcError):
    """The call's deadline passed. The peer was told to cancel it, so it runs no longer than its own clean-up."""

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"{what} got no answer within its {timeout_s:g} s")
        self.timeout_s = timeout_s


class ArenaFull(IpcError):
    """There is no run of free blocks that long in the arena now. Nothing was changed; room comes with releases."""

    def __init__(self, tokens: int, largest_free_tokens: int) -> None:
        super().__init__(
            f"no room for {tokens} tokens in the arena: its largest free run holds {largest_free_tokens}; "
            "wait for acknowledgements, or make the arena larger"
        )
        self.tokens = tokens
        self.largest_free_tokens = largest_free_tokens


class StaleReference(IpcError):
    """The tokens a reference stands for are gone: acknowledged, released, or of another node's life."""
