"""Groups for a trainer that uses trio: the sampler's state, connected to a client and stored in a journal."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.session import Rejected
from prorl_trio.runs.collect import describe_rejection
from prorl_trio.sampling.sampler import Effects, GroupSampler
from prorl_trio.sampling.state import (
    Advanced,
    Arrived,
    Confirmed,
    Finished,
    GivenAgain,
    Lost,
    Opened,
    Renewed,
    Returned,
    Taken,
)
from prorl_trio.types.errors import AdmissionRejected, AlreadyDelivered, ConfigError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from prorl_trio.client.client import RolloutClient
    from prorl_trio.sampling.batch import Batch, ManifestLine
    from prorl_trio.sampling.journal import SamplerJournal
    from prorl_trio.sampling.rules import JobTemplate
    from prorl_trio.sampling.state import Event
    from prorl_trio.types.models import Outcome, TaskInstance

logger = logging.getLogger(__name__)

OUTCOMES_AT_ONCE: Final = 256
"""Maximal number of outcomes in one write to the journal."""
MAX_BACKOFF_S: Final = 30.0
"""Longest delay before a member is sampled again. It doubles from 1 s, starting at the second consecutive failure."""
CANCEL_TIMEOUT_S: Final = 5.0
"""Longest wait at the end of a run for the node to cancel running jobs."""
FLUSH_TIMEOUT_S: Final = 30.0
"""Longest wait of a batch for its manifest lines to be written. After a kill, a returning trainer writes them."""


class Groups:
    """Complete groups of rollouts, batch after batch. Created by `open_groups`.

    After the end of the session or a journal error, every call raises the reason.
    """

    def __init__(
        self,
        client: RolloutClient,
        sampler: GroupSampler,
        journal: SamplerJournal | None,
        instance_of: Callable[[int], TaskInstance],
        job: Callable[[TaskInstance], JobTemplate],
        correct: Callable[[Outcome], bool],
        on_other: Callable[[Outcome], None],
        *,
        confirms: bool,
    ) -> None:
        """Store the parts; `serve` starts them."""
        self._client = client
        self._sampler = sampler
        self._journal = journal
        self._instance_of = instance_of
        self._job = job
        self._correct = correct
        self._on_other = on_other
        self._confirms = confirms
        self._lock = trio.Lock()
        self._taking = trio.Lock()
        self._wanted = 0
        self._changed = trio.Event()
        self._lines: list[ManifestLine] = []
        """Lines derived from the journal that are not yet in the manifest."""
        self._failure: ServiceError | ConfigError | None = None
        self._nursery: trio.Nursery | None = None
        self._waited_s = 0.0

    def __repr__(self) -> str:
        return f"<Groups of run {self._sampler.state.run!r}: {self._sampler.progress()}>"

    @property
    def version(self) -> str:
        """Return the last announced policy version."""
        return self._sampler.state.versions[-1]

    @property
    def last_batch(self) -> int:
        """Return the number of the last batch ever created; 0 if none was."""
        return self._sampler.state.next_batch - 1

    async def take(self, k: int | None = None) -> Batch:
        """Return exactly `k` complete groups (default: `rules.groups_per_step`), oldest first, once they are available.

        A returning trainer first gets the unconfirmed batches of its predecessor, whatever `k`. Confirms the previous
        batches, unless `confirm` is `explicit`. A cancel loses nothing.

        Raises:
            NothingToLearn: too many consecutive groups were uninformative.
            RolloutsFail: a rollout failed too often.
            ServiceError: the session is over, or the node rejects the jobs.
            ConfigError: the journal cannot be written.
            ValueError: `k` exceeds the number ever admitted, (max_staleness + 1) * groups_per_step.
        """
        return await self.take_after(None, k)

    async def take_after(self, number: int | None, k: int | None = None) -> Batch:
        """Act like `take`, for a caller that may have missed the result of an earlier call.

        `number`: the last batch received in this block, 0 for none. If a later batch was already created for the
        caller, it is returned again.
        """
        k = self._sampler.state.rules.groups_per_step if k is None else k
        began_s = trio.current_time()
        async with self._taking:
            if number is not None and (missed := self._missed(number)) is not None:
                return missed
            self._wanted = k
            self._notify()
            try:
                batch = await self._wait_complete(k)
            finally:
                self._wanted = 0
                self._waited_s += trio.current_time() - began_s
        return batch

    async def advance(self, version: str) -> None:
        """Announce that the policy is now at `version`: rollouts for its step may start.

        Confirms the batches taken so far, unless `confirm` is `explicit`.

        Raises:
            ValueError: that version was announced before, or too few groups were taken at the current version, so that
                others would exceed `max_staleness`. Nothing has changed.
            ServiceError: the session is over.
            ConfigError: the journal cannot be written.
        """

        def build() -> list[Event]:
            self._raise_failure()
            self._sampler.check_advance(version)
            return [Advanced(version, self._confirms)]

        await self._commit(build)

    async def confirm(self, number: int) -> None:
        """Confirm that the batches up to `number` are in a checkpoint, so that they are not returned again.

        Raises:
            ServiceError: the session is over.
            ConfigError: the journal cannot be written.
        """
        self._raise_failure()
        await self._commit(lambda: [Confirmed(number)])

    def progress(self) -> str:
        """Return a human-readable clause about the groups available for the next batch and the running ones."""
        return self._sampler.progress()

    def statistics(self) -> dict[str, int | float | None]:
        """Return the statistics of the run so far, flat, for a log.

        Names are those of `BatchStatistics` and `Totals` (counts of rollouts, or of groups if the name contains it),
        and `take_wait_s`, the seconds spent in `take` in this block.
        """
        return {**self._sampler.statistics(), "take_wait_s": self._waited_s}

    # ------------------------------------------------------------------------------------------------- background

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Sample until cancelled. First submit and cancel everything that is pending."""
        async with open_single_nursery() as self._nursery:
            self._nursery.start_soon(self._guard, self._receive)
            self._nursery.start_soon(self._guard, self._replenish)
            self._dispatch(self._sampler.pending())
            task_status.started()

    async def finish(self) -> None:
        """End the run: cancel running jobs and write their lines. The node has `CANCEL_TIMEOUT_S` to answer.

        Raises:
            ConfigError: the journal cannot be written.
        """
        effects = await self._commit(lambda: [*self._confirmed(), Finished()], dispatch=False)
        await self._flush()
        await self._cancel_at_node(effects.cancel)

    async def abandon(self) -> None:
        """Cancel running jobs on the node, for a run that cannot be resumed."""
        pending = self._sampler.pending()
        await self._cancel_at_node([*(job_id for job_id, _ in pending.submit), *pending.cancel])

    async def _cancel_at_node(self, job_ids: list[str]) -> None:
        if not job_ids:
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(CANCEL_TIMEOUT_S), suppress(ServiceError):
            await self._client.cancel(job_ids, "the trainer's run is over", ahead=True)

    async def come_back(self, event: Returned) -> None:
        """Record that another trainer resumes the run."""
        await self._commit(lambda: [event])

    async def confirm_taken(self) -> None:
        """Confirm the batches returned by `take`, if later calls confirm them."""
        if self._failure is None:
            await self._commit(self._confirmed)

    def _confirmed(self) -> list[Event]:
        """Return the event that confirms the returned batches, unless the trainer must do it."""
        state = self._sampler.state
        handed_out = state.given[: len(state.handed_at)]
        return [Confirmed(handed_out[-1].number)] if handed_out and self._confirms else []

    def fail(self, failure: ServiceError | ConfigError) -> None:
        """Make every following call raise `failure`. Only the first failure counts."""
        self._failure = self._failure or failure
        self._notify()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (ServiceError, ConfigError) as exc:
            self.fail(exc)

    async def _wait_complete(self, k: int) -> Batch:
        told = False
        while True:
            self._raise_failure()
            if self._sampler.unconfirmed() is not None or self._sampler.choose(k) is not None:
                if (batch := await self._take_now(k)) is not None:
                    return batch
            elif (trouble := self._sampler.trouble()) is not None:
                await self._commit(lambda: [Renewed()])
                raise trouble
            else:
                if self._sampler.waits_for_advance() and not told:
                    told = True
                    logger.warning("take(%d) waits for advance: %s", k, self._sampler.progress())
                await self._changed.wait()

    async def _take_now(self, k: int) -> Batch | None:
        """Create the batch; return None if it is not complete after all."""
        again: Batch | None = None

        def build() -> list[Event]:
            nonlocal again
            again = self._sampler.unconfirmed()
            if again is not None:
                return [GivenAgain(again.number, self._confirms)]
            groups = self._sampler.choose(k)
            return [] if groups is None else [Taken(groups, self._confirms)]

        before = self.last_batch
        await self._commit(build)
        if again is not None:
            return again
        if self.last_batch == before:
            return None
        batch = self._sampler.state.given[-1]
        with trio.move_on_after(FLUSH_TIMEOUT_S, shield=True):  # the batch exists: a cancel must not lose it
            await self._flush()
        return batch

    def _missed(self, number: int) -> Batch | None:
        """Return the first batch after `number` that was returned in this block."""
        state = self._sampler.state
        handed_out = state.given[: len(state.handed_at)]
        return next((batch for batch in handed_out if batch.number > number), None)

    async def _receive(self) -> None:
        cursor = self._client.cursor
        while True:
            arrived = await self._client.next_batch(cursor, OUTCOMES_AT_ONCE)
            events = [event for _, outcome in arrived if (event := self._event_of(outcome)) is not None]
            if events:
                await self._commit(partial(list, events))
            cursor = arrived[-1][0]

    def _event_of(self, outcome: Outcome) -> Event | None:
        """Return the event of an outcome; None if it has no effect. Tokens are kept only if they may be trained on."""
        if not self._sampler.owns(outcome.job_id):
            self._on_other(outcome)
            return None
        if not self._sampler.awaits(outcome.job_id):
            return None  # it will be sent again, or its run was finished
        if outcome.reward is None or not self._sampler.may_train(outcome.job_id):
            bare = msgspec.structs.replace(outcome, trajectory=None, details={}, evaluation_log="")
            return Arrived(bare, correct=False)
        return Arrived(outcome, self._correct(outcome))

    async def _replenish(self) -> None:
        def build() -> list[Event]:
            first = self._sampler.state.next_group
            instances = [self._instance_of(first + n) for n in range(self._sampler.room(self._wanted))]
            return [Opened(instance, self._job(instance)) for instance in instances]

        while True:
            if self._sampler.room(self._wanted):
                await self._commit(build)
            else:
                await self._changed.wait()

    async def _commit(self, build: Callable[[], Sequence[Event]], *, dispatch: bool = True) -> Effects:
        """Write the events to the journal, apply them, and carry out the effects. `build` is called under the lock."""
        async with self._lock:
            events = build()
            whole = Effects()
            if not events:
                return whole
            await self._in_thread(self._store, events)
            # No checkpoint from here on: events in the journal must be applied.
            for event in events:
                effects = self._sampler.apply(event)
                whole.submit += effects.submit
                whole.cancel += effects.cancel
                if self._journal is not None:
                    self._lines += effects.lines
            if dispatch:
                self._dispatch(whole)
            self._notify()
            return whole

    def _store(self, events: Sequence[Event]) -> None:
        """Runs in a thread while the lock is held."""
        assert self._journal is not None
        self._write_lines()
        if self._journal.mostly_history:
            self._journal.begin(self._client.session_id, self._sampler.state)
        self._journal.append(events)

    def _write_lines(self) -> None:
        assert self._journal is not None
        lines, self._lines = self._lines, []
        self._journal.write_lines(lines)

    async def _flush(self) -> None:
        async with self._lock:
            await self._in_thread(self._write_lines)

    async def _in_thread(self, write: Callable[..., None], *args: object) -> None:
        """Write to the journal, if there is one.

        After an error all later writes fail, because lines would be missing.
        """
        if self._journal is None:
            return
        try:
            await trio.to_thread.run_sync(write, *args)
        except ConfigError as exc:
            self.fail(exc)
            raise

    def _dispatch(self, effects: Effects) -> None:
        if self._nursery is None:
            return  # before the start: `serve` requests everything that is pending
        waves: dict[float, list[str]] = {}
        for job_id, failures in effects.submit:
            delay_s = 0.0 if failures < 2 else min(MAX_BACKOFF_S, 2.0 ** (failures - 2))
            waves.setdefault(delay_s, []).append(job_id)
        for delay_s, job_ids in waves.items():
            self._nursery.start_soon(self._guard, partial(self._submit, job_ids, delay_s))
        if effects.cancel:
            self._nursery.start_soon(self._guard, partial(self._cancel, effects.cancel))

    async def _submit(self, job_ids: Sequence[str], delay_s: float) -> None:
        await trio.sleep(delay_s)
        while specs := [spec for job_id in job_ids if (spec := self._sampler.spec(job_id)) is not None]:
            answers = await self._client.submit(specs)
            rejected = {spec.job_id: a for spec, a in zip(specs, answers, strict=True) if isinstance(a, Rejected)}
            lost = [name for name, answer in rejected.items() if answer.code == AlreadyDelivered.code]
            job_ids = [name for name, answer in rejected.items() if answer.code == AdmissionRejected.code]
            for name, answer in rejected.items():
                if name not in lost and name not in job_ids:
                    raise ServiceError(describe_rejection(answer))
            if lost:
                await self._commit(partial(list, [Lost(name) for name in lost]))

    async def _cancel(self, job_ids: Sequence[str]) -> None:
        # `ahead`: the submission of such a job may still be in progress.
        answer = await self._client.cancel(job_ids, "its batch was complete without it", ahead=True)
        if answer.unknown:
            await self._commit(lambda: [Lost(name) for name in answer.unknown])

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
