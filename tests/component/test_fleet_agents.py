"""Agents elsewhere work on rollouts of a fleet as on those of one node: the head asks the node that has the job."""

from __future__ import annotations

import pytest
import trio

from prorl_trio.types.errors import NoAgentWanted, UnknownJob
from prorl_trio.types.programs import AgentOpened, FinishAgent, OpenAgent
from support.fake_fleet import open_fake_fleet, until
from support.fake_node import make_spec
from support.fleet_head import head_quickly, open_client

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    head_quickly(monkeypatch)


def opened(key):
    return AgentOpened(
        urls={"openai": "http://node/v1"}, key=key, model="policy", env={}, messages=[], context_tokens=1000
    )


async def test_the_node_that_has_the_job_is_asked_and_another_one_when_that_is_lost(tmp_path):
    folder = tmp_path / "f"
    async with open_fake_fleet(folder, "a") as fleet, open_client(folder) as (client, _head):
        await client.submit([make_spec("j")])
        await until(lambda: "j" in fleet["a"].node.live)
        with pytest.raises(NoAgentWanted):
            await client.operate(OpenAgent(job_id="j", wait_s=0.1))
        with fleet["a"].node.external_agents.offered("j", opened("first"), []):
            assert (await client.operate(OpenAgent(job_id="j"))).key == "first"
        await fleet.add("b")
        async with trio.open_nursery() as nursery:
            answers = []

            async def ask():
                answers.append(await client.operate(OpenAgent(job_id="j", wait_s=30)))

            nursery.start_soon(ask)
            await fleet["a"].kill()
            await until(lambda: "j" in fleet["b"].node.live)
            offering = fleet["b"].node.external_agents.offered("j", opened("second"), [])
            with offering as offer:
                await until(lambda: answers)
                assert answers[0].key == "second"
                with pytest.raises(NoAgentWanted, match="open its agent again"):
                    await client.operate(FinishAgent(job_id="j", key="first"))
                await client.operate(FinishAgent(job_id="j", key="second", reward=1.0))
                assert offer.finish.reward == 1.0
        with pytest.raises(UnknownJob):
            await client.operate(OpenAgent(job_id="never"))
