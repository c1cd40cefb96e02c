"""Sessions in memory, and the few steps that most of their tests begin with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from prorl_trio.ledger import MemoryLedger
from prorl_trio.sessions.journal import Journal
from prorl_trio.sessions.session_table import SessionTable
from prorl_trio.sessions.submission import submit_all

if TYPE_CHECKING:
    import trio

    from prorl_trio.sessions.limits import SessionLimits
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.outcome_log import OfferedOutcome
    from prorl_trio.sessions.session import Session
    from prorl_trio.types.errors import ServiceError
    from prorl_trio.types.models import JobSpec


def sessions_in(nursery: trio.Nursery, limits: SessionLimits | None = None) -> SessionTable:
    """A table without sessions, whose journal works in `nursery`."""
    return SessionTable(Journal(MemoryLedger(), nursery, sys.maxsize), limits)


async def submit(session: Session, node: NodeApi, *specs: JobSpec) -> list[ServiceError | None]:
    """Submit a batch; return what each job was refused for."""
    answers: list[ServiceError | None] = []
    await submit_all(session, specs, node, lambda _index, error: answers.append(error))
    return answers


async def ended(session: Session, count: int) -> None:
    """Return when so many outcomes are held."""
    while len(session.log) < count:
        await session.wait_arrival()


async def all_held(session: Session) -> list[OfferedOutcome | None]:
    """Every outcome that is held, in order."""
    return [await session.outcome_at(cursor) for cursor in list(session.log.cursors())]
