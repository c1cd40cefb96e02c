"""The ledger of jobs and outcomes: no accepted job and no stored outcome is lost.

`MemoryLedger` lives as long as its process. `open_ledger` opens a ledger on disk, which survives restarts:

    async with open_ledger(folder) as ledger:
        await ledger.open_session("trainer", first_cursor=0)
        await ledger.accept("trainer", [NewJob(job_id="a", fingerprint=b"..", spec=b"...")])
        await ledger.begin_attempt("a", 1)
        ref = await ledger.finish("trainer", "a", 1, 1, [outcome])
        payload = await ledger.read(ref)
        await ledger.acknowledge("trainer", 1)

It stores them in SQLite, with a write-ahead log and one sync for each group of calls (`database`, `store`).
"""

from __future__ import annotations

from prorl_trio.ledger.disk import Disk
from prorl_trio.ledger.disk_ledger import open_ledger
from prorl_trio.ledger.ledger import (
    KnownJob,
    Ledger,
    LedgerCorrupt,
    LedgerError,
    LedgerFailed,
    LedgerFull,
    LedgerLimits,
    LedgerRefused,
    LedgerStatistics,
    Recovered,
    RecoveredSession,
    Ref,
    StaleAttempt,
    UndeliveredOutcome,
    UnfinishedJob,
)
from prorl_trio.ledger.memory_ledger import MemoryLedger
from prorl_trio.ledger.operations import NewJob

__all__ = [
    "Disk",
    "KnownJob",
    "Ledger",
    "LedgerCorrupt",
    "LedgerError",
    "LedgerFailed",
    "LedgerFull",
    "LedgerLimits",
    "LedgerRefused",
    "LedgerStatistics",
    "MemoryLedger",
    "NewJob",
    "Recovered",
    "RecoveredSession",
    "Ref",
    "StaleAttempt",
    "UndeliveredOutcome",
    "UnfinishedJob",
    "open_ledger",
]
