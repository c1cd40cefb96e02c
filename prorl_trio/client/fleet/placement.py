"""The choice of nodes for jobs, by the room that each node says it has. Pure."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NodeRoom", "Unit", "place"]


class NodeRoom(NamedTuple):
    """Room of a node, as `ipc.session.RoomReport` says: `free` is negative where jobs wait already."""

    room: int
    free: int
    workers: int


class Unit(NamedTuple):
    """Jobs that are better on one node: the mates of a group, whose prompts begin alike; or a job alone.

    Attributes:
        job_ids: in order.
        home: the node where mates or the job itself are already; empty: none.
        tied: they must be on `home`, or all on one: the node watches over the group.
    """

    job_ids: Sequence[str]
    home: str = ""
    tied: bool = False


class _Nodes:
    """The rooms that are left while jobs are given out. The node with the largest share of free places comes first."""

    def __init__(self, rooms: Mapping[str, NodeRoom]) -> None:
        self.left = {node_id: list(room) for node_id, room in rooms.items() if room.room > 0}
        self._order = [(self._rank(node_id), node_id) for node_id in self.left]
        heapq.heapify(self._order)

    def best(self) -> str:
        """Return the node with the largest share of free places; empty if none has room."""
        while self._order:
            rank, node_id = self._order[0]
            if self.left[node_id][0] > 0 and rank == self._rank(node_id):
                return node_id
            heapq.heappop(self._order)
        return ""

    def take(self, node_id: str, count: int) -> None:
        """Count jobs that were given to a node."""
        self.left[node_id][0] -= count
        self.left[node_id][1] -= count
        heapq.heappush(self._order, (self._rank(node_id), node_id))

    def _rank(self, node_id: str) -> float:
        _, free, workers = self.left[node_id]
        return -free / workers


def place(units: Sequence[Unit], rooms: Mapping[str, NodeRoom]) -> dict[str, list[str]]:
    """Return the jobs to submit, by node; those for which nobody has room are in none.

    A unit goes where its mates are if it can begin there; else, as a whole, to the node with the largest share of free
    places. It is divided only where that lets jobs begin sooner: while the node cannot begin all of it, and others
    still can. If no node can begin anything, it waits as a whole at the one with the shortest queue for its size.
    """
    nodes = _Nodes(rooms)
    chosen: dict[str, list[str]] = {}

    def give(node_id: str, job_ids: Sequence[str]) -> None:
        nodes.take(node_id, len(job_ids))
        chosen.setdefault(node_id, []).extend(job_ids)

    for unit in units:
        left = list(unit.job_ids)
        if unit.tied:
            node_id = unit.home or nodes.best()
            if node_id in nodes.left:
                give(node_id, left[: max(0, nodes.left[node_id][0])])
            continue
        if unit.home in nodes.left and min(nodes.left[unit.home][:2]) >= len(left):
            give(unit.home, left)
            continue
        while left and (node_id := nodes.best()):
            room, free, _ = nodes.left[node_id]
            count = min(len(left), room, free) if free > 0 else min(len(left), room)
            give(node_id, left[:count])
            del left[:count]
    return {node_id: job_ids for node_id, job_ids in chosen.items() if job_ids}
