"""Run by the Python of NeMo Gym: its own models read rollouts, and NeMo RL's rule holds: `... FILE`.

The last line of the output is JSON: for each rollout its number of trained turns and of trained tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nemo_gym.base_resources_server import BaseVerifyResponse
from nemo_gym.openai_utils import (
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseReasoningItemForTraining,
)

TRAINED = (
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseReasoningItemForTraining,
)


def check(rollout):
    """As `nemo_rl.environments.nemo_gym` makes a message log of a result: prompts must be contiguous."""
    parsed = BaseVerifyResponse.model_validate(rollout)
    items = [item for item in parsed.response.output if isinstance(item, TRAINED)]
    given = [item for item in rollout["response"]["output"] if item.get("generation_token_ids")]
    assert [item.generation_token_ids for item in items] == [item["generation_token_ids"] for item in given]
    seen = []
    for item in items:
        assert seen == item.prompt_token_ids[: len(seen)], "Non-contiguous messages found!"
        assert len(item.generation_log_probs) == len(item.generation_token_ids) > 0
        seen = [*item.prompt_token_ids, *item.generation_token_ids]
    assert seen, "NeMo Gym returned a result with no generation data."
    return len(items), sum(len(item.generation_token_ids) for item in items)


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    sys.stdout.write(json.dumps([check(json.loads(line)) for line in lines]) + "\n")
