"""The folder of a ledger on a disk: one owner at a time, nobody else's to see, on a local disk, of this format."""

from __future__ import annotations

import errno
import itertools
import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing

import pytest
import trio

from prorl_trio.ledger import LedgerLimits, disk, open_ledger
from prorl_trio.ledger.disk import Disk
from prorl_trio.types.errors import ConfigError
from support.faulty_disk import FaultyDisk

KIB = 1024
SMALL = LedgerLimits(log_bytes=64 * KIB, reserve_bytes=64 * KIB, max_bytes=1024 * KIB, retry_interval_s=0.01)


async def test_one_process_at_a_time(memory_path):
    code = (
        "import sys, trio\nfrom pathlib import Path\nfrom prorl_trio.ledger import open_ledger\n"
        "async def main():\n    async with open_ledger(Path(sys.argv[1])):\n        pass\ntrio.run(main)\n"
    )
    with trio.fail_after(30):
        async with open_ledger(memory_path, SMALL):
            with pytest.raises(ConfigError, match=f"in use by another node, process {os.getpid()}"):
                async with open_ledger(memory_path, SMALL):
                    pass
            child = await trio.run_process(
                [sys.executable, "-c", code, str(memory_path)],
                check=False,
                capture_stderr=True,
                stdin=subprocess.DEVNULL,
            )
            assert f"process {os.getpid()}".encode() in child.stderr
        async with open_ledger(memory_path, SMALL):
            pass


async def test_nobody_else_may_look(memory_path):
    with trio.fail_after(10):
        async with open_ledger(memory_path / "ledger", SMALL) as ledger:
            await ledger.open_session("s", 0)
        assert stat.S_IMODE((memory_path / "ledger").stat().st_mode) == 0o700
        files = list((memory_path / "ledger").iterdir())
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert {file.name for file in files} == {"lock", "reserve", "ledger-1.db"}


async def test_the_names_of_new_folders_and_files_are_synced(memory_path, monkeypatch):
    """By the disk itself; what the ledger asks of it, and when: tests/faults/test_ledger_power.py."""
    synced, fsync = [], os.fsync

    def note(fd):
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), sorted(os.listdir(fd))))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with trio.fail_after(10):
        async with open_ledger(memory_path / "new" / "ledger", SMALL):
            assert (str(memory_path), ["new"]) in synced
            assert (str(memory_path / "new"), ["ledger"]) in synced
            folder, names = synced[-1]
            assert folder == str(memory_path / "new" / "ledger")
            assert "ledger-1.db" in names


async def test_network_file_systems_are_refused(memory_path, monkeypatch):
    monkeypatch.setattr(disk, "file_system_of", lambda path, mountinfo: "lustre")
    with trio.fail_after(10), pytest.raises(ConfigError, match=r"network file system \(lustre\)"):
        async with open_ledger(memory_path, SMALL):
            pass


async def test_a_folder_that_cannot_be_made_is_a_configuration_error(memory_path):
    (memory_path / "file").write_text("")
    with trio.fail_after(10), pytest.raises(ConfigError, match="cannot be used"):
        async with open_ledger(memory_path / "file" / "ledger", SMALL):
            pass


async def test_a_folder_of_an_older_format_is_refused_and_left_as_it_is(memory_path):
    (memory_path / "000000000001-0123456789abcdef.log").write_bytes(b"a log of segments")
    with trio.fail_after(10), pytest.raises(ConfigError, match=r"of an older format .* another folder"):
        async with open_ledger(memory_path, SMALL):
            pass
    assert (memory_path / "000000000001-0123456789abcdef.log").read_bytes() == b"a log of segments"


async def test_a_newer_format_is_refused(memory_path):
    with trio.fail_after(10):
        async with open_ledger(memory_path, SMALL):
            pass
        with closing(sqlite3.connect(memory_path / "ledger-1.db", isolation_level=None)) as db:
            db.execute("PRAGMA user_version = 99")
        with pytest.raises(ConfigError, match="is of version 99"):
            async with open_ledger(memory_path, SMALL):
                pass


class FailingDisk(Disk):
    """Fails at one of its steps, which are counted from 0."""

    def __init__(self, at, error):
        self._steps, self._at, self._error = itertools.count(), at, error
        self.failed = False

    def _step(self):
        if next(self._steps) == self._at:
            self.failed = True
            raise OSError(self._error, os.strerror(self._error))

    def resize(self, path, size_bytes):
        self._step()
        super().resize(path, size_bytes)

    def make_folder(self, path):
        self._step()
        super().make_folder(path)

    def sync_folder(self, path):
        self._step()
        super().sync_folder(path)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("state", ["new", "there"])
async def test_a_disk_that_fails_at_any_step_of_the_start_is_told_in_one_sentence(memory_path, error, state):
    told = []
    with trio.fail_after(30):
        if state == "there":
            async with open_ledger(memory_path / "ledger", SMALL):
                pass
        for at in itertools.count():
            disk = FailingDisk(at, error)
            try:
                async with open_ledger(memory_path / "ledger", SMALL, disk=disk):
                    pass
            except ConfigError as exc:
                told.append(str(exc))
            if not disk.failed:
                break
        assert told
        assert all(str(memory_path / "ledger") in sentence for sentence in told)
        async with open_ledger(memory_path / "ledger", SMALL) as ledger:
            assert ledger.recovered.damage == []


@pytest.mark.parametrize("free_bytes", [0, 8 * KIB, 32 * KIB])
async def test_a_new_ledger_on_a_full_disk_is_told_in_one_sentence(memory_path, free_bytes):
    disk = FaultyDisk()
    disk.free_bytes = free_bytes
    with (
        trio.fail_after(30),
        pytest.raises(
            ConfigError,
            match=f"{memory_path} cannot be opened: .* full.*; ledger.dir must be .* on a local disk with room",
        ),
    ):
        async with open_ledger(memory_path, SMALL, disk=disk):
            pass


async def test_a_disk_without_room_for_the_owner_s_number_opens(memory_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    with trio.fail_after(10):
        async with open_ledger(memory_path, SMALL):
            with pytest.raises(ConfigError, match="in use by another node, process not known yet"):
                async with open_ledger(memory_path, SMALL):
                    pass
