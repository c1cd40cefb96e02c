"""A stage of the pipeline: a queue, and workers that take jobs from it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from prorl_ipc.nursery import is_cancelled
from prorl_trio.pipeline.outcomes import raise_bugs
from prorl_trio.pipeline.stage_queue import StageQueue
from prorl_trio.supervision import service_task
from prorl_trio.types.errors import BudgetExceeded, HandlerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_trio.agent.activity import Charge
    from prorl_trio.pipeline.job import Job
    from prorl_trio.types.models import Stage, Status

logger = logging.getLogger(__name__)


class StageBudget:
    """The seconds that a job may use in its next stage: the stage's budget, or the rest of its total if less."""

    def __init__(self, stage: Stage, stage_s: float, total_s: float, used_s: float) -> None:
        self.stage = stage
        self.stage_s = stage_s
        self.total_s = total_s
        self.used_s = used_s
        self.seconds = max(0.0, min(stage_s, total_s - used_s))

    def exceeded(self, spent_s: float, blame: Charge) -> BudgetExceeded:
        """Return the error for a job stopped after `spent_s` in the stage.

        It names the budget that was exceeded first.
        """
        if self.stage_s <= self.total_s - self.used_s:
            return BudgetExceeded(self.stage, self.stage_s, spent_s, blame)
        return BudgetExceeded("total", self.total_s, self.used_s + spent_s, blame)


class WorkStage:
    """A queue of jobs, and workers that each run `work` on one job at a time.

    `resize` may be called at any time. New workers start at once. Surplus idle workers stop at once, and busy ones
    after their job.
    """

    def __init__(
        self,
        name: Stage,
        waiting: Status,
        *,
        own_charge: Charge,
        queue_capacity: int,
        weight_of: Callable[[str], float],
        workers: int,
        work: Callable[[Job], Awaitable[None]],
        ready: Callable[[Job], bool] = lambda _job: True,
    ) -> None:
        self.name: Stage = name
        self.waiting: Status = waiting
        self.own_charge: Charge = own_charge
        self.queue: StageQueue[Job] = StageQueue(queue_capacity, weight_of, ready)
        self.work = work
        self.workers = workers
        self.busy = 0
        self._staff = 0
        """Workers that have not been asked to stop."""
        self._idle: set[trio.CancelScope] = set()
        self._nursery: trio.Nursery | None = None
        self._handle: Callable[[Job], Awaitable[None]] | None = None

    def start(self, nursery: trio.Nursery, handle: Callable[[Job], Awaitable[None]]) -> None:
        """Start the workers in `nursery`; `handle` is called with each job taken, and ends it or passes it on."""
        self._nursery, self._handle = nursery, handle
        self.resize(self.workers)

    def resize(self, workers: int) -> None:
        """Set the number of workers. Raises ValueError if it is less than one."""
        if workers < 1:
            raise ValueError(f"stage {self.name} needs at least one worker, got {workers}")
        self.workers = workers
        assert self._nursery is not None
        while self._staff < workers:
            self._staff += 1
            worker = service_task(self._work, f"{self.name} worker", may_return=True, restarts=False)
            self._nursery.start_soon(worker, self._new_idle(), name=f"{self.name} worker")
        while self._staff > workers and self._idle:
            self._staff -= 1
            self._idle.pop().cancel()

    def _new_idle(self) -> trio.CancelScope:
        """Return the scope of a worker's next wait for a job; cancelling the scope stops the worker."""
        idle = trio.CancelScope()
        self._idle.add(idle)
        return idle

    async def _work(self, idle: trio.CancelScope) -> None:
        """Process jobs until there are too many workers. If cancelled during a job, `handle` ends that job first."""
        assert self._handle is not None
        while True:
            job: Job | None = None
            with idle:
                job = await self.queue.get()
            self._idle.discard(idle)
            if job is not None:
                self.busy += 1
                try:
                    await self._handle(job)
                finally:
                    self.busy -= 1
            if idle.cancel_called:
                return
            if self._staff > self.workers:
                self._staff -= 1
                return
            idle = self._new_idle()

    async def attempt(self, job: Job) -> Exception | None:
        """Run `work` on a job; return its error, if any.

        A cancel is re-raised. Errors that a handler's nursery raises together with a cancel are logged, because the
        cancel decides how the job ends.

        Raises:
            InternalError: the work raised it, alone or together with other errors.
        """
        try:
            await self.work(job)
        except Exception as exc:
            return exc
        except (trio.Cancelled, BaseExceptionGroup) as exc:  # noqa: ASYNC103 - re-raised, unless it is stray
            cancelled: BaseException | None = exc
            errors: BaseException | None = None
            if isinstance(exc, BaseExceptionGroup):
                cancelled, errors = exc.split(trio.Cancelled)
            if cancelled is None or not isinstance(errors, Exception | None):
                raise
            raise_bugs(errors)
            if is_cancelled():
                if errors is not None:
                    said = "job %s: errors beside its cancel, stage %s"
                    logger.error(said, job.spec.job_id, self.name, exc_info=errors)
                raise cancelled from None  # noqa: ASYNC104
            # A plug-in's library let it out of its scope. No nursery of ours may mistake it for its own.
            stray = HandlerError(f"handler {job.handler.name} raised a Cancelled while nothing was cancelled")
            return errors or stray  # noqa: ASYNC104
        return None

    def budget(self, job: Job) -> StageBudget:
        """Return the budget of `job`, which is about to enter the stage: its own if set, else the default."""
        asked, defaults = job.spec.budgets, job.resources.config.budgets
        own: float | None = getattr(asked, f"{self.name}_s")
        stage_s: float = own if own is not None else getattr(defaults, f"{self.name}_s")
        total_s = asked.total_s if asked.total_s is not None else defaults.total_s
        return StageBudget(self.name, stage_s, total_s, job.used_s)

    def statistics(self) -> dict[str, int]:
        """Return numbers of `queued` and `busy` jobs, of `workers`, and the queue's capacity."""
        return {
            "queued": len(self.queue),
            "busy": self.busy,
            "workers": self.workers,
            "queue_capacity": self.queue.capacity,
        }
