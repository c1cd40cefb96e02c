"""The head's jobs and their members. Pure state: `apply(event)` returns the effects to carry out.

A job is first `queued` in the head. It starts its next attempt (`begins`, while that is stored), is `sent` to a member,
and is `there` until its outcome arrives. The number of a member's jobs before EVAL is limited to its RUN workers plus a
small read-ahead. Messages from a member that no longer has the job are dropped.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, assert_never

from prorl_trio.fleet.events import (
    Acknowledge,
    Answered,
    Begin,
    Begun,
    Cancel,
    CancelThere,
    Deliver,
    End,
    Ended,
    Forget,
    Forgotten,
    Joined,
    Lost,
    Policy,
    Progress,
    Recovered,
    Restored,
    Room,
    Stored,
    Submit,
    Taken,
    Waited,
    Withdraw,
    Withdrawn,
)
from prorl_trio.pipeline.stage_queue import FairOrder
from prorl_trio.types.errors import AdmissionRejected, AlreadyDelivered, Draining, DuplicateJob, UnknownHandler
from prorl_trio.types.models import PRIORITY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prorl_trio.fleet.events import Effect, Event
    from prorl_trio.types.models import JobSpec, Status

Place = Literal["queued", "recovering", "waiting", "begins", "sent", "there"]
"""`recovering`: the head has restarted, and a member may have the job; `waiting`: for the next start of its member."""

MAX_LOSSES: Final = 5
"""A job fails after this many members were lost while they had it, because it may be the cause."""
LOOK_AHEAD: Final = 1_000
"""Number of jobs of one session searched for a job whose group has a member as its home."""
GROUPS_KEPT: Final = 10_000
"""Number of groups whose member is remembered for jobs submitted later."""
SHUTDOWN: Final = "shutdown"
"""Error code of a job that its member cut because the member was shutting down."""

_ELSEWHERE: Final = frozenset({Draining.code, AlreadyDelivered.code, DuplicateJob.code, UnknownHandler.code})
"""Refusals of this job by this member only: another member may accept it."""
_PASSES: Final = frozenset({Draining.code, AlreadyDelivered.code})
"""Temporary refusals among these."""
_BEFORE_EVAL: Final = frozenset({"queued", "init", "ready", "run"})


class FleetJob:
    """A job without an outcome.

    Attributes:
        spec: submitted to a member.
        session_id: of its session at the head.
        attempt: number of attempts started.
        place: see `Place`.
        node_id: the member that has it, or is about to get it; empty if none.
        status: its stage according to the member's last report.
        losses: number of members lost while they had it.
        cancel_reason: set if it must end as cancelled as soon as its place allows it.
    """

    __slots__ = (
        "attempt",
        "begun",
        "cancel_reason",
        "losses",
        "node_id",
        "place",
        "refusals",
        "session_id",
        "spec",
        "status",
    )

    def __init__(self, spec: JobSpec, session_id: str, attempt: int) -> None:
        self.spec = spec
        self.session_id = session_id
        self.attempt = attempt
        self.place: Place = "queued"
        self.node_id = ""
        self.status: Status = "queued"
        self.losses: list[str] = []
        self.cancel_reason: str | None = None
        self.begun = False
        """An attempt is stored as started that no member has received."""
        self.refusals: dict[str, tuple[str, str]] = {}
        """Code and message of the refusals by member."""

    def __repr__(self) -> str:
        return f"<FleetJob {self.spec.job_id!r} attempt {self.attempt} {self.place} {self.node_id}>"

    @property
    def group_key(self) -> tuple[str, str]:
        """Return session and group, because group ids are unique only within a session."""
        return self.session_id, self.spec.group_id


class MemberPlaces:
    """The places of a member.

    Attributes:
        jobs: the head's jobs that it has or is about to get.
        held: number of these jobs before EVAL.
        workers: RUN workers; 0 if unknown.
        others: jobs before EVAL from other sources.
        is_full: it refused a job, or cut one because it shuts down, and has not reported room since.
        behind: why it gets no jobs although it is connected; empty if it gets jobs.
        unready: why a job submitted there would not be processed; empty if it would be.
    """

    __slots__ = (
        "_settled",
        "_waiting",
        "behind",
        "held",
        "is_full",
        "jobs",
        "others",
        "unready",
        "withdrawing",
        "workers",
    )

    def __init__(self, behind: str = "") -> None:
        self.jobs: dict[str, FleetJob] = {}
        self.held = 0
        self.workers = 0
        self.others = 0
        self.is_full = False
        self.behind = behind
        self.unready = ""
        self.withdrawing: set[str] = set()
        """Jobs that it must forget; they must not be submitted there until then."""
        self._waiting: deque[int] = deque()
        self._settled: set[int] = set()

    @property
    def capacity(self) -> int:
        """Return the target number of jobs before EVAL: its RUN workers plus a read-ahead."""
        return self.workers + max(1, self.workers // 4) if self.workers else 0

    @property
    def free(self) -> int:
        """Return the number of jobs that it needs now."""
        return 0 if self.is_full or self.behind else self.capacity - self.others - self.held

    def arrived(self, cursor: int) -> None:
        """Record an outcome that it must forget."""
        self._waiting.append(cursor)

    def settle(self, cursor: int) -> int:
        """Record that it has forgotten an outcome.

        Return the cursor up to which it has forgotten all; 0 if unchanged.
        """
        self._settled.add(cursor)
        reached = 0
        while self._waiting and self._waiting[0] in self._settled:
            reached = self._waiting.popleft()
            self._settled.discard(reached)
        return reached


class Dispatch:
    """All jobs of a head and all its members.

    Attributes:
        jobs: the jobs without an outcome, by id.
        members: the members with a session, by id.
        recovering: the head has restarted, and members that have its jobs may still join.
    """

    def __init__(self, weight_of: Callable[[str], float] | None = None, *, behind: str = "") -> None:
        """Create the state of a head that has just started. `weight_of` returns a session's share of the places.

        `behind` is the reason why a joining member gets no jobs until a `Policy` event allows it; empty: it gets jobs
        at once.
        """
        self.jobs: dict[str, FleetJob] = {}
        self.members: dict[str, MemberPlaces] = {}
        self.recovering = True
        self._queue: FairOrder[FleetJob] = FairOrder(weight_of)
        self._homes: dict[tuple[str, str], str] = {}
        self._behind = behind
        self._refused: set[FleetJob] = set()
        """Queued jobs that a member has refused."""

    @property
    def queued(self) -> int:
        """Return the number of jobs waiting for a member."""
        return len(self._queue)

    def queued_of(self, session_id: str) -> int:
        """Return the number of jobs of a session waiting for a member."""
        return self._queue.count(session_id)

    def has(self, node_id: str, job_id: str) -> bool:
        """Return whether a member currently has a job."""
        return self._there(node_id, job_id) is not None

    def member_of(self, job_id: str) -> str:
        """Return the member that has a job or is about to get it; empty if there is none or the job is unknown."""
        job = self.jobs.get(job_id)
        return "" if job is None else job.node_id

    def of_member(self, node_id: str) -> list[FleetJob]:
        """Return the jobs that a member has or is about to get, and jobs that wait for its next start."""
        return [job for job in self.jobs.values() if job.node_id == node_id]

    def apply(self, event: Event) -> list[Effect]:
        """Apply an event, and return the effects to carry out, in order."""
        effects: list[Effect] = []
        match event:
            case Taken():
                self._take(event)
            case Joined():
                self._join(event, effects)
            case Lost():
                self._lose(event, effects)
            case Waited(node_id):
                for job in [job for job in self.of_member(node_id) if job.place == "waiting"]:
                    self._requeue(job)
            case Recovered():
                self.recovering = False
                for job in [job for job in self.jobs.values() if job.place == "recovering"]:
                    self._requeue(job)
            case Room():
                self._report(event, effects)
            case Policy(node_id, behind):
                if (member := self.members.get(node_id)) is not None:
                    member.behind = behind
            case Begun(job_id):
                self._begun(job_id, effects)
            case Answered():
                self._answer(event, effects)
            case Progress(node_id, job_id, status):
                if (there := self._there(node_id, job_id)) is not None:
                    self._enter(there, status)
            case Ended():
                self._end(event, effects)
            case Stored(node_id, job_id, cursor):
                self._forget(node_id, job_id, cursor, effects)
            case Forgotten(node_id, job_id, cursor):
                self._forgotten(node_id, job_id, cursor, effects)
            case Withdrawn(node_id, job_ids):
                if (member := self.members.get(node_id)) is not None:
                    member.withdrawing.difference_update(job_ids)
            case Cancel(job_id, reason):
                self._cancel(job_id, reason, effects)
            case _:
                assert_never(event)
        self._place(effects)
        return effects

    # ------------------------------------------------------------ jobs

    def _take(self, event: Taken) -> None:
        job = self.jobs[event.spec.job_id] = FleetJob(event.spec, event.session_id, event.attempt)
        if self.recovering and event.attempt:
            job.place = "recovering"
        else:
            self._push(job)

    def _cancel(self, job_id: str, reason: str, effects: list[Effect]) -> None:
        job = self.jobs.get(job_id)
        if job is None or job.cancel_reason is not None:
            return
        job.cancel_reason = reason
        if job.place == "there":
            effects.append(CancelThere(job.node_id, job_id, reason))
        elif job.place not in ("begins", "sent"):
            self._end_here(job, reason, effects)

    def _begun(self, job_id: str, effects: list[Effect]) -> None:
        job = self.jobs.get(job_id)
        if job is None or job.place != "begins":
            return
        job.begun = True
        member = self.members.get(job.node_id)
        if job.cancel_reason is not None:
            self._end_here(job, job.cancel_reason, effects)
        elif member is None or member.jobs.get(job_id) is not job or member.behind or job_id in member.withdrawing:
            self._requeue(job)
        else:
            self._send(job, effects)

    def _answer(self, event: Answered, effects: list[Effect]) -> None:
        job, member = self._there(event.node_id, event.job_id), self.members.get(event.node_id)
        if job is None or member is None or job.place != "sent":
            return
        if not event.code:
            job.place = "there"
            job.refusals.clear()
            if job.cancel_reason is not None:
                effects.append(CancelThere(event.node_id, event.job_id, job.cancel_reason))
        elif job.cancel_reason is not None:
            self._end_here(job, job.cancel_reason, effects)
        elif event.code == AdmissionRejected.code:
            member.is_full = True
            job.begun = True
            self._requeue(job)
        elif event.code in _ELSEWHERE:
            job.begun = True
            job.refusals[event.node_id] = (event.code, event.message)
            self._requeue(job)
            self._judge_refused(job, effects)
        else:
            self._end_here(job, event.message, effects, failed=True)

    def _end(self, event: Ended, effects: list[Effect]) -> None:
        member, job = self.members.get(event.node_id), self.jobs.get(event.job_id)
        if member is None:
            return
        member.arrived(event.cursor)
        if job is None:
            self._forget(event.node_id, event.job_id, event.cursor, effects)
            return
        here = self._there(event.node_id, event.job_id) is job
        may_be = job.attempt > 0 and job.place in ("queued", "recovering") and event.job_id not in member.withdrawing
        is_older = event.attempt < job.attempt
        if is_older or not (here or may_be):
            self._forget(event.node_id, event.job_id, event.cursor, effects)
            if here:  # a member asked for the next attempt has continued its earlier copy
                self._move(job, effects)
        elif event.error_code == SHUTDOWN and event.status == "cancelled":
            member.is_full = True
            self._forget(event.node_id, event.job_id, event.cursor, effects)
            if here:
                self._move(job, effects)
        else:
            self._drop(job)
            effects.append(Deliver(event.node_id, event.job_id, event.cursor))

    def _forget(self, node_id: str, job_id: str, cursor: int, effects: list[Effect]) -> None:
        if (member := self.members.get(node_id)) is not None:
            member.withdrawing.add(job_id)
            effects.append(Forget(node_id, job_id, cursor))

    def _forgotten(self, node_id: str, job_id: str, cursor: int, effects: list[Effect]) -> None:
        if (member := self.members.get(node_id)) is not None:
            member.withdrawing.discard(job_id)
            if reached := member.settle(cursor):
                effects.append(Acknowledge(node_id, reached))

    def _end_here(self, job: FleetJob, reason: str, effects: list[Effect], *, failed: bool = False) -> None:
        self._drop(job)
        effects.append(End(job.spec.job_id, reason, failed))

    def _move(self, job: FleetJob, effects: list[Effect]) -> None:
        """Start the next attempt of a job on another member, unless it must be cancelled."""
        if job.cancel_reason is not None:
            self._end_here(job, job.cancel_reason, effects)
        else:
            self._requeue(job)

    # ------------------------------------------------------------ members

    def _join(self, event: Joined, effects: list[Effect]) -> None:
        member = self.members[event.node_id] = MemberPlaces(self._behind)
        for job in [job for job in self.of_member(event.node_id) if job.spec.job_id not in event.holds]:
            if job.place == "waiting":  # its next start lacks the job, for example because of another disk
                self._requeue(job)
        stale: list[str] = []
        for job_id in sorted(event.holds):
            held = self.jobs.get(job_id)
            if held is None or not self._goes_on(held, event.node_id):
                stale.append(job_id)
                continue
            self._queue.remove(held)
            self._refused.discard(held)
            held.place, held.begun = "there", False
            self._assign(held, event.node_id)
            effects.append(Restored(job_id, event.node_id))
            if held.cancel_reason is not None:
                effects.append(CancelThere(event.node_id, job_id, held.cancel_reason))
        if stale:
            member.withdrawing.update(stale)
            effects.append(Withdraw(event.node_id, stale))

    def _goes_on(self, job: FleetJob, node_id: str) -> bool:
        """Return whether a job held by a member continues there, because no other member got it since."""
        if job.place == "waiting":
            return job.node_id == node_id
        return job.place in ("queued", "recovering") and job.attempt > 0 and not job.begun

    def _lose(self, event: Lost, effects: list[Effect]) -> None:
        member = self.members.pop(event.node_id, None)
        if member is None:
            return
        for job in list(member.jobs.values()):
            if job.place == "begins":
                continue  # `_begun` finds no member
            if job.cancel_reason is not None:
                self._end_here(job, job.cancel_reason, effects)
                continue
            job.losses.append(event.node_id)
            if len(job.losses) > MAX_LOSSES:
                why = f"the nodes {', '.join(job.losses)} were lost while they had it: {event.why}"
                self._end_here(job, why, effects, failed=True)
            elif event.waits:
                job.place, job.status, job.begun = "waiting", "queued", False
            else:
                self._requeue(job)

    def _report(self, event: Room, effects: list[Effect]) -> None:
        member = self.members.get(event.node_id)
        if member is None:
            return
        member.workers = event.workers
        member.others = max(0, event.workers - event.free - event.own) if event.room > 0 else 0
        member.is_full = event.room <= 0
        member.unready = event.unready
        for job in list(self._refused):
            self._judge_refused(job, effects, again=True)

    def _judge_refused(self, job: FleetJob, effects: list[Effect], *, again: bool = False) -> None:
        """Fail a job that no member will ever accept; with `again`, retry members whose refusals may have expired."""
        refusals = [job.refusals.get(node_id) for node_id in self.members]
        if not refusals or None in refusals:
            return
        lasting = [found for found in refusals if found is not None and found[0] not in _PASSES]
        if len(lasting) == len(refusals):
            self._end_here(job, f"no member takes it: {lasting[0][1]}", effects, failed=True)
        elif again:
            job.refusals.clear()
            self._refused.discard(job)

    # ------------------------------------------------------------ placing

    def _place(self, effects: list[Effect]) -> None:
        """Assign queued jobs to members with free places, next the member with the largest free share.

        While a member works on jobs, those that do not get none, even if it is full: they would wait there.
        """
        if not len(self._queue):
            return
        free = {node_id: member.free for node_id, member in self.members.items() if member.free > 0}
        if any(member.workers and not (member.unready or member.behind) for member in self.members.values()):
            free = {node_id: count for node_id, count in free.items() if not self.members[node_id].unready}
        while free and len(self._queue):
            node_id = max(free, key=lambda name: free[name] / self.members[name].capacity)
            job = self._next_for(node_id, free)
            if job is None:
                del free[node_id]
                continue
            free[node_id] -= 1
            if not free[node_id]:
                del free[node_id]
            self._give(job, node_id, effects)

    def _next_for(self, node_id: str, free: dict[str, int]) -> FleetJob | None:
        """Take the next job for a member from the queue.

        This is the next job in fair order whose group has its home there or nowhere. Failing that, it is a job whose
        home has no free place now. Groups with a policy stay at their home, because that member supervises the group.
        """

        def suits(job: FleetJob, *, steals: bool) -> bool:
            if node_id in job.refusals or job.spec.job_id in self.members[node_id].withdrawing:
                return False
            home = self._home_of(job)
            return not home or home == node_id or (steals and job.spec.group is None and home not in free)

        def first(jobs: Iterable[FleetJob], *, steals: bool) -> FleetJob | None:
            return next((job for job in islice(jobs, LOOK_AHEAD) if suits(job, steals=steals)), None)

        return self._queue.pop_chosen(lambda jobs: first(jobs, steals=False)) or self._queue.pop_chosen(
            lambda jobs: first(jobs, steals=True)
        )

    def _home_of(self, job: FleetJob) -> str:
        """Return the member that has other jobs of the group; empty if none has, or if it gets no jobs."""
        home = self._homes.get(job.group_key, "") if job.spec.group_id else ""
        member = self.members.get(home)
        return home if member is not None and not member.behind and home not in job.refusals else ""

    def _give(self, job: FleetJob, node_id: str, effects: list[Effect]) -> None:
        self._refused.discard(job)
        if job.spec.group_id and not self._home_of(job):
            self._homes.pop(job.group_key, None)
            self._homes[job.group_key] = node_id
            if len(self._homes) > GROUPS_KEPT:
                del self._homes[next(iter(self._homes))]
        self._assign(job, node_id)
        if job.begun:
            self._send(job, effects)
            return
        job.place = "begins"
        job.attempt += 1
        effects.append(Begin(job.spec.job_id, job.attempt, node_id))

    def _send(self, job: FleetJob, effects: list[Effect]) -> None:
        job.place, job.begun = "sent", False
        effects.append(Submit(job.node_id, job.spec.job_id))

    def _assign(self, job: FleetJob, node_id: str) -> None:
        member = self.members[node_id]
        job.node_id, job.status = node_id, "queued"
        member.jobs[job.spec.job_id] = job
        member.held += 1

    def _enter(self, job: FleetJob, status: Status) -> None:
        self.members[job.node_id].held += (status in _BEFORE_EVAL) - (job.status in _BEFORE_EVAL)
        job.status = status

    def _there(self, node_id: str, job_id: str) -> FleetJob | None:
        job = self.jobs.get(job_id)
        return job if job is not None and job.node_id == node_id and job.place in ("sent", "there") else None

    def _push(self, job: FleetJob) -> None:
        job.place = "queued"
        self._queue.push(job, PRIORITY[job.spec.priority], job.session_id)
        if job.refusals:
            self._refused.add(job)

    def _requeue(self, job: FleetJob) -> None:
        """Requeue a job that has left its member."""
        self._unplace(job)
        self._push(job)

    def _unplace(self, job: FleetJob) -> None:
        member = self.members.get(job.node_id)
        if member is not None and member.jobs.pop(job.spec.job_id, None) is not None:
            member.held -= job.status in _BEFORE_EVAL
        job.node_id, job.status = "", "queued"

    def _drop(self, job: FleetJob) -> None:
        """Remove a job that ends."""
        self._unplace(job)
        self._queue.remove(job)
        self._refused.discard(job)
        del self.jobs[job.spec.job_id]

    def places(self) -> tuple[int, int]:
        """Return the free places of all members that get jobs, and the number of their RUN workers."""
        members: Sequence[MemberPlaces] = [member for member in self.members.values() if not member.behind]
        return sum(max(0, member.free) for member in members), sum(member.workers for member in members)
