"""Holding rollouts back that would be too stale when their trainer takes them. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prorl_trio.pipeline.job import Job


class BeginLimit:
    """Counts, for each session, what its trainer has ahead of a rollout that begins now.

    A trainer that takes `B` rollouts for each policy update, oldest first, comes to one with `n` ahead of it after
    `n // B` updates. So with a bound of `S` updates one more may begin where fewer than `(S + 1) * B` are ahead: those
    that run, and those that ended well and were not taken, of which each update takes `B`. What is dropped never
    counts.
    """

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<BeginLimit {self._running.total()} running, {self._waiting.total()} to be taken>"

    def may_begin(self, session: str, max_staleness: int, per_update: int) -> bool:
        """Return whether one more rollout may begin; `per_update` is `B`, 0 for no limit."""
        ahead = self._running[session] + self._waiting[session]
        return not per_update or ahead < (max_staleness + 1) * per_update

    def begun(self, session: str, priority: str = "train") -> None:
        """Count a rollout as running, if its priority is `train`."""
        self._running[session] += priority == "train"

    def ended(self, session: str, priority: str = "train", *, delivered: bool) -> None:
        """Note the end of a rollout that ran; `delivered`: its trainer will take it."""
        self._running[session] -= priority == "train"
        self._waiting[session] += delivered and priority == "train"

    def updated(self, per_update: int) -> None:
        """Count an update of the policy: each session has used up to `per_update` waiting rollouts (0: all)."""
        left = {session: n - per_update for session, n in self._waiting.items() if n > per_update}
        self._waiting = Counter(left if per_update else {})
        self._running = +self._running


def may_begin(limit: BeginLimit, job: Job) -> bool:
    """Return whether the job can keep its bound on staleness, as far as is known before it begins."""
    agent, backends = job.resources.config.agent, job.resources.backends
    bound = agent.staleness_bound(job.spec)
    if bound is None:
        return True
    per_update = agent.rollouts_per_update if job.spec.priority == "train" else 0
    if not limit.may_begin(job.session_id, bound, per_update):
        return False
    return bool(backends.fresh(bound)) or not backends.accepting
