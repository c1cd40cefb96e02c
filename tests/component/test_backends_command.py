"""`prorl-trio backends`, and the node's log of who has changed its pool."""

from __future__ import annotations

import logging
import os
from functools import partial

import trio
from click.testing import CliRunner

from prorl_trio.cli import main
from prorl_trio.client import connect
from support.fake_node import FakeNode
from support.fake_rest import open_rest
from support.fake_service import TOKEN, open_service

DEADLINE_S = 30


async def test_an_operator_changes_the_pool_and_the_log_names_who_did(deadline: None, caplog):
    caplog.set_level(logging.INFO)
    node = FakeNode()
    async with open_service(node) as service:

        async def run(*arguments: str) -> str:
            invoke = partial(CliRunner().invoke, main, ["--log-level", "info", "backends", *arguments])
            env = {"PRORL_TOKEN": TOKEN, "PRORL_URL": service.url}
            done = await trio.to_thread.run_sync(partial(invoke, env=env))
            return f"{done.exit_code} {done.stdout}"

        assert await run("add", "http://a", "--weight", "2") == "0 added http://a\n"
        assert await run("weigh", "http://a", "3") == "0 http://a has the weight 3\n"
        assert await run("drain", "http://a") == "0 http://a drains\n"
        line = next(line for line in (await run("list")).splitlines() if "http://a" in line)
        assert line.split()[:4] == ["http://a", "draining", "0", "3"]
        assert await run("remove", "http://a") == "0 removed http://a\n"
        assert await run("remove", "http://a") == "1 "
        async with connect(service.url, TOKEN, session_id="trainer") as client:
            await client.resume(policy_version="7")
    told = [record.getMessage() for record in caplog.records if ", by session " in record.getMessage()]
    assert [line.rpartition("-")[0] for line in told[:4]] == [
        f"{change}, by session operator-{os.getuid()}"
        for change in (
            "backend http://a was added",
            "backend http://a has the weight 3",
            "backend http://a drains",
            "backend http://a was removed",
        )
    ]
    assert told[4:] == ["the policy is of version 7, by session trainer"]


async def test_a_change_over_rest_is_logged_too(deadline: None, caplog):
    caplog.set_level(logging.INFO)
    async with open_rest(FakeNode()) as rest:
        await rest.call("POST", "/v1/backends", {"url": "http://a"})
    assert "backend http://a was added, by REST, session " in caplog.text
