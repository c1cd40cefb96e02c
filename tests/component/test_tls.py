from __future__ import annotations

import logging
import os
import ssl
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
import trustme

from prorl_ipc.errors import ProtocolViolation
from prorl_ipc.tls import client_context, open_tls, server_context
from prorl_ipc.websocket import LinkClosed
from prorl_trio.client import connect
from prorl_trio.client.errors import ConnectionLost
from prorl_trio.config import ListenConfig
from prorl_trio.edges.auth import Door
from prorl_trio.edges.serve import serve_edges
from prorl_trio.edges.tcp import load_tls
from prorl_trio.types.errors import ConfigError, ProtocolError, Unauthorized
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_rest import EventReader, open_rest
from support.fake_service import TOKEN, open_service
from support.sessions import sessions_in

pytestmark = pytest.mark.timeout(30)


class Certificates:
    """An authority of our own, and what it signed for 127.0.0.1."""

    def __init__(self, folder, identity="127.0.0.1"):
        authority = trustme.CA()
        leaf = authority.issue_cert(identity)
        self.ca, cert, key = str(folder / "ca.pem"), folder / "cert.pem", folder / "key.pem"
        authority.cert_pem.write_to_path(self.ca)
        cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
        self.listen = {"tls_cert": str(cert), "tls_key": str(key)}

    def rest(self):
        """For `open_rest`."""
        server = server_context(self.listen["tls_cert"], self.listen["tls_key"])
        return {"certificate": server, "trust": client_context(self.ca)}


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


async def test_a_session_over_tls(certificates):
    node = FakeNode(on_submit=lambda spec: make_outcome(spec, tokens=200_000))
    async with open_service(node, **certificates.listen) as service:
        assert service.url.startswith("wss://")
        async with connect(service.url, TOKEN, tls_ca=certificates.ca) as client:
            await client.submit([make_spec(f"j{n}") for n in range(5)])
            ids = [outcome.job_id async for outcome in client.results(5)]
        assert ids == [f"j{n}" for n in range(5)]
        with pytest.raises(Unauthorized):
            async with connect(service.url, "no", tls_ca=certificates.ca):
                pass


async def test_a_certificate_that_is_not_to_be_believed_is_refused_at_once(certificates, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    wrong_name = Certificates(other, "node.example")
    async with open_service(FakeNode(), **certificates.listen) as service:
        with pytest.raises(
            ProtocolError, match=r"cannot be verified: .*; name the PEM file of its authority: --tls-ca"
        ):
            async with connect(service.url, TOKEN):
                pass
    async with open_service(FakeNode(), **wrong_name.listen) as service:
        with pytest.raises(ProtocolError, match=r"cannot be verified:.*mismatch[^;]*$"):
            async with connect(service.url, TOKEN, tls_ca=wrong_name.ca):
                pass


async def test_one_side_with_tls_and_the_other_without(certificates):
    async with open_service(FakeNode()) as service:
        with pytest.raises(ProtocolError, match="TLS"):
            async with connect(service.url.replace("ws:", "wss:"), TOKEN, tls_ca=certificates.ca):
                pass
    async with open_service(FakeNode(), **certificates.listen) as service:
        with pytest.raises(ConnectionLost, match="if it has a certificate, its address is wss://"):
            async with connect(service.url.replace("wss:", "ws:"), TOKEN, connect_timeout_s=0.3):
                pass
        async with connect(service.url, TOKEN, tls_ca=certificates.ca):
            pass


async def test_versions_before_1_2_are_refused(certificates):
    context = client_context(certificates.ca)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    async with open_service(FakeNode(), **certificates.listen) as service:
        stream = await trio.open_tcp_stream(service.host, service.port)
        with pytest.raises((LinkClosed, ProtocolViolation), match="TLS"):
            await open_tls(stream, context, server_hostname=service.host, timeout_s=5)


async def test_a_stranger_that_says_nothing_is_shown_out(certificates):
    async with (
        open_service(FakeNode(), handshake_timeout_s=0.1, **certificates.listen) as service,
        await trio.open_tcp_stream(service.host, service.port) as stream,
    ):
        assert await stream.receive_some() == b""


async def test_a_server_that_says_nothing_is_given_up():
    ours, theirs = trio.testing.memory_stream_pair()
    with pytest.raises(LinkClosed, match=r"no TLS handshake within 0\.05 s"):
        await open_tls(ours, ssl.create_default_context(), server_hostname="x", timeout_s=0.05)
    assert await theirs.receive_some() != b"", "the client's hello"
    assert await theirs.receive_some() == b"", "and it is closed"


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "file", "pair", "pipe"])
async def test_what_cannot_be_used_is_said_at_the_start(certificates, tmp_path, missing, nursery):
    listen = dict(certificates.listen)
    if missing == "file":
        listen["tls_cert"] = str(tmp_path / "none.pem")
    elif missing == "pipe":
        listen["tls_cert"] = str(tmp_path / "pipe")
        os.mkfifo(tmp_path / "pipe")
    elif missing == "pair":
        listen["tls_key"] = listen["tls_cert"]
        Path(listen["tls_cert"]).chmod(0o600)
    else:
        listen[missing] = ""
    config = ListenConfig(port=0, token=TOKEN, **listen)
    with pytest.raises(ConfigError, match="tls_cert"):
        await serve_edges(FakeNode(), config, Door(b"a"), tls=load_tls(config), sessions=sessions_in(nursery))
    with pytest.raises(ConfigError, match="tls_ca"):
        async with connect("wss://127.0.0.1:1", TOKEN, tls_ca=tmp_path / "none.pem"):
            pass


async def test_beyond_loopback_without_tls_is_said_loudly(certificates, caplog):
    def warned():
        return "WITHOUT TLS" in caplog.text

    with caplog.at_level(logging.WARNING):
        async with open_service(FakeNode()):
            assert not warned()
        async with open_service(FakeNode(), host="0.0.0.0", **certificates.listen):
            assert not warned()
        async with open_service(FakeNode(), host="0.0.0.0"):
            assert warned()


# ---------------------------------------------------------------- REST


async def test_rest_over_tls(certificates):
    node = FakeNode(on_submit=lambda spec: make_outcome(spec, tokens=200_000))
    async with open_rest(node, **certificates.rest()) as rest:
        assert rest.url.startswith("https://")
        assert (await rest.call("POST", "/v1/rollouts?wait=20", msgspec.to_builtins(make_spec("j")))).status == 200
        answer = await rest.call("GET", "/v1/rollouts/j?arrays=list")
        assert len(answer.json()["outcome"]["trajectory"]["segments"][0]["token_ids"]) == 200_000, "in many records"
        assert (await rest.call("GET", "/v1/rollouts", headers={"Authorization": "Bearer no"})).status == 401
        async with await rest.open_stream() as stream:  # two requests on one connection, the second one endless
            first = await rest.send(stream, "GET", "/healthz")
            reader = EventReader(stream, first)
            assert (await reader.next())[0] == "end"
            events = EventReader(stream, await rest.send(stream, "GET", "/v1/events"))
            await rest.call("POST", "/v1/rollouts", msgspec.to_builtins(make_spec("k")))
            while (await events.next())[0] != "job_ended":
                pass
            rest.scope.cancel()
            while (await events.next())[0] != "end":
                pass


async def test_rest_shows_out_who_speaks_no_tls_or_says_nothing(certificates):
    async with open_rest(FakeNode(), handshake_timeout_s=0.2, **certificates.rest()) as rest:
        for said in (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b""):
            async with await trio.open_tcp_stream(rest.host, rest.port) as stream:
                await stream.send_all(said)
                with suppress(trio.BrokenResourceError):
                    while answer := await stream.receive_some():
                        assert b"HTTP" not in answer, "a TLS alert at most"
        assert (await rest.call("GET", "/healthz")).status == 200


async def test_rest_over_tls_gives_up_a_client_that_does_not_read(certificates, caplog):
    node = FakeNode(on_submit=lambda spec: make_outcome(spec, tokens=2_000_000))
    async with open_rest(node, send_timeout_s=0.1, **certificates.rest()) as rest:
        await rest.call("POST", "/v1/rollouts", msgspec.to_builtins(make_spec("j")))
        async with await rest.open_stream() as stream:
            with caplog.at_level(logging.INFO), trio.fail_after(10):
                await rest.send(stream, "GET", "/v1/rollouts/j?arrays=list")
                while "a client did not read for 0.1 s" not in caplog.text:
                    await trio.sleep(0.02)
                while await stream.receive_some():
                    pass
        assert (await rest.call("GET", "/healthz")).status == 200


async def test_rest_beyond_loopback_without_tls_is_said_loudly(certificates, caplog):
    with caplog.at_level(logging.WARNING):
        async with open_rest(FakeNode()):
            pass
        async with open_rest(FakeNode(), host="0.0.0.0", **certificates.rest()):
            assert "WITHOUT TLS" not in caplog.text
        async with open_rest(FakeNode(), host="0.0.0.0"):
            assert "listening on 0.0.0.0 WITHOUT TLS" in caplog.text
