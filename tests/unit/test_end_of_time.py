"""A node whose allocation ends begins nothing that would not be over before, and drains in time."""

from __future__ import annotations

import time

import pytest
import trio

from prorl_trio.node.drain import EndOfTime, allocation_left_s
from prorl_trio.pipeline.pipeline import KEPT, Durations


def durations_of(**took_s):
    durations = Durations()
    for kind, each in took_s.items():
        for one in each:
            durations.ended(kind, one)
    return durations


def test_the_99th_percentile_is_of_the_latest_jobs_of_a_kind():
    durations = durations_of(math=range(1, 101), swe=[600.0])
    assert (durations.p99_s("math"), durations.p99_s("swe")) == (99, 600.0)
    assert durations.p99_s("new") == 600.0, "the longest, while nothing is known of it"
    assert (durations.longest_p99_s(), durations.shortest_p99_s()) == (600.0, 99)
    for _ in range(KEPT):
        durations.ended("math", 2.0)
    assert durations.p99_s("math") == 2.0
    assert Durations().p99_s("math") == Durations().longest_p99_s() == Durations().shortest_p99_s() == 0.0


@pytest.mark.parametrize("told", ["", "0", "soon", "-5", "\u0661"])
def test_an_end_that_is_not_told_is_none(told):
    assert allocation_left_s({"SLURM_JOB_END_TIME": told}) is None
    assert allocation_left_s({}) is None


def test_the_end_is_told_by_the_time_of_day(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    assert allocation_left_s({"SLURM_JOB_END_TIME": "1100"}) == 99.5


@pytest.mark.parametrize(
    ("ahead_s", "left_s"), [(0, 3600), (-300, 3600), (300, 3300)], ids=["right", "slow clock", "fast clock"]
)
def test_a_node_that_begins_with_its_allocation_is_never_late(monkeypatch, ahead_s, left_s):
    monkeypatch.setattr(time, "time", lambda: 10_000.0 + ahead_s)
    told = {"SLURM_JOB_START_TIME": "10000", "SLURM_JOB_END_TIME": "13600"}
    assert allocation_left_s(told) == left_s


async def test_a_kind_is_refused_when_what_is_left_is_shorter_than_its_99th_percentile(autojump_clock):
    end = EndOfTime(1000.0, durations_of(math=[10.0], swe=[600.0]))
    assert (end.refusal("math"), end.refusal("swe"), end.left_s) == ("", "", 1000.0)
    await trio.sleep(500)
    assert end.refusal("math") == ""
    assert "500 s are left" in end.refusal("swe")
    assert "'swe' take 600 s" in end.refusal("swe")
    assert not end.is_near
    await trio.sleep(490)
    assert "10 s are left" in end.refusal("math")
    assert end.is_near
    await trio.sleep(490)
    assert end.left_s == 0.0


async def test_the_drain_begins_when_the_longest_kind_has_no_time_left_also_if_it_grows(autojump_clock):
    durations = durations_of(math=[10.0])
    end = EndOfTime(1000.0, durations)

    async def grow():
        await trio.sleep(100)
        durations.ended("math", 300.0)

    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(grow)
        await end.wait_near()
    assert trio.current_time() - began_s == pytest.approx(700, abs=1.1)


async def test_without_an_allocation_there_is_no_end(autojump_clock):
    end = EndOfTime(None, durations_of(math=[1e9]))
    assert (end.left_s, end.refusal("math"), end.is_near) == (None, "", False)
    with trio.move_on_after(1e6) as scope:
        await end.wait_near()
    assert scope.cancelled_caught
