"""Sweeps that take minutes: a run does one part of each, another one every day; `make soak` does them whole.

`PRORL_SWEEP=all` has a run do all parts, and a number that part: the report of a run names its number.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PARTS", "part", "rotated"]

ItemT = TypeVar("ItemT")

PARTS: Final = 4
DAY_S: Final = 86_400


def part() -> int | None:
    """Return the number of this run's part, from 0 to `PARTS` - 1; None: it does all."""
    wanted = os.environ.get("PRORL_SWEEP", "")
    if wanted == "all":
        return None
    return (int(wanted) if wanted else int(time.time() / DAY_S)) % PARTS


def rotated(items: Sequence[ItemT]) -> list[ItemT]:
    """Return this run's part of the items: each `PARTS`-th one."""
    number = part()
    return list(items) if number is None else list(items[number::PARTS])
