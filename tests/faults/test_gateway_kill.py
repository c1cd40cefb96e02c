"""A node is killed with -9 between the sampling of a turn and the answer to the program that asked for it."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from contextlib import asynccontextmanager

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import NoAgentWanted
from prorl_trio.types.models import AgentProgram
from prorl_trio.types.programs import FinishAgent, OpenAgent
from support.killable import Killable
from support.whole_node import TOKEN, job, usable

pytestmark = [pytest.mark.timeout(120)]

ASK = """
import json, os, sys, urllib.request
body = {"messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
print(urllib.request.urlopen(request).status)
"""
INSIDE = AgentProgram(command=["python3", "-c", ASK, "{instruction}"])
OUTSIDE = AgentProgram(external=True)
AGENTS = {"inside": INSIDE, "outside": OUTSIDE}


def say(urls, key, instruction):
    """Ask for one turn; return the status, 0 if the connection ended."""
    body = {"messages": [{"role": "user", "content": instruction}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(urls["openai"] + "/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as got:
            return got.status
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError:
        return 0


@asynccontextmanager
async def open_node(tmp_path):
    """A node that can be killed, and its engine, which numbers its turns and its tokens."""
    tiny = make_tiny_model(tmp_path / "model")
    sampled = []

    def script(_prompt):
        ids = tiny.turn(f"Turn {len(sampled)} says \\boxed{{42}}")
        sampled.append(ids)
        return ids, [-float(len(sampled))] * len(ids), "stop"

    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    async with open_fake_engine(script=script, config=engine_config) as engine, trio.open_nursery() as nursery:
        config = {
            "model": {"path": str(tmp_path / "model")},
            "listen": {"port": 0, "endpoint_file": str(tmp_path / "endpoint.json"), "unix_socket": ""},
            "ledger": {"dir": str(tmp_path / "ledger")},
            "backends": {"urls": [engine.url], "required": True},
            "sandbox": {"provider": "bubblewrap", "max_warm": 0},
            "arena": {"enabled": False},
        }
        with (tmp_path / "node.log").open("ab") as log:
            yield Killable(tmp_path, config, nursery, log), engine, sampled
            nursery.cancel_scope.cancel()


@pytest.fixture
def _bubblewrap():
    usable("bubblewrap")


async def lose_the_answers(node, engine, client, run):
    """Submit a job for each kind of agent, and kill the node when their turns are sampled and nobody has them.

    Returns the ids, and the agent outside as it was opened.
    """
    engine.hold()
    jobs = {where: job(f"{where} {run}", agent=agent) for where, agent in AGENTS.items()}
    await client.submit(list(jobs.values()))
    opened = await client.operate(OpenAgent(job_id=jobs["outside"].job_id))
    finished, statuses = engine.stats.completions_total, []

    async def ask():
        statuses.append(await trio.to_thread.run_sync(say, opened.urls, opened.key, "6 * 7?"))

    async with trio.open_nursery() as asking:
        asking.start_soon(ask)
        await engine.wait_until(lambda stats: stats.running == len(jobs))
        os.kill(node.pid, signal.SIGSTOP)  # what is sampled now reaches the node, and nobody behind it
        engine.release()
        await engine.wait_until(lambda stats: stats.completions_total == finished + len(jobs))
        await node.kill()
    assert statuses == [0], "the agent outside has no answer"
    return {spec.job_id for spec in jobs.values()}, opened


@pytest.mark.usefixtures("_bubblewrap")
async def test_each_rollout_has_one_outcome_and_none_has_the_turn_that_was_lost(tmp_path):
    with trio.fail_after(100):
        async with open_node(tmp_path) as (node, engine, sampled):
            url = await node.start()
            async with connect(url, TOKEN) as client:
                again, old = await lose_the_answers(node, engine, client, "again")
                lost = len(sampled)
                await node.start()
                new = await client.operate(OpenAgent(job_id="outside again"))
                with pytest.raises(NoAgentWanted):
                    await client.operate(FinishAgent(job_id="outside again", key=old.key, reward=1.0))
                assert await trio.to_thread.run_sync(say, old.urls, old.key, "6 * 7?") == 404
                assert await trio.to_thread.run_sync(say, new.urls, new.key, "6 * 7?") == 200
                await client.operate(FinishAgent(job_id="outside again", key=new.key))
                outcomes = [outcome async for outcome in client.results(2)]
                assert {each.job_id for each in outcomes} == again
                node.config["ledger"]["on_restart"] = "fail"
                once, _ = await lose_the_answers(node, engine, client, "once")
                await node.start()
                failed = [outcome async for outcome in client.results(2)]
                await client.submit([job("last", agent=INSIDE)])
                last = [outcome.job_id async for outcome in client.results(1)]
            assert await node.stop() == 0
    assert last == ["last"], "a second outcome would come before it"
    tokens = []
    for outcome in outcomes:
        assert (outcome.status, outcome.attempt, outcome.reward) == ("completed", 2, 1.0), outcome.error
        (segment,) = outcome.trajectory.segments
        tokens += segment.logprobs[segment.loss_mask == 1].tolist()
    expected = [-float(number) for number in (lost + 1, lost + 2) for _ in sampled[number - 1]]
    assert sorted(tokens) == sorted(expected), "those of the second attempts, each once, and no lost ones"
    assert {each.job_id for each in failed} == once
    for outcome in failed:
        assert (outcome.status, outcome.cause, outcome.reward) == ("failed", "node", None), outcome.error
        assert outcome.trajectory is None
