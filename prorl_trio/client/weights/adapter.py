"""Checks of a LoRA adapter, made on the trainer's side, before an engine is asked to load it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

from prorl_trio.client.weights.errors import WeightsRefused
from prorl_trio.client.weights.model_folder import read_json
from prorl_trio.client.weights.safetensors import read_header
from prorl_trio.client.weights.values import stored_all_finite

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prorl_trio.client.weights.model_folder import ModelFolder

TENSORS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
_HALF: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


def check_adapter(path: Path, bases: Sequence[ModelFolder], check: Literal["values", "headers"] = "values") -> None:
    """Check that a folder has a whole LoRA adapter for the model in each of `bases`. Blocks; for worker threads.

    Every module has `lora_A`, of shape [r, inputs], and `lora_B`, of shape [outputs, r]; where the model has a matrix
    of that module, it is [outputs, inputs]. Engines join some matrices of a model, so other modules are passed over.
    Unless `check` is `headers`, no element is NaN or infinite.

    Raises:
        WeightsRefused: something is not so. The message names the tensor, the file or the field.
    """
    if "r" not in read_json(path / CONFIG):
        raise WeightsRefused(f"{path / CONFIG}: it names no rank (r), so this is no LoRA adapter")
    tensors = read_header(path / TENSORS)
    modules: dict[str, dict[str, str]] = {}
    for name in tensors:
        if (match := _HALF.fullmatch(name)) is not None:
            modules.setdefault(match["module"], {})[match["half"]] = name
    if not modules:
        raise WeightsRefused(f"{path / TENSORS}: it has no tensor MODULE.lora_A.weight")
    for module, names in modules.items():
        if len(names) < 2:
            (name,) = names.values()
            raise WeightsRefused(f"{path}: {name} is there without the other half of its pair", name)
        shapes = {half: tensors[name].type.shape for half, name in names.items()}
        for base in bases:
            _check_pair(path, base, f"{module}.weight", names["B"], shapes)
    for name, tensor in tensors.items():
        if check == "values" and not stored_all_finite(tensor):
            raise WeightsRefused(f"{path}: {name} has an element that is NaN or infinite", name)


def _check_pair(path: Path, base: ModelFolder, matrix: str, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    known = base.tensors.get(matrix)
    if known is None or len(known.type.shape) != 2:
        return
    outputs, inputs = known.type.shape
    (rank, *ins), (*outs, same) = shapes["A"], shapes["B"]
    if rank != same or ins != [inputs] or outs != [outputs]:
        raise WeightsRefused(
            f"{path}: {name} has the shape {list(shapes['B'])} and its other half {list(shapes['A'])}; {matrix} of the "
            f"engines' model in {base.path} is {list(known.type.shape)}",
            name,
        )
