"""The trainer's client of a whole fleet."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from ipc.nursery import open_single_nursery
from ipc.session import Accepted, Cancelled, Rejected
from prorl_trio.client.client import ADMISSION_PATIENCE_S, RolloutClient
from prorl_trio.client.errors import ConnectionLost, SessionLost
from prorl_trio.client.fleet.moves import Delivered, Moved, Named
from prorl_trio.client.fleet.policy import SHUTTING_DOWN
from prorl_trio.client.fleet.pools import FleetPools
from prorl_trio.client.fleet.statistics import merge_statistics
from prorl_trio.client.fleet.submission import Submission
from prorl_trio.types.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence

    from prorl_trio.client.fleet.book import FleetJob
    from prorl_trio.client.fleet.moves import MoveLog
    from prorl_trio.client.fleet.roster import Roster
    from prorl_trio.client.fleet.state import FleetState, Member
    from prorl_trio.types.backends import AnswerT, BackendRequest
    from prorl_trio.types.models import JobSpec, Outcome

__all__ = ["FleetClient"]

logger = logging.getLogger(__name__)

WITHDRAWN: Final = "it runs on another node now"
WRITE_RETRY_S: Final = 1.0

_T = TypeVar("_T")


class FleetClient(RolloutClient):
    """A trainer's session on all nodes of a fleet, with the interface of a session on one. Made by `connect`.

    Jobs go where there is room, those of one group together where that costs no time. The jobs of a lost node run on
    others as their next attempt, and each job's outcome is given out once, also when that node comes back with its own.
    `cursor` counts the outcomes of this client: it says nothing to another one.
    """

    _state: FleetState

    def __init__(self, state: FleetState, log: MoveLog, nursery: trio.Nursery, max_message_bytes: int) -> None:
        super().__init__(state, max_message_bytes, nursery)
        self._log = log
        self._writing = trio.Lock()
        self._disk = trio.CapacityLimiter(1)
        self._submission = Submission(state, self._write)
        self._pools = FleetPools(state, self.run_in_background)
        self._kept: dict[str, float] = {}
        """Times until which the jobs of a lost node are left to its next start."""
        self._resumed = False
        self._naming = 0
        """Times that the trainer was told of lost jobs which are not written down."""
        self.roster: Roster
        state.on_settled = self._settled_moved
        state.on_double = lambda node_id, job_id: nursery.start_soon(self._withdraw, node_id, [job_id])

    def __repr__(self) -> str:
        state = self._state
        how = repr(state.failure) if state.failure else f"{len(state.members)} nodes"
        return f"<FleetClient {state.session_id!r}, {how}, {len(state.inbox)} results waiting>"

    @property
    def node_id(self) -> str:
        """Return the ids of the nodes that there are now, in order of their names."""
        return ",".join(sorted(self._state.members))

    @property
    def resumed(self) -> bool:
        """Return True if a node knew the session when this client first connected to it."""
        return self._resumed

    async def submit(
        self,
        specs: Sequence[JobSpec],
        *,
        patience_s: float = ADMISSION_PATIENCE_S,
        attempts: Mapping[str, int] | None = None,
    ) -> list[Accepted | Rejected]:
        """Submit jobs to the nodes that have room; see `RolloutClient.submit`. The fleet counts `attempts` itself.

        Raises:
            PolicyUndecided: besides, the nodes have different policy versions, and which is the newest is not known.
        """
        del attempts
        self._pools.policy.require_decided()
        return await self._submission.submit(specs, patience_s)

    async def next_outstanding(self, cursor: int) -> tuple[int, Outcome] | None:
        """See `ResultCalls.next_outstanding`.

        Raises:
            SessionLost: besides, a node was lost with jobs of an earlier client, whose specs are not known here; they
                are to be submitted again.
        """
        arrived = await super().next_outstanding(cursor)
        if arrived is None:
            self._raise_if_lost()
        return arrived

    def _raise_if_lost(self) -> None:
        """Raise SessionLost, once, for jobs of an earlier client that are on no node any more. See `ResultCalls`."""
        if not self._state.orphans:
            return
        orphans, self._state.orphans = self._state.orphans, {}
        self._state.named |= orphans
        self._naming += 1
        self._nursery.start_soon(self._write_named, [Named(job_id=job_id) for job_id in sorted(orphans)])
        nodes = ", ".join(sorted(set(orphans.values())))
        raise SessionLost(
            f"{len(orphans)} jobs that an earlier client submitted were on lost nodes ({nodes}); submit them again",
            sorted(orphans),
        )

    def name_lost(self, named: Container[str]) -> None:
        """Count as orphans the jobs that an earlier client has moved, that have no outcome, and that no node has.

        Call it when all nodes that live have joined. Those in `named` the trainer was told of.
        """
        book, state = self._state.book, self._state
        held = state.inbox.job_ids()
        for job_id, nodes in book.moved.items():
            known = book.is_over(job_id) or job_id in held or job_id in named
            if not (known or job_id in book.homes or job_id in book.jobs or job_id in state.left):
                state.orphans[job_id] = min(nodes)
        state.notify()

    async def cancel(
        self,
        job_ids: Sequence[str] = (),
        reason: str = "",
        *,
        group_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        whole_session: bool = False,
        ahead: bool = False,
        on_node: bool = False,
        session_id: str | None = None,
        everything: bool = False,
    ) -> Cancelled:
        """Cancel jobs on all nodes; see `RolloutClient.cancel`."""
        moving = [
            job
            for job in self._state.book.jobs.values()
            if not on_node
            and (
                job.spec.job_id in job_ids
                or whole_session
                or (group_id and job.spec.group_id == group_id)
                or (tags and tags.items() <= job.spec.tags.items())
            )
        ]
        for job in moving:  # on no node now, or on one that is lost meanwhile: where it goes next
            job.cancel_reason = reason or "cancelled by the trainer"
        answers = await self._everywhere(
            lambda member: member.client.cancel(
                job_ids,
                reason,
                group_id=group_id,
                tags=tags,
                whole_session=whole_session,
                ahead=ahead,
                on_node=on_node,
                session_id=session_id,
                everything=everything,
            )
        )
        cancelled = {job_id for answer in answers.values() for job_id in answer.cancelled}
        cancelled.update(job.spec.job_id for job in moving)
        ended = {job_id for answer in answers.values() for job_id in answer.ended} - cancelled
        unknown = [job_id for job_id in dict.fromkeys(job_ids) if job_id not in cancelled | ended]
        return Cancelled(request_id=0, cancelled=sorted(cancelled), ended=sorted(ended), unknown=sorted(unknown))

    async def status(self) -> dict[str, Any]:
        """Return the live state of the fleet: that of all nodes together, and each one's under `nodes`."""
        reports = await self._everywhere(lambda member: member.client.status())
        merged = merge_statistics("fleet", dict(sorted(reports.items())))
        merged["fleet"] = {
            "nodes": {name: self._shown(member) for name, member in sorted(self._state.members.items())},
            "left_out": dict(self.roster.refused),
            "jobs": len(self._state.book.jobs),
        }
        return merged

    def _shown(self, member: Member) -> dict[str, Any]:
        entry = member.entry
        return {
            "url": entry.url,
            "host": entry.host,
            "connected": member.state.connected,
            "behind": member.behind,
            "jobs": len(self._state.book.of_node(member.node_id)),
        }

    async def operate(self, request: BackendRequest[AnswerT]) -> AnswerT:
        """Carry out a request on the pools of all nodes that it concerns."""
        return await self._pools.operate(request)

    async def _everywhere(self, ask: Callable[[Member], Awaitable[_T]]) -> dict[str, _T]:
        """Ask all nodes at once, and return the answers of those that are not lost meanwhile.

        Raises:
            ServiceError: none answered: the reason of one.
        """
        answers: dict[str, _T] = {}
        errors: list[ServiceError] = []

        async def ask_one(member: Member) -> None:
            try:
                answers[member.node_id] = await ask(member)
            except ServiceError as exc:
                errors.append(exc)

        async with open_single_nursery() as nursery:
            for member in list(self._state.members.values()):
                nursery.start_soon(ask_one, member)
        if not answers:
            if self._state.failure is not None:
                self._state.raise_failure()
            raise errors[0] if errors else ConnectionLost("the fleet has no node now")
        return answers

    # ------------------------------------------------------------ nodes that come and go

    def joined(self, member: Member) -> None:
        """Take up what the node has of this session; begin to withdraw there what runs elsewhere.

        Jobs that were left to this start of it, and that it does not have, are moved as those of a lost node are.
        """
        self._resumed = self._resumed or member.client.resumed
        book, withdrawn = self._state.book, list[str]()
        awaited = member.state.awaited()
        if self._kept.pop(member.node_id, None) is not None:
            self._give_up_left(member.node_id, awaited)
            gone = [job for job in book.of_node(member.node_id) if job.spec.job_id not in awaited]
            self._nursery.start_soon(self._move, gone, f"the next start of node {member.node_id} does not have them")
        for job_id in awaited:
            job = book.jobs.get(job_id)
            if job is None and not book.is_over(job_id):
                book.homes[job_id] = member.node_id
                self._state.orphans.pop(job_id, None)
            elif job is not None and not job.node_id and not job.in_submit:
                job.node_id = member.node_id  # it is back before anybody else took it
            elif job is None or job.node_id != member.node_id:
                withdrawn.append(job_id)
        self._pools.policy.joined(member)
        self._nursery.start_soon(self._settle_in, member, withdrawn)

    async def _settle_in(self, member: Member, withdrawn: list[str]) -> None:
        """Withdraw and cancel jobs of a node that has joined, and give it new ones unless it has another policy."""
        await self._withdraw(member.node_id, withdrawn)
        await self._submission.cancel_there(member)
        await self._pools.policy.settle()
        await self._pools.owners.give_back()

    async def wait_settled(self) -> None:
        """Return when it is known of each node whether it has the fleet's policy, or a policy update is under way."""
        await trio.lowlevel.checkpoint()
        while not (self._pools.policy.settled or self._pools.policy.waiting):
            await self._state.wait_changed()

    async def lost(self, member: Member, why: str) -> None:
        """Move the jobs of a lost node, or leave them to its next start for as long as it said."""
        book, node_id = self._state.book, member.node_id
        version = self._pools.version_of(member)
        for job_id in member.state.awaited():
            if job_id not in book.jobs and not book.is_over(job_id):
                self._state.left[job_id] = node_id
        for job_id in [job_id for job_id, home in book.homes.items() if home == node_id]:
            del book.homes[job_id]
        wait_s = member.entry.restart_within_s
        if wait_s > 0 and (book.of_node(node_id) or node_id in self._state.left.values()):
            logger.warning("the jobs of node %s wait %g s for its next start: %s", node_id, wait_s, why)
            until_s = self._kept[node_id] = trio.current_time() + wait_s
            await trio.sleep_until(until_s)
            if self._kept.get(node_id) != until_s:
                return
            del self._kept[node_id]
        else:
            await trio.lowlevel.checkpoint()
        self._give_up_left(node_id)
        self._nursery.start_soon(self._pools.node_lost, member, version)
        await self._move(book.of_node(node_id), f"node {node_id} is lost: {why}")

    def _give_up_left(self, node_id: str, found: Container[str] = ()) -> None:
        """Wait no more for the next start of a node: what it has `found` it has, and other jobs are orphans.

        Those that were submitted again meanwhile are neither.
        """
        book = self._state.book
        for job_id in [job_id for job_id, home in self._state.left.items() if home == node_id]:
            del self._state.left[job_id]
            if job_id not in found and job_id not in book.jobs and not book.is_over(job_id):
                self._state.orphans[job_id] = node_id
        self._state.notify()

    async def cut(self, member: Member, job_ids: Sequence[str]) -> None:
        """Move jobs that the shutdown of their node has ended: one that leaves them to its next start says nothing.

        It forgets them when the moves are written down. That is no acknowledgement: they may have to come back to it.
        Those that were moved before, and of which it has told again after its start, it forgets at once.
        """
        jobs = [job for job_id in job_ids if (job := self._state.book.jobs.get(job_id)) is not None]
        here = [job for job in jobs if job.node_id == member.node_id]
        if here:
            member.behind = member.behind or SHUTTING_DOWN

        here_ids = {job.spec.job_id for job in here}

        async def forget() -> None:
            await self._forget_cut(member, here_ids)

        self._nursery.start_soon(self._move, here, f"node {member.node_id} was shut down", forget)
        await self._forget_cut(member, set(job_ids) - here_ids)

    async def _forget_cut(self, member: Member, job_ids: Iterable[str]) -> None:
        """Have a node forget the outcomes with which its shutdown has ended jobs. One that is lost tells them again."""
        if not (held := member.acks.held(job_ids)):
            await trio.lowlevel.checkpoint()
            return
        try:
            await member.client.withdraw(held, WITHDRAWN, ended=True)
        except ServiceError as exc:
            logger.info("node %s was lost in its shutdown: %s", member.node_id, exc)
        else:
            member.acks.release(held)
            self._state.pass_acks()

    async def _withdraw(self, node_id: str, job_ids: Sequence[str]) -> None:
        """Withdraw jobs from a node that run, or have ended, elsewhere. They may have come here meanwhile: then not."""
        member, jobs = self._state.members.get(node_id), self._state.book.jobs
        stale = {job_id for job_id in job_ids if job_id not in jobs or jobs[job_id].node_id != node_id}
        if member is None or not stale:
            await trio.lowlevel.checkpoint()
            return
        member.withdrawing |= stale
        try:
            await member.client.withdraw(sorted(stale), WITHDRAWN)
        except ServiceError as exc:
            logger.info("node %s was lost again: %s", node_id, exc)
        finally:
            member.withdrawing -= stale

    async def _move(
        self, jobs: Sequence[FleetJob], why: str, written: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        try:
            await self._submission.move(jobs, why, written)
        except ServiceError as exc:
            logger.debug("a move was given up: %s", exc)  # the client is over

    async def wait_written(self) -> None:
        """Return when the deliveries of moved jobs are written down, and acknowledged to their nodes.

        So is then which lost jobs the trainer was told of.
        """
        await trio.lowlevel.checkpoint()
        while self._state.held_acks or self._naming:
            await self._state.wait_changed()

    def close_weight_stores(self) -> None:
        """Remove the folders of the weights that this client wrote."""
        if self.weight_stores.used:
            self.weight_stores.close()

    async def _write(self, lines: Sequence[Moved | Delivered | Named]) -> None:
        """Write to the log; while the fleet's disk is full or away, try again, for nothing may go on before.

        A cancel leaves a call behind that the disk hangs in; the next one comes after it.
        """
        told = False
        async with self._writing:
            while True:
                try:
                    return await trio.to_thread.run_sync(
                        self._log.append, lines, limiter=self._disk, abandon_on_cancel=True
                    )
                except ConfigError as exc:
                    if not told:
                        told = True
                        logger.error("moved jobs wait: %s", exc)
                await trio.sleep(WRITE_RETRY_S)

    def _settled_moved(self, job_ids: list[str]) -> None:
        self._state.held_acks += 1
        self._nursery.start_soon(self._write_delivered, job_ids)

    async def _write_named(self, lines: Sequence[Named]) -> None:
        await self._write(lines)
        self._naming -= 1
        self._state.notify()

    async def _write_delivered(self, job_ids: list[str]) -> None:
        await self._write([Delivered(job_id=job_id) for job_id in job_ids])
        self._state.held_acks -= 1
        self._state.pass_acks()
        self._state.notify()
        for job_id in job_ids:
            self._state.book.moved.pop(job_id, None)
