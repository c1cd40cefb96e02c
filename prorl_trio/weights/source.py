"""The trainer's side of new weights: find the served models, check folders, write state dicts."""

from __future__ import annotations

import re
import shutil
import socket
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
import trio

from prorl_trio.weights.check import all_finite, check_folder, check_names, stored_all_finite
from prorl_trio.weights.errors import WeightsRefused
from prorl_trio.weights.model_folder import (
    INDEX,
    ModelFolder,
    compare_type,
    embedding_of,
    is_head,
    read_json,
    unknown_name,
)
from prorl_trio.weights.safetensors import TensorFile, named_tensors, raw_tensor, read_header
from prorl_trio.weights.store import SHARED_MEMORY

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from prorl_trio.types.backends import UpdatedBackend
    from prorl_trio.weights.check import WeightCheck
    from prorl_trio.weights.safetensors import StateDict, TensorType
    from prorl_trio.weights.store import WeightStores


MAX_MODELS: Final = 16
"""Limit on the number of different models served by the engines of one pool."""

TENSORS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
_HALF: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")

SHARD_BYTES: Final = 4 * 1024**3
"""A file of this size is closed, and the next tensors go to a new file."""
MAX_COPIED_BYTES: Final = 256 * 1024 * 1024
"""Files of the model's folder from this size on are not copied as configuration or tokenizer."""
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})

HEAD: Final = "lm_head.weight"
HEAD_FILE: Final = "model-tied-head.safetensors"
_EMBEDDING: Final = "model.embed_tokens.weight"
"""The embedding's name; models that use it name their output layer `HEAD`."""


def lacks_head(found: ModelFolder, bases: Sequence[ModelFolder]) -> bool:
    """Return whether the model ties its output layer to the embedding, and the folder holds only the embedding."""
    tied = found.tied or any(base.tied for base in bases)
    return tied and embedding_of(found.tensors) == _EMBEDDING and not any(map(is_head, found.tensors))


def link_with_head(found: ModelFolder, folder: Path) -> None:
    """Fill the empty `folder` with links to all files of `found`, and with a copy of its embedding as the output layer.

    Blocks; call it in a worker thread.

    Raises:
        OSError: the embedding cannot be read, or the disk is full.
    """
    for file in found.path.iterdir():
        if file.name != INDEX:
            (folder / file.name).symlink_to(file)
    write_head(found, folder)


def write_head(found: ModelFolder, folder: Path) -> None:
    """Write a copy of the embedding of `found` as the output layer into `folder`, which holds the files of `found`.

    Blocks, and raises OSError like `link_with_head`.
    """
    embedding = found.tensors[_EMBEDDING]
    flat = np.fromfile(embedding.path, np.uint8, embedding.type.size_bytes, offset=embedding.offset)
    head = TensorFile(folder / HEAD_FILE)
    try:
        head.add(HEAD, embedding.type, flat)
        head.close()
    except BaseException:
        head.abandon()
        raise
    if len({tensor.path for tensor in found.tensors.values()}) > 1:  # engines may read only the files named in an index
        weight_map = {name: tensor.path.name for name, tensor in found.tensors.items()} | {HEAD: HEAD_FILE}
        (folder / INDEX).write_bytes(msgspec.json.encode({"metadata": {}, "weight_map": weight_map}))


def write_model(state: StateDict, folder: Path, base: ModelFolder, check: WeightCheck = "values") -> None:
    """Write tensors as a model into the empty `folder`; copy configuration and tokenizer from `base`.

    Each tensor is checked and written as it arrives, so only one is in memory at a time. An output layer that is tied
    to the embedding is always written, even if `state` lacks it: see `name_tied_head`. Blocks; call it in a worker
    thread.

    Args:
        state: see `StateDict`. Its names match the model's own files.
        folder: an existing, empty folder.
        base: the model that the engines serve.
        check: `values` scans for NaN and infinity; `headers` compares only names, shapes and dtypes.

    Raises:
        WeightsRefused: the tensors do not match the model; see `check_folder`.
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
    """The files of one model, created as needed."""

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


def check_adapter(path: Path, bases: Sequence[ModelFolder], check: Literal["values", "headers"] = "values") -> None:
    """Check that a folder holds a complete LoRA adapter for the model in each of `bases`. Blocks; for worker threads.

    Every module has `lora_A` of shape [r, inputs] and `lora_B` of shape [outputs, r]. If the model has a matrix for
    that module, its shape must be [outputs, inputs]. Other modules are not compared, because engines merge some
    matrices of a model. Unless `check` is `headers`, no element may be NaN or infinite.

    Raises:
        WeightsRefused: a check fails. The message names the tensor, the file or the field.
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


class StagedWeights(NamedTuple):
    """An empty folder for weights, and the models that the weights must match; files are copied from the first."""

    path: Path
    bases: tuple[ModelFolder, ...]
    check: WeightCheck

    def write(self, state: StateDict) -> None:
        """Write `state` into the folder. Blocks. Raises the same errors as `write_model`."""
        try:
            write_model(state, self.path, self.bases[0], self.check)
            if self.bases[1:] and self.check != "none":
                check_folder(self.path, self.bases[1:], "headers")
        except OSError as exc:
            raise WeightsRefused(f"{self.path}: the weights cannot be written there: {exc.strerror}") from exc


async def check_weights(
    folder: str | os.PathLike[str],
    backends: Sequence[UpdatedBackend],
    base: str | os.PathLike[str] | None,
    check: WeightCheck,
) -> Path:
    """Check the weights in `folder` and return its absolute path, because engines have other working directories.

    See `PolicyUpdate.load_folder` for arguments and errors. Runs in a worker thread.
    """

    def run() -> Path:
        path = Path(folder).absolute()
        if check != "none":
            check_folder(path, _visible(path, backends, base), check)
        return path

    return await trio.to_thread.run_sync(run)


async def name_tied_head(
    stores: WeightStores, folder: Path, backends: Sequence[UpdatedBackend], base: str | os.PathLike[str] | None
) -> Path | None:
    """Return a folder like `folder` that also names the tied output layer; None if none is needed.

    The folder is created in shared memory, so it serves only engines on this host. A remote engine that keeps a copy of
    the layer (vLLM on a CPU) needs an original folder that names the layer.

    Raises:
        WeightsRefused: shared memory is full.
    """

    def run() -> Path | None:
        found = ModelFolder.read(folder)
        if not lacks_head(found, _bases(backends, base)) or _elsewhere(backends):
            return None
        linked = stores.new_folder(SHARED_MEMORY)
        try:
            link_with_head(found, linked)
        except OSError as exc:
            raise WeightsRefused(f"{linked}: the output layer cannot be written there: {exc.strerror}") from exc
        return linked

    return await trio.to_thread.run_sync(run)


async def check_adapter_weights(
    folder: str | os.PathLike[str],
    backends: Sequence[UpdatedBackend],
    base: str | os.PathLike[str] | None,
    check: WeightCheck,
) -> Path:
    """Check the adapter in `folder` and return its absolute path. See `check_weights`."""

    def run() -> Path:
        path = Path(folder).absolute()
        if check != "none":
            check_adapter(path, _visible(path, backends, base), check)
        return path

    return await trio.to_thread.run_sync(run)


async def stage_weights(
    stores: WeightStores,
    parent: str | os.PathLike[str] | None,
    backends: Sequence[UpdatedBackend],
    base: str | os.PathLike[str] | None,
    check: WeightCheck,
) -> StagedWeights:
    """Create a folder for weights in a worker thread. See `PolicyUpdate.load_state_dict` for arguments and errors."""

    def run() -> StagedWeights:
        bases = _bases(backends, base)
        if not bases:
            raise WeightsRefused(
                f"{_unseen(backends)}, and configuration and tokenizer are copied from it: name a folder that has it "
                "with base=..."
            )
        if parent is None and (elsewhere := _elsewhere(backends)):
            raise WeightsRefused(
                f"{', '.join(elsewhere)}: not on this host, so it does not see its {SHARED_MEMORY}: name a folder "
                "that all engines see with folder=..."
            )
        where = SHARED_MEMORY if parent is None else Path(parent).absolute()
        return StagedWeights(stores.new_folder(where), bases, check)

    return await trio.to_thread.run_sync(run)


def is_this_host(host: str) -> bool:
    """Return whether a name or address belongs to this host. Blocks while the name is resolved."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _elsewhere(backends: Sequence[UpdatedBackend]) -> list[str]:
    """Return the URLs of the engines that are not on this host."""
    return [each.url for each in backends if not is_this_host(urlsplit(each.url).hostname or "")]


def _visible(
    path: Path, backends: Sequence[UpdatedBackend], base: str | os.PathLike[str] | None
) -> tuple[ModelFolder, ...]:
    """Return the models (at least one) to compare the contents of `path` with."""
    bases = _bases(backends, base)
    if not bases:
        raise WeightsRefused(
            f"{path} can be compared with nothing: {_unseen(backends)}. Name a folder that has it with base=..., or "
            "say check='none'"
        )
    return bases


def _unseen(backends: Sequence[UpdatedBackend]) -> str:
    known = ", ".join(sorted({each.model_folder or "unknown" for each in backends})) or "there is no engine"
    return f"the engines' own model is not visible from here ({known})"


def _bases(backends: Sequence[UpdatedBackend], base: str | os.PathLike[str] | None) -> tuple[ModelFolder, ...]:
    """Return the models that the engines serve, if their folders are visible here; otherwise the model in `base`."""
    if base is not None:
        return (ModelFolder.read(Path(base).absolute()),)
    folders = dict.fromkeys(Path(each.model_folder) for each in backends if each.model_folder)
    here = [folder for folder in folders if folder.is_absolute() and any(folder.glob("*.safetensors"))]
    return tuple(ModelFolder.read(folder) for folder in here[:MAX_MODELS])
