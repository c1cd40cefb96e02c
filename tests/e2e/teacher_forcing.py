"""Run by the engine's Python: what transformers makes of recorded tokens, in bfloat16 and in float32.

python teacher_forcing.py MODEL_DIR CASES.json OUT.json

A case is `{"token_ids": [...], "loss_mask": [...]}`. The answer has, for each case, `{"bfloat16": [...], "float32":
[...]}`: the log-probability of every token with mask 1. Both have the weights as they are stored; what differs is how
exactly is calculated with them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

SAID_EVERY = 20


def score(model_dir: str, cases: list[dict[str, list[int]]]) -> list[dict[str, list[float]]]:
    """One forward pass over each case, for each dtype."""
    scores: list[dict[str, list[float]]] = [{} for _ in cases]
    for name in ("bfloat16", "float32"):
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, name)).eval()
        for number, (case, scored) in enumerate(zip(cases, scores, strict=True)):
            ids = torch.tensor(case["token_ids"])
            (sampled,) = torch.tensor(case["loss_mask"]).nonzero(as_tuple=True)
            with torch.inference_mode():
                logits = model(ids.unsqueeze(0), logits_to_keep=sampled - 1).logits[0]
            logprobs = logits.float().log_softmax(-1).gather(1, ids[sampled].unsqueeze(1))
            scored[name] = logprobs[:, 0].tolist()
            if number % SAID_EVERY == SAID_EVERY - 1:
                print(f"{name}: {number + 1} of {len(cases)}", file=sys.stderr, flush=True)  # noqa: T201
    return scores


if __name__ == "__main__":
    model_dir, cases, out = sys.argv[1:]
    Path(out).write_text(json.dumps(score(model_dir, json.loads(Path(cases).read_text()))))
