"""Run by the engine's Python, in the trainer's place: change a model, or ask it what it thinks of sampled tokens.

python changed_weights.py change MODEL_DIR FOLDER PATH...    writes models and an adapter, as after a step of training
python changed_weights.py compare CASES.json           ->  [mean absolute difference, for each case]
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

RANK = 4
ALPHA = 8


def change(model_dir: str, folder: str) -> None:
    """Write `new`, `written`, `adapter` and `merged` into `folder`.

    In `new`, a matrix of every second layer is scaled, and the embedding, which is the output layer, too: enough to be
    told from the old model, still a model of language.
    `written` is the same by our writer, from the state dict. `merged` is the old model with `adapter` in its matrices.
    """
    root = Path(folder)
    new, merged = root / "new", root / "merged"
    shutil.copytree(model_dir, new)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers[::2]:
            layer.mlp.down_proj.weight.mul_(0.8)
        model.model.embed_tokens.weight[::2].mul_(0.97)
    model.save_pretrained(new)
    write_state(model, Path(model_dir), root / "written")
    files = [load_file(each / "model.safetensors") for each in (new, root / "written")]
    assert files[0].keys() | {"lm_head.weight"} == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert torch.equal(files[1]["lm_head.weight"], files[0]["model.embed_tokens.weight"])
    shutil.copytree(model_dir, merged)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    adapt(model, root / "adapter")
    model.save_pretrained(merged)


def write_state(model: torch.nn.Module, model_dir: Path, folder: Path) -> None:
    """Write the state dict as `load_state_dict` does, with the tied output layer that `save_pretrained` leaves out."""
    from prorl_trio.weights.model_folder import ModelFolder
    from prorl_trio.weights.source import write_model

    state = model.state_dict()
    assert "lm_head.weight" in state
    folder.mkdir()
    write_model(state, folder, ModelFolder.read(model_dir))


def adapt(model: torch.nn.Module, folder: Path) -> None:
    """Write a LoRA adapter as PEFT does, and add it to the model's own matrices."""
    torch.manual_seed(0)
    tensors = {}
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            matrix = layer.self_attn.q_proj.weight
            low, high = torch.randn(RANK, matrix.shape[1]) * 0.05, torch.randn(matrix.shape[0], RANK) * 0.2
            name = f"base_model.model.model.layers.{number}.self_attn.q_proj"
            tensors |= {f"{name}.lora_A.weight": low, f"{name}.lora_B.weight": high}
            matrix.add_(high @ low * (ALPHA / RANK))
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def compare(cases: str) -> list[float]:
    """Each case: `model`, `token_ids`, and the recorded `logprobs` of those from `start` on."""
    means = []
    load = functools.cache(lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    for case in json.loads(Path(cases).read_text()):
        model = load(case["model"])
        start, recorded = case["start"], torch.tensor(case["logprobs"])
        ids = torch.tensor(case["token_ids"][: start + len(recorded)]).unsqueeze(0)
        with torch.inference_mode():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[start - 1 :, 0]
        means.append(float((recorded - expected).abs().mean()))
    return means


if __name__ == "__main__":
    if sys.argv[1] == "change":
        sys.path += sys.argv[4:]  # where our package is, and what it needs that the engine does not
        change(sys.argv[2], sys.argv[3])
    else:
        print(json.dumps(compare(sys.argv[2])))  # noqa: T201
