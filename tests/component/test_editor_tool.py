"""The editor as the policy calls it."""

from __future__ import annotations

import pytest

from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.tools import EditorTool, ToolSet
from prorl_trio.types.errors import HandlerError
from prorl_trio.types.models import ToolCall


@pytest.fixture
async def call():
    tools = ToolSet([EditorTool()], max_observation_chars=2000)
    async with FakeProvider().open_sandbox(SandboxSpec()) as sandbox:

        async def call(**arguments):
            call = ToolCall(name="str_replace_editor", arguments=arguments, raw="")
            return (await tools.call(call, sandbox, timeout_s=5)).text

        yield call


async def test_its_result_is_what_the_policy_reads(call):
    assert await call(command="create", path="/tmp/f", file_text="a\n") == "File created successfully at: /tmp/f"
    assert (await call(command="view", path="/tmp/f")).endswith("     1\ta\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"command": "view"}, "Error: str_replace_editor needs the argument 'path'."),
        (
            {"command": "view", "path": 7},
            "Error: an argument is of the wrong type: Expected `str`, got `int` - at `path`.",
        ),
        (
            {"command": "view", "path": "/f", "view_range": "all"},
            "Error: an argument is of the wrong type: Expected `array | null`, got `str` - at `view_range`.",
        ),
    ],
)
async def test_wrong_arguments_are_told_with_their_name(call, arguments, said):
    assert await call(**arguments) == said


async def test_numbers_written_as_text_and_unknown_arguments_do_no_harm(call):
    said = await call(command="insert", path="/tmp/f", insert_line="3", new_str="x", security_risk="low")
    assert said == "insert cannot be done to /tmp/f."


async def test_without_a_sandbox_the_handler_is_to_blame():
    with pytest.raises(HandlerError, match="needs a sandbox"):
        await EditorTool().call({"command": "view", "path": "/f"}, None, timeout_s=1)


def test_the_schema_has_the_arguments_agents_know():
    function = EditorTool().schema()["function"]
    assert list(function["parameters"]["properties"]) == [
        "command",
        "path",
        "file_text",
        "old_str",
        "new_str",
        "insert_line",
        "view_range",
    ]
    assert function["parameters"]["required"] == ["command", "path"]
