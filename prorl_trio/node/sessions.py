"""The sessions of a node, with their ledger: on disk if the configuration names a folder for it, else in memory."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prorl_trio.ledger import LedgerLimits, MemoryLedger, open_ledger
from prorl_trio.sessions.encoding import SharedOutcomes
from prorl_trio.sessions.journal import open_journal
from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.sessions.session_table import SessionTable
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from prorl_ipc.arena import Arena
    from prorl_trio.config import LedgerConfig, NodeConfig
    from prorl_trio.sessions.journal import Journal

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_sessions(config: NodeConfig, arena: Arena | None) -> AsyncIterator[SessionTable]:
    """Open the ledger and the table of sessions; on exit, write all pending data to disk.

    It is opened before the node, so that it is closed after the node. The table is empty: `recover_sessions` reads the
    sessions of former processes from the ledger.

    Raises:
        ConfigError: the ledger cannot be opened.
    """
    limits = SessionLimits(
        max_sessions=config.listen.max_sessions,
        max_undelivered=config.max_undelivered,
        max_message_bytes=config.listen.max_message_bytes,
    )
    shared = None
    if arena is not None:
        shared = SharedOutcomes(arena, config.arena.shared_bytes or arena.size_bytes // 2)
    folder = config.ledger.folder(config.node_id, os.environ)
    if folder is None and config.fleet.leaves_jobs:
        raise ConfigError(
            "fleet.restart_within_s leaves jobs to the node's next start, which finds them in its ledger, and that is "
            "in memory; set node_id, or ledger.dir to a folder, or restart_within_s to 0"
        )
    async with open_stored_journal(config.ledger, folder) as journal:
        yield SessionTable(journal, limits, shared)


@asynccontextmanager
async def open_stored_journal(config: LedgerConfig, folder: Path | None) -> AsyncIterator[Journal]:
    """Open the journal over the ledger in `folder`, or over one in memory if it is None.

    Raises:
        ConfigError: the ledger cannot be opened.
    """
    try:
        limits = LedgerLimits(
            log_bytes=config.log_bytes,
            reserve_bytes=config.reserve_bytes,
            max_bytes=config.max_bytes,
            tombstone_s=config.tombstone_s,
        )
    except ValueError as exc:
        raise ConfigError(f"ledger: {exc}") from exc
    if folder is None:
        logger.warning(
            "in-memory ledger: jobs and outcomes are lost when this process ends; set node_id, or ledger.dir"
        )
        async with open_journal(MemoryLedger(limits), hot_outcome_bytes=sys.maxsize) as journal:
            yield journal
    else:
        async with open_ledger(folder, limits) as ledger, open_journal(ledger, config.hot_outcome_bytes) as journal:
            yield journal
