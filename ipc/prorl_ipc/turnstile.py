"""A turnstile: work that takes long for one pass of the event loop is spread over passes when many tasks have it.

In one pass trio runs every task that can go on. When thousands of answers come at once, each with a millisecond of
work, that pass takes a second, in which no deadline, heartbeat or cancel is seen.
"""

from __future__ import annotations

from typing import Final

import trio

TASKS_A_PASS: Final = 16
"""Tasks that pass at once in one pass of the loop. As many again may pass where those that waited have just gone on."""

_turnstile: trio.lowlevel.RunVar[_Turnstile] = trio.lowlevel.RunVar("prorl_ipc.turnstile")


async def pass_turnstile() -> None:
    """Return when it is this task's turn: at once, or in a later pass of the loop if many have come. In their order.

    Call it before work of about a millisecond that wants no checkpoint inside. A checkpoint only if it has to wait.
    """
    try:
        turnstile = _turnstile.get()
    except LookupError:
        turnstile = _Turnstile()
        trio.lowlevel.add_instrument(turnstile)
        _turnstile.set(turnstile)
    await turnstile.enter()


class _Turnstile(trio.abc.Instrument):
    """The turnstile of one loop, which tells it by `after_io_wait` that a pass begins."""

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
        """Let the first in line go on in the next pass, and so on until nobody waits."""
        try:
            while self._line:
                self._line.unpark(count=TASKS_A_PASS)
                await trio.lowlevel.checkpoint()
        finally:
            self._is_moving = False
