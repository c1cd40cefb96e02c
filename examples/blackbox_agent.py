"""Existing agents, unchanged, on a task of your own. Each agent calls its model as usual, and the policy answers.

    prorl-trio agents install mini-swe-agent pi        # once
    python examples/blackbox_agent.py                  # or the names of other agents

The policy is a function here; node, sandboxes, agents and tokens are real. See docs/agents.md.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import trio

from local_node import open_local_node
from prorl_trio import JobSpec, SamplingParams, TaskInstance
from prorl_trio.client import connect

if TYPE_CHECKING:
    from prorl_trio.types.models import Outcome

QUESTION = "What is 6 * 7?"
ANSWER = r"It is \boxed{42}."
SHELLS = {"bash": "command", "exec_command": "cmd", "run_shell_command": "command", "shell": "command"}
"""Name of each agent's shell tool, and the argument that contains the command."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command by which mini-swe-agent expects the work to be finished."""


def run(prompt: str, command: str) -> str:
    """Return a call of the agent's own shell that runs `command`."""
    tool = next(name for name in SHELLS if f'"name": "{name}"' in prompt)
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': {SHELLS[tool]: command}})}</tool_call>"


def policy(prompt: str) -> str:
    """Compute with the agent's shell and report the result."""
    if "found-42" not in prompt:
        return run(prompt, "printf found-; expr 6 '*' 7")
    return ANSWER + run(prompt, SUBMIT) if SUBMIT in prompt else ANSWER


def shown(agent: str, outcome: Outcome) -> list[str]:
    """Return the result of a rollout as lines: its segments, the reason for each, and their sampled text."""
    lines = [f"{agent}: {outcome.status}, reward {outcome.reward}"]
    if outcome.trajectory is None:
        return [*lines, f"  {outcome.error}"]
    for number, segment in enumerate(outcome.trajectory.segments):
        begun = "the task" if segment.parent is None else f"{segment.reason} of segment {segment.parent}"
        sampled = int(segment.loss_mask.sum())
        lines.append(f"  segment {number} ({begun}): {len(segment)} tokens, {sampled} sampled, {segment.shared} shared")
    lines += [f"    the policy: {turn.text}" for turn in outcome.trajectory.turns]
    return [*lines, f"  turns that came back: {outcome.trajectory.echoes}"]


async def main(agents: list[str]) -> int:
    """Run the same task with each agent, and print the trainer's view."""
    instance = TaskInstance(instance_id="sum", handler="math", payload={"question": QUESTION, "answer": "42"})
    sampling = SamplingParams(max_output_tokens=2000)
    async with open_local_node(policy, context_tokens=1_000_000) as node, connect(node.url, node.token) as client:
        jobs = [
            JobSpec(job_id=agent, instance=instance, agent=agent, sampling=sampling, max_trajectory_tokens=200_000)
            for agent in agents
        ]
        answers = await client.submit(jobs)
        refused = [answer.message for answer in answers if hasattr(answer, "message")]
        sys.stderr.write("".join(f"{message}\n" for message in refused))
        async for outcome in client.results(count=len(jobs) - len(refused)):
            sys.stdout.write("\n".join(shown(outcome.job_id, outcome)) + "\n")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(trio.run(main, sys.argv[1:] or ["mini-swe-agent", "pi"]))
