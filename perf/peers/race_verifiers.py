"""A round of `perf.race` through verifiers, in its environment: `python -m perf.peers.race_verifiers`.

It has the protocol of `worker.py`: a command is the path of a round, the answer its record. The rollouts come from
`vf.ToolEnv`, each scored separately, so that none waits for its group. The engine returns log-probabilities and token
ids, as training needs them.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig, ToolCall

from perf.peers.race_round import Box, CpuClock, RaceRecord, RaceRollout, code_in, read_round, reward_of
from perf.peers.worker import serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.peers.race_round import RaceRound
    from perf.peers.worker import Run

TOOL: str = "python"


class FencedToolEnv(vf.ToolEnv):  # type: ignore[misc]  # verifiers is in an environment of its own
    """Its tool environment, for a policy that writes calls as ```python blocks. The engine does not parse them."""

    async def get_model_response(self, state: Any, prompt: Any, **options: Any) -> Any:
        """Parse the call in the text."""
        response = await super().get_model_response(state, prompt, **options)
        code = code_in(response.message.content or "")
        if code is not None:
            call = ToolCall(id=f"call-{len(state['trajectory'])}", name=TOOL, arguments=json.dumps({"code": code}))
            response.message.tool_calls = [call]
        return response


def make_environment(race: RaceRound) -> Any:
    """Return the tasks of a round, with the tool and the reward."""
    box = Box(race.bubblewrap, timeout_s=race.tool_timeout_s, max_chars=race.max_observation_chars)

    async def python(code: str) -> str:
        """Run a Python program and see what it prints.

        Args:
            code: The program.
        """
        return await box.run(code)

    async def solved(completion: Any, answer: str) -> float:
        """Reward a correct answer in the last turn."""
        return reward_of(completion[-1].content or "", answer)

    rows = [{"prompt": task.prompt, "answer": task.answer} for task in race.tasks]
    return FencedToolEnv(
        dataset=Dataset.from_list(rows), tools=[python], max_turns=race.max_turns, rubric=vf.Rubric(funcs=[solved])
    )


async def ride(race: RaceRound) -> RaceRecord:
    """Run a round.

    Raises:
        RuntimeError: a rollout ended with an error.
    """
    environment = make_environment(race)
    sampling = {
        "temperature": race.temperature,
        "max_tokens": race.max_output_tokens,
        "logprobs": True,
        "tool_choice": "none",  # the policy was trained to call the tool without its description
        "extra_body": {"return_token_ids": True},
    }
    clock, began_s, began_at = CpuClock(), time.monotonic(), time.time()
    results = await environment.evaluate(
        ClientConfig(api_base_url=f"{race.url}/v1"),
        race.model,
        sampling,
        rollouts_per_example=race.rollouts,
        max_concurrent=race.slots,
        independent_scoring=True,
        on_start=lambda *_: None,
        on_progress=lambda *_: None,
        on_log=lambda *_: None,
    )
    wall_s = time.monotonic() - began_s
    own_s, children_s, machine_s = clock.read()
    failed = [output["error"] for output in results["outputs"] if output.get("error")]
    if failed:
        raise RuntimeError(f"{len(failed)} rollouts failed, one with {failed[0]}")
    return RaceRecord(
        rollouts=[_rollout(output, began_at) for output in results["outputs"]],
        wall_s=wall_s,
        framework_cpu_s=own_s,
        sandboxes_cpu_s=children_s,
        machine_cpu_s=machine_s,
    )


def _rollout(output: Any, began_at: float) -> RaceRollout:
    """Return the record of one output. `began_at`: the round's start on the wall clock."""
    timing, metrics = output["timing"], output["metrics"]
    return RaceRollout(
        start_s=timing["generation"]["start"] - began_at,
        end_s=timing["scoring"]["end"] - began_at,
        turns=int(metrics["num_turns"]),
        tool_calls=int(metrics["total_tool_calls"]),
        tokens=int(output["token_usage"]["output_tokens"]),
        reward=float(output["reward"]),
    )


@contextmanager
def open_verifiers() -> Iterator[Run]:
    """Run rounds, each in a new event loop."""
    yield lambda path: (asyncio.run(ride(read_round(Path(path)))).encoded(), 0)


if __name__ == "__main__":
    serve(open_verifiers)
