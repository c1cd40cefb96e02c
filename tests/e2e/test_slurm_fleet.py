"""A fleet of real nodes, started by Slurm: jobs go in at one client, each outcome comes out once, and nothing stays."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio

from launch.paths import checkout_dir, engine_python, model_dir
from launch.vllm import default_dtype, vllm_env
from prorl_trio.client import connect
from prorl_trio.testing.tiny_model import make_tiny_model
from support.engine_program import open_engine
from support.quiet_clock import stretched
from support.skips import because
from support.slurm_cluster import NODES
from support.slurm_fleet import SlurmFleet, math_job, once_each

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

ENGINE = checkout_dir() / "tests/support/engine_program.py"
ENGINE_PORT = 18000
DRAIN_S = 60
REAL_JOBS = 4


@pytest.fixture
def fleet(slurm):
    made = SlurmFleet(slurm)
    yield made
    made.remove()


async def deliver(fleet, count, nodes):
    """Send jobs through the fleet; return how often each outcome came. All these nodes had some of them."""
    seen = Counter()
    async with connect(fleet=fleet.folder, connect_timeout_s=stretched(30.0)) as client:
        await client.submit([math_job(f"job-{number}") for number in range(count)])
        async for outcome in client.results(count):
            seen[outcome.job_id] += 1
            assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
        with trio.move_on_after(1):
            async for outcome in client.results(follow=True):
                seen[outcome.job_id] += 1
        reports = (await client.status())["nodes"]
    done = {name: report["pipeline"]["outcomes"]["completed"] for name, report in reports.items()}
    assert set(done) == set(nodes)
    assert min(done.values()) > 0, f"the work was not spread: {done}"
    return seen


def own_engines(fleet):
    """Return the options of `up` that start engines with the nodes."""
    make_tiny_model(fleet.model)
    fleet.write_config()
    command = f"exec {sys.executable} {ENGINE} {ENGINE_PORT} {fleet.model}"
    return ["--engine", command, "--engine-port", str(ENGINE_PORT)]


@asynccontextmanager
async def engines(fleet):
    """Yield the options of `up` for engines beside the nodes; where machines have no names, one runs here."""
    if fleet.slurm.separate:
        yield own_engines(fleet)
        return
    async with open_engine(0, fleet.model) as port:
        fleet.write_config([f"http://127.0.0.1:{port}"])
        yield []


async def run_whole(fleet, nodes, count, *options):
    """Start a fleet, have all jobs done, and end it; return what `status` said of its nodes."""
    in_thread = trio.to_thread.run_sync
    await in_thread(functools.partial(fleet.up, nodes, *options))
    told = await in_thread(fleet.wait_up, nodes)
    assert await deliver(fleet, count, told) == once_each([f"job-{number}" for number in range(count)])
    await in_thread(functools.partial(fleet.command, "down", "--drain-s", str(DRAIN_S), "--timeout-s", "900"))
    await in_thread(fleet.assert_nothing_left)
    return told


CASES = [
    ("linuxproc", 8),
    pytest.param("linuxproc", 200, marks=pytest.mark.soak),
    pytest.param("cgroup", 8, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("slurm", "count"), CASES, indirect=["slurm"])
async def test_each_outcome_comes_once_and_nothing_stays(fleet, count):
    async with engines(fleet) as options:
        nodes = await run_whole(fleet, NODES, count, *options)
    assert all(entry["slurm"]["end_time"] > 0 for entry in nodes.values())
    if fleet.slurm.separate:
        assert sorted(entry["host"] for entry in nodes.values()) == ["n1", "n2", "n3", "n4"]


async def test_engines_may_have_machines_of_their_own(fleet):
    if not fleet.slurm.separate:
        pytest.skip(because("no networks can be made here, and so no machines with names", "run it where root may"))
    where = ["--engine-nodes", "1", "--engine-sbatch=--comment=engines"]
    (node,) = (await run_whole(fleet, 1, 2, *own_engines(fleet), *where)).values()
    assert node["host"] == "n1"


@pytest.mark.soak
@pytest.mark.skipif(not engine_python().exists(), reason=because("there is no vLLM", "make engine"))
async def test_a_real_vllm_beside_a_node(fleet):
    """Slurm starts it with the node and ends it with the fleet, and its tokens and log-probabilities come through."""
    if not fleet.slurm.separate:
        pytest.skip(because("no networks can be made here, and so no machines with names", "run it where root may"))
    fleet.model = model_dir()
    fleet.write_config()
    settings = " ".join(f"{name}={value}" for name, value in vllm_env().items() if name != "PATH")
    serve = f"{engine_python()} -m vllm.entrypoints.openai.api_server --model {fleet.model} --enforce-eager"
    where = f"--host 0.0.0.0 --port {ENGINE_PORT} --max-model-len 2048 --dtype {default_dtype()}"
    in_thread = trio.to_thread.run_sync
    command = f"exec env {settings} {serve} {where}"
    await in_thread(functools.partial(fleet.up, 1, "--engine", command, "--engine-port", str(ENGINE_PORT)))
    await in_thread(fleet.wait_up, 1)
    async with connect(fleet=fleet.folder, connect_timeout_s=stretched(30.0)) as client:
        await client.submit([math_job(f"job-{number}") for number in range(REAL_JOBS)])
        outcomes = [outcome.detached() async for outcome in client.results(REAL_JOBS)]
    assert len({outcome.job_id for outcome in outcomes}) == REAL_JOBS
    for outcome in outcomes:
        assert outcome.status == "completed", outcome.error
        assert outcome.reward in (0.0, 1.0)
        for segment in outcome.trajectory.segments:
            sampled = segment.loss_mask == 1
            assert sampled.sum() > 0
            assert (segment.logprobs[sampled] < 0).any()
    await in_thread(functools.partial(fleet.command, "down", "--drain-s", str(DRAIN_S), "--timeout-s", "900"))
    await in_thread(fleet.assert_nothing_left)
