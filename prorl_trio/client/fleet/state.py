"""The state of a fleet's client: one inbox for the outcomes of all nodes, in the order in which they came."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ipc.session import ObservedEvent, ObservedOutcome, OutcomeFrame
from prorl_trio.client.fleet.acks import NodeAcks
from prorl_trio.client.fleet.book import Book
from prorl_trio.client.state import ClientState
from prorl_trio.types.models import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.client.client import RolloutClient
    from prorl_trio.rendezvous.entry import NodeEntry

__all__ = ["FleetState", "Member"]


class _End(msgspec.Struct):
    """The fields of an outcome that say how the job ended."""

    status: Status
    error_code: str | None = None


_decoder = msgspec.msgpack.Decoder(_End)


def _end_of(frame: OutcomeFrame) -> _End:
    """Return how the job ended; of an outcome that cannot be read, which its reader is told: as failed."""
    try:
        return _decoder.decode(frame.outcome)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _End(status="failed")


class Member:
    """A node of the fleet, while this client has a session there.

    Attributes:
        entry: as it was when the session was opened.
        client: the session.
        behind: why it is given no jobs, though it takes some; empty: it is given some.
        withdrawing: ids of jobs that are being withdrawn from it: they are not submitted there.
    """

    def __init__(self, entry: NodeEntry, client: RolloutClient) -> None:
        self.entry = entry
        self.client = client
        self.acks = NodeAcks()
        self.behind = ""
        self.withdrawing: set[str] = set()
        self.taken = 0
        """Cursor, on the node, of the last outcome that was taken over."""

    @property
    def node_id(self) -> str:
        """Return the node's id."""
        return self.entry.node_id

    @property
    def state(self) -> ClientState:
        """Return the state of the session on the node."""
        return self.client.session_state

    @property
    def busy(self) -> bool:
        """Return True while outcomes may come from there that the fleet's inbox does not have."""
        return self.state.outstanding or self.state.inbox.received > self.taken


class FleetState(ClientState):
    """The state of a session on all nodes of a fleet. Its cursors count the outcomes of all nodes, in this client only.

    Attributes:
        book: the jobs.
        members: the nodes with a session, by id.
        moving: jobs of lost nodes that wait for another one, or for the return of theirs.
        orphans: jobs of an earlier client, on a lost node: their specs are not known here.
        named: orphans that the trainer was told of, to submit them again, and the node of each.
        left: such jobs while the next start of their node is waited for, and that node, by id.
        on_settled: called with the ids of moved jobs that were acknowledged, before their nodes hear of it.
        on_double: called with a node and a job that runs there, and whose outcome, or next attempt, is another node's.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id, 0)
        self.book = Book()
        self.members: dict[str, Member] = {}
        self.orphans: dict[str, str] = {}
        self.named: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.on_settled: Callable[[list[str]], None] = lambda _job_ids: None
        self.on_double: Callable[[str, str], None] = lambda _node_id, _job_id: None
        self.held_acks = 0
        """Deliveries of moved jobs that are being written down: no node hears of an acknowledgement before."""
        self._kept: dict[str, dict[str, int]] = {}
        """Outcomes that a lost node was not told of, by node and job: they were given out, at this cursor."""
        self._moved_here: dict[int, str] = {}
        """Moved jobs in the inbox, by cursor."""

    @property
    def connected(self) -> bool:
        """Return True while a node has a link."""
        return any(member.state.connected for member in self.members.values())

    @property
    def outstanding(self) -> bool:
        """See `ClientState.outstanding`."""
        waited_for = self.book.jobs or self.left or any(member.busy for member in self.members.values())
        return bool(waited_for) or self._submitting > 0

    def join(self, member: Member) -> None:
        """Add a node."""
        self.members[member.node_id] = member
        self.notify()

    def leave(self, member: Member) -> None:
        """Remove a node that is lost. What it sent is still given out; what it was not told is told when it is back."""
        if self.members.get(member.node_id) is member:
            del self.members[member.node_id]
        self._kept[member.node_id] = {**self._kept.get(member.node_id, {}), **member.acks.unsettled()}
        self.notify()

    def take_from(self, member: Member) -> list[str]:
        """Take over what a node has sent. Return the ids of jobs that its shutdown cut; their outcomes are held."""
        cut: list[str] = []
        source = member.state
        while source.events:
            self.events.append(source.events.popleft())
        while (seen := source.observed.take()) is not None:
            assert isinstance(seen, ObservedEvent | ObservedOutcome)
            self.observed.put(seen)
        for frame in source.inbox.after(member.taken):
            assert isinstance(frame, OutcomeFrame), "members map no arena"
            member.taken = frame.cursor
            if (cursor := self._kept.get(member.node_id, {}).pop(frame.job_id, 0)) > 0:
                member.acks.add(frame.cursor, cursor, frame.job_id)  # it comes again: it was given out
                continue
            end, job = _end_of(frame), self.book.jobs.get(frame.job_id)
            verdict = self.book.judge(member.node_id, frame.job_id, end.status, end.error_code)
            if verdict == "move":
                cut.append(frame.job_id)
                member.acks.hold(frame.cursor, frame.job_id)
                continue
            if verdict == "deliver" and job is not None and job.node_id not in ("", member.node_id):
                self.on_double(job.node_id, frame.job_id)
            member.acks.add(frame.cursor, self._put(frame) if verdict == "deliver" else 0, frame.job_id)
        self._acknowledge(member)
        self.notify()
        return cut

    def put_made_up(self, job_id: str, outcome: bytes) -> None:
        """Add an outcome that no node made, of a job that no node takes."""
        self.book.mark_over([job_id])
        self._put(OutcomeFrame(cursor=0, job_id=job_id, outcome=msgspec.Raw(outcome)))
        self.notify()

    def acknowledge(self, cursor: int) -> None:
        """Acknowledge the outcomes up to `cursor` to their nodes; see `ClientState.acknowledge`."""
        if not self.inbox.acknowledge(cursor):
            return
        settled = [number for number in self._moved_here if number <= cursor]
        if moved := [self._moved_here.pop(number) for number in settled]:
            self.on_settled(moved)
        self.pass_acks()

    def pass_acks(self) -> None:
        """Tell the nodes what is acknowledged, unless that has to be written down first."""
        for member in list(self.members.values()):
            self._acknowledge(member)

    def _acknowledge(self, member: Member) -> None:
        if not self.held_acks and (node_cursor := member.acks.settle(self.inbox.acked)):
            member.client.acknowledge(node_cursor)

    def _put(self, frame: OutcomeFrame) -> int:
        cursor = self.inbox.received + 1
        self.inbox.put(msgspec.structs.replace(frame, cursor=cursor))
        self.orphans.pop(frame.job_id, None)
        self.named.pop(frame.job_id, None)
        self.left.pop(frame.job_id, None)
        if frame.job_id in self.book.moved:
            self._moved_here[cursor] = frame.job_id
        return cursor
