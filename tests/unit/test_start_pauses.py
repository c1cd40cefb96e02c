"""Whatever a start of a sandbox raises fails that start; and while the machine can start none, jobs wait."""

from __future__ import annotations

import errno
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.sandbox import host as host_module
from prorl_trio.sandbox.host import MAX_PAUSE_S, MAX_REFUSALS, MAX_START_ATTEMPTS, open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.warm_pool import WarmLimits
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.types.errors import InternalError, SandboxUnavailable
from prorl_trio.types.models import JobSpec, TaskInstance

SPEC = SandboxSpec()
ODD = SandboxSpec(env={"ODD": "1"})

FULL = OSError(errno.ENOSPC, "No space left on device")
MACHINE_FAILURES = {
    "space": FULL,
    "quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "descriptors": OSError(errno.EMFILE, "Too many open files"),
    "descriptors of all": OSError(errno.ENFILE, "Too many open files in system"),
    "processes": OSError(errno.EAGAIN, "Resource temporarily unavailable"),
    "memory": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "read-only": OSError(errno.EROFS, "Read-only file system"),
    "folder is gone": OSError(errno.ENOENT, "No such file or directory"),
    "mode of the folder": OSError(errno.EACCES, "Permission denied"),
    "watches": OSError(errno.ENOSPC, "epoll_ctl"),
}
OTHER_FAILURES = {
    "threads": RuntimeError("can't start new thread"),
    "memory of Python": MemoryError(),
    "launcher": SandboxUnavailable("bwrap: it did not start: exit code 1; it said: Creating new namespace failed"),
    "several": ExceptionGroup("of a nursery", [ValueError("one"), FULL]),
}


class Machine(FakeProvider):
    """Refuses starts by what `refuse` returns for them; what `at_end` has is raised at the end of a sandbox."""

    def __init__(self):
        super().__init__()
        self.refuse = lambda _spec: None
        self.at_end = None
        self.asked_total = 0

    @asynccontextmanager
    async def open_sandbox(self, spec):
        self.asked_total += 1
        if (failure := self.refuse(spec)) is not None:
            raise failure
        async with super().open_sandbox(spec) as sandbox:
            yield sandbox
        if self.at_end is not None:
            raise self.at_end


def broken(failure):
    return lambda _spec: failure


@asynccontextmanager
async def open_proven(**options):
    """A machine and a host on which a sandbox has started."""
    machine = Machine()
    async with open_sandbox_host(machine, **options) as host:
        await (await host.open(SPEC)).aclose()
        yield machine, host
    assert machine.live == []


@pytest.mark.parametrize("failure", {**MACHINE_FAILURES, **OTHER_FAILURES}.values(), ids=lambda error: repr(error))
async def test_while_the_machine_can_start_none_jobs_wait(failure, autojump_clock, caplog):
    opened = []
    async with open_proven() as (machine, host), trio.open_nursery() as nursery:
        machine.refuse = broken(failure)

        async def open_one():
            opened.append(await host.open(SPEC))

        for _ in range(50):
            nursery.start_soon(open_one)
        await trio.sleep(600)
        assert opened == []
        assert host.why_paused
        assert host.statistics()["starts_paused"] == host.statistics()["start_pauses_total"] == 1
        asked = machine.asked_total
        await trio.sleep(300)
        assert machine.asked_total - asked <= 11, "a trial now and then, by whoever"
        machine.refuse = lambda _spec: None
        await trio.sleep(31)
        assert len(opened) == 50
        assert not host.why_paused
        assert host.statistics()["starts_paused"] == 0
    assert caplog.text.count("starts pause until a trial start succeeds") == 1
    assert caplog.text.count("sandboxes can be started again") == 1


@pytest.mark.parametrize("failure", MACHINE_FAILURES.values(), ids=lambda error: repr(error))
async def test_a_machine_that_never_started_one_is_waited_for_as_well(failure, autojump_clock):
    machine = Machine()
    machine.refuse = broken(failure)
    async with open_sandbox_host(machine) as host, trio.open_nursery() as nursery:
        nursery.start_soon(host.open, SPEC)
        await trio.sleep(100)
        assert host.why_paused
        machine.refuse = lambda _spec: None
        await trio.sleep(60)
        assert host.statistics()["live"] == 1


@pytest.mark.parametrize("failure", OTHER_FAILURES.values(), ids=lambda error: repr(error))
async def test_whatever_a_start_raises_is_the_failure_of_that_start(failure, autojump_clock):
    machine = Machine()
    async with open_sandbox_host(machine) as host:
        for proven in (False, True):
            machine.refuse = lambda spec: failure if spec.env else None
            with pytest.raises(SandboxUnavailable) as caught:
                await host.open(ODD)
            assert caught.value.cause == "sandbox"
            assert not host.why_paused, proven
            await (await host.open(SPEC)).aclose()


async def test_a_machine_that_refuses_one_specification_only_is_well(autojump_clock):
    async with open_proven() as (machine, host):
        machine.refuse = lambda spec: OSError(errno.E2BIG, "Argument list too long") if spec.env else None
        before = machine.asked_total
        with pytest.raises(SandboxUnavailable, match="Argument list too long"):
            await host.open(ODD)
        assert machine.asked_total - before <= 2 * MAX_REFUSALS * MAX_START_ATTEMPTS
        assert host.statistics()["start_pauses_total"] == 0


async def test_an_image_that_is_not_there_fails_its_own_jobs(autojump_clock):
    async with open_proven() as (_, host), trio.open_nursery() as nursery:

        async def fail():
            with pytest.raises(SandboxUnavailable, match="image nope"):
                await host.open(SandboxSpec(image="nope"))

        for _ in range(20):
            nursery.start_soon(fail)
            nursery.start_soon(host.open, SPEC)
        await trio.sleep(60)
        assert host.statistics()["start_pauses_total"] == 0
        assert host.statistics()["live"] == 20


async def test_a_short_lack_costs_nobody_an_attempt(autojump_clock):
    async with open_proven() as (machine, host):
        left = 10

        def sometimes(_spec):
            nonlocal left
            left -= 1
            return OSError(errno.EMFILE, "Too many open files") if left >= 0 else None

        machine.refuse = sometimes
        with trio.fail_after(120):
            await host.open(SPEC)


async def test_a_bug_of_ours_ends_the_node(autojump_clock):
    async def open_one():
        machine = Machine()
        machine.refuse = broken(InternalError("ours"))
        async with open_sandbox_host(machine) as host:
            await host.open(SPEC)

    with pytest.raises(InternalError, match="ours"):
        await open_one()


async def test_a_wait_has_an_end(autojump_clock):
    async with open_proven() as (machine, host):
        machine.refuse = broken(FULL)
        began_s = trio.current_time()
        with pytest.raises(SandboxUnavailable, match=r"for 3600 s: .*No space left on device"):
            await host.open(SPEC)
        assert trio.current_time() - began_s == pytest.approx(MAX_PAUSE_S, abs=10)


async def test_an_error_at_the_end_of_a_sandbox_ends_nothing_else(autojump_clock, caplog):
    async with open_proven() as (machine, host):
        for failure in (*MACHINE_FAILURES.values(), *OTHER_FAILURES.values()):
            machine.at_end = failure
            with trio.fail_after(5):
                sandbox = await host.open(SPEC)
                await sandbox.aclose()
                assert sandbox.gone
    assert caplog.text.count("the owner of a sandbox failed") == len(MACHINE_FAILURES) + len(OTHER_FAILURES)


async def test_warm_sandboxes_are_handed_out_and_none_is_started_in_a_pause(autojump_clock):
    warm = WarmLimits(max_warm=2, max_warm_per_image=2, max_refills=2, max_idle_s=1e6)
    async with open_proven(warm=warm) as (machine, host):
        await host.wait_stocked()
        machine.refuse = broken(FULL)
        stock = host.statistics()["warm"]
        assert stock >= 1
        for _ in range(int(stock)):
            with trio.fail_after(1):
                await host.open(SPEC)
        await trio.sleep(10)
        assert host.why_paused
        failed = host.statistics()["failed_total"]
        await trio.sleep(600)
        assert host.statistics()["failed_total"] == failed
        machine.refuse = lambda _spec: None
        await trio.sleep(31)
        await host.wait_stocked()
        assert host.statistics()["warm"] >= 1


async def test_a_proven_image_that_was_removed_proves_nothing():
    class Images(Machine):
        @asynccontextmanager
        async def open_sandbox(self, spec):
            async with super().open_sandbox(SandboxSpec(env=spec.env)) as sandbox:
                yield sandbox

    machine = Images()
    async with open_sandbox_host(machine) as host:
        await host.open(SandboxSpec(image="there-once"))
        machine.refuse = broken(SandboxUnavailable("no image at all"))
        with trio.fail_after(60), pytest.raises(SandboxUnavailable, match="no image at all"):
            await host.open(ODD)
        assert not host.why_paused


async def test_no_budget_is_charged_for_a_pause(autojump_clock):
    config = NodeConfig(model=ModelConfig(path="unused"))
    resources = Resources(config=config, chat_format=None, backends=None, scorers=None)
    instance = TaskInstance(instance_id="i", handler="h", payload={})
    async with open_proven() as (machine, host), trio.open_nursery() as nursery:
        context = RolloutContext(spec=JobSpec(job_id="j", instance=instance), resources=resources, sandboxes=host)
        machine.refuse = broken(FULL)

        async def mend():
            await trio.sleep(1000)
            machine.refuse = lambda _spec: None

        nursery.start_soon(mend)
        with trio.CancelScope(deadline=trio.current_time() + 20) as scope:
            context.begin_stage(scope, "handler")
            await context.start_sandbox(SPEC)
        assert not scope.cancelled_caught
        assert context.uncharged_s > 900
        assert context.stage_left_s() > 10


async def test_trials_go_on_after_an_error_of_their_own(autojump_clock, monkeypatch):
    async with open_proven() as (machine, host), trio.open_nursery() as nursery:
        find, errors = host_module.SandboxHost._find_problem, [RuntimeError("can't start new thread")] * 5

        async def fails(self):
            if errors:
                raise errors.pop()
            return await find(self)

        monkeypatch.setattr(host_module.SandboxHost, "_find_problem", fails)
        machine.refuse = broken(FULL)
        nursery.start_soon(host.open, SPEC)
        await trio.sleep(60)
        assert host.why_paused
        machine.refuse = lambda _spec: None
        await trio.sleep(60)
        assert host.statistics()["live"] == 1
