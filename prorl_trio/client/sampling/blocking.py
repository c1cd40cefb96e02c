"""Groups for a trainer that does not know trio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from prorl_trio.client.blocking import BlockingClient
    from prorl_trio.client.sampling.batch import Batch
    from prorl_trio.client.sampling.rules import GroupRules
    from prorl_trio.types.models import TaskInstance

__all__ = ["BlockingGroups"]


class BlockingGroups:
    """Whole groups of rollouts behind blocking calls; sampling goes on in the client's thread meanwhile.

        with BlockingGroups(client, tasks, GroupRules(size=8, groups_per_step=16)) as groups:
            batch = groups.take()

    All methods may be called from any thread.

    Args:
        client: see `open_groups`.
        tasks: see `open_groups`.
        rules: see `open_groups`.
        **options: the further keyword arguments of `open_groups`.
    """

    def __init__(
        self,
        client: BlockingClient,
        tasks: Sequence[TaskInstance] | Callable[[int], TaskInstance],
        rules: GroupRules,
        **options: Any,
    ) -> None:
        raise NotImplementedError

    def take(self, k: int | None = None, *, timeout_s: float | None = None) -> Batch:
        """See `Groups.take`. Raises TimeoutError after `timeout_s`; nothing is lost, and it may be called again."""
        raise NotImplementedError

    def advance(self, version: str) -> None:
        """See `Groups.advance`."""
        raise NotImplementedError

    def confirm(self, number: int) -> None:
        """See `Groups.confirm`."""
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        """See `Groups.statistics`."""
        raise NotImplementedError

    def close(self) -> None:
        """End sampling, as leaving the block of `open_groups` without an exception."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        raise NotImplementedError
