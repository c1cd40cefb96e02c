"""`prorl-trio status`: print the live state of a node as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from prorl_trio.cli.connection import connection_options, with_client
from prorl_trio.client.terminal import say_json

if TYPE_CHECKING:
    from prorl_trio.cli.connection import Node
    from prorl_trio.client import RolloutClient


@click.command()
@connection_options
def status(node: Node) -> None:
    """Print the live state of a node as JSON.

    It contains jobs by stage, backends, sandboxes and sessions.
    """

    async def work(client: RolloutClient) -> None:
        report = await client.status()
        say_json(report)

    with_client(node, work)
