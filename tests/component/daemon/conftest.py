"""A real sandbox daemon in a process of its own, and a client connected to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from prorl_daemon.limits import hold_proc
from prorl_daemon.processes import read_process_table
from prorl_ipc.channel import connect_unix
from prorl_ipc.client import open_rpc_client

hold_proc()  # as a daemon does at its start: tests that use its parts here do not leave it behind then

TOKEN = "the token of the tests"
END_TIMEOUT_S = 10
SECRET = "planted-secret-of-the-node"


class DaemonProcess:
    """`python -m prorl_daemon`, started and owned by a test."""

    def __init__(self, *options, home, start_line=None, **fields):
        self._folder = tempfile.TemporaryDirectory(prefix="daemon-", ignore_cleanup_errors=True)
        self.socket_path = str(Path(self._folder.name, "s"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prorl_daemon", "--socket", self.socket_path, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": str(home),
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                "LD_SECRET": SECRET,
                "NODE_SECRET": SECRET,
            },
        )
        if start_line is None:
            start_line = json.dumps({"token": TOKEN, **fields}).encode() + b"\n"
        self.process.stdin.write(start_line)
        self.process.stdin.flush()

    def wait_ready(self):
        assert self.process.stdout.readline() == b"READY\n", self.process.stderr.read().decode()

    def descendants(self):
        return {entry for entry in read_process_table().descendants(self.process.pid) if entry.alive}

    @asynccontextmanager
    async def connect(self, token=TOKEN):
        stream = await connect_unix(self.socket_path, connect_timeout_s=5)
        async with open_rpc_client(stream, token=token) as client:
            yield client

    async def wait_ended(self):
        """The exit code and stderr, but for lines about a busy machine. Its socket must be gone by then."""
        with trio.fail_after(END_TIMEOUT_S):
            exit_code = await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)
        assert not await trio.Path(self.socket_path).exists()
        lines = self.process.stderr.read().decode().splitlines(keepends=True)
        return exit_code, "".join(line for line in lines if not line.startswith("this process did not run for "))

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        self._folder.cleanup()


@pytest.fixture
def still_alive():
    """Those of some process entries that still run: same pid, same start time."""

    def check(entries):
        now = read_process_table().with_descendants(lambda entry: entry.alive)
        return {(entry.pid, entry.start_ticks) for entry in now} & {(e.pid, e.start_ticks) for e in entries}

    return check


@pytest.fixture
def start_daemon(tmp_path):
    """Start a daemon: `start_daemon(*options, env=..., cwd=...)`. What a test leaves running is killed."""
    started = []

    def start(*options, **keywords):
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        daemon = DaemonProcess(*options, home=home, **keywords)
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.close()


@pytest.fixture
async def sandbox(start_daemon, still_alive):
    """A client of a fresh daemon. When the test is over the daemon has to end by itself and leave nothing."""
    daemon = start_daemon()
    daemon.wait_ready()
    async with daemon.connect() as client:
        yield client
        left = daemon.descendants()
    exit_code, complaints = await daemon.wait_ended()
    assert (exit_code, complaints) == (0, "")
    assert not still_alive(left)
