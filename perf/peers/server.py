"""A peer that is a server: started from its environment, and ended by its process id."""

from __future__ import annotations

import socket
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from perf.peers.environments import Peer, PeerUnavailable, peer_python
from prorl_trio.http.client import HttpClient, HttpError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

__all__ = ["free_port", "open_peer_server"]

START_TIMEOUT_S: Final = 60.0
RETRY_S: Final = 0.1
END_TIMEOUT_S: Final = 5.0
KILL_TIMEOUT_S: Final = 5.0
LOG_CHARS: Final = 400


@asynccontextmanager
async def open_peer_server(
    peer: Peer, arguments: Sequence[str], *, url: str, folder: Path
) -> AsyncIterator[trio.Process]:
    """Run the peer's Python with `arguments` in `folder`; yield when `GET /health` at `url` answers with 200.

    The process has ended when the block has, however it is left: SIGTERM, and after `END_TIMEOUT_S` SIGKILL. Its output
    is in `folder`, in a log named after the peer.

    Raises:
        PeerUnavailable: it is not installed, or does not get ready; the message has the end of its log.
    """
    python = peer_python(peer)
    path = folder / f"{peer.name}.log"
    with path.open("wb") as log:
        process = await trio.lowlevel.open_process(
            [str(python), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
        )
        try:
            if not await _gets_ready(url, process):
                said = path.read_text(errors="replace")[-LOG_CHARS:]
                raise PeerUnavailable(f"{peer.title} did not get ready; it said: {said}")
            yield process
        finally:
            process.terminate()
            with trio.move_on_after(END_TIMEOUT_S, shield=True):
                await process.wait()
            if process.returncode is None:
                process.kill()
                with trio.move_on_after(KILL_TIMEOUT_S, shield=True):
                    await process.wait()


async def _gets_ready(url: str, process: trio.Process) -> bool:
    """Asks again and again: a server has no other way to say so."""
    http = HttpClient(url)
    try:
        with trio.move_on_after(START_TIMEOUT_S):  # noqa: ASYNC912 - until the process ends
            while process.poll() is None:
                try:
                    if (await http.request("GET", "/health", timeout_s=START_TIMEOUT_S)).status == 200:
                        return True
                except HttpError:
                    pass
                await trio.sleep(RETRY_S)
    finally:
        http.close()
    return False


def free_port() -> int:
    """Return a port that is free now.

    Should another program take it before the peer does, the peer does not get ready.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
