"""The numbers a configuration may hold, so that a wrong one is told with its field when the file is read.

A duration is finite: there is no way to have no limit, but a year is one.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

__all__ = ["YEAR_S", "Amount", "Count", "Port", "Seconds", "SecondsOrZero"]

YEAR_S: Final = 366 * 24 * 3600.0

Count = Annotated[int, msgspec.Meta(ge=1)]
"""A number of workers, places or bytes: at least one."""
Amount = Annotated[int, msgspec.Meta(ge=0)]
"""The same where 0 has a meaning, which the field says."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=YEAR_S)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=YEAR_S)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
"""0: any that is free."""
