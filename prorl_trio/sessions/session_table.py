"""The table of a node's sessions: opening and removing them, and their recovery at startup."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_trio.ledger import LedgerCorrupt
from prorl_trio.sessions.encoding import failed_outcome, unreadable_spec
from prorl_trio.sessions.limits import RETRY_AFTER_S, SessionLimits
from prorl_trio.sessions.observation import Observations
from prorl_trio.sessions.session import Session
from prorl_trio.types.errors import AdmissionRejected, ProtocolError, ServiceError, UnknownJob
from prorl_trio.types.models import JobSpec

if TYPE_CHECKING:
    from prorl_trio.config import LedgerConfig
    from prorl_trio.ledger import Ledger, UnfinishedJob
    from prorl_trio.sessions.encoding import SharedOutcomes
    from prorl_trio.sessions.journal import Journal
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.types.errors import FailureCause

SESSION_ID_CHARS: Final = 200


class SessionTable:
    """All sessions of a node."""

    def __init__(
        self, journal: Journal, limits: SessionLimits | None = None, shared: SharedOutcomes | None = None
    ) -> None:
        """Create an empty table.

        Args:
            journal: stores the sessions.
            limits: of sessions; the defaults if None.
            shared: holds tokens of outcomes for trainers on this host; None if this node shares none.
        """
        self.journal = journal
        self.shared = shared
        self.observations = Observations()
        self._limits = limits or SessionLimits()
        self._sessions: dict[str, Session] = {}
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session_id: str, resume_after: int, *, retention_s: float | None = None) -> tuple[Session, bool]:
        """Return the session with that id, and whether it existed. Create it if necessary.

        A new session continues the cursors after `resume_after`. With `retention_s` it drops outcomes of that age while
        no trainer is connected. It is not stored yet: see `Session.store`.

        Raises:
            ProtocolError: the id or the cursor is not valid.
            AdmissionRejected: the table is full.
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

    def recover(self, session_id: str, acked: int) -> Session:
        """Create a session that a former process stored, even if there are too many.

        Everything up to `acked` is acknowledged.
        """
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

    async def wait_answered(self) -> None:
        """Return when no job is being stored: each was accepted by the node, or refused."""
        await self.journal.wait_answered()

    async def wait_delivered(self) -> None:
        """Return when no connected trainer has running jobs or unacknowledged outcomes.

        Jobs that the next start runs again do not count. After a disk failure no job counts, because the outcomes are
        held back. Has no deadline of its own.
        """
        await trio.lowlevel.checkpoint()
        while any(
            session.connected and (len(session.log) or (session.running > session.requeued and not self.journal.failed))
            for session in self._sessions.values()
        ):
            self._changed = trio.Event()
            await self._changed.wait()

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    @property
    def refusal(self) -> str:
        """Return why no job can be stored now; empty if one can."""
        if self.journal.failed:
            return f"outcomes are held back until the node is started again: {self.journal.failed}"
        full = self.journal.ledger.statistics().full
        return f"the ledger takes nothing new: {full}" if full else ""

    def undelivered(self) -> tuple[int, int]:
        """Return the number of unacknowledged outcomes of all sessions, and their bytes."""
        logs = [session.log for session in self._sessions.values()]
        return sum(map(len, logs)), sum(log.size_bytes for log in logs)

    @property
    def requeued(self) -> int:
        """Return the number of jobs that the node's end has cut and its next start runs again."""
        return sum(session.requeued for session in self._sessions.values())

    def statistics(self) -> dict[str, object]:
        return {session_id: session.statistics() for session_id, session in self._sessions.items()}

    def _notify(self) -> None:
        self._changed.set()

    def _make_room(self) -> None:
        """Remove idle sessions so that one more fits; raise AdmissionRejected if too many are connected.

        Only connected and empty sessions count. A session of an absent trainer that has jobs or outcomes is kept and
        does not count, because admission bounds it.
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


logger = logging.getLogger(__name__)

_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode


async def recover_sessions(sessions: SessionTable, node: NodeApi, config: LedgerConfig) -> None:
    """Recover all sessions from the ledger, and have the node run the unfinished jobs as their next attempt.

    Must return before trainers can connect. Jobs run again in the order of acceptance. A job fails instead if
    `max_attempts` of its attempts have begun (it may be what ends the node), if it cannot be read, if its handler is
    missing, or if `on_restart` is "fail". Outcomes stay on the disk until they are requested, so the duration depends
    on their number, not on their size.
    """
    ledger = sessions.journal.ledger
    recovered = ledger.recovered
    by_id: dict[str, Session] = {}
    for found in recovered.sessions:
        by_id[found.session_id] = sessions.recover(found.session_id, found.acked)
    for outcome in recovered.undelivered:
        by_id[outcome.session_id].recover_outcome(outcome)
    for found in recovered.sessions:
        by_id[found.session_id].log.skip_to(found.last)
    for unfinished in recovered.unfinished:
        await _run_again(by_id[unfinished.session_id], ledger, node, unfinished, config)
    if recovered.sessions:
        logger.info(
            "the ledger has %d sessions, %d outcomes not acknowledged and %d jobs to be run again",
            len(recovered.sessions),
            len(recovered.undelivered),
            len(recovered.unfinished),
        )


async def _run_again(
    session: Session, ledger: Ledger, node: NodeApi, found: UnfinishedJob, config: LedgerConfig
) -> None:
    spec = unreadable_spec(found.job_id)
    cause: FailureCause = "node"
    try:
        spec = _decode_spec(await ledger.read(found.spec))
    except (LedgerCorrupt, UnknownJob, msgspec.DecodeError) as exc:
        why = f"its spec cannot be read after the node was started again: {exc}"
    else:
        why = ""
        if config.on_restart == "fail":
            why = "the node was started again, and ledger.on_restart is fail"
        elif found.last_attempt >= config.max_attempts:
            why = f"the node ended during attempt {found.last_attempt} (ledger.max_attempts is {config.max_attempts})"
    job = session.recover(spec, found.fingerprint, found.last_attempt)
    if not why:
        try:
            session.hand_over(job, node)
        except ServiceError as exc:
            cause, why = "handler", f"it cannot be run after the node was started again: {exc}"
        else:
            return
    logger.error("job %s fails: %s", found.job_id, why)
    session.deliver(failed_outcome(spec, cause, why, max(1, found.last_attempt)))
