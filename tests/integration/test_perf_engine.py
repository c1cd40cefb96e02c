"""`perf.engine` on a whole node, with a look-alike of vLLM."""

from __future__ import annotations

import os
from itertools import count

import pytest
import trio

from perf.engine import Scale, measure, report_of
from prorl_launch.node import NodeProcess
from prorl_launch.vllm import VllmProcess
from prorl_trio.client import connect
from prorl_trio.testing.fake_engine import FakeEngineConfig
from support.quick_node import open_quick_node

pytestmark = [pytest.mark.alone, pytest.mark.timeout(90)]

SMALL = Scale(questions=3, rollouts=2, slots=2, rounds=1, max_turns=2, max_output_tokens=64)


async def test_a_run_and_its_replay_make_the_same_calls():
    turns = count()
    with trio.fail_after(80):
        async with open_quick_node(lambda _: "It is 7." if next(turns) % 2 else "Let me think.") as node:
            async with connect(node.url, node.token) as client:
                listed = await client.list_backends()
            engine = VllmProcess(url=listed.urls[0], pid=os.getpid())
            process = NodeProcess(url=node.url, token=node.token, pid=os.getpid())
            rounds = await measure(engine, process, FakeEngineConfig().model, SMALL)
    (measured,) = rounds
    assert len(measured.run) == len(measured.bare) == 6
    for run, bare in zip(measured.run, measured.bare, strict=True):
        assert [call.tokens for call in run.calls] == [call.tokens for call in bare.calls]
    assert sum(len(run.calls) for run in measured.run) > 6, "several turns"
    assert measured.run_cpu_s["node"] > 0
    metrics = report_of(rounds, SMALL).metrics()
    assert metrics["engine.rollouts"] == 6
    assert 0 < metrics["engine.share"] < 5
    assert metrics["engine.slots.calls"] > 0
