"""One human-readable trajectory: its segments as lanes, with a mark and a colour for each kind of token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from prorl_ipc.portable_text import printable
from prorl_trio.types.models import ASIDE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.types.models import ChatMessage, Outcome, Segment, Trajectory, Turn

LANE_CELLS: Final = 4
"""Indentation of a sub-agent relative to its parent, in cells."""


class Kind(NamedTuple):
    """A kind of tokens: its mark in the margin, which works without colours, its style, and its meaning."""

    mark: str
    style: str
    meaning: str


SAMPLED: Final = Kind(">", "bold green", "sampled by the policy")
GIVEN: Final = Kind("|", "cyan", "given to it: messages and tool output")
PROMPT: Final = Kind(".", "dim", "the prompt")
SHARED: Final = Kind("=", "dim", "shared with the parent, shown there")
KINDS: Final = (SAMPLED, GIVEN, PROMPT, SHARED)


def render_trajectory(outcome: Outcome, chat_format: ChatFormat | None, *, sides: bool = False) -> Group:
    """Return an outcome's trajectory, segment by segment. Sub-agents and side calls are indented below their parent.

    Without the model's `chat_format` the tokens cannot be decoded, and the recorded messages and turns are shown
    instead. Characters without a shape, such as control characters, are escaped. With `sides`, the messages before each
    turn are next to the tokens that the engine received for it.
    """
    details = msgspec.json.encode(outcome.details).decode()
    parts: list[RenderableType] = [
        Text(printable(f"{outcome.job_id}  {outcome.status}  reward {outcome.reward}  {details}"), style="bold")
    ]
    if outcome.error:
        parts.append(Text(printable(f"{outcome.cause}: {outcome.error}"), style="red"))
    trajectory = outcome.trajectory
    if trajectory is None:
        return Group(*parts, Text("no trajectory was recorded"))
    parts.append(Text("  ").join(Text(f"{kind.mark} {kind.meaning}", style=kind.style) for kind in KINDS))
    lanes = _lanes(trajectory.segments)
    for index, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == index]
        body = _sides(segment, turns, chat_format) if sides else _lines(segment, turns, chat_format)
        lane = Group(Text(""), _title(index, trajectory), body)
        parts.append(Padding(lane, (0, 0, 0, LANE_CELLS * lanes[index])))
    parts += [Text(""), Text(_end(trajectory), style="bold")]
    return Group(*parts)


def _lanes(segments: Sequence[Segment]) -> list[int]:
    """Return for each segment the number of agents above its own."""
    lanes: list[int] = []
    for index, segment in enumerate(segments):
        above = lanes[segment.parent] if segment.parent is not None and segment.parent < index else 0
        lanes.append(above + (segment.reason in ASIDE))
    return lanes


def _title(index: int, trajectory: Trajectory) -> Text:
    segment = trajectory.segments[index]
    said = f"segment {index} of {len(trajectory.segments)}, {len(segment)} tokens"
    if segment.parent is not None:
        said += f"; {segment.reason} of segment {segment.parent}, whose first {segment.shared} tokens it shares"
    who = " ".join(filter(None, (segment.agent_type, segment.agent)))
    return Text(printable(said + (f"; by {who}" if who else "")), style="bold underline")


def _end(trajectory: Trajectory) -> str:
    said = f"stopped: {trajectory.stop_reason}, {len(trajectory.turns)} turns"
    sampled = sum(int(segment.loss_mask.sum()) for segment in trajectory.segments)
    said += f"; {sampled} sampled tokens delivered, {trajectory.undelivered_tokens} not"
    if trajectory.echoes:
        said += "; echoes: " + ", ".join(f"{count} {how}" for how, count in trajectory.echoes.items())
    return said


def _lines(segment: Segment, turns: Sequence[Turn], chat_format: ChatFormat | None) -> Table:
    """Return the segment as it was read and sampled, with the mark of its kind before each run of tokens."""
    lines = Table.grid(padding=(0, 1))
    for kind, text in _runs(segment, chat_format) if chat_format is not None else _spoken(turns):
        lines.add_row(Text(kind.mark, style=kind.style), Text(printable(text.rstrip("\n")), style=kind.style))
    return lines


def _runs(segment: Segment, chat_format: ChatFormat) -> Iterator[tuple[Kind, str]]:
    ids, mask = segment.token_ids, segment.loss_mask
    if segment.shared:
        yield SHARED, f"{segment.shared} tokens"
    edges = (np.flatnonzero(np.diff(mask[segment.shared :])) + segment.shared + 1).tolist()
    starts, ends = [segment.shared, *edges], [*edges, len(ids)]
    for start, end in zip(starts, ends, strict=True):
        kind = SAMPLED if mask[start : start + 1].any() else GIVEN if start else PROMPT
        yield kind, chat_format.decode(ids[start:end].tolist())


def _spoken(turns: Sequence[Turn]) -> Iterator[tuple[Kind, str]]:
    for turn in turns:
        for message in turn.messages:
            yield GIVEN, _as_text(message)
        yield SAMPLED, turn.text
        for observation in turn.observations:
            yield GIVEN, observation


def _sides(segment: Segment, turns: Sequence[Turn], chat_format: ChatFormat | None) -> Table:
    """Return a row for each turn: the messages before it, next to the tokens that the engine newly received.

    A third column contains the sampled text.
    """
    table = Table("said", "received by the engine", "sampled", box=None, padding=(0, 2, 1, 0), header_style="bold dim")
    at, before = segment.shared, list[str]()
    for turn in turns:
        received = segment.token_ids[at : turn.completion_start].tolist()
        decoded = f"{len(received)} tokens" if chat_format is None else chat_format.decode(received)
        table.add_row(
            Text(printable("\n".join([*before, *map(_as_text, turn.messages)])), style=GIVEN.style),
            Text(printable(decoded), style=GIVEN.style if at else PROMPT.style),
            Text(printable(turn.text), style=SAMPLED.style),
        )
        at, before = turn.completion_end, turn.observations
    return table


def _as_text(message: ChatMessage) -> str:
    name = f" {message.name}" if message.name else ""
    calls = "".join(f"\n{call.name}({msgspec.json.encode(call.arguments).decode()})" for call in message.tool_calls)
    return f"{message.role}{name}: {message.content}{calls}"
