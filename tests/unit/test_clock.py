"""The clock of a loop: it stands while the process does not run, and never for good."""

from __future__ import annotations

import time

import pytest
import trio

from prorl_ipc.clock import LATE_S, TICK_S, RunningClock, use_running_clock


class Machine:
    """The time that passes, which a test moves; with `runs`, also by itself."""

    def __init__(self, *, runs=False):
        self.ahead_s = 1000.0
        self._runs = runs

    def __call__(self):
        return self.ahead_s + (time.perf_counter() if self._runs else 0.0)


@pytest.fixture
def machine():
    return Machine()


@pytest.mark.parametrize(
    ("asked_s", "passes_s", "shown_s"),
    [
        (0.0, 0.1, 0.1),
        (0.0, LATE_S, LATE_S),
        (0.0, 3600.0, LATE_S),
        (0.2, 0.2, 0.2),
        (0.2, 25.0, 0.2 + LATE_S),
        (100.0, TICK_S, TICK_S),
        (100.0, 25.0, TICK_S + LATE_S),
    ],
)
def test_between_two_readings_it_shows_what_a_loop_that_runs_can_have_missed(machine, asked_s, passes_s, shown_s):
    clock = RunningClock(time=machine)
    since_s = clock.current_time()
    assert clock.deadline_to_sleep_time(since_s + asked_s) == pytest.approx(min(asked_s, TICK_S))
    machine.ahead_s += passes_s
    assert clock.current_time() - since_s == pytest.approx(shown_s)
    assert clock.lost_s == pytest.approx(passes_s - shown_s)
    assert clock.current_time() - since_s == pytest.approx(shown_s), "a gap is left out once"


def test_a_deadline_that_has_passed_and_one_that_never_comes(machine):
    clock = RunningClock(time=machine)
    assert clock.deadline_to_sleep_time(clock.current_time() - 5) == 0.0
    assert clock.deadline_to_sleep_time(float("inf")) == TICK_S


def test_a_loop_that_is_late_each_time_has_a_slow_clock_and_not_one_that_stands(machine):
    clock = RunningClock(time=machine)
    since_s = clock.current_time()
    for _ in range(100):
        machine.ahead_s += 3.0
        clock.current_time()
    assert clock.current_time() - since_s == pytest.approx(100 * LATE_S)


def test_one_that_is_merely_loaded_loses_nothing(machine):
    clock = RunningClock(time=machine)
    since_s = clock.current_time()
    for number in range(1000):
        asked_s = clock.deadline_to_sleep_time(clock.current_time() + number % 3 / 10)
        machine.ahead_s += asked_s + 0.9 * LATE_S
    assert clock.current_time() - since_s == pytest.approx(machine.ahead_s - 1000.0)
    assert clock.lost_s == 0.0


def test_many_short_stops_are_left_out_but_for_their_first_moments(machine):
    clock = RunningClock(time=machine)
    since_s = clock.current_time()
    for _ in range(20):
        clock.deadline_to_sleep_time(float("inf"))
        machine.ahead_s += 2.0
        clock.current_time()
    assert clock.current_time() - since_s == pytest.approx(20 * (TICK_S + LATE_S))


def test_a_time_that_goes_back_is_no_gap(machine):
    clock = RunningClock(time=machine)
    clock.current_time()
    machine.ahead_s -= 1.0
    clock.current_time()
    assert clock.lost_s == 0.0


def in_a_loop(main, *, clock=None):
    return trio.run(main, clock=clock)


@pytest.mark.parametrize("gap_s", [5.0, 5000.0])
def test_deadlines_move_by_the_time_in_which_the_loop_was_stopped(gap_s):
    """Also one beyond each limit: the answer that is there is read, and the deadline holds afterwards."""
    machine = Machine(runs=True)

    async def main():
        send, receive = trio.open_memory_channel(1)
        with trio.fail_after(2.0):
            machine.ahead_s += gap_s
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send.send, "answer")
                assert await receive.receive() == "answer"
        with trio.move_on_after(0.05) as scope:
            await trio.sleep_forever()
        return scope.cancelled_caught, trio.lowlevel.current_clock().lost_s

    ended, lost_s = in_a_loop(main, clock=RunningClock(time=machine))
    assert ended
    assert lost_s == pytest.approx(gap_s, abs=1.0)


def test_a_loop_that_somebody_else_has_started_gets_one_that_goes_on_from_its_own():
    async def main():
        since_s = trio.current_time()
        with trio.CancelScope(deadline=since_s + 0.2) as scope:
            use_running_clock()
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, RunningClock)
            assert 0 <= trio.current_time() - since_s < 0.2
            use_running_clock()
            assert trio.lowlevel.current_clock() is clock, "a second node in the loop"
            clock._time = machine = Machine(runs=True)
            machine.ahead_s += 60.0
            assert trio.current_time() < scope.deadline + LATE_S
            await trio.sleep_forever()
        return scope.cancelled_caught

    assert in_a_loop(main)


async def test_the_clock_of_a_test_stays(autojump_clock):
    use_running_clock()
    assert trio.lowlevel.current_clock() is autojump_clock
    await trio.sleep(1000)
