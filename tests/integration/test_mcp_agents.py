"""Agents that people have, unchanged, call the tools of an MCP server that a node declares for them."""

from __future__ import annotations

import json
import re

import pytest

from prorl_trio.config import McpConfig
from prorl_trio.types.models import SamplingParams
from support.agents import installed
from support.mcp_servers import plain
from support.whole_node import job, open_service, outcome_of, usable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def provider():
    return usable("bubblewrap")


@pytest.mark.parametrize("name", ["claude-code", "codex"])
async def test_an_agent_calls_the_tools_that_the_declaration_selects(tmp_path, provider, name):
    installed(name)
    offered = set()

    def policy(prompt):
        offered.update(re.findall(r'"name": "([\w-]*(?:echo|count))"', prompt))
        if "found-42" in prompt.rpartition("<tool_response>")[2]:
            return "It is \\boxed{42}."
        tool = next((each for each in offered if each.endswith("echo")), "none")
        return f"<tool_call>{json.dumps({'name': tool, 'arguments': {'text': 'found-42'}})}</tool_call>"

    servers = {"calc": plain("sandbox", tools=("e*",))}
    async with open_service(
        tmp_path,
        provider=provider,
        policy=policy,
        max_model_len=1_000_000,
        mcp=McpConfig(default=("calc",), servers=servers),
    ) as (url, _engine, _ends):
        spec = job("j", agent=name, sampling=SamplingParams(max_output_tokens=2000), max_turns=12)
        outcome = await outcome_of(url, spec)
    assert (outcome.status, outcome.reward) == ("completed", 1.0), (outcome.error, outcome.evaluation_log, offered)
    assert [each for each in offered if each.endswith("echo")]
    assert not [each for each in offered if each.endswith("count")], "the pattern leaves it out"
