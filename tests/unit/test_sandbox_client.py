"""The sandbox client over a memory stream: how the daemon's failures, and its silence, look to the node."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from prorl_ipc.client import open_rpc_client
from prorl_ipc.file_calls import FileData, FileRead, FileWrite, FileWritten
from prorl_ipc.sandbox_calls import BashRun, Exec, ExecResult, Ping, Pong, SandboxCall
from prorl_ipc.server import CallError, serve_rpc
from prorl_trio.sandbox.client import DaemonSandbox
from prorl_trio.sandbox.sandbox import FILE_PIECE_BYTES, MAX_OUTPUT_BYTES
from prorl_trio.types.errors import SandboxCallFailed, SandboxLost, SandboxUnavailable

DECODER = msgspec.msgpack.Decoder(SandboxCall)


class Daemon:
    """Answers as told, and remembers what was asked."""

    def __init__(self):
        self.calls = []
        self.failure = None
        self.file = b""

    async def handle(self, body, context):
        call = DECODER.decode(body)
        self.calls.append(call)
        if self.failure:
            raise CallError(*self.failure)
        match call:
            case FileRead(offset=offset, max_bytes=size):
                piece = self.file[offset : offset + size]
                return FileData(data=piece, size_bytes=len(self.file), eof=offset + size >= len(self.file))
            case FileWrite(data=content, append=append):
                self.file = self.file + content if append else content
                return FileWritten(size_bytes=len(self.file))
            case Exec():
                return ExecResult(exit_code=0, stdout=b"", stderr=b"", duration_s=0.0)
            case Ping():
                return Pong(uptime_s=1.0, open_fds=3)
        raise CallError("bad_request", "not in this test")


@asynccontextmanager
async def _open(daemon, **options):
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: serve_rpc(theirs, daemon.handle, token="t"))
        async with open_rpc_client(ours, token="t") as rpc:
            yield DaemonSandbox("sbx-1", rpc, lambda what: f"{what}; it said: last words", **options), theirs
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("not_found", FileNotFoundError),
        ("is_directory", IsADirectoryError),
        ("permission", PermissionError),
        ("no_space", OSError),
        ("io", OSError),
        ("not_absolute", ValueError),
        ("too_large", ValueError),
        ("bad_request", ValueError),
        ("no_user", ValueError),
        ("no_shell", SandboxUnavailable),
        ("no_ipython", SandboxUnavailable),
        ("no_kernel", SandboxUnavailable),
        ("shell_lost", SandboxCallFailed),
        ("ipython_lost", SandboxCallFailed),
        ("internal", SandboxCallFailed),
        ("a code of later versions", SandboxCallFailed),
    ],
)
async def test_failures_become_what_the_contract_says(code, kind, autojump_clock):
    daemon = Daemon()
    daemon.failure = (code, "the reason")
    async with _open(daemon) as (sandbox, _):
        with pytest.raises(kind, match="the reason"):
            await sandbox.read_file("/x")
        daemon.failure = None
        assert (await sandbox.ping()).open_fds == 3


async def test_files_travel_in_pieces(autojump_clock):
    daemon = Daemon()
    content = bytes(range(256)) * (FILE_PIECE_BYTES // 256) * 2 + b"tail"
    async with _open(daemon) as (sandbox, _):
        await sandbox.write_file("/x", content)
        assert [call.append for call in daemon.calls] == [False, True, True]
        assert await sandbox.read_file("/x") == content
        with pytest.raises(ValueError, match=f"limit is {len(content) - 1}"):
            await sandbox.read_file("/x", max_bytes=len(content) - 1)


async def test_a_vanished_daemon_is_lost_for_ever(autojump_clock):
    daemon = Daemon()
    async with _open(daemon) as (sandbox, theirs):
        await theirs.aclose()
        for _ in range(2):
            with pytest.raises(SandboxLost, match=r"sbx-1 is gone.*last words"):
                await sandbox.ping()
    assert daemon.calls == []


@pytest.mark.parametrize(
    ("breach", "ended_from_inside", "from_inside"),
    [("", True, True), ("", False, False), ("memory", False, True), ("processes", False, False)],
)
async def test_a_loss_says_whether_it_came_from_inside(breach, ended_from_inside, from_inside, autojump_clock):
    async def ended():
        await trio.lowlevel.checkpoint()
        return ended_from_inside

    options = {"next_breach": lambda: (breach, "a sentence"), "ended_from_inside": ended}
    async with _open(Daemon(), **options) as (sandbox, theirs):
        await theirs.aclose()
        for _ in range(2):
            with pytest.raises(SandboxLost) as lost:
                await sandbox.ping()
            assert lost.value.from_inside is from_inside


async def test_text_that_cannot_travel_is_refused_and_nothing_is_sent(autojump_clock):
    daemon = Daemon()
    async with _open(daemon) as (sandbox, _):
        with pytest.raises(ValueError, match="surrogates"):
            await sandbox.bash("echo \ud800", timeout_s=1)
        assert daemon.calls == []
        assert (await sandbox.ping()).open_fds == 3


@pytest.mark.parametrize(
    ("timeout_s", "max_output_bytes"), [(0, 1), (-1, 1), (float("inf"), 1), (1, 0), (1, MAX_OUTPUT_BYTES + 1)]
)
async def test_impossible_limits_are_refused_before_anything_is_sent(timeout_s, max_output_bytes, autojump_clock):
    daemon = Daemon()
    async with _open(daemon) as (sandbox, _):
        with pytest.raises(ValueError, match=r"timeout_s|max_output_bytes"):
            await sandbox.bash("true", timeout_s=timeout_s, max_output_bytes=max_output_bytes)
        with pytest.raises(ValueError, match="exceeds the maximum"):
            await sandbox.bash("x" * 20_000_000, timeout_s=1)
        assert not [call for call in daemon.calls if isinstance(call, BashRun)]
        assert (await sandbox.ping()).open_fds == 3
