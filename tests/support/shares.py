"""Large tables of cases: a usual run takes a part, and `make e2e ALL=1` takes everything."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

Case = TypeVar("Case")
ALL = bool(os.environ.get("PRORL_ALL_CASES"))


def part_of(cases: Sequence[Case], every: int, first: int = 0) -> list[Case]:
    """Return `cases[first::every]`; all cases with `ALL`."""
    return list(cases if ALL else cases[first::every])
