"""Checkpoints from which a killed run resumes. Each checkpoint is complete or absent."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_trio.learn.trainer import Trainer

_PREFIX: Final = "step-"
_WEIGHTS, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.pt", "state.json"


def save_checkpoint(folder: Path, trainer: Trainer, step: int, state: dict[str, Any], *, keep: int = 2) -> Path:
    """Write `folder/step-NNNNNN`: weights, optimizer, random state, and the caller's JSON `state`.

    The folder gets its name only after all data is on the disk. The last `keep` - 1 older checkpoints are kept.
    """
    target = folder / f"{_PREFIX}{step:06d}"
    part = folder / f".{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    # Tied weights are written under each of their names, because an engine may have its own copy of the output layer.
    weights = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    save_file(weights, part / _WEIGHTS, metadata={"format": "pt"})
    random = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
    torch.save({"optimizer": trainer.optimizer.state_dict(), "random": random}, part / _OPTIMIZER)
    (part / _STATE).write_bytes(msgspec.json.encode({"step": step, **state}))
    for path in (*part.iterdir(), part):
        _sync(path)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    _sync(folder)
    for old in sorted(folder.glob(f"{_PREFIX}*"))[:-keep]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`; None if there is none."""
    return max(folder.glob(f"{_PREFIX}*"), default=None)


def load_checkpoint(checkpoint: Path, trainer: Trainer) -> dict[str, Any]:
    """Restore `trainer` and the random generators; return the caller's `state`, with its `step`."""
    trainer.model.load_state_dict(load_file(checkpoint / _WEIGHTS))
    saved = torch.load(checkpoint / _OPTIMIZER, map_location="cpu", weights_only=True)
    trainer.optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"]["cpu"])
    if saved["random"]["cuda"]:
        torch.cuda.set_rng_state_all(saved["random"]["cuda"])
    state: dict[str, Any] = msgspec.json.decode((checkpoint / _STATE).read_bytes())
    return state


def _sync(path: Path) -> None:
    os.fsync(descriptor := os.open(path, os.O_RDONLY))
    os.close(descriptor)
