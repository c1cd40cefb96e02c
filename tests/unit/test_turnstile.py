"""Work that many tasks have at once is spread over passes of the loop, in the order of their coming."""

from __future__ import annotations

import trio
import trio.testing

from prorl_ipc.turnstile import TASKS_A_PASS, pass_turnstile

TASKS = 10 * TASKS_A_PASS + 3


class Passes(trio.abc.Instrument):
    """Counts the passes of the loop."""

    def __init__(self) -> None:
        self.count = 0
        trio.lowlevel.add_instrument(self)

    def after_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_many_that_come_at_once_go_on_few_in_each_pass_in_their_order():
    passes = Passes()
    came: list[int] = []
    gone: dict[int, list[int]] = {}

    async def work(number: int) -> None:
        came.append(number)
        await pass_turnstile()
        gone.setdefault(passes.count, []).append(number)

    async with trio.open_nursery() as nursery:
        for number in range(TASKS):
            nursery.start_soon(work, number)
    assert len(gone) >= TASKS / TASKS_A_PASS
    for _, together in sorted(gone.items()):
        assert len(together) <= TASKS_A_PASS
        first, came = came[: len(together)], came[len(together) :]
        assert sorted(together) == sorted(first)  # trio runs those of a pass in either direction
    assert not came


async def test_they_do_not_come_round_sooner_by_coming_again():
    passes = Passes()
    gone: dict[int, int] = {}

    async def work() -> None:
        for _ in range(5):
            await pass_turnstile()
            gone[passes.count] = gone.get(passes.count, 0) + 1

    async with trio.open_nursery() as nursery:
        for _ in range(TASKS):
            nursery.start_soon(work)
    assert sum(gone.values()) == 5 * TASKS
    assert max(gone.values()) <= 2 * TASKS_A_PASS


async def test_few_go_on_at_once():
    with trio.testing.assert_no_checkpoints():
        for _ in range(TASKS_A_PASS):
            await pass_turnstile()
    with trio.testing.assert_checkpoints():
        await pass_turnstile()


async def test_who_is_cancelled_in_line_leaves_it_and_the_others_go_on():
    came: list[int] = []
    passed: list[int] = []

    async def work(number: int, scope: trio.CancelScope) -> None:
        with scope:
            came.append(number)
            await pass_turnstile()
            passed.append(number)

    scopes = [trio.CancelScope() for _ in range(TASKS)]
    async with trio.open_nursery() as nursery:
        for number, scope in enumerate(scopes):
            nursery.start_soon(work, number, scope)
        while len(came) < TASKS:
            await trio.lowlevel.checkpoint()
        far_back = came[TASKS // 2 :]  # none of them has been told to go on, whatever the order within a pass
        assert not set(far_back) & set(passed)
        cancelled = far_back[1::2]
        for number in cancelled:
            scopes[number].cancel()
    assert sorted(passed) == sorted(set(range(TASKS)) - set(cancelled))
    await trio.testing.wait_all_tasks_blocked()
    await pass_turnstile()
