"""Run by the engine's Python: what transformers makes of recorded tokens, in bfloat16 and in float32.

python teacher_forcing.py MODEL_DIR CASES.json OUT.json

A case is `{"token_ids": [...], "loss_mask": [...]}`. The answer has, for each case, `{"bfloat16": [...], "float32":
[...], "spread": [...]}`: of every token with mask 1 its log-probability in both, and by how much bfloat16 moves the
logits of the likeliest tokens there against each other (root mean square). Both have the weights as they are stored;
what differs is how exactly is calculated with them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

SAID_EVERY = 20
LIKELIEST = 50


def score(model_dir: str, cases: list[dict[str, list[int]]]) -> list[dict[str, list[float]]]:
    """One forward pass over each case, for each dtype."""
    exact, rounding = (
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)
    )
    scores = []
    for number, case in enumerate(cases, 1):
        ids = torch.tensor(case["token_ids"])
        (sampled,) = torch.tensor(case["loss_mask"]).nonzero(as_tuple=True)
        with torch.inference_mode():
            float32, bfloat16 = (
                model(ids.unsqueeze(0), logits_to_keep=sampled - 1).logits[0].float() for model in (exact, rounding)
            )
        moved = (bfloat16 - float32).gather(1, float32.topk(LIKELIEST).indices)
        scores.append(
            {
                "bfloat16": _of(bfloat16, ids[sampled]),
                "float32": _of(float32, ids[sampled]),
                "spread": moved.std(1, correction=0).tolist(),
            }
        )
        if number % SAID_EVERY == 0:
            print(f"{number} of {len(cases)}", file=sys.stderr, flush=True)  # noqa: T201 - a program of its own
    return scores


def _of(logits: torch.Tensor, token_ids: torch.Tensor) -> list[float]:
    """The log-probability of each token."""
    return logits.log_softmax(-1).gather(1, token_ids.unsqueeze(1))[:, 0].tolist()


if __name__ == "__main__":
    model_dir, cases, out = sys.argv[1:]
    Path(out).write_text(json.dumps(score(model_dir, json.loads(Path(cases).read_text()))))
