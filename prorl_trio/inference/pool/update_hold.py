"""The hold of one trainer on a pool for the length of its policy update, kept by a lease. Pure but for the clock."""

from __future__ import annotations

import math
from typing import NamedTuple

import trio


class Hold(NamedTuple):
    """The trainer that updates the policy, and until when; without a lease, for as long as it likes."""

    holder: str
    lease_s: float | None
    until_s: float | None

    @property
    def left_s(self) -> float:
        """Return the seconds that the lease has left."""
        return math.inf if self.until_s is None else self.until_s - trio.current_time()

    def __str__(self) -> str:
        lease = "no lease" if self.until_s is None else f"a lease of {max(0.0, self.left_s):.0f} s more"
        return f"the policy update of {self.holder} is under way, with {lease}"


class UpdateHolder:
    """At most one hold at a time. A lease that has run out is for `wait_lost` to tell; it ends by `release` alone.

    Attributes:
        hold: the one in force.
        last: the holder and the version of the last update that was carried out.
    """

    def __init__(self) -> None:
        self.hold: Hold | None = None
        self.last = ("", "")
        self._steps = 0
        self._news = trio.lowlevel.ParkingLot()

    @property
    def holder(self) -> str:
        """Return who has the hold; empty: nobody."""
        return self.hold.holder if self.hold else ""

    def take(self, holder: str, lease_s: float | None) -> None:
        """Give the hold to `holder`, or renew the one that it has."""
        self.hold = Hold(holder, lease_s, None if lease_s is None else trio.current_time() + lease_s)
        self._news.unpark_all()

    def renew(self) -> None:
        """Let the lease in force begin anew."""
        if self.hold is not None:
            self.take(self.hold.holder, self.hold.lease_s)

    def release(self) -> None:
        """End the hold."""
        self.hold = None
        self._news.unpark_all()

    def begin_step(self) -> None:
        """Stop the lease: a step of the update is under way, which has a time limit of its own."""
        self._steps += 1

    def end_step(self) -> None:
        """Let the lease begin anew after a step."""
        self._steps -= 1
        self.renew()
        self._news.unpark_all()

    async def wait_lost(self) -> Hold:
        """Return the hold whose lease has run out, as soon as there is one."""
        await trio.lowlevel.checkpoint()
        while (hold := self._lost()) is None:
            left_s = math.inf if self.hold is None or self._steps else self.hold.left_s
            with trio.move_on_after(left_s):
                await self._news.park()
        return hold

    def _lost(self) -> Hold | None:
        return self.hold if self.hold is not None and not self._steps and self.hold.left_s <= 0 else None
