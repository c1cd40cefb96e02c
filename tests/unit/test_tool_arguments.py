"""One rule for the arguments of all tools: what a policy plainly means is read as the schema's type."""

from __future__ import annotations

from typing import ClassVar

import pytest

from prorl_trio.testing.fake_sandbox import FakeSandbox
from prorl_trio.tools import BashTool, EditorTool, Observation, Tool, ToolSet
from prorl_trio.tools.arguments import read_arguments
from prorl_trio.types.models import ToolCall

SCHEMA = {
    "properties": {
        "n": {"type": "number"},
        "i": {"type": "integer"},
        "b": {"type": "boolean"},
        "s": {"type": "string"},
        "l": {"type": "array", "items": {"type": "integer"}},
        "o": {"type": "object"},
        "need": {"type": "string"},
        "any": {},
    },
    "required": ["need"],
}
READ = [
    ("n", "3", 3),
    ("n", " 2.5 ", 2.5),
    ("n", "1e3", 1000.0),
    ("n", 4, 4),
    ("n", "3x", "3x"),
    ("n", "", ""),
    ("n", "inf", "inf"),
    ("n", "nan", "nan"),
    ("n", "1e999", "1e999"),
    ("n", True, True),
    ("n", "true", "true"),
    ("n", [3], [3]),
    ("i", "12", 12),
    ("i", "-1", -1),
    ("i", 3.0, 3),
    ("i", "3.0", 3),
    ("i", 3.5, 3.5),
    ("i", "9" * 30, "9" * 30),
    ("i", "1e300", "1e300"),
    ("i", 1e300, 1e300),
    ("b", "true", True),
    ("b", "False", False),
    ("b", "yes", "yes"),
    ("b", 1, 1),
    ("s", "3", "3"),
    ("s", 3, 3),
    ("l", "[1, 2]", [1, 2]),
    ("l", ["1", 2.0], [1, 2]),
    ("l", "1, 2", "1, 2"),
    ("l", "3", "3"),
    ("o", '{"a": "1"}', {"a": "1"}),
    ("o", "a", "a"),
    ("any", "3", "3"),
    ("unknown", "3", "3"),
    ("unknown", None, None),
    ("need", None, None),
]


@pytest.mark.parametrize(("name", "value", "expected"), READ)
def test_a_value_is_read_by_its_schema(name, value, expected):
    read = read_arguments({name: value}, SCHEMA)
    assert read == {name: expected}
    assert type(read[name]) is type(expected)
    assert read_arguments(read, SCHEMA) == read


@pytest.mark.parametrize("name", ["n", "i", "b", "s", "l", "o", "any"])
def test_null_is_what_was_left_out(name):
    assert read_arguments({name: None}, SCHEMA) == {}


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 50_000, "[" * 5000 + "]" * 5000, "9" * 100_000, "1" + "0" * 400, f"[{'9' * 500}]"],
    ids=["lists", "objects", "closed", "digits", "beyond float", "inside"],
)  # fmt: skip
async def test_no_text_makes_a_call_fail(text):
    """What a policy writes into an argument costs it its call, not the rollout."""
    tools = ToolSet([BashTool(), EditorTool()], max_observation_chars=1000)
    for name, arguments in (
        ("bash", {"command": "ls", "timeout": text}),
        ("bash", {"command": "ls", "restart": text}),
        ("str_replace_editor", {"command": "insert", "path": "/f", "new_str": "x", "insert_line": text}),
        ("str_replace_editor", {"command": "view", "path": "/f", "view_range": text}),
        ("str_replace_editor", {"command": "view", "path": "/f", "view_range": [text]}),
    ):
        call = ToolCall(name=name, arguments=arguments, raw="")
        assert (await tools.call(call, FakeSandbox("fake", {}), timeout_s=5)).text.startswith("Error: ")
    assert read_arguments(dict.fromkeys("nilob", text), SCHEMA) == dict.fromkeys("nilob", text)


class Doubling(Tool):
    """A tool of somebody's own, who trusts the schema."""

    name = "double"
    description = "Double a number."
    parameters: ClassVar = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}

    async def call(self, arguments, sandbox, *, timeout_s):
        return Observation(text=str(2 * arguments["number"]))


async def test_all_tools_get_what_they_ask_for():
    sandbox = FakeSandbox("fake", {})
    tools = ToolSet([BashTool(), EditorTool(), Doubling()], max_observation_chars=1000)

    async def call(name, **arguments):
        return (await tools.call(ToolCall(name=name, arguments=arguments, raw=""), sandbox, timeout_s=5)).text

    assert await call("double", number="21") == "42"
    assert await call("bash", command="echo hi", timeout="3", is_input="false", restart=None) == "hi"
    assert await call("bash", command="echo hi", timeout="soon") == (
        "Error: the argument 'timeout' must be a positive number of seconds."
    )
    assert (await BashTool().call({"command": "echo hi", "timeout": "3"}, sandbox, timeout_s=5)).text == "hi"
    assert (await call("str_replace_editor", command="create", path="/tmp/f", file_text="a\nb\n")).startswith(
        "File cre"
    )
    assert "1\ta" in await call("str_replace_editor", command="view", path="/tmp/f", view_range="[1, 1]", old_str=None)
