"""The nodes of a fleet that have its LLM backends: those of a lost node are given to others, and back to it."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import trio

from prorl_trio.client.errors import ConnectionLost
from prorl_trio.client.fleet.asking import ask_all
from prorl_trio.types.backends import AddBackend, DrainBackend, ListBackends, RemoveBackends
from prorl_trio.types.errors import BackendError, ProrlError, ServiceError, UnknownBackend

if TYPE_CHECKING:
    from prorl_trio.client.fleet.asking import PoolMember, PoolMembers
    from prorl_trio.client.fleet.policy import FleetPolicy

__all__ = ["BackendOwners"]

logger = logging.getLogger(__name__)

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
FIRST_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0


class _Placed(NamedTuple):
    """A backend that this client gave to the node `node_id`; `host` is the machine that its engine is on."""

    node_id: str
    weight: float | None
    host: str


class BackendOwners:
    """The nodes that have the backends, as far as this client has seen to it.

    A backend goes to a node on its own host if there is one, of several candidates to that with the fewest. Those of a
    lost node, by its configuration or because this client added them there, go to others in the same way, as long as
    the fleet has the policy version that they have. When the node is back with the backends of its configuration, and
    has the fleet's policy, the others give them up.
    """

    def __init__(self, state: PoolMembers, policy: FleetPolicy) -> None:
        self._state = state
        self._policy = policy
        self._placed: dict[str, _Placed] = {}
        self._withheld: set[str] = set()
        """URLs that were drained or removed: they are put to use by nobody but who adds them."""

    async def add(self, request: AddBackend) -> None:
        """Have a node add a backend; one that has it already takes it again. Raises what that node answers."""
        url, host = _origin(request.url), _host_of(request.url, socket.gethostname())
        node_id = await self._give(request, host)
        self._placed[url] = _Placed(node_id, request.weight, host)
        self._withheld.discard(url)

    def taken_out(self, request: DrainBackend | RemoveBackends) -> None:
        """Note that backends were drained or removed: that they are given to nobody when their node is lost."""
        known = {url for member in self._state.members.values() for url in _own(member)} | self._placed.keys()
        urls = known if request.url is None else {_origin(request.url)}
        self._withheld |= urls
        for url in urls:
            self._placed.pop(url, None)

    async def move(self, member: PoolMember, version: str | None) -> None:
        """Give the backends of a lost node to others: return when each has one, its node is back, or it cannot be.

        Args:
            member: the node.
            version: of the policy that its backends had when it was lost; None: that is not known.
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
                    node_id = await self._give(
                        AddBackend(url=url, weight=placed.weight, policy_version=version), placed.host
                    )
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
        """Take backends from the nodes that they were given to, whose own node is back and has put them to use."""
        await trio.lowlevel.checkpoint()
        for url, placed in list(self._placed.items()):
            homes = [m for m in self._state.members.values() if url in _own(m) and not m.behind]
            if not homes or placed.node_id in {member.node_id for member in homes}:
                continue
            try:
                lists = await ask_all(homes, ListBackends())
                if not any(_is_active(url, listed.pool) for _, listed in lists):
                    continue
                holder = self._state.members.get(placed.node_id)
                if holder is not None:
                    await holder.client.operate(RemoveBackends(url=url))
            except UnknownBackend:
                pass  # another client has seen to it
            except ServiceError as exc:
                logger.info("backend %s is not taken back yet: %s", url, exc)
                continue
            logger.info("backend %s is back with its own node", url)
            if self._placed.get(url) == placed:
                del self._placed[url]

    def _without_owner(self, lost: PoolMember) -> dict[str, _Placed]:
        mine = {
            url: _Placed(lost.node_id, weight, _host_of(url, lost.entry.host))
            for url, weight in lost.entry.backends.items()
            if url not in self._placed
        }
        given = {url: placed for url, placed in self._placed.items() if placed.node_id == lost.node_id}
        return {**mine, **given}

    def _is_cared_for(self, url: str, lost_id: str) -> bool:
        """Return True if a backend of a lost node needs no other: a node has it by its configuration, or nobody shall.

        The lost node, if it is back, has those that were added to it only if it was not started again: it is asked.
        """
        placed = self._placed.get(url)
        return (
            url in self._withheld
            or any(url in _own(member) for member in self._state.members.values())
            or (placed is not None and placed.node_id != lost_id and placed.node_id in self._state.members)
        )

    async def _give(self, request: AddBackend, host: str) -> str:
        """Have the node that suits best add a backend; return its id."""
        members = list(self._state.members.values())
        if request.policy_version is not None:
            members = [member for member in members if not member.behind]
        if not members:
            raise ConnectionLost("the fleet has no node now that could take a backend")
        lists = await ask_all(members, ListBackends())
        has = [pair for pair in lists if _origin(request.url) in pair[1].urls]
        near = [pair for pair in lists if _is_on(pair[0], host)]
        if request.policy_version is not None and not near and urlsplit(request.url).hostname in LOOPBACK:
            raise BackendError(f"{request.url}: no other node is on its host, {host}", retryable=True)
        chosen, _ = min(has or near or lists, key=lambda pair: (len(pair[1].urls), pair[0].node_id))
        await chosen.client.operate(request)
        return chosen.node_id


def _own(member: PoolMember) -> dict[str, float]:
    """Return the backends of a node's own configuration."""
    return member.entry.backends


def _origin(url: str) -> str:
    return url.rstrip("/")


def _host_of(url: str, here: str) -> str:
    """Return the machine of an engine, by the name that its URL has for it; `here` is that of the loopback."""
    host = urlsplit(url).hostname or ""
    return here if host in LOOPBACK else host


def _is_on(member: PoolMember, host: str) -> bool:
    """Return True if the node is on that machine, by any of the names that its entry has for it."""
    entry = member.entry
    names = {entry.host, urlsplit(entry.url).hostname}
    return host in names or (entry.slurm is not None and host == entry.slurm.node_name)


def _is_active(url: str, pool: dict[str, list[dict[str, object]]]) -> bool:
    return any(each["url"] == url and each["state"] == "active" for each in pool["backends"])
