"""The execution of a command's jobs. Missing jobs are submitted and recorded, and an interrupt cancels them."""

from __future__ import annotations

import signal
import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.session import Rejected
from prorl_trio.runs.collect import describe_rejection
from prorl_trio.types.errors import ConfigError, ServiceError
from prorl_trio.types.models import JobSpec, RetryPolicy, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from prorl_trio.client.client import RolloutClient
    from prorl_trio.types.models import Outcome, TaskInstance


SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SUBMIT_PATIENCE_S: Final = 30 * 24 * 3600.0
"""Maximum seconds that jobs wait for a full node. Finished jobs make room."""
END_TIMEOUT_S: Final = 15.0
"""Maximum seconds that an interrupted command waits for the node to cancel its jobs and to deliver outcomes."""

MAX_NAME_CHARS: Final = 100
"""Maximum number of characters of an instance id that are used in job ids."""
FAMILY_TAG: Final = "family"


class Rollout(NamedTuple):
    """The `number`-th rollout of the task at `place` in its set."""

    place: int
    number: int


class Try(NamedTuple):
    """A job of a rollout. Jobs with a lower `number` were cancelled; the last of these is `before` (empty if none)."""

    job_id: str
    number: int
    is_over: bool
    before: str = ""


class EvaluationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A description of an evaluation from which the same jobs follow each time.

    Attributes:
        evaluation_id: prefix of the job ids.
        session_id: the session in which the jobs are submitted and resumed.
        tasks: the name of the set, or its file.
        rollouts: n, the number of rollouts of each task.
        ks: the k of each pass@k that is reported.
        max_turns: maximum number of turns of a rollout.
        attempts: maximum number of attempts of a rollout when the infrastructure fails.
        correct_from: the least reward of a correct rollout.
        model: the folder whose tokenizer decodes the tokens; empty if unknown.
        oracle: run the tasks' own solutions, without a policy.
        left_out: number of unusable rows of the set, which were omitted.
        agent: the name of a program that works on the tasks instead of the node's own loop; empty: none.
    """

    evaluation_id: str
    session_id: str
    tasks: str
    rollouts: int
    ks: tuple[int, ...]
    sampling: SamplingParams
    max_turns: int
    attempts: int = 1
    correct_from: float = 1.0
    model: str = ""
    oracle: bool = False
    left_out: int = 0
    agent: str = ""

    def rollouts_of(self, instances: Sequence[TaskInstance]) -> Iterator[Rollout]:
        return (Rollout(place, number) for place in range(len(instances)) for number in range(self.rollouts))

    def last_try(self, instance: TaskInstance, rollout: Rollout, outcomes: Mapping[str, Outcome]) -> Try:
        """Return the try of a rollout that counts, given the outcomes so far by job id.

        A cancelled try, such as by an interrupt, is followed by another with a new id.
        """
        number, before = 0, ""
        while (outcome := outcomes.get(job_id := self._job_id(instance, rollout, number))) is not None:
            if outcome.status != "cancelled":
                return Try(job_id, number, is_over=True, before=before)
            number, before = number + 1, job_id
        return Try(job_id, number, is_over=False, before=before)

    def job(self, instance: TaskInstance, rollout: Rollout, job_id: str) -> JobSpec:
        """Return the job of a rollout under an id from `last_try`."""
        return JobSpec(
            job_id=job_id,
            instance=instance,
            group_id=f"{self.evaluation_id}-{rollout.place}",
            sampling=self.sampling,
            max_turns=self.max_turns,
            priority="eval",
            retry=RetryPolicy(max_attempts=self.attempts),
            agent=self.agent or None,
            tags={FAMILY_TAG: instance.family} if instance.family else {},
        )

    def _job_id(self, instance: TaskInstance, rollout: Rollout, number: int) -> str:
        name = instance.instance_id[:MAX_NAME_CHARS]
        again = f"-again{number}" if number else ""
        return f"{self.evaluation_id}-{rollout.place}-{name}-{rollout.number}{again}"


class Work(Protocol):
    """Jobs and their outcomes.

    Attributes:
        rejected: the reasons of the jobs that the node rejected, by job id.
    """

    rejected: dict[str, str]

    def todo(self) -> list[JobSpec]:
        """Return the unfinished jobs. They are the same in each process."""

    def record(self, outcome: Outcome) -> bool:
        """Store an outcome. Return False if it is already stored. Raises ConfigError if it cannot be written."""


async def do_missing(client: RolloutClient, work: Work, on_outcome: Callable[[Outcome], None]) -> bool:
    """Submit the unfinished jobs of `work`, and record their outcomes. Return False if interrupted.

    The session of `client` must not have other jobs. Jobs that an earlier process left running there are awaited, not
    sampled again. `on_outcome` is called with each new outcome.

    SIGINT and SIGTERM (in the main thread), a cancel and an error stop it in order. Its jobs are cancelled on the node,
    and finished work is recorded, within `END_TIMEOUT_S`. A second signal skips this.

    Raises:
        ServiceError: the session is over.
        ConfigError: an outcome cannot be written.
    """
    can_record, is_over = True, False
    scopes: list[trio.CancelScope] = []
    with _signals() as signals:
        async with open_single_nursery() as nursery:
            try:
                with trio.CancelScope() as scope:
                    scopes.append(scope)
                    if signals is not None:
                        nursery.start_soon(_cancel_at_signals, signals, scopes)
                    await _sample(client, work, on_outcome)
                is_over = not scope.cancelled_caught
            except ConfigError:
                can_record = False  # requesting another outcome would acknowledge the unwritten one
                raise
            finally:
                if not is_over:
                    # Report the error that ended the evaluation, not a failure to notify the node.
                    with trio.move_on_after(END_TIMEOUT_S, shield=True) as end, suppress(ServiceError):
                        scopes.append(end)
                        await client.cancel(reason="the command was interrupted", whole_session=True)
                        if can_record:
                            await _take(client, work, on_outcome)
            nursery.cancel_scope.cancel()
    return is_over


def _signals() -> AbstractContextManager[AsyncIterator[int] | None]:
    """Open a receiver of `SIGNALS` if this thread can have one."""
    is_main = threading.current_thread() is threading.main_thread()
    return trio.open_signal_receiver(*SIGNALS) if is_main else nullcontext()


async def _cancel_at_signals(signals: AsyncIterator[int], scopes: Sequence[trio.CancelScope]) -> None:
    """Cancel the last of `scopes` at each signal. The list may change between signals."""
    async for _ in signals:
        scopes[-1].cancel()


async def _sample(client: RolloutClient, work: Work, on_outcome: Callable[[Outcome], None]) -> None:
    """Submit the unfinished jobs, and record their outcomes.

    A job that an earlier process cancelled, without receiving the outcome, arrives as cancelled: it is submitted again.
    """
    for _ in range(2 if client.resumed else 1):
        await _submit(client, [job for job in work.todo() if job.job_id not in work.rejected], work, on_outcome)


async def _submit(
    client: RolloutClient, jobs: Sequence[JobSpec], work: Work, on_outcome: Callable[[Outcome], None]
) -> None:
    begun = trio.Event()

    async def submit() -> None:
        begun.set()  # no checkpoint until the client knows that outcomes will come
        answers = await client.submit(jobs, patience_s=SUBMIT_PATIENCE_S)
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, Rejected):
                work.rejected[job.job_id] = describe_rejection(answer)

    async with open_single_nursery() as nursery:
        nursery.start_soon(submit)
        await begun.wait()
        await _take(client, work, on_outcome)


async def _take(client: RolloutClient, work: Work, on_outcome: Callable[[Outcome], None]) -> None:
    async for outcome in client.results():
        if work.record(outcome):
            on_outcome(outcome)
