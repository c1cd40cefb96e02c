"""Run by the engine's Python, in the trainer's place: change a model, or ask it what it thinks of sampled tokens.

python changed_weights.py change MODEL_DIR NEW_DIR     writes the model with other weights, as after a step of training
python changed_weights.py compare CASES.json           ->  [mean absolute difference, for each case]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def change(model_dir: str, new_dir: str) -> None:
    """Every matrix of every second layer is scaled: enough to be told from the old model, still a model of language."""
    shutil.copytree(model_dir, new_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers[::2]:
            layer.mlp.down_proj.weight.mul_(0.8)
    model.save_pretrained(new_dir)


def compare(cases: str) -> list[float]:
    """Each case: `model`, `token_ids`, and the recorded `logprobs` of those from `start` on."""
    means = []
    for case in json.loads(Path(cases).read_text()):
        model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32).eval()
        start, recorded = case["start"], torch.tensor(case["logprobs"])
        ids = torch.tensor(case["token_ids"][: start + len(recorded)]).unsqueeze(0)
        with torch.inference_mode():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[start - 1 :, 0]
        means.append(float((recorded - expected).abs().mean()))
    return means


if __name__ == "__main__":
    if sys.argv[1] == "change":
        change(sys.argv[2], sys.argv[3])
    else:
        print(json.dumps(compare(sys.argv[2])))  # noqa: T201
