"""What is charged to the policy, and what is not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.agent.budget import AgentClock
from prorl_trio.config import BudgetConfig
from prorl_trio.inference.pool.pace import STALL_S, Pace, Production
from prorl_trio.types.models import Budgets


def test_it_stands_until_a_tool_works_and_again_afterwards():
    clock = AgentClock(10.0)
    assert clock.ends_s(100.0) == math.inf
    clock.begin(100.0)
    assert (clock.left_s(104.0), clock.ends_s(104.0)) == (6.0, 110.0)
    clock.end(105.0)
    assert (clock.left_s(500.0), clock.ends_s(500.0)) == (5.0, math.inf)
    clock.begin(600.0)
    assert clock.ends_s(600.0) == 605.0
    clock.end(606.0)
    assert (clock.left_s(700.0), clock.ends_s(700.0)) == (0.0, 700.0)


def test_what_goes_on_at_the_same_time_counts_once():
    clock = AgentClock(100.0)
    clock.begin(0.0)
    clock.begin(1.0)
    assert clock.produced(0.5, 2.0) == 0.0
    clock.end(3.0)
    clock.end(4.0)
    assert clock.left_s(9.0) == 96.0
    assert clock.produced(3.0, 6.0) == 2.0, "up to 4 it was counted"
    assert clock.produced(5.0, 7.0) == 1.0
    assert clock.left_s(9.0) == 93.0


def test_time_in_which_no_tool_could_work_is_left_out():
    clock = AgentClock(10.0)
    clock.leave_out(5.0, 50.0)
    assert clock.left_s(50.0) == 10.0, "no tool works"
    clock.begin(100.0)
    clock.leave_out(5.0, 107.0)
    assert (clock.left_s(107.0), clock.ends_s(107.0)) == (8.0, 115.0)
    clock.leave_out(500.0, 108.0)
    assert clock.left_s(108.0) == 10.0, "never more than was counted"


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.booleans()), max_size=20))
def test_never_more_is_charged_than_time_has_passed(steps):
    """Of tools and pieces of streams in any order, of several agents at once."""
    clock, now_s, working = AgentClock(1e9), 0.0, 0
    for ahead_s, back_s, is_tool in steps:
        now_s += ahead_s
        if not is_tool:
            clock.produced(max(0.0, now_s - back_s), now_s)
        elif working and back_s > 5:
            clock.end(now_s)
            working -= 1
        else:
            clock.begin(now_s)
            working += 1
    assert 0 <= 1e9 - clock.left_s(now_s) <= now_s + 1e-6


def charged(*events):
    """What a production tells of `events`: (time, opening of the gate), and last what `answered` gets."""
    told = []
    *pieces, last = events
    production = Production(told.append, Pace(), 100.0, 0)
    for now_s, opening in pieces:
        production.piece(1, now_s, opening)
    production.ended(110.0)
    production.answered(9, 110.0, last)
    return told


@pytest.mark.parametrize(
    ("events", "since"),
    [
        (((103.0, 0), (104.0, 0), (106.0, 0), 0), [103.0, 104.0]),  # not the wait for the first piece
        (((101.0, 0), (102.0 + STALL_S, 0), (108.0, 0), 0), [102.0 + STALL_S]),  # not a stall
        (((101.0, 0), (102.0, 1), (103.0, 1), 1), [102.0]),  # not a pause
        (((101.0, 0), (102.0, None), (103.0, None), (104.0, 1), (105.0, 1), 1), [104.0]),  # nor what came in it
        ((0,), [100.0]),  # an engine that does not stream
        ((1,), []),  # and that was paused meanwhile
        ((None,), []),
    ],
)
def test_an_engine_was_at_work_between_the_pieces_of_a_stream(events, since):
    assert charged(*events) == since


@pytest.mark.parametrize(
    ("asked", "agent_s"),
    [({}, 600.0), ({"run_s": 5.0}, 5.0), ({"run_s": 5.0, "agent_s": 7.0}, 7.0), ({"agent_s": 9.0}, 9.0)],
)
def test_a_jobs_own_limit_holds_for_its_agent_too(asked, agent_s):
    defaults = BudgetConfig()
    assert defaults.agent_s < defaults.run_s
    assert defaults.of_agent(Budgets(**asked)) == agent_s
