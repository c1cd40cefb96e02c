"""All sessions of a node: which there are, how many there may be, and which of them gives way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.service.limits import RETRY_AFTER_S, SessionLimits
from prorl_trio.service.sessions.observation import Observations
from prorl_trio.service.sessions.session import Session
from prorl_trio.types.errors import AdmissionRejected, ProtocolError

if TYPE_CHECKING:
    from prorl_trio.service.sessions.journal import Journal
    from prorl_trio.service.sessions.shared_outcomes import SharedOutcomes

__all__ = ["SessionTable"]

SESSION_ID_CHARS: Final = 200


class SessionTable:
    """All sessions of a node."""

    def __init__(
        self, journal: Journal, limits: SessionLimits | None = None, shared: SharedOutcomes | None = None
    ) -> None:
        """Begin without sessions. `shared`: where tokens of outcomes are held for trainers on this host."""
        self.journal = journal
        self.shared = shared
        self.observations = Observations()
        self._limits = limits or SessionLimits()
        self._sessions: dict[str, Session] = {}
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session_id: str, resume_after: int, *, retention_s: float | None = None) -> tuple[Session, bool]:
        """Return the session of that id, and whether it was known. A new one continues the cursors after
        `resume_after`, and forgets outcomes after `retention_s`, if that is given and no trainer is connected.

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
        self._make_room()
        return self._begin(session_id, resume_after, retention_s=retention_s), False

    def restore(self, session_id: str, acked: int) -> Session:
        """Give a session of a former process its place, whether there is room for it or not: its cursors up to `acked`
        are forgotten."""
        return self._begin(session_id, acked, stored=True)

    def _begin(self, session_id: str, start: int, *, stored: bool = False, retention_s: float | None = None) -> Session:
        session = self._sessions[session_id] = Session(
            session_id,
            start,
            self._limits,
            self.journal,
            stored=stored,
            retention_s=retention_s,
            is_elsewhere=lambda job_id: any(
                other.knows(job_id) for other in self._sessions.values() if other.session_id != session_id
            ),
            on_change=self._notify,
            observations=self.observations,
            shared=self.shared,
        )
        return session

    async def wait_settled(self) -> None:
        """Return when no job is being stored: each is the node's, or refused."""
        await self.journal.wait_settled()

    async def wait_delivered(self) -> None:
        """Return when no connected trainer has an outcome it has not acknowledged, or a job without one; but for those
        that a failed disk holds back. The caller sets the deadline."""
        await trio.lowlevel.checkpoint()
        while any(
            session.connected and (len(session.log) or (session.running and not self.journal.failed))
            for session in self._sessions.values()
        ):
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
        """For one session more. Counted against the limit are those with a connection, and those that hold nothing.

        What an absent trainer left, running or undelivered, is bounded by admission: it is kept, and keeps nobody out.
        """
        idle = [s for s in self._sessions.values() if not (s.connected or s.running or len(s.log))]
        connected = sum(session.connected for session in self._sessions.values())
        limit = self._limits.max_sessions
        if connected >= limit:
            raise AdmissionRejected(
                f"the node has {connected} sessions, its limit of connected ones (listen.max_sessions); end one of "
                "them, come back with the id of a known one, or raise the limit and restart the node",
                RETRY_AFTER_S,
            )
        idle.sort(key=lambda session: session.idle_since_s)
        for oldest in idle[: max(0, connected + len(idle) + 1 - limit)]:
            del self._sessions[oldest.session_id]
            oldest.close()
