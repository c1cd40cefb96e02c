"""The outcome of a tool call is the one that the tool reports, whatever its text looks like."""

from __future__ import annotations

import pytest

from prorl_trio.testing.fake_sandbox import FakeSandbox
from prorl_trio.tools import BashTool, EditorTool, FinishTool, IpythonTool, ToolSet
from prorl_trio.types.models import ToolCall, ToolResult

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
    ("finish", {"answer": "Error: 42"}, "The task has ended.", "ok", None),
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
