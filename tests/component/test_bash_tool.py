"""What a policy reads of its commands, through the fake sandbox."""

from __future__ import annotations

import pytest

from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.tools import BashTool

TOOL = BashTool(quiet_timeout_s=30)


@pytest.fixture
async def ask():
    async with FakeProvider().open_sandbox(SandboxSpec()) as sandbox:

        async def call(**arguments):
            return (await TOOL.call(arguments, sandbox, timeout_s=300)).text

        yield call


async def test_a_command_that_ends(autojump_clock, ask):
    assert await ask(command="echo hi") == "hi"
    assert await ask(command="false") == "[exit code 1]"


async def test_a_silent_command_is_handed_back_with_what_to_do(autojump_clock, ask):
    text = await ask(command="echo on; sleep 100; echo done")
    assert text.startswith("on\n[still running")
    assert "is_input" in text
    assert "C-c" in text
    refused = await ask(command="echo other")
    assert refused.startswith("Error: not run")
    assert "is_input" in refused
    assert (await ask(command="", is_input=True)).startswith("[still running")
    assert (await ask(command="", is_input=True)).startswith("[still running")
    assert await ask(command="", is_input=True) == "done"


async def test_input_is_a_line_or_a_key(autojump_clock, ask):
    assert "still running" in await ask(command="read name; echo hello $name")
    assert await ask(command="you", is_input=True) == "hello you"
    assert "still running" in await ask(command="sleep 1000")
    assert await ask(command="C-c", is_input=True) == "[exit code 130]"
    assert "no command is running" in await ask(command="C-c", is_input=True)


async def test_a_timeout_waits_through_silence_and_then_stops_the_command(autojump_clock, ask):
    assert await ask(command="sleep 100; echo done", timeout=200) == "done"
    assert await ask(command="sleep 100", timeout=50) == "[stopped after 50 s]"
    assert await ask(command="echo fine") == "fine"
    assert await ask(command="sleep 1000", timeout=10_000) == "[stopped after 300 s]"


async def test_a_restart_ends_what_runs_and_forgets(autojump_clock, ask):
    assert await ask(command="x=kept; cd /tmp") == "[no output]"
    assert "still running" in await ask(command="sleep 1000")
    assert await ask(restart=True) == "[the shell was restarted; its variables are gone]"
    assert await ask(command="", restart=True) == "[the shell was restarted; its variables are gone]"
    assert await ask(command="echo $x; pwd") != "kept\n/tmp"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"command": 1}, "command"),
        ({}, "command"),
        ({"restart": "yes"}, "restart"),
        ({"restart": True, "command": "echo not run"}, "restart"),
        ({"command": "", "is_input": "yes"}, "is_input"),
        ({"command": "", "timeout": 0}, "timeout"),
        ({"command": "", "timeout": True}, "timeout"),
    ],
)
async def test_a_wrong_argument_is_named(autojump_clock, ask, arguments, named):
    assert f"'{named}'" in await ask(**arguments)
