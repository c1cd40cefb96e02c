"""A fleet of real nodes, started by Slurm: jobs go in at one client, each outcome comes out once, and nothing stays."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio

from prorl_launch.paths import checkout_dir, engine_python, model_dir
from prorl_launch.vllm import default_dtype, vllm_env
from prorl_trio.client import connect
from prorl_trio.testing.tiny_model import make_tiny_model
from support.engine_program import calculation, open_engine
from support.quiet_clock import stretched, wait_until
from support.remains import inside, left_after, marked
from support.skips import because
from support.slurm_cluster import NODES
from support.slurm_fleet import LIMIT_S, SlurmFleet, math_job, once_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENGINE = checkout_dir() / "tests/support/engine_program.py"
ENGINE_PORT = 18000
DRAIN_S = 60
REAL_JOBS = 4
OPEN = 4
"""Sandboxes that are open when their fleet ends."""
LONG_S = 600.0


@pytest.fixture
def fleet(slurm):
    made = SlurmFleet(slurm)
    yield made
    made.remove()


def completed_by(report):
    return report.get("pipeline", {}).get("outcomes", {}).get("completed", 0)


async def deliver(fleet, count, nodes):
    """Send jobs through the fleet; return how often each outcome came. All these nodes had some of them."""
    seen = Counter()
    async with connect(fleet=fleet.folder, connect_timeout_s=stretched(30.0)) as client:
        with trio.fail_after(stretched(30.0)):
            while set((await client.status())["members"]) != set(nodes):  # a few jobs are given to those that are there
                await trio.sleep(0.1)
        await client.submit([math_job(f"job-{number}") for number in range(count)])
        async for outcome in client.results(count):
            seen[outcome.job_id] += 1
            assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
        with trio.move_on_after(1):
            async for outcome in client.results(follow=True):
                seen[outcome.job_id] += 1
        with trio.fail_after(stretched(30.0)):
            while True:  # the head asks its members every few seconds
                reports = (await client.status())["members"]
                done = {name: completed_by(report) for name, report in reports.items()}
                if sum(done.values()) >= count:
                    break
                await trio.sleep(0.2)
    assert set(done) == set(nodes)
    assert min(done.values()) > 0, f"the work was not spread: {done}"
    return seen


def own_engines(fleet, **changes):
    """Return the options of `up` that start engines with the nodes, at ports that are free."""
    make_tiny_model(fleet.model)
    fleet.write_config(**changes)
    return ["--engine", f"exec {sys.executable} {ENGINE} $PRORL_ENGINE_PORT {fleet.model}"]


def require_names(slurm):
    if not slurm.separate:
        pytest.skip(because("no networks can be made here, and so no machines with names", "run it where root may"))


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
    require_names(fleet.slurm)
    where = ["--engine-nodes", "1", "--engine-sbatch=--comment=engines"]
    (node,) = (await run_whole(fleet, 1, 2, *own_engines(fleet), *where)).values()
    assert node["host"] == "n1"


async def test_of_sandboxes_that_are_open_when_a_fleet_ends_nothing_is_left(fleet):
    in_thread = trio.to_thread.run_sync
    async with open_engine(0, fleet.model, lambda: calculation(LONG_S)) as port:
        fleet.write_config([f"http://{fleet.slurm.address()}:{port}"])
        await in_thread(functools.partial(fleet.up, 2))
        await in_thread(fleet.wait_up, 2)
        async with connect(fleet=fleet.folder, connect_timeout_s=stretched(30.0)) as client:
            await client.submit([math_job(f"job-{number}") for number in range(OPEN)])
            mounted = lambda: [line for line in inside(fleet.places) if "mounted" in line]  # noqa: E731
            await in_thread(wait_until, lambda: len(mounted()) >= OPEN, "the sandboxes are open", 300.0, fleet.report)
            await in_thread(functools.partial(fleet.command, "down", "--timeout-s", "900"))
            await in_thread(fleet.assert_nothing_left)


@pytest.fixture
def fleets(slurm):
    made = [SlurmFleet(slurm), SlurmFleet(slurm)]
    yield made
    for fleet in made:
        fleet.remove()


async def test_two_fleets_of_one_user_on_one_machine_do_not_touch_each_others_things(fleets):
    """Their node.toml is the same, but for the model's folder."""
    require_names(fleets[0].slurm)
    in_thread = trio.to_thread.run_sync
    ports, nodes = [], []
    shared = fleets[0].shared
    for fleet in fleets:
        listen = {"endpoint_file": f"{shared}/endpoint.json", "unix_socket": "/tmp/mine/socket"}
        options = own_engines(fleet, node_id="mine", listen=listen)
        await in_thread(functools.partial(fleet.up, 1, "--nodelist=n1", *options))
    for fleet in fleets:
        nodes.append(await in_thread(fleet.wait_up, 1))
        (told,) = fleet.folder.glob("slurm/engines-*/n1")
        ports.append(told.read_text())
    assert ports[0] != ports[1]
    assert [[*told] for told in nodes] == [["mine-0"]] * 2
    one, other = fleets
    async with connect(fleet=other.folder, connect_timeout_s=stretched(30.0)) as client:
        before = {line.split()[0] for line in marked(other.mark)}
        assert await deliver(one, 4, nodes[0]) == once_each([f"job-{number}" for number in range(4)])
        await in_thread(functools.partial(one.slurm.said, "scancel", "--full", "--signal=KILL", one.job))
        await in_thread(functools.partial(one.command, "down"))
        left = await in_thread(left_after, one.mark, [], LIMIT_S)
        assert left[0] == []
        assert not one.entries()
        assert before <= {line.split()[0] for line in marked(other.mark)}
        assert len(list(other.places[0].glob("prorl-*"))) == 3, "those of a node, of an engine and of the head"
        await client.submit([math_job(f"job-{number}") for number in range(4)])
        assert sorted([outcome.job_id async for outcome in client.results(4)]) == [f"job-{n}" for n in range(4)]
    await in_thread(functools.partial(other.command, "down", "--drain-s", str(DRAIN_S), "--timeout-s", "900"))
    await in_thread(other.assert_nothing_left)


async def test_an_engine_does_not_take_the_port_of_another_fleets(fleets):
    """Tell both the same port: the second fleet's node says so, and does not use the first one's engine."""
    require_names(fleets[0].slurm)
    in_thread = trio.to_thread.run_sync
    for fleet in fleets:
        options = [*own_engines(fleet), "--engine-port", str(ENGINE_PORT)]
        await in_thread(functools.partial(fleet.up, 1, "--nodelist=n1", *options))
        if fleet is fleets[0]:
            await in_thread(fleet.wait_up, 1)
    told = lambda: "there is no engine for this node: port 18000 of n1 is in use" in fleets[1].log()  # noqa: E731
    await in_thread(wait_until, told, "the other says so", 300.0, fleets[1].report)
    await in_thread(functools.partial(wait_until, lambda: not fleets[1].live(), "it has ended", 120.0))
    assert not fleets[1].entries()
    for fleet in fleets:
        await in_thread(functools.partial(fleet.command, "down"))
    await in_thread(fleets[0].assert_nothing_left)


@pytest.mark.soak
@pytest.mark.skipif(not engine_python().exists(), reason=because("there is no vLLM", "make engine"))
async def test_a_real_vllm_beside_a_node(fleet):
    """Slurm starts it with the node and ends it with the fleet, and its tokens and log-probabilities come through."""
    require_names(fleet.slurm)
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
