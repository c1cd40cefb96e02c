"""The INIT, RUN and EVAL stages: for each a nursery, a worker pool and a bounded, fair priority queue.

A job travels through the stages as data. The service scope owns the job's sandbox, which is passed from stage to stage.
Every end of a job in a stage reaches `_run_stage`, and `outcomes` turns it into the job's one `Outcome`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.nursery import only_cancelled, open_single_nursery
from prorl_trio.agents.preset import find_preset
from prorl_trio.pipeline.admission import Admission
from prorl_trio.pipeline.fates import Fates
from prorl_trio.pipeline.groups import GroupTable
from prorl_trio.pipeline.live import LiveJobs
from prorl_trio.pipeline.observer import Observers
from prorl_trio.pipeline.outcomes import check_evaluation, completed, finalise, not_completed, retry_after
from prorl_trio.pipeline.stages import WorkStage
from prorl_trio.supervision import service_task
from prorl_trio.tasks.handlers.base import Evaluation
from prorl_trio.types.errors import ConfigError, Draining, HandlerError
from prorl_trio.types.models import LINES, AgentProgram

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from prorl_trio.agent.context import Resources
    from prorl_trio.chat.token_memory import RolloutTokens
    from prorl_trio.pipeline.job import Job
    from prorl_trio.pipeline.observer import Observer
    from prorl_trio.sandbox.host import SandboxHost
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.types.errors import ErrorCode
    from prorl_trio.types.models import Outcome, Stage, Status, TerminalStatus


CLEANUP_TIMEOUT_S: Final = 30.0
"""Longest time in which a job's end may close its sandbox."""
SHUTDOWN_REASON: Final = "the node is shutting down"


# Logs jobs that are stuck.
#
# trio can end a task only at a checkpoint. Code that blocks, or shields itself without end, cannot be stopped from
# outside, so the log names it, with its job, as the cause of a blocked worker.

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S: Final = 5.0
"""Interval between two checks, and so the time that a job has to react to a cancel or to the end of its budget."""

KEPT: Final = 512
"""Number of recent durations remembered for each kind."""
SHARE: Final = 0.99


class Durations:
    """Durations of jobs that ended by themselves. A kind is a handler's name, so there are few kinds."""

    def __init__(self) -> None:
        self._took_s: dict[str, deque[float]] = {}

    def ended(self, kind: str, took_s: float) -> None:
        """Count a job; `took_s` includes its time in queues."""
        self._took_s.setdefault(kind, deque(maxlen=KEPT)).append(took_s)

    def p99_s(self, kind: str) -> float:
        """Return the 99th percentile of a kind, by nearest rank.

        While no job of this kind has ended, it is the longest percentile of all kinds, or 0.
        """
        took_s = self._took_s.get(kind)
        return self.longest_p99_s() if took_s is None else _p99_s(took_s)

    def longest_p99_s(self) -> float:
        """Return the longest 99th percentile of all kinds; 0 while no job has ended."""
        return max(map(_p99_s, self._took_s.values()), default=0.0)

    def shortest_p99_s(self) -> float:
        """Return the shortest 99th percentile of all kinds; 0 while no job has ended."""
        return min(map(_p99_s, self._took_s.values()), default=0.0)


def _p99_s(took_s: deque[float]) -> float:
    return sorted(took_s)[math.ceil(SHARE * len(took_s)) - 1]


async def watch_jobs(jobs: Iterable[Job], interval_s: float = WATCH_INTERVAL_S) -> None:
    """Log each stuck job once; runs until cancelled.

    A job is stuck without progress for `stuck_after_s`, or if it does not react to its cancel. A blocked loop is not
    detected here but by `stall`.
    """
    watch = _Watch(interval_s)
    while True:
        await trio.sleep(interval_s)
        watch.look(set(jobs))


class _Watch:
    """The stuck jobs that the last check found.

    It holds no other jobs between checks. Otherwise thousands of ended jobs would be freed at once, and would block the
    loop.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._overdue: set[Job] = set()
        self._named: set[Job] = set()

    def look(self, live: set[Job]) -> None:
        """Log live jobs that are stuck and were not logged before."""
        unanswered = {job for job in live if job.scope is not None and job.scope.cancel_called}
        stuck = {job for job in live if job.stuck}
        self._named &= live
        for job in (unanswered & self._overdue) - self._named:
            logger.error(
                "%r has not answered its cancel for %g s (waiting on: %s); handler %s blocks or shields itself, and "
                "holds a worker of stage %s",
                job,
                self._interval_s,
                job.context.activity.waiting_on or "nothing it has named",
                job.handler.name,
                job.lifecycle.status,
            )
        for job in stuck - unanswered - self._named:
            logger.warning(
                "%r is stuck: nothing has happened to it for %.0f s (waiting on: %s)",
                job,
                job.view().last_progress_s,
                job.context.activity.waiting_on or "nothing it has named",
            )
        self._named |= (unanswered & self._overdue) | (stuck - unanswered)
        self._overdue = unanswered


class BeginLimit:
    """Counts, for each session, the rollouts that its trainer will consume before a rollout that begins now.

    A trainer that consumes `B` rollouts per policy update, oldest first, reaches a rollout with `n` ahead after `n //
    B` updates. With a bound of `S` updates a rollout may therefore begin while fewer than `(S + 1) * B` are ahead.
    Running rollouts count, and delivered ones that were not consumed; each update consumes `B`. Dropped rollouts never
    count.
    """

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<BeginLimit {self._running.total()} running, {self._waiting.total()} to be taken>"

    def may_begin(self, session: str, max_staleness: int, per_update: int) -> bool:
        """Return whether one more rollout may begin; `per_update` is `B`, and 0 means no limit."""
        ahead = self._running[session] + self._waiting[session]
        return not per_update or ahead < (max_staleness + 1) * per_update

    def begun(self, session: str, priority: str = "train") -> None:
        """Count a rollout as running, if its priority is `train`."""
        self._running[session] += priority == "train"

    def ended(self, session: str, priority: str = "train", *, delivered: bool) -> None:
        """Note the end of a rollout that ran; `delivered` means that its trainer will consume it."""
        self._running[session] -= priority == "train"
        self._waiting[session] += delivered and priority == "train"

    def updated(self, per_update: int) -> None:
        """Count a policy update: each session has consumed up to `per_update` waiting rollouts (0: all)."""
        left = {session: n - per_update for session, n in self._waiting.items() if n > per_update}
        self._waiting = Counter(left if per_update else {})
        self._running = +self._running


def may_begin(limit: BeginLimit, job: Job) -> bool:
    """Return whether the job can meet its bound on staleness, as far as that is known before it begins."""
    agent, backends = job.resources.config.agent, job.resources.backends
    bound = agent.staleness_bound(job.spec)
    if bound is None:
        return True
    per_update = agent.rollouts_per_update if job.spec.priority == "train" else 0
    if not limit.may_begin(job.session_id, bound, per_update):
        return False
    return bool(backends.fresh(bound)) or not backends.accepting


class Pipeline:
    """Accepts jobs and delivers outcomes. Use `open_pipeline`."""

    def __init__(
        self, resources: Resources, sandboxes: SandboxHost, service: trio.Nursery, observers: Sequence[Observer] = ()
    ) -> None:
        self.observers: list[Observer] = list(observers)
        """Observers of every job, which may be added and removed at any time."""
        self._watch = Observers(self.observers)
        self.admission = Admission(resources.config.admission, resources.config.stages.init_queue)
        self._sandboxes = sandboxes
        self._service = service
        self.live: LiveJobs[Job] = LiveJobs()
        self._groups: GroupTable[Job] = GroupTable()
        self._groups_changed = trio.Event()
        self._retries: trio.Nursery | None = None
        """The nursery in which jobs wait for their next attempt; None once retries have stopped."""
        self._idle = trio.Event()
        self._idle.set()
        self._outcomes: dict[TerminalStatus, int] = {"completed": 0, "failed": 0, "cancelled": 0, "timed_out": 0}
        self._retried = 0
        self._tokens_sampled = 0
        self._prefix_breaks = 0
        self.fates = Fates()
        self.durations = Durations()
        self._begins = BeginLimit()
        self._resources = resources
        sizes = resources.config.stages
        self.stages = (
            WorkStage(
                "init",
                "queued",
                own_charge="handler",
                queue_capacity=sizes.init_queue,
                weight_of=self._weight_of,
                ready=partial(may_begin, self._begins),
                workers=sizes.init_workers,
                work=self._init,
            ),
            WorkStage(
                "run",
                "ready",
                own_charge="handler",
                queue_capacity=sizes.ready_queue,
                weight_of=self._weight_of,
                ready=partial(may_begin, self._begins),
                workers=sizes.run_workers,
                work=self._run,
            ),
            WorkStage(
                "eval",
                "ran",
                own_charge="evaluator",
                queue_capacity=sizes.eval_queue,
                weight_of=self._weight_of,
                workers=sizes.eval_workers,
                work=self._eval,
            ),
        )

    def _weight_of(self, session_id: str) -> float:
        return self.admission.limits.weight_of(session_id)

    def backends_changed(self, updated: bool) -> None:
        """Wake the workers of INIT and RUN, as jobs may be ready now; `updated`: the policy has a new version."""
        if updated:
            self._begins.updated(self._resources.config.agent.rollouts_per_update)
        for stage in self.stages[:2]:
            stage.queue.recheck()

    # ------------------------------------------------------------ the node's side

    def __len__(self) -> int:
        return len(self.live)

    def load_of(self, session_id: str) -> tuple[int, int]:
        """Return how many jobs of that session wait for INIT, and how many are live."""
        return self.stages[0].queue.count(session_id), self.live.count(session_id)

    def submit(self, job: Job, *, promised: bool = False) -> None:
        """Accept the job; a `promised` job may exceed the capacity of its first stage's queue.

        Raises:
            Draining: the workers have stopped or are stopping; the job was not accepted.
            trio.WouldBlock: the queue is full; the job was not accepted.
        """
        if self._retries is None:
            raise Draining("the node has ended; submit to another one")
        self._first_stage(job).queue.put_nowait(job, job.priority, job.session_id, promised=promised)
        self.live.add(job)
        if self._idle.is_set():
            self._idle = trio.Event()
        job.accepted(self._watch)
        policy = job.spec.group
        if policy is not None:
            why = self._groups.accepted(job.group_key, job, policy, trio.current_time())
            self._groups_changed.set()
            if why:
                self.cancel_soon(job, why, "early_stop")

    def _first_stage(self, job: Job) -> WorkStage:
        """Return INIT, or EVAL for a job that grades a recorded rollout."""
        return self.stages[0 if job.spec.recorded is None else -1]

    async def cancel(self, job: Job, reason: str, code: ErrorCode = "cancelled") -> None:
        """Cancel the job in any state, and return when it holds no resources and its outcome is delivered.

        If this call is itself cancelled, the job still ends.
        """
        self.cancel_soon(job, reason, code)
        await job.finished.wait()

    def cancel_soon(self, job: Job, reason: str, code: ErrorCode = "cancelled") -> None:
        """Cancel a job as `cancel` does, without waiting."""
        if job.finished.is_set():
            return
        job.note_cancel(reason, code)
        if job.scope is not None:
            job.scope.cancel()
        elif any(stage.queue.remove(job) for stage in self.stages):
            self._service.start_soon(self._end_queued, job, name=f"cancel {job.spec.job_id}")

    async def cancel_all(self, reason: str) -> None:
        """Cancel every live job; return when all have ended."""
        for job in self.live:
            self.cancel_soon(job, reason, "shutdown")
        await self.wait_idle()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def resize(self, stage: Stage, workers: int) -> None:
        """Set the number of workers in `stage`; surplus workers stop after their job."""
        next(s for s in self.stages if s.name == stage).resize(workers)

    def statistics(self) -> dict[str, object]:
        """Return live figures: per stage queued, busy and workers; outcomes by status; tokens; prefix breaks."""
        return {
            "jobs": len(self.live),
            "stages": {stage.name: stage.statistics() for stage in self.stages},
            "outcomes": dict(self._outcomes),
            "retried": self._retried,
            "tokens_sampled": self._tokens_sampled,
            "prefix_breaks": self._prefix_breaks,
            "fates": self.fates.statistics(),
        }

    # ------------------------------------------------------------ stages

    async def _run_stage(self, index: int, job: Job) -> None:
        """Run `job` through the stage and pass it on, or end it. The one place where failure becomes data."""
        stage, context = self.stages[index], job.context
        failure: BaseException | None = None
        started_s = trio.current_time()
        budget = stage.budget(job)
        try:
            # The scope exists before the job appears in the stage, so that a cancel always finds one of both.
            with trio.CancelScope(deadline=started_s + budget.seconds) as job.scope:  # noqa: ASYNC912 - `work` has one
                if job.cancel_reason is not None:
                    job.scope.cancel()
                context.begin_stage(job.scope, stage.own_charge)
                self._move(job, stage.name)
                failure = await stage.attempt(job)
            spent_s = trio.current_time() - started_s - context.uncharged_s
            job.used_s += spent_s
            if job.scope.cancelled_caught and job.cancel_reason is None:
                failure = budget.exceeded(spent_s, context.activity.blame())
            elif failure is None and job.cancel_reason is None:
                await self._pass_on(index, job)
                return
        except BaseException as exc:
            if only_cancelled(exc):
                await self._cut_off(job, stage.name)  # noqa: ASYNC102 - it shields itself
            raise
        job.scope = None
        await self._conclude(job, not_completed(job, failure, stage.name))

    async def _pass_on(self, index: int, job: Job) -> None:
        """Queue the job for the next stage, waiting for room, or end it as completed. A cancel ends the wait."""
        if index + 1 == len(self.stages):
            job.scope = None
            await self._end(job, finalise(job, completed(job)))
            return
        after = self.stages[index + 1]
        with trio.CancelScope() as job.scope:
            self._move(job, after.waiting)
            with job.context.waiting(f"room in the {after.name} queue"):
                await after.queue.put(job, job.priority, job.session_id)
        await self._queued(job, after, caught=job.scope.cancelled_caught)

    async def _queued(self, job: Job, stage: WorkStage, *, caught: bool) -> None:
        """Handle the end of a wait for a place in a queue, by success or by a cancel."""
        job.scope = None
        # A cancel that arrived after the wait is noticed here: the job is queued and must be removed.
        if caught or (job.cancel_reason is not None and stage.queue.remove(job)):
            await self._end_queued(job)

    async def _init(self, job: Job) -> None:
        job.context.sandboxes = self._sandboxes
        if job.resources.tokens.arena is not None:
            job.context.tokens = await self._reserve_tokens(job)
        spec = job.handler.sandbox_spec(job.context)
        if spec is not None:
            spec = self._with_agent(job, spec)
            job.sandbox = job.context.sandbox = await job.context.start_sandbox(spec)
        await job.handler.init(job.context)

    def _with_agent(self, job: Job, spec: SandboxSpec) -> SandboxSpec:
        """Return the sandbox spec, extended by the agent of a preset if the provider supports layers."""
        agent = job.spec.agent
        if not isinstance(agent, AgentProgram) or not agent.preset:
            return spec
        try:
            folder = find_preset(agent.preset).folder
        except ConfigError as exc:
            raise HandlerError(str(exc)) from exc
        if not self._sandboxes.has_layers:
            return spec
        job.context.is_layered = True
        return msgspec.structs.replace(spec, layers=(*spec.layers, str(folder)))

    async def _reserve_tokens(self, job: Job) -> RolloutTokens:
        """Reserve memory for the job's longest possible trajectory. A full arena delays new jobs, not running ones."""
        resources = job.resources
        tokens, at_most_s = resources.max_trajectory_tokens(job.spec), resources.config.arena.room_timeout_s
        with job.context.standing_in_line("arena room", "handler", at_most_s=at_most_s):
            return await resources.tokens.reserve(tokens, timeout_s=at_most_s)

    async def _run(self, job: Job) -> None:
        await job.handler.run(job.context)
        if job.handler.after_run == "release":
            await self._release(job)
        if job.context.conversation is not None:
            job.context.conversation.seal()

    async def _eval(self, job: Job) -> None:
        if (recorded := job.spec.recorded) is not None:
            job.context.sandboxes = self._sandboxes
            job.context.turns, job.context.stop_reason = list(recorded.turns), recorded.stop_reason
            job.handler.restore(job.context, recorded)
        if (given := job.context.given_reward) is not None:
            evaluation = Evaluation(reward=given, details={"graded_by": "agent"})
        else:
            evaluation = await job.handler.eval(job.context)
        job.evaluation = check_evaluation(job, evaluation)

    # ------------------------------------------------------------ ends

    async def _conclude(self, job: Job, draft: Outcome) -> None:
        """Handle the end of an unsuccessful attempt: retry the job if its policy allows, else end it."""
        retry = retry_after(job, draft) if self._retries is not None else None
        if retry is None:
            await self._end(job, finalise(job, draft))
            return
        await self._release(job)
        if job.cancel_reason is not None or self._retries is None:
            await self._end_queued(job)
            return
        record, backoff_s = retry
        self._retried += 1
        self._count(job, delivered=False)
        job.scope = trio.CancelScope()
        job.begin_again(record)
        self.live.moved(job)
        self._group_moved(job)
        self._retries.start_soon(self._queue_again, job, job.scope, backoff_s, name=f"retry {job.spec.job_id}")

    async def _queue_again(self, job: Job, scope: trio.CancelScope, backoff_s: float) -> None:
        try:
            with scope, job.context.waiting(f"{backoff_s:g} s of back-off before attempt {job.attempt}"):
                await trio.sleep(backoff_s)
                await self._first_stage(job).queue.put(job, job.priority, job.session_id)
            await self._queued(job, self._first_stage(job), caught=scope.cancelled_caught)
        except BaseException as exc:
            if only_cancelled(exc):
                await self._cut_off(job, None)  # noqa: ASYNC102 - it shields itself
            raise

    async def _cut_off(self, job: Job, stage: Stage | None) -> None:
        """End a job whose task was cancelled by the node's shutdown."""
        job.note_cancel(SHUTDOWN_REASON, "shutdown")
        job.scope = None
        await self._end(job, finalise(job, not_completed(job, None, stage)))

    async def _end_queued(self, job: Job) -> None:
        job.note_cancel(SHUTDOWN_REASON, "shutdown")
        await self._end(job, finalise(job, not_completed(job, None, None)))

    async def cancel_queued(self) -> None:
        """End every queued job as cancelled. For the shutdown, when all workers have stopped."""
        for job in self.live:
            if any(stage.queue.remove(job) for stage in self.stages):
                await self._end_queued(job)

    async def _release(self, job: Job) -> None:
        """Release the job's resources; never interrupted.

        A sandbox that is slow to close must not fail other jobs: the machine may have been suspended.
        """
        overdue = await job.release(CLEANUP_TIMEOUT_S)
        if overdue:
            logger.error("%r ends before its sandbox %s has closed", job, overdue)

    async def _end(self, job: Job, outcome: Outcome) -> None:
        """Release the job's resources, then deliver the outcome; never interrupted."""
        await self._release(job)
        job.move(outcome.status, outcome.error)
        outcome = msgspec.structs.replace(outcome, timing=job.lifecycle.timing())
        self.live.remove(job.spec.job_id)
        self.admission.rate.ended(trio.current_time())
        job.ended(outcome)
        self._outcomes[outcome.status] += 1
        if outcome.status in ("completed", "timed_out"):  # another status may have ended it early
            self.durations.ended(job.spec.instance.handler, sum(msgspec.structs.astuple(outcome.timing)))
        if outcome.trajectory is not None:
            self._tokens_sampled += sum(t.completion_end - t.completion_start for t in outcome.trajectory.turns)
            self._prefix_breaks += outcome.trajectory.prefix_breaks
        self._count(job, delivered=outcome.status == "completed")
        if job.spec.group is not None:
            is_success = outcome.status == "completed"
            rest, why = self._groups.ended(job.group_key, job, trio.current_time(), completed=is_success)
            self._stop(rest, why)
            self._groups_changed.set()
        if not self.live:
            self._idle.set()

    def _count(self, job: Job, *, delivered: bool) -> None:
        """Count the end of an attempt. An attempt that never reached RUN is not measured."""
        if (run_s := job.lifecycle.run_s(trio.current_time())) is not None:
            self._begins.ended(job.session_id, job.spec.priority, delivered=delivered)
            self.backends_changed(updated=False)
            tokens = sum(turn.completion_end - turn.completion_start for turn in job.context.turns)
            self.fates.ended(run_s, tokens, delivered=delivered)

    # ------------------------------------------------------------ groups

    def _move(self, job: Job, to: Status) -> None:
        job.move(to)
        self.live.moved(job)
        if to == "run":
            self._begins.begun(job.session_id, job.spec.priority)
        self._group_moved(job)

    def _group_moved(self, job: Job) -> None:
        """Update the group's deadline, which excludes time in queues."""
        if job.spec.group is not None:
            queued = job.lifecycle.status in LINES
            self._groups.moved(job.group_key, job, trio.current_time(), queued=queued)
            self._groups_changed.set()

    def _stop(self, jobs: list[Job], why: str) -> None:
        for job in jobs:
            self.cancel_soon(job, why, "early_stop")

    async def _watch_groups(self) -> None:
        """Cancel the remaining rollouts of groups whose deadline has passed; runs until cancelled."""
        while True:
            self._groups_changed = trio.Event()
            for rest, why in self._groups.due(trio.current_time()):
                self._stop(rest, why)
            deadline_s = self._groups.next_deadline_s()
            with trio.CancelScope() as scope:
                if deadline_s is not None:
                    scope.deadline = deadline_s
                await self._groups_changed.wait()


@asynccontextmanager
async def open_pipeline(
    resources: Resources, sandboxes: SandboxHost, service: trio.Nursery, *, observers: Sequence[Observer] = ()
) -> AsyncIterator[Pipeline]:
    """Start the workers: an EVAL nursery around a RUN nursery around an INIT nursery.

    On exit the INIT workers are cancelled first, then RUN, then EVAL. Their jobs and all queued jobs end as
    `cancelled`. To drain, call `wait_idle` before leaving.
    """
    pipeline = Pipeline(resources, sandboxes, service, observers)
    if resources.backends is not None:  # tests of the pipeline alone have none
        resources.backends.subscribe(pipeline.backends_changed)
    try:
        async with open_single_nursery() as eval_nursery:
            async with open_single_nursery() as run_nursery:
                async with open_single_nursery() as init_nursery:
                    for index, nursery in enumerate((init_nursery, run_nursery, eval_nursery)):
                        pipeline.stages[index].start(nursery, partial(pipeline._run_stage, index))
                    pipeline._retries = init_nursery
                    init_nursery.start_soon(service_task(pipeline._watch_groups, "group deadlines"))
                    init_nursery.start_soon(service_task(watch_jobs, "stuck jobs"), pipeline.live)
                    try:
                        yield pipeline
                    finally:
                        pipeline._retries = None
                        init_nursery.cancel_scope.cancel("shutdown")
                run_nursery.cancel_scope.cancel("shutdown")
            eval_nursery.cancel_scope.cancel("shutdown")
    finally:
        await pipeline.cancel_queued()  # noqa: ASYNC102 - it shields itself
