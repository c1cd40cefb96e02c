"""Recovery at a start: sessions and jobs that a former process left in the ledger."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from prorl_trio.ledger import LedgerCorrupt
from prorl_trio.sessions.encoding import failed_outcome, unreadable_spec
from prorl_trio.types.errors import ServiceError, UnknownJob
from prorl_trio.types.models import JobSpec

if TYPE_CHECKING:
    from prorl_trio.config import LedgerConfig
    from prorl_trio.ledger import Ledger, UnfinishedJob
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session import Session
    from prorl_trio.sessions.session_table import SessionTable
    from prorl_trio.types.errors import FailureCause

__all__ = ["recover_sessions"]

logger = logging.getLogger(__name__)

_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode


async def recover_sessions(sessions: SessionTable, node: NodeApi, config: LedgerConfig) -> None:
    """Recover all sessions from the ledger, and have the node run the unfinished jobs as their next attempt.

    Must return before anybody can connect. Jobs run again in the order in which they were accepted. A job fails instead
    if `max_attempts` of it have begun (it may be what ends the node), if it cannot be read, if its handler is gone, or
    if `on_restart` is "fail". Outcomes stay on the disk until they are asked for: the duration depends on their number,
    not on their size.
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
