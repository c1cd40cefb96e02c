"""Files through a real daemon."""

from __future__ import annotations

import os
import stat

import pytest
import trio

from prorl_daemon import paths
from prorl_ipc.errors import CallFailed
from prorl_ipc.file_calls import FileData, FileRead, FileWrite, FileWritten
from prorl_ipc.sandbox_calls import Exec, ExecResult


async def read(sandbox, path, **options):
    with trio.fail_after(20):
        return await sandbox.call(FileRead(path=str(path), **options), FileData, timeout_s=10)


async def write(sandbox, path, data, **options):
    with trio.fail_after(20):
        return await sandbox.call(FileWrite(path=str(path), data=data, **options), FileWritten, timeout_s=10)


async def test_a_file_comes_back_as_it_was_written_in_pieces_if_large(sandbox, tmp_path):
    data = os.urandom(5_000_000)
    path = tmp_path / "new" / "folders" / "file"
    assert (await write(sandbox, path, data)).size_bytes == len(data)
    pieces, eof = b"", False
    while not eof:
        part = await read(sandbox, path, offset=len(pieces), max_bytes=1_500_000)
        assert part.size_bytes == len(data)
        pieces, eof = pieces + part.data, part.eof
    assert pieces == data


async def test_writing_replaces_the_file_its_length_and_its_mode(sandbox, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"long old content")
    path.chmod(0o600)
    await write(sandbox, path, b"new", mode=0o755)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert os.listdir(tmp_path / "home") == []
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "home"}


async def test_append_makes_and_extends(sandbox, tmp_path):
    path = tmp_path / "log"
    assert (await write(sandbox, path, b"one", append=True)).size_bytes == 3
    assert (await write(sandbox, path, b"two", append=True)).size_bytes == 6
    assert path.read_bytes() == b"onetwo"


async def test_a_link_stays_a_link(sandbox, tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    await write(sandbox, tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


async def test_a_file_without_a_size_is_read_to_its_end(sandbox):
    part = await read(sandbox, "/proc/meminfo")
    assert part.eof
    assert part.data.startswith(b"MemTotal:")
    assert part.size_bytes == len(part.data)


async def test_a_file_of_which_the_kernel_gives_no_large_pieces_is_read(sandbox):
    part = await read(sandbox, "/proc/sys/kernel/ostype", max_bytes=4 * 1024**2)
    assert (part.data, part.eof) == (b"Linux\n", True)


@pytest.mark.parametrize(
    ("path", "refusal", "has_openat2"),
    [
        ("/proc/self/environ", "Permission denied", True),
        ("/proc/self/environ", "Permission denied", False),
        ("/proc/self/task/../maps", "Permission denied", True),
        ("/proc/self/cwd/.", "Too many levels", True),
        ("/proc/self/fd/0", "Too many levels", True),
    ],
)
@pytest.mark.parametrize("linked", [False, True])
def test_the_daemon_goes_nowhere_by_its_own_folder_in_proc(tmp_path, path, refusal, has_openat2, linked, monkeypatch):
    monkeypatch.setattr(paths, "_has_openat2", lambda: has_openat2)
    if linked:
        (tmp_path / "link").symlink_to(path)
        path = str(tmp_path / "link")
    with pytest.raises(OSError, match=refusal):
        os.close(paths.open_path(path, os.O_RDONLY | os.O_NONBLOCK))


async def test_neither_a_call_nor_a_program_starts_from_a_descriptor_of_the_daemon(sandbox):
    for fd in range(16):
        with pytest.raises(CallFailed):
            await read(sandbox, f"/proc/self/fd/{fd}/version")
        call = Exec(argv=["true"], timeout_s=5, cwd=f"/proc/self/fd/{fd}")
        with pytest.raises(CallFailed):
            await sandbox.call(call, ExecResult, timeout_s=10)


async def test_reading_past_the_end_is_empty(sandbox, tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    part = await read(sandbox, tmp_path / "file", offset=10)
    assert (part.data, part.size_bytes, part.eof) == (b"", 3, True)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (FileRead(path="relative"), "not_absolute"),
        (FileRead(path="/nowhere/at/all"), "not_found"),
        (FileRead(path="/etc/passwd/below"), "not_found"),
        (FileRead(path="/tmp"), "is_directory"),
        (FileRead(path="/dev/zero"), "io"),
        (FileRead(path="/tmp/a\0b"), "bad_request"),
        (FileRead(path="/etc/passwd", offset=-1), "bad_request"),
        (FileRead(path="/etc/passwd", max_bytes=1 << 40), "too_large"),
        (FileWrite(path="relative", data=b""), "not_absolute"),
        (FileWrite(path="/tmp", data=b""), "is_directory"),
        (FileWrite(path="/dev/full", data=b"x"), "io"),
        (FileWrite(path="/etc/passwd/below", data=b""), "not_found"),
        (FileWrite(path="/tmp/x", data=b"", mode=0o77777), "bad_request"),
    ],
)
async def test_what_is_wrong_has_a_code_and_the_daemon_serves_on(sandbox, tmp_path, call, code):
    with pytest.raises(CallFailed) as failed, trio.fail_after(20):
        await sandbox.call(call, FileData if isinstance(call, FileRead) else FileWritten, timeout_s=10)
    assert failed.value.code == code
    await write(sandbox, tmp_path / "after", b"fine")


async def test_a_pipe_nobody_writes_to_is_refused_and_not_waited_for(sandbox, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CallFailed) as failed:
        await read(sandbox, tmp_path / "pipe")
    assert failed.value.code == "io"
