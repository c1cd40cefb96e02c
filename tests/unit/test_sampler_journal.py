"""The journal of a sampler: cut off at any byte, damaged, written anew, on a full disk, and of another format."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from pathlib import Path

import msgspec
import pytest

from prorl_trio.sampling import GroupRules, JobTemplate, ManifestLine
from prorl_trio.sampling import journal as journal_module
from prorl_trio.sampling.journal import (
    HISTORY_BYTES,
    JOURNAL,
    MANIFEST,
    SamplerJournal,
    _has_record,
    _record,
    read_session_id,
)
from prorl_trio.sampling.sampler import GroupSampler
from prorl_trio.sampling.state import Advanced, Arrived, Opened, Taken
from prorl_trio.types.errors import ConfigError
from support.sampled import make_failure, make_rollout, make_task

RULES = GroupRules(size=2, groups_per_step=2, max_staleness=1)


class World:
    """A trainer and a node that always do the same: what comes of a rollout depends on its id."""

    def __init__(self, folder):
        self.journal = SamplerJournal(folder)
        if self.journal.beginning is None:
            self.sampler = GroupSampler.begin("run", RULES, "0")
            self.journal.begin("s", self.sampler.state)
        else:
            self.sampler = GroupSampler(self.journal.beginning.state)
            try:
                self.journal.write_lines([line for e in self.journal.events() for line in self.sampler.apply(e).lines])
            except ConfigError:
                self.journal.close()
                raise

    def commit(self, *events):
        self.journal.append(events)
        for event in events:
            self.journal.write_lines(self.sampler.apply(event).lines)

    def step(self):
        """Do the first thing that can be done; return False when three batches were taken."""
        state = self.sampler.state
        pending = [job_id for job_id, _ in self.sampler.pending().submit]
        if state.next_batch == 4:
            return False
        if (groups := self.sampler.choose(2)) is not None:
            self.commit(Taken(groups, confirms=True))
        elif state.taken_at[-1] == 2:
            self.commit(Advanced(str(self.sampler.version + 1), confirms=True))
        elif room := self.sampler.room():
            self.commit(*[Opened(make_task(state.next_group + n), JobTemplate()) for n in range(room)])
        else:
            spec = self.sampler.spec(min(pending))
            _, group, member, attempt = spec.job_id.split("-")
            if attempt == "1" and member == "0" and int(group[1:]) % 2:
                self.commit(Arrived(make_failure(spec), correct=False))
            else:
                right = member == "0" or int(group[1:]) % 3 == 0
                self.commit(Arrived(make_rollout(spec, float(right)), correct=right))
        return True


def lines_of(folder):
    return msgspec.json.Decoder(ManifestLine).decode_lines((folder / MANIFEST).read_bytes())


@pytest.fixture
def whole(tmp_path):
    """The files of a run that nobody killed, and their state."""
    world = World(tmp_path / "whole")
    while world.step():
        pass
    world.journal.close()
    return (tmp_path / "whole" / JOURNAL).read_bytes(), lines_of(tmp_path / "whole"), world.sampler.state


def test_a_run_that_is_killed_at_any_byte_goes_on_to_the_same_end(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fdatasync", lambda _file: None)  # nobody takes the power away
    monkeypatch.setattr("os.fsync", lambda _file: None)
    journal, lines, state = whole
    assert {line.fate for line in lines} == {"trained", "resampled", "uninformative"}
    began = SamplerJournal(tmp_path / "whole")
    first = began._begun_bytes
    began.close()
    folder = tmp_path / "cut"
    folder.mkdir()
    for length in range(first, len(journal) + 1, 83):
        (folder / JOURNAL).write_bytes(journal[:length] + bytes(5) * (length % 2))  # some blocks of a file are empty
        # The manifest is behind the journal, or its last line is cut off.
        (folder / MANIFEST).write_bytes(msgspec.json.Encoder().encode_lines(lines)[: 50 * (length % 5)])
        world = World(folder)
        assert journal.startswith((folder / JOURNAL).read_bytes())
        while world.step():
            pass
        world.journal.close()
        assert lines_of(folder) == lines
        assert msgspec.msgpack.encode(world.sampler.state) == msgspec.msgpack.encode(state)


class Power:
    """What of a folder's files is on the disk: of each what was there when it was synced, under names as they were."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.content, self.names, self.open = {}, {}, []
        self.check = lambda: None
        for call in ("fsync", "fdatasync"):
            monkeypatch.setattr(f"os.{call}", self.sync)

    def sync(self, fd):
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self.folder not in (path, path.parent):
            return
        self.check()
        if path == self.folder:
            self.names = self.names_now()
        else:
            self.open.append(os.dup(fd))  # no other file gets its number
            self.content[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()
        self.check()

    def names_now(self):
        return {path.name: path.stat().st_ino for path in self.folder.iterdir()}

    def wrecks(self, into):
        """Yield folders as a loss of power may leave this one: with the names that were synced, and with the latest."""
        for number, names in enumerate((self.names, self.names_now())):
            wreck = into / str(number)
            shutil.rmtree(wreck, ignore_errors=True)
            wreck.mkdir(parents=True)
            for name, inode in names.items():
                (wreck / name).write_bytes(self.content.get(inode, b""))
            yield wreck


def test_what_was_taken_note_of_is_there_after_a_loss_of_power(tmp_path, monkeypatch):
    monkeypatch.setattr("prorl_trio.sampling.journal.HISTORY_BYTES", 2_000)
    power = Power(tmp_path / "run", monkeypatch)
    world = World(tmp_path / "run")
    found, anew = [], 0

    def check():
        for wreck in power.wrecks(tmp_path / "wrecks"):
            left = World(wreck)
            left.journal.close()
            found.append(msgspec.msgpack.encode(left.sampler.state))

    power.check = check  # between two syncs, what is being written may be there, too
    goes_on = True
    while goes_on:
        before = msgspec.msgpack.encode(world.sampler.state)
        goes_on = world.step()
        after = msgspec.msgpack.encode(world.sampler.state)
        if world.journal.mostly_history:
            world.journal.begin("s", world.sampler.state)
            anew += 1
        assert {*found} <= {before, after}
        found.clear()
        check()
        assert {*found} == {after}
        found.clear()
    world.journal.close()
    for fd in power.open:
        os.close(fd)
    assert anew > 0


def test_damage_is_told_from_a_kill(whole, tmp_path):
    journal, _, _ = whole
    for at in range(len(journal) // 2, len(journal) - 1500, 197):
        damaged = bytearray(journal)
        damaged[at] ^= 0xFF
        (tmp_path / "whole" / JOURNAL).write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged at byte"):
            World(tmp_path / "whole")
    (tmp_path / "whole" / JOURNAL).write_bytes(journal)
    assert read_session_id(tmp_path / "whole") == "s"
    (tmp_path / "whole" / MANIFEST).unlink()
    World(tmp_path / "whole").journal.close()  # as far as the journal has its events, the manifest is made again


def test_it_is_written_anew_when_it_is_mostly_history(tmp_path, monkeypatch):
    monkeypatch.setattr("prorl_trio.sampling.journal.HISTORY_BYTES", 2_000)
    assert HISTORY_BYTES > 1_000_000
    world = World(tmp_path)
    anew = 0
    while world.step():
        if world.journal.mostly_history:
            world.journal.begin("s", world.sampler.state)
            anew += 1
            assert not world.journal.mostly_history
    state = msgspec.msgpack.encode(world.sampler.state)
    lines = lines_of(tmp_path)
    world.journal.close()
    assert anew > 0
    assert (tmp_path / JOURNAL).stat().st_size < 100_000
    again = World(tmp_path)
    again.journal.close()
    assert msgspec.msgpack.encode(again.sampler.state) == state
    assert lines_of(tmp_path) == lines
    # Lines before the stored state cannot be made again.
    (tmp_path / MANIFEST).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"manifest\.jsonl has 0 bytes, and the journal beside it says at least"):
        World(tmp_path)


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path, monkeypatch, call):
    world = World(tmp_path)
    world.step()
    state = msgspec.msgpack.encode(world.sampler.state)

    stored = (tmp_path / JOURNAL).read_bytes()

    def fails(_file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(f"os.{call}", fails)
        write = world.step if call == "fdatasync" else lambda: world.journal.begin("s", world.sampler.state)
        with pytest.raises(ConfigError, match="No space left"):
            write()
    assert msgspec.msgpack.encode(world.sampler.state) == state
    assert (tmp_path / JOURNAL).read_bytes() == stored
    world.step()
    state = msgspec.msgpack.encode(world.sampler.state)
    world.journal.close()
    again = World(tmp_path)
    again.journal.close()
    assert msgspec.msgpack.encode(again.sampler.state) == state


def test_what_is_no_journal_is_refused(tmp_path):
    (tmp_path / JOURNAL).write_bytes(b"hello, this is a text and no journal at all")
    with pytest.raises(ConfigError, match="is no journal of a sampler"):
        SamplerJournal(tmp_path)
    assert read_session_id(tmp_path / "nothing") is None


@pytest.mark.parametrize("shift", range(9))
def test_a_record_behind_a_damaged_one_is_found_at_any_place(shift):
    begin = 1000
    record = _record(begin + shift, b"payload")
    assert _has_record(b"x" * shift + record, begin)
    assert _has_record(b"x" * shift + record + b"rest", begin)
    assert not _has_record(b"x" * (shift + 1) + record, begin)
    assert not _has_record(b"x" * shift + record[:-1], begin)


def test_what_was_cut_off_is_not_searched_byte_by_byte(monkeypatch):
    looked = []

    class Prefix:
        size = 16

        def unpack(self, prefix):
            return self.unpack_from(prefix, 0)

        def unpack_from(self, content, at):
            looked.append(at)
            return struct.unpack_from("<QII", content, at)

    monkeypatch.setattr(journal_module, "_PREFIX", Prefix())
    assert not _has_record(bytes(200_000), 1)
    assert len(looked) < 100


def test_a_folder_is_one_trainers(tmp_path):
    world = World(tmp_path)
    with pytest.raises(ConfigError, match="is in use by another trainer"):
        SamplerJournal(tmp_path)
    world.journal.close()
    World(tmp_path).journal.close()


def test_another_format_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("prorl_trio.sampling.journal.FORMAT", 2)
        World(tmp_path).journal.close()
    with pytest.raises(ConfigError, match="has format 2, and this version reads 1"):
        SamplerJournal(tmp_path)


def test_a_record_that_was_written_elsewhere_is_not_read(whole, tmp_path):
    """Blocks of a file that was removed may show up at the end of another after a loss of power."""
    journal, _, state = whole
    began = SamplerJournal(tmp_path / "whole")
    first = began._begun_bytes
    began.close()
    (tmp_path / "whole" / JOURNAL).write_bytes(journal + journal[first:])
    again = World(tmp_path / "whole")
    again.journal.close()
    assert msgspec.msgpack.encode(again.sampler.state) == msgspec.msgpack.encode(state)
