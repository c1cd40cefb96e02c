"""A head is used as a node: its backends are those of all members, its state is theirs together."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import tempfile

import msgspec
import pytest
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.cli.ready import Ready
from prorl_trio.client import connect
from prorl_trio.config import HeadConfig
from prorl_trio.fleet.serve import serve_fleet
from prorl_trio.rendezvous.entry import this_process
from prorl_trio.rendezvous.folder import claim_folder
from prorl_trio.rendezvous.head import HeadClaim, HeadReplaced, read_head, remove_head, renew_head
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.types.errors import ConfigError, UnknownBackend
from support.fake_fleet import finish_all, take, update
from support.fake_node import make_spec
from support.fake_service import TOKEN
from support.fleet_head import announce, head_entry, head_quickly, open_all

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    head_quickly(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "f"


async def test_backends_are_those_of_all_members(folder):
    async with open_all(folder, "a", "b") as (fleet, _head, client):
        listed = await client.list_backends()
        assert sorted(listed.urls) == ["http://a:8000", "http://b:8000"]
        assert {backend["node_id"] for backend in listed.pool["backends"]} == {"a", "b"}
        await client.add_backend("http://h1:9000")
        assert sum("http://h1:9000" in urls for urls in fleet.owners().values()) == 1
        await client.remove_backend("http://h1:9000")
        assert fleet.owners() == {"a": ["http://a:8000"], "b": ["http://b:8000"]}
        with pytest.raises(UnknownBackend):
            await client.remove_backend("http://h1:9000")


async def test_a_policy_update_is_on_all_members_and_one_that_comes_later_waits_for_the_next(folder):
    async with open_all(folder, "a", "b") as (fleet, head, client):
        await update(client, "2")
        versions = {backend["policy_version"] for backend in (await client.list_backends()).pool["backends"]}
        assert versions == {"2"}
        await fleet.add("c")
        while not head.fleet.members.all.get("c"):
            await trio.sleep(0.01)
        await client.submit([make_spec(f"job-{number}") for number in range(12)])
        await fleet.wait_live(a=6, b=6, c=0)
        assert "policy version" in (await client.status())["members"]["c"]["behind"]
        await update(client, "3")
        await client.submit([make_spec(f"more-{number}") for number in range(4)])
        await fleet.wait_live(c=4)
        finish_all(fleet)
        assert len(await take(client)) == 16


async def test_the_state_is_that_of_all_members(folder):
    async with open_all(folder, "a", "b") as (fleet, _head, client):
        await client.submit([make_spec(f"job-{number}") for number in range(30)])
        await fleet.wait_live(a=10, b=10)
        state = await client.status()
        assert sorted(state["members"]) == ["a", "b"]
        assert [state["members"][name]["held_jobs"] for name in "ab"] == [10, 10]
        assert state["pipeline"]["stages"]["init"]["queued"] == 10
        assert (state["pipeline"]["jobs"], len(state["jobs"])) == (30, 30)
        assert {job["waiting_on"] for job in state["jobs"]} == {"node a", "node b", "a place on a node"}
        room = await client.room()
        assert (room.free, room.run_workers) == (-10, 16)


async def test_a_node_with_another_model_joins_when_the_last_with_the_present_one_has_left(folder):
    async with open_all(folder, "a") as (fleet, head, client):
        await fleet.add("new", model="n 4567", version="2")
        await fleet.add("other", version="2")
        await head.wait_members("a", "other")
        assert "has the model n 4567, and the fleet has m 0123" in (await client.status())["left_out"]["new"]
        await fleet["a"].leave()
        await fleet["other"].leave()
        await head.wait_members("new")
        assert head.fleet.members.model == "n 4567"


async def test_a_trainer_finds_the_head_by_the_folder_and_waits_for_its_next_start(folder):
    async with open_all(folder, "a") as (fleet, head, _client):
        announce(folder, head)
        assert FleetWatch(folder).read().nodes.keys() == {"a"}, "it is no node"
        async with connect(fleet=folder, session_id="s") as client:
            await client.submit([make_spec("x")])
            await fleet.wait_live(a=1)
            finish_all(fleet)
            assert len(await take(client)) == 1


def test_one_head_at_a_time(folder):
    claim_folder(folder)
    ours = head_entry("ws://127.0.0.1:1")
    elsewhere = msgspec.structs.replace(
        ours, process=msgspec.structs.replace(ours.process, boot_id="another machine's")
    )
    assert HeadClaim(folder, this_process()).is_free(0.0)
    renew_head(folder, None, elsewhere)
    claim = HeadClaim(folder, this_process())
    assert not claim.is_free(0.0)
    assert not claim.is_free(4.0)
    assert claim.is_free(6.0), "no heartbeat was seen"
    claim = HeadClaim(folder, this_process())
    assert not claim.is_free(0.0)
    path = folder / "head.json"
    stat = path.stat()
    renew_head(folder, elsewhere, elsewhere)
    if path.stat().st_mtime_ns != stat.st_mtime_ns:
        with pytest.raises(ConfigError, match="has a living head already"):
            claim.is_free(1.0)
    remove_head(folder, ours)
    assert read_head(folder) == elsewhere, "it is another one's"
    with pytest.raises(ConfigError, match="has taken the fleet over"):
        renew_head(folder, ours, ours)
    remove_head(folder, elsewhere)
    assert not path.exists()


async def test_a_head_whose_fleet_another_one_has_taken_over_ends(folder):
    """It was frozen, or cut off from the disk: two would work with one ledger."""
    tables = {"fleet": {"dir": str(folder), "heartbeat_interval_s": 0.05}, "listen": {"port": 0, "token": TOKEN}}
    config = msgspec.convert({**tables, "ledger": {"dir": ""}}, HeadConfig)

    async def lead():
        async with open_single_nursery() as nursery:
            await nursery.start(serve_fleet, config)
            entry = read_head(folder)
            others = msgspec.structs.replace(entry.process, boot_id="another machine's")
            renew_head(folder, None, msgspec.structs.replace(entry, process=others))
            await trio.sleep_forever()

    with trio.fail_after(30), pytest.raises(HeadReplaced, match="with its jobs: this head ends"):
        await lead()
    assert read_head(folder).process.boot_id == "another machine's"


async def test_at_sighup_a_head_goes_on_and_takes_over_its_token_file(folder, tmp_path, caplog):
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text("first")
    listen = {"port": 0, "unix_socket": "", "token_file": str(token_file)}
    fields = {"on_hangup": "reload", "listen": listen, "fleet": {"dir": str(folder)}, "ledger": {"dir": ""}}
    caplog.set_level("INFO")

    async def reloaded(text):
        os.kill(os.getpid(), signal.SIGHUP)
        while text not in caplog.text:
            await trio.sleep(0.01)

    with trio.fail_after(30):
        async with open_single_nursery() as nursery:
            await nursery.start(serve_fleet, msgspec.convert(fields, HeadConfig))
            await reloaded("reload: the token has not changed")
            token_file.write_text("second")
            await reloaded("reload: the token is replaced")
            while read_head(folder).token != "second":
                await trio.sleep(0.01)
            token_file.write_text("")
            await reloaded("reload: the token stays as it is")
            os.kill(os.getpid(), signal.SIGTERM)


async def test_a_head_without_a_temporary_folder_serves_on_its_port(folder, monkeypatch, caplog):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    fields = {"listen": {"port": 0, "token": TOKEN}, "fleet": {"dir": str(folder)}, "ledger": {"dir": ""}}
    with trio.fail_after(30):
        async with open_single_nursery() as nursery:
            await nursery.start(serve_fleet, msgspec.convert(fields, HeadConfig))
            assert (read_head(folder).unix_url, "No usable temporary directory" in caplog.text) == ("", True)
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"heartbeat_interval_s": 50.0}, r"listen\.heartbeat_interval_s \(50\) must be"),
        ({"max_connections": 10_000}, r"listen\.max_connections: the configuration may need \d+ open files"),
        ({"host": "192.0.2.1"}, r"listen: cannot bind 192\.0\.2\.1:0"),
    ],
)
async def test_what_is_wrong_with_its_listeners_is_told_before_a_head_takes_its_folder(
    folder, monkeypatch, fields, why
):
    monkeypatch.setattr("prorl_trio.node.descriptors.resource.getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr("prorl_trio.fleet.serve.raise_descriptor_limit", lambda: None)
    tables = {"listen": {"port": 0, "token": "t", **fields}, "fleet": {"dir": str(folder)}, "ledger": {"dir": ""}}
    with pytest.raises(ConfigError, match=why):
        await serve_fleet(msgspec.convert(tables, HeadConfig))
    assert not folder.exists()


class FullOutput(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_command_that_cannot_say_ready_serves_on(monkeypatch, caplog):
    monkeypatch.setattr("sys.stdout", FullOutput())
    Ready(secure=False).started(("127.0.0.1", 1))
    assert "READY cannot be written to standard output: No space left on device" in caplog.text
    sys.stdout.close()
