"""The REST edge but for rollouts: backends, events, and slow, hostile and too many clients. Over a fake node."""

from __future__ import annotations

import logging
from contextlib import suppress

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.types.errors import AdmissionRejected
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_rest import EventReader, open_rest
from support.sessions import sessions_in, submit

pytestmark = pytest.mark.timeout(30)


def body(job_id, **fields):
    return msgspec.to_builtins(msgspec.structs.replace(make_spec(job_id), **fields))


def error(answer):
    return answer.status, answer.json()["error"]["code"], answer.json()["error"]["path"]


# ---------------------------------------------------------------- backends


async def test_backends_are_added_listed_and_removed(node):
    node.unfit_backends.add("http://unfit")
    async with open_rest(node) as rest:
        assert (await rest.call("GET", "/readyz")).status == 503
        assert (await rest.call("POST", "/v1/backends", {"url": "http://a"})).json()["urls"] == ["http://a"]
        assert (await rest.call("GET", "/readyz")).status == 200
        await rest.call("POST", "/v1/backends", {"url": "http://b"})
        assert error(await rest.call("POST", "/v1/backends", {"url": "http://unfit"}))[:2] == (422, "backend_unfit")
        assert error(await rest.call("POST", "/v1/backends", {"uri": "x"}))[:2] == (422, "malformed")
        assert (await rest.call("DELETE", "/v1/backends?url=http://a")).json()["urls"] == ["http://b"]
        assert error(await rest.call("DELETE", "/v1/backends?url=http://a"))[:2] == (404, "unknown_backend")
        assert error(await rest.call("DELETE", "/v1/backends"))[:2] == (422, "malformed")
        await rest.call("POST", "/v1/backends", {"url": "http://b", "weight": 2})
        assert node.listed("http://b").weight == 2
        assert (await rest.call("POST", "/v1/backends/weight", {"url": "http://b", "weight": 0.5})).status == 200
        assert (await rest.call("POST", "/v1/backends/drain", {"url": "http://b"})).json()["urls"] == ["http://b"]
        assert (node.listed("http://b").weight, node.listed("http://b").state) == (0.5, "draining")
        for change in ({"url": "http://b", "weight": 0}, {"url": "http://b", "weight": "2"}, {"weight": 2}):
            assert error(await rest.call("POST", "/v1/backends/weight", change))[:2] == (422, "malformed")
        for path in ("drain", "weight"):
            unknown = await rest.call("POST", f"/v1/backends/{path}", {"url": "http://a", "weight": 1})
            assert error(unknown)[:2] == ((404, "unknown_backend") if path == "weight" else (422, "malformed"))
        assert (await rest.call("DELETE", "/v1/backends?all=true")).json()["urls"] == []


async def test_pause_and_resume(node):
    await node.backends.add("http://a")
    engine = node.engines["http://a"]
    async with open_rest(node) as rest:
        answer = await rest.call("POST", "/v1/backends/pause", {"mode": "abort", "timeout_s": 5})
        assert (answer.status, answer.json()["paused"], engine.told) == (200, True, ["abort"])
        answer = await rest.call("POST", "/v1/backends/weights", {"folder": "/w/2"})
        assert [each["engine"] for each in answer.json()["backends"]] == ["loaded"]
        answer = await rest.call("POST", "/v1/backends/resume", {"policy_version": "v2"})
        assert (answer.json()["paused"], answer.json()["backends"][0]["policy_version"]) == (False, "v2")
        assert engine.weights == "/w/2"
        answer = await rest.call("POST", "/v1/backends/weights", {"folder": "/w/3"})
        assert error(answer)[:2] == (409, "update_refused")
        engine.silent.add("pause")
        answer = await rest.call("POST", "/v1/backends/pause", {"timeout_s": 0.05})
        assert error(answer)[:2] == (504, "pause_timeout")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rest.call, "POST", "/v1/backends/pause")
            while not node.backends.statistics()["admission"]["paused"]:
                await trio.sleep(0.01)
            assert error(await rest.call("POST", "/v1/backends/pause"))[:2] == (409, "backends_busy")
            nursery.cancel_scope.cancel()
        assert error(await rest.call("POST", "/v1/backends/pause", {"mode": "x"})) == (422, "malformed", "$.mode")


# ---------------------------------------------------------------- events


async def test_events_tell_of_transitions_of_the_jobs_asked_for(node):
    async with open_rest(node, event_heartbeat_interval_s=0.2) as rest:
        stream = await trio.open_tcp_stream(rest.host, rest.port)
        async with stream:
            events = EventReader(stream, await rest.send(stream, "GET", "/v1/events?group=g"))
            assert await events.next() == ("comment", "connected")
            await rest.call("POST", "/v1/rollouts", body("other"))
            await rest.call("POST", "/v1/rollouts", body("j", group_id="g"))
            node.advance("j", "run", "why")
            node.finish("j")
            got = [await events.next() for _ in range(4)]
            assert [(kind, facts["status"]) for kind, facts in got] == [
                ("job_moved", "queued"),
                ("job_moved", "run"),
                ("job_moved", "completed"),
                ("job_ended", "completed"),
            ]
            assert got[1][1]["detail"] == "why"
            assert {(facts["job_id"], facts["session"], facts["group_id"]) for _, facts in got} == {("j", "rest", "g")}
            assert await events.next() == ("comment", "heartbeat")
            rest.scope.cancel()
            while (await events.next())[0] != "end":
                pass


async def test_slow_listener_is_told_what_it_missed(node):
    async with open_rest(node, event_buffer_events=2) as rest:
        stream = await trio.open_tcp_stream(rest.host, rest.port)
        async with stream:
            events = EventReader(stream, await rest.send(stream, "GET", "/v1/events"))
            await events.next()
            session = rest.sessions.open("rest", 0)[0]
            await submit(
                session, node, *(make_spec(str(index)) for index in range(5))
            )  # they are the node's in one step
            got = [await events.next() for _ in range(3)]
            assert [kind for kind, _ in got] == ["job_moved", "job_moved", "dropped"]
            assert got[2][1] == {"count": 3}


async def test_who_asks_for_it_gets_warnings_of_the_log_of_any_thread_and_recent_ones(node):
    logger = logging.getLogger("prorl_trio.tests")
    async with open_rest(node, event_heartbeat_interval_s=60) as rest:
        logger.warning("before %s", "\ud800")
        async with (
            await trio.open_tcp_stream(rest.host, rest.port) as stream,
            await trio.open_tcp_stream(rest.host, rest.port) as quiet,
        ):
            await trio.testing.wait_all_tasks_blocked()
            events = EventReader(stream, await rest.send(stream, "GET", "/v1/events?logs=true"))
            others = EventReader(quiet, await rest.send(quiet, "GET", "/v1/events"))
            assert [await events.next(), await others.next()] == [("comment", "connected")] * 2
            logger.info("not this")
            await trio.to_thread.run_sync(logger.error, "from a thread: %s", "x" * 5000)
            got = [await events.next() for _ in range(2)]
            await rest.call("POST", "/v1/rollouts", body("j"))
            assert [(await reader.next())[0] for reader in (events, others)] == ["job_moved"] * 2
    assert [(kind, facts["level"], facts["logger"]) for kind, facts in got] == [
        ("log", "WARNING", "prorl_trio.tests"),
        ("log", "ERROR", "prorl_trio.tests"),
    ]
    assert got[0][1]["message"].startswith("before ")
    assert len(got[1][1]["message"]) == 1000


async def test_event_streams_are_limited_and_given_back(node):
    async with open_rest(node, max_event_streams=1) as rest:
        stream = await trio.open_tcp_stream(rest.host, rest.port)
        events = EventReader(stream, await rest.send(stream, "GET", "/v1/events"))
        await events.next()
        answer = await rest.call("GET", "/v1/events")
        assert (error(answer)[:2], answer.headers["retry-after"]) == ((429, "admission"), "5")
        await stream.aclose()
        while True:
            async with await trio.open_tcp_stream(rest.host, rest.port) as again:
                if await EventReader(again, await rest.send(again, "GET", "/v1/events?session=x")).next() == (
                    "comment",
                    "connected",
                ):
                    break


# ---------------------------------------------------------------- the rest


async def test_token_is_asked_for_everywhere_but_health_and_description(node):
    async with open_rest(node) as rest:
        description = (await rest.call("GET", "/openapi.json")).json()
        free = set()
        for path, methods in description["paths"].items():
            for method in methods:
                for header in ("Bearer wrong", "Basic YTpi", ""):
                    target = path.replace("{job_id}", "x")
                    answer = await rest.call(method.upper(), target, headers={"Authorization": header})
                    if answer.status != 401:
                        free.add(path)
                    else:
                        assert answer.headers["www-authenticate"] == "Bearer"
                        assert answer.json()["error"]["code"] == "token"
        assert free == {"/healthz", "/readyz", "/docs", "/openapi.json", "/ui"}
        assert (await rest.call("GET", "/v1/status", headers={"Authorization": "bearer a token"})).status == 200


async def test_unknown_paths_and_methods_have_errors_of_the_same_shape(node):
    async with open_rest(node) as rest:
        assert error(await rest.call("GET", "/v1/nothing"))[:2] == (404, "not_found")
        answer = await rest.call("PUT", "/v1/rollouts")
        assert error(answer)[:2] == (405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST", "DELETE"}
        assert error(await rest.call("GET", "/metrics"))[:2] == (404, "not_found")


async def test_body_that_is_too_long_is_413_and_one_that_is_too_slow_408(node):
    async with open_rest(node, max_body_bytes=1000, body_timeout_s=0.1) as rest:
        for size in (1001, 500_000):
            assert error(await rest.call("POST", "/v1/rollouts", b"x" * size))[:2] == (413, "too_large")
        async with await trio.open_tcp_stream(rest.host, rest.port) as stream:
            token = b"Authorization: Bearer a token\r\n"
            await stream.send_all(b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\n" + token + b"Content-Length: 9\r\n\r\n{")
            answer = b""
            while received := await stream.receive_some(10_000):
                answer += received
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"too_slow" in answer


@pytest.mark.parametrize(
    "coding", [b"Content-Length: 3000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2DC6C0\r\n"]
)
async def test_a_body_that_no_endpoint_takes_is_not_kept(node, coding):
    """Without a token, connections could fill the memory with bodies of requests that need none."""
    async with open_rest(node) as rest, await rest.open_stream() as stream:
        answer = b""

        async def send():
            with suppress(trio.BrokenResourceError):
                await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + coding + b"x" * 2_000_000)

        async with trio.open_nursery() as sending:
            sending.start_soon(send)
            with trio.fail_after(10), suppress(trio.BrokenResourceError):
                while received := await stream.receive_some(10_000):
                    answer += received
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"take no body" in answer
        assert (await rest.call("GET", "/healthz", b"{}")).status == 200
        assert error(await rest.call("POST", "/healthz", b"x" * 100_000))[:2] == (405, "method_not_allowed")


async def test_slow_header_and_idle_connection_are_closed(node):
    async with open_rest(node, handshake_timeout_s=0.1) as rest:
        for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n"):
            async with await trio.open_tcp_stream(rest.host, rest.port) as stream:
                await stream.send_all(sent)
                assert await stream.receive_some(1000) == b""


async def test_header_that_is_too_long_is_refused(node):
    async with open_rest(node) as rest, await trio.open_tcp_stream(rest.host, rest.port) as stream:
        await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000)
        assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 431")


async def test_connections_are_limited(node):
    async with open_rest(node, max_connections=2) as rest:
        held = [await trio.open_tcp_stream(rest.host, rest.port) for _ in range(2)]
        for stream in held:
            await rest.send(stream, "GET", "/v1/backends")
            assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 200")
        refused = await rest.call("GET", "/v1/backends")
        assert (refused.status, refused.json()["error"]["code"]) == (429, "admission")
        assert (await rest.call("GET", "/healthz")).status == 200, "which needs no token"
        for stream in held:
            await stream.aclose()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert (await rest.call("GET", "/v1/backends")).status == 200


async def test_client_that_does_not_read_is_let_go(node):
    async with open_rest(node, send_timeout_s=0.2) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        node.finish("j", make_outcome(make_spec("j"), tokens=2_000_000))
        stream = await trio.open_tcp_stream(rest.host, rest.port)
        await rest.send(stream, "GET", "/v1/rollouts/j")
        got = len(await stream.receive_some(1))
        await trio.sleep(0.6)
        with suppress(trio.BrokenResourceError):  # closed with a reset, or without: as good
            while data := await stream.receive_some(1 << 20):
                got += len(data)
        assert got < 18_000_000
        await stream.aclose()
        assert (await rest.call("GET", "/healthz")).status == 200


async def test_client_that_does_not_read_does_not_hold_the_shutdown_up(node):
    async with open_rest(node, close_timeout_s=0.2) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        node.finish("j", make_outcome(make_spec("j"), tokens=2_000_000))
        stream = await trio.open_tcp_stream(rest.host, rest.port)
        await rest.send(stream, "GET", "/v1/rollouts/j")
        await stream.receive_some(1)
        rest.scope.cancel()
        begun_s = trio.current_time()
    assert trio.current_time() - begun_s < 10
    await stream.aclose()


async def test_shutdown_answers_those_who_wait(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        answers = []

        async def wait(target):
            answers.append(await rest.call("GET", target))

        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, "/v1/rollouts/j?wait=20")
                nursery.start_soon(wait, "/v1/results?wait=20")
                await trio.sleep(0.05)
                rest.scope.cancel()
        assert sorted(answer.status for answer in answers) == [200, 202]


async def test_websocket_at_a_path_of_rest_is_refused(node):
    async with open_rest(node) as rest, await trio.open_tcp_stream(rest.host, rest.port) as stream:
        await stream.send_all(
            b"GET /v1/status HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert b" 403" in (await stream.receive_some(1000)).split(b"\r\n")[0]


async def test_session_limit_is_429(nursery):
    node, table = FakeNode(), sessions_in(nursery, SessionLimits(max_sessions=1))
    async with open_rest(node, sessions=table) as rest:
        await rest.call("POST", "/v1/rollouts?session=a", body("a"))
        table.get("a")._listener = object()  # a trainer is connected to it
        answer = await rest.call("POST", "/v1/rollouts?session=b", body("b"))
        assert error(answer)[:2] == (429, "admission")
        table.get("a")._listener = None
        assert (await rest.call("POST", "/v1/rollouts?session=b", body("b"))).status == 202
        assert error(await rest.call("GET", "/v1/results?session=" + "x" * 201))[:2] == (422, "protocol")


async def test_node_that_is_full_is_429(node):
    node.check = _full
    async with open_rest(node) as rest:
        answer = await rest.call("POST", "/v1/rollouts", body("a"))
        assert (error(answer)[:2], answer.headers["retry-after"]) == ((429, "admission"), "3")


def _full(spec, sink, ahead):
    raise AdmissionRejected("full", 2.5)
