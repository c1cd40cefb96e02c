"""A state dict written as a model folder that engines load: its tensors, and the model's configuration beside them."""

from __future__ import annotations

import shutil
import zlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.client.weights.check import check_names
from prorl_trio.client.weights.errors import WeightsRefused
from prorl_trio.client.weights.model_folder import (
    INDEX,
    ModelFolder,
    compare_type,
    embedding_of,
    is_head,
    unknown_name,
)
from prorl_trio.client.weights.safetensors import TensorFile
from prorl_trio.client.weights.tensors import named_tensors, raw_tensor
from prorl_trio.client.weights.tied import lacks_head, write_head
from prorl_trio.client.weights.values import all_finite

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from prorl_trio.client.weights.check import WeightCheck
    from prorl_trio.client.weights.safetensors import TensorType
    from prorl_trio.client.weights.tensors import StateDict

SHARD_BYTES: Final = 4 * 1024**3
"""Size from which a further file is begun."""
MAX_COPIED_BYTES: Final = 256 * 1024 * 1024
"""Size from which a file of the model's folder is not taken for configuration or a tokenizer."""
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})


def write_model(state: StateDict, folder: Path, base: ModelFolder, check: WeightCheck = "values") -> None:
    """Write tensors as a model in the empty `folder`; configuration and tokenizer are copied from `base`.

    Each tensor is checked and written as it comes, and one at a time is in memory. An output layer that is tied to the
    embedding is written, too, given or not: see `tied`. Blocks; for worker threads.

    Args:
        state: see `StateDict`. Its names are those of the model's own files.
        folder: it exists and is empty.
        base: the model that the engines serve.
        check: `values` looks for NaN and infinity; names, shapes and dtypes are checked with `headers` too.

    Raises:
        WeightsRefused: the tensors are not those of the model; see `check_folder`.
        OSError: the disk is full.
    """
    writer = _Writer(folder, base, check)
    try:
        for name, tensor in named_tensors(state):
            writer.add(name, tensor)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    if lacks_head(found := ModelFolder.read(folder), [base]):
        write_head(found, folder)
    for source in sorted(base.path.iterdir()):
        if _is_configuration(source):
            shutil.copyfile(source, folder / source.name)


def _is_configuration(file: Path) -> bool:
    if file.suffix in _WEIGHTS or file.name == INDEX or not file.is_file():
        return False
    return file.stat().st_size <= MAX_COPIED_BYTES


class _Writer:
    """The files of one model, begun as they are needed."""

    def __init__(self, folder: Path, base: ModelFolder, check: WeightCheck) -> None:
        self._folder = folder
        self._base = base
        self._check = check
        self._files: list[tuple[str, TensorFile]] = []
        self._names: list[str] = []
        self._tied: dict[str, tuple[TensorType, int]] = {}

    def add(self, name: str, tensor: Any) -> None:
        kind, flat = raw_tensor(name, tensor)
        if self._check != "none":
            self._check_tensor(name, kind, flat)
        if self._base.tied and (is_head(name) or embedding_of([name])):
            self._tied[name] = (kind, zlib.crc32(flat.data))
        self._names.append(name)
        self._file_for(name, kind).add(name, kind, flat)

    def finish(self) -> None:
        if self._check != "none":
            if len(set(self._tied.values())) > 1:
                names = " and ".join(self._tied)
                raise WeightsRefused(f"{names} differ, and the model ties them", next(iter(self._tied)))
            check_names(self._folder, self._names, self._base)
        for _, file in self._files:
            file.close()
        if len(self._files) > 1:
            index = {"metadata": {}, "weight_map": {name: path for path, file in self._files for name in file.names}}
            (self._folder / INDEX).write_bytes(msgspec.json.encode(index))

    def abandon(self) -> None:
        for _, file in self._files:
            file.abandon()

    def _check_tensor(self, name: str, kind: TensorType, flat: np.ndarray) -> None:
        if why := unknown_name(name, self._base):
            raise WeightsRefused(why, name)
        compare_type(name, kind, self._base)
        if self._check == "values" and not all_finite(kind.dtype, flat):
            raise WeightsRefused(f"{name} has an element that is NaN or infinite", name)

    def _file_for(self, name: str, kind: TensorType) -> TensorFile:
        if self._files:
            last = self._files[-1][1]
            if last.size_bytes < SHARD_BYTES and last.fits(name, kind):
                return last
        number = len(self._files) + 1
        path = "model.safetensors" if number == 1 else f"model-{number:05}.safetensors"
        self._files.append((path, TensorFile(self._folder / path)))
        return self._files[-1][1]
