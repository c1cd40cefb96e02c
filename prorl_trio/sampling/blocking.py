"""Groups for a trainer that does not use trio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import trio

from prorl_trio.sampling.opening import open_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from prorl_trio.client.blocking import BlockingClient
    from prorl_trio.sampling.batch import Batch
    from prorl_trio.sampling.groups import Groups
    from prorl_trio.sampling.rules import GroupRules
    from prorl_trio.types.models import TaskInstance


class BlockingGroups:
    """Complete groups of rollouts from blocking calls, with sampling in the client's thread in the background.

        with BlockingGroups(client, tasks, GroupRules(size=8, groups_per_step=16, max_staleness=1)) as groups:
            batch = groups.take()
            ...  # train on it
            with client.policy_update("1") as update:
                update.load_folder(folder)
            groups.advance("1")

    All methods may be called from any thread. They raise the errors of `Groups`, and exceptions of `tasks`, `job` or
    `correct` from the background. A call interrupted by Ctrl-C loses nothing: the next `take` returns a batch created
    for the interrupted one.

    Args:
        client: see `open_groups`. It must be closed after the groups.
        tasks: see `open_groups`. This and `correct` are called in the client's thread.
        rules: see `open_groups`.
        **options: the further keyword arguments of `open_groups`.

    Raises:
        ConfigError: as `open_groups`.
        ValueError: as `open_groups`.
    """

    def __init__(
        self,
        client: BlockingClient,
        tasks: Sequence[TaskInstance] | Callable[[int], TaskInstance],
        rules: GroupRules,
        **options: Any,
    ) -> None:
        self._hosted = client.host(lambda inner: open_groups(inner, tasks, rules, **options))
        self._received = 0

    @property
    def _groups(self) -> Groups:
        return self._hosted.value

    @property
    def version(self) -> str:
        """Return the last announced policy version."""
        return self._groups.version

    @property
    def last_batch(self) -> int:
        """Return the number of the last batch ever created; 0 if none was."""
        return self._groups.last_batch

    def take(self, k: int | None = None, *, timeout_s: float | None = None) -> Batch:
        """Return exactly `k` complete groups; see `Groups.take`.

        Raises TimeoutError after `timeout_s`, with a message about the missing groups. Nothing is lost, and it may be
        called again.
        """
        batch = self._hosted.call(_take_within, self._groups, self._received, k, timeout_s)
        self._received = batch.number
        return batch

    def advance(self, version: str) -> None:
        """Announce that the policy is now at `version`; see `Groups.advance`."""
        self._hosted.call(self._groups.advance, version)

    def confirm(self, number: int) -> None:
        """Confirm that the batches up to `number` are in a checkpoint; see `Groups.confirm`."""
        self._hosted.call(self._groups.confirm, number)

    def statistics(self) -> dict[str, int | float | None]:
        """Return the statistics of the run so far; see `Groups.statistics`."""
        return self._hosted.call(_statistics, self._groups)

    def close(self) -> None:
        """End sampling like a normal exit from the block of `open_groups`. Idempotent."""
        self._hosted.leave(abandon=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hosted.leave(abandon=exc_type is not None)


async def _take_within(groups: Groups, received: int, k: int | None, timeout_s: float | None) -> Batch:
    if timeout_s is None:
        return await groups.take_after(received, k)
    with trio.move_on_after(timeout_s):
        return await groups.take_after(received, k)
    raise TimeoutError(f"no batch within {timeout_s:g} s: {groups.progress()}")


async def _statistics(groups: Groups) -> dict[str, int | float | None]:
    await trio.lowlevel.checkpoint()
    return groups.statistics()
