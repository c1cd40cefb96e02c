"""Run by the engine's Python: compare recorded log-probabilities with a transformers forward pass over the same ids.

python forward_pass.py MODEL_DIR TRAJECTORIES MAX_OUTCOMES   ->  {"tokens": n, "mean_abs": x, "max_abs": y}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import torch
from transformers import AutoModelForCausalLM

from prorl_trio.types.models import Outcome


def main(model_dir: str, trajectories: str, max_outcomes: int) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    outcomes = msgspec.msgpack.decode(Path(trajectories).read_bytes(), type=list[Outcome])
    chosen = [outcome for outcome in outcomes if outcome.trajectory is not None]
    # The longest dialogues say most about what happens at turn boundaries.
    chosen.sort(key=lambda outcome: -len(outcome.trajectory.turns))
    differences = []
    for outcome in chosen[:max_outcomes]:
        for segment in outcome.trajectory.segments:
            ids = torch.tensor(segment.token_ids.astype("int64")).unsqueeze(0)
            with torch.inference_mode():
                logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
            expected = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            sampled = torch.tensor(segment.loss_mask[1:].astype(bool))
            recorded = torch.tensor(segment.logprobs[1:].copy())
            differences.append((recorded - expected)[sampled].abs())
    difference = torch.cat(differences)
    return {"tokens": len(difference), "mean_abs": float(difference.mean()), "max_abs": float(difference.max())}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))  # noqa: T201
