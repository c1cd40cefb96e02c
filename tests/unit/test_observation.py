"""What observers have not been sent, or not taken, is bounded and counted. Pure state."""

from __future__ import annotations

import msgspec

from prorl_ipc.session import JobEvent, ObservationLost, ObservedEvent, ObservedOutcome, ServerFrame
from prorl_trio.client import state as observed
from prorl_trio.client.state import ObservedInbox
from prorl_trio.sessions.observation import MAX_OBSERVED_BYTES, MAX_OBSERVED_FRAMES, Observations

MIB = 1024 * 1024
BLOB = msgspec.msgpack.encode(bytes(MIB))


def taken(observation):
    frames = []
    while (frame := observation.next_frame()) is not None:
        frames.append(msgspec.msgpack.decode(frame, type=ServerFrame))
    return frames


def event(job_id):
    return JobEvent(job_id=job_id, status="run", detail="why")


def test_an_observer_sees_other_sessions_or_one_group_of_them():
    observations, woken = Observations(), []
    everything = observations.begin("a", "", lambda: woken.append("everything"))
    group = observations.begin("a", "g", lambda: woken.append("group"))
    observations.event("a", "g", event("own"))
    observations.event("b", "", event("first"))
    observations.outcome("b", "g", "second", BLOB)
    assert woken == ["everything", "everything", "group"]
    seen = ObservedEvent(session_id="b", job_id="first", status="run", detail="why")
    outcome = ObservedOutcome(session_id="b", job_id="second", outcome=msgspec.Raw(BLOB))
    assert taken(everything) == [seen, outcome]
    assert taken(group) == [outcome]
    observations.end(group)
    observations.event("b", "g", event("third"))
    assert (len(taken(everything)), len(taken(group)), len(observations)) == (1, 0, 1)


def test_a_slow_observer_loses_what_does_not_fit_and_is_told_so():
    observations = Observations()
    slow = observations.begin("a", "", lambda: None)
    for n in range(20):
        observations.outcome("b", "", f"large-{n}", BLOB)
        assert slow.size_bytes <= MAX_OBSERVED_BYTES
    fit = MAX_OBSERVED_BYTES // len(BLOB)
    observations.event("b", "", event("small"))  # for this one there is room
    *frames, small, lost = taken(slow)
    assert [frame.job_id for frame in frames] == [f"large-{n}" for n in range(fit)]
    assert (small.job_id, lost) == ("small", ObservationLost(count=20 - fit))
    for n in range(MAX_OBSERVED_FRAMES + 5):
        observations.event("b", "", event(f"job-{n}"))
    *frames, lost = taken(slow)
    assert (len(frames), lost) == (MAX_OBSERVED_FRAMES, ObservationLost(count=5))
    assert slow.next_frame() is None


def test_one_frame_always_fits():
    observations = Observations()
    slow = observations.begin("a", "", lambda: None)
    huge = msgspec.msgpack.encode(bytes(2 * MAX_OBSERVED_BYTES))
    observations.outcome("b", "", "huge", huge)
    observations.outcome("b", "", "another", huge)
    assert [getattr(frame, "job_id", frame) for frame in taken(slow)] == ["huge", ObservationLost(count=1)]


def test_a_client_keeps_the_newest(monkeypatch):
    monkeypatch.setattr(observed, "KEPT_FRAMES", 3)
    monkeypatch.setattr(observed, "KEPT_BYTES", 2 * len(BLOB))
    inbox = ObservedInbox()
    for n in range(5):
        inbox.put(ObservedEvent(session_id="b", job_id=f"job-{n}", status="run"))
    assert (len(inbox), inbox.lost, inbox.take().job_id) == (3, 2, "job-2")
    for n in range(3):
        inbox.put(ObservedOutcome(session_id="b", job_id=f"large-{n}", outcome=msgspec.Raw(BLOB)))
    assert [frame.job_id for frame in iter(inbox.take, None)] == ["large-1", "large-2"]
    assert inbox.lost == 5
