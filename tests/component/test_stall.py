from __future__ import annotations

import logging
import threading
import time

import pytest
import trio
import trio.testing

from prorl_trio.observe import logs
from prorl_trio.observe.stall import WORST_STALLS, LoopStalls, open_loop_stalls

STALL_S = 0.03


async def hog_for_a_job():
    logs._job.set(logs._JobContext("job-7", "s", "run"))
    await hog()


pytestmark = [pytest.mark.alone, pytest.mark.timeout(30)]


async def hog(seconds=STALL_S):
    await trio.lowlevel.checkpoint()
    time.sleep(seconds)
    await trio.lowlevel.checkpoint()


def stalls_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "prorl_trio.observe.stall"]


async def test_a_blocking_call_is_found_and_its_task_named(caplog):
    with open_loop_stalls(warn_s=STALL_S / 2) as stalls:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog, name="run-3")
            nursery.start_soon(trio.lowlevel.checkpoint, name="innocent")
        await trio.lowlevel.checkpoint()
        report = stalls.report()
    worst = report.worst[0]
    assert "run-3" in worst.task
    assert "test_stall:" in worst.task, "where it was"
    assert worst.pass_s >= worst.step_s >= STALL_S
    assert report.max_ms >= 1e3 * STALL_S
    assert report.p50_ms <= report.p99_ms <= report.max_ms
    assert report.passes == sum(stalls.counts)
    assert any("run-3" in line and "ms of CPU" in line for line in stalls_of(caplog))


async def test_the_job_is_named_too():
    with open_loop_stalls(warn_s=10.0) as stalls:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog_for_a_job, name="run worker")
            nursery.start_soon(trio.lowlevel.checkpoint)
        await trio.lowlevel.checkpoint()
    assert "run worker (job job-7)" in stalls.report().worst[0].task


async def test_many_warnings_are_one(caplog):
    with open_loop_stalls(warn_s=0.001) as stalls:
        for _ in range(5):
            await hog(0.003)
    assert stalls.report().max_ms >= 3
    assert len(stalls_of(caplog)) == 1


async def test_a_quiet_loop_warns_of_nothing_and_the_instrument_goes(caplog):
    with open_loop_stalls(warn_s=10.0) as stalls:
        await trio.sleep(0.001)
        assert stalls.away_s() > 0, "this very step is part of a pass"
    passes = sum(stalls.counts)
    await trio.sleep(0.001)
    assert sum(stalls.counts) == passes, "it measures no more"
    assert stalls_of(caplog) == []


def drive(stalls, now, passes):
    for seconds in passes:
        stalls.after_io_wait(0)
        now[0] += seconds
        stalls.before_io_wait(0)


async def test_percentiles_are_exact_to_a_bucket():
    now = [0.0]
    stalls = LoopStalls(warn_s=1e9, clock=lambda: now[0])
    drive(stalls, now, [0.001] * 98 + [0.5] * 2)
    report = stalls.report()
    assert (report.passes, report.max_ms) == (100, pytest.approx(500))
    assert 1.0 <= report.p50_ms <= 1.34
    assert 375 <= report.p99_ms <= 500
    assert stalls.sum_s == pytest.approx(98 * 0.001 + 1.0)


async def test_what_a_pass_worked_is_told_from_what_it_waited():
    now, cpu = [0.0], [0.0]
    stalls = LoopStalls(warn_s=1e9, clock=lambda: now[0], cpu_clock=lambda: cpu[0])
    for pass_s, cpu_s in [(0.4, 0.002)] * 50 + [(0.1, 0.09)] * 50:
        stalls.after_io_wait(0)
        now[0] += pass_s
        cpu[0] += cpu_s
        stalls.before_io_wait(0)
        cpu[0] += 1.0  # between passes: not theirs
    report = stalls.report()
    assert (report.max_ms, report.cpu_max_ms) == (pytest.approx(400), pytest.approx(90))
    assert 67 <= report.cpu_p99_ms <= 90.1
    assert (report.worst[0].pass_s, report.worst[0].cpu_s) == (pytest.approx(0.4), pytest.approx(0.002))


async def test_a_thread_that_sleeps_has_no_cpu_and_one_that_works_has():
    def work(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    with open_loop_stalls(warn_s=10.0) as stalls:
        await hog(0.2)
        await trio.lowlevel.checkpoint()
        slept = stalls.report()
        await trio.lowlevel.checkpoint()
        work(0.2)
        await trio.lowlevel.checkpoint()
        worked = stalls.report()
    assert slept.max_ms >= 200
    assert slept.cpu_max_ms < 150
    assert worked.cpu_max_ms >= 195


async def test_no_pass_is_lost_and_the_worst_are_kept_longest_first():
    now = [0.0]
    stalls = LoopStalls(warn_s=1e9, clock=lambda: now[0])
    assert stalls.report().worst == []
    drive(stalls, now, [0.0, 1e9, *(0.01 * n for n in range(1, 40))])
    report = stalls.report()
    assert report.passes == 41
    lengths = [stall.pass_s for stall in report.worst]
    assert len(lengths) == WORST_STALLS
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == pytest.approx(1e9)
    assert lengths[1] == pytest.approx(0.39)


async def test_the_watchdog_says_where_the_loop_is_while_it_is_there(caplog):
    dumped = threading.Event()

    class Tell(logging.Handler):
        def emit(self, record):
            if "has been away" in record.getMessage():
                dumped.set()

    def blocking_on_purpose():
        assert dumped.wait(10)

    log = logging.getLogger("prorl_trio.observe.stall")
    handler = Tell()
    log.addHandler(handler)
    try:
        with open_loop_stalls(warn_s=1e9, dump_after_s=0.02):
            blocking_on_purpose()
            await trio.lowlevel.checkpoint()
    finally:
        log.removeHandler(handler)
    assert any("blocking_on_purpose" in line for line in stalls_of(caplog))
    assert not any(thread.name == "stall watchdog" for thread in threading.enumerate())


async def test_both_limits_may_change_while_it_runs(caplog):
    def watchdogs():
        return sum(thread.name == "stall watchdog" for thread in threading.enumerate())

    with open_loop_stalls(warn_s=10.0) as stalls:
        stalls.warn_s = STALL_S / 2
        await hog()
        await trio.lowlevel.checkpoint()
        assert stalls_of(caplog)
        counts = []
        for after_s in (5.0, 6.0, 0.0, 7.0):
            stalls.dump_after(after_s)
            counts.append(watchdogs())
    assert (counts, watchdogs()) == ([1, 1, 0, 1], 0)
