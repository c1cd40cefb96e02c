"""The demonstrations that show a policy how a tool is called, as a node would record them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_launch.learning.prompt import PAYLOAD
from prorl_trio.chat.conversation import Conversation
from prorl_trio.learn.rows import Row
from prorl_trio.tasks.sets.word_problems import demonstrated
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.tasks.sets.word_problems import WordProblem


def demonstrations(chat: ChatFormat, number: int, *, seed: int) -> list[Row]:
    """Return `number` problems, each with a call of the tool and an answer: what the call printed, mostly wrong.

    They show how to calculate and to answer. What a problem asks for is left to be found out.
    """
    return [_row(chat, demonstrated(each, seed=seed), each) for each in range(number)]


def _row(chat: ChatFormat, problem: WordProblem, rollout: int) -> Row:
    opening = [
        ChatMessage(role="system", content=PAYLOAD["system_prompt"]),
        ChatMessage(role="user", content=problem.question),
    ]
    conversation = Conversation(chat, opening)
    _say(chat, conversation, f"```python\n{problem.program}\n```")
    conversation.add_messages([ChatMessage(role="tool", content=str(problem.answer), name="ipython")])
    _say(chat, conversation, f"\\boxed{{{problem.answer}}}")
    (segment,) = conversation.segments()
    return Row(segment.token_ids.copy(), segment.logprobs.copy(), segment.loss_mask.copy(), rollout)


def _say(chat: ChatFormat, conversation: Conversation, text: str) -> None:
    ids = [*chat.codec.encode(text), chat.end_of_turn_id]
    conversation.add_completion(ids, [0.0] * len(ids), policy_version="", engine="demonstration")
