"""The reward of several steps, as Harbor computes it, where an agent gains nothing by going no further."""

from __future__ import annotations

import base64
import os
import zlib

import msgspec
import pytest

from prorl_ipc.file_calls import TreeEntry
from prorl_trio.tasks.handlers.shell import artifacts
from prorl_trio.tasks.handlers.shell.artifacts import pack, unpack
from prorl_trio.tasks.handlers.shell.payload import read_payload
from prorl_trio.tasks.handlers.shell.steps import Progress, StepRecord, reward_of
from prorl_trio.types.errors import EvaluationError, MalformedJob, NotRestorable

VERIFIER = {"files": {"/tests/test.sh": {"content": ""}}, "separate": True}


def task(*steps, **fields):
    said = [
        {"name": f"s{number}", "instruction": "x", "verifier": VERIFIER} | step for number, step in enumerate(steps)
    ]
    return read_payload({"steps": said, **fields})


def reward(steps, *rewards, strategy="mean"):
    """Return the reward of the steps that were reached; a text for a verifier that was kept from one."""
    records = [
        StepRecord(name=f"s{number}", spoilt=each) if isinstance(each, str) else StepRecord(rewards=each)
        for number, each in enumerate(rewards)
    ]
    return reward_of(task(*steps).steps, Progress(steps=records), strategy)


GATE = {"min_reward": {"reward": 0.5}}


@pytest.mark.parametrize(
    ("steps", "rewards", "mean", "final"),
    [
        ([{}], [{"reward": 0.25}], 0.25, 0.25),
        ([{}, {}], [{"reward": 1.0}, {"reward": 0.5}], 0.75, 0.5),
        ([{}, {}], [{"reward": 1.0}, {"other": 0.5}], 0.5, 0.5),
        # One that lacks its min_reward ends the task: those after it do not count.
        ([GATE, {}], [{"reward": 0.25}], 0.25, 0.25),
        ([GATE, {}], [{"other": 1.0}], 1.0, 1.0),
        # Other than there, what the agent does not come to is worth 0.
        ([{}, {}], [{"reward": 1.0}], 0.5, 0.0),
        ([GATE, {}], [{"reward": 1.0}], 0.5, 0.0),
        ([{}, {}, {}], [{"reward": 1.0}, "hangs"], 1 / 3, 0.0),
        ([GATE, {}], ["hangs"], 0.0, 0.0),
        ([{}], ["hangs"], 0.0, 0.0),
    ],
)
def test_the_reward_of_steps(steps, rewards, mean, final):
    assert reward(steps, *rewards)[0] == pytest.approx(mean)
    assert reward(steps, *rewards, strategy="final")[0] == final


def test_each_key_has_its_mean_and_one_of_several_must_be_called_reward():
    found = {"reward": 1.0, "style": 0.5}, {"reward": 0.0}
    assert reward([{}, {}], *found) == (0.5, {"reward": 0.5, "style": 0.25})
    with pytest.raises(EvaluationError, match="rewards for a, b, and none is called `reward`"):
        reward([{}, {}], {"a": 1.0}, {"b": 1.0})


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"steps": []}, r"length >= 1 - at `\$.instance.payload.steps`|steps"),
        ({"steps": [{"instruction": " ", "verifier": VERIFIER}]}, "instruction is empty"),
        ({"steps": [{"instruction": "x", "verifier": VERIFIER}] * 2}, "two steps are called ''"),
        (
            {
                "steps": [
                    {"name": "a", "instruction": "x", "verifier": VERIFIER},
                    {
                        "name": "b",
                        "instruction": "x",
                        "verifier": VERIFIER,
                        "solution": {"files": {"/solution/solve.sh": {"content": ""}}},
                    },
                ]
            },
            "some steps have a solution, and some have none",
        ),
    ],
)
def test_malformed_steps_are_refused(payload, said):
    with pytest.raises(MalformedJob, match=said):
        read_payload(payload)


def restored(payload, details):
    return Progress.restored(payload, details)


def test_what_was_recorded_is_restored_without_its_verdicts():
    before = Progress(steps=[StepRecord(name="s0", answer="a", rewards={"reward": 1.0}, artifacts="x")], gated=True)
    details = msgspec.json.decode(msgspec.json.encode(before.details()))
    [record] = restored(task({}, {}), details).steps
    assert (record.answer, record.artifacts, record.is_graded) == ("a", "x", False)
    assert details["answer"] == "a"


@pytest.mark.parametrize(
    ("step", "details", "said"),
    [
        ({}, {}, "details: Expected `array`"),
        ({}, {"steps": [{"name": "s0"}], "gated": False}, "step s0: its artefacts were not recorded"),
        ({}, {"steps": [{"name": "other", "artifacts": "x"}], "gated": False}, "the rollout had others"),
        ({}, {"steps": [], "gated": False}, "the rollout had others"),
        (
            {"verifier": VERIFIER | {"separate": False}},
            {"steps": [{"name": "s0"}], "gated": False},
            "agent's own sandbox",
        ),
    ],
)
def test_what_cannot_be_graded_again_is_told_by_its_reason(step, details, said):
    with pytest.raises(NotRestorable, match=said):
        restored(task(step), details)


def test_a_missing_answer_is_graded_again_without_a_sandbox():
    wants = {"verifier": VERIFIER | {"separate": False, "answer_path": "/tmp/answer"}}
    assert restored(task(wants), {"steps": [{"name": "s0", "answer": " "}], "gated": False}).steps


def test_artefacts_travel_through_a_record(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    (one / "in").mkdir(parents=True)
    (one / "in" / "file").write_bytes(b"\0content")
    (one / "in" / "file").chmod(0o755)
    (one / "link").symlink_to("in/file")
    other.write_text("alone")
    packed = pack([("/app/one", one), ("/app/other", other)], 10_000)
    (tmp_path / "back").mkdir()
    found = dict(unpack(packed, tmp_path / "back"))
    assert (found["/app/one"] / "in" / "file").read_bytes() == b"\0content"
    assert os.access(found["/app/one"] / "in" / "file", os.X_OK)
    assert os.readlink(found["/app/one"] / "link") == "in/file"
    assert found["/app/other"].read_text() == "alone"


def test_artefacts_that_are_too_large_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "MAX_KEPT_BYTES", 10)
    for name in "ab":
        (tmp_path / name).write_text("123456")
    both = [(f"/{name}", tmp_path / name) for name in "ab"]
    assert pack(both[:1], 1000) is not None
    assert pack(both[:1], 10) is None
    assert pack(both, 1000) is None


@pytest.mark.parametrize("path", [b"../outside", b"/outside"])
def test_a_forged_record_writes_nowhere_else(tmp_path, path):
    parts = [TreeEntry(path=b"", kind="folder", mode=0o755), TreeEntry(path=path, kind="file", mode=0o644)]
    forged = base64.b64encode(zlib.compress(msgspec.msgpack.encode([("/x", parts)]))).decode()
    (tmp_path / "back").mkdir()
    for packed in (forged, "no base64!", base64.b64encode(b"no zlib").decode()):
        with pytest.raises(EvaluationError, match="the recorded artefacts cannot be read"):
            unpack(packed, tmp_path / "back")
    assert os.listdir(tmp_path) == ["back"]
