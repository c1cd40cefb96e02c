"""The machine of a job's life: every event in every state, and its promises over any sequence of events."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.sessions.job import (
    Acknowledged,
    Ended,
    Event,
    Forgotten,
    Job,
    Moved,
    Offered,
    OutcomeRefused,
    OutcomeStored,
    Refused,
    Stored,
    Taken,
    Withdrawn,
)
from prorl_trio.types.errors import Draining, InternalError
from prorl_trio.types.models import STAGES, TERMINAL, EncodedOutcome, JobState, may_follow

WHY = Draining("the node has ended")


def outcome(status="completed", attempt=1):
    return EncodedOutcome("a", status, None, attempt, b"outcome")


EVENTS = {
    "Stored": Stored(),
    "Refused": Refused(WHY),
    "Taken": Taken(),
    "Moved": Moved("init"),
    "Ended": Ended(outcome()),
    "OutcomeStored": OutcomeStored(),
    "OutcomeRefused": OutcomeRefused(),
    "Offered": Offered(),
    "Acknowledged": Acknowledged(),
    "Forgotten": Forgotten(),
    "Withdrawn": Withdrawn(),
}
ILLEGAL = ""
STAGE = {"Taken": "same", "Moved": "init", "Ended": "ended", "Withdrawn": "same"}
OVER = {"Moved": "same", "Ended": "same"}
AFTER = {
    "promised": {"Stored": "stored", "Refused": "refused", "Withdrawn": "same"},
    "stored": {**STAGE, "Taken": "queued", "Refused": "refused"},
    **dict.fromkeys(STAGES, STAGE),
    "ended": {**OVER, "Taken": "same", "OutcomeStored": "same", "OutcomeRefused": "refused"},
    "ended, stored": {**OVER, "Taken": "same", "Offered": "offered"},
    "offered": {**OVER, "Taken": "same", "Acknowledged": "acknowledged", "Forgotten": "forgotten"},
    "acknowledged": {**OVER, "Taken": "same"},
    "refused": OVER,
    "requeued": {**OVER, "Taken": "same"},
    "forgotten": {**OVER, "Taken": "same"},
}
"""The state after each event; those that are not named cannot come. What ended within `take` is told of it later."""


def job_in(state):
    """A job that came to this state by events alone."""
    job = Job("a", b"hash")
    way = {
        "promised": [],
        "refused": [Refused(WHY)],
        "requeued": [Stored(), Ended(outcome("cancelled"), requeue=True)],
        "forgotten": [Stored(), Withdrawn(), Ended(outcome("cancelled"))],
        "ended": [Stored(), Ended(outcome())],
        "ended, stored": [Stored(), Ended(outcome()), OutcomeStored()],
        "offered": [Stored(), Ended(outcome()), OutcomeStored(), Offered()],
        "acknowledged": [Stored(), Ended(outcome()), OutcomeStored(), Offered(), Acknowledged()],
    }
    stage = [Stored(), Taken(), Moved(state)] if state in STAGES else [Stored()]
    for event in way.get(state, stage):
        job.apply(event)
    assert job.state == state.partition(",")[0]
    return job


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("state", AFTER)
def test_every_event_in_every_state(state, name):
    job = job_in(state)
    before = (job.state, job.attempt, job.result)
    expected = AFTER[state].get(name, ILLEGAL)
    if expected == ILLEGAL:
        with pytest.raises(InternalError, match=f"is {before[0]}: {name} cannot come"):
            job.apply(EVENTS[name])
        assert (job.state, job.attempt, job.result) == before
        return
    effects = job.apply(EVENTS[name])
    assert job.state == (before[0] if expected == "same" else expected)
    assert effects.is_second == (name == "Ended" and expected == "same")
    assert (effects.store is not None) == (expected == "ended")
    assert effects.drop == (expected in ("refused", "acknowledged", "forgotten"))
    assert effects.delete == (expected == "forgotten")


def test_the_table_has_every_state_and_every_event():
    assert {state.partition(",")[0] for state in AFTER} == set(get_args(JobState))
    assert {type(event) for event in EVENTS.values()} == set(get_args(Event))


@pytest.mark.parametrize("status", [*STAGES, *sorted(TERMINAL)])
def test_within_an_attempt_each_stage_has_one_that_follows_and_may_end_badly(status):
    follow = {to for to in [*STAGES, *TERMINAL] if may_follow(status, to)}
    assert follow == ({STAGES[status], *TERMINAL - {"completed"}} if status in STAGES else set())


def test_attempts_are_counted_on_and_an_outcome_of_one_that_is_over_is_dropped():
    job = Job("a", b"hash", attempt=2)
    assert job.apply(Stored()).begin_attempt == 2  # they began on other nodes
    assert job.apply(Moved("init")).begin_attempt == 3
    late = job.apply(Ended(outcome(attempt=2), elsewhere=True))
    assert (late.is_second, late.tell, late.store) == (True, True, None)
    assert job.awaits_outcome
    assert job.apply(Ended(outcome(attempt=3), elsewhere=True)).store is not None
    assert job.attempt == 3


def test_a_sender_may_forget_an_outcome_when_the_ledger_has_it():
    job = job_in("ended")
    assert job.apply(Ended(outcome())).tell is None
    assert job.apply(OutcomeStored()).tell is True
    assert job.apply(Ended(outcome())).tell is True
    assert job_in("ended").apply(OutcomeRefused()).tell is False
    assert job_in("requeued").apply(Ended(outcome())).tell is None


@pytest.mark.parametrize(("status", "stays"), [("completed", True), ("cancelled", False)])
def test_what_is_withdrawn_is_forgotten_if_its_cancel_ends_it(status, stays):
    job = job_in("run")
    job.apply(Withdrawn())
    effects = job.apply(Ended(outcome(status)))
    assert (effects.store is not None, effects.delete, effects.end) == (stays, not stays, not stays)


events = st.sampled_from(
    [*EVENTS.values(), Moved("queued"), Moved("completed"), Ended(outcome("cancelled")), Ended(outcome(attempt=2))]
)


@given(st.lists(events, max_size=30))
def test_whatever_comes_a_job_has_one_outcome_offered_once_and_acknowledged_once(sequence):
    """Model: what cannot come is refused and changes nothing; an end is an end."""
    job, done = job_in("promised"), []
    result = None
    for event in sequence:
        before = job.state
        try:
            effects = job.apply(event)
        except InternalError:
            assert job.state == before
            continue
        if effects.store is not None:
            done.append("store")
            result = effects.store
        done += [name for name in ("end", "drop", "delete") if getattr(effects, name)]
        done += [type(event).__name__] if isinstance(event, Offered | Acknowledged) else []
        assert result is None or job.result is result
        if before in ("acknowledged", "refused", "forgotten", "requeued"):
            assert job.state == before
            assert (effects.store, effects.drop, effects.delete, effects.end) == (None, False, False, False)
    for once in ("store", "end", "drop", "delete", "Offered", "Acknowledged"):
        assert done.count(once) <= 1
    if "Acknowledged" in done:
        assert done.index("store") < done.index("Offered") < done.index("Acknowledged")
    assert ("drop" in done) == (job.state in ("acknowledged", "refused", "forgotten"))
