from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.pipeline.job import Lifecycle
from prorl_trio.types.errors import InternalError
from prorl_trio.types.models import TERMINAL

LINE = ["queued", "init", "ready", "run", "ran", "eval", "completed"]
ALL = sorted({*LINE, *TERMINAL})


def test_the_straight_way_charges_each_second_once():
    life = Lifecycle(100.0)
    for step, status in enumerate(LINE[1:], start=1):
        life.move(status, 100.0 + step * step)
    timing = life.timing()
    assert (timing.queued_init_s, timing.init_s, timing.queued_run_s) == (1.0, 3.0, 5.0)
    assert (timing.run_s, timing.queued_eval_s, timing.eval_s) == (7.0, 9.0, 11.0)
    assert life.terminal
    assert life.status == "completed"


@pytest.mark.parametrize("end", ["failed", "cancelled", "timed_out"])
@pytest.mark.parametrize("steps", range(6))
def test_every_live_status_may_end_badly_but_only_eval_well(steps, end):
    life = Lifecycle(0.0)
    for status in LINE[1 : steps + 1]:
        life.move(status, 0.0)
    assert life.may_move("completed") == (life.status == "eval")
    life.move(end, 1.0)
    assert life.terminal


def test_a_terminal_status_is_final():
    life = Lifecycle(0.0)
    life.move("cancelled", 1.0)
    for status in ALL:
        with pytest.raises(InternalError, match="cannot go from cancelled"):
            life.move(status, 2.0)


@given(st.lists(st.tuples(st.sampled_from(ALL), st.floats(0, 100)), max_size=20))
def test_any_sequence_of_moves_keeps_the_rules(moves):
    """Model: refused moves change nothing; the sum of times is the time from the start to the last accepted move."""
    life, now, accepted_until = Lifecycle(0.0), 0.0, 0.0
    terminals = 0
    for status, delay in moves:
        now += delay
        before = life.status
        if life.may_move(status):
            life.move(status, now)
            accepted_until = now
            terminals += status in TERMINAL
        else:
            with pytest.raises(InternalError):
                life.move(status, now)
            assert life.status == before
    timing = life.timing()
    total = timing.queued_init_s + timing.init_s + timing.queued_run_s + timing.run_s
    total += timing.queued_eval_s + timing.eval_s
    assert total == pytest.approx(accepted_until)
    assert terminals == int(life.terminal)
