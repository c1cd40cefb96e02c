"""The control: what becomes of sampled tokens in a client that keeps text and encodes it again, as many do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perf.tokens_dialogue import OPENING, TOOLS, draw_turns
from prorl_trio.chat.conversation import Conversation
from prorl_trio.testing.fake_sampling import default_script
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prorl_trio.chat.format import ChatFormat

__all__ = ["Drift", "Sampled", "drift_of", "sampled_at_random"]

TURNS = 6
"""Turns of a dialogue with the fake engine."""


class Sampled(msgspec.Struct, frozen=True):
    """A turn of a trajectory: the prompt that the policy got, the ids it sampled, and the prompt of the next turn.

    The next prompt is as recorded; without it the turn was the last.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    next_prompt_ids: list[int]


class Drift(msgspec.Struct, frozen=True):
    """Counts of drift, over `turns` with a turn after them.

    Attributes:
        turns: that were looked at.
        ours: those whose sampled ids, or anything before them, are others in the recorded next prompt.
        retokenised: those whose sampled ids are others once they have been text.
        tokens: sampled in all of them.
        retokenised_tokens: sampled tokens from the first on that differs, in the turns where one does.
    """

    turns: int
    ours: int
    retokenised: int
    tokens: int
    retokenised_tokens: int

    @property
    def ours_rate(self) -> float:
        """Share of turns."""
        return self.ours / max(1, self.turns)

    @property
    def retokenised_rate(self) -> float:
        """Share of turns."""
        return self.retokenised / max(1, self.turns)


def drift_of(chat: ChatFormat, turns: Iterable[Sampled]) -> Drift:
    """Count over recorded turns. A text is put where it stood: after its prompt's end, before what ends the turn."""
    counted = ours = retokenised = tokens = retokenised_tokens = 0
    for turn in turns:
        if not turn.next_prompt_ids:
            continue
        counted += 1
        tokens += len(turn.completion_ids)
        so_far = turn.prompt_ids + turn.completion_ids
        ours += turn.next_prompt_ids[: len(so_far)] != so_far
        lost = _differing_tokens(turn.completion_ids, _encoded_again(chat, turn))
        retokenised += lost > 0
        retokenised_tokens += lost
    return Drift(counted, ours, retokenised, tokens, retokenised_tokens)


def sampled_at_random(chat: ChatFormat, seed: int) -> list[Sampled]:
    """A dialogue with the fake engine's policy, which samples any token of the vocabulary alike."""
    script = default_script(chat.vocab_size, chat.end_of_turn_id)
    dialogue = draw_turns(seed)
    conversation = Conversation(chat, [*OPENING, ChatMessage(role="user", content=next(dialogue).result)], TOOLS)
    prompt_ids = conversation.prompt_token_ids()
    turns = []
    for _ in range(TURNS):
        completion_ids, logprobs, _reason = script(prompt_ids)
        conversation.add_completion(completion_ids, logprobs)
        conversation.add_messages([ChatMessage(role="tool", content=next(dialogue).result, name="bash")])
        next_ids = conversation.prompt_token_ids()
        turns.append(Sampled(prompt_ids, completion_ids, next_ids))
        prompt_ids = next_ids
    return turns


def _encoded_again(chat: ChatFormat, turn: Sampled) -> list[int]:
    """The completion's ids after a round trip through text, which stands after what opens an assistant's turn."""
    added = set(chat.codec.added_ids.values())
    start = max(index for index, token_id in enumerate(turn.prompt_ids) if token_id in added)
    opening = turn.prompt_ids[start:]
    ids = chat.codec.encode(chat.decode([*opening, *turn.completion_ids]))
    return ids[len(opening) :] if ids[: len(opening)] == opening else ids


def _differing_tokens(sampled: Sequence[int], encoded: Sequence[int]) -> int:
    """Return how many of `sampled` are not at their place any more: all from the first difference on."""
    for position, token_id in enumerate(sampled):
        if position >= len(encoded) or encoded[position] != token_id:
            return len(sampled) - position
    return int(len(encoded) > len(sampled))
