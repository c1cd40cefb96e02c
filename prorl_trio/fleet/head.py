"""The head of a fleet: a node for its sessions and edges, whose jobs run on the fleet's nodes."""

from __future__ import annotations

import logging
from collections import Counter, deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, assert_never, cast

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.session import Accepted, OutcomeFrame
from prorl_ipc.wire import UNDECODABLE
from prorl_trio.fleet import events as on
from prorl_trio.fleet.checks import JobChecks
from prorl_trio.fleet.dispatch import Dispatch
from prorl_trio.fleet.members import ROOM_INTERVAL_S, STATUS_INTERVAL_S, Members, merge_statistics
from prorl_trio.fleet.pools import FleetPools
from prorl_trio.pipeline.admission import Admission, Load
from prorl_trio.pipeline.live import LiveJobs
from prorl_trio.pipeline.observer import JobView, Observers
from prorl_trio.sessions.encoding import failed_outcome, lost_outcome
from prorl_trio.sessions.node_api import Room
from prorl_trio.supervision import service_task
from prorl_trio.types.errors import (
    AdmissionRejected,
    ConfigError,
    Draining,
    DuplicateJob,
    NoAgentWanted,
    ServiceError,
    UnknownJob,
)
from prorl_trio.types.models import EncodedOutcome
from prorl_trio.types.programs import FinishAgent, OpenAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from prorl_ipc.session import JobEvent, OutcomeRefFrame, Rejected
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.client.client import RolloutClient
    from prorl_trio.config import HeadConfig
    from prorl_trio.fleet.members import Member
    from prorl_trio.pipeline.live import JobFilter
    from prorl_trio.pipeline.observer import Observer
    from prorl_trio.rendezvous.watch import FleetWatch
    from prorl_trio.sessions.node_api import SessionSink
    from prorl_trio.sessions.session_table import SessionTable
    from prorl_trio.types.backends import AnswerT, NodeRequest
    from prorl_trio.types.models import JobSpec, Outcome, Status, ToolCall, ToolSchema

logger = logging.getLogger(__name__)

NO_MEMBER_RETRY_S: Final = 2.0
MEMBER_ANSWER_S: Final = 10.0
"""Time limit for a member to answer a request about a job, in addition to the caller's own wait."""
MEMBER_LOOK_S: Final = 0.25
"""Wait time reported to submitters while no member gets jobs."""
MAX_SHOWN_JOBS: Final = 1_000
RECOVERY_POLL_S: Final = 0.1
WITHDRAWN: Final = "it runs on another node now"
RELAYED: Final = frozenset({"ready", "run", "ran", "eval"})
"""Stages on a member that are relayed. The head itself reports `queued` and `init`, and an end through the outcome."""


class _Live:
    """A job without an outcome, and its session."""

    __slots__ = ("accepted_s", "attempt", "finished", "sink", "spec", "status", "status_s")

    def __init__(self, spec: JobSpec, sink: SessionSink, attempt: int, now_s: float) -> None:
        self.spec = spec
        self.sink = sink
        self.attempt = attempt
        """Number of attempts started."""
        self.accepted_s = self.status_s = now_s
        self.status: Status = "queued"
        self.finished = trio.Event()

    @property
    def session_id(self) -> str:
        return self.sink.session_id


class Fleet:
    """A fleet as seen by its sessions and edges. Implements `sessions.node_api.NodeApi` over member nodes.

    It makes no decisions: each occurrence is an event for `Dispatch`, whose effects it carries out.

    Attributes:
        config: its configuration.
        members: the nodes with a session of the head.
        draining: it accepts no more jobs.
        chat_format: parses turns for the ProRL endpoints; None without these.
        observers: notified of every job.
    """

    def __init__(
        self,
        config: HeadConfig,
        watch: FleetWatch,
        sessions: SessionTable,
        nursery: trio.Nursery,
        *,
        session_id: str,
        is_durable: bool,
        options: dict[str, Any],
        model: str,
        observers: Sequence[Observer],
    ) -> None:
        """Create the head of a fleet without members. Use `open_fleet_head`."""
        self.config = config
        self.node_id = config.node_id
        self.draining = False
        self.chat_format: ChatFormat | None = None
        self.members = Members(
            watch,
            nursery,
            self,
            session_id=session_id,
            set_behind=self.set_behind,
            options=options,
            model=model,
        )
        self.admission = Admission(config.admission, config.max_queued, "max_queued")
        self.observers: list[Observer] = list(observers)
        self.dispatch = Dispatch(lambda session_id: self.admission.limits.weight_of(session_id))
        self._sessions = sessions
        self._nursery = nursery
        self._is_durable = is_durable
        self._watch = Observers(self.observers)
        self._live: LiveJobs[_Live] = LiveJobs()
        self._events: deque[on.Event] = deque()
        self._applying = False
        self._arrived: dict[tuple[str, int], tuple[Member, EncodedOutcome]] = {}
        self._next_starts: dict[str, float] = {}
        """Times until which jobs of a lost member are reserved for its next start."""
        self._outcomes: Counter[str] = Counter()
        self._moved = 0
        self._idle = trio.Event()
        self._idle.set()
        self._started_s = trio.current_time()
        self._parts: dict[str, Callable[[], object]] = {}
        self._pools = FleetPools(self.members.all, self._run_soon)
        self._checks = JobChecks(self._to_ask)

    # ------------------------------------------------------------ the sessions' and edges' side

    def check(self, spec: JobSpec, sink: SessionSink, ahead: int) -> None:
        """Check that the fleet would accept a job now. See `NodeApi.check`.

        Raises:
            AdmissionRejected: also raised if the fleet has no member, or if the newest of its members' policy versions
                is unknown.
        """
        if self.draining:
            raise Draining(f"the head {self.node_id} is draining: submit again when the fleet has started another head")
        self.validate(spec)
        if spec.job_id in self._live:
            raise DuplicateJob(f"job {spec.job_id!r} is live here; choose another id")
        if not self.members.all:
            raise AdmissionRejected(
                f"the fleet in {self.members.folder} has no node now{self._complaints()}; it retries",
                NO_MEMBER_RETRY_S,
            )
        if undecided := self._pools.policy.undecided:
            raise AdmissionRejected(undecided, NO_MEMBER_RETRY_S)
        self.admission.check(self._load(sink.session_id, ahead), trio.current_time())

    def validate(self, spec: JobSpec) -> None:
        """Check the job itself, using a member's answer about its handler and payload. See `NodeApi.validate`."""
        if (refusal := self._checks.refusal(spec)) is not None:
            raise refusal.with_traceback(None)

    def is_unexamined(self, spec: JobSpec) -> bool:
        """Return whether a member must check the job. See `NodeApi.is_unexamined`."""
        return bool(self.members.all) and not self.draining and self._checks.is_unknown(spec)

    async def examine(self, specs: Sequence[JobSpec]) -> None:
        """Ask a member for objections to these jobs. See `NodeApi.examine`."""
        await self._checks.examine(specs)

    def take(self, spec: JobSpec, sink: SessionSink, attempt: int) -> None:
        """Accept a job that was promised a place. See `NodeApi.take`.

        Raises:
            DuplicateJob: a job with this id is live.
        """
        if spec.job_id in self._live:
            raise DuplicateJob(f"job {spec.job_id!r} is live here; choose another id")
        live = _Live(spec, sink, attempt - 1, trio.current_time())
        self._live.add(live)
        if self._idle.is_set():
            self._idle = trio.Event()
        self._enter(live, "queued", "")
        self.apply(on.Taken(spec, sink.session_id, attempt - 1))

    def room(self, session_id: str, ahead: int) -> Room:
        """Return the room for jobs of a session. See `NodeApi.room`."""
        free, workers = self.dispatch.places()
        room = 0 if self.draining or not self.members.all else self.admission.room(self._load(session_id, ahead))
        return Room(room=room, free=min(room, free - self.dispatch.queued - ahead), run_workers=workers)

    async def cancel(self, job_id: str, reason: str) -> None:
        """Cancel a job, and return when its outcome is delivered. See `NodeApi.cancel`.

        A job on a member is cancelled there. If the member is lost in the meantime, the head ends the job, and the
        member forgets its copy when it returns.
        """
        live = self._live.get(job_id)
        if live is None:
            raise UnknownJob(f"job {job_id!r} is not live in the fleet of {self.node_id}")
        self.apply(on.Cancel(job_id, reason))
        await live.finished.wait()

    def cancel_soon(self, job_id: str, reason: str) -> None:
        """Cancel a job as `cancel` does, without waiting. See `NodeApi.cancel_soon`."""
        self.apply(on.Cancel(job_id, reason))

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """Carry out a request on the pools of all affected members, or on a job's member. See `NodeApi.operate`."""
        if isinstance(request, OpenAgent | FinishAgent):
            return cast("AnswerT", await self._ask_member_of(request.job_id, request))
        return await self._pools.operate(request)

    async def _ask_member_of(self, job_id: str, request: NodeRequest[AnswerT]) -> AnswerT:
        """Send a request to the member that has a job, as soon as one has it, and to another member if it is lost."""
        wait_s = request.wait_s if isinstance(request, OpenAgent) else 0.0
        with trio.move_on_after(wait_s + MEMBER_ANSWER_S):
            while True:
                if job_id not in self._live:
                    raise UnknownJob(f"job {job_id!r} is not live in the fleet of {self.node_id}")
                member = self.members.all.get(self.dispatch.member_of(job_id))
                try:
                    if member is not None:
                        return await member.client.operate(request)
                except UnknownJob:  # it has not arrived there, or is moving to another member
                    pass
                except NoAgentWanted:
                    raise
                except ServiceError as exc:
                    logger.info("node %s does not answer for job %s: %s", self.dispatch.member_of(job_id), job_id, exc)
                await trio.sleep(MEMBER_LOOK_S)
        raise NoAgentWanted(f"no node of the fleet has job {job_id!r} now, or none that answers")

    def read_turn(self, token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """Return the text of a completion and its tool calls. See `NodeApi.read_turn`."""
        if self.chat_format is None:  # the configuration refuses edges that need one
            raise ConfigError("this head of a fleet has no tokenizer")
        return self.chat_format.read_turn(token_ids, tools)

    def unreadiness(self) -> str:
        """Return why a job submitted now would not be processed; empty if it would be."""
        if self.draining:
            return "the head is draining"
        if refusal := self._sessions.refusal:
            return refusal
        members = self.dispatch.members.values()
        if not members:
            return f"the fleet has no node now{self._complaints()}"
        if any(not (member.behind or member.unready) for member in members):
            return ""
        return next((member.behind or member.unready for member in members), "")

    @property
    def live(self) -> int:
        """Return the number of jobs without an outcome."""
        return len(self._live)

    @property
    def uptime_s(self) -> float:
        """Return the seconds since the head was opened."""
        return trio.current_time() - self._started_s

    def live_by_status(self) -> Counter[str]:
        """Return the number of live jobs in each status."""
        return self._live.by_status()

    def find_jobs(self, wanted: JobFilter, limit: int) -> tuple[int, list[JobView]]:
        """Return the number of live jobs that match, and the first `limit` of these. See `NodeApi.find_jobs`."""
        total, jobs = self._live.find(wanted, limit)
        return total, [self._view(live) for live in jobs]

    def find_job(self, job_id: str) -> JobView | None:
        """Return the current state of a live job. See `NodeApi.find_job`."""
        live = self._live.get(job_id)
        return None if live is None else self._view(live)

    def describe(self, name: str, read: Callable[[], object]) -> None:
        """Add a part `name` to `statistics`: `read` is called each time and returns msgpack-ready values."""
        self._parts[name] = read

    def part(self, name: str) -> Any:
        """Return one part of `statistics`.

        Raises:
            KeyError: the name is unknown.
        """
        return self._parts[name]() if name in self._parts else self.statistics()[name]

    def statistics(self) -> dict[str, object]:
        """Return the live state of the fleet: all members combined, and each member's own under `members`.

        The members' figures are up to `STATUS_INTERVAL_S` old.
        """
        reports = {node_id: member.status for node_id, member in sorted(self.members.all.items()) if member.status}
        merged = merge_statistics(self.node_id, reports)
        nodes = merged.pop("nodes")
        pipeline = merged.setdefault("pipeline", {})
        pipeline |= {"jobs": len(self._live), "outcomes": dict(self._outcomes), "moved": self._moved}
        stages = pipeline.setdefault("stages", {})
        waiting = stages.setdefault("init", {"queued": 0, "busy": 0, "workers": 0})
        waiting["queued"] = waiting.get("queued", 0) + self.dispatch.queued
        merged |= {
            "node_id": self.node_id,
            "draining": self.draining,
            "uptime_s": self.uptime_s,
            "jobs": [msgspec.structs.asdict(self._view(live)) for live in self._live.most_advanced(MAX_SHOWN_JOBS)],
            "members": {
                node_id: {**self._shown(member), **nodes.get(node_id, {})} for node_id, member in self._known()
            },
            "left_out": dict(self.members.refused),
        }
        own = {name: read() for name, read in self._parts.items()}
        if "totals" in merged:
            own.pop("totals", None)  # turns and tokens are counted where they are sampled
        return {**merged, **own}

    # ------------------------------------------------------------ the process's side

    async def drain(self) -> None:
        """Accept no more jobs; return when every job has its outcome. See `node.drain.Drainable`."""
        self.draining = True
        await self._sessions.wait_answered()
        await self._idle.wait()

    async def cancel_all(self, reason: str) -> None:
        """Accept no more jobs, and leave live jobs to the next start; cancel them if sessions do not persist.

        Members continue their jobs in the meantime.
        """
        self.draining = True
        if self._is_durable:
            await trio.lowlevel.checkpoint()
            return
        for live in self._live:
            self.cancel_soon(live.spec.job_id, reason)
        await self._idle.wait()

    def start_members(self, recovery_timeout_s: float) -> None:
        """Join the nodes in the folder, now and later. Call once, after the jobs of earlier processes are restored.

        Jobs that may be on a node start again only when all nodes in the folder have joined, or after this many
        seconds.
        """
        self._nursery.start_soon(service_task(self.members.run, "fleet folder"))
        self._nursery.start_soon(self._recover, recovery_timeout_s)

    async def _recover(self, timeout_s: float) -> None:
        with trio.move_on_after(timeout_s):
            await trio.lowlevel.checkpoint()
            while not self.members.settled:  # noqa: ASYNC110 - the state also changes with time
                await trio.sleep(RECOVERY_POLL_S)
        self.apply(on.Recovered())

    # ------------------------------------------------------------ events and effects

    def apply(self, event: on.Event) -> None:
        """Apply an event and carry out its effects. An event caused by an effect is applied afterwards."""
        self._events.append(event)
        if self._applying:
            return
        self._applying = True
        try:
            while self._events:
                for effect in self.dispatch.apply(self._events.popleft()):
                    self._carry_out(effect)
        finally:
            self._applying = False

    def _carry_out(self, effect: on.Effect) -> None:
        match effect:
            case on.Begin(job_id, attempt, node_id):
                live = self._live[job_id]
                self._moved += attempt > 1
                live.attempt = attempt
                live.status, live.status_s = "init", trio.current_time()
                self._live.moved(live)
                live.sink.begin_attempt(job_id, f"node {node_id}", partial(self.apply, on.Begun(job_id)))
                self._watch.job_moved(partial(self._view, live), "init", f"node {node_id}")
            case on.Submit(node_id, job_id):
                job = self.dispatch.jobs[job_id]
                self.members.all[node_id].submit_soon(job.spec, job.attempt - 1)
            case on.CancelThere(node_id, job_id, reason):
                self._nursery.start_soon(self._cancel_there, self.members.all[node_id], job_id, reason)
            case on.Withdraw(node_id, job_ids):
                self._nursery.start_soon(self._withdraw, self.members.all[node_id], job_ids)
            case on.Forget(node_id, job_id, cursor):
                self._arrived.pop((node_id, cursor), None)
                self.members.all[node_id].forget_soon(job_id, cursor)
            case on.Deliver(node_id, job_id, cursor):
                member, outcome = self._arrived.pop((node_id, cursor))
                self._deliver(job_id, outcome, lambda _: self._from(member, on.Stored(node_id, job_id, cursor)))
            case on.Acknowledge(node_id, cursor):
                self.members.all[node_id].client.acknowledge(cursor)
            case on.End(job_id, reason, failed):
                self._end_here(job_id, reason, failed=failed)
            case on.Restored(job_id, node_id):
                self._enter(self._live[job_id], "queued", f"node {node_id}")
            case _:
                assert_never(effect)

    def _from(self, member: Member, event: on.Event) -> None:
        """Apply an event of a member, unless its session is over: a later session may reuse the same cursors."""
        if self.members.all.get(member.node_id) is member:
            self.apply(event)

    def _deliver(self, job_id: str, outcome: EncodedOutcome, stored: Callable[[bool], None]) -> None:
        live = self._forget_live(job_id, outcome.status)
        live.sink.deliver_encoded(outcome, stored)
        if self.observers:
            try:
                self._show_end(live, outcome.decode())
            except UNDECODABLE as exc:  # its node may have a later version
                logger.warning("job %s has ended as %s, and its outcome is not shown: %s", job_id, outcome.status, exc)
        live.finished.set()

    def _end_here(self, job_id: str, reason: str, *, failed: bool) -> None:
        live = self._live[job_id]
        outcome = failed_outcome(live.spec, "node", reason, max(1, live.attempt))
        if not failed:
            outcome = msgspec.structs.replace(outcome, status="cancelled", cause="cancelled", error_code="cancelled")
        self._forget_live(job_id, outcome.status)
        live.sink.deliver(outcome)
        self._show_end(live, outcome)
        live.finished.set()

    def _forget_live(self, job_id: str, status: Status) -> _Live:
        live = self._live.remove(job_id)
        self._outcomes[status] += 1
        self.admission.rate.ended(trio.current_time())
        if not self._live:
            self._idle.set()
        return live

    def _show_end(self, live: _Live, outcome: Outcome) -> None:
        live.status = outcome.status
        view = partial(self._view, live)
        self._watch.job_moved(view, outcome.status, outcome.error)
        self._watch.job_ended(view, outcome)

    def _enter(self, live: _Live, status: Status, detail: str) -> None:
        live.status, live.status_s = status, trio.current_time()
        self._live.moved(live)
        live.sink.report(live.spec.job_id, status, detail)
        self._watch.job_moved(partial(self._view, live), status, detail)

    # ------------------------------------------------------------ members

    def joined(self, member: Member) -> None:
        self._next_starts.pop(member.node_id, None)
        # Outcomes that arrived before the node's list of jobs are not in it.
        holds = frozenset(member.state.awaited() | member.state.inbox.job_ids())
        logger.info("node %s has joined the fleet, with %d jobs", member.node_id, len(holds))
        self.apply(on.Joined(member.node_id, holds))
        self._pools.policy.joined(member)
        self._nursery.start_soon(self._settle_policy, member)

    async def _settle_policy(self, member: Member) -> None:
        await self._pools.owners.adopt(member)
        await self._pools.policy.settle()
        await self._pools.owners.give_back()

    def lost(self, member: Member, why: str) -> None:
        node_id, version = member.node_id, self._pools.version_of(member)
        for key in [key for key in self._arrived if key[0] == node_id]:
            del self._arrived[key]
        wait_s = member.entry.restart_within_s
        jobs = len(self.dispatch.of_member(node_id))
        if jobs:
            logger.warning("%d jobs were on the lost node %s: %s", jobs, node_id, why)
        self.apply(on.Lost(node_id, why, waits=wait_s > 0))
        self._nursery.start_soon(self._after_loss, member, version, wait_s)

    async def _after_loss(self, member: Member, version: str | None, wait_s: float) -> None:
        """Wait for the announced next start of a lost member; then reassign its jobs and backends."""
        node_id = member.node_id
        if wait_s > 0:
            until_s = self._next_starts[node_id] = trio.current_time() + wait_s
            await trio.sleep_until(until_s)
            if self._next_starts.get(node_id) != until_s:
                return
            del self._next_starts[node_id]
            self.apply(on.Waited(node_id))
        await self._pools.node_lost(member, version)

    def arrived(self, member: Member, frame: OutcomeFrame | OutcomeRefFrame) -> None:
        assert isinstance(frame, OutcomeFrame), "the head maps no arena"
        live = self._live.get(frame.job_id)
        outcome = _read(frame, 1 if live is None else live.attempt)
        key = (member.node_id, frame.cursor)
        self._arrived[key] = (member, outcome)
        self.apply(
            on.Ended(member.node_id, frame.job_id, frame.cursor, outcome.attempt, outcome.status, outcome.error_code)
        )
        self._arrived.pop(key, None)

    def progressed(self, member: Member, event: JobEvent) -> None:
        live = self._live.get(event.job_id)
        if live is None or not self.dispatch.has(member.node_id, event.job_id):
            return
        status: Status = event.status  # type: ignore[assignment]  # as the member has sent it
        if status in RELAYED:
            self._enter(live, status, event.detail)
        if status in RELAYED or status in ("queued", "init"):
            self.apply(on.Progress(member.node_id, event.job_id, status))

    async def serve(self, member: Member) -> None:
        async with open_single_nursery() as nursery:
            nursery.start_soon(service_task(self._ask_status, f"status of {member.node_id}"), member)
            nursery.start_soon(service_task(self._ask_room, f"room of {member.node_id}"), member)
            nursery.start_soon(self._forget_outcomes, member)
            await self._send_jobs(member)

    async def _send_jobs(self, member: Member) -> None:
        """Submit the jobs queued for a member, with waiting jobs in one request, until cancelled.

        A live member that does not answer, for example because its disk hangs, is given up and excluded for a while.

        Raises:
            ServiceError: it has not answered for `member_timeout_s`.
        """
        patience_s = self.config.member_timeout_s
        while True:
            while not member.to_submit:
                member.wake = trio.Event()
                await member.wake.wait()
            batch, member.to_submit = member.to_submit, []
            attempts = {spec.job_id: begun for spec, begun in batch if begun}
            try:
                with trio.fail_after(patience_s):
                    answers = await member.client.submit([spec for spec, _ in batch], patience_s=0, attempts=attempts)
            except trio.TooSlowError:
                why = f"it did not answer a submit of {len(batch)} jobs for {patience_s:g} s"
                self.members.bar(member.node_id, f"node {member.node_id}: {why}", patience_s)
                raise ServiceError(why) from None
            except ServiceError as exc:
                logger.info("node %s was lost in a submit of %d jobs: %s", member.node_id, len(batch), exc)
                await trio.sleep_forever()  # the session is over: the member is lost
            for (spec, _), answer in zip(batch, answers, strict=True):
                self._from(member, _answered(member.node_id, spec.job_id, answer))

    async def _ask_room(self, member: Member) -> None:
        while True:
            places = self.dispatch.members.get(member.node_id)
            own = 0 if places is None else places.held
            try:
                said = await member.client.room()
            except ServiceError:
                await trio.sleep_forever()  # the session is over
            room = on.Room(member.node_id, said.room, said.free, said.run_workers, own, said.unready)
            self._from(member, room)
            await trio.sleep(ROOM_INTERVAL_S)

    async def _ask_status(self, member: Member) -> None:
        while True:
            try:
                member.status = await member.client.status()
            except ServiceError:
                await trio.sleep_forever()  # the session is over
            await trio.sleep(STATUS_INTERVAL_S)

    async def _cancel_there(self, member: Member, job_id: str, reason: str) -> None:
        try:
            await member.client.cancel([job_id], reason)
        except ServiceError as exc:
            logger.info("node %s was lost in a cancel: %s", member.node_id, exc)

    async def _withdraw(self, member: Member, job_ids: Sequence[str]) -> None:
        """Make a member forget copies of jobs that have ended or are elsewhere."""
        try:
            await member.client.withdraw(list(job_ids), WITHDRAWN, ended=True)
        except ServiceError as exc:
            logger.info("node %s was lost again: %s", member.node_id, exc)
        self._from(member, on.Withdrawn(member.node_id, job_ids))

    async def _forget_outcomes(self, member: Member) -> None:
        """Make a member forget outcomes, with waiting ones in one request, until its session is over."""
        while True:
            while not member.to_forget:
                member.wake_forgetting = trio.Event()
                await member.wake_forgetting.wait()
            batch, member.to_forget = member.to_forget, []
            try:
                await member.client.withdraw([job_id for job_id, _ in batch], WITHDRAWN, ended=True)
            except ServiceError as exc:
                logger.debug("node %s was lost with %d outcomes: %s", member.node_id, len(batch), exc)
                await trio.sleep_forever()  # it sends them again when it returns
            for job_id, cursor in batch:
                self._from(member, on.Forgotten(member.node_id, job_id, cursor))

    def set_behind(self, member: Member, why: str) -> None:
        """Stop sending jobs to a member, for a reason, or resume (empty)."""
        self.apply(on.Policy(member.node_id, why))

    # ------------------------------------------------------------ details

    def _run_soon(self, afn: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            await afn()

        self._nursery.start_soon(run)

    def _to_ask(self) -> list[RolloutClient]:
        """Return the sessions on members, sorted by free places, most first."""
        places = self.dispatch.members
        members = [member for member in self.members.all.values() if member.state.connected]
        members.sort(key=lambda member: -places[member.node_id].free if member.node_id in places else 0)
        return [member.client for member in members]

    def _load(self, session_id: str, ahead: int) -> Load:
        undelivered, undelivered_bytes = self._sessions.undelivered()
        return Load(
            queued=self.dispatch.queued + ahead,
            live=len(self._live) + ahead,
            queued_of_session=self.dispatch.queued_of(session_id) + ahead,
            live_of_session=self._live.count(session_id) + ahead,
            undelivered=undelivered,
            undelivered_bytes=undelivered_bytes,
        )

    def _view(self, live: _Live) -> JobView:
        spec, now_s = live.spec, trio.current_time()
        job = self.dispatch.jobs.get(spec.job_id)
        place = "" if job is None else f"node {job.node_id}" if job.node_id else "a place on a node"
        return JobView(
            job_id=spec.job_id,
            session_id=live.sink.session_id,
            group_id=spec.group_id,
            instance_id=spec.instance.instance_id,
            handler=spec.instance.handler,
            priority=spec.priority,
            attempt=max(1, live.attempt),
            tags=spec.tags,
            status=live.status,
            age_s=now_s - live.accepted_s,
            status_age_s=now_s - live.status_s,
            turns=0,
            last_progress_s=now_s - live.status_s,
            waiting_on=place,
            stuck=False,
            agent=spec.agent_name,
        )

    def _known(self) -> list[tuple[str, Member]]:
        return sorted(self.members.all.items())

    def _shown(self, member: Member) -> dict[str, Any]:
        places = self.dispatch.members.get(member.node_id)
        return {
            "url": member.entry.url,
            "host": member.entry.host,
            "version": member.entry.version,
            "connected": member.state.connected,
            "behind": member.behind,
            "held_jobs": 0 if places is None else len(places.jobs),
            "free_places": 0 if places is None else places.free,
        }

    def _complaints(self) -> str:
        """Return why nodes are excluded, as the end of a sentence; empty if none is."""
        broken = {} if self.members.view is None else self.members.view.broken
        why = [*self.members.refused.values(), *broken.values()]
        return f" ({'; '.join(why)})" if why else ""


def _read(frame: OutcomeFrame, attempt: int) -> EncodedOutcome:
    """Return the outcome of a frame, with all fields except the tokens; an unreadable one is replaced."""
    data = bytes(frame.outcome)
    try:
        return EncodedOutcome.read(data)
    except UNDECODABLE as exc:
        lost = lost_outcome(frame.job_id, f"its node has sent what cannot be read: {exc}", max(1, attempt))
        return EncodedOutcome.of(lost, msgspec.msgpack.encode(lost))


def _answered(node_id: str, job_id: str, answer: Accepted | Rejected) -> on.Answered:
    if isinstance(answer, Accepted):
        return on.Answered(node_id, job_id)
    return on.Answered(node_id, job_id, answer.code, answer.message)


@asynccontextmanager
async def open_fleet_head(
    config: HeadConfig,
    watch: FleetWatch,
    sessions: SessionTable,
    *,
    session_id: str,
    is_durable: bool,
    options: dict[str, Any],
    model: str = "",
    observers: Sequence[Observer] = (),
) -> AsyncIterator[Fleet]:
    """Open the head of the fleet in a folder, without its edges. Restore its sessions, then call `Fleet.start_members`.

    Args:
        config: the head's configuration.
        watch: reads the folder.
        sessions: the head's sessions.
        session_id: the head's session on its members; the same at each start.
        is_durable: the sessions outlive this process, so their jobs are left to the next start.
        options: of the connections to members, see `connect_node`.
        model: the fleet's model at the last start; empty: the model of the first node that joins.
        observers: notified of every job.
    """
    async with open_single_nursery() as nursery:
        fleet = Fleet(
            config,
            watch,
            sessions,
            nursery,
            session_id=session_id,
            is_durable=is_durable,
            options=options,
            model=model,
            observers=observers,
        )
        try:
            yield fleet
        finally:
            nursery.cancel_scope.cancel("the head ends")
