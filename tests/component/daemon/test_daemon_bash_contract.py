"""The contract of the shell, over bash and over the shells of images without bash."""

from __future__ import annotations

import os
import shutil

import pytest
import trio

from prorl_trio.sandbox.client import DaemonSandbox
from prorl_trio.testing.bash_contract import PORTABLE, SESSIONS, check_session

SHELLS = {"bash": "bash", "dash": "sh", "busybox": "sh"}
"""The program, and the name by which the daemon finds it."""
DAEMONS = 4
"""Sessions at a time: they mostly wait."""


@pytest.fixture
def only_shell(tmp_path):
    """A PATH with every program of this machine but its shells, and this one shell."""

    def make(shell):
        program = shutil.which(shell)
        if program is None:
            pytest.skip(f"{shell} is not installed here: install it to test images that have no other shell")
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
    sessions = list(SESSIONS if SHELLS[shell] == "bash" else PORTABLE)
    failures: list[str] = []

    async def work():
        daemon = start_daemon(env={"PATH": path})
        daemon.wait_ready()
        async with daemon.connect() as client:
            while sessions:
                session = sessions.pop()
                try:
                    await check_session(DaemonSandbox("daemon", client, str), session)
                except (AssertionError, trio.TooSlowError) as exc:
                    failures.append(f"{session.name}: {exc!r}")
        ended = await daemon.wait_ended()
        assert ended == (0, "")

    async with trio.open_nursery() as nursery:
        for _ in range(DAEMONS):
            nursery.start_soon(work)
    assert not failures, "\n".join(failures)
