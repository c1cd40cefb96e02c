"""Storage of jobs, outcomes and tokens: the ledger and the arena."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from prorl_ipc.arena_socket import MAX_ARENA_READERS
from prorl_trio.config.quantities import MAX_BYTES, Bytes, BytesOrZero, Connections, Count, SecondsOrZero, Table

if TYPE_CHECKING:
    from collections.abc import Mapping


class LedgerConfig(Table, frozen=True):
    """The ledger keeps jobs and outcomes, so that they outlive the node.

    An accepted job is kept until it has an outcome, and an outcome until it is acknowledged. One node at a time uses a
    folder, which is on a disk of its own machine.

    Attributes:
        dir: the folder. `auto`: `prorl-trio/NODE_ID` in $XDG_STATE_HOME (~/.local/state) if `node_id` is set, else
            none. Empty: none. Without one the ledger is in memory, and nothing outlives the node.
        on_restart: what becomes of jobs that were not finished: `retry` runs them again, `fail` ends them.
        max_attempts: a job that is not finished, and of which so many attempts began, is not run again.
        log_bytes: size of the write-ahead log at which it is copied into the database and begun anew.
        reserve_bytes: preallocated on the disk, for outcomes when it is full; an outcome takes twice its size of it.
        max_bytes: size on the disk, of the database, its log and the reserve.
        tombstone_s: a job acknowledged less than that ago is not run again for the session that had it. Of the time in
            which the node runs: no clock that somebody sets makes it shorter.
        hot_outcome_bytes: memory for outcomes that are not acknowledged; those that do not fit are read from the disk
            when somebody takes them. Where the ledger is in memory, all of them are: see `admission`.
    """

    dir: str = "auto"
    on_restart: Literal["retry", "fail"] = "retry"
    max_attempts: Count = 5
    log_bytes: Annotated[int, msgspec.Meta(ge=64 * 1024, le=MAX_BYTES)] = 64 * 1024 * 1024
    reserve_bytes: BytesOrZero = 128 * 1024 * 1024
    max_bytes: Bytes = 16 * 1024 * 1024 * 1024
    tombstone_s: SecondsOrZero = 3600.0
    hot_outcome_bytes: BytesOrZero = 256 * 1024 * 1024

    def folder(self, node_id: str, environ: Mapping[str, str]) -> Path | None:
        """Return the folder of the ledger, or None if it is in memory."""
        if self.dir != "auto":
            return Path(self.dir) if self.dir else None
        if not node_id:
            return None
        state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return Path(state) / "prorl-trio" / node_id


class ArenaConfig(Table, frozen=True):
    """Memory for the tokens of live and undelivered trajectories, which trainers on the same host can map.

    A rollout starts when there is room for the longest trajectory it can have.

    Attributes:
        enabled: have one; without, tokens are in the node's private memory and go to trainers as frames.
        size_bytes: its size; 0: 1 GiB, or a tenth of the memory if that is less. Committed as it is written.
        shared_bytes: part of it for outcomes that wait for trainers who map them; more are delivered as frames. 0: half
            of it.
        room_timeout_s: a rollout that waited so long for room, which no budget is charged for, goes on in the node's
            private memory.
        max_readers: trainers who map it at once; further ones are sent frames.
    """

    enabled: bool = True
    size_bytes: BytesOrZero = 0
    shared_bytes: BytesOrZero = 0
    room_timeout_s: SecondsOrZero = 60.0
    max_readers: Connections = MAX_ARENA_READERS
