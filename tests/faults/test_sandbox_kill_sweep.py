"""Open, every kind of action, and close, cut off at growing delays, by a cancel or by `kill -9` of the daemon, of the
starter or of the node: nothing is left. No process, mount, socket, folder, file descriptor, thread token, permit, and
no part of a transfer.

Delays are parts of the time that one whole run takes here, so every stage is hit on any machine.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import trio

from prorl_trio import threads
from prorl_trio.sandbox.fork_server import HOLD
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.reaper import descendants, is_alive, kill
from prorl_trio.sandbox.run_dir import open_run_dir
from prorl_trio.sandbox.transfer import TransferOptions
from prorl_trio.sandbox.warm_pool import WarmLimits
from prorl_trio.types.errors import SandboxLost, SandboxUnavailable
from support.cancel_sweep import cancel_sweep
from support.leaks import descriptors
from support.processes import command_line, parent_of
from support.shares import ALL

pytestmark = pytest.mark.usefixtures("quick_gc")

SPEC = SandboxSpec(prestart_ipython=True)
QUICK_CUTS, MANY_CUTS = 6, 40
RUN_TIMEOUT_S = 60.0
GONE_WITHIN_S = 10.0

NODE = """
import sys
from pathlib import Path
import trio
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.warm_pool import WarmLimits

async def work(host):
    while True:
        sandbox = await host.open(SandboxSpec(prestart_ipython=True))
        await sandbox.bash("sleep 3609 &", timeout_s=30)
        await sandbox.write_file("/tmp/f", bytes(1_000_000))
        await sandbox.aclose()

async def main():
    provider = PROVIDERS[sys.argv[1]](Path(sys.argv[2]))
    async with open_sandbox_host(provider, warm=WarmLimits(max_warm=2)) as host, trio.open_nursery() as nursery:
        print("UP", flush=True)
        for _ in range(2):
            nursery.start_soon(work, host)

trio.run(main)
"""


@pytest.fixture(params=["apptainer", "bubblewrap"])
async def provider_name(request):
    return await usable(request)


@pytest.fixture(params=list(PROVIDERS))
async def any_provider_name(request):
    return await usable(request)


async def usable(request):
    report = await PROVIDERS[request.param]().probe()
    if not report.usable:
        pytest.skip(f"{request.param} cannot run here: {report.problem}. What to do: {report.remedy}")
    return request.param


cuts = pytest.mark.parametrize("cuts", [QUICK_CUTS, pytest.param(MANY_CUTS, marks=pytest.mark.soak)])


class Files:
    """A folder to upload, and where it is downloaded to: outside of what is looked at."""

    def __init__(self, folder):
        self.source = folder / "source"
        (self.source / "sub").mkdir(parents=True)
        for number in range(5):
            (self.source / "sub" / str(number)).write_bytes(bytes(700_000))
        self.target = folder / "target"
        self.inside = "/tmp"
        """Where it is in a sandbox."""

    def assert_whole_or_absent(self):
        if self.target.exists():
            assert sorted(path.name for path in self.target.rglob("*")) == ["0", "1", "2", "3", "4", "sub"]
            shutil.rmtree(self.target)
        assert list(self.target.parent.iterdir()) == [self.source]


@pytest.fixture
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("files"))


async def use(host, files, spec=SPEC):
    """One of each kind of action, from open to close."""
    sandbox = await host.open(spec)
    try:
        await act(sandbox, files)
    finally:
        await sandbox.aclose()


async def act(sandbox, files):
    remote = f"{files.inside}/upload"
    options = TransferOptions(overwrite=True, remote_roots=(files.inside,))
    assert (await sandbox.bash("(setsid sleep 3610 &); sleep 0.05", timeout_s=30)).exit_code == 0
    assert (await sandbox.bash("read line; echo $line", timeout_s=30, quiet_timeout_s=0.05)).running
    assert (await sandbox.bash_input(b"typed\n", timeout_s=30)).exit_code == 0
    assert (
        await sandbox.exec(["sh", "-c", "setsid sleep 3611 >/dev/null 2>&1 & sleep 0.02"], timeout_s=30)
    ).exit_code == 0
    await sandbox.write_file(f"{files.inside}/file", bytes(5_000_000))
    await sandbox.upload(files.source, remote, options=options)
    await sandbox.download(remote, files.target, options=options)
    await sandbox.ipython("x = 1", timeout_s=30)


def mounts_below(base):
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(base) in line]


def kinds_of_descriptors():
    """Count the descriptors of this process by kind: each pipe and socket has a number of its own."""
    return Counter(re.sub(r"\d+", "N", target) for target in descriptors().values())


class Machine:
    """What there is of ours, to compare afterwards. `seen` are all processes that were ever noticed."""

    def __init__(self, host, base):
        self.host = host
        self.base = base
        self.own = descendants(os.getpid())
        self.seen = set()
        self.before = self._look()

    def notice(self):
        found = self._new()
        self.seen |= found
        return found

    def _new(self):
        """Processes since the beginning, but for those of a fork server, which may have replaced the first one."""
        server = getattr(self.host._provider, "fork_server", None)
        found = descendants(os.getpid()) - self.own
        if server is None:
            return found
        return {
            process
            for process in found
            if process.pid != server.pid and HOLD[-1].encode() not in command_line(process.pid)
        }

    def _look(self):
        gc.collect()
        return {
            "processes": self._new(),
            "mounts": mounts_below(self.base),
            "folders": len(list(self.base.glob("*/sbx-*"))),  # a new fork server has others
            "descriptors": kinds_of_descriptors(),
            "permits": (self.host._gates.starting, self.host._gates.images),
            "thread tokens": (
                trio.to_thread.current_default_thread_limiter().borrowed_tokens,
                threads._limiter.get().borrowed_tokens,
            ),
            "sandboxes": [self.host.statistics()[name] for name in ("live", "starting", "warm")],
        }

    async def settle(self):
        """Wait for the next fork server, which replaces one whose fork was killed during its start."""
        if isinstance(self.host._provider, BubblewrapProvider):
            while (server := self.host._provider.fork_server) is None or server._broken.is_set():
                await trio.sleep(0.01)

    def assert_nothing_left(self, when):
        alive = [(p, command_line(p.pid)) for p in self.seen if is_alive(p)]
        assert not alive, when
        assert self._look() == self.before, when


async def look_around(host, base):
    """What there is when what the host starts has settled: a process of its own has a child while it probes."""
    if isinstance(host._provider, BubblewrapProvider):
        host._provider.want_forks()
        await host._provider.wait_fork_server()
    async with open_run_dir(base) as run_dir:
        await trio.to_thread.run_sync(run_dir.pid_limiter.problem)
    return Machine(host, base)


async def measure(host, files, machine):
    """Seconds that one undisturbed run takes; the first one only warms the caches."""
    for _ in range(2):
        began = trio.current_time()
        await use(host, files)
        took_s = trio.current_time() - began
        files.assert_whole_or_absent()
    machine.assert_nothing_left("after an undisturbed run")
    return took_s


def _starters(found):
    """Children of ours."""
    return {process for process in found if parent_of(process.pid) == os.getpid()}


def _daemons(found):
    """Whoever runs the daemon's code: it, and its helpers; who has started one, and waits for it, is none."""
    running = {process for process in found if b"prorl_daemon" in command_line(process.pid)}
    return running - {starter for starter in _starters(running) if b"--guard" in command_line(starter.pid)}


@cuts
@pytest.mark.parametrize("victims", [None, _starters, _daemons], ids=["cancel", "kill starter", "kill daemon"])
async def test_cut_off_at_every_stage(any_provider_name, tmp_path, files, cuts, victims, tmp_path_factory):
    provider = PROVIDERS[any_provider_name](tmp_path)
    if not provider.isolated:
        files.inside = str(tmp_path_factory.mktemp("inside"))
    outcomes = []
    with trio.fail_after(RUN_TIMEOUT_S * (cuts + 2)):
        async with open_sandbox_host(provider) as host:
            machine = await look_around(host, tmp_path)
            whole_s = await measure(host, files, machine)
            for cut in range(1, cuts + 1):
                delay_s = whole_s * cut / cuts
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cut_off, machine, victims, delay_s, nursery.cancel_scope)
                    try:
                        await use(host, files)
                    except (SandboxLost, SandboxUnavailable) as exc:
                        outcomes.append(type(exc).__name__)
                    nursery.cancel_scope.cancel()
                await machine.settle()
                machine.assert_nothing_left(f"cut off after {delay_s:.3f} of {whole_s:.3f} s, {outcomes}")
                files.assert_whole_or_absent()
            if victims is not None:  # a kill by time may come before the sandbox or after it, and this one cannot
                sandbox = await host.open(SPEC)
                kill(victims(machine.notice()))
                with pytest.raises(SandboxLost):
                    await act(sandbox, files)
                await sandbox.aclose()
                machine.assert_nothing_left("killed when it was open")
            await use(host, files)
            machine.assert_nothing_left("a run after all that")
    assert list(tmp_path.iterdir()) == []


async def cut_off(machine, victims, delay_s, scope):
    await trio.sleep(delay_s)
    found = machine.notice()
    if victims is None:
        scope.cancel()
    else:
        kill(victims(found))


async def test_warm_ones_that_were_killed_reach_nobody(provider_name, tmp_path):
    with trio.fail_after(RUN_TIMEOUT_S * 2):
        async with open_sandbox_host(PROVIDERS[provider_name](tmp_path), warm=WarmLimits(max_warm=2)) as host:
            await (await host.open(SPEC)).aclose()
            await host.wait_stocked()
            own = {p for p in descendants(os.getpid()) if b"reaper.py" in command_line(p.pid)}
            warm = descendants(os.getpid()) - own
            assert host.statistics()["warm"] >= 1
            kill(warm)
            while host.statistics()["warm_dead_total"] == 0:  # noticed before anybody asks for one
                await trio.sleep(0.02)
            sandbox = await host.open(SPEC)
            assert (await sandbox.bash("echo well", timeout_s=30)).output == "well\n"
            await sandbox.aclose()
        assert not any(map(is_alive, warm))
        assert descendants(os.getpid()) == set()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_cancelled_at_any_step_of_the_loop(tmp_path, files, tmp_path_factory):
    """Without isolation, since that is quick, and the code that owns the processes is the same."""

    async def check(run):
        machine.assert_nothing_left(run)
        files.assert_whole_or_absent()
        assert {path.name for path in inside.iterdir()} <= {"file", "upload"}, run
        assert len(list((inside / "upload").rglob("*"))) in (0, 6), run

    async def operation():
        sandbox = None
        try:
            sandbox = await host.open(SandboxSpec())
            machine.notice()
            await act(sandbox, files)
        finally:
            if sandbox is not None:
                with trio.move_on_after(RUN_TIMEOUT_S, shield=True):
                    await sandbox.aclose()

    inside = tmp_path_factory.mktemp("inside")
    files.inside = str(inside)
    with trio.fail_after(RUN_TIMEOUT_S * 20):
        async with open_sandbox_host(PROVIDERS["process"](tmp_path)) as host:
            machine = await look_around(host, tmp_path)
            steps = await cancel_sweep(operation, check, every=1 if ALL else 4)
    assert steps > 100
    assert list(tmp_path.iterdir()) == []


@cuts
async def test_kill_9_of_the_node(provider_name, tmp_path, cuts):
    for cut in range(cuts):
        with trio.fail_after(RUN_TIMEOUT_S):
            family = await run_node_until_killed(provider_name, tmp_path, after_s=2.0 * cut / cuts)
            await wait_gone(family)
            async with open_run_dir(tmp_path):  # for a node that was killed before its reaper was there
                pass
            assert list(tmp_path.iterdir()) == [], cut
    assert mounts_below(tmp_path) == []


async def run_node_until_killed(provider_name, base, *, after_s):
    argv = [sys.executable, "-c", NODE, provider_name, str(base)]
    node = await trio.lowlevel.open_process(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert (await node.stdout.receive_some()).startswith(b"UP")
        await trio.sleep(after_s)
        return descendants(node.pid)
    finally:
        node.kill()
        with trio.move_on_after(GONE_WITHIN_S, shield=True):
            await node.wait()
        node.stdout.close()


async def wait_gone(processes):
    with trio.fail_after(GONE_WITHIN_S):
        await trio.lowlevel.checkpoint()
        while any(map(is_alive, processes)):  # the end of a stranger's process is no event for us
            await trio.sleep(0.02)
