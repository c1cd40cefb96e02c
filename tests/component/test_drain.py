from __future__ import annotations

import logging
import os
import signal
from collections import Counter

import pytest
import trio
import trio.testing

from prorl_trio.node import drain as drain_module
from prorl_trio.node.drain import EndSignals, drain, drains_on_hangup, open_end_signals

pytestmark = pytest.mark.timeout(30)


class Jobs:
    """Drains when told to; cancels when `gate` is open."""

    def __init__(self, *statuses):
        self.jobs = [{"job_id": str(n), "status": status} for n, status in enumerate(statuses)]
        self.done, self.gate = trio.Event(), trio.Event()
        self.gate.set()
        self.cancelled = []

    def live_by_status(self):
        return Counter(job["status"] for job in self.jobs)

    async def drain(self):
        await self.done.wait()
        self.jobs.clear()

    async def cancel_all(self, reason):
        self.cancelled.append(reason)
        await self.gate.wait()
        self.jobs.clear()


async def drain_with(jobs, act, timeout_s=1000.0):
    """Drain, do `act(send)` meanwhile, return how many were cut."""
    send, signals = trio.open_memory_channel(10)
    cut = []

    async def run():
        cut.append(await drain(jobs, signals, timeout_s))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        await act(send)
    return cut[0]


async def test_signals_that_come_too_late_to_be_acted_on_change_no_exit_code():
    """The one that began the end is often sent twice: by a shell to its group, and by a service manager."""
    numbers, killed = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), []
    former = {number: signal.signal(number, lambda number, _frame: killed.append(number)) for number in numbers}
    try:
        with open_end_signals("drain", reloads=True) as signals:
            for number in numbers:
                os.kill(os.getpid(), number)
            assert await anext(signals) == signal.SIGTERM
        await trio.testing.wait_all_tasks_blocked()
        assert killed == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert killed == [signal.SIGTERM], "after the block, signals mean what they meant before it"
        with open_end_signals("drain", reloads=True, ends_process=True):
            pass
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_IGN}, (
            "a second one, while Python ends and takes handlers away, changes no exit code"
        )
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


async def test_a_terminal_that_says_twice_that_it_is_gone_is_one_signal():
    send, received = trio.open_memory_channel(10)
    signals = EndSignals(received)
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        send.send_nowait(number)
    assert [await anext(signals) for _ in range(3)] == [signal.SIGHUP, signal.SIGTERM, signal.SIGTERM]


async def test_a_warning_of_an_end_that_the_node_knows_is_no_signal_and_ctrl_c_always_is(caplog):
    send, received = trio.open_memory_channel(10)
    signals = EndSignals(received)
    signals.excuse_warning()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        send.send_nowait(number)
    assert await anext(signals) == signal.SIGINT
    assert "drains already" not in caplog.text
    assert await anext(signals) == signal.SIGTERM
    assert caplog.text.count("SIGTERM: the node drains already; the next signal cuts that short") == 1
    with pytest.raises(trio.WouldBlock):
        received.receive_nowait()


async def test_hangups_end_a_node_or_do_nothing_while_it_starts():
    before = signal.getsignal(signal.SIGHUP)
    with open_end_signals("drain", reloads=True) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert await anext(signals) == signal.SIGHUP
    with open_end_signals("reload", reloads=True) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await anext(signals) == signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) == before


@pytest.mark.parametrize(
    ("terminals", "ignored", "on_hangup", "ends"),
    [
        ((), False, "auto", False),
        ((0,), True, "auto", False),
        ((), False, "drain", True),
        ((0, 1, 2), False, "reload", False),
    ],
)
def test_whether_a_hangup_ends_it(monkeypatch, terminals, ignored, on_hangup, ends):
    monkeypatch.setattr(os, "isatty", lambda fd: fd in terminals)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert drains_on_hangup(on_hangup) == ends
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_jobs_that_finish_make_a_clean_end(caplog):
    jobs = Jobs("run")

    async def finish(_send):
        jobs.done.set()

    with caplog.at_level(logging.INFO):
        assert await drain_with(jobs, finish) == 0
    assert jobs.cancelled == []
    assert "1 jobs left (1 run)" in caplog.text
    assert "every job had its own outcome" in caplog.text


async def test_a_second_signal_cancels_what_is_left(caplog):
    jobs = Jobs("run", "run", "queued")

    async def signal_again(send):
        await send.send(signal.SIGTERM)

    assert await drain_with(jobs, signal_again) == 3
    assert jobs.cancelled == ["the node is shutting down"]
    assert "cancelling 3 jobs left (2 run, 1 queued)" in caplog.text


async def test_the_end_of_patience_cancels_and_progress_is_said(caplog, autojump_clock):
    jobs = Jobs("run", "eval")

    async def wait(_send):
        pass

    with caplog.at_level(logging.INFO):
        assert await drain_with(jobs, wait, timeout_s=12.0) == 2
    lines = [record.getMessage() for record in caplog.records if "what is left in" in record.getMessage()]
    assert lines == [
        "draining: 2 jobs left (1 run, 1 eval); what is left in 7 s is cancelled",
        "draining: 2 jobs left (1 run, 1 eval); what is left in 2 s is cancelled",
    ]


async def test_a_third_signal_ends_the_process(monkeypatch):
    jobs = Jobs("run")
    jobs.gate = trio.Event()
    done = []

    def kill(_pid, number):
        done.append(number)
        jobs.gate.set()

    async def two_more(send):
        await send.send(signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked()
        assert done == []
        await send.send(signal.SIGTERM)

    with monkeypatch.context() as patch:  # trio itself sets handlers, when the test has ended
        patch.setattr(drain_module.signal, "signal", lambda number, handler: done.append((number, handler)))
        patch.setattr(drain_module.os, "kill", kill)
        assert await drain_with(jobs, two_more) == 1
    assert done == [(signal.SIGTERM, signal.SIG_DFL), signal.SIGTERM]
