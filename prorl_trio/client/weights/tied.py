"""A folder that names its tied output layer: vLLM on a CPU keeps a copy of that, which it renews by its name alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from prorl_trio.client.weights.model_folder import INDEX, embedding_of, is_head
from prorl_trio.client.weights.safetensors import TensorFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prorl_trio.client.weights.model_folder import ModelFolder

HEAD: Final = "lm_head.weight"
HEAD_FILE: Final = "model-tied-head.safetensors"
_EMBEDDING: Final = "model.embed_tokens.weight"
"""The name whose output layer is `HEAD`, in every model that has it."""


def lacks_head(found: ModelFolder, bases: Sequence[ModelFolder]) -> bool:
    """Return whether the model ties its output layer to the embedding, and the folder has the embedding alone."""
    tied = found.tied or any(base.tied for base in bases)
    return tied and embedding_of(found.tensors) == _EMBEDDING and not any(map(is_head, found.tensors))


def link_with_head(found: ModelFolder, folder: Path) -> None:
    """Fill the empty `folder` with links to all files of `found`, and its embedding again, as the output layer.

    Blocks; for worker threads.

    Raises:
        OSError: the embedding cannot be read, or the disk is full.
    """
    for file in found.path.iterdir():
        if file.name != INDEX:
            (folder / file.name).symlink_to(file)
    write_head(found, folder)


def write_head(found: ModelFolder, folder: Path) -> None:
    """Write the embedding of `found` again, as the output layer, into `folder`, which has the files of `found`.

    Blocks, and raises OSError, as `link_with_head`.
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
    if len({tensor.path for tensor in found.tensors.values()}) > 1:  # engines may read what an index names alone
        weight_map = {name: tensor.path.name for name, tensor in found.tensors.items()} | {HEAD: HEAD_FILE}
        (folder / INDEX).write_bytes(msgspec.json.encode({"metadata": {}, "weight_map": weight_map}))
