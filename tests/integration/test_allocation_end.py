"""A node in an allocation of Slurm's ends by itself before that does, and uses the time that there is."""

from __future__ import annotations

import os
import signal
import time
from contextlib import asynccontextmanager

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import BackendConfig, ListenConfig, ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.config.node import FleetConfig
from prorl_trio.node.drain import EndOfTime
from prorl_trio.node.serve import serve_node
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("no_deaths")]

TOKEN = "a-token-for-tests-0123456789"
HOUR_S = 3600


@pytest.fixture
def no_deaths():
    """A signal that comes when the node does not listen must not end the tests."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_a_node_drains_and_ends_before_its_allocation(tmp_path, monkeypatch, caplog):
    make_tiny_model(tmp_path / "model")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3))
    config = NodeConfig(
        model=ModelConfig(path=str(tmp_path / "model")),
        listen=ListenConfig(port=0, token=TOKEN),
        fleet=FleetConfig(dir=str(tmp_path / "fleet"), end_margin_s=1.0),
        sandbox=SandboxConfig(provider="process"),
    )
    with trio.fail_after(110):
        assert await serve_node(config) is True
    assert "the node's allocation ends" in caplog.text
    assert os.listdir(tmp_path / "fleet") == []


class Held:
    """A node whose allocation ends in an hour, with a job that its engine holds: `drain_timeout_s` is over at once."""

    def __init__(self, near, engine, client):
        self.near, self.engine, self.client = near, engine, client
        self.clean = None
        """The answer of `serve_node`."""

    async def draining(self):
        while not (await self.client.status())["draining"]:
            await trio.sleep(0.02)

    async def live(self):
        return len((await self.client.status())["jobs"])

    async def outcome(self):
        (outcome,) = [outcome async for outcome in self.client.results(1)]
        return outcome


@asynccontextmanager
async def open_held(tmp_path, monkeypatch):
    """Yield such a node; on leaving, wait for its end. `near` is the event by which little time is left."""
    near = trio.Event()

    async def wait_near(_end):
        await near.wait()

    monkeypatch.setattr(EndOfTime, "wait_near", wait_near)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + HOUR_S))
    tiny = make_tiny_model(tmp_path / "model")
    answer = tiny.turn(r"\boxed{42}")
    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    script = lambda _: (answer, [-0.5] * len(answer), "stop")  # noqa: E731 - an engine that knows one answer
    with trio.fail_after(110):
        async with open_fake_engine(script=script, config=engine_config) as engine, trio.open_nursery() as nursery:
            config = NodeConfig(
                model=ModelConfig(path=str(tmp_path / "model")),
                listen=ListenConfig(port=0, token=TOKEN),
                backends=BackendConfig(urls=(engine.url,), required=True),
                sandbox=SandboxConfig(provider="process", max_warm=0),
                drain_timeout_s=0.0,
            )
            held = None

            async def serve(*, task_status):  # noqa: ASYNC128 - it passes it on
                clean = await serve_node(config, task_status=task_status)
                held.clean = clean

            host, port = await nursery.start(serve)
            engine.hold()
            async with connect(f"ws://{host}:{port}", TOKEN) as client:
                held = Held(near, engine, client)
                instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
                await client.submit(
                    [JobSpec(job_id="held", instance=instance, sampling=SamplingParams(max_output_tokens=50))]
                )
                await engine.wait_until(lambda stats: stats.running == 1)
                yield held


async def test_a_drain_that_the_end_began_lasts_until_it_and_the_warning_does_not_cut_it_short(
    tmp_path, monkeypatch, caplog
):
    async with open_held(tmp_path, monkeypatch) as held:
        held.near.set()
        await held.draining()
        os.kill(os.getpid(), signal.SIGTERM)
        while "SIGTERM" not in caplog.text:
            await trio.sleep(0.02)
        assert await held.live() == 1
        held.engine.release()
        assert (await held.outcome()).status == "completed"
    assert held.clean is True


async def test_a_drain_that_the_warning_began_lasts_until_the_end(tmp_path, monkeypatch):
    async with open_held(tmp_path, monkeypatch) as held:
        os.kill(os.getpid(), signal.SIGTERM)
        await held.draining()
        assert await held.live() == 1
        held.engine.release()
        assert (await held.outcome()).status == "completed"
    assert held.clean is True


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
async def test_a_person_can_cut_it_short(tmp_path, monkeypatch, caplog, numbers):
    async with open_held(tmp_path, monkeypatch) as held:
        held.near.set()
        await held.draining()
        for count, number in enumerate(numbers):
            os.kill(os.getpid(), number)
            while caplog.text.count(f"{number.name}:") <= count:
                await trio.sleep(0.02)
        assert (await held.outcome()).error_code == "shutdown"
    assert held.clean is False


async def test_ctrl_c_does_not_mean_the_whole_time_of_the_allocation(tmp_path, monkeypatch):
    async with open_held(tmp_path, monkeypatch) as held:
        os.kill(os.getpid(), signal.SIGINT)
        assert (await held.outcome()).error_code == "shutdown"
    assert held.clean is False
