"""Threads and scoring processes that the machine refuses, and whose doing an error of the system is."""

from __future__ import annotations

import errno

import pytest
import trio

from prorl_ipc.errors import CallFailed
from prorl_trio import threads
from prorl_trio.agent import scoring
from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import SandboxUnavailable, is_exhaustion


def refused(number):
    return OSError(number, "x")


async def test_a_thread_is_waited_for(monkeypatch):
    to_thread, refusals = trio.to_thread.run_sync, 3

    async def sometimes(*args, **kwargs):
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise RuntimeError("can't start new thread")
        return await to_thread(*args, **kwargs)

    monkeypatch.setattr(threads, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(trio.to_thread, "run_sync", sometimes)
    assert await run_sync(divmod, 7, 2) == (3, 1)
    assert refusals == -1


async def test_a_thread_that_never_starts_is_an_error_of_the_system(monkeypatch, autojump_clock):
    async def never(*_args, **_kwargs):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.to_thread, "run_sync", never)
    with pytest.raises(OSError, match="can't start new thread") as caught:
        await run_sync(divmod, 7, 2)
    assert caught.value.errno == errno.EAGAIN
    assert is_exhaustion(caught.value)


async def test_an_error_of_the_function_is_its_own():
    calls = []

    def fails():
        calls.append(1)
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError):
        await run_sync(fails)
    assert calls == [1]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC])
async def test_a_scorer_that_the_machine_refuses_is_not_the_evaluators_fault(monkeypatch, autojump_clock, number):
    async def refuses(*_args, **_kwargs):
        raise refused(number)

    monkeypatch.setattr(scoring.trio.lowlevel, "open_process", refuses)
    async with open_scorer_pool(1) as pool:
        with pytest.raises(SandboxUnavailable) as caught:
            await pool.score("prorl_trio.tasks.handlers.math_scorer:score", {}, timeout_s=5, harmless={})
        assert (caught.value.cause, caught.value.error_code) == ("sandbox", "sandbox_start")
        assert pool.statistics() == {"busy": 0, "idle": 0}


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (refused(errno.EMFILE), True),
        (refused(errno.ENOSPC), True),
        (refused(errno.EROFS), True),
        (RuntimeError("can't start new thread"), True),
        (refused(errno.ENOENT), False),
        (RuntimeError("a bug"), False),
        (MemoryError(), False),
        (CallFailed("no_space", "in the sandbox"), False),
    ],
)
def test_what_counts_as_a_lack_of_the_machine(error, is_it):
    assert is_exhaustion(error) is is_it
