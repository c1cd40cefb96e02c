"""The head's dispatch: which member gets which job, and what counts of what members say."""

from __future__ import annotations

import msgspec
import pytest

from prorl_trio.fleet.dispatch import MAX_LOSSES, Dispatch
from prorl_trio.fleet.events import (
    Acknowledge,
    Answered,
    Begin,
    Begun,
    Cancel,
    CancelThere,
    Deliver,
    End,
    Ended,
    Forget,
    Forgotten,
    Joined,
    Lost,
    Policy,
    Progress,
    Recovered,
    Restored,
    Room,
    Stored,
    Submit,
    Taken,
    Waited,
    Withdraw,
    Withdrawn,
)
from prorl_trio.types.models import GroupPolicy, JobSpec, TaskInstance


def spec_of(job_id, **fields):
    return JobSpec(job_id=job_id, instance=TaskInstance(instance_id="i", handler="fake", payload={}), **fields)


class Head:
    """A dispatch whose writes are stored at once, and which keeps what it asks for."""

    def __init__(self, **members):
        self.state = Dispatch()
        self.effects = []
        self.submitted = {}
        self.apply(Recovered())
        for node_id, workers in members.items():
            self.join(node_id, workers)

    def apply(self, event):
        todo = self.state.apply(event)
        for effect in todo:
            self.effects.append(effect)
            if isinstance(effect, Begin):
                self.apply(Begun(effect.job_id))
            if isinstance(effect, Submit):
                self.submitted.setdefault(effect.node_id, []).append(effect.job_id)
        return todo

    def join(self, node_id, workers, holds=()):
        self.apply(Joined(node_id, frozenset(holds)))
        self.room(node_id, workers)

    def room(self, node_id, workers, *, room=1000, own=None, free=None, unready=""):
        held = self.state.members[node_id].held if own is None else own
        self.apply(Room(node_id, room, workers - held if free is None else free, workers, held, unready))

    def take(self, *job_ids, session="s", attempt=0, **fields):
        for job_id in job_ids:
            self.apply(Taken(spec_of(job_id, **fields), session, attempt))

    def accept(self, *names):
        for node_id in names or self.state.members:
            for job in list(self.state.members[node_id].jobs.values()):
                self.apply(Answered(node_id, job.spec.job_id))

    def where(self):
        return {node_id: sorted(member.jobs) for node_id, member in self.state.members.items()}

    def of(self, kind):
        return [effect for effect in self.effects if isinstance(effect, kind)]


def test_a_member_holds_its_workers_and_a_quarter_more():
    head = Head(a=4, b=8)
    head.take(*(f"{n}" for n in range(40)))
    assert {name: len(jobs) for name, jobs in head.where().items()} == {"a": 5, "b": 10}
    assert head.state.queued == 25
    head.apply(Ended("a", head.where()["a"][0], 1, 1, "completed"))
    assert (len(head.where()["a"]), head.state.queued) == (5, 24)


def test_a_job_in_eval_takes_no_place():
    head = Head(a=1)
    head.take("x", "y", "z")
    head.accept()
    assert head.where() == {"a": ["x", "y"]}
    head.apply(Progress("a", "x", "ran"))
    assert head.where() == {"a": ["x", "y", "z"]}


def test_jobs_of_others_take_places():
    head = Head(a=4)
    head.room("a", 4, own=0, free=1)
    head.take(*"abcdefgh")
    assert len(head.where()["a"]) == 2


def test_eval_goes_before_train_and_sessions_take_turns():
    head = Head()
    head.take("t1", "t2", "t3", "t4", session="one")
    head.take("u1", session="two")
    head.take("e1", session="one", priority="eval")
    head.join("a", 4)
    assert [effect.job_id for effect in head.of(Submit)][:3] == ["e1", "t1", "u1"]


def test_mates_of_a_group_go_to_one_member_while_it_has_places():
    head = Head(a=8, b=8)
    head.take("g1", "g2", "g3", "g4", group_id="g")
    head.take("h1", "h2", "h3", "h4", group_id="h")
    assert sorted(map(tuple, head.where().values())) == [("g1", "g2", "g3", "g4"), ("h1", "h2", "h3", "h4")]


def test_mates_go_elsewhere_only_where_no_place_is_free_at_home():
    head = Head(a=1)
    head.take(*(f"g{n}" for n in range(4)), group_id="g")
    assert head.where()["a"] == ["g0", "g1"]
    head.join("b", 4)
    assert head.where()["b"] == ["g2", "g3"]


def test_a_group_with_a_policy_stays_on_the_member_that_watches_over_it():
    head = Head(a=1)
    head.take(*(f"g{n}" for n in range(4)), group_id="g", group=GroupPolicy(size=4, min_completed=2))
    head.take("x")
    head.join("b", 4)
    assert head.where() == {"a": ["g0", "g1"], "b": ["x"]}
    head.accept()
    head.apply(Ended("a", "g0", 1, 1, "completed"))
    assert head.where()["a"] == ["g1", "g2"]
    head.apply(Lost("a", "killed"))
    assert head.where()["b"] == ["g1", "g2", "g3", "x"]


@pytest.mark.parametrize("ready", [True, False])
def test_a_member_on_which_no_job_is_worked_on_gets_some_only_if_all_are_so(ready):
    head = Head(a=4, b=4)
    head.room("a", 4, unready="no backend")
    head.room("b", 4, unready="" if ready else "no backend")
    head.take("x", "y")
    assert len(head.where()["a"]) == (0 if ready else 1)


def test_a_member_on_which_no_job_is_worked_on_gets_none_while_the_others_are_full():
    head = Head(a=4, b=4)
    head.room("a", 4, unready="no backend")
    head.take(*(f"{n}" for n in range(8)))
    assert {name: len(jobs) for name, jobs in head.where().items()} == {"a": 0, "b": 5}
    head.apply(Ended("b", "0", 1, 1, "completed"))
    assert (len(head.where()["b"]), head.state.queued) == (5, 2)
    head.apply(Lost("b", "killed"))
    assert len(head.where()["a"]) == 5, "now no member works on any"


def test_a_full_member_is_asked_again_after_its_next_report():
    head = Head(a=4)
    head.take("x")
    head.apply(Answered("a", "x", "admission", "full"))
    assert (head.where(), head.state.queued) == ({"a": []}, 1)
    head.room("a", 4)
    assert head.where() == {"a": ["x"]}
    assert [effect.attempt for effect in head.of(Begin)] == [1], "no member was given the first attempt"


def test_a_job_that_one_member_refuses_goes_to_another():
    head = Head(a=8)
    head.take("x")
    head.join("b", 4)
    head.apply(Answered("a", "x", "draining", "its time is over"))
    assert head.where() == {"a": [], "b": ["x"]}


def test_a_job_that_no_member_has_time_for_is_offered_again_later():
    head = Head(a=8)
    head.take("x")
    head.apply(Answered("a", "x", "draining", "its time is over"))
    assert head.state.queued == 1
    head.room("a", 8)
    assert head.where() == {"a": ["x"]}


@pytest.mark.parametrize(("code", "said"), [("malformed", "wrong"), ("unknown_handler", "no member takes it: wrong")])
def test_a_job_that_is_refused_for_good_fails(code, said):
    head = Head(a=8)
    head.take("x")
    head.apply(Answered("a", "x", code, "wrong"))
    assert head.of(End) == [End("x", said, failed=True)]
    assert not head.state.jobs


def test_jobs_of_a_lost_member_begin_their_next_attempt_elsewhere():
    head = Head(a=4)
    head.take("x", "y")
    head.accept()
    head.join("b", 4)
    head.apply(Lost("a", "killed"))
    assert head.where() == {"b": ["x", "y"]}
    assert [effect.attempt for effect in head.of(Begin)] == [1, 1, 2, 2]


def test_a_job_of_too_many_lost_members_fails():
    head = Head()
    head.take("x")
    for number in range(MAX_LOSSES + 1):
        head.join(f"n{number}", 4)
        head.accept()
        head.apply(Lost(f"n{number}", "killed"))
    assert [effect.failed for effect in head.of(End)] == [True]
    assert "n0, n1" in head.of(End)[0].reason


def test_a_member_that_returns_before_its_jobs_are_elsewhere_goes_on():
    head = Head(a=4)
    head.take("x", "y")
    head.accept()
    head.apply(Lost("a", "cut off"))
    head.join("a", 4, holds=["x"])
    assert head.of(Restored) == [Restored("x", "a")]
    assert head.where() == {"a": ["x", "y"]}
    assert [effect.attempt for effect in head.of(Begin) if effect.job_id == "y"] == [1, 2]


def test_a_copy_that_still_runs_on_a_member_that_came_back_is_withdrawn():
    head = Head(a=4)
    head.take("x")
    head.accept()
    head.join("b", 4)
    head.apply(Lost("a", "cut off"))
    head.join("a", 4, holds=["x", "ended"])
    assert head.of(Withdraw) == [Withdraw("a", ["ended", "x"])]
    head.apply(Lost("b", "killed"))
    assert head.where() == {"a": []}, "it is still being withdrawn there"
    head.apply(Withdrawn("a", ["x"]))
    head.room("a", 4)
    assert head.where() == {"a": ["x"]}


def test_jobs_wait_for_the_next_start_of_their_member_if_that_is_announced():
    head = Head(a=4)
    head.take("x", "y", "z")
    head.accept()
    head.join("b", 4)
    head.apply(Lost("a", "killed", waits=True))
    assert head.where() == {"b": []}
    head.join("a", 4, holds=["x"])
    assert head.where() == {"a": ["x", "y"], "b": ["z"]} or head.where() == {"a": ["x"], "b": ["y", "z"]}
    head.apply(Lost("a", "killed", waits=True))
    head.apply(Waited("a"))
    assert head.where() == {"b": ["x", "y", "z"]}


# ---------------------------------------------------------------- outcomes


def test_a_member_forgets_an_outcome_when_it_is_stored():
    head = Head(a=4)
    head.take("x", "y")
    head.accept()
    assert head.apply(Ended("a", "x", 1, 1, "completed")) == [Deliver("a", "x", 1)]
    head.apply(Ended("a", "y", 2, 1, "failed"))
    assert head.apply(Stored("a", "y", 2)) == [Forget("a", "y", 2)]
    assert head.apply(Forgotten("a", "y", 2)) == []
    assert head.apply(Stored("a", "x", 1)) == [Forget("a", "x", 1)]
    assert head.apply(Forgotten("a", "x", 1)) == [Acknowledge("a", 2)]


def test_an_id_that_is_used_anew_waits_until_the_member_has_forgotten_it():
    head = Head(a=4)
    head.take("x")
    head.accept()
    head.apply(Ended("a", "x", 1, 1, "completed"))
    head.apply(Stored("a", "x", 1))
    head.take("x", session="another")
    assert head.where() == {"a": []}
    head.apply(Forgotten("a", "x", 1))
    assert head.where() == {"a": ["x"]}


def test_an_outcome_of_a_job_that_has_ended_is_dropped_whenever_it_arrives():
    head = Head(a=4)
    head.take("x")
    head.accept()
    head.apply(Ended("a", "x", 1, 1, "completed"))
    head.apply(Forgotten("a", "x", 1))
    assert head.apply(Ended("a", "x", 2, 1, "completed")) == [Forget("a", "x", 2)]
    assert head.apply(Ended("a", "never", 3, 1, "completed")) == [Forget("a", "never", 3)]


def test_an_outcome_of_a_former_member_is_forgotten_there():
    head = Head(a=4)
    head.take("x")
    head.accept()
    head.join("b", 4)
    head.apply(Lost("a", "cut off"))
    head.apply(Joined("a", frozenset()))
    assert head.apply(Ended("a", "x", 1, 1, "completed")) == [Forget("a", "x", 1)]
    assert "x" in head.state.jobs
    assert head.apply(Forgotten("a", "x", 1)) == [Acknowledge("a", 1)]


def test_a_job_that_the_shutdown_of_its_member_cut_goes_on_elsewhere():
    head = Head(a=4)
    head.take("x")
    head.accept()
    head.join("b", 4)
    cut = Ended("a", "x", 1, 1, "cancelled", "shutdown")
    assert head.apply(cut)[0] == Forget("a", "x", 1)
    assert head.where() == {"a": [], "b": ["x"]}
    assert head.of(Begin)[-1].attempt == 2
    assert not head.state.jobs["x"].losses


def test_a_member_that_cut_a_job_gets_none_until_it_reports_room():
    """Else each attempt would go to the one that ends, which alone has a free place."""
    head = Head(a=4)
    head.take("x")
    head.accept()
    head.apply(Ended("a", "x", 1, 1, "cancelled", "shutdown"))
    head.apply(Forgotten("a", "x", 1))
    assert (head.state.jobs["x"].place, head.state.jobs["x"].attempt) == ("queued", 1)
    head.room("a", 4)
    assert (head.where(), head.state.jobs["x"].attempt) == ({"a": ["x"]}, 2)


def test_an_outcome_may_come_before_the_answer_to_its_submit():
    head = Head(a=4)
    head.take("x")
    assert head.apply(Ended("a", "x", 1, 1, "completed")) == [Deliver("a", "x", 1)]
    assert head.apply(Answered("a", "x")) == []


def test_a_new_job_is_not_mistaken_for_a_former_one_of_its_id():
    head = Head()
    head.take("x")
    assert head.apply(Joined("a", frozenset(["x"]))) == [Withdraw("a", ["x"])]
    assert head.apply(Ended("a", "x", 1, 1, "completed")) == [Forget("a", "x", 1)]
    assert head.state.jobs["x"].place == "queued"


# ---------------------------------------------------------------- cancel


def test_a_queued_job_is_cancelled_at_once():
    head = Head()
    head.take("x")
    assert head.apply(Cancel("x", "not needed")) == [End("x", "not needed")]
    assert head.apply(Cancel("x", "again")) == []
    head.join("a", 4)
    assert head.where() == {"a": []}


def test_a_job_on_a_member_is_cancelled_there_and_its_outcome_is_delivered():
    head = Head(a=4)
    head.take("x")
    assert head.apply(Cancel("x", "not needed")) == [], "it is on its way"
    assert head.apply(Answered("a", "x")) == [CancelThere("a", "x", "not needed")]
    assert head.apply(Ended("a", "x", 1, 1, "cancelled", "cancelled")) == [Deliver("a", "x", 1)]


def test_a_job_that_begins_is_cancelled_before_a_member_has_it():
    state = Dispatch()
    state.apply(Recovered())
    state.apply(Joined("a", frozenset()))
    state.apply(Room("a", 100, 4, 4, 0))
    assert state.apply(Taken(spec_of("x"), "s", 0)) == [Begin("x", 1, "a")]
    state.apply(Cancel("x", "not needed"))
    assert state.apply(Begun("x")) == [End("x", "not needed")]


@pytest.mark.parametrize("waits", [True, False])
def test_a_cancel_whose_member_is_lost_ends_in_the_head(waits):
    head = Head(a=4)
    head.take("x", "y")
    head.accept()
    head.apply(Cancel("x", "not needed"))
    assert head.apply(Lost("a", "killed", waits=waits)) == [End("x", "not needed")]
    assert head.apply(Cancel("y", "not needed")) == [End("y", "not needed")]
    head.join("a", 4, holds=["x", "y"])
    assert head.of(Withdraw) == [Withdraw("a", ["x", "y"])]


# ---------------------------------------------------------------- policy, restart


def test_a_member_with_another_policy_gets_no_jobs():
    head = Head(a=4)
    head.apply(Policy("a", "it has version 1"))
    head.take("x")
    assert head.where() == {"a": []}
    head.apply(Policy("a", ""))
    assert head.where() == {"a": ["x"]}


def test_after_a_restart_jobs_go_on_where_they_are_and_the_others_begin_their_next_attempt():
    state = Dispatch()
    for job_id, attempt in (("new", 0), ("there", 1), ("gone", 2)):
        state.apply(Taken(spec_of(job_id), "s", attempt))
    state.apply(Joined("a", frozenset(["there", "ended"])))
    effects = state.apply(Room("a", 100, 3, 4, 1))
    assert effects == [Begin("new", 1, "a")], "the others may be on a member that has not joined yet"
    assert state.apply(Recovered()) == [Begin("gone", 3, "a")]
    assert state.jobs["there"].attempt == 1


def test_an_outcome_of_a_job_that_nobody_has_yet_counts():
    state = Dispatch()
    state.apply(Taken(spec_of("x"), "s", 1))
    state.apply(Joined("a", frozenset()))
    assert state.apply(Ended("a", "x", 1, 1, "completed")) == [Deliver("a", "x", 1)]


def test_places_are_those_of_members_that_get_jobs():
    head = Head(a=4, b=8)
    head.apply(Policy("b", "behind"))
    assert head.state.places() == (5, 4)
    head.take(*(f"{n}" for n in range(3)))
    assert head.state.places() == (2, 4)


def test_a_spec_is_what_was_taken():
    head = Head(a=4)
    spec = msgspec.structs.replace(spec_of("x"), tags={"a": "b"})
    head.apply(Taken(spec, "s", 0))
    assert head.state.jobs["x"].spec is spec
    assert head.of(CancelThere) == []
