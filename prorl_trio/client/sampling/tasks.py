"""The instance of each group: from a list, shuffled anew each epoch, or from the caller's function."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.types.models import TaskInstance


def instance_source(
    tasks: Sequence[TaskInstance] | Callable[[int], TaskInstance], seed: int
) -> Callable[[int], TaskInstance]:
    """Return the function from a group's number to its instance; of a sequence it depends on `seed` and number only.

    Raises:
        ValueError: the sequence is empty.
    """
    return tasks if callable(tasks) else _Shuffled(tasks, seed)


class _Shuffled:
    """Gives all of a sequence in each epoch, in an order of that epoch's."""

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
