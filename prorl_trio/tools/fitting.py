"""Cuts what tools returned to the tokens that there is room for: the middle goes, and the text says how much. Pure.

What is cut is text, at the edges of its tokens, before it is rendered: the dialogue encodes it like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACED = "\ufffd"
"""The character that half a character is decoded to."""


class Codec(Protocol):
    """See `chat.codec.TokenCodec`."""

    def mark(self, text: str) -> str:
        """The text without anything that could be a control token."""

    def encode(self, marked: str) -> list[int]:
        """Its ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some of them."""


def fit_texts(codec: Codec, texts: Sequence[str], encoded: Sequence[Sequence[int]], at_most: int) -> list[str] | None:
    """Return `texts` with `at_most` tokens together, or nearly so: what is cut may be encoded a little otherwise.

    `encoded` are the ids of each. The longest ones are cut, to the same length. None: there is no room to say what was
    left out.
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
    """Return the most that each may have so that all of them together have no more than `at_most`."""
    left = max(0, at_most)
    for place, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - place)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def _cut(codec: Codec, ids: Sequence[int], share: int) -> str | None:
    """The head and the tail of a text of these `ids`, which are more than `share`."""
    note = _note(len(ids))
    kept = share - len(codec.encode(codec.mark(note)))
    if kept < 0:
        return None
    head, tail = ids[: kept - kept // 2], ids[len(ids) - kept // 2 :]
    note = _note(len(ids) - len(head) - len(tail))
    return codec.decode(head).rstrip(REPLACED) + note + codec.decode(tail).lstrip(REPLACED)


def _note(tokens: int) -> str:
    return f"\n[... {tokens} tokens left out: there is no room for them ...]\n"
