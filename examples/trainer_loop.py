"""A trainer's loop: groups of rollouts, their advantages, a step of the optimizer, new weights in every engine.

PRORL_URL=ws://127.0.0.1:8700 PRORL_TOKEN=... python examples/trainer_loop.py [FOLDER]

FOLDER is where the engines find the weights; they load them in a pause, and completions go on under the new version.
For a node without a GPU, see `examples/local_node.py`. Without trio, take `BlockingClient`: its calls have these names.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import trio

from prorl_trio import JobSpec, Outcome, Rejected, RolloutClient, SamplingParams, TaskInstance, connect, pad_batch

if TYPE_CHECKING:
    import numpy.typing as npt

STEPS = 2
ROLLOUTS = 4  # of each question: a group, whose mean is the baseline
QUESTIONS = [(6, 7), (12, 12)]
PAD_TOKEN_ID = 0


def jobs_of(step: int) -> list[JobSpec]:
    """Make the rollouts of one step. Their ids are chosen here: to submit one again does no harm."""
    sampling = SamplingParams(temperature=1.0, max_output_tokens=256)
    jobs = []
    for a, b in QUESTIONS:
        payload = {"question": f"What is {a} * {b}?", "answer": str(a * b)}
        task = TaskInstance(instance_id=f"{a}x{b}", handler="math", payload=payload)
        for n in range(ROLLOUTS):
            group = f"step{step}-{task.instance_id}"
            jobs.append(JobSpec(job_id=f"{group}-{n}", group_id=group, instance=task, sampling=sampling, max_turns=3))
    return jobs


async def roll_out(client: RolloutClient, jobs: list[JobSpec]) -> list[Outcome]:
    """Submit `jobs` and return the outcomes that have a reward. None stands for a failure of the infrastructure."""
    for answer in await client.submit(jobs):
        if isinstance(answer, Rejected):
            say(f"{answer.job_id} was rejected: {answer.message}")
    return [outcome async for outcome in client.results() if outcome.reward is not None]


def advantages_of(outcomes: list[Outcome]) -> npt.NDArray[np.float32]:
    """Return each reward less the mean of its group."""
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.group_id].append(outcome.reward or 0.0)
    return np.array([(outcome.reward or 0.0) - np.mean(groups[outcome.group_id]) for outcome in outcomes], np.float32)


def train(outcomes: list[Outcome], folder: Path) -> str:
    """Take a step of REINFORCE over the sampled tokens, write the new weights to `folder`, and say how it went."""
    batch = pad_batch(outcomes, pad_token_id=PAD_TOKEN_ID)  # [rows, tokens], a row for each segment
    advantages = advantages_of(outcomes)[batch.item][:, None]
    # Here your model computes the log-probabilities anew; `batch.logprobs` are those of the engine that sampled.
    loss = -(advantages * batch.logprobs * batch.loss_mask).sum() / batch.loss_mask.sum()
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # yours: save_pretrained(folder)
    reward = np.mean([outcome.reward or 0.0 for outcome in outcomes])
    return f"{len(outcomes)} rollouts by {batch.policy_versions}, reward {reward:.2f}, loss {loss:.3f}"


def say(line: str) -> None:
    """Print `line`."""
    sys.stdout.write(f"{line}\n")


async def main(folder: Path) -> None:
    """Train for `STEPS` steps."""
    async with connect(os.environ["PRORL_URL"], os.environ["PRORL_TOKEN"]) as client:
        for step in range(1, STEPS + 1):
            outcomes = await roll_out(client, jobs_of(step))
            said = await trio.to_thread.run_sync(train, outcomes, folder)
            say(f"step {step}: {said}")
            # The engines pause, load the folder and go on. An error in the block leaves the old version everywhere.
            async with client.policy_update(f"step-{step}") as update:
                await update.load_folder(folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        trio.run(main, Path(sys.argv[1] if sys.argv[1:] else made))
