"""A client that is given a node's endpoint file takes the node's Unix socket where it can, and TCP where it cannot."""

from __future__ import annotations

import errno
import os
import socket
from functools import partial

import msgspec
import pytest
import trio

from prorl_trio.client import address as address_module
from prorl_trio.client import connect
from prorl_trio.client.address import EndpointFile
from prorl_trio.config import ListenConfig
from prorl_trio.edges.auth import Door
from prorl_trio.edges.endpoints import announce, endpoint_url
from prorl_trio.edges.serve import serve_edges
from prorl_trio.edges.websocket.local_sockets import claim_local_sockets, release_local_sockets
from prorl_trio.types.errors import ConfigError, ProtocolError
from support.fake_node import FakeNode
from support.fake_service import TOKEN, open_service
from support.sessions import sessions_in

pytestmark = pytest.mark.timeout(30)

NOWHERE = "ws://127.0.0.1:1"


@pytest.fixture
def listen(tmp_path):
    return ListenConfig(port=0, token=TOKEN, endpoint_file=str(tmp_path / "endpoint.json"))


async def names_of(endpoint_file):
    return [str(address) for address in await EndpointFile(endpoint_file).read()]


def test_where_no_socket_can_be_made_there_is_none_unless_it_was_asked_for(listen, tmp_path, monkeypatch, caplog):
    class Full(socket.socket):
        def bind(self, address):
            if address.endswith(".arena"):  # there was room for one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Full)
    assert claim_local_sockets(listen) is None
    assert "No space left on device" in caplog.text
    asked = tmp_path / "asked" / "node"
    with pytest.raises(ConfigError, match="No space left on device"):
        claim_local_sockets(msgspec.structs.replace(listen, unix_socket=str(asked)))
    assert not list(asked.parent.iterdir())


async def test_the_unix_socket_comes_first_and_its_folder_goes_with_the_node(listen, tmp_path):
    endpoint = tmp_path / "endpoint.json"
    local = claim_local_sockets(listen)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            serve = partial(
                serve_edges, FakeNode(), listen, Door(TOKEN.encode()), local=local, sessions=sessions_in(nursery)
            )
            host_port = await nursery.start(serve)
            announce(endpoint, {"url": NOWHERE, "unix_url": f"unix://{local.node}"})
            async with connect(token=TOKEN, endpoint_file=endpoint) as client:
                await client.status()
            announce(endpoint, {"url": endpoint_url(host_port), "unix_url": f"unix://{local.node}"})
            assert await names_of(endpoint) == [f"unix://{local.node}", f"{endpoint_url(host_port)}/"]
            nursery.cancel_scope.cancel()
    assert local.node.parent.is_dir()
    release_local_sockets(listen, local)
    assert os.listdir(tmp_path) == ["endpoint.json"]
    assert await names_of(endpoint) == [f"{endpoint_url(host_port)}/"]


async def test_a_socket_that_nobody_listens_at_is_passed_over(tmp_path):
    endpoint, path = tmp_path / "endpoint.json", tmp_path / "node"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with trio.fail_after(10):
        async with open_service(FakeNode()) as service:
            announce(endpoint, {"url": service.url, "unix_url": f"unix://{path}"})
            assert len(await names_of(endpoint)) == 2
            async with connect(token=TOKEN, endpoint_file=endpoint) as client:
                await client.status()


async def test_what_is_no_socket_of_ours_is_not_tried(tmp_path, monkeypatch):
    endpoint, path = tmp_path / "endpoint.json", tmp_path / "node"
    announce(endpoint, {"url": NOWHERE, "unix_url": f"unix://{path}"})
    assert await names_of(endpoint) == [f"{NOWHERE}/"], "another host's"
    path.write_bytes(b"")
    assert await names_of(endpoint) == [f"{NOWHERE}/"], "no socket"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        assert len(await names_of(endpoint)) == 2
        monkeypatch.setattr(address_module.os, "geteuid", lambda: os.getuid() + 1)
        assert await names_of(endpoint) == [f"{NOWHERE}/"], "another user's"
    endpoint.write_bytes(msgspec.json.encode({"url": NOWHERE, "unix_url": "http://x"}))
    with pytest.raises(ProtocolError, match="no endpoint file"):
        await names_of(endpoint)


def test_a_folder_that_was_named_or_is_in_use_stays(listen, tmp_path):
    named = msgspec.structs.replace(listen, unix_socket=str(tmp_path / "mine" / "node"))
    release_local_sockets(named, claim_local_sockets(named))
    assert (tmp_path / "mine").is_dir()
    local = claim_local_sockets(listen)
    (local.node.parent / "kept").touch()
    release_local_sockets(listen, local)
    assert (local.node.parent / "kept").exists()


def test_a_link_that_somebody_has_planted_is_not_followed(tmp_path):
    victim, endpoint = tmp_path / "victim", tmp_path / "endpoint.json"
    victim.write_text("precious")
    endpoint.symlink_to(victim)
    for name in ("endpoint.json.new", ".endpoint.json.new"):
        (tmp_path / name).symlink_to(victim)
    announce(endpoint, {"url": "ws://127.0.0.1:1"})
    assert victim.read_text() == "precious"
    assert not endpoint.is_symlink()
    assert msgspec.json.decode(endpoint.read_bytes()) == {"url": "ws://127.0.0.1:1"}
    assert len(list(tmp_path.iterdir())) == 4, "no draft is left"


def test_a_device_or_a_pipe_is_not_replaced_by_the_endpoint_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(
        ConfigError, match=r"listen\.endpoint_file: .*/pipe cannot be written: it is not a regular file"
    ):
        announce(pipe, {"url": NOWHERE})
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("planted", ["folder", "link"])
def test_a_folder_for_sockets_that_belongs_to_somebody_else_is_refused(tmp_path, monkeypatch, planted):
    folder = tmp_path / "sockets"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    real = type(folder).lstat

    def lstat(path):
        found = real(path)
        return os.stat_result((*found[:4], 4321, *found[5:])) if path == folder else found

    monkeypatch.setattr(type(folder), "lstat", lstat)
    with pytest.raises(ConfigError, match=f"listen.unix_socket: {folder} belongs to user 4321"):
        claim_local_sockets(ListenConfig(unix_socket=str(folder / "node")))


def test_a_relative_socket_is_refused_with_the_folder_that_is_meant(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"the folder {tmp_path} has mode 0755.*a folder of its own"):
        claim_local_sockets(ListenConfig(unix_socket="a.sock"))
