"""The entry point to groups: the block in which they are sampled, and recovery of a killed trainer's state."""

from __future__ import annotations

import logging
import uuid
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.client.errors import ConnectionLost
from prorl_trio.sampling.groups import Groups
from prorl_trio.sampling.journal import SamplerJournal
from prorl_trio.sampling.rules import JobTemplate
from prorl_trio.sampling.sampler import GroupSampler
from prorl_trio.sampling.state import Returned
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from os import PathLike

    from prorl_trio.client.client import RolloutClient
    from prorl_trio.sampling.batch import ManifestLine
    from prorl_trio.sampling.rules import GroupRules
    from prorl_trio.types.models import Outcome, TaskInstance


logger = logging.getLogger(__name__)

Confirmation = Literal["next", "explicit"]


def instance_source(
    tasks: Sequence[TaskInstance] | Callable[[int], TaskInstance], seed: int
) -> Callable[[int], TaskInstance]:
    """Return the function from a group's number to its instance; for a sequence it depends only on `seed` and number.

    Raises:
        ValueError: the sequence is empty.
    """
    return tasks if callable(tasks) else _Shuffled(tasks, seed)


class _Shuffled:
    """Returns all elements of a sequence in each epoch, in an order specific to the epoch."""

    def __init__(self, tasks: Sequence[TaskInstance], seed: int) -> None:
        if not len(tasks):
            raise ValueError("tasks is empty: there is nothing to sample")
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __call__(self, number: int) -> TaskInstance:
        epoch, position = divmod(number, len(self._tasks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._tasks)))
            Random(f"{self._seed} {epoch}").shuffle(self._order)
        return self._tasks[self._order[position]]


def reached_one(outcome: Outcome) -> bool:
    """Return True if the reward is 1.0 or more: the default for `correct`."""
    return outcome.reward is not None and outcome.reward >= 1.0


def _log_other(outcome: Outcome) -> None:
    logger.warning(
        "job %s of this session is not of this run: its outcome (%s, reward %s) is dropped",
        outcome.job_id,
        outcome.status,
        outcome.reward,
    )


@asynccontextmanager
async def open_groups(
    client: RolloutClient,
    tasks: Sequence[TaskInstance] | Callable[[int], TaskInstance],
    rules: GroupRules,
    *,
    job: JobTemplate | Callable[[TaskInstance], JobTemplate] = JobTemplate(),  # noqa: B008 - it is immutable
    correct: Callable[[Outcome], bool] = reached_one,
    folder: str | PathLike[str] | None = None,
    trained: int | None = None,
    version: str = "0",
    seed: int = 0,
    confirm: Confirmation = "next",
    cancel_at_end: bool = True,
    on_other: Callable[[Outcome], None] = _log_other,
) -> AsyncIterator[Groups]:
    """Sample groups in the background while the block runs.

        async with open_groups(client, tasks, GroupRules(size=8, groups_per_step=16, max_staleness=1)) as groups:
            batch = await groups.take()
            ...  # train on it
            async with client.policy_update("1") as update:
                await update.load_folder(folder)
            await groups.advance("1")

    The session must belong to the sampler, because it consumes all outcomes. (Evaluate in another session.)

    With `folder`, an outcome is acknowledged to the node after it is on disk. A trainer killed at any moment resumes
    with the same folder, session and groups. Rollouts continue in between, nothing is lost, and no rollout is trained
    on twice.

    Args:
        client: with its own session.
        tasks: shuffled by `seed`, epoch after epoch; or a function from a group's number to its instance.
        rules: see `GroupRules`.
        job: budgets, sampling and so on for each rollout; or a function of the instance.
        correct: decides whether a rollout with a reward is correct. It runs in the event loop, so it must be fast.
        folder: for the state (`journal`, `manifest.jsonl`). None: the state ends with the block.
        trained: number of the last batch in the trainer's starting checkpoint; later batches are returned again. None:
            unconfirmed batches are returned again.
        version: the policy version at the beginning of the run; ignored when a run is resumed.
        seed: for the order of `tasks`.
        confirm: a batch is confirmed by the next `take` or `advance` (`next`), or by `Groups.confirm` (`explicit`).
        cancel_at_end: leaving the block without an exception ends the run and cancels running jobs. False: they
            continue on the node for a returning trainer, as they do after an exception if `folder` is given.
        on_other: receives outcomes of other runs before they are acknowledged. By default they are logged.

    Raises:
        ConfigError: `folder` cannot be used, is in use, or belongs to another session or another group size.
        ValueError: `tasks` is empty.
    """
    instance_of = instance_source(tasks, seed)
    template_of = job if not isinstance(job, JobTemplate) else lambda _instance, job=job: job
    journal = None if folder is None else await trio.to_thread.run_sync(SamplerJournal, Path(folder))
    groups: Groups | None = None
    try:
        sampler, lines = await trio.to_thread.run_sync(_restore, journal, client.session_id, rules, version)
        groups = Groups(
            client, sampler, journal, instance_of, template_of, correct, on_other, confirms=confirm == "next"
        )
        if journal is not None:
            await trio.to_thread.run_sync(journal.write_lines, lines)
        if journal is not None and journal.beginning is not None:
            _check_trained(sampler, trained)
            await groups.come_back(Returned(rules, trained))
        async with open_single_nursery() as nursery:
            await nursery.start(groups.serve)
            yield groups
            nursery.cancel_scope.cancel()  # no new work starts from here on
        await (groups.finish() if cancel_at_end else groups.confirm_taken())
    except BaseException:
        if groups is not None and journal is None:  # it cannot be resumed
            with trio.CancelScope(shield=True):  # it has its own time limit
                await groups.abandon()
        raise
    finally:
        if groups is not None:
            groups.fail(ConnectionLost("the block of open_groups has ended"))
        if journal is not None:
            journal.close()


def _restore(
    journal: SamplerJournal | None, session_id: str, rules: GroupRules, version: str
) -> tuple[GroupSampler, list[ManifestLine]]:
    """Return the sampler restored from the journal, and its manifest lines; a new one without a journal."""
    if journal is None or journal.beginning is None:
        sampler = GroupSampler.begin(uuid.uuid4().hex[:8], rules, version)
        if journal is not None:
            journal.begin(session_id, sampler.state)
        return sampler, []
    beginning = journal.beginning
    if beginning.session_id != session_id:
        raise ConfigError(
            f"{journal.manifest_path.parent} is of session {beginning.session_id!r}, and the client's is "
            f"{session_id!r}: connect with session_id={beginning.session_id!r}, or begin in a new folder"
        )
    if beginning.state.rules.size != rules.size:
        raise ConfigError(
            f"{journal.manifest_path.parent} is of groups of {beginning.state.rules.size}, and the rules say size="
            f"{rules.size}: begin in a new folder"
        )
    sampler = GroupSampler(beginning.state)
    try:
        return sampler, [line for event in journal.events() for line in sampler.apply(event).lines]
    except LookupError as exc:
        raise ConfigError(
            f"{journal.manifest_path.parent} has events that do not follow from each other, as where an earlier "
            "version of this package went on with groups that are too old for stricter rules: begin in a new folder"
        ) from exc


def _check_trained(sampler: GroupSampler, trained: int | None) -> None:
    """Check that the batches after the trainer's checkpoint still exist.

    Raises:
        ConfigError: the checkpoint is later than the last batch.
    """
    if trained is None:
        return
    last = sampler.state.next_batch - 1
    first = sampler.state.given[0].number if sampler.state.given else last + 1
    if trained > last:
        raise ConfigError(
            f"the checkpoint has batch {trained}, but the last one of this run is {last}: another folder?"
        )
    if trained + 1 < first:
        logger.warning(
            "batches %d to %d are not in the checkpoint, and cannot be given again: they were confirmed; for "
            "checkpoints that are rarer than steps, use confirm='explicit'",
            trained + 1,
            first - 1,
        )
