"""The wall clock jumps by days, either way: no budget, deadline, heartbeat or retry notices."""

from __future__ import annotations

import ast
import datetime
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import trio

import prorl_trio
from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.session import Accepted, Rejected
from prorl_trio.agent.context import Resources
from prorl_trio.client import connect
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.ledger import LedgerLimits, NewJob, open_ledger
from prorl_trio.pipeline.job import Job
from prorl_trio.pipeline.pipeline import open_pipeline
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.types.models import Budgets, JobSpec, TaskInstance
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN, open_service
from support.skips import because
from support.soak import open_world
from support.soak.trainer import soak_spec

pytestmark = pytest.mark.timeout(60)

CHECKOUT = Path(prorl_trio.__file__).parents[1]
PACKAGES = ["prorl_trio", "sandbox_daemon", "ipc", "launch"]
DAY_S = 86_400.0
MIB = 1024 * 1024

DATES_FOR_PEOPLE = {
    "prorl_trio/observe/logs.py": "when a line was logged",
    "prorl_trio/observe/telemetry.py": "spans carry the time of day",
    "prorl_trio/edges/http1.py": "the Date of an answer",
    "prorl_trio/edges/rest/events.py": "when an event happened",
    "prorl_trio/edges/gateway/wire.py": "OpenAI's answers say when they were made",
    "prorl_trio/chat/template.py": "templates may print the date; a dialogue keeps the one at which it began",
    "launch/prorl_launch/abandoned.py": "how old the folder of a killed process is",
    "launch/prorl_launch/image_store.py": "when an image was made",
    "launch/prorl_launch/image_commands.py": "how long an image was not used",
    "launch/prorl_launch/learning/train.py": "how long a run has taken since its folder was made, in another process",
    "prorl_trio/node/drain.py": "Slurm says by the time of day when an allocation ends",
    "prorl_trio/integrations/trl/async_worker.py": "TRL's own field, when a row was made",
    "prorl_trio/sandbox/images/compose.py": "when an image was made",
    "prorl_trio/sandbox/images/layers.py": "when a layer was made, and how old the files of a killed process are",
    "prorl_trio/sandbox/images/pull.py": "when an image and its layers were pulled",
    "prorl_trio/sandbox/images/registry.py": "Retry-After may be a date, and holds for all processes of the machine",
    "prorl_trio/sandbox/images/removal.py": "which image was used last, over processes and restarts",
}
"""Who may look at the wall clock, and what for."""


def wall_clock_calls(path):
    """Line numbers of calls of the wall clock."""
    names = {("time", "time"), ("time", "time_ns"), ("time", "localtime"), ("time", "gmtime")}
    names |= {("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            last = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if (last, node.attr) in names:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for alias in node.names if alias.name in ("time", "time_ns"))


def test_only_dates_for_people_come_from_the_wall_clock():
    found = {
        str(path.relative_to(CHECKOUT))
        for package in PACKAGES
        for path in (CHECKOUT / package).rglob("*.py")
        if list(wall_clock_calls(path))
    }
    assert found <= DATES_FOR_PEOPLE.keys(), "budgets and deadlines need time.monotonic() or trio.current_time()"


@pytest.fixture
def jumping_clock(monkeypatch):
    """Each look at the wall clock finds it days away from the last one, before or after."""
    real, looks = time.time, itertools.count()

    def jump():
        return real() + (-1) ** next(looks) * 3 * DAY_S

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(jump(), tz)

    monkeypatch.setattr(time, "time", jump)
    monkeypatch.setattr(time, "time_ns", lambda: int(jump() * 1e9))
    monkeypatch.setattr(datetime, "datetime", Jumping)


class Sleeps(AgentHandler):
    """RUN takes as many seconds as the instance says."""

    name = "sleeps"

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return SandboxSpec()

    async def run(self, context):
        await trio.sleep(context.spec.instance.payload["s"])

    async def eval(self, context):
        await trio.lowlevel.checkpoint()
        return Evaluation(reward=1.0, details={})


class Sink:
    session_id = "s"

    def __init__(self):
        self.outcomes = {}

    def deliver(self, outcome):
        self.outcomes[outcome.job_id] = outcome

    def report(self, job_id, status, detail):
        pass


async def test_budgets_do_not_notice_a_jump(jumping_clock):
    resources = Resources(
        config=NodeConfig(model=ModelConfig(path="unused")), chat_format=None, backends=None, scorers=None
    )
    sink = Sink()

    def job(name, sleep_s, **budgets):
        instance = TaskInstance(instance_id="i", handler="sleeps", payload={"s": sleep_s})
        return Job(JobSpec(job_id=name, instance=instance, budgets=Budgets(**budgets)), Sleeps(), resources, sink)

    with trio.fail_after(30):
        async with (
            open_sandbox_host(FakeProvider()) as host,
            open_single_nursery() as service,
            open_pipeline(resources, host, service) as pipeline,
        ):
            jobs = [
                job("stays", 0.3, run_s=20, total_s=20),
                job("ends", 3600, run_s=0.3),
                job("all", 3600, total_s=0.3),
            ]
            for one in jobs:
                pipeline.submit(one)
            await pipeline.wait_idle()
    ends = {name: (outcome.status, outcome.error_code) for name, outcome in sink.outcomes.items()}
    assert ends["stays"][0] == "completed"
    assert ends["ends"] == ("timed_out", "budget_run")
    assert ends["all"] == ("timed_out", "budget_total")
    assert all(0 <= outcome.timing.run_s < 30 for outcome in sink.outcomes.values())


async def test_sessions_and_heartbeats_do_not_notice_a_jump(jumping_clock):
    heartbeats = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 2.0}
    with trio.fail_after(30):
        node = FakeNode()
        async with open_service(node, **heartbeats) as service, connect(service.url, TOKEN, **heartbeats) as client:
            link = client._state.link
            await client.submit([make_spec("a"), make_spec("b")])
            await trio.sleep(0.3)
            node.finish("a", make_outcome(make_spec("a")))
            node.finish("b", make_outcome(make_spec("b")))
            assert [outcome.job_id async for outcome in client.results(2)] == ["a", "b"]
            assert client._state.link is link


async def test_what_was_acknowledged_is_not_forgotten_before_its_time(jumping_clock, tmp_path):
    limits = LedgerLimits(log_bytes=MIB, reserve_bytes=MIB, max_bytes=16 * MIB, tombstone_s=DAY_S)
    async with open_ledger(tmp_path, limits) as ledger:
        await ledger.open_session("s", 0)
        names = [f"job-{n}" for n in range(8)]
        for cursor, name in enumerate(names, 1):
            await ledger.accept("s", [NewJob(job_id=name, fingerprint=b"f", spec=b"spec")])
            await ledger.finish("s", name, 1, cursor, [b"outcome"])
            await ledger.acknowledge("s", cursor)
            assert (await ledger.lookup(names)).keys() == set(names[:cursor])


JUMPING_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    static unsigned looks;
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (clock == CLOCK_REALTIME && !failed)
        now->tv_sec += (int)(__atomic_fetch_add(&looks, 1, __ATOMIC_RELAXED) % 3 - 1) * 3600;
    return failed;
}
"""
"""An hour behind, right, an hour ahead, in turn."""


@pytest.fixture
def preloaded(tmp_path, monkeypatch):
    """Processes started from here have the jumping clock."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip(because("there is no C compiler", "apt-get install gcc libc6-dev"))
    library = tmp_path / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=JUMPING_CLOCK, text=True, check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    look = subprocess.run([sys.executable, "-c", "import time; print(time.time(), time.time())"], capture_output=True)
    first, second = map(float, look.stdout.split())
    assert abs(second - first) > 1800


@pytest.mark.slow
async def test_a_whole_node_does_not_notice_a_jump(preloaded):
    """Nothing times out, and what was acknowledged is not forgotten before its time."""
    jobs = [soak_spec(f"job-{n}") for n in range(4)]
    with tempfile.TemporaryDirectory(prefix="clock-") as folder, trio.fail_after(50):
        config = {"sandbox": {"provider": "process", "max_warm": 0}, "ledger": {"tombstone_s": 1800.0}}
        async with (
            open_world(Path(folder), jobs=0, **config) as world,
            connect(world.url, world.token, connect_timeout_s=40) as client,
        ):
            assert all(isinstance(answer, Accepted) for answer in await client.submit(jobs))
            outcomes = [outcome async for outcome in client.results(len(jobs))]
            client.acknowledge(client.cursor)
            await client.status()
            again = await client.submit(jobs)
    assert [(outcome.status, outcome.attempt) for outcome in outcomes] == [("completed", 1)] * len(jobs)
    for outcome in outcomes:
        assert all(0 <= spent_s < 50 for spent_s in msgspec.structs.astuple(outcome.timing))
    assert [answer.code for answer in again if isinstance(answer, Rejected)] == ["already_delivered"] * len(jobs)
