"""The REST edge over a fake node: every endpoint's success and errors, waits, slow and hostile clients."""

from __future__ import annotations

import base64
from contextlib import suppress
from functools import partial

import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from prorl_trio.errors import AdmissionRejected, BackendsBusy, PauseTimeout
from prorl_trio.models import Outcome
from prorl_trio.service.limits import SessionLimits
from prorl_trio.service.session_table import SessionTable
from prorl_trio.testing.fake_node import FakeNode, make_outcome, make_spec
from prorl_trio.testing.fake_rest import EventReader, open_rest

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def node():
    return FakeNode()


def body(job_id, **fields):
    return msgspec.to_builtins(msgspec.structs.replace(make_spec(job_id), **fields))


def error(answer):
    return answer.status, answer.json()["error"]["code"], answer.json()["error"]["path"]


# ---------------------------------------------------------------- submit


async def test_submit_wait_and_take_the_result(node):
    async with open_rest(node) as rest:
        answer = await rest.call("POST", "/v1/rollouts", body("j"))
        assert answer.status == 202
        (job,) = answer.json()["jobs"]
        assert (job["job_id"], job["accepted"], job["status"]) == ("j", True, "queued")
        outcome = node.finish("j")
        answer = await rest.call("GET", "/v1/rollouts/j")
        assert (answer.status, answer.json()["status"]) == (200, "completed")
        segment = answer.json()["outcome"]["trajectory"]["segments"][0]
        want = outcome.trajectory.segments[0]
        assert base64.b64decode(segment["token_ids"]) == want.token_ids_le
        assert np.frombuffer(base64.b64decode(segment["logprobs"]), "<f4").tolist() == want.logprobs.tolist()


async def test_outcomes_as_lists_and_as_msgpack(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        outcome = node.finish("j")
        want = outcome.trajectory.segments[0]
        answer = await rest.call("GET", "/v1/rollouts/j?arrays=list")
        segment = answer.json()["outcome"]["trajectory"]["segments"][0]
        assert segment["token_ids"] == want.token_ids.tolist()
        assert segment["logprobs"] == want.logprobs.tolist()
        assert segment["loss_mask"] == want.loss_mask.tolist()
        answer = await rest.call("GET", "/v1/rollouts/j", headers={"Accept": "application/msgpack"})
        assert answer.headers["content-type"] == "application/msgpack"
        packed = msgspec.msgpack.decode(answer.body)["outcome"]
        assert msgspec.convert(packed, Outcome) == outcome


async def test_wait_on_submission_answers_with_the_outcome_or_the_status(node):
    async with open_rest(node) as rest, trio.open_nursery() as nursery:
        answers = []

        async def submit(wait):
            answers.append(await rest.call("POST", f"/v1/rollouts?wait={wait}", body("j")))

        await submit(0.01)
        assert (answers[0].status, answers[0].json()["jobs"][0]["outcome"]) == (202, None)
        nursery.start_soon(submit, 20)
        nursery.start_soon(submit, 20)
        await node.wait_live(1)
        node.finish("j")
        nursery.cancel_scope.deadline = trio.current_time() + 10
        while len(answers) < 3:
            await trio.sleep(0.01)
        assert [answer.status for answer in answers[1:]] == [200, 200]
        assert all(answer.json()["jobs"][0]["outcome"]["reward"] == 1.0 for answer in answers[1:])


async def test_batch_tells_of_each_job(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("taken"))
        jobs = [body("a"), {**body("b"), "max_turns": "x"}, body("taken", max_turns=3), make_spec("d", handler="no")]
        answer = await rest.call("POST", "/v1/rollouts", {"jobs": [msgspec.to_builtins(job) for job in jobs]})
        assert answer.status == 207
        told = answer.json()["jobs"]
        assert [job["accepted"] for job in told] == [True, False, False, False]
        codes = [(job["error"]["code"], job["error"]["path"]) for job in told[1:]]
        assert codes == [
            ("malformed", "$.jobs[1].max_turns"),
            ("duplicate_job", ""),
            ("unknown_handler", ""),
        ]
        assert [job["job_id"] for job in told] == ["a", "b", "taken", "d"]


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        (b"", "$"),
        (b"[1]", "$"),
        (b"\xff\xfe", "$"),
        (b'{"jobs": 3}', "$.jobs"),
        (b'{"jobs": []}', "$.jobs"),
        (b'{"job_id": "x", "instance": {"instance_id": "i", "handler": 3}}', "$.instance.handler"),
        (b"[" * 100_000, "$"),
    ],
)
async def test_what_is_no_job_is_422_with_the_field(node, sent, path):
    async with open_rest(node) as rest:
        assert error(await rest.call("POST", "/v1/rollouts", sent)) == (422, "malformed", path)
        assert node.submitted == []


async def test_number_that_the_wire_has_not_is_422(node):
    async with open_rest(node) as rest:
        sent = b'{"job_id":"x","instance":{"instance_id":"i","handler":"fake","payload":{"n":%d}}}' % 10**30
        assert error(await rest.call("POST", "/v1/rollouts", sent))[:2] == (422, "malformed")


async def test_same_id_with_another_spec_is_409_and_the_same_spec_joins(node):
    async with open_rest(node) as rest:
        for _ in range(2):
            assert (await rest.call("POST", "/v1/rollouts", body("j"))).status == 202
        assert error(await rest.call("POST", "/v1/rollouts", body("j", max_turns=2)))[:2] == (409, "duplicate_job")
        assert len(node.submitted) == 1


async def test_full_session_is_429_with_retry_after(node):
    async with open_rest(node, sessions=SessionTable(SessionLimits(max_undelivered=1))) as rest:
        await rest.call("POST", "/v1/rollouts", body("a"))
        answer = await rest.call("POST", "/v1/rollouts", body("b"))
        assert error(answer)[:2] == (429, "admission")
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["retry_after_s"] == 1.0


async def test_draining_node_is_503(node):
    node.draining = True
    async with open_rest(node) as rest:
        assert error(await rest.call("POST", "/v1/rollouts", body("a")))[:2] == (503, "draining")
        answer = await rest.call("GET", "/readyz")
        assert (answer.status, answer.json()) == (503, {"ready": False, "reason": "the node is draining"})


# ---------------------------------------------------------------- look, wait, cancel


async def test_many_waits_on_one_job_all_get_its_outcome(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        answers = []

        async def wait():
            answers.append(await rest.call("GET", "/v1/rollouts/j?wait=20"))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(wait)
            await trio.sleep(0.05)
            assert answers == []
            node.finish("j")
        assert [answer.status for answer in answers] == [200] * 20


async def test_wait_that_is_over_tells_how_the_job_stands(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        node.advance("j", "run")
        answer = await rest.call("GET", "/v1/rollouts/j?wait=0.01")
        assert (answer.status, answer.json()["status"], answer.json()["outcome"]) == (202, "run", None)


async def test_list_filters(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts?session=one", body("a", group_id="g", tags={"k": "v"}))
        await rest.call("POST", "/v1/rollouts", body("b", group_id="g"), headers={"X-Session-Id": "two"})
        node.advance("b", "run")

        async def ids(query):
            answer = await rest.call("GET", f"/v1/rollouts?{query}")
            return [job["job_id"] for job in answer.json()["jobs"]], answer.json()["total"]

        assert await ids("") == (["a", "b"], 2)
        assert await ids("group=g&limit=1") == (["a"], 2)
        assert await ids("session=two") == (["b"], 1)
        assert await ids("status=run") == (["b"], 1)
        assert await ids("tag=k:v") == (["a"], 1)
        assert await ids("tag=k:v&tag=x:y") == ([], 0)
        assert error(await rest.call("GET", "/v1/rollouts?tag=k")) == (422, "malformed", "query.tag")
        assert error(await rest.call("GET", "/v1/rollouts?limit=0")) == (422, "malformed", "query.limit")
        assert error(await rest.call("GET", "/v1/rollouts?nonsense=0"))[:2] == (422, "malformed")


async def test_delete_cancels_then_forgets_then_knows_nothing(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        answer = await rest.call("DELETE", "/v1/rollouts/j")
        assert (answer.status, answer.json()["status"], answer.json()["forgotten"]) == (200, "cancelled", False)
        assert node.live == {}
        assert (await rest.call("GET", "/v1/rollouts/j")).json()["outcome"]["status"] == "cancelled"
        assert (await rest.call("DELETE", "/v1/rollouts/j")).json()["forgotten"] is True
        for method in ("GET", "DELETE"):
            assert error(await rest.call(method, "/v1/rollouts/j"))[:2] == (404, "unknown_job")
        assert (await rest.call("POST", "/v1/rollouts", body("j", max_turns=5))).status == 202


async def test_job_id_with_anything_in_it(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("a/b c?ü"))
        assert (await rest.call("GET", "/v1/rollouts/a/b%20c%3F%C3%BC")).json()["job_id"] == "a/b c?ü"


async def test_delete_of_a_group_cancels_its_jobs_only(node):
    async with open_rest(node) as rest:
        for job_id in ("a", "b"):
            await rest.call("POST", "/v1/rollouts", body(job_id, group_id="g"))
        await rest.call("POST", "/v1/rollouts", body("c"))
        assert (await rest.call("DELETE", "/v1/rollouts?group=g")).json() == {"cancelled": ["a", "b"]}
        assert list(node.live) == ["c"]
        assert error(await rest.call("DELETE", "/v1/rollouts"))[:2] == (422, "malformed")
        assert list(node.live) == ["c"]


# ---------------------------------------------------------------- results


async def test_results_are_kept_until_their_cursor_comes_back(node):
    async with open_rest(node) as rest:
        for job_id in ("a", "b", "c"):
            await rest.call("POST", "/v1/rollouts", body(job_id))
            node.finish(job_id)

        async def take(query):
            answer = (await rest.call("GET", f"/v1/results?{query}")).json()
            return [entry["job_id"] for entry in answer["results"]], answer["cursor"], answer["more"]

        assert await take("limit=2") == (["a", "b"], 2, True)
        assert await take("limit=2") == (["a", "b"], 2, True)
        assert await take("cursor=2") == (["c"], 3, False)
        assert await take("cursor=0") == (["c"], 3, False)
        assert await take("cursor=3") == ([], 3, False)
        assert error(await rest.call("GET", "/v1/results?cursor=4"))[:2] == (422, "protocol")


async def test_results_pass_over_what_was_forgotten(node):
    async with open_rest(node) as rest:
        for job_id in ("a", "b", "c"):
            await rest.call("POST", "/v1/rollouts", body(job_id))
            node.finish(job_id)
        await rest.call("DELETE", "/v1/rollouts/b")
        answer = (await rest.call("GET", "/v1/results")).json()
        assert [(entry["job_id"], entry["cursor"]) for entry in answer["results"]] == [("a", 1), ("c", 3)]


async def test_long_poll_ends_with_the_first_outcome(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        answers = []

        async def poll():
            answers.append((await rest.call("GET", "/v1/results?wait=20")).json())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            await trio.sleep(0.05)
            node.finish("j")
        assert [entry["job_id"] for entry in answers[0]["results"]] == ["j"]
        assert (await rest.call("GET", "/v1/results?wait=0.01&cursor=1")).json()["results"] == []


async def test_disconnect_during_a_wait_loses_nothing(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        for target in ("/v1/results?wait=20", "/v1/rollouts/j?wait=20"):
            with trio.move_on_after(0.05):
                await rest.call("GET", target)
        with trio.move_on_after(0.05):
            await rest.call("POST", "/v1/rollouts?wait=20", body("k"))
        assert set(node.live) == {"j", "k"}
        node.finish("j")
        assert [e["job_id"] for e in (await rest.call("GET", "/v1/results")).json()["results"]] == ["j"]


async def test_outcomes_nobody_takes_expire_and_are_counted(node):
    async with open_rest(node, results_retention_s=0.05) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        node.finish("j")
        while (await rest.call("GET", "/v1/rollouts/j")).status != 404:
            await trio.sleep(0.02)
        assert rest.sessions.get("rest").statistics()["expired_total"] == 1


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
        assert node.backend_weights == {"http://b": 2}
        assert (await rest.call("POST", "/v1/backends/weight", {"url": "http://b", "weight": 0.5})).status == 200
        assert (await rest.call("POST", "/v1/backends/drain", {"url": "http://b"})).json()["urls"] == ["http://b"]
        assert (node.backend_weights, node.drained_backends) == ({"http://b": 0.5}, {"http://b"})
        for change in ({"url": "http://b", "weight": 0}, {"url": "http://b", "weight": "2"}, {"weight": 2}):
            assert error(await rest.call("POST", "/v1/backends/weight", change))[:2] == (422, "malformed")
        for path in ("drain", "weight"):
            unknown = await rest.call("POST", f"/v1/backends/{path}", {"url": "http://a", "weight": 1})
            assert error(unknown)[:2] == ((404, "unknown_backend") if path == "weight" else (422, "malformed"))
        assert (await rest.call("DELETE", "/v1/backends?all=true")).json()["urls"] == []


async def test_pause_and_resume(node):
    node.backends.append("http://a")
    async with open_rest(node) as rest:
        answer = await rest.call("POST", "/v1/backends/pause", {"mode": "abort", "timeout_s": 5})
        assert (answer.status, answer.json()["paused"], node.paused) == (200, True, "abort")
        answer = await rest.call("POST", "/v1/backends/resume", {"policy_version": "v2"})
        assert (answer.json()["paused"], answer.json()["backends"][0]["policy_version"]) == (False, "v2")
        node.pause_error = PauseTimeout("undone")
        assert error(await rest.call("POST", "/v1/backends/pause"))[:2] == (504, "pause_timeout")
        node.pause_error = BackendsBusy("busy")
        assert error(await rest.call("POST", "/v1/backends/pause"))[:2] == (409, "backends_busy")
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
            for index in range(5):  # in one step of the loop: the stream cannot keep up
                session.submit(make_spec(str(index)), node)
            got = [await events.next() for _ in range(3)]
            assert [kind for kind, _ in got] == ["job_moved", "job_moved", "dropped"]
            assert got[2][1] == {"count": 3}


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
        assert free == {"/healthz", "/readyz", "/docs", "/openapi.json"}
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


async def test_slow_header_and_idle_connection_are_closed(node):
    async with open_rest(node, idle_timeout_s=0.1) as rest:
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
            await stream.send_all(b"GET /heal")
        await trio.testing.wait_all_tasks_blocked(0.05)
        async with await trio.open_tcp_stream(rest.host, rest.port) as stream:
            assert await stream.receive_some(1000) == b""
        for stream in held:
            await stream.aclose()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert (await rest.call("GET", "/healthz")).status == 200


async def test_client_that_does_not_read_is_let_go(node):
    async with open_rest(node, send_timeout_s=0.2) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        node.finish("j", make_outcome(make_spec("j"), tokens=2_000_000))
        stream = await trio.open_tcp_stream(rest.host, rest.port)
        await rest.send(stream, "GET", "/v1/rollouts/j")
        await trio.sleep(0.6)
        got = 0
        with suppress(trio.BrokenResourceError):  # closed with a reset, or without: as good
            while data := await stream.receive_some(1 << 20):
                got += len(data)
        assert got < 18_000_000
        await stream.aclose()
        assert (await rest.call("GET", "/healthz")).status == 200


async def test_client_that_does_not_read_does_not_hold_the_shutdown_up(node, monkeypatch):
    monkeypatch.setattr("prorl_trio.service.rest.server.GOODBYE_TIMEOUT_S", 0.2)
    async with open_rest(node) as rest:
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


async def test_websocket_on_the_rest_port_is_refused(node):
    async with open_rest(node) as rest, await trio.open_tcp_stream(rest.host, rest.port) as stream:
        await stream.send_all(
            b"GET /v1/status HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert b" 403" in (await stream.receive_some(1000)).split(b"\r\n")[0]


async def test_session_limit_is_429():
    node = FakeNode()
    async with open_rest(node, sessions=SessionTable(SessionLimits(max_sessions=1))) as rest:
        await rest.call("POST", "/v1/rollouts?session=a", body("a"))
        answer = await rest.call("POST", "/v1/rollouts?session=b", body("b"))
        assert error(answer)[:2] == (429, "admission")
        assert error(await rest.call("GET", "/v1/results?session=" + "x" * 201))[:2] == (422, "protocol")


async def test_node_that_is_full_is_429(node):
    node.submit = partial(_full)
    async with open_rest(node) as rest:
        answer = await rest.call("POST", "/v1/rollouts", body("a"))
        assert (error(answer)[:2], answer.headers["retry-after"]) == ((429, "admission"), "3")


def _full(spec, sink):
    raise AdmissionRejected("full", 2.5)
