"""The pools of LLM backends of a fleet's nodes as one pool: ownership of backends, and fleet-wide policy updates."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.client.errors import ConnectionLost
from prorl_trio.types.backends import (
    AddBackend,
    BackendList,
    DrainBackend,
    ListBackends,
    PauseBackends,
    RemoveBackends,
    ResumeBackends,
    UpdateReport,
    WeighBackend,
)
from prorl_trio.types.errors import BackendError, ProrlError, ServiceError, UnknownBackend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from prorl_trio.fleet.members import Member
    from prorl_trio.types.backends import AnswerT, NodeRequest


UPDATES_KEPT: Final = 8
"""Number of policy updates whose nodes are remembered, in case their last step is repeated."""
LOST_IN_UPDATE: Final = "it was lost in a policy update"
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
FIRST_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0

logger = logging.getLogger(__name__)

UNSETTLED: Final = "its policy version is not known yet"
ASK_S: Final = 10.0
"""Longest wait for a node's answer. A node that has not answered is asked again."""
RETRY_S: Final = 0.25
UNNAMED: Final = "0"
"""The version of weights that are unnamed in their engine and were not part of an update."""


class PolicyUndecided(Exception):
    """The fleet's nodes have different policy versions, and the newest is unknown."""


class FleetPolicy:
    """Decides which nodes get jobs: the nodes with the fleet's policy version.

    That is the last version announced by an update through this head. Before the first update, it is the newest version
    of any node: see `newest_version`.

    Attributes:
        version: None if no node has a version, or it is undecided.
        undecided: why it is unknown; empty if it is known.
        waiting: a policy update is in progress, and nodes that have joined must wait for its end.
    """

    def __init__(self, members: Mapping[str, Member]) -> None:
        """Create it without decisions. `members` are the nodes with a session by id, updated live."""
        self.version: str | None = None
        self.undecided = ""
        self.waiting = False
        self._members = members
        self._announced: str | None = None
        self._steps = 0
        """Number of resumes so far: an answer given before a resume is outdated after it."""
        self._judging = trio.Lock()

    def joined(self, member: Member) -> None:
        """Give a node that has joined no jobs until `settle` has decided about it."""
        member.behind = UNSETTLED

    @property
    def settled(self) -> bool:
        """Return True if every node has been decided."""
        return not any(member.behind == UNSETTLED for member in self._members.values())

    async def settle(self) -> None:
        """Return when every node has been decided, old ones again, because a new node may have a later policy."""
        async with self._judging:
            while not self.settled:
                await self._judge()
                if not self.settled:
                    await trio.sleep(RETRY_S)

    async def judge_again(self) -> None:
        """Decide about all nodes again, because one was lost or an update was cut off."""
        async with self._judging:
            await self._judge()

    def begin_resume(self) -> None:
        """Record that a resume is being sent to the nodes: their earlier answers no longer count."""
        self._steps += 1

    def announce(self, version: str, updated: Collection[str]) -> None:
        """Record that the nodes `updated` now have this version, and that it is the fleet's."""
        self._steps += 1
        self._announced = self.version = version
        self.undecided = ""
        for member in self._members.values():
            member.behind = "" if member.node_id in updated else f"it was not there for version {version}"

    async def _judge(self) -> None:
        """Ask all nodes, and decide about those that answer."""
        steps = self._steps
        policies = await self._ask()
        self.waiting = any(policy.updating for policy in policies.values())
        if not policies or self.waiting or steps != self._steps:
            return
        self.undecided = ""
        try:
            self.version = newest_version(policies) if self._announced is None else self._announced
        except PolicyUndecided as exc:
            logger.error("no node of the fleet gets jobs: %s", exc)
            self.version, self.undecided = None, str(exc)
        for node_id, policy in policies.items():
            member = self._members.get(node_id)
            if member is not None:
                self._set(member, self._behind(policy))

    def _behind(self, policy: NodePolicy) -> str:
        if self.undecided:
            return "which node has the newest policy version is not known"
        if self.version is None or policy.versions <= {self.version}:
            return ""
        return f"its backends have the policy versions {sorted(policy.versions)}, and the fleet has {self.version!r}"

    def _set(self, member: Member, behind: str) -> None:
        if behind and behind != member.behind and not self.undecided:
            logger.error("node %s gets no jobs until the next policy update: %s", member.node_id, behind)
        member.behind = behind

    async def _ask(self) -> dict[str, NodePolicy]:
        policies: dict[str, NodePolicy] = {}

        async def ask(member: Member) -> None:
            try:
                policies[member.node_id] = policy_of(await member.client.list_backends())
            except ProrlError as exc:
                logger.info("node %s does not tell its policy version: %s", member.node_id, exc)

        with trio.move_on_after(ASK_S):
            async with open_single_nursery() as nursery:
                for member in list(self._members.values()):
                    nursery.start_soon(ask, member)
        return policies


class NodePolicy(NamedTuple):
    """The policy of a node.

    Attributes:
        versions: of its reachable backends.
        announced: recent versions from policy updates of this node, oldest first.
        updating: a policy update is in progress there.
    """

    versions: frozenset[str]
    announced: tuple[str, ...] = ()
    updating: bool = False


def policy_of(listed: BackendList) -> NodePolicy:
    """Return a node's policy according to its list of backends."""
    pool: Mapping[str, Any] = listed.pool
    versions = {str(each.get("policy_version", "")) for each in pool.get("backends", [])}
    return NodePolicy(frozenset(versions - {""}), tuple(pool.get("versions", ())), bool(pool.get("updating")))


def newest_version(nodes: Mapping[str, NodePolicy]) -> str | None:
    """Return the newest of all nodes' versions; None if none has any.

    A version is later than another if a node got it in an update while it had the other. If no node has had both, any
    version is later than `0` (unnamed weights), and the larger of two integers is later.

    Raises:
        PolicyUndecided: no version is later than all the others by these rules.
    """
    there = sorted({version for node in nodes.values() for version in node.versions})
    newest = [one for one in there if all(_is_later(one, other, nodes) for other in there if other != one)]
    if newest:
        return newest[0]
    if not there:
        return None
    who = "; ".join(
        f"{version}: {', '.join(name for name, node in sorted(nodes.items()) if version in node.versions)}"
        for version in there
    )
    raise PolicyUndecided(
        f"the nodes of the fleet have different policy versions ({who}), and none of them can tell which came last; "
        "update the policy, which reaches all of them (client.policy_update), or end the nodes with the older one"
    )


def _is_later(one: str, other: str, nodes: Mapping[str, NodePolicy]) -> bool:
    lists = [node.announced for node in nodes.values() if one in node.announced and other in node.announced]
    told = {announced.index(one) > announced.index(other) for announced in lists}
    if told:
        return told == {True}
    if UNNAMED in (one, other):
        return other == UNNAMED
    return one.isdecimal() and other.isdecimal() and int(one) > int(other)


class FleetPools:
    """The operations of `BackendCalls` on all nodes: a step of a policy update succeeds on every node, or fails.

    Attributes:
        policy: which nodes have the fleet's policy version.
        owners: which nodes have which backends.
    """

    def __init__(
        self, members: Mapping[str, Member], run_soon: Callable[[Callable[[], Awaitable[None]]], None]
    ) -> None:
        """Create it without contacting nodes. `members`: nodes with a session, by id.

        `run_soon` starts a background task.
        """
        self.policy = FleetPolicy(members)
        self.owners = _BackendOwners(members, self.policy)
        self._members = members
        self._run_soon = run_soon
        self._updates: dict[str, list[Member]] = {}
        """Nodes of a policy update from its pause on, by its holder."""
        self._open: set[str] = set()
        """Holders of the updates in progress."""

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """Carry out one operation on the pools of all affected nodes."""
        return cast("AnswerT", await self._any(cast("NodeRequest[Any]", request)))

    async def _any(self, request: NodeRequest[Any]) -> object:
        if isinstance(request, AddBackend):
            await self.owners.add(request)
            return _joined(await _ask_all(self._all(), ListBackends()))
        if isinstance(request, ListBackends):
            return _joined(await _ask_all(self._all(), request))
        if isinstance(request, DrainBackend | RemoveBackends):
            self.owners.taken_out(request)
        elif not isinstance(request, WeighBackend):
            return await self._step(request)
        if request.url is not None:
            answer = await self._where_it_is(request, request.url)
            if isinstance(request, WeighBackend):
                self.owners.weights[_origin(request.url)] = request.weight
            return answer
        return _joined(await _ask_all(self._all(), request))

    def version_of(self, member: Member) -> str | None:
        """Return the policy version that a node's backends certainly have; None if unknown.

        During an update they may have either the old or the new weights.
        """
        in_update = any(member in self._updates[holder] for holder in self._open)
        return None if member.behind or in_update else self.policy.version

    async def node_lost(self, member: Member, version: str | None) -> None:
        """Reassign the backends of a lost node, which had the policy `version`, to others."""
        await self.policy.judge_again()
        await self.owners.move(member, version)

    def _all(self) -> list[Member]:
        members = list(self._members.values())
        if not members:
            raise BackendError("the fleet has no node now", retryable=True)
        return members

    async def _where_it_is(self, request: NodeRequest[BackendList], url: str) -> BackendList:
        lists = await _ask_all(self._all(), ListBackends())
        has = [member for member, answer in lists if url.rstrip("/") in answer.urls]
        if not has:
            raise UnknownBackend(f"no node of the fleet has the backend {url}")
        await _ask_all(has, request)
        return _joined(await _ask_all(self._all(), ListBackends()))

    async def _step(self, request: NodeRequest[UpdateReport]) -> UpdateReport:
        """Perform a step of a pause or a policy update on the nodes that were present at its start."""
        holder = str(getattr(request, "holder", ""))
        if isinstance(request, PauseBackends) and holder:
            self._updates[holder] = self._all()
            self._open.add(holder)
            if len(self._updates) > UPDATES_KEPT:
                oldest = next(iter(self._updates))
                self._open.discard(oldest)
                del self._updates[oldest]
        members = self._updates.get(holder) or self._all()
        if isinstance(request, ResumeBackends):
            return await self._resume(request, members)
        return _together([report for _, report in await _ask_all(members, request)])

    async def _resume(self, request: ResumeBackends, members: list[Member]) -> UpdateReport:
        """End an update. A node lost in the meantime drops out: it reverts, or is behind, by itself."""
        self.policy.begin_resume()
        answers: list[tuple[Member, UpdateReport]] = []
        try:
            answers = await _ask_all(members, request, lost_is_fine=True)
        finally:
            self._open.discard(request.holder)
            answered = {member.node_id for member, _ in answers}
            for member in members:
                if self._members.get(member.node_id) is not member or (answers and member.node_id not in answered):
                    member.behind = member.behind or LOST_IN_UPDATE
            if request.holder and not (answers and request.policy_version is not None):
                self._run_soon(self.policy.judge_again)  # some nodes may have the new version
        if request.policy_version is not None:
            self.policy.announce(request.policy_version, answered)
            self._run_soon(self.owners.give_back)
        return _together([report for _, report in answers])


class _Placed(NamedTuple):
    """A backend that the head gave to the node `node_id`; `host` is the machine of its engine."""

    node_id: str
    weight: float | None
    host: str


class _BackendOwners:
    """The nodes that own the backends, according to this and earlier starts of the head.

    A backend goes to a node on its own host if possible, and among several candidates to the one with the fewest
    backends. The backends of a lost node, configured or added by this head, go to others in the same way, while the
    fleet has their policy version. When the node returns with its configured backends and the fleet's policy, the other
    nodes release them.
    """

    def __init__(self, members: Mapping[str, Member], policy: FleetPolicy) -> None:
        self._members = members
        self._policy = policy
        self._placed: dict[str, _Placed] = {}
        self.weights: dict[str, float] = {}
        """Weights assigned to backends since, whatever their owner."""
        self._withheld: set[str] = set()
        """URLs that were drained or removed: only an explicit add uses them again."""

    async def add(self, request: AddBackend) -> None:
        """Make a node add a backend; an existing owner adds it again. Raises that node's error."""
        url, host = _origin(request.url), _host_of(request.url, socket.gethostname())
        node_id = await self._give(request, host)
        self._placed[url] = _Placed(node_id, request.weight, host)
        self.weights.pop(url, None)
        self._withheld.discard(url)

    async def adopt(self, member: Member) -> None:
        """Record the state of a joined node's backends from an earlier start of this head.

        Backends beyond its configuration were given to it. If another node owns them now, because this one was away, it
        releases them. Configured backends that it does not use were drained or removed.
        """
        try:
            listed = await member.client.list_backends()
        except ProrlError as exc:
            logger.info("node %s does not tell its backends: %s", member.node_id, exc)
            return
        backends = cast("Sequence[Mapping[str, Any]]", listed.pool["backends"])
        own = {*listed.pool.get("configured", _own(member))}  # the entry may be older than the list
        self._withheld |= own - {each["url"] for each in backends if each["state"] in ("active", "down")}
        for backend in backends:
            url = backend["url"]
            if backend["state"] != "active" or url in own | self._withheld:
                continue
            placed = self._placed.get(url)
            if placed is None or placed.node_id not in self._members:
                self._placed[url] = _Placed(member.node_id, backend.get("weight"), _host_of(url, member.entry.host))
            elif placed.node_id != member.node_id:
                await self._give_up(member, url, placed.node_id)

    async def _give_up(self, member: Member, url: str, owner: str) -> None:
        try:
            await member.client.operate(RemoveBackends(url=url))
        except ProrlError as exc:
            logger.error("backend %s is with the nodes %s and %s: %s", url, owner, member.node_id, exc)
        else:
            logger.warning("node %s has given up backend %s, which is with node %s", member.node_id, url, owner)

    def taken_out(self, request: DrainBackend | RemoveBackends) -> None:
        """Record that backends were drained or removed, so that they are not reassigned when their node is lost."""
        known = {url for member in self._members.values() for url in _own(member)} | self._placed.keys()
        urls = known if request.url is None else {_origin(request.url)}
        self._withheld |= urls
        for url in urls:
            self._placed.pop(url, None)
            self.weights.pop(url, None)

    async def move(self, member: Member, version: str | None) -> None:
        """Reassign the backends of a lost node; return when each has an owner, its node is back, or none is possible.

        Args:
            member: the node.
            version: the policy version of its backends at the loss; None if unknown.
        """
        waiting = self._without_owner(member)
        pause_s, told = FIRST_RETRY_S, ""
        await trio.lowlevel.checkpoint()
        while waiting := {url: it for url, it in waiting.items() if not self._is_cared_for(url, member.node_id)}:
            if version is None or version != self._policy.version:
                logger.error(
                    "%s, of the lost node %s, go to no other: they may not have the policy version %s of the fleet; "
                    "load it there, then add them",
                    ", ".join(waiting),
                    member.node_id,
                    self._policy.version,
                )
                return
            for url, placed in list(waiting.items()):
                try:
                    weight = self.weights.get(url, placed.weight)
                    node_id = await self._give(AddBackend(url=url, weight=weight, policy_version=version), placed.host)
                except ProrlError as exc:
                    if isinstance(exc, BackendError) and not exc.retryable:
                        logger.error("backend %s of the lost node %s goes to no other: %s", url, member.node_id, exc)
                        del waiting[url]
                    elif str(exc) != told:
                        told = str(exc)
                        logger.warning("backend %s of the lost node %s waits for another: %s", url, member.node_id, exc)
                else:
                    logger.warning("backend %s of the lost node %s is with node %s", url, member.node_id, node_id)
                    self._placed[url] = placed._replace(node_id=node_id)
                    del waiting[url]
            if waiting:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def give_back(self) -> None:
        """Take back reassigned backends whose own node has returned and uses them again."""
        await trio.lowlevel.checkpoint()
        for url, placed in list(self._placed.items()):
            homes = [m for m in self._members.values() if url in _own(m) and not m.behind]
            if not homes or placed.node_id in {member.node_id for member in homes}:
                continue
            try:
                lists = await _ask_all(homes, ListBackends())
                if not any(_is_active(url, listed.pool) for _, listed in lists):
                    continue
                holder = self._members.get(placed.node_id)
                if holder is not None:
                    await holder.client.operate(RemoveBackends(url=url))
            except UnknownBackend:
                pass  # another task has done it
            except ServiceError as exc:
                logger.info("backend %s is not taken back yet: %s", url, exc)
                continue
            logger.info("backend %s is back with its own node", url)
            if self._placed.get(url) == placed:
                del self._placed[url]

    def _without_owner(self, lost: Member) -> dict[str, _Placed]:
        mine = {
            url: _Placed(lost.node_id, weight, _host_of(url, lost.entry.host))
            for url, weight in lost.entry.backends.items()
            if url not in self._placed
        }
        given = {url: placed for url, placed in self._placed.items() if placed.node_id == lost.node_id}
        return {**mine, **given}

    def _is_cared_for(self, url: str, lost_id: str) -> bool:
        """Return True if a lost node's backend needs no new owner: another node configures it, or it is withheld.

        Backends that were added to the lost node survive only if it did not restart, so it is asked when it is back.
        """
        placed = self._placed.get(url)
        return (
            url in self._withheld
            or any(url in _own(member) for member in self._members.values())
            or (placed is not None and placed.node_id != lost_id and placed.node_id in self._members)
        )

    async def _give(self, request: AddBackend, host: str) -> str:
        """Make the most suitable node add a backend; return its id."""
        members = list(self._members.values())
        if request.policy_version is not None:
            members = [member for member in members if not member.behind]
        if not members:
            raise BackendError("the fleet has no node now that could take a backend", retryable=True)
        lists = await _ask_all(members, ListBackends())
        has = [pair for pair in lists if _origin(request.url) in pair[1].urls]
        near = [pair for pair in lists if _is_on(pair[0], host)]
        if request.policy_version is not None and not near and urlsplit(request.url).hostname in LOOPBACK:
            raise BackendError(f"{request.url}: no other node is on its host, {host}", retryable=True)
        chosen, _ = min(has or near or lists, key=lambda pair: (len(pair[1].urls), pair[0].node_id))
        await chosen.client.operate(request)
        return chosen.node_id


def _together(reports: list[UpdateReport]) -> UpdateReport:
    return UpdateReport(
        paused=all(report.paused for report in reports),
        waiting=sum(report.waiting for report in reports),
        backends=[backend for report in reports for backend in report.backends],
    )


async def _ask_all(
    members: Sequence[Member], request: NodeRequest[AnswerT], *, lost_is_fine: bool = False
) -> list[tuple[Member, AnswerT]]:
    """Ask nodes concurrently; return their answers, in order. Raises the first error after all have answered.

    `lost_is_fine`: lost nodes are skipped, unless none is left.
    """
    answers: dict[str, AnswerT] = {}
    errors: list[ServiceError | BackendError] = []

    async def ask(member: Member) -> None:
        try:
            answers[member.node_id] = await member.client.operate(request)
        except (ServiceError, BackendError) as exc:
            if not isinstance(exc, ConnectionLost):
                errors.append(exc)
                return
            lost = f"node {member.node_id} was lost while it was asked to {request.operation}"
            logger.error("%s: %s", lost, exc)
            if not lost_is_fine:
                errors.append(BackendError(lost, retryable=True))

    async with open_single_nursery() as nursery:
        for member in members:
            nursery.start_soon(ask, member)
    if errors:
        raise errors[0]
    if not answers:
        raise BackendError("all nodes of the fleet were lost", retryable=True)
    return [(member, answers[member.node_id]) for member in members if member.node_id in answers]


def _joined(answers: Sequence[tuple[Member, BackendList]]) -> BackendList:
    """Return the lists of several nodes as one; each backend in `pool` names its node."""
    pools: list[Mapping[str, object]] = [answer.pool for _, answer in answers]
    backends = [
        {**backend, "node_id": member.node_id} for member, answer in answers for backend in answer.pool["backends"]
    ]
    return BackendList(
        urls=[url for _, answer in answers for url in answer.urls],
        pool={
            **{name: sum(cast("int", pool.get(name, 0)) for pool in pools) for name in ("open_leases", "waiting")},
            "backends": backends,
        },
    )


def _own(member: Member) -> dict[str, float]:
    """Return the backends in a node's own configuration."""
    return member.entry.backends


def _origin(url: str) -> str:
    return url.rstrip("/")


def _host_of(url: str, here: str) -> str:
    """Return the machine of an engine by its name in the URL; `here` replaces the loopback."""
    host = urlsplit(url).hostname or ""
    return here if host in LOOPBACK else host


def _is_on(member: Member, host: str) -> bool:
    """Return True if the node is on that machine, by any of the names in its entry."""
    entry = member.entry
    names = {entry.host, urlsplit(entry.url).hostname}
    return host in names or (entry.slurm is not None and host == entry.slurm.node_name)


def _is_active(url: str, pool: dict[str, list[dict[str, object]]]) -> bool:
    return any(each["url"] == url and each["state"] == "active" for each in pool["backends"])
