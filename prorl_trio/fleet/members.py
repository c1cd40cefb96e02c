"""The head's sessions on the fleet's nodes: opened when a node appears in the folder, closed when it is lost."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.client.client import connect_node
from prorl_trio.rendezvous.folder import read_entry
from prorl_trio.types.errors import ConfigError, ProtocolError, ServiceError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from prorl_ipc.session import JobEvent, OutcomeFrame, OutcomeRefFrame
    from prorl_trio.client.client import RolloutClient
    from prorl_trio.client.state import ClientState
    from prorl_trio.rendezvous.entry import NodeEntry
    from prorl_trio.rendezvous.watch import FleetView, FleetWatch, FoundNode
    from prorl_trio.types.models import JobSpec


logger = logging.getLogger(__name__)

WATCH_INTERVAL_S: Final = 1.0
"""Interval between two reads of the folder."""
RETRY_S: Final = 2.0
"""Pause before a failed join of a node is retried."""
JOIN_TIMEOUT_S: Final = 10.0
ROOM_INTERVAL_S: Final = 1.0
"""Interval at which a member is asked for its room, which changes with refusals and jobs of others."""
STATUS_INTERVAL_S: Final = 2.0
"""Interval at which a member is asked for its live state, which is shown in the head's state."""

LARGEST: Final = frozenset({"uptime_s", "p50_ms", "p99_ms", "max_ms", "age_s"})
"""Figures whose value for the fleet is the maximum over its nodes."""
PARTS: Final = ("pipeline", "backends", "sandboxes", "totals", "loop", "sessions")


def merge_statistics(name: str, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return one report with the parts shown by `prorl-trio top`, and each node's own report under `nodes`."""
    nodes = list(reports.values())
    merged: dict[str, Any] = {
        "node_id": f"{name}: {len(nodes)} nodes",
        "draining": bool(nodes) and all(report.get("draining") for report in nodes),
        "uptime_s": max((report.get("uptime_s", 0.0) for report in nodes), default=0.0),
        "jobs": [{**job, "node_id": node_id} for node_id, report in reports.items() for job in report.get("jobs", [])],
    }
    for part in PARTS:
        found = [report[part] for report in nodes if isinstance(report.get(part), dict)]
        if found:
            merged[part] = _merge(part, found)
    if "backends" in merged:
        merged["backends"]["backends"] = [
            {**backend, "node_id": node_id}
            for node_id, report in reports.items()
            for backend in report.get("backends", {}).get("backends", [])
        ]
    models = [report["model"] for report in nodes if "model" in report]
    if models:
        merged["model"] = models[0]
    merged["nodes"] = dict(reports)
    return merged


def _merge(name: str, values: Sequence[Any]) -> Any:
    """Return one combined value for the values of several nodes under a name."""
    first = values[0]
    if all(isinstance(value, bool) for value in values):
        return any(values)
    if all(isinstance(value, int | float) for value in values):
        return max(values) if name in LARGEST else sum(values)
    if all(isinstance(value, dict) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _merge(key, [value[key] for value in values if key in value]) for key in keys}
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    return first


class MemberListener(Protocol):
    """The head as seen by its members' tasks. Methods return at once and never raise."""

    def joined(self, member: Member) -> None:
        """Handle an opened session on a member that has listed the head's jobs which it holds."""

    def lost(self, member: Member, why: str) -> None:
        """Handle the end of a session. Messages sent to the member may or may not have reached it."""

    def arrived(self, member: Member, frame: OutcomeFrame | OutcomeRefFrame) -> None:
        """Process the next outcome from a member."""

    def progressed(self, member: Member, event: JobEvent) -> None:
        """Process the news that a job on a member has entered another stage."""

    async def serve(self, member: Member) -> None:
        """Query the member and send it jobs, until cancelled."""


class Member:
    """A node of the fleet while the head has a session there.

    Attributes:
        entry: the latest entry of this process.
        client: the session.
        status: the member's live state at its last report.
        to_submit: jobs to be sent, each with its number of earlier attempts.
        to_forget: jobs whose outcomes it must forget, each with its cursor.
    """

    def __init__(self, entry: NodeEntry, client: RolloutClient, set_behind: Callable[[Member, str], None]) -> None:
        self.entry = entry
        self.client = client
        self.status: dict[str, Any] = {}
        self.to_submit: list[tuple[JobSpec, int]] = []
        self.to_forget: list[tuple[str, int]] = []
        self.wake = trio.Event()
        """Set when there are jobs to send."""
        self.wake_forgetting = trio.Event()
        """Set when there are outcomes to forget."""
        self.taken = 0
        """Cursor, on the node, of the last outcome that the head has processed."""
        self._behind = ""
        self._set_behind = set_behind

    def __repr__(self) -> str:
        return f"<Member {self.node_id!r} at {self.entry.url}>"

    @property
    def node_id(self) -> str:
        return self.entry.node_id

    @property
    def state(self) -> ClientState:
        """Return the state of the session on the node."""
        return self.client.session_state

    @property
    def behind(self) -> str:
        """Return why it gets no jobs although it accepts some; empty if it gets jobs."""
        return self._behind

    @behind.setter
    def behind(self, why: str) -> None:
        if why != self._behind:
            self._behind = why
            self._set_behind(self, why)

    def submit_soon(self, spec: JobSpec, attempts: int) -> None:
        """Queue a job with `attempts` earlier attempts for sending."""
        self.to_submit.append((spec, attempts))
        self.wake.set()

    def forget_soon(self, job_id: str, cursor: int) -> None:
        """Queue an outcome that the member must forget."""
        self.to_forget.append((job_id, cursor))
        self.wake_forgetting.set()


class _Serving:
    """A node from the first attempt to join it until its loss, and the reason of the loss."""

    def __init__(self, entry: NodeEntry) -> None:
        self.entry = entry
        self.scope = trio.CancelScope()
        self.member: Member | None = None
        self.why = ""


class Members:
    """The tasks that maintain a session of the head on every live node in a fleet's folder.

    A fleet has one model. A node with another model is excluded while the folder contains a node with the fleet's
    model. When the last of these has left, the fleet switches to the other model. The nodes' versions may differ.

    Attributes:
        all: the members with a session, by id.
        model: the fleet's model; empty: the model of the first node that joins.
        view: the folder as last read.
        refused: excluded nodes, and the reasons.
    """

    def __init__(
        self,
        watch: FleetWatch,
        nursery: trio.Nursery,
        listener: MemberListener,
        *,
        session_id: str,
        set_behind: Callable[[Member, str], None],
        options: Mapping[str, Any],
        model: str = "",
    ) -> None:
        """Create it without joining any node. `options` are the options of `connect_node` for each node."""
        self.all: dict[str, Member] = {}
        self.model = model
        self.view: FleetView | None = None
        self.refused: dict[str, str] = {}
        self._watch = watch
        self._nursery = nursery
        self._listener = listener
        self._session_id = session_id
        self._set_behind = set_behind
        self._options = options
        self._serving: dict[str, _Serving] = {}
        self._barred: dict[str, tuple[float, str]] = {}
        self._reading = trio.CapacityLimiter(1)

    @property
    def folder(self) -> Path:
        return self._watch.path

    @property
    def settled(self) -> bool:
        """Return True if each live node in the last view has joined or is excluded, and no restart is awaited.

        A restart is awaited for an ended node that announced it with `restart_within_s`.
        """
        view = self.view
        return view is not None and all(
            name in self.all or name in self.refused
            if found.life == "live"
            else found.age_s >= found.entry.restart_within_s
            for name, found in view.nodes.items()
        )

    async def run(self) -> NoReturn:
        """Watch the folder until cancelled. Read errors are logged; the members then stay as they are."""
        trouble = ""
        while True:
            try:
                await self.look()
                trouble = ""
            except ConfigError as exc:
                if str(exc) != trouble:
                    trouble = str(exc)
                    logger.error("the fleet's folder is not read, its nodes stay as they are: %s", exc)
            await trio.sleep(WATCH_INTERVAL_S)

    async def look(self) -> None:
        """Read the folder once; start joining new nodes, and give up lost ones.

        Raises:
            ConfigError: the folder cannot be read.
        """
        self.view = view = await trio.to_thread.run_sync(
            self._watch.read, limiter=self._reading, abandon_on_cancel=True
        )
        owners = _owners(view)
        self._judge_model(view)
        for node_id, found in view.nodes.items():
            if found.life != "live" or node_id in self._serving:
                continue
            if why := self._objection(found, owners[found.entry.url]):
                self._refuse(found.entry, why)
                continue
            serving = self._serving[node_id] = _Serving(found.entry)
            self._nursery.start_soon(self._serve, serving)
        for node_id, serving in self._serving.items():
            found_now, member = view.nodes.get(node_id), self.all.get(node_id)
            if (why := _loss(serving.entry, found_now)) and not self._has_link(node_id):
                serving.why = why
                serving.scope.cancel(why)
            if found_now and member and found_now.entry.process == member.entry.process:
                member.entry = found_now.entry
        for node_id in [node_id for node_id in self.refused if node_id not in view.nodes]:
            del self.refused[node_id]

    def _judge_model(self, view: FleetView) -> None:
        """Switch to another model if no node with the current one is left in the folder."""
        models = {found.entry.model for found in view.nodes.values()}
        if self.model in models or any(member.entry.model == self.model for member in self.all.values()):
            return
        living = sorted(
            (found for found in view.nodes.values() if found.life == "live"), key=lambda found: found.entry.node_id
        )
        if living:
            if self.model:
                logger.warning("the fleet changes over from the model %s to %s", self.model, living[0].entry.model)
            self.model = living[0].entry.model

    def _has_link(self, node_id: str) -> bool:
        member = self.all.get(node_id)
        return member is not None and member.state.connected

    def bar(self, node_id: str, why: str, for_s: float) -> None:
        """Exclude a node for this many seconds after it is lost."""
        self._barred[node_id] = trio.current_time() + for_s, why

    def _objection(self, found: FoundNode, owner: str) -> str:
        """Return why a live node is not joined; empty if it is."""
        entry = found.entry
        until_s, barred = self._barred.get(entry.node_id, (-math.inf, ""))
        if trio.current_time() < until_s:
            return barred
        if owner != entry.node_id:
            return f"the address {entry.url} of node {entry.node_id} is that of node {owner} now"
        if entry.model != self.model:
            return (
                f"node {entry.node_id} on {entry.host} has the model {entry.model}, and the fleet has {self.model}; it "
                "joins when the last node with that model has left the folder, or give it a folder of its own"
            )
        return ""

    def _refuse(self, entry: NodeEntry, why: str) -> None:
        """Exclude a node for now, and log it if that is new."""
        if self.refused.get(entry.node_id) != why:
            logger.error("left out of the fleet: %s", why)
        self.refused[entry.node_id] = why

    async def _read_token(self, entry: NodeEntry) -> str:
        """Return the current token in a node's entry, which is rewritten at each rotation."""
        try:
            found, _ = await trio.to_thread.run_sync(
                read_entry, self.folder / f"{entry.node_id}.json", abandon_on_cancel=True
            )
        except (OSError, ConfigError):
            return entry.token
        return found.token

    async def _serve(self, serving: _Serving) -> None:
        """Keep a session on a node until it is lost, then report that. A failed join is retried later."""
        node_id = serving.entry.node_id
        with serving.scope:
            serving.why = await self._stay(serving)
        member = serving.member
        if member is None:
            logger.info("node %s is not joined: %s", node_id, serving.why)
            await trio.sleep(RETRY_S)
        elif self.all.get(node_id) is member:
            logger.warning("node %s is lost: %s", node_id, serving.why)
            del self.all[node_id]
            self._listener.lost(member, serving.why)
        del self._serving[node_id]

    async def _stay(self, serving: _Serving) -> str:
        """Return why the session ended or could not start."""
        entry = serving.entry
        try:
            async with connect_node(
                entry.url,
                entry.token,
                session_id=self._session_id,
                connect_timeout_s=JOIN_TIMEOUT_S,
                read_token=partial(self._read_token, entry),
                **self._options,
            ) as client:
                if client.node_id != entry.node_id:
                    raise ProtocolError(f"there is node {client.node_id!r} now")
                await self._take_over(serving, Member(entry, client, self._set_behind))
        except (Unauthorized, ProtocolError) as exc:
            self._refuse(entry, f"node {entry.node_id} on {entry.host} cannot be used, at {entry.url}: {exc}")
            return str(exc)
        except ServiceError as exc:
            return str(exc)
        raise AssertionError("a session ends by an error")

    async def _take_over(self, serving: _Serving, member: Member) -> NoReturn:
        """Relay the node's messages until its session ends. Raises the reason."""
        source = member.state
        while source.listing:
            if source.failure is not None:
                source.raise_failure()
            await source.wait_changed()
        serving.member = self.all[member.node_id] = member
        self.refused.pop(member.node_id, None)
        self._listener.joined(member)
        async with open_single_nursery() as nursery:
            nursery.start_soon(self._listener.serve, member)
            while True:
                while source.events:
                    self._listener.progressed(member, source.events.popleft())
                for frame in source.inbox.after(member.taken):
                    member.taken = frame.cursor
                    self._listener.arrived(member, frame)
                if source.failure is not None:
                    source.raise_failure()
                await source.wait_changed()


def _loss(entry: NodeEntry, found: FoundNode | None) -> str:
    """Return why a disconnected node is given up; empty if it is not."""
    if found is None:
        return "it has left the fleet"
    if found.entry.process != entry.process or found.entry.url != entry.url:
        return "it was started again"
    if found.life == "live":
        return ""
    return "its process has ended" if found.life == "ended" else f"no heartbeat for {found.age_s:.0f} s"


def _owners(view: FleetView) -> dict[str, str]:
    """Return the live node at each address. If several claim one, all but the last started were killed."""
    owners: dict[str, FoundNode] = {}
    for found in view.nodes.values():
        if found.life == "live":
            other = owners.setdefault(found.entry.url, found)
            mine, its = found.entry.process, other.entry.process
            later = mine.start_time > its.start_time if mine.boot_id == its.boot_id else found.age_s < other.age_s
            if later:
                owners[found.entry.url] = found
    return {url: found.entry.node_id for url, found in owners.items()}
