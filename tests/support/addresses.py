"""Addresses of arrays, to prove that none was copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from prorl_ipc.arena_memory import ArenaMemory


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where in this process's memory `array` begins."""
    return int(array.__array_interface__["data"][0])


def offset_in(memory: ArenaMemory, array: npt.NDArray[Any]) -> int:
    """Return where `array` begins, counted from the beginning of an arena."""
    return address_of(array) - address_of(np.frombuffer(memory.mapping, np.uint8, 1))
