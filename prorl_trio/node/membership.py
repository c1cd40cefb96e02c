"""The node's entry in its fleet's folder: claimed at startup, renewed regularly, removed at the end."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.edges.endpoints import endpoint_url, rest_url
from prorl_trio.rendezvous.entry import Capacity, NodeEntry, slurm_step, this_process
from prorl_trio.rendezvous.folder import claim_folder, read_entry, remove_entry, renew_entry, write_entry
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.supervision import service_task
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from prorl_trio.edges.auth import Door
    from prorl_trio.node.node import Node

logger = logging.getLogger(__name__)

CLAIM_POLL_S: Final = 0.25
LEAVE_TIMEOUT_S: Final = 5.0
"""Longest time that a shutdown waits for the fleet's disk."""
EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::", ""})

_T = TypeVar("_T")


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a node's server as (host, port), whether it uses TLS, and the Unix socket's URL."""

    address: tuple[str, int]
    secure: bool = False
    unix_url: str = ""


@asynccontextmanager
async def open_membership(
    node: Node, door: Door, endpoints: Endpoints, unfinished: Callable[[], int]
) -> AsyncIterator[None]:
    """Maintain the node's entry in its fleet's folder during the block. Does nothing for a node without a fleet.

    At the end the entry is removed. If unfinished work is left to the node's next start (`restart_within_s`), the entry
    stays, as `away`.

    Args:
        node: the node.
        door: has the token that the entry passes to trainers. A new token is written at once.
        endpoints: the addresses of the node's server.
        unfinished: returns the number of undelivered outcomes and of jobs that were cut for the next start.

    Raises:
        ConfigError: the folder cannot be used; another live node has the name; or the fleet's nodes have another
            version or model.
    """
    if not node.config.fleet.dir:
        yield
        return
    disk = _Disk()
    folder = await disk.run(lambda: claim_folder(node.config.fleet.dir))
    entry = _entry(node, endpoints, door.token.decode())
    await _claim(folder, entry, disk)
    try:
        await disk.run(lambda: write_entry(folder, entry))
    except OSError as exc:
        raise ConfigError(f"fleet.dir: {folder} cannot be written: {exc.strerror}; make room, or name another") from exc
    logger.info("node %s is in the fleet of %s, at %s", entry.node_id, folder, entry.url)
    async with open_single_nursery() as tasks:
        tasks.start_soon(service_task(_beat, "fleet heartbeat"), node, door, folder, entry, disk)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel("the node leaves the fleet")
            with trio.move_on_after(LEAVE_TIMEOUT_S, shield=True) as leaving:
                await _leave(node, folder, entry, disk, unfinished=node.live > 0 or unfinished() > 0)
            if leaving.cancelled_caught:
                logger.error("the fleet's folder %s does not answer: the entry stays, and counts as stale soon", folder)


class _Disk:
    """The fleet's disk: one call at a time, each in a thread that a cancel abandons, because the call may hang."""

    def __init__(self) -> None:
        self._turn = trio.CapacityLimiter(1)

    async def run(self, fn: Callable[[], _T]) -> _T:
        return await run_sync(fn, limiter=self._turn, abandon_on_cancel=True)


def advertised_host(advertise: str, listening: str) -> str:
    """Return the host name at which others reach a node that listens on the address `listening`."""
    if advertise:
        return advertise
    return socket.gethostname() if listening in EVERY_ADDRESS else listening


def _entry(node: Node, endpoints: Endpoints, token: str) -> NodeEntry:
    config = node.config
    host, port = endpoints.address
    found_at = (advertised_host(config.fleet.advertise, host), port)
    facts = node.part("model")
    assert isinstance(facts, dict)
    return NodeEntry(
        node_id=node.node_id,
        url=endpoint_url(found_at, secure=endpoints.secure),
        unix_url=endpoints.unix_url,
        rest_url=rest_url(found_at, secure=endpoints.secure),
        token=token,
        host=socket.gethostname(),
        process=this_process(),
        slurm=slurm_step(dict(os.environ)),
        model=f"{Path(config.model.path).resolve().name} {facts['vocabulary'][:16]}",
        version=version("prorl-trio"),
        backends=config.backends.weighted_urls,
        capacity=_capacity(node),
        heartbeat_interval_s=config.fleet.heartbeat_interval_s,
        stale_after_s=config.fleet.stale_after_s,
        restart_within_s=config.fleet.restart_within_s,
    )


def _capacity(node: Node) -> Capacity:
    return Capacity(
        run_workers=node.config.stages.run_workers,
        max_live=node.config.admission.max_live,
        live=node.live,
    )


def _now(node: Node, entry: NodeEntry) -> NodeEntry:
    return msgspec.structs.replace(
        entry,
        backends=node.config.backends.weighted_urls,
        capacity=_capacity(node),
        state="draining" if node.draining else "open",
        unready=node.unreadiness(),
    )


async def _claim(folder: Path, entry: NodeEntry, disk: _Disk) -> None:
    """Return when no other live node has our name.

    A node of our name that was killed on another machine looks alive until its entry is stale, so this waits for that.

    Raises:
        ConfigError: another live node has the name.
    """
    watch = FleetWatch(folder)
    first: int | None = None
    waited = False
    while True:
        view = await disk.run(watch.read)
        former = view.nodes.get(entry.node_id)
        if former is None or former.life != "live" or former.entry.process == entry.process:
            return
        beat = await disk.run(lambda: _time_of(folder, entry.node_id))
        first = beat if first is None else first
        if beat != first:
            raise ConfigError(
                f"fleet.dir: {folder} has a living node {entry.node_id!r} already (on {former.entry.host}, pid "
                f"{former.entry.process.pid}); give this one another node_id, or end that one"
            )
        if not waited:
            waited = True
            logger.warning("waiting for the entry of a former node %s in %s to grow stale", entry.node_id, folder)
        await trio.sleep(CLAIM_POLL_S)


def _time_of(folder: Path, node_id: str) -> int:
    with suppress(FileNotFoundError, ConfigError):
        return read_entry(folder / f"{node_id}.json")[1]
    return 0


async def _beat(node: Node, door: Door, folder: Path, entry: NodeEntry, disk: _Disk) -> None:
    """Renew the entry until cancelled. If the disk is full or unavailable, log it and retry."""
    written = entry
    trouble = ""
    while True:
        with trio.move_on_after(entry.heartbeat_interval_s):
            await door.wait_replaced()
        now = msgspec.structs.replace(_now(node, entry), token=door.token.decode())
        try:
            written = await disk.run(partial(_renew, folder, written, now))
        except (OSError, ConfigError) as exc:
            if str(exc) != trouble:
                trouble = str(exc)
                logger.error("the heartbeat of node %s in %s fails, and goes on: %s", entry.node_id, folder, exc)
        else:
            trouble = ""


def _renew(folder: Path, before: NodeEntry, now: NodeEntry) -> NodeEntry:
    """Write `now`, or renew only the time of `before` if nothing changed or the disk is full; return the entry on disk.

    Raises:
        ConfigError: another process has the name now.
        OSError: the disk failed.
    """
    path = folder / f"{now.node_id}.json"
    try:
        found = read_entry(path)[0]
    except FileNotFoundError:
        write_entry(folder, now)  # the entry was removed
        return now
    if found.process != now.process:
        raise ConfigError(
            f"{path} is now of pid {found.process.pid} on {found.host}, which took the name {now.node_id!r} over; this "
            "node is found by nobody new: end it"
        )
    if now != before:
        try:
            write_entry(folder, now)
        except OSError:
            renew_entry(folder, now)
            raise
        return now
    renew_entry(folder, now)
    return before


async def _leave(node: Node, folder: Path, entry: NodeEntry, disk: _Disk, *, unfinished: bool) -> None:
    try:
        if unfinished and entry.restart_within_s > 0:
            away = msgspec.structs.replace(_now(node, entry), state="away")
            await disk.run(lambda: _renew(folder, entry, away))
        else:
            await disk.run(lambda: remove_entry(folder, entry))
    except (OSError, ConfigError) as exc:
        logger.warning("the entry of node %s stays in %s: %s", entry.node_id, folder, exc)
