"""The process of a fleet's head from start to exit: sessions, members, edges, its entry in the folder.

serve_fleet()
└─ sessions             the ledger                                             ends last
   └─ head nursery      sessions on the members, requests to the members       second
      └─ accept nursery listeners of the server, their connections             first
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import tempfile
import time
import uuid
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.chat.proof import load_chat_format
from prorl_trio.config.secrets import load_token
from prorl_trio.edges.endpoints import endpoint_url, rest_url
from prorl_trio.edges.prorl_compat import configured_endpoints
from prorl_trio.edges.rest.events import EventFeed
from prorl_trio.edges.tcp import check_address
from prorl_trio.file_systems import sync_folder
from prorl_trio.fleet.head import open_fleet_head
from prorl_trio.node.descriptors import check_descriptors, raise_descriptor_limit
from prorl_trio.node.drain import drain, open_end_signals, until_started
from prorl_trio.node.edges import check_listen, open_edges
from prorl_trio.node.membership import Endpoints, advertised_host
from prorl_trio.node.monitoring import open_monitoring
from prorl_trio.node.parts import open_node_arena
from prorl_trio.node.sessions import open_stored_journal
from prorl_trio.rendezvous.entry import this_process
from prorl_trio.rendezvous.folder import claim_folder
from prorl_trio.rendezvous.head import HeadClaim, HeadEntry, HeadReplaced, remove_head, renew_head
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.sessions.encoding import SharedOutcomes
from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.sessions.session_table import SessionTable
from prorl_trio.supervision import service_task
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_ipc.arena import Arena
    from prorl_trio.config import HeadConfig, ListenConfig
    from prorl_trio.edges.auth import Door
    from prorl_trio.fleet.head import Fleet
    from prorl_trio.node.edges import Edges

logger = logging.getLogger(__name__)

DELIVERY_TIMEOUT_S: Final = 5.0
"""Longest wait of a shutdown for connected trainers to receive their last outcomes."""
CLAIM_POLL_S: Final = 0.25
LEAVE_TIMEOUT_S: Final = 5.0
"""Longest wait of a shutdown for the fleet's disk."""
IDENTITY_FILE: Final = "head.json"


class _Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a head needs again at its next start, in addition to its ledger.

    Attributes:
        session_id: the head's session on the members.
        model: of the fleet.
    """

    session_id: str
    model: str = ""


async def serve_fleet(
    config: HeadConfig,
    *,
    ends_process: bool = False,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Run the head of the fleet in `config.fleet.dir` until SIGTERM or SIGINT.

    For the main thread, because of the signals.

    The first signal drains: the head accepts no more jobs, and lets live jobs end, for at most `drain_timeout_s`. The
    second signal cuts that short. With a ledger on disk, the remaining jobs continue on the members, and the head's
    next start resumes them. Otherwise they are cancelled. SIGHUP reloads the token file, unless `on_hangup` makes it
    drain the head.

    Reports the listener's (host, port) through `task_status`. Returns True if no job was left or cut. With
    `ends_process` later signals are dropped, because the process ends with the head.

    Raises:
        ConfigError: the head cannot start; the message contains the remedy.
    """
    raise_descriptor_limit()
    if not config.fleet.dir:
        raise ConfigError("the head of a fleet needs fleet.dir, the folder of its nodes (--dir)")
    if config.rest.prorl_compat and config.model is None:
        raise ConfigError("rest.prorl_compat needs the fleet's tokenizer: name its folder, [model] path = ...")
    check_descriptors(config)
    edges = await trio.to_thread.run_sync(check_listen, config, configured_endpoints(config))
    await check_address(config.listen)
    clean = True
    with open_end_signals(config.on_hangup, reloads=True, ends_process=ends_process) as signals:
        async with until_started(signals) as starting:
            async with (
                _open_whole(config, edges, starting) as (fleet, sessions, address),
                open_single_nursery() as reloads,
            ):
                if not signals.hangup:
                    await reloads.start(service_task(_serve_reloads, "reload"), config.listen, edges.door)
                task_status.started(address)
                await anext(signals)
                cut = await drain(fleet, signals, config.drain_timeout_s)
                with trio.move_on_after(DELIVERY_TIMEOUT_S):
                    await _wait_delivered(fleet, sessions)
                reloads.cancel_scope.cancel("shutdown")
            clean = cut == 0 and not sessions.journal.failed
    return clean


async def _wait_delivered(fleet: Fleet, sessions: SessionTable) -> None:
    """Return when connected trainers have received their outcomes; at once if jobs are left to the next start."""
    await trio.lowlevel.checkpoint()
    if not fleet.live:
        await sessions.wait_delivered()


async def _serve_reloads(
    listen: ListenConfig, door: Door, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """At each SIGHUP, give `door` the current token of `listen`, whose file may have changed. Runs until cancelled."""
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            try:
                token = await run_sync(lambda: load_token(listen))
            except (ConfigError, OSError) as exc:
                logger.error("reload: the token stays as it is: %s", exc)
                continue
            if door.replace_token(token):
                logger.info("reload: the token is replaced; connections that showed the former one end, jobs go on")
            else:
                logger.info("reload: the token has not changed; all else needs a restart")


@asynccontextmanager
async def _open_whole(
    config: HeadConfig, edges: Edges, starting: trio.CancelScope
) -> AsyncIterator[tuple[Fleet, SessionTable, tuple[str, int]]]:
    """Open all parts of a head.

    Cancels `starting` before members and trainers connect: from then on a signal drains.
    """
    rest = config.rest
    feed = EventFeed(max_streams=rest.max_event_streams, max_events=rest.event_buffer_events)
    folder = await run_sync(lambda: claim_folder(config.fleet.dir))
    await _wait_free(folder, trio.CapacityLimiter(1))  # before the ledger, which on a shared disk may be that head's
    ledger = ledger_folder(config, dict(os.environ))
    async with open_monitoring(config) as monitoring:
        with feed.logs(), open_node_arena(config.arena) as arena:
            async with open_stored_journal(config.ledger, ledger) as journal:
                limits = SessionLimits(
                    max_sessions=config.listen.max_sessions,
                    max_undelivered=config.max_undelivered,
                    max_message_bytes=config.listen.max_message_bytes,
                )
                shared = None if arena is None else SharedOutcomes(arena, config.arena.shared_bytes or arena.size_bytes)
                sessions = SessionTable(journal, limits, shared)
                identity = await run_sync(lambda: _read_identity(ledger))
                async with open_fleet_head(
                    _without_limit_of_attempts(config),
                    FleetWatch(folder),
                    sessions,
                    session_id=identity.session_id,
                    is_durable=ledger is not None,
                    model=identity.model,
                    observers=[*monitoring.observers, feed],
                    options={
                        "max_message_bytes": config.listen.max_message_bytes,
                        "reconnect_timeout_s": config.member_timeout_s,
                        "heartbeat_interval_s": config.listen.heartbeat_interval_s,
                        "heartbeat_timeout_s": config.listen.heartbeat_timeout_s,
                    },
                ) as fleet:
                    if config.rest.prorl_compat and config.model is not None:
                        load = partial(load_chat_format, config.model, proven=False)  # the head writes no prompts
                        fleet.chat_format = await trio.to_thread.run_sync(load)
                    starting.cancel("the head is there")
                    monitoring.watch_sessions(fleet, sessions)
                    if arena is not None and shared is not None:
                        figures = partial(_arena_figures, arena, shared)
                        fleet.describe("arena", figures)
                        monitoring.metrics.watch("arena", figures, "The shared memory of outcomes for trainers here.")
                    monitoring.metrics.watch(
                        "member",
                        partial(_member_figures, fleet),
                        "A node of the fleet: the head's jobs there, and its places.",
                        label="member",
                    )

                    @asynccontextmanager
                    async def membership(found_at: Endpoints) -> AsyncIterator[None]:
                        async with (
                            _open_entry(config, edges.door, folder, found_at, stays=ledger is not None),
                            open_single_nursery() as tasks,
                        ):
                            fleet.start_members(config.recovery_timeout_s)
                            tasks.start_soon(service_task(_keep_model, "fleet model"), fleet, ledger, identity)
                            yield
                            tasks.cancel_scope.cancel("shutdown")

                    default_socket = await run_sync(lambda: _local_socket(config))
                    edges_of_head = open_edges(
                        fleet,
                        edges,
                        sessions,
                        arena,
                        feed,
                        monitoring,
                        membership,
                        default_socket=default_socket,
                    )
                    async with edges_of_head as address:
                        yield fleet, sessions, address


def _without_limit_of_attempts(config: HeadConfig) -> HeadConfig:
    """Return the configuration without a limit on attempts, so that restored jobs cannot exceed it.

    Such a job may be running on a member. The dispatch fails a job after too many lost members.
    """
    ledger = msgspec.structs.replace(config.ledger, max_attempts=1_000_000)
    return msgspec.structs.replace(config, ledger=ledger)


def ledger_folder(config: HeadConfig, environ: dict[str, str]) -> Path | None:
    """Return the folder of the head's ledger, or None if it is in memory.

    `auto` is `prorl-trio/head-HASH` in $XDG_STATE_HOME (~/.local/state), with a hash of the fleet's folder.
    """
    if config.ledger.dir != "auto":
        return Path(config.ledger.dir) if config.ledger.dir else None
    return config.ledger.folder(f"head-{_hash_of(config)}", environ)


def _local_socket(config: HeadConfig) -> Path | None:
    """Return the path of the head's Unix socket, specific to its user, fleet and machine.

    Returns None without a temporary folder, for example if only the file systems of the ledger and the fleet are
    writable.
    """
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as exc:
        logger.warning("no socket for trainers on this host: %s", exc.strerror)
        return None
    return temporary / f"prorl-head-{os.geteuid()}-{_hash_of(config)}" / "head"


def _hash_of(config: HeadConfig) -> str:
    return hashlib.sha256(str(Path(config.fleet.dir).resolve()).encode()).hexdigest()[:16]


def _read_identity(ledger: Path | None) -> _Identity:
    """Return the head's identity from its last start with this ledger, or write and return a new one."""
    if ledger is None:
        return _Identity(session_id=f"head-{uuid.uuid4().hex}")
    path = ledger / IDENTITY_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Identity)
    except FileNotFoundError:
        identity = _Identity(session_id=f"head-{uuid.uuid4().hex}")
        _write_identity(ledger, identity)
        return identity
    except (OSError, msgspec.DecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}; remove it: jobs on the nodes then begin anew") from exc


def _write_identity(ledger: Path, identity: _Identity) -> None:
    draft, path = ledger / f".{IDENTITY_FILE}.new", ledger / IDENTITY_FILE
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(identity))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(ledger)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


async def _keep_model(fleet: Fleet, ledger: Path | None, identity: _Identity) -> None:
    """Store the fleet's model whenever it changes, until cancelled."""
    written = identity.model
    while True:
        await trio.sleep(1.0)
        model = fleet.members.model
        if ledger is not None and model != written:
            known = msgspec.structs.replace(identity, model=model)
            await run_sync(partial(_write_identity, ledger, known))
            written = model


def _arena_figures(arena: Arena, shared: SharedOutcomes) -> dict[str, object]:
    return {**msgspec.structs.asdict(arena.statistics()), "shared": shared.statistics()}


def _member_figures(fleet: Fleet) -> dict[str, dict[str, float]]:
    return {
        node_id: {"jobs": len(places.jobs), "workers": places.workers, "free_places": places.free}
        for node_id, places in fleet.dispatch.members.items()
    }


# ---------------------------------------------------------------- the entry


@asynccontextmanager
async def _open_entry(
    config: HeadConfig, door: Door, folder: Path, found_at: Endpoints, *, stays: bool
) -> AsyncIterator[None]:
    """Maintain the head's entry in the fleet's folder during the block.

    `stays`: the entry remains afterwards, so that trainers wait for the head's next start.

    Raises:
        ConfigError: another head is alive there, or the entry cannot be written.
        HeadReplaced: another head has taken over the fleet, because the heartbeats of this one stopped for a while.
    """
    disk = trio.CapacityLimiter(1)
    await _wait_free(folder, disk)
    entry = _entry(config, found_at, door.token.decode())
    try:
        await run_sync(lambda: renew_head(folder, None, entry), limiter=disk)
    except OSError as exc:
        raise ConfigError(f"fleet.dir: {folder} cannot be written: {exc.strerror}; make room, or name another") from exc
    logger.info("the fleet in %s has its head at %s", folder, entry.url)
    async with open_single_nursery() as tasks:
        tasks.start_soon(_keep_entry, door, folder, entry, disk)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel("the head leaves")
            if not stays:
                with trio.move_on_after(LEAVE_TIMEOUT_S, shield=True):
                    await _remove(folder, entry, disk)


async def _wait_free(folder: Path, disk: trio.CapacityLimiter) -> None:
    """Return when no other head is alive in the folder according to its heartbeat.

    Raises:
        ConfigError: another head is alive.
    """
    claim = HeadClaim(folder, this_process())
    told = False
    while not await run_sync(lambda: claim.is_free(time.monotonic()), limiter=disk):
        if not told:
            told = True
            logger.warning("waiting for the entry of a former head in %s to grow stale", folder)
        await trio.sleep(CLAIM_POLL_S)


async def _remove(folder: Path, entry: HeadEntry, disk: trio.CapacityLimiter) -> None:
    try:
        await run_sync(lambda: remove_head(folder, entry), limiter=disk, abandon_on_cancel=True)
    except OSError as exc:
        logger.warning("the entry of the head stays in %s: %s", folder, exc)


def _entry(config: HeadConfig, found_at: Endpoints, token: str) -> HeadEntry:
    host, port = found_at.address
    address = (advertised_host(config.fleet.advertise, host), port)
    return HeadEntry(
        node_id=config.node_id,
        url=endpoint_url(address, secure=found_at.secure),
        unix_url=found_at.unix_url,
        rest_url=rest_url(address, secure=found_at.secure),
        token=token,
        host=socket.gethostname(),
        process=this_process(),
        version=version("prorl-trio"),
        heartbeat_interval_s=config.fleet.heartbeat_interval_s,
        stale_after_s=config.fleet.stale_after_s,
    )


async def _keep_entry(door: Door, folder: Path, entry: HeadEntry, disk: trio.CapacityLimiter) -> None:
    """Renew the entry until another head has taken over the fleet, then raise `HeadReplaced`.

    Two heads with one ledger would corrupt it, and new trainers cannot find this one.
    """
    replaced: list[HeadReplaced] = []
    await service_task(_beat, "head heartbeat", may_return=True)(door, folder, entry, disk, replaced)
    raise replaced[0]


async def _beat(
    door: Door, folder: Path, entry: HeadEntry, disk: trio.CapacityLimiter, replaced: list[HeadReplaced]
) -> None:
    """Renew the entry. A full or missing disk is logged, and retried."""
    written: HeadEntry = entry
    trouble = ""
    while True:
        with trio.move_on_after(entry.heartbeat_interval_s):
            await door.wait_replaced()
        now = msgspec.structs.replace(entry, token=door.token.decode())
        try:
            written = await run_sync(partial(renew_head, folder, written, now), limiter=disk, abandon_on_cancel=True)
        except HeadReplaced as exc:
            replaced.append(exc)
            return
        except (OSError, ConfigError) as exc:
            if str(exc) != trouble:
                trouble = str(exc)
                logger.error("the heartbeat of the head in %s fails, and goes on: %s", folder, exc)
        else:
            trouble = ""
