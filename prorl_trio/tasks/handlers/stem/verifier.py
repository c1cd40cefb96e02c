"""Verify an answer to a task of reasoning-gym with its own code. Runs in a scoring process (`agent.scoring`)."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import reasoning_gym

from prorl_trio.tasks.handlers.stem.generated import check_family, is_no_number, may_be_evaluated


def score(payload: dict[str, Any]) -> dict[str, Any]:
    """Verify `payload["answer"]` (None: the correct one) for the task generated from `family` and `seed`.

    Returns `score`, which is in [0, 1].

    Raises:
        ValueError: the task is invalid: another version generated it, or its question differs.
        Otherwise exceptions of the verifier.
    """
    family: str = payload["family"]
    check_family(family)
    if payload["version"] != (installed := version("reasoning-gym")):
        raise ValueError(f"reasoning-gym {payload['version']} made this task, and {installed} is installed here")
    dataset = reasoning_gym.create_dataset(family, seed=payload["seed"], size=1)
    entry = dataset[0]
    if entry["question"] != payload["question"]:
        raise ValueError(f"family {family}, seed {payload['seed']}, makes another question than the task has")
    answer = entry["answer"] if payload["answer"] is None else payload["answer"]
    if answer is None or not may_be_evaluated(family, answer) or (is_no_number(answer) and answer != entry["answer"]):
        return {"score": 0.0}
    found = float(dataset.score_answer(answer, entry))
    return {"score": min(1.0, max(0.0, found)) if math.isfinite(found) else 0.0}
