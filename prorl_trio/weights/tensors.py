"""Tensors that trainers have in hand, as dtype, shape and bytes: numpy arrays and torch tensors, without torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from prorl_trio.weights.errors import WeightsRefused
from prorl_trio.weights.safetensors import TensorType

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
