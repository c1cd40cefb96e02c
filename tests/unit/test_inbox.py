"""A client's inbox: each outcome once, in order, whatever the node sends again."""

from __future__ import annotations

import msgspec

from prorl_ipc.session import OutcomeFrame
from prorl_trio.client.state import Inbox


def outcome(cursor):
    return OutcomeFrame(cursor=cursor, job_id=f"j{cursor}", outcome=msgspec.Raw(b"\xc0"))


def cursors(inbox):
    return [frame.cursor for frame in inbox.frames(99)]


def filled(*numbers, resume_after=0):
    inbox = Inbox(resume_after)
    for number in numbers:
        assert inbox.put(outcome(number))
    return inbox


def test_what_is_sent_again_is_not_given_out_again():
    inbox = filled(1, 2)
    assert not inbox.put(outcome(2))
    assert not inbox.put(outcome(1))
    assert cursors(inbox) == [1, 2]
    assert inbox.received == 2
    assert not filled(resume_after=5).put(outcome(5))


def test_what_others_took_is_counted_but_for_what_an_earlier_client_had():
    inbox = filled(4, 5, 8, resume_after=1)
    assert inbox.left_out == 2
    inbox.put(outcome(9))
    assert inbox.left_out == 2


def test_what_is_settled_is_over_and_stays_so():
    inbox = filled(1, 2, 3)
    assert inbox.acknowledge(2)
    assert cursors(inbox) == [3]
    assert not inbox.acknowledge(2)
    assert not inbox.acknowledge(1)
    assert inbox.acked == 2
    assert inbox.acknowledge(3)
    assert not cursors(inbox)


def test_after_a_rewind_all_that_is_not_settled_comes_again():
    inbox = filled(1, 2, 3)
    inbox.acknowledge(1)
    assert inbox.rewind() == ["j2", "j3"]
    assert (inbox.received, cursors(inbox)) == (1, [])
    assert inbox.put(outcome(2))
    assert inbox.put(outcome(3))
    assert cursors(inbox) == [2, 3]
    assert [frame.cursor for frame in inbox.after(2)] == [3]
