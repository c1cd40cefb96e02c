"""The news of a run: lines of `events.jsonl`, written in the trainer's process, read by the terminal's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from prorl_launch.learning.record import Evaluation, StepRecord

if TYPE_CHECKING:
    from pathlib import Path


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    """A step of supervised training on demonstrations. `loss` is in nats a token."""

    step: int
    of: int
    loss: float


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A policy update."""

    record: StepRecord
    of: int


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    """The held-out problems were solved."""

    record: Evaluation


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The run ended before its last step, for a good reason."""

    step: int
    why: str


Event = Shown | Stepped | Evaluated | Ended
EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class EventLog:
    """Appends events to a file, a line each, flushed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        """Append `event`."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
