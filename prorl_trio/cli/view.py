"""`prorl-trio view`: show recorded runs in a browser, or export them as one HTML file."""

from __future__ import annotations

import secrets
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.client.terminal import say
from prorl_trio.config import ListenConfig
from prorl_trio.edges.tcp import is_loopback
from prorl_trio.node.descriptors import raise_descriptor_limit
from prorl_trio.runs.book import RunBook
from prorl_trio.runs.export import export_html
from prorl_trio.runs.recording import named_path
from prorl_trio.runs.served import serve_runs

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--follow", is_flag=True, help="Show new outcomes as they are written.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on. Default: any free one.")
@click.option("--model", type=click.Path(path_type=Path), help="Model folder. Default: each run's own.")
@click.option("--export", type=click.Path(path_type=Path, dir_okay=False), help="Write one HTML file instead.")
@click.option("--rollout", "jobs", multiple=True, help="With --export: only this job's rollout. Repeatable.")
def view(
    folder: Path, follow: bool, host: str, port: int, model: Path | None, export: Path | None, jobs: Sequence[str]
) -> None:
    """View recorded runs, evaluations and learning runs in a browser.

    FOLDER is the folder of a run, or a folder that contains several runs. The printed address contains a secret: anyone
    with this address can read the runs. Ctrl-C stops the server.
    """
    if jobs and export is None:
        raise click.UsageError("--rollout needs --export")
    raise_descriptor_limit()  # a run that was opened keeps two
    book = RunBook(folder, model)
    try:
        if export is not None:
            content = export_html(book, jobs)
            with named_path(export):
                export.write_bytes(content)
            say(f"{export}: {len(content) / 1e6:.1f} MB; open it in a browser")
            return
        listen = ListenConfig(host=host, port=port, token=secrets.token_urlsafe())
        trio.run(_serve, book, listen, follow)
    finally:
        book.close()


async def _serve(book: RunBook, listen: ListenConfig, follow: bool) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_single_nursery() as nursery:
            host, port = await nursery.start(partial(serve_runs, book, listen, follow=follow))
            shown = f"[{host}]" if ":" in host else host
            say(f"{len(book.runs())} runs in {book.root}; Ctrl-C ends this")
            say(f"http://{shown}:{port}/ui#token={listen.token}")
            if not is_loopback(host):
                say(
                    "there is no TLS: others on the network can read the address, and the runs",
                    err=True,
                    color="yellow",
                )
            async for _ in signals:
                nursery.cancel_scope.cancel("a signal")
