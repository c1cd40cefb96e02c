"""A model folder: the types of its tensors and its configuration, without reading tensor data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_ipc.wire import UNDECODABLE
from prorl_trio.types.model_facts import architecture_of, differing_field
from prorl_trio.weights.errors import WeightsRefused
from prorl_trio.weights.safetensors import read_header

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from prorl_trio.weights.safetensors import StoredTensor, TensorType

INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
MAX_JSON_BYTES: Final = 64 * 1024 * 1024

FLOATS: Final = frozenset({"F32", "BF16", "F16"})
"""Engines convert between these dtypes while loading."""
_HEAD: Final = "lm_head.weight"
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


class ModelFolder(NamedTuple):
    """The tensors of a model by name, and its `config.json` (empty if the folder lacks one)."""

    path: Path
    tensors: dict[str, StoredTensor]
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """Read the headers of the safetensors files, the index and the configuration. Blocks; for worker threads.

        Raises:
            WeightsRefused: a file is unreadable, damaged or missing, or a tensor appears in two files.
        """
        if not path.is_dir():
            raise WeightsRefused(f"{path}: no such folder is visible from here")
        files = sorted(path.glob("*.safetensors"))
        index = read_json(path / INDEX).get("weight_map", {})
        if index:
            files = [path / name for name in sorted(set(index.values()))]
        if not files:
            raise WeightsRefused(f"{path}: it has no *.safetensors file")
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in read_header(file).items():
                if name in tensors:
                    raise WeightsRefused(f"{path}: {name} is in {tensors[name].path.name} and in {file.name}", name)
                tensors[name] = tensor
        for name, file_name in index.items():
            if name not in tensors or tensors[name].path.name != file_name:
                raise WeightsRefused(f"{path}: {INDEX} says that {name} is in {file_name}, and it is not", name)
        return cls(path, tensors, read_json(path / CONFIG))

    @property
    def types(self) -> dict[str, TensorType]:
        """Return the type of each tensor by name."""
        return {name: tensor.type for name, tensor in self.tensors.items()}

    @property
    def tied(self) -> bool:
        """Return whether the output layer is the input embedding, so that only one of the two must be stored."""
        return architecture_of(self.config).get("tie_word_embeddings") is True


def embedding_of(names: Iterable[str]) -> str | None:
    """Return the input embedding among `names`."""
    return next((name for name in names if name.endswith(_EMBEDDINGS)), None)


def is_head(name: str) -> bool:
    """Return whether this is the name of an output layer, which may be tied to the input embedding."""
    return name == _HEAD or name.endswith("." + _HEAD)


def unknown_name(name: str, base: ModelFolder) -> str:
    """Return why the model has no tensor of this name; empty if it has the tensor or its tied counterpart."""
    if name in base.tensors or (base.tied and (is_head(name) or embedding_of([name]))):
        return ""
    ends = next((known for known in base.tensors if name.endswith("." + known) or known.endswith("." + name)), None)
    hint = f"; it has {ends}: rename the tensors to its names" if ends else ""
    return f"the engines' model in {base.path} has no tensor {name}{hint}"


def missing_names(names: Iterable[str], base: ModelFolder) -> list[str]:
    """Return the names of the model's tensors that `names` lacks. A tied output layer may be missing."""
    given = set(names)
    head_is_there = base.tied and embedding_of(given) is not None
    return [name for name in base.tensors if name not in given and not (head_is_there and is_head(name))]


def compare_type(name: str, kind: TensorType, base: ModelFolder) -> None:
    """Check that a tensor's shape and dtype match the model. Tensors unknown to the model are ignored.

    Raises:
        WeightsRefused: the shape or the dtype differs.
    """
    known = base.tensors.get(name)
    if known is None:
        return
    if kind.shape != known.type.shape:
        raise WeightsRefused(
            f"{name} has the shape {list(kind.shape)}; in the engines' model in {base.path} it has "
            f"{list(known.type.shape)}{_vocabulary(name)}",
            name,
        )
    if kind.dtype != known.type.dtype and not {kind.dtype, known.type.dtype} <= FLOATS:
        raise WeightsRefused(
            f"{name} is {kind.dtype}; in the engines' model in {base.path} it is {known.type.dtype}, and engines "
            f"convert between {', '.join(sorted(FLOATS))} only",
            name,
        )


def compare_configs(path: Path, config: dict[str, Any], base: ModelFolder) -> None:
    """Check that `config`, of the model in `path`, has the architecture of `base`. See `architecture_of`.

    Raises:
        WeightsRefused: a field differs.
    """
    ours, theirs = architecture_of(config), architecture_of(base.config)
    if (field := differing_field(ours, theirs)) is not None:
        raise WeightsRefused(
            f"{path / CONFIG} has {field} {ours[field]!r}; the engines' model in {base.path} has {theirs[field]!r}: "
            "these are weights of another model"
        )


def _vocabulary(name: str) -> str:
    if embedding_of([name]) or is_head(name):
        return ": the trainer's vocabulary has another size (is its tokenizer another one, or were tokens added?)"
    return ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file, or an empty one if the file does not exist."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES)
        return msgspec.json.decode(content, type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise WeightsRefused(f"{path}: it cannot be read: {exc.strerror}") from exc
    except UNDECODABLE as exc:
        raise WeightsRefused(f"{path}: it is no JSON object: {exc}") from exc
