"""The folder of a fleet: entries whole or absent, and the life of their nodes, whatever clocks say."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import msgspec
import pytest

from prorl_trio.rendezvous import folder as folder_module
from prorl_trio.rendezvous import head as head_module
from prorl_trio.rendezvous import watch as watch_module
from prorl_trio.rendezvous.entry import Capacity, NodeEntry, has_ended, slurm_step, this_process
from prorl_trio.rendezvous.folder import (
    HEAD_FILE,
    claim_folder,
    read_entry,
    remove_entry,
    renew_entry,
    require_folder,
    write_entry,
)
from prorl_trio.rendezvous.head import renew_head
from prorl_trio.rendezvous.report import look_at_fleet
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.types.errors import ConfigError
from support.fleet_head import head_entry

SECOND_NS = 1_000_000_000


def entry_of(node_id="n1", **changes):
    fields = {
        "node_id": node_id,
        "url": "ws://10.0.0.1:8700",
        "token": "secret",
        "host": "h1",
        "process": this_process(),
        "model": "m 0123",
        "version": "1",
        "capacity": Capacity(run_workers=4, max_live=8, live=0),
        "heartbeat_interval_s": 5.0,
        "stale_after_s": 30.0,
    }
    return NodeEntry(**{**fields, **changes})


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def fleet(tmp_path):
    return claim_folder(tmp_path / "runs" / "fleet")


@pytest.fixture
def clock():
    return Clock()


def shift(path, seconds):
    """Move a file's time, as a machine does whose clock is wrong."""
    then_ns = path.stat().st_mtime_ns + int(seconds * SECOND_NS)
    os.utime(path, ns=(then_ns, then_ns))


def test_an_entry_comes_back_as_it_was_written_and_only_we_can_read_it(fleet):
    entry = entry_of()
    write_entry(fleet, entry)
    path = fleet / "n1.json"
    assert read_entry(path)[0] == entry
    assert path.stat().st_mode & 0o777 == 0o600
    assert fleet.stat().st_mode & 0o777 == 0o700
    assert os.listdir(fleet) == ["n1.json"]
    assert "secret" not in repr(entry)


def test_a_write_that_fails_leaves_the_entry_before_it_and_no_draft(fleet, monkeypatch):
    write_entry(fleet, entry_of())

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_entry(fleet, entry_of(url="ws://10.0.0.2:1"))
    assert os.listdir(fleet) == ["n1.json"]
    assert read_entry(fleet / "n1.json")[0].url == "ws://10.0.0.1:8700"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no whole entry"),
        (b'{"node_id": "bad", "url"', "no whole entry"),
        (b"\xff\xfe", "no whole entry"),
        (msgspec.json.encode(entry_of("other")), "the entry of node 'other'"),
        (msgspec.json.encode(entry_of("bad", format=2)), "has format 2"),
    ],
)
def test_what_is_no_entry_is_named_and_hides_no_other(fleet, content, why):
    write_entry(fleet, entry_of())
    bad = fleet / "bad.json"
    bad.write_bytes(content)
    bad.chmod(0o600)
    view = FleetWatch(fleet).read()
    assert list(view.nodes) == ["n1"]
    assert why in view.broken[str(bad)]


class StaleHandles:
    """A file system of NFS on which the next `times` opens, or looks at an open file, find that it was replaced."""

    def __init__(self, monkeypatch, call, times):
        self.left = times
        self._real = getattr(os, call)
        monkeypatch.setattr(folder_module.os, call, self)

    def __call__(self, *arguments):
        if self.left and (isinstance(arguments[0], int) or str(arguments[0]).endswith("n1.json")):
            self.left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self._real(*arguments)


@pytest.mark.parametrize("call", ["open", "fstat"])
def test_an_entry_that_is_replaced_while_it_is_opened_on_nfs_is_read_anew(fleet, clock, monkeypatch, call):
    write_entry(fleet, entry_of())
    watch = FleetWatch(fleet, clock=clock)
    assert watch.read().nodes["n1"].life == "live"
    clock.now_s += 20
    with monkeypatch.context() as patched:
        StaleHandles(patched, call, 1)
        view = watch.read()
    assert (view.nodes["n1"].life, round(view.nodes["n1"].age_s)) == ("live", 20)
    assert not view.broken


@pytest.mark.parametrize("call", ["open", "fstat"])
def test_an_entry_that_nfs_finds_replaced_again_and_again_is_none_and_not_broken(fleet, monkeypatch, call):
    write_entry(fleet, entry_of())
    with monkeypatch.context() as patched:
        StaleHandles(patched, call, 1000)
        with pytest.raises(FileNotFoundError):
            read_entry(fleet / "n1.json")
        view = FleetWatch(fleet).read()
    assert (view.nodes, view.broken) == ({}, {})


def test_an_entry_is_read_though_the_time_of_the_disk_cannot_be(fleet, monkeypatch):
    write_entry(fleet, entry_of())

    def replaced(*_arguments):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(folder_module.os, "utime", replaced)
    assert FleetWatch(fleet).read().nodes["n1"].life == "live"
    assert os.listdir(fleet) == ["n1.json"]


def test_another_error_of_the_disk_is_named(fleet, monkeypatch):
    write_entry(fleet, entry_of())

    def broken(*_arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(folder_module.os, "fstat", broken)
        view = FleetWatch(fleet).read()
    assert "Input/output error" in view.broken[str(fleet / "n1.json")]


def test_an_entry_that_others_can_read_or_that_is_a_link_is_refused(fleet):
    write_entry(fleet, entry_of())
    (fleet / "n1.json").chmod(0o644)
    (fleet / "n2.json").symlink_to(fleet / "n1.json")
    view = FleetWatch(fleet).read()
    assert not view.nodes
    assert len(view.broken) == 2


def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        require_folder(tmp_path / "none")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        claim_folder(tmp_path / "open")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        claim_folder(tmp_path / "file")


def test_a_node_lives_while_its_heartbeat_changes_the_file(fleet, clock):
    entry = entry_of()
    write_entry(fleet, entry)
    watch = FleetWatch(fleet, clock=clock)
    assert watch.read().nodes["n1"].life == "live"
    clock.now_s += 29
    assert watch.read().nodes["n1"].life == "live"
    clock.now_s += 2
    assert watch.read().nodes["n1"].life == "stale"
    renew_entry(fleet, entry)
    found = watch.read().nodes["n1"]
    assert (found.life, found.age_s) == ("live", 0.0)


@pytest.mark.parametrize("skew_s", [-300.0, 300.0])
def test_a_machine_whose_clock_is_wrong_is_believed_by_its_changes(fleet, clock, skew_s):
    entry = entry_of()
    write_entry(fleet, entry)
    path = fleet / "n1.json"
    shift(path, skew_s)
    watch = FleetWatch(fleet, clock=clock)
    assert watch.read().nodes["n1"].life == ("stale" if skew_s < 0 else "live")
    for _ in range(10):
        clock.now_s += 5
        shift(path, 5)
        assert watch.read().nodes["n1"].life == "live"
    clock.now_s += 31
    assert watch.read().nodes["n1"].life == "stale"


def test_the_readers_own_clock_does_not_matter(fleet, monkeypatch):
    write_entry(fleet, entry_of())
    monkeypatch.setattr(watch_module.time, "time", lambda: 0.0)
    assert FleetWatch(fleet).read().nodes["n1"].life == "live"


def test_an_old_entry_is_stale_at_the_first_look(fleet):
    write_entry(fleet, entry_of())
    shift(fleet / "n1.json", -31)
    found = FleetWatch(fleet).read().nodes["n1"]
    assert found.life == "stale"
    assert found.age_s == pytest.approx(31, abs=5)


def test_a_folder_in_which_nothing_can_be_made_is_read_all_the_same(fleet, clock, monkeypatch):
    write_entry(fleet, entry_of())

    def full(**_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module.tempfile, "mkstemp", full)
    watch = FleetWatch(fleet, clock=clock)
    assert watch.read().nodes["n1"].life == "live"
    clock.now_s += 31
    assert watch.read().nodes["n1"].life == "stale"


def test_a_node_whose_process_is_gone_has_ended_at_once(fleet):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = msgspec.structs.replace(this_process(), pid=child.pid)
    fields = (folder_module.Path(f"/proc/{child.pid}/stat")).read_text().rpartition(")")[2].split()
    process = msgspec.structs.replace(process, start_time=int(fields[19]))
    write_entry(fleet, entry_of(process=process))
    watch = FleetWatch(fleet)
    assert watch.read().nodes["n1"].life == "live"
    child.communicate(b"\n")
    assert watch.read().nodes["n1"].life == "ended"


def test_of_other_machines_and_namespaces_we_cannot_know():
    here = this_process()
    assert not has_ended(here)
    assert has_ended(msgspec.structs.replace(here, start_time=here.start_time - 1)), "another process has the pid"
    gone = msgspec.structs.replace(here, pid=2**22 + 1)
    assert has_ended(gone)
    assert not has_ended(msgspec.structs.replace(gone, boot_id="another machine"))
    assert not has_ended(msgspec.structs.replace(gone, pid_namespace=1))


def test_a_node_that_left_is_gone_and_one_that_is_away_has_ended(fleet):
    entry = entry_of()
    write_entry(fleet, entry)
    watch = FleetWatch(fleet)
    write_entry(fleet, msgspec.structs.replace(entry, state="away"))
    assert watch.read().nodes["n1"].life == "ended"
    remove_entry(fleet, entry)
    assert not watch.read().nodes
    remove_entry(fleet, entry)


def test_an_entry_of_another_process_is_left_alone(fleet):
    former = msgspec.structs.replace(this_process(), pid=1)
    write_entry(fleet, entry_of())
    remove_entry(fleet, entry_of(process=former))
    assert os.listdir(fleet) == ["n1.json"]


def test_what_a_killed_writer_left_goes_with_the_entry(fleet):
    write_entry(fleet, entry_of())
    (fleet / ".draft-n1-killed").touch()
    assert list(FleetWatch(fleet).read().nodes) == ["n1"]
    remove_entry(fleet, entry_of())
    assert os.listdir(fleet) == []


def test_slurm_is_read_from_the_environment():
    assert slurm_step({}) is None
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURMD_NODENAME": "c1",
        "SLURM_JOB_END_TIME": "1760000000",
    }
    step = slurm_step(environment)
    assert step is not None
    assert (step.job_id, step.step_id, step.node_name, step.end_time) == ("7", "0", "c1", 1760000000)
    unlimited = slurm_step({**environment, "SLURM_JOB_END_TIME": "Unknown"})
    assert unlimited is not None
    assert unlimited.end_time == 0


def test_a_report_tells_whether_the_head_lives_and_no_token(fleet, monkeypatch):
    assert look_at_fleet(fleet).head is None
    write_entry(fleet, entry_of())
    entry = head_entry("ws://10.0.0.1:1")
    renew_head(fleet, None, entry)
    told = look_at_fleet(fleet)
    assert (told.head["life"], told.head["url"], told.nodes["n1"]["life"]) == ("live", "ws://10.0.0.1:1", "live")
    assert "token" not in told.head
    assert "token" not in told.nodes["n1"]
    long_ago_s = time.time() - 2 * entry.stale_after_s
    os.utime(fleet / HEAD_FILE, (long_ago_s, long_ago_s))
    assert look_at_fleet(fleet).head["life"] == "stale"
    monkeypatch.setattr(head_module, "has_ended", lambda process: True)
    assert look_at_fleet(fleet).head["life"] == "ended"
    (fleet / HEAD_FILE).write_text("{")
    told = look_at_fleet(fleet)
    assert told.head is None
    assert "no whole entry" in told.broken[str(fleet / HEAD_FILE)]
