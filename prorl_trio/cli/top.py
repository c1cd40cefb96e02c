"""`prorl-trio top`: a node's live state on a terminal, once or again and again."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import msgspec
import trio
from rich.live import Live

from prorl_ipc.portable_text import printable_json
from prorl_trio.cli.connection import connection_options, with_client
from prorl_trio.cli.top_report import SORTS, Rates, TopOptions, render_top
from prorl_trio.client.progress import console

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from rich.console import Console

    from prorl_trio.cli.connection import Node


@click.command()
@connection_options
@click.option("--once", is_flag=True, help="One report, then end.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON a report: what `status` prints.")
@click.option("--sort", type=click.Choice(SORTS), default="progress", show_default=True, help="Order of the jobs.")
@click.option("--stuck", "only_stuck", is_flag=True, help="Only jobs to which nothing happened for stuck_after_s.")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="In s.")
def top(node: Node, **options: Any) -> None:
    """Watch a node live, and what every job waits for. Ctrl-C ends it.

    It shows stages, backends, sandboxes, sessions and jobs. Jobs that are stuck come first, marked with `!`, then
    those at work, then those in the queue. `quiet` is how long nothing happened to a job.
    """
    chosen = TopOptions(**options)
    with suppress(KeyboardInterrupt):
        with_client(node, lambda client: run_top(client.status, console, chosen))


async def run_top(status: Callable[[], Awaitable[Mapping[str, Any]]], console: Console, options: TopOptions) -> None:
    """Show what `status` returns every `interval_s`, for ever or `once`.

    On a terminal that can do it the report stays in place, otherwise one follows the other.
    """
    rates = Rates()
    in_place = console.is_terminal and not console.is_dumb_terminal and not options.once and not options.as_json
    if not in_place:
        while True:
            report = await status()
            if options.as_json:
                console.file.write(printable_json(msgspec.json.encode(report).decode()) + "\n")
                console.file.flush()
            else:
                console.print(render_top(report, rates.update(report), options, console.width))
            if options.once:
                return
            await trio.sleep(options.interval_s)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            report = await status()
            body = render_top(report, rates.update(report), options, console.width, console.height)
            live.update(body, refresh=True)
            await trio.sleep(options.interval_s)
