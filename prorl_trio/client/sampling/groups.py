"""Groups for a trainer that uses trio."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from prorl_trio.client.sampling.rules import JobTemplate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from os import PathLike

    from prorl_trio.client.client import RolloutClient
    from prorl_trio.client.sampling.batch import Batch
    from prorl_trio.client.sampling.rules import GroupRules
    from prorl_trio.types.models import Outcome, TaskInstance

__all__ = ["Groups", "open_groups", "reached_one"]


def reached_one(outcome: Outcome) -> bool:
    """Return True if the reward is 1.0 or more: the default for `correct`."""
    return outcome.reward is not None and outcome.reward >= 1.0


class Groups:
    """Whole groups of rollouts, batch after batch. Made by `open_groups`."""

    async def take(self, k: int | None = None) -> Batch:
        """Return exactly `k` whole groups (default: `rules.groups_per_step`), oldest first; wait until they are there.

        Raises:
            NothingToLearn: too many groups in a row were uninformative.
            RolloutsFail: a rollout failed too often.
            ServiceError: the session is over, or the node rejects the jobs.
            ValueError: `k` is more than ever are admitted, (max_staleness + 1) * groups_per_step.
        """
        raise NotImplementedError

    async def advance(self, version: str) -> None:
        """Say that the policy is now at `version`: opens admission for its step, and confirms what was taken."""
        raise NotImplementedError

    async def confirm(self, number: int) -> None:
        """Say that the batches up to `number` are in a checkpoint: they are not given again."""
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        """Return the figures of the run so far, flat, for a log."""
        raise NotImplementedError


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
    confirm: Literal["next", "explicit"] = "next",
    cancel_at_end: bool = True,
    on_other: Callable[[Outcome], None] | None = None,
) -> AsyncIterator[Groups]:
    """Sample groups in the background while the block runs.

        async with open_groups(client, tasks, GroupRules(size=8, groups_per_step=16, max_staleness=1)) as groups:
            batch = await groups.take()
            ...  # train on it
            async with client.policy_update("1") as update:
                await update.load_folder(folder)
            await groups.advance("1")

    The session must be the sampler's own: it takes all its outcomes. (Evaluate in another session.)

    Args:
        client: of a session of its own.
        tasks: shuffled by `seed`, epoch after epoch; or a function from a group's number to its instance.
        rules: see `GroupRules`.
        job: budgets, sampling and so on of each rollout; or a function of the instance.
        correct: decides whether a rollout that has a reward is correct.
        folder: where the state is kept (`journal`, `manifest.jsonl`), so that a trainer that is killed comes back to
            it: with the same folder and a client of the same session. None: the state ends with the block.
        trained: number of the last batch in the checkpoint that the trainer starts from; later ones that are still
            kept are given again. None: those that were not confirmed are.
        version: the policy version at the beginning of the run; ignored in a run that goes on.
        seed: of the order of `tasks`.
        confirm: a batch is confirmed by the next `take` or `advance` (`next`), or by `Groups.confirm` (`explicit`).
        cancel_at_end: leaving the block without an exception ends the run: what is at work is cancelled. False: it
            goes on at the node, for a trainer that comes back.
        on_other: is given outcomes that are not of this run, before they are acknowledged; None: they are logged.

    Raises:
        ConfigError: `folder` cannot be used, or is of another session or other rules.
    """
    raise NotImplementedError
    yield
