"""The nodes of a fleet as its client has them: joined when they are found, given up when they are lost."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

import trio

from ipc.nursery import open_single_nursery
from prorl_trio.client.client import connect_node
from prorl_trio.client.errors import ConnectionLost, SessionReplaced
from prorl_trio.client.fleet.state import Member
from prorl_trio.rendezvous.folder import read_entry
from prorl_trio.types.errors import ConfigError, ProtocolError, ServiceError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path
    from typing import Any

    from prorl_trio.client.fleet.state import FleetState
    from prorl_trio.rendezvous.entry import NodeEntry
    from prorl_trio.rendezvous.watch import FleetView, FleetWatch, FoundNode

__all__ = ["Roster"]

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S: Final = 1.0
"""Time between two looks at the folder."""
RETRY_S: Final = 2.0
"""Pause before a node that could not be joined is tried again."""
JOIN_TIMEOUT_S: Final = 10.0


class _Serving:
    """A node that is served, from the first try to join it until it is lost, and why it was."""

    def __init__(self, entry: NodeEntry) -> None:
        self.entry = entry
        self.scope = trio.CancelScope()
        self.member: Member | None = None
        self.why = ""


class Roster:
    """The tasks that keep a session on every living node of a fleet's folder.

    Args:
        watch: reads the folder.
        state: gets the members.
        nursery: runs a task for each node.
        token: that every node must have; empty: each node's own, from its entry.
        options: of `connect_node`, for each node.
        on_lost: is called, and awaited, for each node that is lost, with why.
        on_cut: the same, with the ids of jobs that a node's shutdown cut.
        on_joined: is called for each node that has joined.
        alone_s: how long the fleet may have no node.
    """

    def __init__(
        self,
        watch: FleetWatch,
        state: FleetState,
        nursery: trio.Nursery,
        *,
        token: str,
        options: Mapping[str, Any],
        on_joined: Callable[[Member], None],
        on_lost: Callable[[Member, str], Awaitable[None]],
        on_cut: Callable[[Member, list[str]], Awaitable[None]],
        alone_s: float,
    ) -> None:
        self.view: FleetView | None = None
        self.refused: dict[str, str] = {}
        """Nodes that are left out, and why: their entry says that they are not ours, or the last try to join failed."""
        self._watch = watch
        self._state = state
        self._nursery = nursery
        self._token = token
        self._options = options
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._on_cut = on_cut
        self._alone_s = alone_s
        self._serving: dict[str, _Serving] = {}
        self._refused_entries: dict[str, NodeEntry] = {}
        self._reading = trio.CapacityLimiter(1)

    async def read(self) -> FleetView:
        """Look at the folder. Raises ConfigError if it cannot be read."""
        self.view = await trio.to_thread.run_sync(self._watch.read, limiter=self._reading, abandon_on_cancel=True)
        return self.view

    @property
    def folder(self) -> Path:
        """Return the fleet's folder."""
        return self._watch.path

    @property
    def settled(self) -> bool:
        """Return True if each living node of the last look has joined or is left out."""
        view = self.view
        return view is not None and all(
            name in self._state.members or name in self.refused
            for name, found in view.nodes.items()
            if found.life == "live"
        )

    async def run(self) -> NoReturn:
        """Watch the folder for ever. If no node is left for `alone_s`, the client fails."""
        alone_since_s = trio.current_time()
        trouble = ""
        while True:
            try:
                self.follow(await self.read())
                trouble = ""
            except ConfigError as exc:
                if str(exc) != trouble:
                    trouble = str(exc)
                    logger.error("the fleet is not seen, its nodes stay as they are: %s", exc)
            now_s = trio.current_time()
            if self._state.members:
                alone_since_s = now_s
            elif now_s - alone_since_s > self._alone_s:
                raise ConnectionLost(
                    f"no node of the fleet in {self._watch.path} could be reached for {self._alone_s:g} s"
                    f"{self.complaints()}; start nodes, and come back with session {self._state.session_id!r}"
                )
            await trio.sleep(WATCH_INTERVAL_S)

    def complaints(self) -> str:
        """Return why nodes and files are left out, as the end of a sentence; empty if none is."""
        broken = {} if self.view is None else self.view.broken
        why = [*self.refused.values(), *broken.values()]
        return f" ({'; '.join(why)})" if why else ""

    def follow(self, view: FleetView) -> None:
        """Begin to serve nodes that have come, and give up those that are lost."""
        owners = _owners(view)
        for node_id, found in view.nodes.items():
            if node_id not in self._serving and found.life == "live" and self._may_join(found, owners[found.entry.url]):
                serving = self._serving[node_id] = _Serving(found.entry)
                self._nursery.start_soon(self._serve, serving)
        for node_id, serving in self._serving.items():
            if (why := _loss(serving.entry, view.nodes.get(node_id))) and not self._has_link(node_id):
                serving.why = why
                serving.scope.cancel(why)
        for node_id in [node_id for node_id in self.refused if node_id not in view.nodes]:
            del self.refused[node_id]

    def _has_link(self, node_id: str) -> bool:
        member = self._state.members.get(node_id)
        return member is not None and member.state.connected

    def _may_join(self, found: FoundNode, owner: str) -> bool:
        """Return True if the node is of our fleet's kind; else say once why not."""
        entry = found.entry
        before = self._refused_entries.get(entry.node_id)
        if before is not None and (before.process, before.url, before.token) == (entry.process, entry.url, entry.token):
            return False
        why = ""
        if owner != entry.node_id:
            why = f"the address {entry.url} of node {entry.node_id} is that of node {owner} now"
        if self._token and entry.token != self._token:
            why = f"node {entry.node_id} on {entry.host} has another token than this client"
        for other in [member.entry for member in self._state.members.values()]:
            if (other.version, other.model) != (entry.version, entry.model):
                why = (
                    f"node {entry.node_id} on {entry.host} has version {entry.version} and the model {entry.model}, "
                    f"and node {other.node_id} version {other.version} and the model {other.model}; "
                    "give it a folder of its own"
                )
        if why:
            self._refuse(entry, why)
            self._refused_entries[entry.node_id] = entry
        return not why

    def _refuse(self, entry: NodeEntry, why: str) -> None:
        """Leave a node out, and log it if that is new. A node whose entry is not refused is tried again."""
        if self.refused.get(entry.node_id) != why:
            logger.error("left out of the fleet: %s", why)
        self.refused[entry.node_id] = why

    async def _read_token(self, entry: NodeEntry) -> str:
        """Return the token that the entry of a node has now, in which every rotation is written."""
        if self._token:
            return self._token
        path = self.folder / f"{entry.node_id}.json"
        try:
            found, _ = await trio.to_thread.run_sync(read_entry, path, abandon_on_cancel=True)
        except (OSError, ConfigError):
            return entry.token
        return found.token

    async def _serve(self, serving: _Serving) -> None:
        """Have a session on a node until it is lost, then say so; one that could not be joined is tried again later."""
        node_id = serving.entry.node_id
        try:
            with serving.scope:
                serving.why = await self._stay(serving)
            member = serving.member
            if member is None:
                logger.info("node %s is not joined: %s", node_id, serving.why)
                await trio.sleep(RETRY_S)
        finally:
            del self._serving[node_id]
        if member is not None:
            logger.warning("node %s is lost: %s", node_id, serving.why)
            await self._on_lost(member, serving.why)

    async def _stay(self, serving: _Serving) -> str:
        """Return why the session ended, or could not begin. Raises SessionReplaced: another client has the session."""
        entry = serving.entry
        try:
            async with connect_node(
                entry.url,
                entry.token,
                session_id=self._state.session_id,
                connect_timeout_s=JOIN_TIMEOUT_S,
                read_token=partial(self._read_token, entry),
                **self._options,
            ) as client:
                if client.node_id != entry.node_id:
                    raise ProtocolError(f"there is node {client.node_id!r} now")
                serving.member = Member(entry, client)
                await self._pump(serving.member)
        except SessionReplaced:
            raise
        except (Unauthorized, ProtocolError) as exc:
            self._refuse(entry, f"node {entry.node_id} on {entry.host} cannot be used, at {entry.url}: {exc}")
            return str(exc)
        except ServiceError as exc:
            return str(exc)
        raise AssertionError("a session ends by an error")

    async def _pump(self, member: Member) -> NoReturn:
        """Take over what the node sends until its session ends. Raises the reason."""
        source = member.state
        while source.listing:
            if source.failure is not None:
                source.raise_failure()
            await source.wait_changed()
        self._state.join(member)
        self.refused.pop(member.node_id, None)
        self._on_joined(member)
        try:
            async with open_single_nursery() as nursery:
                while True:
                    if cut := self._state.take_from(member):
                        nursery.start_soon(self._on_cut, member, cut)
                    if source.failure is not None:
                        source.raise_failure()
                    await source.wait_changed()
        finally:
            self._state.leave(member)


def _loss(entry: NodeEntry, found: FoundNode | None) -> str:
    """Return why a node that has no link is given up; empty: it is not."""
    if found is None:
        return "it has left the fleet"
    if found.entry.process != entry.process:
        return "it was started again"
    if found.life == "live":
        return ""
    return "its process has ended" if found.life == "ended" else f"no heartbeat for {found.age_s:.0f} s"


def _owners(view: FleetView) -> dict[str, str]:
    """Return which living node is at each address: of several, one was killed, and the one that began last is there."""
    owners: dict[str, FoundNode] = {}
    for found in view.nodes.values():
        if found.life == "live":
            other = owners.setdefault(found.entry.url, found)
            mine, its = found.entry.process, other.entry.process
            later = mine.start_time > its.start_time if mine.boot_id == its.boot_id else found.age_s < other.age_s
            if later:
                owners[found.entry.url] = found
    return {url: found.entry.node_id for url, found in owners.items()}
