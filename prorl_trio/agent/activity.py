"""The activity of a job, and who its time is charged to."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

Charge = Literal["sandbox", "inference", "evaluator", "handler", "node", "agent_budget"]
"""The account that time is charged to: the cause that is named when a budget is used up."""


class Activity:
    """The activity of a job: when something last happened, what it waits for, and where its time went."""

    def __init__(self) -> None:
        now_s = trio.current_time()
        self._progress_s = now_s
        self._waits: dict[object, tuple[str, Charge, bool]] = {}
        self._settled_s = now_s
        self._spent_s: dict[Charge, float] = {}
        self._own: Charge = "handler"

    @property
    def waiting_on(self) -> str:
        """Return the name of the wait begun last, of those that are not over; empty if there is none."""
        return self._wait[0]

    @property
    def other_waits(self) -> list[str]:
        """Return the names of the other waits that are not over, the first begun first."""
        return [what for what, _, _ in self._waits.values()][:-1]

    @property
    def waiting_charge(self) -> Charge | None:
        """Return the account of the wait begun last, of those that are not over; None if there is none."""
        return self._wait[1] if self._waits else None

    @property
    def _wait(self) -> tuple[str, Charge, bool]:
        """The wait begun last, of those that are not over: for what, on which account, and whether that is charged."""
        return next(reversed(self._waits.values()), ("", self._own, True))

    def idle_s(self, now_s: float) -> float:
        """Return the seconds since the last `progress`."""
        return now_s - self._progress_s

    def progress(self) -> None:
        """Note the time: there was a transition, a completion or a tool's result."""
        self._progress_s = trio.current_time()

    def begin_stage(self, own: Charge) -> None:
        """Count from zero. What is not spent waiting is charged to `own`."""
        self._settle()
        self._spent_s.clear()
        self._own = own

    def blame(self) -> Charge:
        """Return the account that most of the time since `begin_stage` went to which was charged at all."""
        self._settle()
        return max(self._spent_s, key=self._spent_s.__getitem__, default=self._own)

    @contextmanager
    def waiting(self, what: str, charge: Charge = "handler", *, is_charged: bool = True) -> Iterator[None]:
        """Show, while the block runs, that the job waits for `what`, and charge the time, unless no budget has it.

        Blocks may be nested, and be in several tasks of the job at once: at any moment the one begun last is shown, and
        charged.
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
