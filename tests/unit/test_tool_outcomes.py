"""The outcome of a tool call is the one that the tool reports, whatever its text looks like."""

from __future__ import annotations

import errno
import math
from typing import ClassVar

import pytest
import trio

from prorl_ipc.errors import CallFailed, FrameTooLarge
from prorl_trio.sandbox.sandbox import ShellBusy
from prorl_trio.testing.fake_sandbox import FakeSandbox
from prorl_trio.tools import BashTool, EditorTool, FinishTool, IpythonTool, Observation, Tool, ToolSet, base
from prorl_trio.types.errors import (
    BackendError,
    HandlerError,
    InternalError,
    SandboxCallFailed,
    SandboxLost,
    SandboxUnavailable,
    SearchUnavailable,
    TooManyDialogues,
)
from prorl_trio.types.models import ToolCall, ToolResult

DEEP: list = []
for _ in range(2000):
    DEEP = [DEEP]
EDIT = {"command": "create", "path": "/tmp/f", "file_text": "a\n"}
CALLS = [
    ("bash", {"command": "echo Errors found: 0"}, "Errors found: 0", "ok", 0),
    ("bash", {"command": "false"}, "[exit code 1]", "error", 1),
    ("bash", {"command": "echo [exit code 1]"}, "[exit code 1]", "ok", 0),
    ("bash", {"command": "echo Error: there is no tool here"}, "Error: there is no tool here", "ok", 0),
    ("bash", {"command": "echo Not run: nothing"}, "Not run: nothing", "ok", 0),
    ("bash", {"command": "exit 3"}, None, "error", 3),
    ("bash", {"command": "read x", "timeout": 1}, "[stopped after 1 s]", "timed_out", None),
    ("bash", {"command": "sleep 100"}, None, "running", None),
    ("bash", {"command": "", "is_input": True}, None, "error", None),
    ("bash", {"command": "echo hi", "timeout": "soon"}, None, "error", None),
    ("bash", {"restart": True}, None, "ok", None),
    ("ipython", {"code": "print('Errors found: 0')"}, "Errors found: 0", "ok", None),
    ("ipython", {"code": "1 / 0"}, None, "error", None),
    ("ipython", {}, None, "error", None),
    ("str_replace_editor", EDIT, None, "ok", None),
    ("str_replace_editor", {**EDIT, "command": "str_replace", "old_str": "b"}, None, "error", None),
    ("str_replace_editor", {**EDIT, "command": "burn"}, None, "error", None),
    ("finish", {"answer": "Error: 42"}, "Your answer was received.", "ok", None),
    ("nothing", {}, None, "unknown", None),
]


async def outcome_of(name, arguments, *, error=""):
    tools = ToolSet([BashTool(), IpythonTool(), EditorTool(), FinishTool()], max_observation_chars=1000)
    call = ToolCall(name=name, arguments=arguments, raw="", error=error)
    return await tools.call(call, FakeSandbox("fake", {}), timeout_s=40)


@pytest.mark.parametrize(("name", "arguments", "text", "outcome", "exit_code"), CALLS)
async def test_a_tool_says_how_it_went(name, arguments, text, outcome, exit_code, autojump_clock):
    observation = await outcome_of(name, arguments)
    assert text in (None, observation.text)
    assert observation.result == ToolResult(outcome=outcome, exit_code=exit_code)


async def test_a_call_that_could_not_be_read_is_malformed():
    assert (await outcome_of("bash", {}, error="no JSON")).result == ToolResult(outcome="malformed")


class Broken(Tool):
    """A tool of somebody's own that does what `act` does."""

    name = "broken"
    description = "Fail."
    parameters: ClassVar = {"type": "object", "properties": {"x": {"type": "integer"}}}

    def __init__(self, act):
        self._act = act

    async def call(self, arguments, sandbox, *, timeout_s):
        return self._act()


def _raise(error, cause=None):
    def act():
        raise error from cause

    return act


async def call_of(act, *, shown_chars=1000):
    tools = ToolSet([Broken(act)], max_observation_chars=shown_chars)
    return await tools.call(ToolCall(name="broken", arguments={}, raw=""), None, timeout_s=5)


@pytest.fixture(autouse=True)
def _no_bug_was_logged(monkeypatch):
    monkeypatch.setattr(base, "_logged_bugs", set())


BUGS = [
    _raise(ValueError("of the policy's text")),
    _raise(KeyError("x")),
    _raise(OverflowError()),
    _raise(RecursionError()),
    _raise(AssertionError()),
    _raise(SystemExit(2)),
    _raise(ExceptionGroup("a nursery's", [ZeroDivisionError()])),
    lambda: None,
    lambda: Observation(text=None),
    lambda: Observation(text="", answer=7),
    lambda: Observation(text="", outcome="splendid"),
    lambda: Observation(text="", exit_code=2**64),
]


@pytest.mark.parametrize("act", BUGS)
async def test_a_bug_of_a_tool_is_an_observation_and_loud(act, caplog):
    for _ in range(3):
        observation = await call_of(act)
        assert observation.outcome == "crashed"
        assert observation.text.startswith("Error: the tool broken itself failed (")
        assert "policy's text" not in observation.text
    (record,) = caplog.records
    assert (record.levelname, record.exc_info is None) == ("ERROR", False)


INFRASTRUCTURE = [
    SandboxLost("gone"),
    SandboxUnavailable("none"),
    SearchUnavailable("none"),
    BackendError("none", retryable=True),
    HandlerError("no sandbox"),
    InternalError("a bug"),
    OSError(errno.EMFILE, "no descriptor"),
    ConnectionRefusedError(),
    TimeoutError(),
    MemoryError(),
    trio.TooSlowError(),
    trio.BrokenResourceError(),
    ExceptionGroup("a nursery's", [ValueError(), SandboxLost("gone")]),
]


@pytest.mark.parametrize("error", INFRASTRUCTURE, ids=repr)
async def test_a_failure_of_infrastructure_travels(error):
    with pytest.raises(type(error)) as raised:
        await call_of(_raise(error))
    assert raised.value is error


REFUSALS = [
    (ValueError("too long"), FrameTooLarge(2, 1)),
    (FileNotFoundError("no such file"), CallFailed("not_found", "no such file")),
    (SandboxCallFailed("no thread"), None),
    (ShellBusy("busy"), None),
    (TooManyDialogues("enough"), None),
]


@pytest.mark.parametrize(("error", "cause"), REFUSALS, ids=repr)
async def test_what_the_sandbox_refuses_is_told_to_the_policy(error, cause, caplog):
    observation = await call_of(_raise(error, cause))
    assert (observation.outcome, observation.text) == ("error", f"Error: {error}")
    assert not caplog.records


class Endless(Broken):
    """A tool that waits, and fails when it is stopped."""

    async def call(self, arguments, sandbox, *, timeout_s):
        await trio.sleep_forever()


async def test_a_cancel_passes(autojump_clock):
    with trio.move_on_after(1) as scope:
        tools = ToolSet([Endless(None)], max_observation_chars=1000)
        await tools.call(ToolCall(name="broken", arguments={}, raw=""), None, timeout_s=5)
    assert scope.cancelled_caught


async def test_what_a_tool_returns_can_be_recorded():
    observation = await call_of(lambda: Observation(text="a\ud800é", answer="\udcff"))
    assert (observation.text, observation.answer) == (r"a\ud800é", r"\udcff")
    observation = await call_of(lambda: Observation(text="é" * 3000), shown_chars=100)
    assert len(observation.text) < 200


@pytest.mark.parametrize("value", ["\ud800", 2**64, math.inf, {"\udfff": 1}, [[[["\ud800"]]]], DEEP], ids=type)
async def test_arguments_that_no_json_has_are_refused(value):
    tools = ToolSet([FinishTool()], max_observation_chars=1000)
    call = ToolCall(name="finish", arguments={"answer": value}, raw="")
    assert (await tools.call(call, None, timeout_s=5)).outcome == "malformed"
