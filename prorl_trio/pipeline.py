"""The INIT, RUN and EVAL stages: for each a nursery, a worker pool and a bounded priority queue.

A job travels through the stages as data; what it owns (its sandbox) is owned by the service scope and handed along.
Here, and only here, a failure becomes data: `_run_stage` turns whatever ends a stage into the job's one `Outcome`.
"""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.nursery import open_single_nursery
from prorl_trio.errors import (
    BudgetExceeded,
    EvaluationError,
    HandlerError,
    InternalError,
    JobCancelled,
    RolloutError,
)
from prorl_trio.job import Job, JobSink
from prorl_trio.models import Outcome
from prorl_trio.observer import Observers
from prorl_trio.stage_queue import StageQueue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from prorl_trio.errors import FailureCause
    from prorl_trio.models import Stage, Status, TerminalStatus
    from prorl_trio.observer import JobView, Observer
    from prorl_trio.rollout import Resources
    from prorl_trio.sandbox.host import SandboxHost

__all__ = ["Job", "JobSink", "Pipeline", "open_pipeline"]

logger = logging.getLogger(__name__)

CLEANUP_TIMEOUT_S: Final = 30.0
"""Longest a job's end may take to close its sandbox, whatever else is going on."""
SHUTDOWN_REASON: Final = "the node is shutting down"
_BUDGET_CAUSE: Final[dict[Stage, FailureCause]] = {"init": "sandbox", "run": "agent_budget", "eval": "evaluator"}


class _Stage:
    """What one stage does to a job, and where it goes next."""

    def __init__(
        self,
        name: Stage,
        waiting: Status,
        queue_capacity: int,
        workers: int,
        default_budget_s: float,
        work: Callable[[Job], Awaitable[None]],
    ) -> None:
        self.name: Stage = name
        self.waiting: Status = waiting
        self.queue: StageQueue[Job] = StageQueue(queue_capacity)
        self.workers = workers
        self.default_budget_s = default_budget_s
        self.work = work
        self.busy = 0

    def budget_s(self, job: Job) -> float:
        asked: float | None = getattr(job.spec.budgets, f"{self.name}_s")
        return self.default_budget_s if asked is None else asked


class Pipeline:
    """Takes jobs, delivers outcomes. Use `open_pipeline`."""

    def __init__(
        self, resources: Resources, sandboxes: SandboxHost, service: trio.Nursery, observers: Sequence[Observer] = ()
    ) -> None:
        self.observers: list[Observer] = list(observers)
        """Told of every job; may be added to and removed from at any time."""
        self._watch = Observers(self.observers)
        self._resources = resources
        self._sandboxes = sandboxes
        self._service = service
        self._jobs: dict[str, Job] = {}
        self._idle = trio.Event()
        self._idle.set()
        self._outcomes: dict[TerminalStatus, int] = {"completed": 0, "failed": 0, "cancelled": 0, "timed_out": 0}
        self._tokens_sampled = 0
        self._prefix_breaks = 0
        stages, budgets = resources.config.stages, resources.config.budgets
        self.stages = (
            _Stage("init", "queued", stages.init_queue, stages.init_workers, budgets.init_s, self._init),
            _Stage("run", "ready", stages.ready_queue, stages.run_workers, budgets.run_s, self._run),
            _Stage("eval", "ran", stages.eval_queue, stages.eval_workers, budgets.eval_s, self._eval),
        )

    # ------------------------------------------------------------ the node's side

    def job(self, job_id: str) -> Job | None:
        """The live job of that id, if there is one."""
        return self._jobs.get(job_id)

    def submit(self, job: Job) -> None:
        """Take the job.

        Raises:
            trio.WouldBlock: the INIT queue is full; nothing was taken.
        """
        self.stages[0].queue.put_nowait(job, job.priority)
        self._jobs[job.spec.job_id] = job
        if self._idle.is_set():
            self._idle = trio.Event()
        job.accepted(self._watch)

    async def cancel(self, job: Job, reason: str) -> None:
        """Cancel the job wherever it is, and return when nothing of it is left and its outcome is delivered.

        If this call is itself cancelled, the job ends all the same.
        """
        if job.cancel_reason is None:
            job.cancel_reason = reason
        if job.scope is not None:
            job.scope.cancel()
        elif any(stage.queue.remove(job) for stage in self.stages):
            self._service.start_soon(self._end_queued, job, name=f"cancel {job.spec.job_id}")
        await job.finished.wait()

    async def cancel_all(self, reason: str) -> None:
        """Cancel every live job; return when they are over."""
        async with open_single_nursery() as nursery:
            for job in list(self._jobs.values()):
                nursery.start_soon(self.cancel, job, reason)

    async def wait_idle(self) -> None:
        """Return when no job is live."""
        await self._idle.wait()

    def statistics(self) -> dict[str, object]:
        """Live figures: per stage queued, busy and workers; outcomes by status; tokens; prefix breaks."""
        return {
            "jobs": len(self._jobs),
            "stages": {s.name: {"queued": len(s.queue), "busy": s.busy, "workers": s.workers} for s in self.stages},
            "outcomes": dict(self._outcomes),
            "tokens_sampled": self._tokens_sampled,
            "prefix_breaks": self._prefix_breaks,
        }

    def live_jobs(self) -> list[JobView]:
        """Every live job as it is now, oldest first."""
        return [job.view() for job in self._jobs.values()]

    # ------------------------------------------------------------ stages

    async def work(self, index: int) -> None:
        """One worker of stage `index`, for ever. Cancelled in the middle of a job, it ends that job first."""
        stage = self.stages[index]
        while True:
            job = await stage.queue.get()
            stage.busy += 1
            try:
                await self._run_stage(index, job)
            finally:
                stage.busy -= 1

    async def _run_stage(self, index: int, job: Job) -> None:
        """Take `job` through the stage and pass it on, or end it. The one place where failure becomes data."""
        stage = self.stages[index]
        failure: BaseException | None = None
        started_s = trio.current_time()
        budget_s = stage.budget_s(job)
        try:
            # The scope is there before the job shows itself in the stage, so that a cancel always finds one or other.
            with trio.CancelScope(deadline=started_s + budget_s) as job.scope:  # noqa: ASYNC912 - `work` has one
                if job.cancel_reason is not None:
                    job.scope.cancel()
                job.move(stage.name)
                try:
                    await stage.work(job)
                except Exception as exc:
                    failure = exc
            if job.scope.cancelled_caught and job.cancel_reason is None:
                failure = BudgetExceeded(stage.name, budget_s, trio.current_time() - started_s)
            elif failure is None and job.cancel_reason is None:
                await self._pass_on(index, job)
                return
        except trio.Cancelled:
            job.cancel_reason = job.cancel_reason or SHUTDOWN_REASON
            job.scope = None
            await self._end(job, self._outcome(job, None, stage))  # noqa: ASYNC102 - it shields itself
            raise
        job.scope = None
        await self._end(job, self._outcome(job, failure, stage))

    async def _pass_on(self, index: int, job: Job) -> None:
        """Queue the job for the next stage, waiting for room, or end it as completed. A cancel ends the wait."""
        if index + 1 == len(self.stages):
            job.scope = None
            await self._end(job, self._finalise(job, self._draft(job, "completed")))
            return
        after = self.stages[index + 1]
        with trio.CancelScope() as job.scope:
            job.move(after.waiting)
            await after.queue.put(job, job.priority)
        caught = job.scope.cancelled_caught
        job.scope = None
        # A cancel that came when the wait was already over is noticed here: the job is queued, so it must come out.
        if caught or (job.cancel_reason is not None and after.queue.remove(job)):
            await self._end(job, self._outcome(job, None, self.stages[index]))

    async def _init(self, job: Job) -> None:
        spec = job.handler.sandbox_spec(job.context)
        if spec is not None:
            with job.context.waiting(f"sandbox start (image {spec.image})"):
                job.sandbox = await self._sandboxes.open(spec)
            job.context.activity.progress()
            job.context.sandbox = job.sandbox
        await job.handler.init(job.context)

    async def _run(self, job: Job) -> None:
        await job.handler.run(job.context)
        if job.handler.after_run == "release":
            await self._release(job)

    async def _eval(self, job: Job) -> None:
        evaluation = await job.handler.eval(job.context)
        if not math.isfinite(evaluation.reward):
            raise EvaluationError(
                f"handler {job.handler.name} returned the reward {evaluation.reward}; it must be finite"
            )
        job.evaluation = evaluation

    # ------------------------------------------------------------ ends

    async def _release(self, job: Job) -> None:
        if job.sandbox is not None:
            await job.sandbox.aclose()
            job.sandbox = None
            job.context.sandbox = None

    async def _end_queued(self, job: Job) -> None:
        await self._end(job, self._outcome(job, None, None))

    async def cancel_queued(self) -> None:
        """End every job still queued as cancelled. For the shutdown, when no worker is left."""
        for job in list(self._jobs.values()):
            if any(stage.queue.remove(job) for stage in self.stages):
                job.cancel_reason = job.cancel_reason or SHUTDOWN_REASON
                await self._end_queued(job)

    async def _end(self, job: Job, outcome: Outcome) -> None:
        """Release what the job owns, then deliver. Whatever happens, this runs to its end."""
        with trio.move_on_after(CLEANUP_TIMEOUT_S, shield=True) as cleanup:
            await self._release(job)
        if cleanup.cancelled_caught:
            raise InternalError(f"the sandbox of job {job.spec.job_id} did not close within {CLEANUP_TIMEOUT_S:g} s")
        job.move(outcome.status, outcome.error)
        outcome = msgspec.structs.replace(outcome, timing=job.lifecycle.timing())
        self._outcomes[outcome.status] += 1
        if outcome.trajectory is not None:
            self._tokens_sampled += sum(t.completion_end - t.completion_start for t in outcome.trajectory.turns)
            self._prefix_breaks += outcome.trajectory.prefix_breaks
        del self._jobs[job.spec.job_id]
        job.ended(outcome)
        if not self._jobs:
            self._idle.set()

    def _outcome(self, job: Job, failure: BaseException | None, stage: _Stage | None) -> Outcome:
        """The outcome of a job that did not complete. An `InternalError` is not data: it flies on."""
        while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
            failure = failure.exceptions[0]
        if isinstance(failure, InternalError):
            raise failure
        status: TerminalStatus
        error: RolloutError
        if job.cancel_reason is not None:
            status, error = "cancelled", JobCancelled(job.cancel_reason)
        elif isinstance(failure, BudgetExceeded):
            status, error = "timed_out", failure
        else:
            assert failure is not None
            assert stage is not None
            status, error = "failed", self._classify(job, stage, failure)
        cause = _BUDGET_CAUSE[error.stage] if isinstance(error, BudgetExceeded) else error.cause
        draft = msgspec.structs.replace(self._draft(job, status), cause=cause, error=str(error) or type(error).__name__)
        return self._finalise(job, draft)

    @staticmethod
    def _classify(job: Job, stage: _Stage, failure: BaseException) -> RolloutError:
        """Name the cause: the error's own, or the handler's fault; the handler has the last word."""
        if not isinstance(failure, RolloutError):
            logger.error("job %s, stage %s", job.spec.job_id, stage.name, exc_info=failure)
            failure = HandlerError(f"{type(failure).__name__} in stage {stage.name}: {failure}")
        try:
            return job.handler.on_error(job.context, stage.name, failure)
        except Exception as exc:  # a plug-in's hook must not end the node
            logger.exception("on_error of handler %s", job.handler.name)
            return HandlerError(f"on_error raised {type(exc).__name__}: {exc}, after {failure}")

    @staticmethod
    def _finalise(job: Job, draft: Outcome) -> Outcome:
        """The handler's last look. If that fails, the job failed by its handler; what was recorded stays."""
        try:
            return job.handler.final_result(job.context, draft)
        except Exception as exc:  # a plug-in's hook must not end the node
            logger.exception("final_result of handler %s", job.handler.name)
            error = f"final_result raised {type(exc).__name__}: {exc}"
            return msgspec.structs.replace(draft, status="failed", reward=None, cause="handler", error=error)

    @staticmethod
    def _draft(job: Job, status: TerminalStatus) -> Outcome:
        spec = job.spec
        scored = job.evaluation if status == "completed" else None
        return Outcome(
            job_id=spec.job_id,
            instance_id=spec.instance.instance_id,
            group_id=spec.group_id,
            status=status,
            reward=scored.reward if scored is not None else None,
            cause=None,
            error="",
            trajectory=job.context.trajectory(),
            details=scored.details if scored is not None else {},
            timing=job.lifecycle.timing(),
            tags=spec.tags,
        )


@asynccontextmanager
async def open_pipeline(
    resources: Resources, sandboxes: SandboxHost, service: trio.Nursery, *, observers: Sequence[Observer] = ()
) -> AsyncIterator[Pipeline]:
    """Start the workers: an EVAL nursery around a RUN nursery around an INIT nursery.

    On leaving the block the INIT workers are cancelled first, then RUN, then EVAL; jobs they hold end as `cancelled`,
    and so do those still queued. To drain, `wait_idle` before leaving.
    """
    pipeline = Pipeline(resources, sandboxes, service, observers)
    try:
        async with open_single_nursery() as eval_nursery:
            async with open_single_nursery() as run_nursery:
                async with open_single_nursery() as init_nursery:
                    for index, nursery in enumerate((init_nursery, run_nursery, eval_nursery)):
                        stage = pipeline.stages[index]
                        for worker in range(stage.workers):
                            nursery.start_soon(pipeline.work, index, name=f"{stage.name}-{worker}")
                    try:
                        yield pipeline
                    finally:
                        init_nursery.cancel_scope.cancel("shutdown")
                run_nursery.cancel_scope.cancel("shutdown")
            eval_nursery.cancel_scope.cancel("shutdown")
    finally:
        await pipeline.cancel_queued()  # noqa: ASYNC102 - it shields itself
