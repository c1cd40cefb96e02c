"""Cases of which a usual run takes a part, as all of them take minutes: `make e2e ALL=1` takes all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

Case = TypeVar("Case")
ALL = bool(os.environ.get("PRORL_ALL_CASES"))


def part_of(cases: Sequence[Case], every: int, first: int = 0) -> list[Case]:
    """Return one of `every` so many cases, from the one with index `first` (below `every`) on; or all of them."""
    return list(cases if ALL else cases[first::every])
