"""The node's WebSocket edge as any WebSocket client sees it: raw frames over loopback."""

from __future__ import annotations

import msgspec
import pytest
import trio
from trio_websocket import ConnectionClosed

from prorl_ipc.session import (
    Accepted,
    Ack,
    CallBackends,
    Cancel,
    Cancelled,
    HeartbeatPing,
    HeartbeatPong,
    JobEvent,
    OutcomeFrame,
    Rejected,
    SessionHello,
    StatusReport,
    StatusRequest,
    Submit,
    TheseJobs,
    WithdrawCall,
)
from prorl_trio.config import ListenConfig
from prorl_trio.edges.websocket import server as connection_module
from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.types.backends import BackendList, ResumeBackends
from prorl_trio.types.models import Outcome
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service
from support.raw_trainer import encode, raw_trainer
from support.sessions import sessions_in

DEADLINE_S = 20


# ---------------------------------------------------------------- jobs


async def test_a_malformed_spec_is_rejected_by_itself_with_its_field(deadline: None, node: FakeNode):
    good = encode(make_spec("good"))
    jobs = [
        good,
        encode({"job_id": "no payload", "instance": {"instance_id": "i", "handler": "fake", "payload": 3}}),
        encode(
            {
                "job_id": "hot",
                "instance": {"instance_id": "i", "handler": "fake", "payload": {}},
                "sampling": {"temperature": -1.0},
            }
        ),
        encode({"job_id": 7}),
        encode([1, 2]),
        encode(make_spec("stranger", handler="nobody")),
        encode(make_spec("good", question="another")),
        encode(make_spec("last")),
    ]
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.send(Submit(request_id=5, jobs=[msgspec.Raw(job) for job in jobs]))
        answers = [await trainer.receive() for _ in jobs]
    assert [answer.index for answer in answers] == list(range(8))
    assert {answer.request_id for answer in answers} == {5}
    assert answers[0] == Accepted(request_id=5, index=0, job_id="good")
    assert answers[7] == Accepted(request_id=5, index=7, job_id="last")
    rejected = [(a.job_id, a.code, a.path) for a in answers if isinstance(a, Rejected)]
    assert rejected == [
        ("no payload", "malformed", "$.instance.payload"),
        ("hot", "malformed", "$.sampling"),
        (None, "malformed", "$.job_id"),
        (None, "malformed", "$"),
        ("stranger", "unknown_handler", ""),
        ("good", "duplicate_job", ""),
    ]
    assert [spec.job_id for spec in node.submitted] == ["good", "last"]


async def test_admission_and_draining_are_rejections_with_advice(deadline: None, node: FakeNode, nursery):
    sessions = sessions_in(nursery, SessionLimits(max_undelivered=1))
    async with open_service(node, sessions=sessions) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        _, full = await trainer.submit(make_spec("a"), make_spec("b"))
        assert (full.code, full.retry_after_s) == ("admission", 1.0)
        node.finish("a")
        await trainer.receive()
        await trainer.send(Ack(cursor=1))
        node.draining = True
        (draining,) = await trainer.submit(make_spec("b"))
        assert (draining.code, draining.retry_after_s) == ("draining", None)


async def test_outcomes_come_bit_for_bit_with_growing_cursors_after_their_acceptance(deadline: None):
    node = FakeNode(lambda spec: make_outcome(spec, tokens=1000))
    specs = [make_spec(f"job-{i}") for i in range(200)]
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.send(Submit(request_id=1, jobs=[msgspec.Raw(encode(spec)) for spec in specs]))
        accepted: set[str] = set()
        cursors = []
        while len(cursors) < len(specs):
            frame = await trainer.receive()
            if isinstance(frame, Accepted):
                accepted.add(frame.job_id)
                continue
            assert frame.job_id in accepted, "an outcome overtook its own acceptance"
            cursors.append(frame.cursor)
            outcome = msgspec.msgpack.decode(frame.outcome, type=Outcome)
            assert outcome == make_outcome(specs[len(cursors) - 1], tokens=1000)
        assert cursors == list(range(1, 201))


async def test_what_is_not_acknowledged_comes_again_on_the_next_connection(deadline: None, node: FakeNode):
    async with open_service(node) as service:
        async with raw_trainer(service) as trainer:
            await trainer.hello()
            await trainer.submit(*(make_spec(f"job-{i}") for i in range(4)))
            for i in range(3):
                node.finish(f"job-{i}")
                await trainer.receive()
            await trainer.send(Ack(cursor=1))
            await trainer.send(StatusRequest(request_id=1))  # the node has read the Ack when it answers
            await trainer.receive()
        node.finish("job-3")
        async with raw_trainer(service) as trainer:
            welcome = await trainer.hello()
            assert (welcome.resumed, welcome.pending) == (True, 3)
            assert [(await trainer.receive()).cursor for _ in range(3)] == [2, 3, 4]
        async with raw_trainer(service) as trainer:
            assert (await trainer.hello(resume_after=3)).pending == 1
            assert (await trainer.receive()).cursor == 4
        async with raw_trainer(service) as trainer:
            assert (await trainer.hello(resume_after=5)).code == "protocol"


async def test_a_trainer_that_acknowledges_nothing_gets_a_window_and_no_more(deadline: None):
    node = FakeNode(lambda spec: make_outcome(spec, tokens=1))
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.send(Submit(request_id=1, jobs=[msgspec.Raw(encode(make_spec(f"j{i}"))) for i in range(300)]))
        got = [await trainer.receive() for _ in range(300 + 256)]
        assert sum(isinstance(frame, OutcomeFrame) for frame in got) == 256
        await trainer.send(StatusRequest(request_id=2))
        report = await trainer.receive()
        assert isinstance(report, StatusReport), "an outcome beyond the window"
        sessions = msgspec.msgpack.decode(report.statistics)["sessions"]
        assert sessions["s"]["undelivered"] == 300
        await trainer.send(Ack(cursor=256))
        assert [(await trainer.receive()).cursor for _ in range(44)] == list(range(257, 301))


async def test_an_acknowledgement_of_the_future_ends_the_connection(deadline: None, node: FakeNode):
    async with open_service(node) as service:
        async with raw_trainer(service) as trainer:
            await trainer.hello()
            await trainer.send(Ack(cursor=1))
            refused = await trainer.receive()
            assert (refused.code, "cursor 1 acknowledged" in refused.message) == ("protocol", True)
        async with raw_trainer(service) as trainer:
            assert (await trainer.hello()).resumed


async def test_the_newest_connection_of_a_session_wins(deadline: None, node: FakeNode):
    async with open_service(node) as service, raw_trainer(service) as old, raw_trainer(service) as new:
        await old.hello()
        await old.submit(make_spec("a"))
        assert (await new.hello()).resumed
        refused = await old.receive()
        assert refused.code == "replaced"
        assert (await old.closed()).code == 1008
        node.finish("a")
        assert (await new.receive()).job_id == "a"


async def test_two_trainers_do_not_see_each_other(deadline: None, node: FakeNode):
    async with open_service(node) as service, raw_trainer(service) as one, raw_trainer(service) as two:
        await one.hello("one")
        await two.hello("two")
        await one.submit(make_spec("of one"))
        await two.submit(make_spec("of two"))
        await two.send(Cancel(9, [TheseJobs(["of one", "of two"])]))
        frames = [await two.receive(), await two.receive()]
        assert Cancelled(9, cancelled=["of two"], ended=[], unknown=["of one"]) in frames
        assert [frame.job_id for frame in frames if isinstance(frame, OutcomeFrame)] == ["of two"]
        node.finish("of one")
        outcome = await one.receive()
        assert (outcome.cursor, outcome.job_id) == (1, "of one")


async def test_events_reach_the_trainer_that_submitted(deadline: None, node: FakeNode):
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.submit(make_spec("a"))
        node.advance("a", "init", "pulling")
        assert await trainer.receive() == JobEvent(job_id="a", status="init", detail="pulling")


async def test_events_are_dropped_under_pressure_outcomes_are_not(deadline: None, node: FakeNode):
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.submit(make_spec("a"))
        for i in range(5000):  # in one step: nothing can be sent in between
            node.advance("a", "run", str(i))
        node.finish("a")
        events = 0
        while isinstance(await trainer.receive(), JobEvent):
            events += 1
    assert events == connection_module.EVENT_MARK_FRAMES


# ---------------------------------------------------------------- requests


async def test_cancel_answers_when_nothing_is_left_and_blocks_nobody(deadline: None, node: FakeNode):
    node.cancel_gate = trio.Event()
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.submit(*(make_spec(job_id) for job_id in "abc"))
        node.finish("b")
        assert (await trainer.receive()).job_id == "b"
        await trainer.send(Cancel(2, [TheseJobs(["a", "b", "x", "a"])], reason="enough"))
        await trainer.send(StatusRequest(request_id=3))
        assert isinstance(await trainer.receive(), StatusReport)
        node.cancel_gate.set()
        frames = [await trainer.receive(), await trainer.receive()]
        assert Cancelled(2, cancelled=["a"], ended=["b"], unknown=["x"]) in frames
        (outcome,) = [frame for frame in frames if isinstance(frame, OutcomeFrame)]
        decoded = msgspec.msgpack.decode(outcome.outcome, type=Outcome)
        assert (decoded.job_id, decoded.status, decoded.error) == ("a", "cancelled", "enough")
        assert list(node.live) == ["c"]


async def test_a_cancel_ahead_for_the_whole_node_is_refused(deadline: None, node: FakeNode):
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.send(Cancel(1, [TheseJobs(["a"], ahead=True)], on_node=True))
        assert "does not go with on_node" in (await trainer.receive()).message


async def test_too_many_operations_at_once_end_the_connection_not_the_jobs(
    deadline: None, node: FakeNode, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection_module, "MAX_OPERATIONS", 3)
    node.cancel_gate = trio.Event()
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.submit(make_spec("a"), make_spec("b"))
        for i in range(4):
            await trainer.send(Cancel(i, [TheseJobs(["a"])]))
        refused = await trainer.receive()
        assert "more than 3 cancels" in refused.message
    assert list(node.live) == ["b"]  # a cancel that has begun goes on without its connection


def call(request_id: int, operation: str, **arguments: object) -> CallBackends:
    return CallBackends(request_id=request_id, operation=operation, arguments=msgspec.Raw(encode(arguments)))


async def test_backends_are_added_and_removed_and_errors_are_told(deadline: None, node: FakeNode):
    node.unfit_backends.add("http://bad")
    node.down_backends.add("http://down")
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        for request_id, (operation, arguments, code, message) in enumerate(
            [
                ("add", {"url": "http://good"}, "", ""),
                ("add", {"url": "http://bad"}, "backend_unfit", "backend http://bad drops token ids"),
                ("add", {"url": "http://down"}, "backend_down", "backend http://down cannot be reached"),
                ("remove", {"url": "http://good"}, "", ""),
                ("remove", {"url": "http://good"}, "unknown_backend", "http://good: no such backend; registered: none"),
                ("add", {"url": "http://heavy", "weight": 2.0}, "", ""),
                ("weigh", {"url": "http://heavy", "weight": 3.0}, "", ""),
                ("drain", {"url": "http://heavy"}, "", ""),
                (
                    "drain",
                    {"url": "http://good"},
                    "unknown_backend",
                    "http://good: no such backend; registered: http://heavy",
                ),
                ("load_weights", {"folder": "/w"}, "update_refused", "weights are loaded in a pause only"),
            ]
        ):
            await trainer.send(call(request_id, operation, **arguments))
            answer = await trainer.receive()
            assert (answer.request_id, answer.code) == (request_id, code)
            assert message in answer.message
            assert (msgspec.msgpack.decode(answer.answer) is None) == bool(code)
        (heavy,) = node.backends.statistics()["backends"]
        assert (heavy.url, heavy.weight, heavy.state) == ("http://heavy", 3.0, "draining")
        await trainer.send(call(20, "remove", all=True))
        answer = await trainer.receive()
        assert msgspec.msgpack.decode(answer.answer, type=BackendList).urls == []
        assert node.backends.urls() == ()


@pytest.mark.parametrize(
    ("operation", "arguments", "path"),
    [
        ("reboot", {}, "$.operation"),
        ("add", {}, "$.arguments"),
        ("add", {"url": ""}, "$.arguments.url"),
        ("weigh", {"url": "http://a", "weight": 0}, "$.arguments.weight"),
        ("remove", {}, "$.arguments"),
        ("remove", {"url": "http://a", "all": True}, "$.arguments"),
        ("pause", {"mode": "soon"}, "$.arguments.mode"),
        ("resume", {"version": "2"}, "$.arguments"),
    ],
)
async def test_a_call_of_the_backends_that_cannot_be_read_is_answered(
    operation: str, arguments: dict[str, object], path: str, deadline: None, node: FakeNode
):
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.send(call(1, operation, **arguments))
        answer = await trainer.receive()
        assert (answer.code, answer.path) == ("malformed", path)
        await trainer.send(call(2, "list"))
        assert (await trainer.receive()).code == ""


async def test_a_pause_is_undone_when_its_call_is_withdrawn_or_its_connection_ends(deadline: None, node: FakeNode):
    await node.backends.add("http://a")
    engine = node.engines["http://a"]
    for how in ("withdrawn", "left"):
        engine.silent.add("pause")
        async with open_service(node) as service:
            async with raw_trainer(service) as trainer:
                await trainer.hello()
                await trainer.send(call(1, "pause", mode="keep"))
                while not node.backends.admission.closed:
                    await trio.sleep(0.01)
                if how == "withdrawn":
                    await trainer.send(WithdrawCall(request_id=1))
                    await trainer.send(WithdrawCall(request_id=7))
                    while node.backends.admission.closed:
                        await trio.sleep(0.01)
                    engine.silent.clear()
                    await trainer.send(call(2, "pause", mode="keep"))
                    assert (await trainer.receive()).request_id == 2, "one that is withdrawn is not answered"
                    await node.backends.operate(ResumeBackends())
            while node.backends.admission.closed:
                await trio.sleep(0.01)


async def test_a_second_hello_ends_the_connection(deadline: None, node: FakeNode):
    async with open_service(node) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        refused = await trainer.hello()
        assert "SessionHello is not expected" in refused.message


# ---------------------------------------------------------------- limits and the end


async def test_a_frame_too_large_ends_the_connection_with_a_reason_and_the_session_lives(
    deadline: None, node: FakeNode
):
    async with open_service(node, max_message_bytes=200_000) as service:
        async with raw_trainer(service) as trainer:
            await trainer.hello()
            await trainer.submit(make_spec("a"))
            await trainer.socket.send_message(bytes(5_000_000))
            reason = await trainer.closed()
            assert (reason.code, reason.reason) == (1009, "Exceeded maximum message size: 200000 bytes")
        node.finish("a")
        async with raw_trainer(service) as trainer:
            assert (await trainer.hello()).pending == 1
            assert (await trainer.receive()).job_id == "a"


async def test_heartbeats_go_both_ways(deadline: None, node: FakeNode):
    listen = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 10}
    async with open_service(node, **listen) as service, raw_trainer(service) as trainer:
        await trainer.hello()
        await trainer.send(HeartbeatPing(nonce=77))
        wanted = {HeartbeatPong(nonce=77), HeartbeatPing(nonce=1), HeartbeatPing(nonce=2)}
        while wanted:
            wanted.discard(await trainer.receive(heartbeats=True))


async def test_a_trainer_that_says_nothing_at_all_is_dropped_and_its_session_lives(deadline: None, node: FakeNode):
    async with open_service(node, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3) as service:
        async with raw_trainer(service) as trainer:
            await trainer.hello()
            reason = await trainer.closed()
            assert "nothing came from the peer for 0.3 s" in (reason.reason or "")
        async with raw_trainer(service) as trainer:
            assert (await trainer.hello()).resumed


async def test_cancelling_the_server_sends_what_there_is_and_says_goodbye(deadline: None):
    node = FakeNode(lambda spec: make_outcome(spec, tokens=5000))
    async with open_service(node) as service, raw_trainer(service) as trainer, raw_trainer(service) as stranger:
        await trainer.hello()
        specs = [make_spec(f"job-{i}") for i in range(100)]
        await trainer.send(Submit(request_id=1, jobs=[msgspec.Raw(encode(spec)) for spec in specs]))
        await trainer.receive()
        started_s = trio.current_time()
        service.stop()
        frames = []
        with pytest.raises(ConnectionClosed) as closed:  # noqa: PT012
            while True:
                frames.append(await trainer.receive())
        assert closed.value.reason is not None
        assert (closed.value.reason.code, closed.value.reason.reason) == (1001, "the node is going away")
        assert sum(isinstance(frame, OutcomeFrame) for frame in frames) == 100
        await stranger.closed()
        assert trio.current_time() - started_s < ListenConfig().close_timeout_s
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream(service.host, service.port)


async def test_cancelling_the_server_is_bounded_when_a_trainer_does_not_read(deadline: None):
    node = FakeNode(lambda spec: make_outcome(spec, tokens=500_000))
    async with open_service(node, close_timeout_s=0.3) as service:
        stream = await trio.open_tcp_stream(service.host, service.port)
        async with stream:
            # A WebSocket client that never reads, written by hand: the library always does.
            await stream.send_all(
                b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            )
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 101")
            await stream.send_all(client_frame(SessionHello(version=1, token=TOKEN, session_id="s")))
            specs = [make_spec(f"job-{i}") for i in range(20)]
            await stream.send_all(
                client_frame(Submit(request_id=1, jobs=[msgspec.Raw(encode(spec)) for spec in specs]))
            )
            while len(node.submitted) < 20:
                await trio.testing.wait_all_tasks_blocked()
            service.stop()
            with trio.fail_after(5):
                await service.stopped.wait()


def client_frame(frame: msgspec.Struct) -> bytes:
    """One masked binary WebSocket message; the mask is zero."""
    payload = encode(frame)
    head = bytes([0x82, 0x80 | len(payload)]) if len(payload) < 126 else b"\x82\xfe" + len(payload).to_bytes(2, "big")
    return head + bytes(4) + payload
