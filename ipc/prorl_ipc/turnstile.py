"""A turnstile: it spreads long work of many tasks over several passes of the event loop.

In one pass, trio runs every task that can continue. When thousands of answers arrive at once, each with a millisecond
of work, that pass takes seconds, in which no deadline, heartbeat or cancel is handled.
"""

from __future__ import annotations

from typing import Final

import trio

TASKS_A_PASS: Final = 16
"""Tasks that pass in one pass of the loop. As many again may pass in a pass that also resumes waiting tasks."""

_turnstile: trio.lowlevel.RunVar[_Turnstile] = trio.lowlevel.RunVar("prorl_ipc.turnstile")


async def pass_turnstile() -> None:
    """Return when it is this task's turn, in order of arrival: at once, or in a later pass if many tasks arrived.

    Call it before work of about a millisecond without a checkpoint inside. It is a checkpoint only if it has to wait.
    """
    try:
        turnstile = _turnstile.get()
    except LookupError:
        turnstile = _Turnstile()
        trio.lowlevel.add_instrument(turnstile)
        _turnstile.set(turnstile)
    await turnstile.enter()


class _Turnstile(trio.abc.Instrument):
    """The turnstile of one loop. trio reports the start of a pass by `after_io_wait`."""

    def __init__(self) -> None:
        self._left = TASKS_A_PASS
        self._line = trio.lowlevel.ParkingLot()
        self._is_moving = False

    def after_io_wait(self, timeout: float) -> None:
        self._left = TASKS_A_PASS

    async def enter(self) -> None:
        if self._left and not self._line:
            self._left -= 1
            return
        if not self._is_moving:
            self._is_moving = True
            trio.lowlevel.spawn_system_task(self._move_line)
        await self._line.park()

    async def _move_line(self) -> None:
        """Resume the first waiting tasks in each pass, until the line is empty."""
        try:
            while self._line:
                self._line.unpark(count=TASKS_A_PASS)
                await trio.lowlevel.checkpoint()
        finally:
            self._is_moving = False
