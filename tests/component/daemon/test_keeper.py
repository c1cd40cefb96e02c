"""A keeper outlives whatever attends to its process: an error there ends the process, and the next one is started."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from prorl_daemon.keeper import Keeper, StartFailed


class Process:
    """A process whose attendant task fails when it is told to."""

    def __init__(self):
        self.broken = trio.Event()
        self.gone = trio.Event()

    async def wait_gone(self):
        await self.gone.wait()

    async def serve(self):
        try:
            await self.broken.wait()
            raise OverflowError("a record that nobody expected")
        finally:
            self.gone.set()


@asynccontextmanager
async def open_process():
    process = Process()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.serve)
        yield process
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def fail_to_open():
    await trio.lowlevel.checkpoint()
    raise ZeroDivisionError("at the start")
    yield


@asynccontextmanager
async def keeping(open_one):
    keeper = Keeper(open_one)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.serve)
            yield keeper
            nursery.cancel_scope.cancel()


async def test_an_error_while_it_runs_is_the_end_of_one_process(capsys):
    async with keeping(open_process) as keeper:
        for generation in (1, 2, 3):
            process = await keeper.current(after_generation=generation - 1)
            assert keeper.generation == generation
            process.broken.set()
            await process.gone.wait()
    assert capsys.readouterr().err.count("OverflowError: a record that nobody expected") == 1


async def test_an_error_at_the_start_is_a_failed_start(capsys):
    async with keeping(fail_to_open) as keeper:
        for _ in range(3):
            with pytest.raises(StartFailed, match="ZeroDivisionError: at the start"):
                await keeper.current()
    assert capsys.readouterr().err.count("ZeroDivisionError: at the start") == 1
