"""Submission of jobs to the nodes of a fleet: each where there is room, again and again until all have an answer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.nursery import open_single_nursery
from ipc.session import Accepted, Rejected
from prorl_trio.client.fleet.book import FleetJob
from prorl_trio.client.fleet.moves import Moved
from prorl_trio.client.fleet.placement import Unit, place
from prorl_trio.client.fleet.rooms import Rooms
from prorl_trio.types.errors import AdmissionRejected, AlreadyDelivered, Draining, DuplicateJob, ServiceError
from prorl_trio.types.models import Outcome, Timing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from prorl_trio.client.fleet.placement import NodeRoom
    from prorl_trio.client.fleet.state import FleetState, Member
    from prorl_trio.types.models import JobSpec

__all__ = ["Submission"]

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.25
"""Pause before nodes without room are asked again, at least."""
MAX_RETRY_S: Final = 2.0
MAX_MOVES: Final = 5
"""Nodes that a job may lose. Then it is failed: it may be what ends them."""
NEWS_AFTER_S: Final = 10.0
GROUPS_KEPT: Final = 10_000
"""Groups whose node is remembered, for mates that are submitted later."""

_encode = msgspec.msgpack.Encoder().encode


class Submission:
    """The submission of a fleet's client. `log` writes moves down, and returns when they are on the disk."""

    def __init__(self, state: FleetState, log: Callable[[Sequence[Moved]], Awaitable[None]]) -> None:
        self._state = state
        self._log = log
        self._rooms = Rooms(state)
        self._groups: dict[str, str] = {}
        """Nodes of the groups that were submitted last, by group."""
        self._refused: dict[str, set[str]] = {}
        """Nodes that will not have a job: it has ended there, or they have no time left for it; by job."""

    async def submit(self, specs: Sequence[JobSpec], patience_s: float) -> list[Accepted | Rejected]:
        """Submit jobs; see `RolloutClient.submit`."""
        deadline_s = trio.current_time() + patience_s
        answers: dict[int, Accepted | Rejected] = {}
        waiting: Iterable[int] = range(len(specs))
        with self._state.submitting():
            await trio.lowlevel.checkpoint()
            while waiting:
                new, others = self._begin(specs, waiting, answers)
                placed: dict[str, Accepted | Rejected] = {}
                try:
                    await self._note_former(new.values())
                    placed.update(await self.place(list(new.values()), deadline_s))
                finally:
                    self._forget_refused(list(new.values()), placed)
                answers.update((index, placed[job.spec.job_id]) for index, job in new.items())
                joined = [(index, await self._join(job, deadline_s)) for index, job in others.items()]
                answers.update((index, answer) for index, answer in joined if answer is not None)
                waiting = [index for index, answer in joined if answer is None]
        return [msgspec.structs.replace(answers[index], index=index) for index in range(len(specs))]

    def _begin(
        self, specs: Sequence[JobSpec], indexes: Iterable[int], answers: dict[int, Accepted | Rejected]
    ) -> tuple[dict[int, FleetJob], dict[int, FleetJob]]:
        """Answer for jobs that are known. Return those that are new, and those that a submit is placing, by index."""
        book, held = self._state.book, self._state.inbox.job_ids()
        new: dict[int, FleetJob] = {}
        others: dict[int, FleetJob] = {}
        for index in indexes:
            spec = specs[index]
            known = book.jobs.get(spec.job_id)
            if book.is_over(spec.job_id):
                answers[index] = _over(spec.job_id, is_held=spec.job_id in held)
            elif known is None:
                job = new[index] = book.jobs[spec.job_id] = FleetJob(spec)
                job.attempt = 2 if self._former(spec.job_id) or spec.job_id in book.moved else 1
            elif known.spec != spec:
                message = f"job {spec.job_id!r} is here with another spec; choose another id"
                answers[index] = _rejected(spec.job_id, DuplicateJob.code, message)
            elif known.accepted:
                answers[index] = _accepted(spec.job_id)
            else:
                others[index] = known
        return new, others

    async def _join(self, job: FleetJob, deadline_s: float) -> Accepted | Rejected | None:
        """Return the answer for a job that a submit is placing; None if that was refused or given up: try anew."""
        job_id, book = job.spec.job_id, self._state.book
        with trio.move_on_at(deadline_s):
            await trio.lowlevel.checkpoint()
            while book.jobs.get(job_id) is job and not job.accepted:
                if self._state.failure is not None:
                    self._state.raise_failure()
                await self._state.wait_changed()
        if job.accepted or book.is_over(job_id):
            return _accepted(job_id)
        if book.jobs.get(job_id) is not job:
            return None
        message = f"job {job_id!r} is in another submit, and no node has taken it yet"
        return _rejected(job_id, AdmissionRejected.code, message, RETRY_S)

    async def _note_former(self, jobs: Iterable[FleetJob]) -> None:
        """Write down that jobs of an earlier client are moved, which are submitted again: their node may come back."""
        former = {job.spec.job_id: self._former(job.spec.job_id) for job in jobs}
        moved = [Moved(job_id=job_id, node_id=node_id, attempt=2) for job_id, node_id in former.items() if node_id]
        if moved:
            await self._log(moved)
            for line in moved:
                self._state.book.moved.setdefault(line.job_id, set()).add(line.node_id)

    async def move(
        self, jobs: Sequence[FleetJob], why: str, written: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Have jobs of a lost node run as their next attempt on others, as soon as one has room.

        Calls `written` when the moves are on the disk, before any job is elsewhere.
        """
        lost = [job for job in jobs if self._state.book.jobs.get(job.spec.job_id) is job]
        if lost:
            logger.warning("%d jobs are moved to other nodes: %s", len(lost), why)
            await self._unplace(lost)
        else:
            await trio.lowlevel.checkpoint()
        if written is not None:
            await written()
        answers = await self.place(lost, deadline_s=None)
        for job in lost:
            answer = answers.get(job.spec.job_id)
            if isinstance(answer, Rejected):
                self._fail(job, f"{why}; no other node takes it: {answer.message}")

    async def place(self, jobs: Sequence[FleetJob], deadline_s: float | None) -> dict[str, Accepted | Rejected]:
        """Submit jobs that are nowhere until each has an answer, or until the deadline those that nobody has room for.

        A job of which an outcome comes meanwhile, or which a node is found to have, counts as accepted.
        """
        answers: dict[str, Accepted | Rejected] = {}
        began_s, told = trio.current_time(), False
        while True:
            waiting = [job for job in jobs if job.spec.job_id not in answers and self._is_nowhere(job)]
            for job in jobs:
                if not self._is_nowhere(job):
                    job.accepted = True
                    answers[job.spec.job_id] = _accepted(job.spec.job_id)
            if not waiting:
                await trio.lowlevel.checkpoint()
                return answers
            before = len(answers)
            last = await self._round(waiting, answers)
            if self._state.failure is not None:
                self._state.raise_failure()
            now_s = trio.current_time()
            if deadline_s is not None and now_s >= deadline_s:
                for job in waiting:
                    if not job.former:  # else it may be on a node that was lost: then it is accepted in the end
                        none = _rejected(job.spec.job_id, AdmissionRejected.code, "no node has room", RETRY_S)
                        answers.setdefault(job.spec.job_id, last.get(job.spec.job_id, none))
                deadline_s = None
                continue
            if len(answers) > before:
                continue
            if not told and now_s - began_s > NEWS_AFTER_S:
                told = True
                logger.warning("%d jobs wait for a node of the fleet that has room", len(waiting))
            waits_s = [answer.retry_after_s for answer in last.values() if answer.retry_after_s is not None]
            pause_s = min(MAX_RETRY_S, max(RETRY_S, min(waits_s, default=RETRY_S)))
            await trio.sleep(pause_s if deadline_s is None else min(pause_s, deadline_s - now_s))

    async def _round(self, jobs: Sequence[FleetJob], answers: dict[str, Accepted | Rejected]) -> dict[str, Rejected]:
        """Submit what nodes have room for. Return the refusals after which to try again."""
        by_id = {job.spec.job_id: job for job in jobs}
        again: dict[str, Rejected] = {}
        homes = self._state.book.homes
        new = [job for job in jobs if job.spec.job_id not in homes]
        members, rooms = await self._rooms.look()
        chosen = place(self._units(new, rooms), rooms)
        if sum(map(len, chosen.values())) < len(new):  # others may have made room
            self._rooms.forget()
            members, rooms = await self._rooms.look()
            chosen = place(self._units(new, rooms), rooms)
        for node_id, job_ids in chosen.items():
            self._rooms.give(node_id, len(job_ids))
        for job_id in by_id:
            if homes.get(job_id) in members:  # it is there already, or may be: it needs no room
                chosen.setdefault(homes[job_id], []).append(job_id)
        async with open_single_nursery() as nursery:
            for node_id, job_ids in chosen.items():
                free = [job_id for job_id in job_ids if job_id not in members[node_id].withdrawing]
                batch = [by_id[job_id] for job_id in free if self._is_nowhere(by_id[job_id])]
                nursery.start_soon(self._submit_to, members[node_id], batch, answers, again)
        return again

    async def _submit_to(
        self,
        member: Member,
        jobs: Sequence[FleetJob],
        answers: dict[str, Accepted | Rejected],
        again: dict[str, Rejected],
    ) -> None:
        book, node_id = self._state.book, member.node_id
        for job in jobs:
            job.node_id, job.in_submit = node_id, True
        lost: list[FleetJob] = []
        try:
            attempts = {job.spec.job_id: job.attempt - 1 for job in jobs if job.attempt > 1}
            given = await member.client.submit([job.spec for job in jobs], patience_s=0, attempts=attempts)
        except ServiceError as exc:
            logger.info("node %s was lost in a submit of %d jobs: %s", node_id, len(jobs), exc)
            lost = [job for job in jobs if book.jobs.get(job.spec.job_id) is job and job.node_id == node_id]
            given = []
        finally:
            for job in jobs:
                job.in_submit = False
        if lost:
            self._rooms.forget()
            await self._unplace(lost)  # some of them may be there
        for job, answer in zip(jobs, given, strict=False):
            self._hear(job, node_id, answer, answers, again)
        self._state.notify()
        if to_cancel := [job for job in jobs if job.cancel_reason is not None and job.node_id == node_id]:
            await self._cancel(member, to_cancel)

    def _hear(
        self,
        job: FleetJob,
        node_id: str,
        answer: Accepted | Rejected,
        answers: dict[str, Accepted | Rejected],
        again: dict[str, Rejected],
    ) -> None:
        job_id = job.spec.job_id
        if isinstance(answer, Accepted):
            answers[job_id] = answer
            job.accepted = True
            self._refused.pop(job_id, None)
            if job.spec.group_id:
                self._groups.pop(job.spec.group_id, None)
                self._groups[job.spec.group_id] = node_id
                if len(self._groups) > GROUPS_KEPT:
                    del self._groups[next(iter(self._groups))]
            return
        if job.node_id == node_id:
            job.node_id = ""
        if answer.code in (AdmissionRejected.code, Draining.code):
            again[job_id] = answer
            self._rooms.forget()
            if answer.code == Draining.code:  # others may have more time for it
                self._refused.setdefault(job_id, set()).add(node_id)
        elif answer.code == AlreadyDelivered.code and job.former:
            self._refused.setdefault(job_id, set()).add(node_id)
            again[job_id] = answer
        else:
            answers[job_id] = answer

    async def cancel_there(self, member: Member) -> None:
        """Cancel the jobs on a node that were to be cancelled while it was away."""
        jobs = [job for job in self._state.book.of_node(member.node_id) if job.cancel_reason is not None]
        if jobs:
            await self._cancel(member, jobs)

    async def _cancel(self, member: Member, jobs: Sequence[FleetJob]) -> None:
        try:
            await member.client.cancel([job.spec.job_id for job in jobs], jobs[0].cancel_reason or "")
        except ServiceError as exc:
            logger.info("node %s was lost in a cancel: %s", member.node_id, exc)

    async def _unplace(self, jobs: Sequence[FleetJob]) -> None:
        """Take jobs from a lost node, and write it down before they are anywhere else."""
        moved = [Moved(job_id=job.spec.job_id, node_id=job.node_id, attempt=job.attempt + 1) for job in jobs]
        for job in jobs:
            job.in_submit = True
        try:
            await self._log(moved)
        finally:
            for job in jobs:
                job.in_submit = False
                self._state.book.moved.setdefault(job.spec.job_id, set()).add(job.node_id)
                job.unplace()
        for job in jobs:
            if job.former[-1] in self._state.members:  # it came back meanwhile, perhaps with the job
                self._state.on_double(job.former[-1], job.spec.job_id)
            if len(job.former) > MAX_MOVES:
                self._fail(job, f"the nodes {', '.join(job.former)} were lost while they had it")

    def _fail(self, job: FleetJob, why: str) -> None:
        if self._state.book.jobs.get(job.spec.job_id) is not job:
            return
        logger.error("job %s fails: %s", job.spec.job_id, why)
        outcome = Outcome(
            job_id=job.spec.job_id,
            instance_id=job.spec.instance.instance_id,
            group_id=job.spec.group_id,
            status="failed",
            reward=None,
            cause="node",
            error=why,
            trajectory=None,
            details={},
            timing=Timing(),
            tags=job.spec.tags,
            error_code="node",
            attempt=max(1, job.attempt - 1),
        )
        self._state.put_made_up(job.spec.job_id, _encode(outcome))

    def _units(self, jobs: Sequence[FleetJob], rooms: Mapping[str, NodeRoom]) -> list[Unit]:
        """Return the jobs with their mates. What was on a node before that will not have it again goes to others."""
        units: list[Unit] = []
        groups: dict[str, list[str]] = {}
        for job in jobs:
            spec = job.spec
            if self._refused.get(spec.job_id):
                units.append(Unit([spec.job_id], home=self._other(spec.job_id, rooms), tied=True))
            elif not spec.group_id:
                units.append(Unit([spec.job_id]))
            elif spec.group_id in groups:
                groups[spec.group_id].append(spec.job_id)
            else:
                groups[spec.group_id] = [spec.job_id]
                home = self._groups.get(spec.group_id, "")
                watched = spec.group is not None and (not home or home in self._state.members)
                units.append(Unit(groups[spec.group_id], home=home, tied=watched))
        return units

    def _other(self, job_id: str, rooms: Mapping[str, NodeRoom]) -> str:
        """Return the node with the most room of those that did not have the job before; one that is none if all did."""
        left = {name: room for name, room in rooms.items() if name not in self._refused[job_id]}
        if not left:
            del self._refused[job_id]  # the next round asks them again
        return max(left, key=lambda name: left[name].free, default="none")

    def _former(self, job_id: str) -> str:
        """Return the lost node on which an earlier client had the job, as far as is known; empty if on none."""
        state = self._state
        return state.orphans.get(job_id) or state.named.get(job_id) or state.left.get(job_id, "")

    def _is_nowhere(self, job: FleetJob) -> bool:
        return self._state.book.jobs.get(job.spec.job_id) is job and not job.node_id

    def _forget_refused(self, jobs: Sequence[FleetJob], answers: Mapping[str, Accepted | Rejected]) -> None:
        """Take out what no node has taken. A job whose submit was cancelled may be on its node: it stays tied to it."""
        book = self._state.book
        for job in jobs:
            job_id = job.spec.job_id
            self._refused.pop(job_id, None)
            if isinstance(answers.get(job_id), Accepted) or book.jobs.get(job_id) is not job:
                continue
            del book.jobs[job_id]
            if job.node_id and job_id not in answers:
                book.homes[job_id] = job.node_id
        self._state.notify()


def _accepted(job_id: str) -> Accepted:
    return Accepted(request_id=0, index=0, job_id=job_id)


def _over(job_id: str, *, is_held: bool) -> Accepted | Rejected:
    """Return the answer for a job whose outcome was given out: accepted while it is not acknowledged."""
    if is_held:
        return _accepted(job_id)
    message = f"job {job_id!r} has ended, and its outcome was acknowledged; to run it again, choose another id"
    return _rejected(job_id, AlreadyDelivered.code, message)


def _rejected(job_id: str, code: str, message: str, retry_after_s: float | None = None) -> Rejected:
    return Rejected(request_id=0, index=0, job_id=job_id, code=code, message=message, retry_after_s=retry_after_s)
