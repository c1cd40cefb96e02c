"""Supervised training on demonstrations: `python -m prorl_launch.learning.warm_up RUN` makes the first checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_launch.learning.policy import make_trainer, recipe_of, set_learning_rate
from prorl_launch.learning.prompt import PAYLOAD
from prorl_launch.learning.record import CHECKPOINTS, EVENTS, EventLog, Shown, read_settings
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.learn.checkpoint import save_checkpoint
from prorl_trio.learn.rows import Row
from prorl_trio.learn.trainer import Trainer
from prorl_trio.tasks.sets.word_problems import demonstrated
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from prorl_trio.tasks.sets.word_problems import WordProblem


def demonstrations(chat: ChatFormat, number: int, *, seed: int) -> list[Row]:
    """Return `number` problems, each with a tool call and an answer. The answer is the call's output, mostly wrong.

    They demonstrate how to calculate and to answer, but not how to understand a problem.
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


def warm_up(run: Path) -> None:
    """Train the run's model on its demonstrations, and write the checkpoint of step 0 with a fresh optimizer.

    The learning rate decreases to 0, so that the last demonstrations do not outweigh the first.
    """
    settings, events = read_settings(run), EventLog(run / EVENTS)
    trainer = make_trainer(settings, recipe_of(settings, settings.demonstration_learning_rate))
    chat = ChatFormat.load(Path(settings.model))
    each = settings.demonstrations
    rows = demonstrations(chat, each * settings.demonstration_steps, seed=settings.seed)
    for step in range(settings.demonstration_steps):
        rate = settings.demonstration_learning_rate * (1 - step / settings.demonstration_steps)
        set_learning_rate(trainer, rate)
        loss = trainer.imitate(rows[step * each : (step + 1) * each])
        events.write(Shown(step=step + 1, of=settings.demonstration_steps, loss=loss))
    fresh = Trainer(trainer.model, recipe_of(settings))  # with its own optimizer
    save_checkpoint(run / CHECKPOINTS, fresh, 0, {})


if __name__ == "__main__":
    warm_up(Path(sys.argv[1]))
