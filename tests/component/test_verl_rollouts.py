"""Rollouts awaited in asyncio, as verl's workers do: one session, cancels, a node that forgets and one that is gone."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from prorl_trio.client import ConnectionLost
from prorl_trio.integrations import rollouts as module
from prorl_trio.integrations.node_address import NodeAddress
from prorl_trio.integrations.rollouts import JobRefused, Rollouts, close_all, rollouts_on
from prorl_trio.types.errors import ConfigError
from support.fake_fleet import open_fake_fleet
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service
from support.fleet_head import announce, head_quickly, open_head

pytestmark = pytest.mark.timeout(60)

DEADLINE_S = 30


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)


@asynccontextmanager
async def open_rollouts(service, **fields):
    rollouts = Rollouts(NodeAddress(url=service.url, **fields))
    try:
        with trio.fail_after(DEADLINE_S):
            yield rollouts
    finally:
        with trio.move_on_after(5, shield=True):
            await trio.to_thread.run_sync(rollouts.close)


async def in_asyncio(afn, *args):
    """Run an asyncio program beside the node."""
    return await trio.to_thread.run_sync(asyncio.run, afn(*args), abandon_on_cancel=True)


async def all_of(rollouts, specs):
    return await asyncio.gather(*map(rollouts.run, specs), return_exceptions=True)


class Background:
    """The outcomes, or errors, of rollouts that go on beside the test."""

    def __init__(self, nursery, rollouts, specs):
        self._done, self._outcomes = trio.Event(), []
        nursery.start_soon(self._run, rollouts, specs)

    async def _run(self, rollouts, specs):
        self._outcomes = await in_asyncio(all_of, rollouts, specs)
        self._done.set()

    async def wait(self):
        with trio.fail_after(DEADLINE_S):
            await self._done.wait()
        return self._outcomes


async def test_a_thousand_at_once_share_one_session_and_each_gets_its_own_outcome(token):
    specs = [make_spec(f"job-{n}") for n in range(1000)]
    node = FakeNode(make_outcome)
    async with open_service(node) as service, open_rollouts(service) as rollouts:
        outcomes = await in_asyncio(all_of, rollouts, specs)
        assert outcomes == [make_outcome(spec) for spec in specs]
        # The next loop of the process goes on in the same session.
        assert await in_asyncio(all_of, rollouts, [make_spec("more")]) == [make_outcome(make_spec("more"))]
        assert len({spec.job_id for spec in node.submitted}) == len(node.submitted) == 1001


async def test_what_is_refused_is_raised_there_alone(token):
    async with open_service(FakeNode(make_outcome)) as service, open_rollouts(service) as rollouts:
        specs = [make_spec("a"), make_spec("b", handler="nobody"), make_spec("c")]
        first, refused, last = await in_asyncio(all_of, rollouts, specs)
        assert (first.job_id, last.job_id) == ("a", "c")
        assert isinstance(refused, JobRefused)
        assert refused.refusal == "unknown_handler"
        assert "no handler 'nobody'; there is: fake" in str(refused)


async def test_a_cancelled_one_cancels_its_job_and_waits_until_it_is_gone(token):
    node = FakeNode()
    node.cancel_gate = trio.Event()
    here = trio.lowlevel.current_trio_token()

    async def program(rollouts):
        task = asyncio.create_task(rollouts.run(make_spec("slow")))
        other = asyncio.create_task(rollouts.run(make_spec("other")))
        await asyncio.to_thread(trio.from_thread.run, node.wait_live, 2, trio_token=here)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done(), "its job is still there"
        trio.from_thread.run_sync(node.cancel_gate.set, trio_token=here)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(node.live) == ["other"]
        trio.from_thread.run_sync(node.finish, "other", trio_token=here)
        return (await other).job_id

    async with open_service(node) as service, open_rollouts(service) as rollouts:
        assert await in_asyncio(program, rollouts) == "other"


async def test_a_cancel_that_nobody_confirms_ends_after_its_grace(token, monkeypatch):
    monkeypatch.setattr(module, "CANCEL_GRACE_S", 0.05)
    node = FakeNode()
    node.cancel_gate = trio.Event()
    here = trio.lowlevel.current_trio_token()

    async def program(rollouts):
        task = asyncio.create_task(rollouts.run(make_spec("slow")))
        await asyncio.to_thread(trio.from_thread.run, node.wait_live, 1, trio_token=here)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async with open_service(node) as service, open_rollouts(service) as rollouts:
        await in_asyncio(program, rollouts)
        node.cancel_gate.set()


async def test_a_node_that_has_forgotten_its_session_is_given_the_jobs_again(token):
    forgetful, node = FakeNode(), FakeNode(make_outcome)
    specs = [make_spec(f"job-{n}") for n in range(5)]
    async with open_service(forgetful) as service, open_rollouts(service) as rollouts, trio.open_nursery() as nursery:
        background = Background(nursery, rollouts, specs)
        await forgetful.wait_live(5)
        service.stop()
        await service.stopped.wait()
        async with open_service(node, port=service.port):
            outcomes = await background.wait()
        assert outcomes == [make_outcome(spec) for spec in specs]
        assert sorted(spec.job_id for spec in node.submitted) == [spec.job_id for spec in specs]


async def test_a_fleet_is_found_by_its_folder_with_its_token(tmp_path, monkeypatch):
    monkeypatch.delenv("PRORL_TOKEN", raising=False)
    head_quickly(monkeypatch)
    folder = tmp_path / "f"
    async with open_fake_fleet(folder, "a", "b", on_submit=make_outcome), open_head(folder, "a", "b") as head:
        announce(folder, head)
        rollouts = Rollouts(NodeAddress.read({"fleet": str(folder)}))
        outcomes = await in_asyncio(all_of, rollouts, [make_spec(f"j{number}") for number in range(4)])
        assert [outcome.reward for outcome in outcomes] == [1.0] * 4
        await trio.to_thread.run_sync(rollouts.close)


async def test_a_node_that_stays_away_fails_each_and_the_next_session_is_a_new_one(token):
    node = FakeNode()
    async with open_service(node) as service, trio.open_nursery() as nursery:
        where = NodeAddress(url=service.url, connect_timeout_s=0.2, reconnect_timeout_s=0.2)
        rollouts = rollouts_on(where)
        assert rollouts_on(where) is rollouts
        background = Background(nursery, rollouts, [make_spec("a"), make_spec("b")])
        await node.wait_live(2)
        service.stop()
        first, second = await background.wait()
        assert type(first) is type(second) is ConnectionLost
        assert "no connection to" in str(first)
        assert first is not second
        (late,) = await in_asyncio(all_of, rollouts, [make_spec("c")])
        assert isinstance(late, ConnectionLost)
        assert rollouts.over
        assert rollouts_on(where) is not rollouts
        await trio.to_thread.run_sync(close_all)


async def test_a_close_fails_what_is_waited_for_and_leaves_the_jobs(token):
    node = FakeNode()
    async with open_service(node) as service, open_rollouts(service) as rollouts, trio.open_nursery() as nursery:
        background = Background(nursery, rollouts, [make_spec("a")])
        await node.wait_live(1)
        await trio.to_thread.run_sync(rollouts.close)
        (closed,) = await background.wait()
        assert isinstance(closed, ConnectionLost)
        assert list(node.live) == ["a"]


async def test_a_node_that_drains_is_asked_again(token, monkeypatch):
    monkeypatch.setattr(module, "DRAIN_RETRY_S", 0.01)
    node = FakeNode(make_outcome)
    node.draining = True
    asked, check = [], node.check

    def checked(spec, sink, ahead):
        asked.append(spec.job_id)
        node.draining = len(asked) < 3
        check(spec, sink, ahead)

    node.check = checked
    async with open_service(node) as service, open_rollouts(service) as rollouts:
        (outcome,) = await in_asyncio(all_of, rollouts, [make_spec("a")])
        assert outcome == make_outcome(make_spec("a"))
        assert asked == ["a"] * 3


async def test_wrong_addresses_and_tokens_are_named(monkeypatch, tmp_path):
    monkeypatch.delenv("PRORL_TOKEN", raising=False)
    for wrong in ({"url": "ws://a:1", "endpoint_file": "b"}, {"url": "ws://a:1", "fleet": "f"}, {}):
        with pytest.raises(ConfigError, match="one alone"):
            NodeAddress.read(wrong)
    with pytest.raises(ConfigError, match="unknown field `urls`"):
        NodeAddress.read({"urls": "ws://a:1"})
    (missing,) = await in_asyncio(all_of, Rollouts(NodeAddress(url="ws://127.0.0.1:1")), [make_spec("a")])
    assert isinstance(missing, ConfigError)
    assert "PRORL_TOKEN" in str(missing)
    nowhere = NodeAddress(url="ws://127.0.0.1:1", token_file=str(tmp_path / "no"))
    (unread,) = await in_asyncio(all_of, Rollouts(nowhere), [make_spec("a")])
    assert "node.token_file" in str(unread)
    (tmp_path / "token").write_text("a wrong one\n")
    (tmp_path / "token").chmod(0o600)
    async with open_service(FakeNode()) as service:
        wrong = msgspec.structs.replace(nowhere, url=service.url, token_file=str(tmp_path / "token"))
        rollouts = Rollouts(wrong)
        (refused,) = await in_asyncio(all_of, rollouts, [make_spec("a")])
        assert "token" in str(refused)
        assert rollouts.over
