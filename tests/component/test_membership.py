"""A node in the folder of its fleet: it writes itself, beats, and takes itself away."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest
import trio

from prorl_trio.config import BackendConfig, ModelConfig, NodeConfig
from prorl_trio.config.node import FleetConfig
from prorl_trio.edges.auth import Door
from prorl_trio.node import membership
from prorl_trio.node.membership import Endpoints, advertised_host, open_membership
from prorl_trio.rendezvous.entry import this_process
from prorl_trio.rendezvous.folder import read_entry, write_entry
from prorl_trio.types.errors import ConfigError
from support.hanging_disk import hanging_call

pytestmark = pytest.mark.timeout(30)

ENDPOINTS = Endpoints(address=("127.0.0.1", 8700))


class Member:
    """The parts of a node that its entry tells of."""

    def __init__(self, folder, node_id="n1", model="/models/m", **fleet):
        self.node_id = node_id
        self.draining = False
        self.jobs = []
        self.config = NodeConfig(
            model=ModelConfig(path=model),
            fleet=FleetConfig(dir=str(folder), **{"heartbeat_interval_s": 0.02, "stale_after_s": 0.3, **fleet}),
        )

    def part(self, _name):
        return {"vocabulary": "0123456789abcdef0123"}

    @property
    def live(self):
        trio.lowlevel.current_task()  # as a node's state: not for threads
        return len(self.jobs)

    def unreadiness(self):
        return "the node is draining" if self.draining else ""

    def open(self, undelivered=0):
        return open_membership(self, Door(b"secret"), ENDPOINTS, lambda: undelivered)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "fleet"


async def until(condition):
    with trio.fail_after(10):
        await trio.lowlevel.checkpoint()
        while not condition():  # noqa: ASYNC110 - the other side is a thread on a disk
            await trio.sleep(0.01)


async def test_it_writes_itself_beats_and_is_gone_afterwards(folder):
    member = Member(folder)
    async with member.open():
        entry, first_ns = read_entry(folder / "n1.json")
        assert entry.url == "ws://127.0.0.1:8700"
        assert entry.rest_url == "http://127.0.0.1:8700"
        assert (entry.token, entry.model, entry.state) == ("secret", "m 0123456789abcdef", "open")
        await until(lambda: read_entry(folder / "n1.json")[1] > first_ns)
        member.draining, member.jobs = True, [{}]
        await until(lambda: read_entry(folder / "n1.json")[0].state == "draining")
        found = read_entry(folder / "n1.json")[0]
        assert (found.capacity.live, found.unready) == (1, "the node is draining")
    assert os.listdir(folder) == []


async def test_a_node_without_a_fleet_writes_nothing(tmp_path):
    async with Member("").open():
        assert os.listdir(tmp_path) == []


async def test_an_entry_that_somebody_removed_comes_back(folder):
    async with Member(folder).open():
        (folder / "n1.json").unlink()
        await until((folder / "n1.json").exists)


async def test_a_full_disk_stops_no_heartbeat(folder, monkeypatch, caplog):
    member = Member(folder)
    async with member.open():

        def full(_folder, _entry):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(membership, "write_entry", full)
        member.jobs = [{}]
        before_ns = read_entry(folder / "n1.json")[1]
        await until(lambda: read_entry(folder / "n1.json")[1] > before_ns)
        await until(lambda: "No space left" in caplog.text)
        monkeypatch.undo()
        await until(lambda: read_entry(folder / "n1.json")[0].capacity.live == 1)


async def test_unfinished_work_that_waits_for_the_next_start_leaves_an_entry(folder):
    member = Member(folder, restart_within_s=60.0)
    async with member.open(undelivered=1):
        pass
    assert read_entry(folder / "n1.json")[0].state == "away"
    async with member.open():
        assert read_entry(folder / "n1.json")[0].state == "open"
    assert os.listdir(folder) == []


async def test_a_living_node_of_the_same_name_is_an_error_and_one_that_is_silent_is_waited_for(folder):
    async with Member(folder).open():
        path = folder / "n1.json"
        elsewhere = msgspec.structs.replace(read_entry(path)[0].process, boot_id="another machine")
        other = msgspec.structs.replace(read_entry(path)[0], process=elsewhere, host="h2")
    async with trio.open_nursery() as nursery:
        write_entry(folder, other)

        async def beat():
            while True:
                await trio.sleep(0.02)
                os.utime(path)

        nursery.start_soon(beat)
        with pytest.raises(ConfigError, match="already \\(on h2"):
            async with Member(folder).open():
                pass
        nursery.cancel_scope.cancel()
    async with Member(folder).open():
        assert read_entry(path)[0].process == this_process()


async def test_a_node_whose_name_was_taken_over_leaves_the_new_one_alone(folder, caplog):
    path = folder / "n1.json"
    async with Member(folder).open():
        entry = read_entry(path)[0]
        taken = msgspec.structs.replace(
            entry, process=msgspec.structs.replace(entry.process, boot_id="another machine")
        )
        write_entry(folder, taken)
        await until(lambda: "took the name" in caplog.text)
    assert read_entry(path)[0] == taken


async def test_an_entry_names_the_backends_of_the_configuration(folder):
    member = Member(folder)
    backends = BackendConfig(urls=["http://gpu1:8000/", "http://gpu2:8000"], weights={"http://gpu2:8000": 2.0})
    member.config = msgspec.structs.replace(member.config, backends=backends)
    async with member.open():
        entry = read_entry(folder / "n1.json")[0]
    assert entry.backends == {"http://gpu1:8000": 1.0, "http://gpu2:8000": 2.0}


@pytest.fixture
def hanging():
    with hanging_call() as call:
        yield call


async def test_a_node_ends_though_its_fleets_disk_hangs_in_a_heartbeat(folder, monkeypatch, caplog, hanging):
    monkeypatch.setattr(membership, "LEAVE_TIMEOUT_S", 0.05)
    with trio.fail_after(10):
        async with Member(folder).open():
            monkeypatch.setattr(membership, "_renew", hanging)
            await until(hanging.called.is_set)
    assert "does not answer: the entry stays" in caplog.text
    assert os.listdir(folder) == ["n1.json"]


async def test_a_node_ends_though_its_fleets_disk_hangs_when_it_leaves(folder, monkeypatch, caplog, hanging):
    monkeypatch.setattr(membership, "LEAVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(membership, "remove_entry", hanging)
    with trio.fail_after(10):
        async with Member(folder).open():
            pass
    assert hanging.called.is_set()
    assert "does not answer: the entry stays" in caplog.text


async def test_a_start_on_a_disk_that_hangs_can_be_given_up(folder, monkeypatch, hanging):
    monkeypatch.setattr(membership, "write_entry", hanging)
    with trio.fail_after(10), trio.CancelScope() as starting:
        async with trio.open_nursery() as nursery:

            async def give_up():
                await until(hanging.called.is_set)
                starting.cancel()

            nursery.start_soon(give_up)
            async with Member(folder).open():
                pass
    assert starting.cancelled_caught


def test_a_node_that_listens_everywhere_tells_the_name_of_its_machine():
    assert advertised_host("", "0.0.0.0") == socket.gethostname()
    assert advertised_host("", "10.0.0.1") == "10.0.0.1"
    assert advertised_host("node7.ib", "0.0.0.0") == "node7.ib"


def test_heartbeats_must_be_denser_than_the_patience_of_others():
    with pytest.raises(ValueError, match="at most a third"):
        FleetConfig(heartbeat_interval_s=20.0)
