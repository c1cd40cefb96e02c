"""The versions of a policy: their order, the distance between two, and the current one. Pure."""

from __future__ import annotations

from typing import Final

MAX_VERSIONS_KEPT: Final = 10_000
"""Limit on remembered non-integer versions; the oldest are forgotten."""

ANNOUNCED_KEPT: Final = 32
"""Number of announced versions that are reported, so that readers can order them."""

UNKNOWN_VERSION: Final = "0"
"""The version that a probe assigns to weights if the engine does not report one."""


class VersionOrder:
    """The versions of a policy in the order in which they came into force; needed if they are not integers.

    Attributes:
        current: the last announced version: the trainer's.
    """

    def __init__(self, first: str = UNKNOWN_VERSION) -> None:
        self.current = first
        self._announced: dict[str, None] = {}
        self._places: dict[str, int] = {}
        self._next = 0
        self._located = ("", "")
        self.note(first)

    def announce(self, version: str) -> None:
        """Record that the trainer now has `version`."""
        self.current = version
        self._announced.pop(version, None)
        self._announced[version] = None
        if len(self._announced) > ANNOUNCED_KEPT:
            del self._announced[next(iter(self._announced))]
        self.note(version)

    def locate(self, version: str, folder: str) -> None:
        """Record that engines loaded the weights of `version`, the latest, from `folder`; empty if unknown."""
        self._located = version, folder

    def folder(self, version: str) -> str:
        """Return the folder of the weights of `version`, as the engines see it. Empty if unknown."""
        return self._located[1] if self._located[0] == version else ""

    def announced(self) -> list[str]:
        """Return the recently announced versions by their last announcement, oldest first."""
        return list(self._announced)

    def behind(self, version: str) -> int:
        """Return how many policy updates `version` lies behind the trainer's version."""
        return self.updates(version, self.current)

    def note(self, version: str) -> None:
        """Record that `version` is now in force. A version that was in force before keeps its old position."""
        if version not in self._places:
            self._places[version] = self._next
            self._next += 1
            if len(self._places) > MAX_VERSIONS_KEPT:
                del self._places[next(iter(self._places))]

    def updates(self, older: str, newer: str) -> int:
        """Return the number of policy updates from `older` to `newer`, 0 if it is not newer.

        Integers are subtracted; other versions are counted from the record, both included. An unrecorded version, known
        only to its engine, counts as the very first if it is `older`, and as the very last if it is `newer`.
        """
        if older == newer:
            return 0
        if older.isdecimal() and newer.isdecimal():
            return max(0, int(newer) - int(older))
        first = self._places.get(older, -1)
        return max(0, self._places.get(newer, self._next) - first)
