"""Errors of Unix-socket channels and of shared memory.

Every message states the failure, the limit, the actual value and the remedy.
"""

from __future__ import annotations


class IpcError(Exception):
    """Root of this package's errors."""


class FrameTooLarge(IpcError):
    """A frame exceeds the channel's maximum. Receiving it breaks the channel; a refused send does not."""

    def __init__(self, size_bytes: int, max_frame_bytes: int) -> None:
        super().__init__(f"frame of {size_bytes} bytes exceeds the maximum of {max_frame_bytes}; send it in pieces")
        self.size_bytes = size_bytes
        self.max_frame_bytes = max_frame_bytes


class Unencodable(IpcError):
    """A message contains an integer beyond 64 bits, a lone surrogate or the like. Nothing was sent."""


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
    """The call's deadline passed. The peer was asked to cancel the action, which ends after its clean-up."""

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"{what} got no answer within its {timeout_s:g} s")
        self.timeout_s = timeout_s


class ArenaFull(IpcError):
    """The arena lacks a free run of that many blocks now. Nothing was changed; releases make room."""

    def __init__(self, tokens: int, largest_free_tokens: int) -> None:
        super().__init__(
            f"no room for {tokens} tokens in the arena: its largest free run holds {largest_free_tokens}; "
            "wait for acknowledgements, or make the arena larger"
        )
        self.tokens = tokens
        self.largest_free_tokens = largest_free_tokens


class StaleReference(IpcError):
    """The tokens of a reference are gone: acknowledged, released, or in the arena of another node process."""
