"""A trainer's loop: informative groups of rollouts, their advantages, a step, new weights in every engine.

PRORL_URL=ws://127.0.0.1:8700 PRORL_TOKEN=... python examples/trainer_loop.py [FOLDER]

The engines load the weights from FOLDER in a pause, and completions continue under the new version. For a node without
a GPU, see `examples/local_node.py`. Without trio, use `BlockingClient` and `BlockingGroups`, whose methods have the
same names.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import trio

from prorl_trio import SamplingParams, TaskInstance, connect, pad_batch
from prorl_trio.sampling import GroupRules, JobTemplate, open_groups

if TYPE_CHECKING:
    import numpy.typing as npt

    from prorl_trio.sampling import Batch

STEPS = 2
RULES = GroupRules(size=4, groups_per_step=2, max_staleness=0)  # 1: sample while training, at most one update old
JOB = JobTemplate(sampling=SamplingParams(temperature=1.0, max_output_tokens=256), max_turns=3)
PAD_TOKEN_ID = 0


def task(number: int) -> TaskInstance:
    """Return the task of a group. A sequence of tasks also works, and is shuffled in each epoch."""
    a, b = 2 + number % 8, 2 + number // 8 % 8
    payload = {"question": f"What is {a} * {b}?", "answer": str(a * b)}
    return TaskInstance(instance_id=f"{a}x{b}", handler="math", payload=payload)


def advantages_of(batch: Batch) -> npt.NDArray[np.float32]:
    """Return each rollout's reward minus its group's mean, over the group's spread (never 0 in informative groups)."""
    rewards = np.stack([group.rewards for group in batch.groups])  # [groups, size]
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    advantages: npt.NDArray[np.float32] = (centred / rewards.std(axis=1, keepdims=True)).reshape(-1)
    return advantages


def train(taken: Batch, folder: Path) -> str:
    """Take a step of REINFORCE over the sampled tokens, write the new weights to `folder`, and return a report."""
    batch = pad_batch(taken.outcomes, pad_token_id=PAD_TOKEN_ID)  # [rows, tokens], a row for each segment
    advantages = advantages_of(taken)[batch.item][:, None]
    # Your model recomputes the log-probabilities here; `batch.logprobs` come from the engine that sampled.
    loss = -(advantages * batch.logprobs * batch.loss_mask).sum() / batch.loss_mask.sum()
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # yours: save_pretrained(folder)
    statistics = taken.statistics
    return (
        f"{len(taken.outcomes)} rollouts by {batch.policy_versions}, reward {statistics.reward_mean:.2f}, loss "
        f"{loss:.3f}; {statistics.solved_groups + statistics.unsolved_groups} groups taught nothing"
    )


async def main(folder: Path) -> None:
    """Train for `STEPS` steps."""
    async with (
        connect(os.environ["PRORL_URL"], os.environ["PRORL_TOKEN"]) as client,
        open_groups(client, task, RULES, job=JOB) as groups,
    ):
        for step in range(1, STEPS + 1):
            taken = await groups.take()  # exactly `groups_per_step` groups, all complete
            said = await trio.to_thread.run_sync(train, taken, folder)
            sys.stdout.write(f"step {step}: {said}\n")
            # The engines pause, load the folder and resume. After an error in the block, every engine stays at the old
            # version.
            async with client.policy_update(str(step)) as update:
                await update.load_folder(folder, check="none")  # real weights are compared with the engines' model
            await groups.advance(str(step))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        trio.run(main, Path(sys.argv[1] if sys.argv[1:] else made))
