"""The log of a fleet's moves: what is in it when the power goes, and when a writer is killed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from prorl_trio.client.fleet.moves import Delivered, Moved, MoveLog

MOVED = Moved(job_id="x", node_id="a", attempt=2)


@pytest.fixture
def synced(monkeypatch):
    """What of each file, and which names in each folder, were there when it was synced last, by inode."""
    found = {}

    def sync(fd):
        status = os.fstat(fd)
        is_folder = stat.S_ISDIR(status.st_mode)
        found[status.st_ino] = os.listdir(fd) if is_folder else Path(f"/proc/self/fd/{fd}").read_bytes()

    monkeypatch.setattr("os.fsync", sync)
    return found


def test_a_move_is_on_the_disk_when_append_returns(tmp_path, synced):
    log = MoveLog(tmp_path, "s")
    for line in (MOVED, Delivered(job_id="x")):
        log.append([line])
        assert synced[log.path.stat().st_ino] == log.path.read_bytes()
        assert synced[log.path.parent.stat().st_ino] == [log.path.name]
        assert log.path.parent.name in synced[tmp_path.stat().st_ino]


def test_a_log_that_a_killed_writer_left_unfinished_is_read_and_goes_on(tmp_path):
    log = MoveLog(tmp_path, "a/session")
    assert log.read() == []
    log.append([MOVED])
    with log.path.open("ab") as file:
        file.write(b'{"type":"Delivered","job_id":"x"}')  # whole, but its writer did not live to say so
    assert log.read() == [MOVED]
    log.append([MOVED])
    assert log.read() == [MOVED, Delivered(job_id="x"), MOVED]


def test_a_log_of_moves_is_its_users_alone(tmp_path):
    log = MoveLog(tmp_path, "s")
    log.append([MOVED])
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700
