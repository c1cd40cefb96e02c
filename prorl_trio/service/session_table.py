"""All sessions of a node: which there are, how many there may be, and which of them gives way."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.errors import AdmissionRejected, ProtocolError
from prorl_trio.service.limits import RETRY_AFTER_S, SessionLimits
from prorl_trio.service.observation import Observations
from prorl_trio.service.session import Session

if TYPE_CHECKING:
    from prorl_trio.service.journal import Journal
    from prorl_trio.service.shared_outcomes import SharedOutcomes

__all__ = ["SessionTable"]

logger = logging.getLogger(__name__)

SESSION_ID_CHARS: Final = 200


class SessionTable:
    """All sessions of a node."""

    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.shared: SharedOutcomes | None = None
        """For the sessions from now on. Set by whoever has the arena."""
        self.journal: Journal | None = None
        """For the sessions from now on. Set by whoever has the ledger."""
        self.observations = Observations()
        self._limits = limits or SessionLimits()
        self._sessions: dict[str, Session] = {}
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session_id: str, resume_after: int) -> tuple[Session, bool]:
        """The session of that id, and whether it was known. A new one continues the cursors after `resume_after`.

        Raises:
            ProtocolError: the id or the cursor cannot be.
            AdmissionRejected: there is no room for a new session.
        """
        known = self._sessions.get(session_id)
        if known is not None:
            return known, True
        if not 1 <= len(session_id) <= SESSION_ID_CHARS:
            raise ProtocolError(f"session_id must have 1 to {SESSION_ID_CHARS} characters, got {len(session_id)}")
        if not 0 <= resume_after < 2**62:
            raise ProtocolError(f"resume_after must be a cursor, got {resume_after}")
        if len(self._sessions) >= self._limits.max_sessions:
            self._make_room()
        return self.restore(session_id, resume_after), False

    def restore(self, session_id: str, acked: int) -> Session:
        """A session whose cursors up to `acked` are forgotten, whether there is room for it or not."""
        session = Session(session_id, acked, self._limits, self._notify, journal=self.journal)
        session.shared = self.shared
        session.observations = self.observations
        session.is_elsewhere = lambda job_id: any(
            other.knows(job_id) for other in self._sessions.values() if other is not session
        )
        self._sessions[session_id] = session
        return session

    @property
    def max_message_bytes(self) -> int:
        """Of one outcome."""
        return self._limits.max_message_bytes

    async def wait_delivered(self) -> None:
        """Return when no connected trainer has an outcome it has not acknowledged. The caller sets the deadline."""
        await trio.lowlevel.checkpoint()
        while any(session.connected and len(session.log) for session in self._sessions.values()):
            self._changed = trio.Event()
            await self._changed.wait()

    def get(self, session_id: str) -> Session | None:
        """The session of that id, if there is one."""
        return self._sessions.get(session_id)

    def all(self) -> list[Session]:
        """Every session, oldest first."""
        return list(self._sessions.values())

    def undelivered(self) -> tuple[int, int]:
        """Outcomes not acknowledged, of all sessions, and their bytes."""
        logs = [session.log for session in self._sessions.values()]
        return sum(map(len, logs)), sum(log.size_bytes for log in logs)

    def statistics(self) -> dict[str, object]:
        """Live state, by session id."""
        return {session_id: session.statistics() for session_id, session in self._sessions.items()}

    def _notify(self) -> None:
        self._changed.set()

    def _make_room(self) -> None:
        away = [s for s in self._sessions.values() if not s.connected and not s.running]
        away.sort(key=lambda session: (len(session.log) > 0, session.idle_since_s))
        if away:
            oldest = away[0]
            idle_s = trio.current_time() - oldest.idle_since_s
            if not len(oldest.log) or idle_s >= self._limits.abandoned_after_s:
                if len(oldest.log):
                    logger.warning("%r was abandoned for %.0f s and gives way to a new one", oldest, idle_s)
                del self._sessions[oldest.session_id]
                oldest.close()
                return
        raise AdmissionRejected(
            f"the node has {len(self._sessions)} sessions, its limit (max_sessions); come back with the id of one",
            RETRY_AFTER_S,
        )
