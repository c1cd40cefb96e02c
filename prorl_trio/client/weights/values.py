"""Elements of tensors as bytes: NaN and infinity found by their bit patterns, without the tensor's own dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from prorl_trio.client.weights.safetensors import StoredTensor

CHUNK_BYTES: Final = 8 * 1024 * 1024
"""Bytes looked at at once: the memory that a check takes."""

_EXPONENTS: Final[dict[str, tuple[np.dtype[Any], int]]] = {
    "F64": (np.dtype("<u8"), 0x7FF0_0000_0000_0000),
    "F32": (np.dtype("<u4"), 0x7F80_0000),
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F8_E5M2": (np.dtype("u1"), 0x7C),
    "F8_E4M3": (np.dtype("u1"), 0x7F),
}
"""By dtype: bits that are all set in NaN and infinity, and in nothing else (IEEE 754; E4M3 has a NaN alone). Integers,
and the scales of E8M0, are always finite here."""


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
    """Return whether no element of a tensor in a file is NaN or infinite. Raises OSError: it cannot be read."""
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
