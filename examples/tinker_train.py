"""Train through a Tinker server: segments become `Datum`s, and each saved checkpoint the policy of the node's rollouts.

PRORL_URL=ws://127.0.0.1:8700 PRORL_TOKEN=... TINKER_BASE_URL=... TINKER_API_KEY=... \
    python examples/tinker_train.py BASE_MODEL [importance_sampling|ppo|cispo|cross_entropy]

The node's engine is the same server (docs/tinker.md). Needs `pip install tinker`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tinker import AdamParams, Datum, ModelInput, ServiceClient, TensorData

from prorl_trio import BlockingClient, SamplingParams, TaskInstance
from prorl_trio.sampling import BlockingGroups, GroupRules, JobTemplate

if TYPE_CHECKING:
    import numpy.typing as npt

    from prorl_trio.sampling import Batch
    from prorl_trio.types.models import Segment

STEPS = 2
RULES = GroupRules(size=4, groups_per_step=2, max_staleness=1)
JOB = JobTemplate(sampling=SamplingParams(temperature=1.0, max_output_tokens=256), max_turns=3)
ADAM = AdamParams(learning_rate=1e-4)
LOSS_CONFIGS: Final[dict[str, dict[str, float | str] | None]] = {
    "importance_sampling": None,
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
    "cross_entropy": None,  # imitates the rollouts with a positive advantage
}


def task(number: int) -> TaskInstance:
    """Return the task of a group."""
    a, b = 2 + number % 8, 2 + number // 8 % 8
    payload = {"question": f"What is {a} * {b}?", "answer": str(a * b)}
    return TaskInstance(instance_id=f"{a}x{b}", handler="math", payload=payload)


def inputs_of(segment: Segment, weight: float, loss: str) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a loss for a segment. Position t predicts token t + 1, so all arrays are shifted by one.

    `weight` is the advantage of each sampled token. Prompts and tool results have the advantage 0, which is how Tinker
    masks tokens.
    """
    mask = segment.free_mask[1:].astype(np.float32)
    inputs: dict[str, npt.NDArray[Any]] = {"target_tokens": segment.token_ids[1:].astype(np.int64)}
    if loss == "cross_entropy":
        return inputs | {"weights": mask * np.float32(max(weight, 0.0))}
    return inputs | {"logprobs": segment.logprobs[1:] * mask, "advantages": mask * np.float32(weight)}


def data_of(batch: Batch, loss: str) -> list[Datum]:
    """Return a datum for each segment with a sampled token.

    The losses are sums over tokens, so each advantage is divided by the number of sampled tokens in the whole batch.
    """
    rewards = np.stack([group.rewards for group in batch.groups])  # [groups, size]
    advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / rewards.std(axis=1, keepdims=True)).reshape(-1)
    segments = [
        (segment, float(advantage))
        for outcome, advantage in zip(batch.outcomes, advantages, strict=True)
        for segment in (outcome.trajectory.segments if outcome.trajectory is not None else ())
        if segment.free_mask[1:].any()
    ]
    tokens = sum(int(segment.free_mask[1:].sum()) for segment, _ in segments)
    return [
        Datum(
            model_input=ModelInput.from_ints(segment.token_ids[:-1].tolist()),
            loss_fn_inputs={
                name: TensorData.from_numpy(values)
                for name, values in inputs_of(segment, advantage / tokens, loss).items()
            },
        )
        for segment, advantage in segments
    ]


def main(base_model: str, loss: str) -> None:
    """Train for `STEPS` steps."""
    trainer = ServiceClient().create_lora_training_client(base_model, rank=32).result()
    with BlockingClient(os.environ["PRORL_URL"], os.environ["PRORL_TOKEN"]) as client:

        def publish(step: int) -> None:
            """Save the weights for sampling, and have the node sample from them, as version `step`."""
            path = trainer.save_weights_for_sampler(f"step-{step}").result().path
            with client.policy_update(str(step), mode="keep") as update:  # running completions keep their weights
                update.load_checkpoint(path)

        publish(0)  # a node that served another run has that run's weights
        with BlockingGroups(client, task, RULES, job=JOB) as groups:
            for step in range(1, STEPS + 1):
                taken = groups.take()
                done = trainer.forward_backward(data_of(taken, loss), loss, LOSS_CONFIGS[loss])
                optimised = trainer.optim_step(ADAM)  # submitted at once: the server keeps the order
                metrics = done.result().metrics
                optimised.result()
                publish(step)
                groups.advance(str(step))
                reward = taken.statistics.reward_mean
                sys.stdout.write(f"step {step}: {len(taken.outcomes)} rollouts, reward {reward:.2f}, {metrics}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if sys.argv[2:] else "importance_sampling")
