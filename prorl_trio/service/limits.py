"""What trainers' sessions may hold."""

from __future__ import annotations

from typing import Final

import msgspec

from ipc.session import MAX_MESSAGE_BYTES
from prorl_trio.types.errors import AdmissionRejected

__all__ = ["JOBS_PER_CHECKPOINT", "RETRY_AFTER_S", "SessionLimits"]

JOBS_PER_CHECKPOINT: Final = 50
"""Of a batch; between them others have their turn."""
RETRY_AFTER_S: Final = 1.0


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What sessions may hold.

    A session's jobs, running or finished and not acknowledged, are at most `max_undelivered`; beyond that, or beyond
    `max_undelivered_bytes` of finished ones, it may not submit. `max_message_bytes` bounds one outcome. At
    most `max_sessions` are connected, or hold nothing; of the latter the one left alone longest gives way to a new one.
    """

    max_sessions: int = 64
    max_undelivered: int = 100_000
    max_undelivered_bytes: int = 8 * 1024 * 1024 * 1024
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def check(self, session_id: str, running: int, undelivered: int, undelivered_bytes: int) -> None:
        """Raises AdmissionRejected if a session with so many jobs and outcomes may not submit one more."""
        if running + undelivered >= self.max_undelivered:
            raise AdmissionRejected(
                f"session {session_id!r} has {running} jobs running and {undelivered} outcomes not acknowledged, "
                f"together the limit of {self.max_undelivered}; take results first",
                RETRY_AFTER_S,
            )
        if undelivered_bytes >= self.max_undelivered_bytes:
            raise AdmissionRejected(
                f"session {session_id!r} has {undelivered_bytes} bytes of outcomes not acknowledged, over the limit of "
                f"{self.max_undelivered_bytes}; take results first",
                RETRY_AFTER_S,
            )
