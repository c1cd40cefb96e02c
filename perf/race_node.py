"""A round of `perf.race` through a node, and the same calls in a bare loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio

from launch.learning.prompt import PAYLOAD
from perf.engine_replay import recorded_turns, replay
from perf.peers.race_round import CpuClock, RaceRecord, RaceRollout, RaceTask
from perf.process_cpu import tree_cpu
from prorl_trio.client.collect import make_jobs
from prorl_trio.client.word_problems import word_problems
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launch.node import NodeProcess
    from perf.peers.race_round import RaceRound
    from prorl_trio.client import RolloutClient
    from prorl_trio.client.word_problems import WordProblem
    from prorl_trio.types.models import Outcome

__all__ = ["node_config", "race_problems", "race_tasks", "ride_bare", "ride_node"]

SEED: Final = 5


def race_problems(number: int, count: int) -> list[WordProblem]:
    """Return the problems of round `number`, which no other round has. -1: those to warm up with."""
    return word_problems(count, seed=SEED, start=(number + 1) * count)


def race_tasks(problems: Sequence[WordProblem]) -> list[RaceTask]:
    """Return the problems as the peers get them."""
    return [
        RaceTask(
            task_id=problem.problem_id,
            question=problem.question,
            answer=str(problem.answer),
            system_prompt=PAYLOAD["system_prompt"],
        )
        for problem in problems
    ]


def node_config(race: RaceRound) -> dict[str, Any]:
    """Return the configuration of a node for rounds like this one."""
    return {
        "model": {"path": race.model},
        "backends": {"urls": [race.url], "required": True},
        "sandbox": {"provider": "bubblewrap"},
        "stages": {"run_workers": race.slots},
        "agent": {
            "max_nudges": 0,
            "max_observation_chars": race.max_observation_chars,
            "tool_timeout_s": race.tool_timeout_s,
        },
    }


async def ride_node(
    client: RolloutClient, node: NodeProcess, problems: Sequence[WordProblem], race: RaceRound
) -> tuple[RaceRecord, list[Outcome]]:
    """Do a round; return its record, and the outcomes in the order in which their RUN stage began.

    Raises:
        RuntimeError: a rollout failed.
    """
    sampling = SamplingParams(temperature=race.temperature, max_output_tokens=race.max_output_tokens)
    jobs = make_jobs(
        [problem.instance(**PAYLOAD) for problem in problems],
        rollouts=race.rollouts,
        sampling=sampling,
        max_turns=race.max_turns,
    )
    clock, before, began_s = CpuClock(), tree_cpu(node.pid), trio.current_time()
    await client.submit(jobs)
    found = [(outcome.detached(), trio.current_time() - began_s) async for outcome in client.results()]
    wall_s, after = trio.current_time() - began_s, tree_cpu(node.pid)
    client_s, _, machine_s = clock.read()
    failed = [outcome for outcome, _ in found if outcome.status != "completed" or outcome.trajectory is None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(jobs)} rollouts failed, one with: {failed[0].error}")
    rollouts = [(rollout_of(outcome, came_s), outcome) for outcome, came_s in found]
    rollouts.sort(key=lambda pair: pair[0].start_s)
    record = RaceRecord(
        rollouts=[rollout for rollout, _ in rollouts],
        wall_s=wall_s,
        framework_cpu_s=after[0] - before[0] + client_s,
        sandboxes_cpu_s=after[1] - before[1],
        machine_cpu_s=machine_s,
    )
    return record, [outcome for _, outcome in rollouts]


def rollout_of(outcome: Outcome, came_s: float) -> RaceRollout:
    """Return the record of a rollout whose outcome came at `came_s`. Its times are counted back from there."""
    assert outcome.trajectory is not None
    timing, turns = outcome.timing, outcome.trajectory.turns
    run_end_s = came_s - timing.eval_s - timing.queued_eval_s
    return RaceRollout(
        start_s=max(0.0, run_end_s - timing.run_s),
        end_s=came_s,
        turns=len(turns),
        tool_calls=sum(len(turn.tool_calls) for turn in turns),
        tokens=sum(turn.completion_end - turn.completion_start for turn in turns),
        reward=outcome.reward or 0.0,
    )


async def ride_bare(race: RaceRound, outcomes: Sequence[Outcome], salt: str) -> RaceRecord:
    """Make the calls of a round's `outcomes` again with nothing in between, as many at a time."""
    clock, began_s = CpuClock(), trio.current_time()
    placed = await replay(
        race.url,
        race.model,
        [recorded_turns(outcome) for outcome in outcomes],
        race.slots,
        salt=salt,
        temperature=race.temperature,
    )
    rollouts = [
        RaceRollout(
            start_s=each.start_s,
            end_s=each.end_s,
            turns=len(each.calls),
            tool_calls=0,
            tokens=sum(call.tokens for call in each.calls),
            reward=0.0,
        )
        for each in placed
    ]
    wall_s, (own_s, _, machine_s) = trio.current_time() - began_s, clock.read()
    return RaceRecord(
        rollouts=rollouts, wall_s=wall_s, framework_cpu_s=own_s, sandboxes_cpu_s=0.0, machine_cpu_s=machine_s
    )
