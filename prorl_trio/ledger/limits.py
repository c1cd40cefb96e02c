"""The ledger's limits."""

from __future__ import annotations

import msgspec

__all__ = ["LedgerLimits"]

_MIB = 1024 * 1024


class LedgerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a ledger.

    Attributes:
        log_bytes: of SQLite's write-ahead log, before it is copied into the database and begun anew.
        reserve_bytes: preallocated for outcomes when the disk is full, who need it twice: in the log, and in the
            database. So no smaller than twice the largest outcome.
        max_bytes: of the database, its log and the reserve.
        max_jobs: unfinished, or finished and not acknowledged. On the disk they take some 300 bytes each besides what
            is theirs, in memory nothing.
        max_group_bytes: payload written together; one outcome may be larger.
        max_group_operations: calls committed together.
        tombstone_s: how long the fingerprint of an acknowledged job is remembered, of the time in which the ledger is
            open: no clock that somebody can set, and no time in which nobody could ask, makes it shorter.
        max_tombstones: how many such fingerprints.
        retry_interval_s: how often a full disk is tried again.
        max_reads: payloads read at the same time.
    """

    log_bytes: int = 64 * _MIB
    reserve_bytes: int = 128 * _MIB
    max_bytes: int = 16 * 1024 * _MIB
    max_jobs: int = 500_000
    max_group_bytes: int = 16 * _MIB
    max_group_operations: int = 1_024
    tombstone_s: float = 3600.0
    max_tombstones: int = 100_000
    retry_interval_s: float = 1.0
    max_reads: int = 4

    def __post_init__(self) -> None:
        if self.max_bytes < self.reserve_bytes + 2 * self.log_bytes:
            raise ValueError(
                f"max_bytes ({self.max_bytes}) must hold the reserve ({self.reserve_bytes}), the write-ahead log "
                f"({self.log_bytes}) and as much in the database"
            )
