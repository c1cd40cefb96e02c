"""The sweep must find what it is for."""

from __future__ import annotations

import pytest
import trio

from support.cancel_sweep import CancelledRun, cancel_sweep


class Pool:
    """One permit; `take_and_return` has the bug, or has it not."""

    def __init__(self, *, leaks: bool) -> None:
        self.free = 1
        self._leaks = leaks

    async def use(self) -> None:
        self.free -= 1
        if self._leaks:
            await trio.lowlevel.checkpoint()  # cancelled here, the permit is lost
        try:
            for _ in range(3):
                await trio.lowlevel.checkpoint()
        finally:
            self.free += 1


async def test_it_finds_the_one_step_that_leaks():
    for leaks in (False, True):
        pool = Pool(leaks=leaks)
        leaky_steps: list[int] = []

        async def check(run: CancelledRun) -> None:
            if pool.free != 1:  # noqa: B023 - called within the iteration
                leaky_steps.append(run.step)  # noqa: B023
                pool.free = 1  # noqa: B023

        assert await cancel_sweep(pool.use, check) > 3
        assert bool(leaky_steps) == leaks


async def test_it_counts_up_by_one_and_ends_with_a_run_that_was_not_cancelled():
    runs: list[CancelledRun] = []

    async def operation() -> None:
        for _ in range(4):
            await trio.lowlevel.checkpoint()

    async def check(run: CancelledRun) -> None:
        runs.append(run)

    number = await cancel_sweep(operation, check)
    assert [run.step for run in runs] == list(range(1, number + 1))
    assert not runs[0].completed
    assert runs[-1].completed


async def test_it_cancels_a_task_that_another_one_has_just_made_ready():
    """Only there is the answer in and the cancellation too: where most races are."""
    raced = 0

    async def operation() -> None:
        nonlocal raced
        ready = trio.Event()

        async def make_ready() -> None:
            await trio.lowlevel.checkpoint()
            ready.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make_ready)
            await ready.wait()
            try:
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled:
                raced += 1
                raise

    async def check(run: CancelledRun) -> None:
        await trio.lowlevel.checkpoint()

    await cancel_sweep(operation, check)
    assert raced > 0


async def test_what_the_operation_raises_flies_and_the_sweep_is_over():
    async def operation() -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("broken")

    async def check(run: CancelledRun) -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(RuntimeError, match="broken"):
        await cancel_sweep(operation, check)


async def test_an_endless_operation_is_given_up_on():
    async def operation() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    async def check(run: CancelledRun) -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(AssertionError, match="still running after 20 steps"):
        await cancel_sweep(operation, check, max_steps=20)
