"""The contract of the shell, over bash and over the shells of images without bash."""

from __future__ import annotations

import os
import shutil
from contextlib import AsyncExitStack

import pytest

from prorl_trio.sandbox.client import DaemonSandbox
from prorl_trio.testing.bash_contract import PORTABLE, SESSIONS, check_sessions
from support.programs import find_busybox
from support.skips import because

SHELLS = {"bash": "bash", "dash": "sh", "busybox": "sh"}
"""The program, and the name by which the daemon finds it."""
DAEMONS = 4
"""Sessions at a time: they mostly wait."""


@pytest.fixture
def only_shell(tmp_path):
    """A PATH with every program of this machine but its shells, and this one shell."""

    def make(shell):
        program = find_busybox() if shell == "busybox" else shutil.which(shell)
        if program is None:
            pytest.skip(because(f"{shell} is not installed here", f"apt-get install {shell}"))
        folder = tmp_path / "bin"
        folder.mkdir()
        for source in ("/usr/bin", "/bin"):
            for entry in os.scandir(source):
                target = folder / entry.name
                if entry.name not in ("bash", "rbash", "sh", "ash") and not target.is_symlink():
                    target.symlink_to(entry.path)
        (folder / SHELLS[shell]).symlink_to(program)
        if SHELLS[shell] == "bash":
            (folder / "sh").symlink_to("/bin/sh")
        return str(folder)

    return make


@pytest.mark.parametrize("shell", SHELLS)
async def test_shell(start_daemon, only_shell, shell):
    path = only_shell(shell)
    daemons = [start_daemon(env={"PATH": path}) for _ in range(DAEMONS)]
    async with AsyncExitStack() as stack:
        clients = []
        for daemon in daemons:
            daemon.wait_ready()
            clients.append(await stack.enter_async_context(daemon.connect()))
        sandboxes = [DaemonSandbox("daemon", client, str) for client in clients]
        sessions = SESSIONS if SHELLS[shell] == "bash" else PORTABLE
        left_out = await check_sessions(sandboxes, sessions)
    for daemon in daemons:
        assert await daemon.wait_ended() == (0, "")
    needing = [session for session in sessions if session.needs and not os.path.exists(session.needs)]
    assert left_out == sorted(session.name for session in needing if not shutil.which(session.needs, path=path))
