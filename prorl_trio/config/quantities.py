"""The numbers a configuration may hold, so that a wrong one is reported with its field when the file is read.

Every number has an upper bound that one machine can bear: a typo must not hang a node, at its start or at a reload. A
duration is finite: there is no way to have no limit, but a year is one. Where a small number cannot work, the lower
bound is the smallest that can.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

YEAR_S: Final = 366 * 24 * 3600.0
MIN_S: Final = 0.001
"""No step of a node, and no timer of its loop, is shorter."""
MIN_MESSAGE_BYTES: Final = 64 * 1024
"""Room for the messages of a protocol themselves, with a short outcome."""
MAX_WEIGHT: Final = 1e6
MAX_BYTES: Final = 2**50
"""1 PiB: above any disk or memory of one machine, and far from what overflows when sizes are added up."""
MAX_OPEN_FILES: Final = 1_048_576
"""The usual `fs.nr_open` of Linux, above which no process may set its own limit."""

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
"""A number of jobs, results or attempts. A job that waits takes 5 KB, so that a million fill 5 GB."""
Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
"""The same where 0 has a meaning, which the field states."""
Workers = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
"""A number of rollouts in progress. Each has a task, a sandbox with five descriptors, and connections: the node checks
the sum against the machine's limit of descriptors as well."""
Processes = Annotated[int, msgspec.Meta(ge=1, le=1_000)]
"""A number of processes or threads that may start at any moment, some 50 MB each."""
ProcessesOrZero = Annotated[int, msgspec.Meta(ge=0, le=1_000)]
Connections = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
"""A number of connections at once, with a descriptor and buffers each."""
Bytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
BytesOrZero = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
MessageBytes = Annotated[int, msgspec.Meta(ge=MIN_MESSAGE_BYTES, le=2**32 - 1)]
"""The size of one message, which is in memory as a whole, and which msgpack counts with 32 bits."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A number of tokens or characters: positions are int32. 0 has a meaning, which the field states."""
Seconds = Annotated[float, msgspec.Meta(ge=MIN_S, le=YEAR_S)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=YEAR_S)]
Weight = Annotated[float, msgspec.Meta(gt=0, le=MAX_WEIGHT)]
"""A share relative to 1: one side gets a million times as much at most."""
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
"""0: any that is free."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a configuration file: immutable; an unknown key is an error."""
