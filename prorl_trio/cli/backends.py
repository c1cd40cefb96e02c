"""`prorl-trio backends`: list and change a node's pool of LLM backends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
from rich.table import Table

from prorl_trio.cli.connection import connection_options, with_client
from prorl_trio.client.terminal import Console, one_line, say, say_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_trio.cli.connection import Node
    from prorl_trio.client import RolloutClient
    from prorl_trio.types.backends import BackendList

_BACKEND = click.argument("backend", metavar="URL")


@click.group()
def backends() -> None:
    """List and change the LLM backends of a node.

    The head of a fleet works as well. Running jobs are not interrupted. The node logs each change with the session that
    requested it. The session id contains your user id.

    \b
        prorl-trio backends list
        prorl-trio backends add http://gpu3:8000
        prorl-trio backends drain http://gpu1:8000     # before its machine is serviced
        prorl-trio backends remove http://gpu1:8000
    """


@backends.command("list")
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print the pool as JSON.")
def list_(node: Node, as_json: bool) -> None:
    """List the backends with their state, tasks, weight and last error."""
    found = _ask(node, lambda client: client.list_backends())
    if as_json:
        say_json(found.pool)
        return
    table = Table("backend", "node", "state", "tasks", "weight", "version", box=None)
    for each in found.pool["backends"]:
        table.add_row(
            one_line(each["url"]),
            one_line(each.get("node_id", "")),
            "suspended" if each["suspended"] else each["state"],
            str(each["in_flight"]),
            f"{each['weight']:g}",
            one_line(each["policy_version"]),
        )
    Console().print(table)
    for error in filter(None, (each["error"] for each in found.pool["backends"])):
        say(error, color="yellow")


@backends.command()
@connection_options
@_BACKEND
@click.option("--weight", type=click.FloatRange(min=0, min_open=True), help="Relative share of rollouts. Default: 1.")
@click.option("--when-up", is_flag=True, help="Add the backend even if it is down; it joins once it is up.")
def add(node: Node, backend: str, weight: float | None, when_up: bool) -> None:
    """Probe the engine at URL and add it to the pool. A draining backend accepts rollouts again."""
    _ask(node, lambda client: client.add_backend(backend, weight=weight, when_up=when_up))
    say(f"added {backend}")


@backends.command()
@connection_options
@_BACKEND
def drain(node: Node, backend: str) -> None:
    """Send no new rollouts to the backend at URL. Its rollouts move to other backends at their next turn.

    Use `add` to undo.
    """
    _ask(node, lambda client: client.drain_backend(backend))
    say(f"{backend} drains")


@backends.command()
@connection_options
@_BACKEND
@click.argument("weight", type=click.FloatRange(min=0, min_open=True))
def weigh(node: Node, backend: str, weight: float) -> None:
    """Set the share of rollouts of the backend at URL. Weight 2 gets twice as many rollouts as weight 1."""
    _ask(node, lambda client: client.weigh_backend(backend, weight))
    say(f"{backend} has the weight {weight:g}")


@backends.command()
@connection_options
@_BACKEND
def remove(node: Node, backend: str) -> None:
    """Remove the backend at URL from the pool. Turns in progress finish there; rollouts move at their next turn."""
    _ask(node, lambda client: client.remove_backend(backend))
    say(f"removed {backend}")


def _ask(node: Node, work: Callable[[RolloutClient], Awaitable[BackendList]]) -> BackendList:
    """Run `work` against the node, in a session named after the user."""
    return with_client(node, work, session_id=f"operator-{os.getuid()}-{os.urandom(4).hex()}")
