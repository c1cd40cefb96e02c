"""Agents that people have, unchanged, in sandboxes without a network: their own calls, answered by the policy."""

from __future__ import annotations

import json

import pytest

from prorl_trio.agents.preset import presets
from prorl_trio.types.models import SamplingParams
from support.skips import because
from support.whole_node import job, open_service, outcome_of, usable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


COMMAND = "printf found-; expr 6 '*' 7"
CALLS = {
    "claude-code": call("Bash", command=COMMAND, description="Calculate"),
    "codex": call("exec_command", cmd=COMMAND),
    "gemini-cli": call("run_shell_command", command=COMMAND),
    "opencode": call("bash", command=COMMAND, description="Calculate"),
    "pi": call("bash", command=COMMAND),
    "qwen-code": call("run_shell_command", command=COMMAND, is_background=False),
}


@pytest.fixture
def provider():
    return usable("bubblewrap")


@pytest.mark.parametrize("name", CALLS)
async def test_an_agent_works_on_a_task_with_its_own_tools(tmp_path, provider, name):
    if not presets()[name].is_installed:
        pytest.skip(because(f"the agent {name} is not installed", f"prorl-trio agents install {name}"))

    def policy(prompt):
        if "title" in prompt[-2000:]:
            return "A title"
        return "It is \\boxed{42}." if "found-42" in prompt else CALLS[name]

    sampling = SamplingParams(max_output_tokens=2000)
    async with open_service(tmp_path, provider=provider, policy=policy, max_model_len=1_000_000) as (
        url,
        engine,
        _ends,
    ):
        spec = job("j", agent=name, sampling=sampling, max_turns=12, max_trajectory_tokens=200_000)
        outcome = await outcome_of(url, spec)
        assert (outcome.status, outcome.reward) == ("completed", 1.0), (outcome.error, outcome.evaluation_log)
        trajectory = outcome.trajectory
        prompts = {tuple(request.prompt) for request in engine.requests}
        for turn in trajectory.turns:
            ids = trajectory.segments[turn.segment].token_ids[: turn.completion_start].tolist()
            assert tuple(ids) in prompts
        sampled = [segment for segment in trajectory.segments if segment.loss_mask.any()]
        shown = [(each.parent, each.reason, len(each), each.agent_type) for each in sampled]
        print(name, shown, trajectory.echoes, trajectory.stop_reason)  # noqa: T201
