"""The blocking client from plain threads, inside an asyncio loop, interrupted, forgotten and forked."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
import trio

from prorl_ipc.session import Accepted, Rejected
from prorl_trio.client import BlockingClient, ConnectionLost
from prorl_trio.types.errors import BackendError, Unauthorized
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service
from support.interrupts import interrupted_while_it_waits
from support.node_thread import NodeThread

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 30


@pytest.fixture
def edge() -> Iterator[NodeThread]:
    before = threading.active_count()
    with NodeThread() as edge:
        yield edge
    deadline_s = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    names = [thread.name for thread in threading.enumerate()]
    assert "prorl-trio client" not in names, names


def test_a_conversation_in_plain_calls(edge: NodeThread):
    edge.node._on_submit = lambda spec: make_outcome(spec, tokens=4096)
    specs = [make_spec(f"job-{i}") for i in range(50)]
    with BlockingClient(edge.url, TOKEN) as client:
        assert all(isinstance(answer, Accepted) for answer in client.submit(specs))
        got = list(client.results(len(specs)))
        assert got == [make_outcome(spec, tokens=4096) for spec in specs]
        assert client.cursor == 50
        status = client.status()
        assert status["sessions"][client.session_id]["undelivered"] == 0
        client.add_backend("http://good")
        with pytest.raises(BackendError, match="no such backend"):
            client.remove_backend("http://bad")
        client.weigh_backend("http://good", 2)
        client.drain_backend("http://good")
        client.remove_backend("http://good")
        client.clear_backends()


def test_results_end_when_nothing_is_outstanding(edge: NodeThread):
    edge.node._on_submit = make_outcome
    with BlockingClient(edge.url, TOKEN, "s") as client:
        specs = [make_spec("a"), make_spec("bad", handler="nobody"), make_spec("b")]
        assert [type(answer) for answer in client.submit(specs)] == [Accepted, Rejected, Accepted]
        results = client.results(len(specs))
        assert [outcome.job_id for outcome in results] == ["a", "b"]
        assert list(results) == list(client.results()) == list(client.results(timeout_s=0)) == []
        assert client.status()["sessions"]["s"]["undelivered"] == 0, "what was given out is acknowledged"
        edge.node._on_submit = None
        client.submit([make_spec("c")])
    edge.call(edge.node.finish, "c")
    with BlockingClient(edge.url, TOKEN, "s") as client:
        assert [outcome.job_id for outcome in client.results()] == ["c"]


def test_errors_come_out_in_the_caller(edge: NodeThread):
    with pytest.raises(Unauthorized):
        BlockingClient(edge.url, "wrong")
    with pytest.raises(ValueError, match="ws://HOST:PORT"):
        BlockingClient("nowhere", TOKEN)
    with pytest.raises(ConnectionLost):
        BlockingClient("ws://127.0.0.1:1", TOKEN, connect_timeout_s=0.1)
    with pytest.raises(TypeError):
        BlockingClient(edge.url, TOKEN, no_such_option=1)


def test_waiting_for_a_result_can_be_limited_and_gone_on_with(edge: NodeThread):
    with BlockingClient(edge.url, TOKEN) as client:
        client.submit([make_spec("a"), make_spec("b")])
        results = client.results(timeout_s=0.05)
        for _ in range(3):
            with pytest.raises(TimeoutError, match=r"no result within 0\.0"):
                next(results)
        edge.call(edge.node.finish, "a")
        edge.call(edge.node.finish, "b")
        assert next(client.results(timeout_s=10)).job_id == "a"
        while True:  # a limit of nothing is a poll
            try:
                assert next(client.results(timeout_s=0)).job_id == "b"
            except TimeoutError:
                continue
            break


def test_threads_share_the_results_out(edge: NodeThread):
    edge.node._on_submit = make_outcome
    got: list[str] = []

    def consume(client: BlockingClient) -> None:
        got.extend(outcome.job_id for outcome in client.results(25, follow=True))

    with BlockingClient(edge.url, TOKEN) as client:
        threads = [threading.Thread(target=consume, args=(client,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for i in range(10):
            client.submit([make_spec(f"job-{i}-{j}") for j in range(10)])
        for thread in threads:
            thread.join(DEADLINE_S)
    assert sorted(got) == sorted(f"job-{i}-{j}" for i in range(10) for j in range(10))


def test_it_works_inside_an_asyncio_loop_and_leaves_it_alone(edge: NodeThread):
    edge.node._on_submit = make_outcome

    async def trainer() -> list[str]:
        loop = asyncio.get_running_loop()
        ticks = 0

        def tick() -> None:
            nonlocal ticks
            ticks += 1

        with BlockingClient(edge.url, TOKEN) as client:
            client.submit([make_spec("a"), make_spec("b")])
            direct = next(client.results()).job_id
            loop.call_soon(tick)
            in_thread = await asyncio.to_thread(next, client.results())
            assert ticks == 1
            assert asyncio.get_running_loop() is loop
            return [direct, in_thread.job_id]

    assert asyncio.run(trainer()) == ["a", "b"]


async def test_inside_a_trio_loop_it_says_what_to_use_instead():
    with trio.fail_after(DEADLINE_S):
        async with open_service(FakeNode()) as service:
            client = await trio.to_thread.run_sync(BlockingClient, service.url, TOKEN)
            with pytest.raises(RuntimeError, match="blocking function"):
                client.status()
            await trio.to_thread.run_sync(client.close)


def test_closing_wakes_everybody_and_closing_twice_does_nothing(edge: NodeThread):
    client = BlockingClient(edge.url, TOKEN)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            next(client.results(follow=True))
        except ConnectionLost as exc:
            errors.append(exc)

    waiter = threading.Thread(target=wait)
    waiter.start()
    client.status()
    client.close()
    waiter.join(DEADLINE_S)
    assert [str(error) for error in errors] == ["the client is closed"]
    client.close()
    with pytest.raises(ConnectionLost, match="closed"):
        client.status()
    with pytest.raises(ConnectionLost, match="closed"):
        next(client.results(timeout_s=0))


@pytest.mark.parametrize("crash", [False, True])
def test_the_result_in_hand_is_acknowledged_unless_the_trainer_crashed(edge: NodeThread, *, crash: bool):
    edge.node._on_submit = make_outcome
    try:
        with BlockingClient(edge.url, TOKEN, "s") as client:
            client.submit([make_spec("a"), make_spec("b")])
            assert next(client.results()).job_id == "a"
            if crash:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    with BlockingClient(edge.url, TOKEN, "s") as client:
        assert next(client.results()).job_id == ("a" if crash else "b")


def test_an_interrupted_wait_loses_nothing(edge: NodeThread):
    with BlockingClient(edge.url, TOKEN) as client:
        client.submit([make_spec("a")])
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), interrupted_while_it_waits():
                next(client.results())
        edge.call(edge.node.finish, "a")
        assert next(client.results(timeout_s=10)).job_id == "a"


def test_a_call_may_follow_an_interrupted_one_at_once(edge: NodeThread):
    with BlockingClient(edge.url, TOKEN) as client:
        client.submit([make_spec("a")])
        for _ in range(100):
            timer = threading.Timer(0.002, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the signal must find the call or the join
                timer.start()
                next(client.results())
            timer.join()
            with pytest.raises(TimeoutError):
                next(client.results(timeout_s=0))


def test_an_interrupted_constructor_leaves_no_thread(edge: NodeThread):
    with pytest.raises(KeyboardInterrupt), interrupted_while_it_waits():
        BlockingClient("ws://127.0.0.1:1", TOKEN, connect_timeout_s=60)


def test_a_forgotten_client_ends_with_its_last_reference(edge: NodeThread):
    client = BlockingClient(edge.url, TOKEN)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "prorl-trio client"]
    del client
    gc.collect()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_told_that_the_client_is_not_its_own(edge: NodeThread):
    with BlockingClient(edge.url, TOKEN) as client:
        pid = os.fork()
        if pid == 0:
            try:
                client.status()
            except ConnectionLost:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert client.status()["node_id"] == "fake-node"


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "raise SystemExit(0)",
        "threading.Thread(target=next, args=(client.results(follow=True),), daemon=True).start()",
    ],
    ids=["falls off its end", "exits", "exits while a thread waits"],
)
def test_an_interpreter_exits_with_a_client_left_open(edge: NodeThread, end: str):
    script = f"""if True:
        import threading
        from prorl_trio.client import BlockingClient
        client = BlockingClient({edge.url!r}, {TOKEN!r})
        client.status()
        {end}
    """
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
