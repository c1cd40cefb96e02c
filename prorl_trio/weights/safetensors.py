"""Files of tensors in the safetensors format, read and written by their headers.

A file is an unsigned 64-bit little-endian length N, N bytes of JSON, and the tensors' bytes. The JSON maps each name to
`dtype`, `shape` and `data_offsets` (begin and end, counted from the end of the JSON); `__metadata__` maps strings to
strings. Elements are little-endian, in row-major order, and the tensors fill the rest of the file without a gap.
See https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from prorl_trio.weights.errors import WeightsRefused

if TYPE_CHECKING:
    from pathlib import Path

    from numpy import ndarray


MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the JSON header, as in the official safetensors library."""
DTYPE_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes per element, by dtype."""
HEADER_ROOM_BYTES: Final = 1024 * 1024
"""Space reserved for the header of a file written here: enough for about 8,000 tensors."""

StateDict: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]] | Iterable[tuple[str, Any]]"
"""A state dict, a list of state dicts (shards with different names), or an iterable of (name, tensor) pairs."""

_NUMPY: Final = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint64): "U64",
    np.dtype(np.uint32): "U32",
    np.dtype(np.uint16): "U16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}
_TORCH: Final = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


def named_tensors(state: StateDict) -> Iterator[tuple[str, Any]]:
    """Yield each name with its tensor, one at a time.

    Raises:
        WeightsRefused: a name occurs twice, or an item is not a pair of a name and a tensor.
    """
    seen: set[str] = set()
    for name, tensor in _pairs(state):
        if not isinstance(name, str):
            raise WeightsRefused(f"a state dict has names (str) and tensors; got a name of type {type(name).__name__}")
        if name in seen:
            raise WeightsRefused(f"{name} comes twice", name)
        seen.add(name)
        yield name, tensor


def raw_tensor(name: str, tensor: Any) -> tuple[TensorType, np.ndarray]:
    """Return the type of a tensor and its bytes: a flat uint8 array in row-major order, copied only if necessary.

    Raises:
        WeightsRefused: the value is not a torch tensor or numpy array, lacks data, or is a part of a tensor.
    """
    if isinstance(tensor, np.ndarray):
        return _raw_array(name, tensor)
    torch = sys.modules.get("torch")  # whoever owns a torch tensor has imported torch
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _raw_torch(name, tensor, torch)
    raise WeightsRefused(f"{name} is neither a torch tensor nor a numpy array, but {type(tensor).__name__}", name)


def _pairs(state: StateDict) -> Iterator[tuple[Any, Any]]:
    items: Iterable[Any] = [state] if isinstance(state, Mapping) else state
    for item in items:
        if isinstance(item, Mapping):
            yield from item.items()
        elif isinstance(item, tuple | list) and len(item) == 2:
            yield item[0], item[1]
        else:
            raise WeightsRefused(f"a state dict, or pairs of a name and a tensor; got {type(item).__name__}")


def _raw_array(name: str, array: np.ndarray) -> tuple[TensorType, np.ndarray]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    dtype = _NUMPY.get(little.dtype)
    if dtype is None:
        raise WeightsRefused(f"{name} is a numpy array of {array.dtype}, which no engine loads", name)
    kind = TensorType(dtype, tuple(array.shape))
    return kind, np.ascontiguousarray(little).reshape(-1).view(np.uint8)


def _raw_torch(name: str, tensor: Any, torch: Any) -> tuple[TensorType, np.ndarray]:
    dtype = _TORCH.get(str(tensor.dtype))
    if dtype is None:
        raise WeightsRefused(f"{name} is a tensor of {tensor.dtype}, which no engine loads", name)
    if hasattr(tensor, "full_tensor"):
        raise WeightsRefused(f"{name} is a shard (DTensor): call its full_tensor() on every rank, and give that", name)
    if tensor.is_meta:
        raise WeightsRefused(f"{name} is on the meta device and has no data", name)
    kind = TensorType(dtype, tuple(tensor.shape))
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return kind, flat.view(torch.uint8).numpy()


class TensorType(NamedTuple):
    """The shape of a tensor, and the name of its dtype in the format."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class StoredTensor(NamedTuple):
    """The location of a tensor: its file, the offset of its first byte, and its type."""

    path: Path
    offset: int
    type: TensorType


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_HEADER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY: Final = msgspec.json.Decoder(_Entry)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the file by name. Reads only the header and the file size.

    Raises:
        WeightsRefused: the file is unreadable, truncated, or not in the safetensors format.
    """
    try:
        with path.open("rb") as file:
            total_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if total_bytes < 8 or length > min(MAX_HEADER_BYTES, total_bytes - 8):
                raise WeightsRefused(f"{path}: it has {total_bytes} bytes and is no safetensors file, or cut short")
            header = _HEADER.decode(file.read(length))
        tensors = {
            name: _stored(path, 8 + length, name, _ENTRY.decode(raw))
            for name, raw in header.items()
            if name != "__metadata__"
        }
    except OSError as exc:
        raise WeightsRefused(f"{path}: it cannot be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise WeightsRefused(f"{path}: its header is not of the safetensors format: {exc}") from exc
    _check_gapless(path, tensors, 8 + length, total_bytes)
    return tensors


class TensorFile:
    """A file to which tensors are appended; it is complete after `close`. Blocks; use it in worker threads.

    The header is written last, into space reserved before the first tensor. So tensors need not be buffered, and their
    number need not be known in advance. The rest of that space is filled with blanks, which the format allows.
    """

    def __init__(self, path: Path) -> None:
        """Create the file. Raises OSError if it exists or cannot be created."""
        self._path = path
        self._entries: dict[str, dict[str, object]] = {}
        self._left = HEADER_ROOM_BYTES - len(_encode({}))
        self.size_bytes = 0
        self._file = path.open("xb")
        self._file.seek(8 + HEADER_ROOM_BYTES)

    def fits(self, name: str, kind: TensorType) -> bool:
        """Return whether the header has space for one more tensor."""
        return len(_encode({name: self._entry(kind)})) <= self._left

    def add(self, name: str, kind: TensorType, flat: ndarray) -> None:
        """Write a tensor that `fits`; `flat` is its bytes, uint8, row-major. Raises OSError if the disk is full."""
        assert flat.nbytes == kind.size_bytes, (name, kind, flat.nbytes)
        self._entries[name] = self._entry(kind)
        self._left -= len(_encode({name: self._entries[name]}))
        self._file.write(flat.data)
        self.size_bytes += kind.size_bytes

    def close(self) -> None:
        """Write the header and close the file. Raises OSError if the disk is full."""
        with self._file:
            self._file.seek(0)
            self._file.write(HEADER_ROOM_BYTES.to_bytes(8, "little"))
            self._file.write(_encode(self._entries).ljust(HEADER_ROOM_BYTES))

    def abandon(self) -> None:
        """Close the file without a header, which leaves it unreadable. Has no effect after `close`."""
        self._file.close()

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors written so far."""
        return list(self._entries)

    def _entry(self, kind: TensorType) -> dict[str, object]:
        offsets = [self.size_bytes, self.size_bytes + kind.size_bytes]
        return {"dtype": kind.dtype, "shape": list(kind.shape), "data_offsets": offsets}


def _encode(entries: dict[str, dict[str, object]]) -> bytes:
    return msgspec.json.encode({"__metadata__": {"format": "pt"}, **entries})


def _stored(path: Path, start: int, name: str, entry: _Entry) -> StoredTensor:
    if entry.dtype not in DTYPE_BYTES:
        raise WeightsRefused(f"{path}: {name} has the unknown dtype {entry.dtype}", name)
    if any(length < 0 for length in entry.shape):
        raise WeightsRefused(f"{path}: {name} has the shape {entry.shape}", name)
    kind = TensorType(entry.dtype, tuple(entry.shape))
    begin, end = entry.data_offsets
    if begin < 0 or end - begin != kind.size_bytes:
        raise WeightsRefused(f"{path}: {name} is {kind}, which is not the {end - begin} bytes that it has", name)
    return StoredTensor(path, start + begin, kind)


def _check_gapless(path: Path, tensors: dict[str, StoredTensor], start: int, total_bytes: int) -> None:
    """Check that the tensors fill the file. A truncated or unfinished file is too short."""
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].type.size_bytes)):
        if tensor.offset != end:
            raise WeightsRefused(f"{path}: {name} begins at byte {tensor.offset}, and not at {end}", name)
        end += tensor.type.size_bytes
        if end > total_bytes:
            raise WeightsRefused(f"{path}: it is cut short at {total_bytes} bytes: {name} ends at {end}", name)
    if end != total_bytes:
        raise WeightsRefused(f"{path}: it has {total_bytes} bytes, and its tensors end at {end}")
