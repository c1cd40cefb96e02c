"""Whatever arguments a policy gives to a tool, it gets an observation: no call raises, and the sandbox lives on.

Every tool that the installed handlers have is here, found among the subclasses of `Tool`; its calls go the way of a
rollout's, through `ToolSet.call` to a real daemon.
"""

from __future__ import annotations

import json
import math
import random
from contextlib import nullcontext

import msgspec
import pytest
import trio
from mcp_types import CallToolRequestParams
from mcp_types import Tool as ListedTool

from prorl_trio.chat.families.call_values import Malformed, decode_json, read_call
from prorl_trio.config import SearchConfig
from prorl_trio.http.connection import Response
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import ProcessProvider
from prorl_trio.search.backend import Document
from prorl_trio.search.service import Search
from prorl_trio.tasks.handlers.nemo_gym.handler import GymTool
from prorl_trio.tasks.handlers.nemo_gym.payload import FunctionTool
from prorl_trio.tasks.handlers.nemo_gym.server import GymSession
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.tools import SearchTool, Tool, ToolSet
from prorl_trio.tools.base import Observation
from prorl_trio.tools.mcp.sessions import McpTool
from prorl_trio.types.models import ToolCall
from support.mcp_servers import opened

SEED = 20_240_607
RANDOM_CALLS = 40
"""For each tool, besides one for each of its parameters and each value."""
TOOL_TIMEOUT_S = 5.0
MAX_OBSERVATION_CHARS = 5000

DEEP: list = []
for _ in range(2000):
    DEEP = [DEEP]

VALUES = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 2**70, 10**400, -(10**400),
    0.0, -0.0, 0.5, 3.0, 1e-320, 1e30, -1e30, 1e308, math.inf, -math.inf, math.nan,
    "", " ", "0", "3", " 3 ", "+3", "3.0", "1e3", "1e30", "1e308", "1e400", "-1e400", "1e-400", "0x10", "1_000", "٣",
    "NaN", "Infinity", "inf", "9" * 309, "9" * 5000, "-" + "9" * 5000, "0." + "0" * 5000 + "1", str(2**63), str(2**70),
    "true", "TRUE", "Yes", "null", "[]", "{}", "[1, 1]", "[1, 1180591620717411303424]", "[1e30, 2]", "[[1], [2]]",
    "[" * 1500, "[" * 100_000, "[" * 60 + "]" * 60, '{"a":' * 5000, '"' * 3000, "\\", "\\ud800", '"\\ud800"',
    "\ud800", "a\udfffb", "\udce9", "\0", "a\0b", "\x1b[2J\x9b2J", "\u202e\u2066evil\u2069", "\u200b\ufeff\u2060",
    "\u2028\u2029\x85", "\U000e0041\U0010ffff\ufffe", "é\u0301" * 2000, "\r\n\r\n", "\x03", "C-c", "x" * 100_000,
    [], [1], [1, 1], [-1, -1], [1, 2**70], [0.5, "x"], ["1", "1"], [None, None], [[1, 1]], list(range(5000)), DEEP,
    {}, {"a": 1}, {"\ud800": 1}, {"": {"": {"": []}}}, {"command": "true"},
]  # fmt: skip


class Library:
    """A search backend that finds what it is asked for, unusual texts included."""

    name = "library"
    max_query_chars = 10_000

    async def search(self, query, *, max_results, timeout_s):
        await trio.lowlevel.checkpoint()
        return [Document(document_id="\ud800", text=f"{query}\udfff\0\u202e", title="\x1b]0;t\x07")][:max_results]

    async def aclose(self):
        await trio.lowlevel.checkpoint()


class Echo(GymSession):
    """A resources server's session that gets what a real one would be sent."""

    async def post(self, path, body, *, timeout_s):
        await trio.lowlevel.checkpoint()
        return Response(200, {}, msgspec.json.encode(body))


class EchoServer:
    """An MCP server that answers with what a real one would be sent."""

    name = "mcp"

    async def call(self, tool, arguments):
        await trio.lowlevel.checkpoint()
        sent = CallToolRequestParams(name=tool, arguments=arguments).model_dump(mode="python")
        return Observation(text=repr(sent))


def _subclasses(kind):
    return {kind, *(each for child in kind.__subclasses__() for each in _subclasses(child))}


def _tools():
    """Every kind of tool there is in the project, once by name."""
    assert HandlerRegistry.from_entry_points().names  # their modules are imported by now
    search = Search(Library(), SearchConfig(max_calls_per_rollout=100_000))
    declared = FunctionTool(
        name="add", parameters={"properties": {"count": {"type": "integer"}}, "required": ["count"]}
    )
    made = {
        SearchTool: lambda: SearchTool(search, nullcontext),
        GymTool: lambda: GymTool(declared, Echo("gym", "http://127.0.0.1:1", 1), nullcontext),
        McpTool: lambda: McpTool(EchoServer(), ListedTool(name="sum", input_schema=declared.parameters)),
    }
    kinds = {kind for kind in _subclasses(Tool) - {Tool} if kind.__module__.startswith("prorl_trio.")}
    tools = [made.get(kind, kind)() for kind in sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__name__}")]
    assert {"bash", "ipython", "str_replace_editor", "search", "think", "finish", "add"} <= {
        tool.name for tool in tools
    }
    return tools


def _valid(tool, folder):
    """Arguments that work. A tool that needs others than text of no meaning has its own here."""
    own = {
        "bash": {"command": "true"},
        "ipython": {"code": "1"},
        "str_replace_editor": {
            "command": "insert", "path": str(folder / "file"), "insert_line": 0, "new_str": "x", "old_str": "one",
            "file_text": "x",
        },
    }  # fmt: skip
    return own.get(tool.name) or dict.fromkeys(tool.parameters.get("required", ()), "x")


def _variants(tool, folder):
    """Calls with each value for each parameter, with fields missing, and with others."""
    valid, rng = _valid(tool, folder), random.Random(SEED)
    names = list(tool.parameters["properties"])
    yield {}
    yield valid
    yield {**valid, "another": DEEP, "\ud800": "\0", "": None, "self": 1, "sandbox": 2, "timeout_s": 3}
    for name in names:
        yield {key: value for key, value in valid.items() if key != name}
        yield from ({**valid, name: value} for value in VALUES)
    if tool.name == "str_replace_editor":
        for command in tool.parameters["properties"]["command"]["enum"]:
            for name in ("path", "view_range", "old_str", "new_str", "insert_line"):
                yield from ({**valid, "command": command, name: value} for value in VALUES[::3])
    for _ in range(RANDOM_CALLS):
        yield {name: rng.choice(VALUES) for name in rng.sample(names, rng.randint(0, len(names)))}


def _recorded(call, observation):
    """What the trajectory has of a call, as bytes."""
    return msgspec.msgpack.encode((call.name, observation.text, observation.result, observation.answer))


async def test_no_arguments_for_a_real_mcp_server_end_a_rollout():
    """It ends with many of them, and is started again."""
    async with opened() as (_, servers):
        for tool in servers.tools:
            tools = ToolSet([tool], max_observation_chars=MAX_OBSERVATION_CHARS)
            for value in VALUES:
                for arguments in ({"text": value}, {"how": value}, {"\ud800": value}):
                    with trio.fail_after(60):
                        call = ToolCall(name=tool.name, arguments=arguments, raw="")
                        observation = await tools.call(call, None, timeout_s=TOOL_TIMEOUT_S)
                    assert observation.outcome != "crashed", arguments


@pytest.mark.timeout(150)
async def test_no_arguments_end_a_rollout(tmp_path, caplog):
    (tmp_path / "file").write_text("one\ntwo\n")
    spec = SandboxSpec(env={"HOME": str(tmp_path)})
    count = 0
    async with ProcessProvider(tmp_path / "run").open_sandbox(spec) as sandbox:
        for tool in _tools():
            tools = ToolSet([tool], max_observation_chars=MAX_OBSERVATION_CHARS)
            for arguments in _variants(tool, tmp_path):
                count += 1
                call = ToolCall(name=tool.name, arguments=arguments, raw="")
                with trio.fail_after(60):
                    observation = await tools.call(call, sandbox, timeout_s=TOOL_TIMEOUT_S)
                assert observation.outcome != "crashed", (tool, repr(arguments)[:300], observation)
                assert len(observation.text) <= MAX_OBSERVATION_CHARS + 100
                assert _recorded(call, observation)
        alive = await sandbox.bash("echo alive", timeout_s=20)
        assert alive.output == "alive\n"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert count > 1000


def _text_of(name, arguments):
    """The call as a policy writes it; None for what JSON has no text for."""
    try:
        return json.dumps({"name": name, "arguments": arguments})
    except (ValueError, RecursionError):
        return None


def test_what_the_parser_lets_through_can_be_recorded(tmp_path):
    """A call is recorded with its arguments, so those go on the wire, too."""
    read = 0
    for tool in _tools():
        for arguments in _variants(tool, tmp_path):
            text = _text_of(tool.name, arguments)
            if text is None:
                continue
            try:
                value, _ = decode_json(text, 0)
                name, taken = read_call(value, {tool.name: tool.parameters})
            except Malformed:
                continue
            msgspec.msgpack.encode(ToolCall(name=name, arguments=taken, raw=text))
            read += 1
    assert read > 300
