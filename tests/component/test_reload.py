from __future__ import annotations

import logging
import math
import os
import signal

import msgspec
import pytest
import trio

from prorl_trio.config import (
    AdmissionConfig,
    AgentConfig,
    BackendConfig,
    BudgetConfig,
    HealthConfig,
    ListenConfig,
    LoadConfig,
    ModelConfig,
    MonitoringConfig,
    NodeConfig,
    SandboxConfig,
    StagesConfig,
    load_config,
)
from prorl_trio.config.node import LIVE
from prorl_trio.edges.auth import Door
from prorl_trio.node import descriptors
from prorl_trio.node import serve as reload_module
from prorl_trio.node.core import open_node
from prorl_trio.node.serve import plan_reload, serve_reloads
from prorl_trio.testing.fake_engine import FakeEngine, open_look_alike
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.backends import AddBackend
from prorl_trio.types.errors import ConfigError

OLD = NodeConfig(model=ModelConfig(path="/m"), listen=ListenConfig(token="hush"))


pytestmark = pytest.mark.timeout(30)


def new(**fields):
    return NodeConfig(**{"model": OLD.model, "listen": OLD.listen, **fields})


async def test_what_can_change_live_is_taken_over_and_the_rest_is_named():
    plan = plan_reload(
        OLD,
        new(
            stages=StagesConfig(run_workers=99),
            budgets=BudgetConfig(run_s=7.0),
            monitoring=MonitoringConfig(stall_dump_after_s=2.0),
            drain_timeout_s=5.0,
            listen=ListenConfig(token="psst", port=1),
        ),
    )
    assert [change.path for change in plan.live] == [
        "listen.token",
        "stages.run_workers",
        "budgets.run_s",
        "monitoring.stall_dump_after_s",
        "drain_timeout_s",
    ]
    assert str(plan.live[1]) == "stages.run_workers: 32 -> 99"
    assert [change.path for change in plan.fixed] == ["listen.port"]
    assert plan.config == new(
        stages=StagesConfig(run_workers=99),
        budgets=BudgetConfig(run_s=7.0),
        monitoring=MonitoringConfig(stall_dump_after_s=2.0),
        drain_timeout_s=5.0,
        listen=ListenConfig(token="psst"),
    )
    assert str(plan.live[0]) == "listen.token (not shown)"


async def test_the_same_file_changes_nothing():
    plan = plan_reload(OLD, new())
    assert (plan.live, plan.fixed, plan.config) == ([], [], OLD)


@pytest.mark.parametrize(
    "fields",
    [
        {"stages": StagesConfig(run_workers=0)},
        {"stages": StagesConfig(ready_queue=0)},
        {"stages": StagesConfig(run_workers=3_000_000)},
        {"stages": StagesConfig(init_queue=10**20)},
        {"admission": AdmissionConfig(max_live=10**20)},
        {"agent": AgentConfig(tool_timeout_s=math.inf)},
        {"stuck_after_s": -1.0},
        {"stuck_after_s": math.nan},
    ],
)
async def test_what_cannot_be_used_is_refused_as_a_whole(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}"):
        plan_reload(OLD, new(drain_timeout_s=1.0, **fields))


async def test_more_workers_than_there_are_descriptors_for_are_refused(monkeypatch):
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _which: (1024, 1024))
    with pytest.raises(ConfigError, match=r"^stages.run_workers: .* the limit is 1024"):
        plan_reload(OLD, new(stages=StagesConfig(run_workers=1_000)))


async def test_every_live_field_exists():
    for path in LIVE:
        part = OLD
        for name in path.split("."):
            part = getattr(part, name)


class Node:
    def __init__(self):
        self.config, self.applied = OLD, trio.Event()

    def apply(self, config):
        self.config = config
        self.applied.set()


class Said(logging.Handler):
    """What was logged; somebody may wait for it."""

    def __init__(self):
        super().__init__()
        self.lines, self._more = [], trio.lowlevel.ParkingLot()

    def emit(self, record):
        self.lines.append(record.getMessage())
        self._more.unpark_all()

    async def wait(self, text):
        while not any(text in line for line in self.lines):
            await self._more.park()


@pytest.fixture
def said(caplog):
    handler = Said()
    caplog.set_level(logging.INFO)
    reload_module.logger.addHandler(handler)
    yield handler
    reload_module.logger.removeHandler(handler)


async def test_a_hangup_reads_the_file_again(tmp_path, said):
    path = tmp_path / "node.toml"
    head = '[model]\npath = "/m"\n[listen]\ntoken = "hush"\n'
    node, faults = Node(), []

    def load():
        if faults:
            raise faults.pop()
        return load_config(path)

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_reloads, load, lambda: node.config, node.apply, Door(b"hush"))

        path.write_text("drain_timeout_s = 3.0\n" + head + "port = 9\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await node.applied.wait()
        assert (node.config.drain_timeout_s, node.config.listen.port) == (3.0, OLD.listen.port)
        await said.wait("need a restart, and stay: listen.port: 8700 -> 9")
        assert "reload: drain_timeout_s: 60.0 -> 3.0" in said.lines

        path.write_text(head + "nonsense = 1\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await said.wait("the configuration stays as it is")
        assert "nonsense" in said.lines[-1]
        assert node.config.drain_timeout_s == 3.0

        said.lines.clear()
        faults.append(OSError(5, "Input/output error", str(path)))
        os.kill(os.getpid(), signal.SIGHUP)
        await said.wait("the configuration stays as it is: [Errno 5] Input/output error")

        path.write_text("drain_timeout_s = 3.0\n" + head)
        os.kill(os.getpid(), signal.SIGHUP)
        await said.wait("nothing has changed that can change live")
        nursery.cancel_scope.cancel()
    assert "hush" not in str(said.lines)


async def test_a_running_node_has_other_workers_and_limits_at_once(tmp_path):
    make_tiny_model(tmp_path)
    config = NodeConfig(model=ModelConfig(path=str(tmp_path)), sandbox=SandboxConfig(provider="process", max_warm=0))
    wanted = msgspec.structs.replace(
        config, stages=StagesConfig(init_workers=1, run_workers=50, eval_workers=2, init_queue=3), stuck_after_s=1.0
    )
    async with open_node(config) as node:
        node.apply(plan_reload(node.config, wanted).config)
        assert node.config == wanted
        stages = node.statistics()["pipeline"]["stages"]
        assert {name: stage["workers"] for name, stage in stages.items()} == {"init": 1, "run": 50, "eval": 2}
        assert stages["init"]["queue_capacity"] == 3


class WatchedEngine(FakeEngine):
    """Says that it was asked for a path."""

    def __init__(self, *options):
        super().__init__(*options)
        self.asked = {}

    async def _answer(self, call):
        if call.path in self.asked:
            self.asked[call.path].set()
        return await super()._answer(call)


async def test_a_running_node_looks_at_its_backends_as_the_new_file_says(tmp_path):
    make_tiny_model(tmp_path)
    async with open_look_alike(WatchedEngine, None, None, 0) as engine:
        off = BackendConfig(urls=[engine.url], health=HealthConfig(interval_s=0), load=LoadConfig(interval_s=0))
        sandbox = SandboxConfig(provider="process", max_warm=0)
        config = NodeConfig(model=ModelConfig(path=str(tmp_path)), sandbox=sandbox, backends=off)
        async with open_node(config) as node:
            for name, policy, path in (
                ("load", LoadConfig(interval_s=0.01), "/metrics"),
                ("health", HealthConfig(interval_s=0.01), "/v1/models"),
            ):
                asked = engine.asked[path] = trio.Event()
                backends = msgspec.structs.replace(node.config.backends, **{name: policy})
                plan = plan_reload(node.config, msgspec.structs.replace(node.config, backends=backends))
                assert [str(change) for change in plan.live] == [f"backends.{name}.interval_s: 0 -> 0.01"]
                assert plan.fixed == []
                node.apply(plan.config)
                with trio.fail_after(20):
                    await asked.wait()


async def test_a_running_node_takes_the_backends_of_the_new_file_and_leaves_those_that_it_lacks(tmp_path):
    make_tiny_model(tmp_path)
    async with (
        open_look_alike(FakeEngine, None, None, 0) as former,
        open_look_alike(FakeEngine, None, None, 0) as added,
        open_look_alike(FakeEngine, None, None, 0) as new_one,
    ):
        sandbox = SandboxConfig(provider="process", max_warm=0)
        urls = BackendConfig(urls=[former.url])
        config = NodeConfig(model=ModelConfig(path=str(tmp_path)), sandbox=sandbox, backends=urls)

        def reloaded(*urls):
            backends = msgspec.structs.replace(node.config.backends, urls=list(urls))
            return plan_reload(node.config, msgspec.structs.replace(node.config, backends=backends))

        async with open_node(config) as node:
            await node.operate(AddBackend(url=added.url))
            with pytest.raises(ConfigError, match=r"backends.urls: .* is there twice"):
                reloaded(new_one.url, f"{new_one.url}/")
            plan = reloaded(f"{new_one.url}/")
            assert plan.fixed == []
            node.apply(plan.config)
            with trio.fail_after(20):
                await trio.lowlevel.checkpoint()
                while [each.url for each in node.backends.list()] != [added.url, new_one.url]:
                    await trio.sleep(0.01)
            assert node.backends.urls() == (added.url, new_one.url), "what was added by hand stays"
            assert node.config.backends.weighted_urls == {new_one.url: 1.0}
