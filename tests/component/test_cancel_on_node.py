"""Cancels of an operator: whoever submitted the job, by id, group, tags and session, over both edges and by command."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from click.testing import CliRunner
from trio.testing import wait_all_tasks_blocked

from prorl_trio.cli import main
from prorl_trio.client import BlockingClient, RolloutClient, connect
from prorl_trio.types.models import JobSpec, TaskInstance
from support.fake_node import FakeNode
from support.fake_rest import open_rest
from support.fake_service import TOKEN, Service, open_service
from support.sessions import sessions_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from click.testing import Result

DEADLINE_S = 30


def spec(job_id: str, group_id: str = "", **tags: str) -> JobSpec:
    instance = TaskInstance(instance_id="i", handler="fake", payload={})
    return JobSpec(job_id=job_id, instance=instance, group_id=group_id, tags=tags)


SPECS = {
    "one": [spec("a", "g", run="1"), spec("b", "g", run="2"), spec("c", "h", run="1")],
    "two": [spec("d", "g", run="1"), spec("e", "h", run="2"), spec("f")],
}


@asynccontextmanager
async def two_trainers(node: FakeNode) -> AsyncIterator[tuple[Service, RolloutClient, RolloutClient]]:
    async with (
        open_service(node) as service,
        connect(service.url, TOKEN, session_id="one") as one,
        connect(service.url, TOKEN, session_id="two") as two,
    ):
        await one.submit(SPECS["one"])
        await two.submit(SPECS["two"])
        yield service, one, two


async def command(service: Service, *arguments: str) -> Result:
    invoke = partial(CliRunner().invoke, main, ["cancel", *arguments])
    env = {"PRORL_TOKEN": TOKEN, "PRORL_URL": service.url}
    return await trio.to_thread.run_sync(partial(invoke, env=env))


async def test_the_command_cancels_the_jobs_of_others_and_their_trainers_are_told(deadline: None):
    node = FakeNode()
    async with two_trainers(node) as (service, one, two):
        result = await command(service, "a", "e", "--reason", "wrong reward")
        assert (result.exit_code, result.stdout) == (0, "cancelled a\ncancelled e\n")
        for trainer, job_id in ((one, "a"), (two, "e")):
            outcome = await anext(trainer.results())
            assert (outcome.job_id, outcome.status, outcome.reward, outcome.error) == (
                job_id,
                "cancelled",
                None,
                "wrong reward",
            )
        assert set(node.live) == {"b", "c", "d", "f"}


async def test_unknown_ids_are_said_and_the_others_cancelled_all_the_same(deadline: None):
    node = FakeNode()
    async with two_trainers(node) as (service, _, _):
        node.finish("b")
        result = await command(service, "nobody", "a", "b", "a")
        assert result.exit_code == 1
        assert result.stdout == "cancelled a\nhad ended b\n"
        assert "unknown to this node (over, or never submitted): nobody" in result.stderr
        assert set(node.live) == {"c", "d", "e", "f"}


FILTERS = [
    ({"group_id": "g"}, ["--group", "g"], "group=g", {"a", "b", "d"}),
    ({"tags": {"run": "1"}}, ["--tag", "run:1"], "tag=run:1", {"a", "c", "d"}),
    ({"session_id": "two"}, ["--session", "two"], "session=two", {"d", "e", "f"}),
    ({"group_id": "g", "tags": {"run": "1"}}, ["--group", "g", "--tag", "run:1"], "group=g&tag=run:1", {"a", "d"}),
    ({"group_id": "h", "session_id": "one"}, ["--group", "h", "--session", "one"], "group=h&session=one", {"c"}),
    ({"group_id": ""}, ["--group", ""], "group=", {"f"}),
    ({"group_id": "none"}, ["--group", "none"], "group=none", set()),
]


@pytest.mark.parametrize("edge", ["websocket", "rest", "command"])
@pytest.mark.parametrize(
    ("arguments", "options", "query", "chosen"), FILTERS, ids=lambda v: v if type(v) is str else ""
)
async def test_all_edges_choose_the_same_jobs(edge, arguments, options, query, chosen, deadline: None, nursery):
    node, table = FakeNode(), sessions_in(nursery)
    async with open_rest(node, sessions=table) as rest, open_service(node, sessions=table) as service:
        async with (
            connect(service.url, TOKEN, session_id="one") as one,
            connect(service.url, TOKEN, session_id="two") as two,
        ):
            await one.submit(SPECS["one"])
            await two.submit(SPECS["two"])
            if edge == "websocket":
                cancelled = set((await one.cancel(on_node=True, **arguments)).cancelled)
            elif edge == "rest":
                answer = await rest.call("DELETE", f"/v1/rollouts?{query}")
                cancelled = set(answer.json()["cancelled"])
            else:
                result = await command(service, *options)
                assert result.exit_code == 0
                cancelled = {line.removeprefix("cancelled ") for line in result.stdout.splitlines()}
                assert ("no such job is live" in result.stderr) == (not chosen)
        assert cancelled == chosen
        assert set(node.live) == set("abcdef") - chosen


async def test_all_of_them(deadline: None):
    node = FakeNode()
    async with two_trainers(node) as (service, _, _):
        result = await command(service, "--all")
        assert (result.exit_code, len(result.stdout.splitlines())) == (0, 6)
        assert not node.live


async def test_a_cancel_of_a_trainers_own_never_takes_those_of_others(deadline: None):
    node = FakeNode()
    async with two_trainers(node) as (_, one, _):
        answer = await one.cancel(["d"], group_id="g", tags={"run": "1"})
        assert (answer.cancelled, answer.unknown) == (["a", "b", "c"], ["d"])
        assert set(node.live) == {"d", "e", "f"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"on_node": True, "whole_session": True},
        {"on_node": True, "ahead": True},
        {"session_id": "one"},
        {"everything": True},
    ],
)
async def test_what_is_for_a_session_does_not_go_with_the_whole_node(arguments, deadline: None):
    node = FakeNode()
    async with two_trainers(node) as (_, one, _):
        with pytest.raises(ValueError, match="go with on_node"):
            await one.cancel(["a"], **arguments)
        assert set(node.live) == set("abcdef")


async def test_it_returns_when_nothing_is_left(deadline: None):
    node = FakeNode()
    node.cancel_gate = trio.Event()
    async with two_trainers(node) as (_, one, _), trio.open_nursery() as nursery:
        done = trio.Event()

        async def cancel() -> None:
            await one.cancel(on_node=True, everything=True)
            done.set()

        nursery.start_soon(cancel)
        await wait_all_tasks_blocked()
        assert not done.is_set()
        node.cancel_gate.set()
        await done.wait()
        assert not node.live


async def test_the_blocking_client_has_it_too(deadline: None):
    node = FakeNode()

    def operate(url: str) -> list[list[str]]:
        with BlockingClient(url, TOKEN) as client:
            answer = client.cancel(["a", "x"], on_node=True, tags={"run": "2"})
            return [answer.cancelled, answer.ended, answer.unknown]

    async with two_trainers(node) as (service, _, _):
        assert await trio.to_thread.run_sync(operate, service.url) == [["a", "b", "e"], [], ["x"]]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "say which jobs: by JOB_ID, --group, --tag, --session or --all"),
        (("--all", "a"), "--all is all jobs"),
        (("--all", "--group", "g"), "--all is all jobs"),
        (("--tag", "run"), "'run' is no NAME:VALUE"),
        (("--tag", "a:1", "--tag", "a:2"), "two values"),
    ],
)
async def test_what_cannot_be_meant_is_refused(arguments, why):
    result = await command(Service("127.0.0.1", 1, trio.CancelScope(), door=None), *arguments)
    assert result.exit_code == 2
    assert why in result.stderr
