"""The systems that the trace runs through: our daemon, a bare pty, and peers, each in a copy of the project."""

from __future__ import annotations

import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ipc.sandbox_calls import BashResult, BashRun
from perf.daemon import CALL_TIMEOUT_S, open_daemon
from perf.floors import open_bare_pty
from perf.peers.environments import PEERS
from perf.peers.process import PeerAnswer, open_peer
from perf.project_tree import write_project

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Run = Callable[[str], Awaitable[PeerAnswer]]

__all__ = ["FLOOR", "FLOOR_AGAIN", "OURS", "PEER_SYSTEMS", "Workspace", "make_workspace", "open_system"]

FLOOR, FLOOR_AGAIN, OURS = "pty", "pty_again", "ours"
PEER_SYSTEMS = ("tmux", "swerex")
TOOL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_OUTPUT_BYTES = 1024 * 1024


class Workspace:
    """The folders of one system in one round. All paths are of one length, so that layouts do not differ."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work, self.home, self.run = root / "work", root / "home", root / "run"

    @property
    def env(self) -> dict[str, str]:
        """The whole environment of the shell, the same for all but for these folders."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{TOOL_PATH}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PAGER": "cat",
            "GIT_PAGER": "cat",
            "GIT_CONFIG_NOSYSTEM": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TMUX_TMPDIR": str(self.run),
        }


def make_workspace(root: Path) -> Workspace:
    """Make the folders, with the project in `work`. `root` must not exist."""
    workspace = Workspace(root)
    for folder in (workspace.work, workspace.home, workspace.run):
        folder.mkdir(mode=0o700, parents=True)
    write_project(workspace.work)
    return workspace


@asynccontextmanager
async def open_system(name: str, workspace: Workspace) -> AsyncIterator[Run]:
    """A persistent shell in `workspace.work`; it ends on leaving.

    Raises:
        PeerUnavailable: `name` is a peer that is not there; also what `Run` raises when a peer fails.
    """
    if name == OURS:
        async with open_daemon(workspace.run, env=workspace.env, cwd=workspace.work) as daemon:

            async def run_ours(command: str) -> PeerAnswer:
                call = BashRun(command=command, timeout_s=CALL_TIMEOUT_S, max_output_bytes=MAX_OUTPUT_BYTES)
                started = time.perf_counter()
                result = await daemon.call(call, BashResult, timeout_s=CALL_TIMEOUT_S)
                return PeerAnswer(result.output, result.exit_code, time.perf_counter() - started)

            yield run_ours
    elif name in (FLOOR, FLOOR_AGAIN):
        with open_bare_pty(env=workspace.env, cwd=workspace.work) as pty:

            async def run_pty(command: str) -> PeerAnswer:
                await trio.lowlevel.checkpoint()
                started = time.perf_counter()
                exit_code = pty.run(command)
                elapsed_s = time.perf_counter() - started
                return PeerAnswer(pty.take_output(), exit_code, elapsed_s)

            yield run_pty
    else:
        log = workspace.run / "log"
        async with open_peer(PEERS[name], env=workspace.env, cwd=workspace.work, log=log) as peer:
            yield peer.run
