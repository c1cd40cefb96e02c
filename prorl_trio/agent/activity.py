"""The activity of a job, and the accounts that its time is charged to."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

Charge = Literal["sandbox", "inference", "evaluator", "handler", "node", "agent_budget"]
"""The account that time is charged to, which is also the cause named when a budget is exceeded."""


class Activity:
    """The activity of a job: its last progress, its current waits, and how its time was spent."""

    def __init__(self) -> None:
        now_s = trio.current_time()
        self._progress_s = now_s
        self._waits: dict[object, tuple[str, Charge, bool]] = {}
        self._settled_s = now_s
        self._spent_s: dict[Charge, float] = {}
        self._own: Charge = "handler"

    @property
    def waiting_on(self) -> str:
        """Return the name of the most recent unfinished wait, or an empty string."""
        return self._wait[0]

    @property
    def other_waits(self) -> list[str]:
        """Return the names of the other unfinished waits, oldest first."""
        return [what for what, _, _ in self._waits.values()][:-1]

    @property
    def waiting_charge(self) -> Charge | None:
        """Return the account of the most recent unfinished wait, or None."""
        return self._wait[1] if self._waits else None

    @property
    def _wait(self) -> tuple[str, Charge, bool]:
        """Return the most recent unfinished wait: its name, its account, and whether it is charged."""
        return next(reversed(self._waits.values()), ("", self._own, True))

    def idle_s(self, now_s: float) -> float:
        return now_s - self._progress_s

    def progress(self) -> None:
        """Note the time of a transition, a completion or a tool's result."""
        self._progress_s = trio.current_time()

    def begin_stage(self, own: Charge) -> None:
        """Count from zero. Time without waits is charged to `own`."""
        self._settle()
        self._spent_s.clear()
        self._own = own

    def blame(self) -> Charge:
        """Return the account with most of the time charged since `begin_stage`."""
        self._settle()
        return max(self._spent_s, key=self._spent_s.__getitem__, default=self._own)

    @contextmanager
    def waiting(self, what: str, charge: Charge = "handler", *, is_charged: bool = True) -> Iterator[None]:
        """Show during the block that the job waits for `what`, and charge the time, unless it belongs to no budget.

        Blocks may be nested, and may run in several tasks of the job. The most recent one is shown and charged.
        """
        key = object()
        self._settle()
        self._waits[key] = (what, charge, is_charged)
        try:
            yield
        finally:
            self._settle()
            del self._waits[key]

    def _settle(self) -> None:
        now_s = trio.current_time()
        _, charge, is_charged = self._wait
        if is_charged:
            self._spent_s[charge] = self._spent_s.get(charge, 0.0) + now_s - self._settled_s
        self._settled_s = now_s
