"""The pipeline: workers and queues, what is admitted to it, and the time that a job may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.config.quantities import Bytes, Count, Processes, Seconds, Table, Workers

if TYPE_CHECKING:
    from prorl_trio.types.models import Budgets

MIN_SESSION_WEIGHT: Final = 0.01
MAX_SESSION_WEIGHT: Final = 100.0


class StagesConfig(Table, frozen=True):
    """Workers of each stage, and how many jobs may wait for each.

    Attributes:
        init_workers: jobs in INIT at once, where sandboxes are made.
        run_workers: jobs in RUN at once, where the policy takes its turns.
        eval_workers: jobs in EVAL at once, where outcomes are scored.
        init_queue: jobs that may wait for INIT; a full queue rejects submissions.
        ready_queue: jobs that may wait for RUN, with a sandbox each; a full queue holds INIT up.
        eval_queue: jobs that may wait for EVAL; a full queue holds RUN up.
    """

    init_workers: Processes = 4
    run_workers: Workers = 32
    eval_workers: Processes = 4
    init_queue: Count = 10_000
    ready_queue: Workers = 16
    eval_queue: Count = 1_000


class AdmissionConfig(Table, frozen=True):
    """Limits of what a node holds before it rejects jobs, besides `stages.init_queue`.

    Which limit it was, and when there will probably be room, is in the rejection.

    Attributes:
        session_weights: weights by session id, of those that are not 1, from 0.01 to 100. Sessions share the workers:
            each has the share of its weight, as long as it has jobs waiting.
        max_queued_per_session: jobs of a session that wait for INIT.
        max_live: jobs that have no outcome yet.
        max_live_per_session: of them, those of one session.
        max_undelivered: outcomes that are not acknowledged.
        max_undelivered_bytes: size of those outcomes.
    """

    session_weights: dict[str, float] = msgspec.field(default_factory=dict)
    max_queued_per_session: Count = 10_000
    max_live: Count = 20_000
    max_live_per_session: Count = 20_000
    max_undelivered: Count = 200_000
    max_undelivered_bytes: Bytes = 16 * 1024 * 1024 * 1024

    def __post_init__(self) -> None:
        for session_id, weight in self.session_weights.items():
            if not MIN_SESSION_WEIGHT <= weight <= MAX_SESSION_WEIGHT:
                raise ValueError(
                    f"session_weights: that of {session_id!r} must be {MIN_SESSION_WEIGHT:g} to "
                    f"{MAX_SESSION_WEIGHT:g}, got {weight:g}"
                )

    def weight_of(self, session_id: str) -> float:
        """Return the weight of a session's jobs against those of the others."""
        return self.session_weights.get(session_id, 1.0)


class BudgetConfig(Table, frozen=True):
    """Default seconds of a job; a job may ask for others. Queue time is not charged. See `prorl_trio.Budgets`.

    Attributes:
        init_s: time for INIT.
        run_s: time for RUN, but for the time of `agent_s`, waits for a backend, and pauses.
        eval_s: time for EVAL.
        total_s: time for all stages together.
        agent_s: time in RUN for the tools that the policy calls and the tokens that it samples.
    """

    init_s: Seconds = 120.0
    run_s: Seconds = 900.0
    eval_s: Seconds = 120.0
    total_s: Seconds = 3600.0
    agent_s: Seconds = 600.0

    def of_agent(self, asked: Budgets) -> float:
        """`agent_s` of a job: what it asks for, or the default, but never more than a `run_s` of its own."""
        if asked.agent_s is not None:
            return asked.agent_s
        return self.agent_s if asked.run_s is None else min(self.agent_s, asked.run_s)
