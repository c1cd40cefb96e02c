"""Extracts the graded text from a recorded outcome, so that it can be graded again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_trio.types.errors import NotRestorable

if TYPE_CHECKING:
    from prorl_trio.types.models import Recorded


def restored_text(recorded: Recorded, name: str) -> str | None:
    """Return the text called `name` in the details; None if the agent gave none.

    Raises:
        NotRestorable: the details do not contain it.
    """
    text = recorded.details.get(name, ...)
    if text is not None and not isinstance(text, str):
        raise NotRestorable(f"the recorded outcome does not say what its {name} was: details.{name} is missing")
    return text
