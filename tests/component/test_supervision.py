"""No task that the node needs ends in silence: whichever returns or vanishes, the node ends, loudly, and says which."""

from __future__ import annotations

import errno
from functools import partial

import msgspec
import pytest
import trio

from prorl_ipc.nursery import is_cancelled, leaves, only_cancelled
from prorl_trio.config import NodeConfig
from prorl_trio.edges import serve as service_serve
from prorl_trio.edges.http1 import contain_errors
from prorl_trio.inference.pool.pool import ExpectedBackends
from prorl_trio.inference.pool.watch import PoolWatch
from prorl_trio.ledger.disk_ledger import DiskLedger
from prorl_trio.node import edges, serve
from prorl_trio.node.monitoring import Monitoring
from prorl_trio.node.serve import serve_node
from prorl_trio.pipeline import pipeline as pipeline_module
from prorl_trio.pipeline.job import Job
from prorl_trio.pipeline.pipeline import Pipeline
from prorl_trio.sandbox.host import SandboxHost
from prorl_trio.supervision import contained, service_task, vanished_task
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError, InternalError, SandboxUnavailable
from prorl_trio.types.models import Budgets

pytestmark = pytest.mark.timeout(60)

MIB = 1024 * 1024


async def stray_cancel():
    """Raise a `Cancelled` whose scope is left already, in a group, as a nursery of a library may."""
    strays = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as exc:
            strays.append(exc)
            raise
    raise BaseExceptionGroup("stray", strays)


# ---------------------------------------------------------------- what is a cancel


async def test_a_group_of_nothing_but_cancels_is_a_cancel():
    with pytest.RaisesGroup(trio.Cancelled) as caught:
        await stray_cancel()
    group = caught.value
    assert only_cancelled(group)
    assert only_cancelled(BaseExceptionGroup("outer", [group, *leaves(group)]))
    assert not only_cancelled(BaseExceptionGroup("mixed", [group, ValueError()]))
    assert not only_cancelled(KeyboardInterrupt())


async def test_whether_a_cancel_can_be_somebodys():
    assert not is_cancelled()
    with trio.CancelScope() as scope:
        scope.cancel()
        assert is_cancelled()
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
            assert not is_cancelled()
        await trio.lowlevel.checkpoint()


# ---------------------------------------------------------------- service tasks


async def returns():
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(("afn", "how"), [(returns, "returned"), (stray_cancel, "was cancelled by nobody")])
async def test_a_service_task_that_ends_early_is_a_bug_and_is_named(afn, how, caplog):
    with pytest.raises(InternalError, match=f"the service task 'the lamp' {how}") as caught:
        await service_task(afn, "the lamp")()
    assert str(caught.value) in caplog.text
    assert vanished_task() == "the lamp"


async def test_a_service_task_may_be_cancelled_and_return_when_it_was_told_to():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service_task(trio.sleep_forever, "a"))
        nursery.start_soon(service_task(returns, "b", may_return=True))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert vanished_task() == ""


class Fails:
    """A task that raises each of `errors` once, then runs until it is cancelled."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.runs = trio.Event()

    async def __call__(self, *, task_status=trio.TASK_STATUS_IGNORED):
        await trio.lowlevel.checkpoint()
        task_status.started()
        if self.errors:
            raise self.errors.pop(0)
        self.runs.set()
        await trio.sleep_forever()


FAILURES = (
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("can't start new thread"),
    MemoryError(),
    SandboxUnavailable("it ended"),
    ExceptionGroup("of a nursery", [ValueError(), OSError(errno.EAGAIN, "Try again")]),
)


@pytest.mark.parametrize("begin", ["start", "start_soon"])
async def test_a_service_task_starts_again_whatever_it_raises(autojump_clock, caplog, begin):
    lamp = Fails(*FAILURES)
    async with trio.open_nursery() as nursery:
        if begin == "start":
            await nursery.start(service_task(lamp, "the lamp"))
        else:
            nursery.start_soon(service_task(lamp, "the lamp"))
        await lamp.runs.wait()
        nursery.cancel_scope.cancel()
    assert caplog.text.count("the lamp failed, and starts again") == len(FAILURES)
    assert "starts again in 0.1 s: [Errno 24] Too many open files" in caplog.text
    assert "starts again in 0.2 s: [Errno 28] No space left on device" in caplog.text
    assert vanished_task() == ""


async def test_a_failure_that_repeats_is_logged_once(autojump_clock, caplog):
    caplog.set_level("DEBUG")
    lamp = Fails(*(OSError(errno.EMFILE, "Too many open files") for _ in range(50)))
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service_task(lamp, "the lamp"))
        await lamp.runs.wait()
        nursery.cancel_scope.cancel()
    said = [record.levelname for record in caplog.records if "the lamp" in record.message]
    assert said[0] == "WARNING"
    assert set(said[1:]) == {"DEBUG"}
    assert trio.current_time() - began_s > 40 * 60


async def test_a_bug_passes_and_so_does_what_comes_before_the_start():
    with pytest.raises(InternalError, match="our bug"):
        await service_task(Fails(InternalError("our bug")), "a")()
    with pytest.raises(InternalError, match="the service task 'b' failed"):
        await service_task(Fails(OSError(errno.EMFILE, "Too many open files")), "b", restarts=False)()

    async def cannot_start(*, task_status):  # noqa: ASYNC128 - it fails before
        await trio.lowlevel.checkpoint()
        raise ConfigError("the port is taken")

    async with trio.open_nursery() as nursery:
        for supervised in (service_task(cannot_start, "c"), contained(cannot_start, "c")):
            with pytest.raises(ConfigError, match="the port is taken"):
                await nursery.start(supervised)


async def test_a_task_that_does_one_thing_fails_alone(caplog):
    async with trio.open_nursery() as nursery:
        for failure in FAILURES:
            nursery.start_soon(contained(Fails(failure), "a pull"))
            await nursery.start(contained(Fails(failure), "a pull"))
    assert caplog.text.count("a pull failed") == 2 * len(FAILURES)
    with pytest.raises(InternalError):
        await contained(Fails(InternalError("our bug")), "a pull")()


async def test_one_connection_ends_alone_whatever_it_raises(caplog):
    for error in (ValueError("v"), ExceptionGroup("g", [KeyError("k")])):
        with contain_errors("a connection"):
            raise error
    with contain_errors("a connection"):
        await stray_cancel()
    assert caplog.text.count("a connection ended by an error of ours") == 3
    for error in (InternalError("bug"), ExceptionGroup("g", [InternalError("bug")])):
        with pytest.raises(type(error)), contain_errors("a connection"):
            raise error
    with trio.move_on_after(0) as scope, contain_errors("a connection"):
        await trio.sleep_forever()
    assert scope.cancelled_caught


# ---------------------------------------------------------------- the node

SERVICE_TASKS = {
    "server": (edges, "serve_edges"),
    "arena": (edges, "serve_arena"),
    "reload": (serve, "serve_reloads"),
    "expiry of outcomes": (service_serve, "_expire"),
    "backend health": (PoolWatch, "watch_health"),
    "backend load": (PoolWatch, "watch_load"),
    "backends that are down": (ExpectedBackends, "run"),
    "ledger .*": (DiskLedger, "_commit_groups"),
    "group deadlines": (Pipeline, "_watch_groups"),
    "stuck jobs": (pipeline_module, "watch_jobs"),
    "warm sandboxes": (SandboxHost, "_follow_pool"),
}


class Math(MathHandler):
    """Without the seconds that its scoring process takes to start."""

    async def prepare(self, resources):
        pass


@pytest.mark.parametrize("name", SERVICE_TASKS)
async def test_a_service_task_of_the_node_that_returns_ends_the_node(tmp_path, monkeypatch, caplog, name):
    owner, attribute = SERVICE_TASKS[name]
    original, scope, nodes = getattr(owner, attribute), trio.CancelScope(), []

    async def ends_early(*args, **kwargs):
        with scope:
            await original(*args, **kwargs)

    watch = Monitoring.watch
    monkeypatch.setattr(owner, attribute, ends_early)
    monkeypatch.setattr(
        Monitoring, "watch", lambda self, node, sessions: (nodes.append(node), watch(self, node, sessions))
    )
    make_tiny_model(tmp_path / "model")
    tables = {
        "model": {"path": str(tmp_path / "model")},
        "listen": {"port": 0, "token": "t", "unix_socket": str(tmp_path / "s")},
        "ledger": {"dir": str(tmp_path / "l"), "reserve_bytes": MIB, "log_bytes": MIB, "max_bytes": 16 * MIB},
        "arena": {"size_bytes": 4 * MIB},
        "sandbox": {"max_warm": 1},
    }
    config = msgspec.convert(tables, NodeConfig)
    whole = partial(serve_node, config, HandlerRegistry([Math()]), provider=FakeProvider(), load=lambda: config)

    async def lose_the_task():
        async with trio.open_nursery() as nursery:
            await nursery.start(whole)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()

    why = f"the service task '{name}' returned"
    bug = pytest.RaisesExc(InternalError, match=why)
    with trio.fail_after(50), pytest.RaisesGroup(bug, flatten_subgroups=True):
        await lose_the_task()
    assert "the node ends" in caplog.text
    assert "is gone" in nodes[0].unreadiness()


# ---------------------------------------------------------------- what handlers let out


class Nested(MathHandler):
    """Does what the test says in RUN; scores nothing."""

    def __init__(self, run):
        self._run = run

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return None

    async def init(self, context):
        await trio.lowlevel.checkpoint()

    async def run(self, context):
        await self._run()


async def fails_while_cancelled():
    async def fail_at_end():
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("while it cleaned up")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail_at_end)
        nursery.start_soon(trio.sleep_forever)


async def two_tasks():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        nursery.start_soon(trio.sleep_forever)


def submit(rig, run, **fields):
    job = Job(rig.spec(**fields), Nested(run), rig.resources, rig.observer)
    rig.pipeline.submit(job)
    return job


async def test_a_handler_that_lets_a_stray_cancel_out_fails_alone(rig):
    async with rig.open_pipeline():
        for number in range(20):  # more than there are workers
            job = submit(rig, stray_cancel, job_id=f"job-{number}")
            await job.finished.wait()
            outcome = rig.observer.outcomes[job.spec.job_id]
            assert (outcome.status, outcome.cause, outcome.reward) == ("failed", "handler", None)
            assert "raised a Cancelled while nothing was cancelled" in outcome.error


async def test_an_error_beside_a_cancel_is_not_the_nodes(rig, caplog):
    async with rig.open_pipeline():
        job = submit(rig, fails_while_cancelled)
        await rig.observer.wait_status("job", "run")
        await trio.testing.wait_all_tasks_blocked()
        await rig.pipeline.cancel(job, "enough")
        late = submit(rig, fails_while_cancelled, job_id="late", budgets=Budgets(run_s=0.01))
        await late.finished.wait()
    outcomes = rig.observer.outcomes
    assert (outcomes["job"].status, outcomes["late"].status) == ("cancelled", "timed_out")
    assert caplog.text.count("while it cleaned up") >= 2


async def test_a_shutdown_gives_a_job_with_a_nursery_its_outcome(rig):
    async with rig.open_pipeline():
        submit(rig, two_tasks)
        await rig.observer.wait_status("job", "run")
        await trio.testing.wait_all_tasks_blocked()
    outcome = rig.observer.outcomes["job"]
    assert (outcome.status, outcome.error_code) == ("cancelled", "shutdown")
