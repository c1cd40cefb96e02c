"""The opening of a session on all nodes of a fleet."""

from __future__ import annotations

import logging
import uuid
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from ipc.nursery import single_exception
from prorl_trio.client.errors import ConnectionLost
from prorl_trio.client.fleet.client import FleetClient
from prorl_trio.client.fleet.moves import Delivered, Moved, MoveLog
from prorl_trio.client.fleet.roster import Roster
from prorl_trio.client.fleet.state import FleetState
from prorl_trio.config.secrets import TOKEN_VARIABLE
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.types.errors import ConfigError, ServiceError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from os import PathLike

    from prorl_trio.rendezvous.watch import FleetView

__all__ = ["open_fleet"]

logger = logging.getLogger(__name__)

POLL_S: Final = 0.1
CLOSE_TIMEOUT_S: Final = 5.0
"""Longest that leaving waits for the fleet's disk."""


@asynccontextmanager
async def open_fleet(
    folder: str | PathLike[str],
    token: str,
    *,
    session_id: str | None,
    max_message_bytes: int,
    connect_timeout_s: float,
    reconnect_timeout_s: float,
    **options: Any,
) -> AsyncIterator[FleetClient]:
    """Open a session on all nodes of the fleet in `folder`. See `prorl_trio.client.connect`.

    Raises:
        ConfigError: the folder cannot be read, or its nodes are of several versions or models.
        ConnectionLost: no node could be reached within `connect_timeout_s`.
    """
    watch = FleetWatch(folder)
    state = FleetState(session_id or uuid.uuid4().hex)
    log = MoveLog(Path(folder), state.session_id)
    named: set[str] = set()
    for line in await trio.to_thread.run_sync(log.read):
        match line:
            case Delivered():
                state.book.mark_over([line.job_id])
            case Moved():
                state.book.moved.setdefault(line.job_id, set()).add(line.node_id)
                named.discard(line.job_id)  # it was submitted again
            case _:
                named.add(line.job_id)
    with single_exception():
        async with trio.open_nursery() as nursery:
            client = FleetClient(state, log, nursery, max_message_bytes)
            members = {"max_message_bytes": max_message_bytes, "reconnect_timeout_s": reconnect_timeout_s, **options}
            client.roster = roster = Roster(
                watch,
                state,
                nursery,
                token=token,
                options=members,
                on_joined=client.joined,
                on_lost=client.lost,
                on_cut=client.cut,
                alone_s=reconnect_timeout_s,
            )
            try:
                await _first_nodes(roster, state, token, connect_timeout_s)
                with trio.move_on_after(connect_timeout_s):
                    await client.wait_settled()
                client.name_lost(named)
                nursery.start_soon(_watch, roster, state)
                yield client
                client.acknowledge(client.cursor)
                with trio.move_on_after(CLOSE_TIMEOUT_S):
                    await client.wait_written()
            finally:
                state.fail(ConnectionLost("the client is closed"))
                client.stop_background()
                client.close_weight_stores()
                nursery.cancel_scope.cancel("the client is closed")


async def _watch(roster: Roster, state: FleetState) -> None:
    try:
        await roster.run()
    except ServiceError as exc:
        state.fail(exc)


async def _first_nodes(roster: Roster, state: FleetState, token: str, timeout_s: float) -> None:
    """Return when all nodes that live have joined, or at the end of the time with at least one."""
    deadline_s = trio.current_time() + timeout_s
    trouble: ConfigError | None = None
    while not (roster.settled and state.members):
        try:
            view = await roster.read()
            _require_one_kind(view)
            _require_token(view, token)
            roster.follow(view)
            trouble = None
        except ConfigError as exc:
            trouble = exc
        if trio.current_time() >= deadline_s:
            if trouble is not None:
                raise trouble
            if state.members:
                return
            raise ConnectionLost(
                f"no node of the fleet in {roster.folder} within {timeout_s:g} s (connect_timeout_s)"
                f"{roster.complaints()}; is one running?"
            )
        await trio.sleep(POLL_S)


def _require_token(view: FleetView, token: str) -> None:
    """Raise Unauthorized if a token is given and no living node has it."""
    tokens = [found.entry.token for found in view.nodes.values() if found.life == "live"]
    if token and tokens and token not in tokens:
        raise Unauthorized(
            f"the token given to the client is not that of any of the {len(tokens)} nodes of the fleet; leave it out "
            f"(unset {TOKEN_VARIABLE}): the tokens of a fleet are in its folder"
        )


def _require_one_kind(view: FleetView) -> None:
    """Raise ConfigError if living nodes differ in version or model: their rollouts would not be of one policy."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for node_id, found in view.nodes.items():
        if found.life == "live":
            kinds.setdefault((found.entry.version, found.entry.model), []).append(node_id)
    if len(kinds) > 1:
        said = "; ".join(
            f"{', '.join(names)}: version {version}, model {model}" for (version, model), names in kinds.items()
        )
        raise ConfigError(
            f"the nodes of the fleet are not of one kind ({said}); keep one, and give others another folder"
        )
