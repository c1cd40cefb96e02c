"""Malformed handshakes, WebSocket frames, messages and REST requests by the thousand: each is refused, none ends the
node, another session, or leaves anything behind.
"""

from __future__ import annotations

import os
import random
from typing import Any

import h11
import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_ipc.session import (
    Ack,
    AttachArena,
    CallBackends,
    Cancel,
    HeartbeatPing,
    HeartbeatPong,
    MatchingJobs,
    SessionHello,
    StatusRequest,
    Submit,
    TheseJobs,
    WithdrawCall,
)
from prorl_trio.client import connect
from prorl_trio.edges.requests import ErrorDetail
from prorl_trio.edges.rest.app import ENDPOINTS
from prorl_trio.sessions.limits import SessionLimits
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_rest import open_rest
from support.fake_service import TOKEN, open_service
from support.sessions import sessions_in

pytestmark = pytest.mark.timeout(1200)

AT_ONCE = 20
ANSWER_TIMEOUT_S = 20
HOW_MANY = [1_000, pytest.param(10_000, marks=pytest.mark.soak)]
ODD = [
    None,
    True,
    -1,
    2**31,
    2**63,
    2**64 - 1,
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "\0",
    "../../etc/passwd",
    "é" * 300,
    "x" * 5_000,
    "😀\u202e",
    b"\xff\xfe",
    [],
    {},
    [[[[]]]],
    {"": None},
    {1: 2},
]
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
encode = msgspec.msgpack.encode


def frame(payload: bytes, first_byte: int = 0x82) -> bytes:
    """One masked WebSocket frame; the mask is zero."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 2**16:
        length = b"\xfe" + size.to_bytes(2)
    else:
        length = b"\xff" + size.to_bytes(8)
    return bytes([first_byte]) + length + bytes(4) + payload


def hello(session_id: str) -> bytes:
    return encode(SessionHello(version=1, token=TOKEN, session_id=session_id))


def messages(n: int) -> list[Any]:
    """One valid message of each kind."""
    return [
        SessionHello(version=1, token=TOKEN, session_id=f"s{n}"),
        Submit(request_id=n, jobs=[msgspec.Raw(encode(make_spec(f"j{n}-{i}", a=[1, {"b": 2}]))) for i in range(2)]),
        Cancel(n, [TheseJobs([f"j{n}-0", "x"], ahead=True), MatchingJobs(tags={"a": "b"})]),
        Ack(cursor=0),
        StatusRequest(request_id=n),
        CallBackends(request_id=n, operation="add", arguments=msgspec.Raw(encode({"url": "http://127.0.0.1:9"}))),
        CallBackends(request_id=n, operation="pause", arguments=msgspec.Raw(encode({"mode": "keep"}))),
        CallBackends(request_id=n, operation="resume", arguments=msgspec.Raw(encode({"policy_version": "1"}))),
        WithdrawCall(request_id=n),
        AttachArena(reader_id="r"),
        HeartbeatPing(nonce=n),
        HeartbeatPong(nonce=n),
    ]


def mutate_value(value: Any, rng: random.Random) -> Any:
    """A copy with one place replaced by something odd, removed, or joined by something unknown."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.3:
            return {**value, "surprise": rng.choice(ODD)}
        return {**value, key: mutate_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], mutate_value(value[index], rng), *value[index + 1 :]]
    return rng.choice(ODD)


def mutate_bytes(payload: bytes, rng: random.Random) -> bytes:
    changed = bytearray(payload)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[place : place + 1] = rng.randbytes(1)
            case 1:
                del changed[place:]
            case 2:
                del changed[place : place + rng.randrange(1, 9)]
            case 3:
                changed[place:place] = rng.randbytes(rng.randrange(1, 9))
            case _:
                changed[place:place] = rng.choice(
                    [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
                )
        changed = changed or bytearray(b"\xc1")
    return bytes(changed)


def wire(n: int, rng: random.Random) -> bytes:
    """Everything one hostile trainer sends."""
    start = HANDSHAKE + frame(hello(f"s{n % 50}"))
    message = rng.choice(messages(n))
    match rng.randrange(8):
        case 0:
            return mutate_bytes(HANDSHAKE, rng) + frame(hello("h"))
        case 1:  # framing
            return start + mutate_bytes(frame(encode(message)), rng)
        case 2:
            return start + frame(encode(message), first_byte=rng.randrange(256))
        case 3:  # the first message
            return HANDSHAKE + frame(encode(mutate_value(msgspec.msgpack.decode(hello(f"s{n}")), rng)))
        case 4:
            return HANDSHAKE + frame(mutate_bytes(hello(f"s{n % 50}"), rng))
        case 5:
            return start + frame(mutate_bytes(encode(message), rng))
        case 6:
            return start + frame(rng.choice([b"\x91", b"\x81\xa1a"]) * rng.randrange(1, 20_000) + b"\xc0")
        case _:
            return start + frame(encode(mutate_value(msgspec.msgpack.decode(encode(message)), rng)))


async def send_to_the_end(service, payload: bytes) -> None:
    """Send, hang up one way, and read until the node hangs up too."""
    with trio.fail_after(ANSWER_TIMEOUT_S):
        async with await trio.open_tcp_stream(service.host, service.port) as stream:
            try:
                await stream.send_all(payload)
                await stream.send_eof()
                while await stream.receive_some():
                    pass
            except trio.BrokenResourceError:
                await trio.lowlevel.checkpoint()


async def bombard(service, payloads) -> None:
    payloads = iter(payloads)

    async def work():
        for payload in payloads:
            await send_to_the_end(service, payload)

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(work)


@pytest.mark.parametrize("number", HOW_MANY)
async def test_malformed_frames_end_neither_the_node_nor_another_session(number, nursery):
    rng = random.Random(4)
    before = set(os.listdir("/proc/self/fd"))
    node = FakeNode(make_outcome)
    table = sessions_in(nursery, SessionLimits(max_sessions=number + 100))
    with trio.fail_after(number / 10):
        async with (
            open_service(node, sessions=table, max_sessions=number + 100) as service,
            connect(service.url, TOKEN) as bystander,
        ):
            link = bystander._state.link
            await bombard(service, (wire(n, rng) for n in range(number)))
            await bystander.submit([make_spec(f"good-{i}") for i in range(10)])
            got = [outcome.job_id async for outcome in bystander.results(10)]
            assert got == [f"good-{i}" for i in range(10)]
            assert bystander._state.link is link
    assert set(os.listdir("/proc/self/fd")) <= before


MSGPACK_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
TYPES = ["SessionHello", "Submit", "Cancel", "Ack", "StatusRequest", "CallBackends", "AttachArena", "HeartbeatPong"]
FIELDS = [
    "request_id",
    "operation",
    "arguments",
    "jobs",
    "job_ids",
    "cursor",
    "url",
    "reader_id",
    "nonce",
    "session_id",
    "version",
    "tags",
]
MESSAGES = st.one_of(
    st.binary(max_size=60),
    MSGPACK_VALUES.map(encode),
    st.builds(
        lambda kind, fields: encode({"type": kind, **fields}),
        st.sampled_from(TYPES),
        st.dictionaries(st.sampled_from(FIELDS), MSGPACK_VALUES, max_size=4),
    ),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(MESSAGES, min_size=1, max_size=20))
def test_any_message_whatsoever(payloads):
    async def run():
        with trio.fail_after(30):
            async with (
                open_service(FakeNode(make_outcome)) as service,
                connect(service.url, TOKEN) as bystander,
            ):
                await bombard(service, [HANDSHAKE + frame(hello("s")) + frame(payload) for payload in payloads])
                await bombard(service, [HANDSHAKE + frame(payload) for payload in payloads[:3]])
                await bystander.status()

    trio.run(run)


# ---------------------------------------------------------------- REST

BODIES = {
    "/v1/rollouts": lambda n: msgspec.to_builtins(make_spec(f"j{n}")),
    "/v1/backends": lambda n: {"url": f"http://127.0.0.1:{n % 60_000 + 1}"},
    "/v1/backends/pause": lambda _: {"mode": "keep", "timeout_s": 1.0},
    "/v1/backends/weights": lambda n: {"folder": f"/w/{n}"},
    "/v1/backends/resume": lambda _: {"policy_version": "v1"},
}
QUERIES = ["wait", "cursor", "session", "limit", "arrays", "ack", "url", "group", "tag", "reason", "status", "surprise"]
STREAMS = {"/v1/events"}


def jsonable(value: Any) -> Any:
    return msgspec.json.encode(value, enc_hook=str)


def rest_request(n: int, rng: random.Random) -> tuple[str, str, bytes]:
    endpoint = rng.choice([endpoint for endpoint in ENDPOINTS if endpoint.path not in STREAMS])
    make = BODIES.get(endpoint.path, lambda _: {})
    valid = make(n)
    match rng.randrange(5):
        case 0:
            body = jsonable(mutate_value(valid, rng))
        case 1:
            body = jsonable({"jobs": [valid, mutate_value(valid, rng)]})
        case 2:
            body = mutate_bytes(jsonable(valid), rng)
        case 3:
            body = rng.choice([b"[", b'{"a":', b"9" * 400, b'"\\ud800"', b"\xff"]) * rng.randrange(1, 3_000)
        case _:
            body = jsonable(valid)
    path = endpoint.path.replace("{job_id}", rng.choice([f"j{n}", "%00", "%ff", "a%2fb", "..", "%F0%9F", "x" * 3_000]))
    values = ["", "0", "-1", "0.1", "1e400", "nan", "abc", "%00", "%ff", "9" * 40, "true", "list", "0.0001"]
    query = "&".join(f"{rng.choice(QUERIES)}={rng.choice(values)}" for _ in range(rng.randrange(3)))
    method = endpoint.method if rng.random() < 0.9 else rng.choice(["PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
    return method, f"{path}?{query}" if query else path, body


def errors_of(reply: Any) -> list[ErrorDetail]:
    """Of a refused request: one, or one for each job of a batch."""
    details = [reply["error"]] if "error" in reply else [job["error"] for job in reply["jobs"]]
    return [msgspec.convert(detail, ErrorDetail) for detail in details]


@pytest.mark.parametrize("number", HOW_MANY)
async def test_malformed_rest_requests_are_the_callers_fault_and_say_why(number):
    rng = random.Random(5)
    before = set(os.listdir("/proc/self/fd"))
    requests = iter([rest_request(n, rng) for n in range(number)])
    wrong = []
    with trio.fail_after(number / 10):
        async with open_rest(FakeNode(make_outcome), max_wait_s=0.05) as rest:

            async def ask(method, target, body):
                try:
                    answer = await rest.call(method, target, body)
                except (h11.RemoteProtocolError, trio.BrokenResourceError) as exc:
                    wrong.append((method, target, body[:100], repr(exc)))
                    return
                if answer.status >= 500 and answer.status != 503:
                    wrong.append((method, target, body[:100], answer))
                elif answer.status >= 400 and method != "HEAD" and not target.startswith("/readyz"):
                    assert all(error.code and error.message for error in errors_of(answer.json()))

            async def work():
                for request in requests:
                    with trio.fail_after(ANSWER_TIMEOUT_S):
                        await ask(*request)

            async with trio.open_nursery() as nursery:
                for _ in range(AT_ONCE):
                    nursery.start_soon(work)
            assert (await rest.call("POST", "/v1/rollouts", msgspec.to_builtins(make_spec("good")))).status in (
                200,
                202,
            )
    assert not wrong, (len(wrong), wrong[:5])
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_bytes_that_are_no_http_at_all():
    rng = random.Random(6)
    with trio.fail_after(60):
        async with open_rest(FakeNode(make_outcome)) as rest:
            request = b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
            await bombard(rest, (mutate_bytes(request, rng) for _ in range(300)))
            assert (await rest.call("GET", "/healthz")).status == 200
