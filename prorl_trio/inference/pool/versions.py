"""The versions of a policy: their order, how far apart two are, and which is in force. Pure."""

from __future__ import annotations

from typing import Final

MAX_VERSIONS_KEPT: Final = 10_000
"""The most that are no integers; of the oldest the place is forgotten."""

ANNOUNCED_KEPT: Final = 32
"""Announced versions that are told: by them others know which of two came later."""

UNKNOWN_VERSION: Final = "0"
"""The version that a probe gives to weights whose engine does not tell it."""


class VersionOrder:
    """The versions of a policy in the order in which they came into force: what counts where they are no integers.

    Attributes:
        current: the one that was announced last: what the trainer has.
    """

    def __init__(self, first: str = UNKNOWN_VERSION) -> None:
        self.current = first
        self._announced: dict[str, None] = {}
        self._places: dict[str, int] = {}
        self._next = 0
        self._located = ("", "")
        self.note(first)

    def announce(self, version: str) -> None:
        """Note that the trainer has `version` from now on."""
        self.current = version
        self._announced.pop(version, None)
        self._announced[version] = None
        if len(self._announced) > ANNOUNCED_KEPT:
            del self._announced[next(iter(self._announced))]
        self.note(version)

    def locate(self, version: str, folder: str) -> None:
        """Note that engines loaded the weights of `version`, the latest, from `folder`; empty: it is not known."""
        self._located = version, folder

    def folder(self, version: str) -> str:
        """Return the folder of the weights of `version`, as the engines see it. Empty if that is not known."""
        return self._located[1] if self._located[0] == version else ""

    def announced(self) -> list[str]:
        """Return the versions that were announced lately, each where it was so last: the oldest first."""
        return list(self._announced)

    def behind(self, version: str) -> int:
        """Return the policy updates that `version` lies behind what the trainer has."""
        return self.updates(version, self.current)

    def note(self, version: str) -> None:
        """Note that `version` is in force from now on. One that was so before comes back under its old place."""
        if version not in self._places:
            self._places[version] = self._next
            self._next += 1
            if len(self._places) > MAX_VERSIONS_KEPT:
                del self._places[next(iter(self._places))]

    def updates(self, older: str, newer: str) -> int:
        """Return the policy updates from `older` to `newer`, 0 if it is not newer.

        Integers by their difference; others by what was noted between them, both included. One that was never noted, as
        only its engine knew of it, counts as the very first if it is `older`, and as the very last if it is `newer`.
        """
        if older == newer:
            return 0
        if older.isdecimal() and newer.isdecimal():
            return max(0, int(newer) - int(older))
        first = self._places.get(older, -1)
        return max(0, self._places.get(newer, self._next) - first)
