"""A concurrency limit for one backend, by additive increase and multiplicative decrease (AIMD). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prorl_trio.config import LoadConfig


class ConcurrencyLimit:
    """The tasks that a backend may have: fewer by a factor when its KV cache is too full, more one by one when not.

    `tasks` is 0, for no limit, until the cache was too full for the first time.
    """

    def __init__(self) -> None:
        self.tasks = 0

    def adapt(self, policy: LoadConfig, *, pressed: bool, in_flight: int) -> None:
        """Lower the limit if `pressed`, else raise it if it is reached.

        A decrease is given the time to work: tasks beyond the limit stay till they end, and until it is kept there is
        no other. A limit that nobody runs into is not raised.
        """
        if pressed and (not self.tasks or in_flight <= self.tasks):
            self.tasks = max(policy.min_tasks, int(in_flight * policy.decrease_factor))
        elif not pressed and self.tasks and in_flight >= self.tasks:
            self.tasks += policy.increase_tasks

    def within(self, max_tasks: int) -> int:
        """Return the limit in force, where `max_tasks` is the configured one (0 for none)."""
        return min(self.tasks or max_tasks, max_tasks or self.tasks)
