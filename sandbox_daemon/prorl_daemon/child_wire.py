"""Messages between the daemon and its IPython child: msgpack in frames of `prorl_ipc.framing` over a socket pair."""

from __future__ import annotations

import msgspec

from prorl_ipc.sandbox_calls import CellError, Display

CONTROL_MAX_FRAME_BYTES = 32 * 1024 * 1024
NO_MEMORY_EXIT = 71
"""Exit code of a child without enough memory to answer."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every message: immutable, tagged with its class name, strict."""


class StartChild(_Message, frozen=True):
    """First message to the child: its environment, which replaces its own, and its directory."""

    env: dict[str, str]
    cwd: str


class ChildReady(_Message, frozen=True):
    """The child's answer to `StartChild`, when the first cell can run."""


class RunCell(_Message, frozen=True):
    """Run one cell. Its `result` and traceback are capped to `max_text_bytes` each. The answer repeats `number`."""

    number: int
    code: str
    max_text_bytes: int


class CellDone(_Message, frozen=True):
    """The child's answer to `RunCell`. Everything the cell wrote to the pipes was written before this.

    `number` is the cell's; an answer with another number belongs to another cell.
    """

    result: str | None
    error: CellError | None
    execution_count: int
    dropped_bytes: int
    displays: list[Display] = []
    dropped_displays: int = 0
    number: int = 0
