"""The states of a job from its submit to its acknowledgement, and which stage may follow which. Pure.

promised -> stored -> queued -> init -> ready -> run -> ran -> eval -> ended -> offered -> acknowledged

The pipeline knows the stages, the ledger what is in it, a session all of them: `prorl_trio.sessions.job`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from prorl_trio.types.models import Status

JobState = Literal[
    "promised",
    "stored",
    "queued",
    "init",
    "ready",
    "run",
    "ran",
    "eval",
    "ended",
    "offered",
    "acknowledged",
    "refused",
    "requeued",
    "forgotten",
]
"""The state of a job.

`promised`: it has a place, and is being stored. `stored`: the ledger has it, the node not yet. Then the stages, where
it waits in line as `queued`, `ready` and `ran`. `ended`: it has its one outcome, which is being stored. `offered`: the
outcome is stored, and is sent on every connection until it is `acknowledged`.
`refused`: it was not accepted, or the ledger did not take its outcome. `requeued`: the node's end has cut it, and the
next start runs it again. `forgotten`: it was dropped on purpose.
"""
StoredState = Literal["stored", "offered", "acknowledged"]
"""What the ledger tells apart: a job without an outcome, with one, and an id that is remembered for a while."""

TERMINAL: Final[frozenset[Status]] = frozenset({"completed", "failed", "cancelled", "timed_out"})
"""The statuses of outcomes."""
LINES: Final[frozenset[Status]] = frozenset({"queued", "ready", "ran"})
"""The stages in which a job waits for a worker."""
STAGES: Final[dict[Status, Status]] = {
    "queued": "init",
    "init": "ready",
    "ready": "run",
    "run": "ran",
    "ran": "eval",
    "eval": "completed",
}
"""The stages of an attempt, in order, each with what follows its success."""


def may_follow(status: Status, to: Status) -> bool:
    """Return whether `to` may follow within an attempt: the next one, or a terminal one other than success."""
    return status in STAGES and (to == STAGES[status] or (to in TERMINAL and to != "completed"))
