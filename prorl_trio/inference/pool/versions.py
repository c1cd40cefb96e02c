"""How far apart two versions of the policy are, pure."""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_VERSIONS_KEPT", "VersionOrder", "updates_between"]

MAX_VERSIONS_KEPT: Final = 10_000
"""Of those that are no integers; of the oldest the place is forgotten."""


def updates_between(older: str, newer: str) -> int | None:
    """Policy updates from `older` to `newer` where both are integers, 0 if it is not newer; otherwise None."""
    if older.isdecimal() and newer.isdecimal():
        return max(0, int(newer) - int(older))
    return None


class VersionOrder:
    """The versions of a policy in the order in which they came into force: what counts where they are no integers."""

    def __init__(self, first: str) -> None:
        self._places: dict[str, int] = {}
        self._next = 0
        self.note(first)

    def note(self, version: str) -> None:
        """`version` is in force from now on. One that was so before comes back under its old place."""
        if version not in self._places:
            self._places[version] = self._next
            self._next += 1
            if len(self._places) > MAX_VERSIONS_KEPT:
                del self._places[next(iter(self._places))]

    def updates(self, older: str, newer: str) -> int:
        """Policy updates from `older` to `newer`, 0 if it is not newer.

        Integers by their difference; others by what was noted between them, both included. One that was never noted, as
        only its engine knew of it, counts as the very first if it is `older`, and as the very last if it is `newer`.
        """
        exact = updates_between(older, newer)
        if exact is not None or older == newer:
            return exact or 0
        first = self._places.get(older, -1)
        return max(0, self._places.get(newer, self._next) - first)
