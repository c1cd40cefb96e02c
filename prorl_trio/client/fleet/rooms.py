"""The room of a fleet's nodes: as they said lately, with what this client has given them and taken from them since."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from ipc.nursery import open_single_nursery
from prorl_trio.client.fleet.placement import NodeRoom
from prorl_trio.types.errors import ServiceError

if TYPE_CHECKING:
    from ipc.session import RoomReport
    from prorl_trio.client.fleet.state import FleetState, Member

__all__ = ["Rooms"]

FRESH_S: Final = 0.25
"""Age at which what nodes said is asked again. A question to each for every job would cost the client of a large fleet
more than all else that it does."""
ASK_S: Final = 2.0
"""Longest wait for the answer of a node, and `SILENT_S` for one that has not answered the last time: it may be cut off
from us alone, which is known only when its link is given up."""
SILENT_S: Final = 0.5


class _Report:
    """The answer of a node, and the number of jobs that it was `given` since.

    Each outcome that came from it since has made room.
    """

    def __init__(self, member: Member, room: NodeRoom, *, is_ready: bool) -> None:
        self.is_ready = is_ready
        self.given = 0
        self._member = member
        self._room = room
        self._taken = member.taken

    def now(self) -> NodeRoom:
        change = self._member.taken - self._taken - self.given
        room, free, workers = self._room
        return NodeRoom(room + change, min(free + change, workers), workers)


class Rooms:
    """The known room of the nodes that take jobs of ours. Admission decides, whatever is thought here."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._asked: dict[str, Member] = {}
        self._reports: dict[str, _Report] = {}
        self._asked_s = -math.inf
        self._silent: set[str] = set()

    def forget(self) -> None:
        """Have all nodes asked the next time: one of them has answered otherwise than it had said."""
        self._asked_s = -math.inf

    def give(self, node_id: str, count: int) -> None:
        """Count jobs that are being submitted to a node."""
        if node_id in self._reports:
            self._reports[node_id].given += count

    async def look(self) -> tuple[dict[str, Member], dict[str, NodeRoom]]:
        """Return the nodes, and their room; of those that work on none now only if all are so.

        They are asked if they were not lately, or if others are there now.
        """
        await trio.lowlevel.checkpoint()
        members = {name: m for name, m in self._state.members.items() if not m.behind and m.state.connected}
        if members != self._asked or trio.current_time() - self._asked_s > FRESH_S:
            await self._ask(members)
        known = {name: report for name, report in self._reports.items() if name in members}
        ready = {name: report.now() for name, report in known.items() if report.is_ready}
        return members, ready or {name: report.now() for name, report in known.items()}

    async def _ask(self, members: dict[str, Member]) -> None:
        asked_s = trio.current_time()
        reports: dict[str, _Report] = {}

        async def ask(member: Member) -> None:
            said: RoomReport | None = None
            with suppress(ServiceError), trio.move_on_after(SILENT_S if member.node_id in self._silent else ASK_S):
                said = await member.client.room()
            if said is None:
                self._silent.add(member.node_id)
                return
            self._silent.discard(member.node_id)
            room = NodeRoom(said.room, said.free, said.run_workers)
            reports[member.node_id] = _Report(member, room, is_ready=not said.unready)

        async with open_single_nursery() as nursery:
            for member in members.values():
                nursery.start_soon(ask, member)
        self._asked, self._reports, self._asked_s = members, reports, asked_s
