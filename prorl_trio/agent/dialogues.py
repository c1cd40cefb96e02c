"""The dialogues of one rollout as one trajectory: that of the task's own agent, and those of agents it asked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.chat.conversation import Conversation
    from prorl_trio.types.models import Segment, Turn

MAX_DIALOGUES: Final = 1024
"""The most dialogues of one rollout. A policy that asks for more agents than that asks for ever."""


class _Dialogue(NamedTuple):
    """`asker` and `segment`: which dialogue it was asked in, and in which segment of that; None for the first."""

    conversation: Conversation
    asker: int | None
    segment: int


class Dialogues:
    """Dialogues in the order in which they were begun, 0 being the task's own."""

    def __init__(self) -> None:
        self._all: list[_Dialogue] = []
        self._turns: list[tuple[int, Turn]] = []
        self._versions: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, conversation: Conversation, asker: int | None = None) -> int:
        """Add a new dialogue, asked in the present segment of the dialogue `asker`, and return its number."""
        segment = 0 if asker is None else self._all[asker].conversation.segment
        self._all.append(_Dialogue(conversation, asker, segment))
        return len(self._all) - 1

    def record(self, turn: Turn, dialogue: int = 0) -> None:
        """Keep a turn of `dialogue`, whose segment is counted within it."""
        self._turns.append((dialogue, turn))

    def note_version(self, policy_version: str) -> None:
        """Note that tokens were sampled under that version."""
        self._versions[policy_version] = None

    @property
    def policy_versions(self) -> list[str]:
        """Every version that tokens were sampled under, each once, in the order of first use."""
        return list(self._versions)

    @property
    def prefix_breaks(self) -> int:
        """Return the sum over all dialogues."""
        return sum(each.conversation.prefix_breaks for each in self._all)

    @property
    def drift_tokens(self) -> int:
        """Return the sum over all dialogues."""
        return sum(each.conversation.drift_tokens for each in self._all)

    def assemble(self, segments_of: Callable[[Conversation], list[Segment]]) -> tuple[list[Segment], list[Turn]]:
        """The segments of all dialogues one after the other, and the turns in the order they were recorded.

        Turns, and parents of segments, are numbered through. The first segment of a dialogue that was asked has the one
        it was asked in as its parent.
        """
        segments: list[Segment] = []
        firsts: list[int] = []
        for conversation, asker, asked_in in self._all:
            first = len(segments)
            firsts.append(first)
            for segment in segments_of(conversation):
                if asker is not None and segment.parent is None:
                    parent, reason = firsts[asker] + asked_in, "sub_agent"
                    segment = msgspec.structs.replace(segment, parent=parent, reason=reason)
                elif first and segment.parent is not None:
                    segment = msgspec.structs.replace(segment, parent=first + segment.parent)
                segments.append(segment)
        return segments, [_moved(turn, firsts[dialogue]) for dialogue, turn in self._turns]


def _moved(turn: Turn, first: int) -> Turn:
    return msgspec.structs.replace(turn, segment=first + turn.segment) if first else turn
