"""The limits of trainers' sessions."""

from __future__ import annotations

from typing import Final

import msgspec

from prorl_ipc.session import MAX_MESSAGE_BYTES
from prorl_trio.types.errors import AdmissionRejected

JOBS_PER_CHECKPOINT: Final = 50
"""Number of a batch's jobs that are handled before other tasks run."""
RETRY_AFTER_S: Final = 1.0


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of sessions.

    Attributes:
        max_sessions: sessions that are connected, and empty ones. A new session replaces the empty one that was idle
            longest, and is refused if all are connected. Sessions without a connection that have jobs or outcomes are
            kept and do not count.
        max_undelivered: running or unacknowledged jobs of one session. At the limit it cannot submit.
        max_undelivered_bytes: size of one session's unacknowledged outcomes. At the limit it cannot submit.
        max_message_bytes: size of one encoded outcome with its frame.
    """

    max_sessions: int = 64
    max_undelivered: int = 100_000
    max_undelivered_bytes: int = 8 * 1024 * 1024 * 1024
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def check(self, session_id: str, running: int, undelivered: int, undelivered_bytes: int) -> None:
        """Check whether a session with these numbers of jobs and outcomes may submit one more job.

        Raises:
            AdmissionRejected: it is at a limit.
        """
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
