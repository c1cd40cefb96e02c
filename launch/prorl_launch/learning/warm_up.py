"""Supervised training on demonstrations: `python -m prorl_launch.learning.warm_up RUN` makes the first checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from prorl_launch.learning.demonstrations import demonstrations
from prorl_launch.learning.policy import make_trainer, recipe_of, set_learning_rate
from prorl_launch.learning.record import CHECKPOINTS, EVENTS, EventLog, Shown, read_settings
from prorl_trio.chat.format import ChatFormat
from prorl_trio.learn.checkpoint import save_checkpoint
from prorl_trio.learn.trainer import Trainer


def warm_up(run: Path) -> None:
    """Train the model of the run on its demonstrations, and write the checkpoint of step 0 with a fresh optimizer.

    The learning rate falls to nothing on the way, so that the last demonstrations count no more than the first.
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
    fresh = Trainer(trainer.model, recipe_of(settings))  # with an optimizer of its own
    save_checkpoint(run / CHECKPOINTS, fresh, 0, {})


if __name__ == "__main__":
    warm_up(Path(sys.argv[1]))
