"""Agents that people have, unchanged, in sandboxes without a network: their own calls, answered by the policy."""

from __future__ import annotations

import json

import pytest

from prorl_trio.types.models import SamplingParams
from support.agents import installed
from support.whole_node import job, open_service, outcome_of, usable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


COMMAND = "printf found-; expr 6 '*' 7"
ANSWER = "It is \\boxed{42}."
CALLS = {
    "aider": ANSWER,  # it has no tools
    "claude-code": call("Bash", command=COMMAND, description="Calculate"),
    "codex": call("exec_command", cmd=COMMAND),
    "gemini-cli": call("run_shell_command", command=COMMAND),
    "langgraph": call("shell", command=COMMAND),
    "mini-swe-agent": call("bash", command=COMMAND),
    "openai-agents": call("shell", command=COMMAND),
    "opencode": call("bash", command=COMMAND, description="Calculate"),
    "openhands": call("terminal", command=COMMAND),
    "pi": call("bash", command=COMMAND),
    "pydantic-ai": call("shell", command=COMMAND),
    "qwen-code": call("run_shell_command", command=COMMAND, is_background=False),
    "smolagents": call("shell", command=COMMAND),
}
ENDS = {
    "mini-swe-agent": ANSWER + call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    "openhands": ANSWER + call("finish", message=ANSWER),
    "smolagents": ANSWER + call("final_answer", answer=ANSWER),
}
"""Those that want a call as the end of their work."""


@pytest.fixture
def provider():
    return usable("bubblewrap")


@pytest.mark.parametrize("name", CALLS)
async def test_an_agent_works_on_a_task_with_its_own_tools(tmp_path, provider, name):
    installed(name)

    def policy(prompt):
        if name == "opencode" and "title" in prompt[-2000:]:
            return "A title"
        return ENDS.get(name, ANSWER) if "found-42" in prompt else CALLS[name]

    sampling = SamplingParams(max_output_tokens=2000)
    async with open_service(tmp_path, provider=provider, policy=policy, max_model_len=1_000_000) as (
        url,
        engine,
        _ends,
    ):
        spec = job("j", agent=name, sampling=sampling, max_turns=12, max_trajectory_tokens=200_000)
        outcome = await outcome_of(url, spec)
        assert (outcome.status, outcome.reward) == ("completed", 1.0), (
            outcome.error,
            outcome.evaluation_log,
            outcome.details,
            [turn.text for turn in outcome.trajectory.turns],
        )
        trajectory = outcome.trajectory
        prompts = {tuple(request.prompt) for request in engine.requests}
        for turn in trajectory.turns:
            ids = trajectory.segments[turn.segment].token_ids[: turn.completion_start].tolist()
            assert tuple(ids) in prompts
        assert trajectory.undelivered_tokens == 0
        own = [turn.text for turn in trajectory.turns if turn.segment in trajectory.own_segments]
        assert ANSWER in own[-1], "the task's own segments are those in which it was answered"
