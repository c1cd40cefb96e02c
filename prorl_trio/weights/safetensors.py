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
"""Limit of the JSON, as the format's own library has it."""
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
"""Bytes of one element, by dtype."""
HEADER_ROOM_BYTES: Final = 1024 * 1024
"""Room for the header of a file that is written here: enough for some 8,000 tensors."""

StateDict: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]] | Iterable[tuple[str, Any]]"
"""A state dict, a list of them (shards that have different names), or pairs of name and tensor as they come."""

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
    """Yield each name with its tensor, one after the other.

    Raises:
        WeightsRefused: a name comes twice, or an item is no pair of a name and a tensor.
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
    """Return the type of a tensor, and its bytes: a flat array of uint8 in row-major order, copied only where needed.

    Raises:
        WeightsRefused: it is no torch tensor or numpy array, has no data, or is a part of a tensor.
    """
    if isinstance(tensor, np.ndarray):
        return _raw_array(name, tensor)
    torch = sys.modules.get("torch")  # who has a tensor of it has imported it
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
    """The dtype, by its name in the format, and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the bytes that it takes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class StoredTensor(NamedTuple):
    """The place of a tensor: its file, its first byte there, and its type."""

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
    """Return the tensors of the file by name. Reads its header and its size, no tensor.

    Raises:
        WeightsRefused: it cannot be read, is cut short, or is not of the format.
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
    """A file that tensors are written to as they come; whole after `close`. Blocks; for worker threads.

    The header is written last, into room that was left for it before the first tensor: so no tensor is held back, and
    the number of them need not be known before. What a header does not need of that room is filled with spaces, as the
    format allows.
    """

    def __init__(self, path: Path) -> None:
        """Make the file. Raises OSError: it exists, or cannot be made."""
        self._path = path
        self._entries: dict[str, dict[str, object]] = {}
        self._left = HEADER_ROOM_BYTES - len(_encode({}))
        self.size_bytes = 0
        self._file = path.open("xb")
        self._file.seek(8 + HEADER_ROOM_BYTES)

    def fits(self, name: str, kind: TensorType) -> bool:
        """Return whether the header has room for one more."""
        return len(_encode({name: self._entry(kind)})) <= self._left

    def add(self, name: str, kind: TensorType, flat: ndarray) -> None:
        """Write a tensor that `fits`; `flat` is its bytes, uint8, row-major. Raises OSError: the disk is full."""
        assert flat.nbytes == kind.size_bytes, (name, kind, flat.nbytes)
        self._entries[name] = self._entry(kind)
        self._left -= len(_encode({name: self._entries[name]}))
        self._file.write(flat.data)
        self.size_bytes += kind.size_bytes

    def close(self) -> None:
        """Write the header and close the file. Raises OSError: the disk is full."""
        with self._file:
            self._file.seek(0)
            self._file.write(HEADER_ROOM_BYTES.to_bytes(8, "little"))
            self._file.write(_encode(self._entries).ljust(HEADER_ROOM_BYTES))

    def abandon(self) -> None:
        """Close the file without its header; it cannot be read then. Does nothing after `close`."""
        self._file.close()

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors that are in it."""
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
    """Check that the tensors fill the file: one that is still being written, or was cut, is too short."""
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].type.size_bytes)):
        if tensor.offset != end:
            raise WeightsRefused(f"{path}: {name} begins at byte {tensor.offset}, and not at {end}", name)
        end += tensor.type.size_bytes
        if end > total_bytes:
            raise WeightsRefused(f"{path}: it is cut short at {total_bytes} bytes: {name} ends at {end}", name)
    if end != total_bytes:
        raise WeightsRefused(f"{path}: it has {total_bytes} bytes, and its tensors end at {end}")
