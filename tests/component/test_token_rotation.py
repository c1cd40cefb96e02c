"""A token that is replaced while the node runs: the former one ends everywhere, sessions and jobs go on."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import msgspec
import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import ListenConfig, ModelConfig, NodeConfig
from prorl_trio.edges.auth import Door
from prorl_trio.node.serve import serve_reloads
from prorl_trio.rendezvous.folder import write_entry
from prorl_trio.types.errors import Unauthorized
from support.fake_fleet import finish_all, take, until
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_rest import TOKEN, EventReader, open_rest
from support.fake_service import open_service
from support.fleet_head import head_quickly, open_all

pytestmark = pytest.mark.timeout(60)

NEW = "another token"


async def test_a_trainer_with_the_former_token_ends_and_its_session_does_not():
    node = FakeNode()
    async with open_service(node) as service:
        with pytest.raises(Unauthorized, match="has another token now; connect again with that one and session 't'"):  # noqa: PT012 - one block
            async with connect(service.url, TOKEN, session_id="t") as client:
                await client.submit([make_spec("a")])
                assert service.door.replace_token(NEW.encode())
                await anext(client.results())
        with pytest.raises(Unauthorized, match="wrong token"):
            async with connect(service.url, TOKEN):
                pass
        async with connect(service.url, NEW, session_id="t") as client:
            node.finish("a", make_outcome(make_spec("a")))
            assert [outcome.job_id async for outcome in client.results()] == ["a"]
            assert not service.door.replace_token(NEW.encode()), "the same is no change"
            assert len(await client.status()) > 0


async def test_rest_forgets_the_former_token_and_ends_what_it_began(node):
    async with open_rest(node) as rest, await rest.open_stream() as stream, await rest.open_stream() as other:
        events = EventReader(stream, await rest.send(stream, "GET", "/v1/events"))
        assert await events.next() == ("comment", "connected")
        await rest.send(other, "GET", "/v1/results?wait=500")
        await trio.testing.wait_all_tasks_blocked(0.05)
        rest.door.replace_token(NEW.encode())
        for ended in (stream, other):
            with suppress(trio.BrokenResourceError):
                while await ended.receive_some():
                    pass
        assert (await rest.call("GET", "/v1/status")).status == 401
        new = {"Authorization": f"Bearer {NEW}"}
        assert (await rest.call("GET", "/v1/status", headers=new)).status == 200


async def test_the_head_of_a_fleet_follows_and_no_job_is_moved(tmp_path, monkeypatch):
    head_quickly(monkeypatch)
    async with open_all(tmp_path / "f", "a", "b") as (fleet, head, client):
        await client.submit([make_spec(f"job-{n}") for n in range(8)])
        await fleet.wait_live(a=4, b=4)
        for first in (True, False):
            node = fleet["a"]
            node.entry = msgspec.structs.replace(node.entry, token=NEW if first else "a third one")
            if first:  # the entry comes before the new token, or after it
                write_entry(fleet.folder, node.entry)
            node.service.door.replace_token(node.entry.token.encode())
            if not first:
                await trio.sleep(0.1)
                write_entry(fleet.folder, node.entry)
            await until(lambda: not head.fleet.members.all["a"].state.connected)
            await until(lambda: head.fleet.members.all["a"].state.connected)
        finish_all(fleet)
        assert {(outcome.status, outcome.attempt) for outcome in await take(client)} == {("completed", 1)}


async def reload(config, door, caplog, load):
    current = [config]
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_reloads, load, lambda: current[0], current.append, door)
        before = len(caplog.records)
        os.kill(os.getpid(), signal.SIGHUP)
        while len(caplog.records) == before:  # noqa: ASYNC110 - a thread reads the disk
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    return caplog.records[-1].getMessage()


async def test_sighup_takes_the_tokens_file_over_and_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "token"
    path.write_text("the first\n")
    path.chmod(0o600)
    config = NodeConfig(model=ModelConfig(path="m"), listen=ListenConfig(token_file=str(path)))
    door = Door(b"the first")
    assert "nothing has changed" in await reload(config, door, caplog, lambda: config)
    path.write_text("the second\n")
    assert "reload: the token is replaced" in await reload(config, door, caplog, lambda: config)
    assert door.token == b"the second"
    for content, mode in (("", 0o600), ("größer", 0o600), ("the third", 0o644)):
        path.write_text(content)
        path.chmod(mode)
        assert "the configuration stays as it is: listen.token_file" in await reload(
            config, door, caplog, lambda: config
        )
    path.unlink()
    assert "the configuration stays as it is" in await reload(config, door, caplog, lambda: config)
    assert door.token == b"the second"
    other = msgspec.structs.replace(config, listen=ListenConfig(token="the fourth"))
    said = await reload(config, door, caplog, lambda: other)
    assert "the token is replaced" in said
    assert "the fourth" not in caplog.text
    assert door.token == b"the fourth"
