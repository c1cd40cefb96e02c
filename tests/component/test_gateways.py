"""A trainer behind a proxy that answers in its node's place while that is away, for a moment or for good."""

from __future__ import annotations

import base64
import hashlib
import re
import runpy
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio

from prorl_trio.client import connect, transport
from prorl_trio.client.errors import ConnectionLost
from prorl_trio.rendezvous.folder import write_entry
from prorl_trio.types.errors import ProtocolError
from support.fake_fleet import finish_all, open_fake_fleet, take
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_rest import open_rest
from support.fake_service import TOKEN, open_service
from support.fleet_head import head_quickly, open_client

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
HTML = "<html><body><h1>502 Bad Gateway</h1></body></html>"
STATUSES = [200, 301, 400, 401, 403, 404, 407, 408, 410, 421, 429, 500, 501, 502, 503, 504, 520, 599]
ANSWERS = {
    **{str(status): f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" for status in STATUSES},
    "a page": f"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: {len(HTML)}\r\n\r\n{HTML}",
    "a page without a length": f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/html\r\n\r\n{HTML}",
    "HTTP/1.0": f"HTTP/1.0 504 Gateway Timeout\r\n\r\n{HTML}",
    "half an answer": "HTTP/1.1 502 Bad Ga",
    "nothing": "",
    "TLS": "\x15\x03\x01\x00\x02\x02\x46",
    "noise": "\x00\xff" * 500,
    "a page and no head": HTML,
    "an upgrade that is none": "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
}


class Gateway:
    """A proxy before a service. With `answer` set it gives that in the service's place, and counts."""

    def __init__(self, service):
        self.service = service
        self.answer = None
        self.reset = False
        self.answered = 0
        self.url = ""
        self._scopes = set()

    async def serve(self, stream):
        async with stream:
            if self.answer is not None:
                request = await stream.receive_some(65_536)
                self.answered += 1
                if not self.reset:
                    answer = self.answer(request) if callable(self.answer) else self.answer.encode("latin-1")
                    await stream.send_all(answer)
                return
            async with await trio.open_tcp_stream(self.service.host, self.service.port) as behind:
                with trio.CancelScope() as scope:
                    self._scopes.add(scope)
                    async with trio.open_nursery() as pumps:
                        pumps.start_soon(self._pump, stream, behind, scope)
                        pumps.start_soon(self._pump, behind, stream, scope)
                self._scopes.discard(scope)

    async def _pump(self, source, sink, scope):
        try:
            while chunk := await source.receive_some(65_536):
                await sink.send_all(chunk)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()

    def cut(self, answer):
        """End all connections, and give this answer to new ones."""
        self.answer = answer
        for scope in self._scopes:
            scope.cancel()

    async def wait_answered(self, count):
        while self.answered < count:
            await trio.sleep(0.005)


class FakeModule:
    """A module of which some names mean something else."""

    def __init__(self, module, **names):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)


@asynccontextmanager
async def gateway_to(service, nursery):
    gateway = Gateway(service)

    async def serve(*, task_status):  # noqa: ASYNC128 - serve_tcp calls it
        await trio.serve_tcp(gateway.serve, 0, host="127.0.0.1", task_status=task_status)

    (listener,) = await nursery.start(serve)
    gateway.url = f"ws://127.0.0.1:{listener.socket.getsockname()[1]}"
    yield gateway
    nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_DELAY_S", 0.005)
    monkeypatch.setattr(transport, "MAX_DELAY_S", 0.02)


def upgraded(frames):
    """An answer of another WebSocket server: it accepts whoever comes, and sends these bytes."""

    def answer(request):
        key = re.search(rb"(?i)sec-websocket-key: *(\S+)", request)[1]
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        head = b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + accept
        return head + b"\r\n\r\n" + frames

    return answer


OTHER_SERVERS = {
    "it says nothing": b"",
    "text": b"\x81\x05hello",
    "bytes that are no message": b"\x82\x05abcde",
    "a message of another protocol": b"\x82\x01\xc0",
    "a masked frame": b"\x82\x81\x00\x00\x00\x00\xc0",
    "a frame without end": b"\x82\x7f" + b"\x3f" + b"\xff" * 7,
    "an opcode that there is not": b"\x83\x00",
    "a ping in pieces": b"\x09\x01x",
    "a continuation of nothing": b"\x80\x01x",
    "compressed": b"\xc2\x01x",
    "a close": b"\x88\x02\x03\xe8",
    "a close of a wrong code": b"\x88\x02\x00\x01",
    "a close of one byte": b"\x88\x01x",
}


@pytest.mark.parametrize(
    "answer", [*ANSWERS.values(), *map(upgraded, OTHER_SERVERS.values())], ids=[*ANSWERS, *OTHER_SERVERS]
)
async def test_once_a_session_was_open_whatever_answers_is_tried_again(nursery, answer):
    node = FakeNode()
    async with (
        open_service(node) as service,
        gateway_to(service, nursery) as gateway,
        connect(gateway.url, TOKEN, session_id="t") as client,
    ):
        await client.submit([make_spec("a")])
        gateway.cut(answer)
        await gateway.wait_answered(3)
        gateway.answer = None
        node.finish("a", make_outcome(make_spec("a")))
        with trio.fail_after(20):
            assert (await anext(client.results())).job_id == "a"


async def test_a_client_that_was_suspended_while_it_waited_tries_again(nursery, monkeypatch):
    node = FakeNode()
    gap_s = 0.0
    current_time, sleep = trio.current_time, trio.sleep

    async def suspended(seconds):
        nonlocal gap_s
        await sleep(seconds)
        if gap_s:  # the attempt after the suspension has failed, too
            gateway.answer = None
        gap_s = 1_000.0

    async with open_service(node) as service, gateway_to(service, nursery) as gateway:
        gateway.answer = ANSWERS["503"]
        monkeypatch.setattr(
            transport, "trio", FakeModule(trio, sleep=suspended, current_time=lambda: current_time() + gap_s)
        )
        async with connect(gateway.url, TOKEN, session_id="t", connect_timeout_s=20) as client:
            assert await client.submit([make_spec("a")])
    assert gateway.answered == 2


@pytest.mark.parametrize("status", [200, 404, 503])
async def test_what_answered_last_is_said_when_the_time_is_up(nursery, status):
    async with open_service(FakeNode()) as service, gateway_to(service, nursery) as gateway:
        said = rf"within 0\.3 s \(reconnect_timeout_s.*HTTP status {status};"
        with pytest.raises(ConnectionLost, match=said):  # noqa: PT012 - both lines belong to it
            async with connect(gateway.url, TOKEN, reconnect_timeout_s=0.3) as client:
                gateway.cut(ANSWERS[str(status)])
                await client.submit([make_spec("a")])


@pytest.mark.parametrize("status", [200, 301, 403, 404, 500, 429, 502, 503, 504])
async def test_before_the_first_session_only_a_gateways_words_are_tried_again(nursery, status):
    passing = status in (429, 502, 503, 504)
    async with open_service(FakeNode()) as service, gateway_to(service, nursery) as gateway:
        gateway.answer = ANSWERS[str(status)]
        error, words = (ConnectionLost, "within 0.3 s") if passing else (ProtocolError, "not a node")
        with pytest.raises(error, match=rf"{words}.*HTTP status {status}"):
            async with connect(gateway.url, TOKEN, connect_timeout_s=0.3):
                pass
        assert (gateway.answered > 1) is passing


async def test_a_node_of_a_fleet_is_not_left_out_for_what_a_gateway_says(tmp_path, nursery, monkeypatch):
    head_quickly(monkeypatch)
    async with open_fake_fleet(tmp_path / "f", "a", "b") as fleet, gateway_to(fleet["b"].service, nursery) as gateway:
        gateway.answer = ANSWERS["404"]
        fleet["b"].entry = msgspec.structs.replace(fleet["b"].entry, url=gateway.url)
        write_entry(fleet.folder, fleet["b"].entry)
        async with open_client(tmp_path / "f") as (client, head):
            assert "HTTP status 404" in head.fleet.members.refused["b"]
            gateway.answer = None
            await head.wait_members("a", "b")
            assert not head.fleet.members.refused
            await client.submit([make_spec(f"job-{n}") for n in range(12)])
            await fleet.wait_live(a=6, b=6)
            gateway.cut(ANSWERS["502"])
            await gateway.wait_answered(gateway.answered + 5)
            gateway.answer = None
            finish_all(fleet)
            outcomes = await take(client)
            assert len(outcomes) == 12
            assert {outcome.attempt for outcome in outcomes} == {1}, "none was moved"


@pytest.mark.parametrize("name", ["404", "503", "a page", "half an answer", "nothing", "noise"])
async def test_the_example_for_rest_outlives_a_gateways_answers(node, nursery, monkeypatch, name):
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)
    async with open_rest(node) as rest, gateway_to(rest, nursery) as gateway:
        monkeypatch.setenv("PRORL_REST", gateway.url.replace("ws:", "http:"))
        example = runpy.run_path(str(ROOT / "examples" / "rest.py"), run_name="example")
        values = example["call"].__globals__
        values["time"] = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01))
        values["PATIENCE_S"] = 20.0
        answers = []

        async def ask():
            answers.append(await trio.to_thread.run_sync(values["call"], "GET", "/v1/rollouts"))

        gateway.answer = ANSWERS[name]
        async with trio.open_nursery() as asking:
            asking.start_soon(ask)
            await gateway.wait_answered(3)
            gateway.answer = None
        assert answers == [{"total": 0, "jobs": []}]
        values["PATIENCE_S"] = 0.0
        gateway.answer = ANSWERS[name]
        with pytest.raises(SystemExit, match=r"no answer of a node for 0 s; the last attempt: .+"):
            await ask()
