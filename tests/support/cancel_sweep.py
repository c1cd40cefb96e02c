"""Cancel an operation at every step it takes, one run for each, and look at what is left after each.

async def test_nothing_leaks() -> None:
    async def call() -> None:
        await client.call(Ping(), Pong, timeout_s=5)

    async def check(run: CancelledRun) -> None:
        assert client.statistics().pending_calls == 0

    await cancel_sweep(call, check)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_STEPS = 10_000
"""An operation that is still not done after so many scheduling steps is taken to be endless."""


class CancelledRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the operation. `step` is after which it was cancelled; `completed`: it came to its end regardless."""

    step: int
    completed: bool


class _CancelAtStep(trio.abc.Instrument):
    """Cancels `scope` after the `step`-th scheduling step of any task.

    Any task's, not only the operation's: so a cancellation also arrives between the moment that something else made
    the operation ready and the moment that it runs, which is where most races are.
    """

    def __init__(self, scope: trio.CancelScope, step: int) -> None:
        self._scope = scope
        self._steps_left = step

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            self._scope.cancel(reason="cancel sweep")


async def cancel_sweep(
    operation: Callable[[], Awaitable[object]],
    check: Callable[[CancelledRun], Awaitable[object]],
    *,
    max_steps: int = MAX_STEPS,
    every: int = 1,
) -> int:
    """Run `operation` cancelled after step 1, 2, 3 ... until a run ends first; `check` after each.

    `every`: cancel only after steps 1, 1 + every, 1 + 2 * every and so on.

    Each run is one call of `operation`, so what it works on may be made by it or be shared by all runs. What either
    raises besides that cancellation is raised here. Steps of background tasks count too; where there are threads,
    processes or sockets their number varies from run to run, which makes the sweep less even but no less valid.

    Returns:
        The step after which no run was cancelled any more.

    Raises:
        AssertionError: it was still going after `max_steps` steps.
    """
    for step in range(1, max_steps + 1, every):
        scope = trio.CancelScope()
        instrument = _CancelAtStep(scope, step)
        completed = False
        trio.lowlevel.add_instrument(instrument)
        try:
            with scope:
                await operation()
                completed = True
        finally:
            trio.lowlevel.remove_instrument(instrument)
        await check(CancelledRun(step=step, completed=completed))
        if not scope.cancel_called:
            return step
    raise AssertionError(f"still running after {max_steps} steps")
