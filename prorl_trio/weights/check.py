"""Checks of a weights folder on the trainer's side, before an engine is asked to load it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from prorl_trio.weights.errors import WeightsRefused
from prorl_trio.weights.model_folder import (
    ModelFolder,
    compare_configs,
    compare_type,
    embedding_of,
    is_head,
    missing_names,
    unknown_name,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prorl_trio.weights.safetensors import StoredTensor


WeightCheck = Literal["values", "headers", "none"]
"""The depth of a check. `values` scans every element for NaN and infinity. `headers` compares only names, shapes and
dtypes. `none` checks nothing and suits a folder that the trainer's process cannot see."""

CHUNK_BYTES: Final = 8 * 1024 * 1024
"""Bytes scanned per step; this bounds the memory of a check."""

_EXPONENTS: Final[dict[str, tuple[np.dtype[Any], int]]] = {
    "F64": (np.dtype("<u8"), 0x7FF0_0000_0000_0000),
    "F32": (np.dtype("<u4"), 0x7F80_0000),
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F8_E5M2": (np.dtype("u1"), 0x7C),
    "F8_E4M3": (np.dtype("u1"), 0x7F),
}
"""Bits by dtype that are all set only in NaN and infinity (IEEE 754; E4M3 has only NaN). Integers and E8M0 scales are
always finite here."""


def all_finite(dtype: str, flat: np.ndarray) -> bool:
    """Return whether no element is NaN or infinite. `flat` is the tensor's bytes, uint8, in row-major order."""
    if dtype not in _EXPONENTS:
        return True
    unsigned, mask = _EXPONENTS[dtype]
    for begin in range(0, flat.nbytes, CHUNK_BYTES):
        masked = flat[begin : begin + CHUNK_BYTES].view(unsigned) & unsigned.type(mask)
        if bool((masked == mask).any()):
            return False
    return True


def stored_all_finite(tensor: StoredTensor) -> bool:
    """Return whether no element of a tensor in a file is NaN or infinite. Raises OSError if the file cannot be read."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        left = tensor.type.size_bytes
        while left:
            chunk = file.read(min(CHUNK_BYTES, left))
            if not chunk:
                raise OSError(f"{tensor.path} ends too early")
            if not all_finite(tensor.type.dtype, np.frombuffer(chunk, np.uint8)):
                return False
            left -= len(chunk)
    return True


def check_folder(path: Path, bases: Sequence[ModelFolder], check: Literal["values", "headers"] = "values") -> None:
    """Check that a folder holds complete weights for the model in each of `bases`. Blocks; call it in a worker thread.

    The files must be complete. The names, shapes and dtypes of the tensors must match the model (see `compare_type`),
    and so must the architecture in `config.json` if the folder has one. A tied output layer may be missing, or present
    and equal to the embedding. Unless `check` is `headers`, no element may be NaN or infinite.

    Raises:
        WeightsRefused: a check fails. The message names the tensor, the file or the field.
    """
    found = ModelFolder.read(path)
    for base in bases:
        compare_configs(path, found.config, base)
        for name, tensor in found.tensors.items():
            if why := unknown_name(name, base):
                raise WeightsRefused(f"{path}: {why}", name)
            compare_type(name, tensor.type, base)
        check_names(path, list(found.tensors), base)
    if check == "values":
        _check_values(found, tied=any(base.tied for base in bases) or found.tied)


def check_names(path: Path, names: Sequence[str], base: ModelFolder) -> None:
    """Check that `names`, the tensors in `path`, include every tensor of the model in `base`.

    Raises:
        WeightsRefused: some tensors are missing.
    """
    if missing := missing_names(names, base):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsRefused(
            f"{path}: the tensor {missing[0]}{more} of the engines' model in {base.path} is missing: the engines would "
            "keep their old one",
            missing[0],
        )


def _check_values(found: ModelFolder, *, tied: bool) -> None:
    try:
        for name, tensor in found.tensors.items():
            if not stored_all_finite(tensor):
                raise WeightsRefused(f"{found.path}: {name} has an element that is NaN or infinite", name)
        head = next((name for name in found.tensors if is_head(name)), None)
        embedding = embedding_of(found.tensors)
        if tied and head and embedding and _digest(found.tensors[head]) != _digest(found.tensors[embedding]):
            raise WeightsRefused(f"{found.path}: {head} differs from {embedding}, which it is tied to", head)
    except OSError as exc:
        raise WeightsRefused(f"{found.path}: it cannot be read: {exc}") from exc


def _digest(tensor: StoredTensor) -> tuple[int, str]:
    """Return a checksum of the tensor's bytes, and its dtype."""
    checksum, left = 0, tensor.type.size_bytes
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            checksum = zlib.crc32(chunk, checksum)
            left -= len(chunk)
    return checksum, tensor.type.dtype
