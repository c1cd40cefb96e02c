"""Cuts tool results to the available tokens: the middle is removed, and the text states how much. Pure.

The cut is made in the text, at the edges of tokens, before rendering. The dialogue encodes the text like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACED = "\ufffd"
"""The character that replaces an incomplete character in decoding."""


class Codec(Protocol):
    """The part of `chat.codec.TokenCodec` that is used here."""

    def mark(self, text: str) -> str:
        """Return the text with all possible control tokens neutralised."""

    def encode(self, marked: str) -> list[int]:
        """Return the token ids of a marked text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""


def fit_texts(codec: Codec, texts: Sequence[str], encoded: Sequence[Sequence[int]], at_most: int) -> list[str] | None:
    """Return `texts` with about `at_most` tokens together; cut texts may encode slightly differently.

    `encoded` are the ids of each text. The longest texts are cut to the same length. Returns None if there is not even
    room for the notes about the cuts.
    """
    share = fitting_share([len(ids) for ids in encoded], at_most)
    fitted = []
    for text, ids in zip(texts, encoded, strict=True):
        cut = text if len(ids) <= share else _cut(codec, ids, share)
        if cut is None:
            return None
        fitted.append(cut)
    return fitted


def fitting_share(lengths: Sequence[int], at_most: int) -> int:
    """Return the largest limit per text that keeps the sum of all lengths within `at_most`."""
    left = max(0, at_most)
    for place, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - place)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def _cut(codec: Codec, ids: Sequence[int], share: int) -> str | None:
    """Return the head and the tail of a text with these `ids`, which exceed `share`."""
    note = _note(len(ids))
    kept = share - len(codec.encode(codec.mark(note)))
    if kept < 0:
        return None
    head, tail = ids[: kept - kept // 2], ids[len(ids) - kept // 2 :]
    note = _note(len(ids) - len(head) - len(tail))
    return codec.decode(head).rstrip(REPLACED) + note + codec.decode(tail).lstrip(REPLACED)


def _note(tokens: int) -> str:
    return f"\n[... {tokens} tokens left out: there is no room for them ...]\n"
