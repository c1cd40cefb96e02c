"""The kernel itself keeps a fork bomb in its sandbox, and nothing that does so can reach the machine's own setting."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

from prorl_ipc.limits import SandboxLimits
from prorl_trio.sandbox.limits import pid_setter
from prorl_trio.sandbox.limits.pid_limit import FIRST_REUSED_PID, OWN_TASKS, PidLimiter, pid_limit_problem
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.reaper import descendants, identify
from prorl_trio.types.errors import SandboxCallFailed, SandboxUnavailable
from support.leaks import descriptors
from support.quiet_clock import wait_until
from support.skips import because

PID_MAX = Path("/proc/sys/kernel/pid_max")
TEST_TIMEOUT_S = 120
ACTION_TIMEOUT_S = 60
SAMPLE_INTERVAL_S = 0.02
MAX_PROCESSES = 150
HARD_LIMIT = FIRST_REUSED_PID + 1 + MAX_PROCESSES + OWN_TASKS
OTHERS = 250
"""What the rest of the machine may start during a test: other tests run beside it."""
BUSY = [sys.executable, "-c", "while True: pass"]
BOMBS = {
    "shell": "bomb() { bomb | bomb & }; bomb; sleep 300",
    "program": "python3 -c 'import os\nwhile True: os.fork()'",
    "background": "(bomb() { bomb | bomb & }; bomb) & sleep 1; echo over",
}

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        bool(problem := pid_limit_problem()),
        reason=because(f"the kernel limits no processes here: {problem}", "prorl-trio doctor"),
    ),
]


@pytest.fixture(autouse=True)
def _the_machine_keeps_its_own():
    before = PID_MAX.read_text()
    yield
    assert PID_MAX.read_text() == before


def count_tasks():
    """All processes and threads of the machine."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


@asynccontextmanager
async def sampling():
    """Counts the machine's tasks all the time; yields a list of one number, the most there were."""
    most = [0]

    async def sample():
        while True:
            most[0] = max(most[0], count_tasks())
            await trio.sleep(SAMPLE_INTERVAL_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sample)
        yield most
        nursery.cancel_scope.cancel()


@pytest.fixture
def busy_machine():
    loops = [subprocess.Popen(BUSY) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.usefixtures("busy_machine")
async def test_a_fork_bomb_on_a_busy_machine_is_bounded_at_all_times_named_and_survived(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=SandboxLimits(max_processes=MAX_PROCESSES))) as sandbox:
            for name, bomb in BOMBS.items():
                before = count_tasks()
                async with sampling() as most:
                    result = await sandbox.bash(bomb, timeout_s=ACTION_TIMEOUT_S)
                assert most[0] - before < HARD_LIMIT + OTHERS, name
                while not result.breach:  # what runs in the background may be noticed when its command has returned
                    result = await sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S)
                assert result.breach == "processes", f"{name}: {result}"
                assert f"more than {MAX_PROCESSES}" in result.breach_text
                after = await sandbox.bash("echo alive", timeout_s=ACTION_TIMEOUT_S)
                assert after.output.strip().splitlines()[-1] == "alive", f"{name}: {after}"


async def test_the_daemon_answers_while_every_place_is_taken(provider):
    """Whatever it may not start then is refused in words, and works again afterwards."""
    hold = "import os, time\ntry:\n  while os.fork(): pass\nexcept BlockingIOError: pass\ntime.sleep(300)"
    limits = SandboxLimits(max_processes=MAX_PROCESSES)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=limits)) as sandbox:
            await sandbox.write_file("/tmp/hold.py", hold.encode())
            for _ in range(3):
                command = "python3 /tmp/hold.py"
                result = await sandbox.bash(command, timeout_s=ACTION_TIMEOUT_S, quiet_timeout_s=0.1)
                with suppress(OSError, SandboxCallFailed, SandboxUnavailable):
                    await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S)
                    await sandbox.read_file("/tmp/hold.py")
                    await sandbox.ipython("1", timeout_s=ACTION_TIMEOUT_S)
                if result.running:
                    await sandbox.bash_input(b"", timeout_s=ACTION_TIMEOUT_S)
            assert await sandbox.read_file("/tmp/hold.py") == hold.encode()
            assert (await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S)).exit_code == 0
            assert (await sandbox.ipython("2 + 2", timeout_s=ACTION_TIMEOUT_S)).result == "4"


async def test_nobody_inside_can_raise_it(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=SandboxLimits(max_processes=MAX_PROCESSES))) as sandbox:
            write = "echo 100000 > /proc/sys/kernel/pid_max"
            inner = "unshare --user --map-root-user --mount --pid --fork --mount-proc sh -c"
            for command in (write, f"mount -o remount,rw /proc/sys; {write}", f"{inner} '{write}'"):
                await sandbox.bash(command, timeout_s=ACTION_TIMEOUT_S)
            seen = await sandbox.bash("cat /proc/sys/kernel/pid_max", timeout_s=ACTION_TIMEOUT_S)
    assert seen.output.strip() == str(HARD_LIMIT)


def test_a_process_without_a_namespace_of_its_own_is_left_alone():
    limiter = PidLimiter()
    try:
        ours = identify(os.getpid())
        limiter.limit([ours], MAX_PROCESSES)
    finally:
        limiter.close()


def test_a_process_that_ends_while_its_namespaces_are_opened_leaves_none_open(monkeypatch):
    """The first is open by then; no garbage collector closes a number."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "sleep", "60"]
    limiter = PidLimiter()
    with subprocess.Popen(command) as unshared:
        try:
            limiter.start()
            wait_until(lambda: descendants(unshared.pid), "unshare has a child", 10)
            (member,) = descendants(unshared.pid)
            open_one = os.open

            def end_before_the_second(path, flags, *rest, **more):
                if str(path).endswith("/ns/mnt"):
                    unshared.kill()
                    unshared.wait()
                    raise ProcessLookupError(path)
                return open_one(path, flags, *rest, **more)

            monkeypatch.setattr(os, "open", end_before_the_second)
            limiter.bound_shared([member])
        finally:
            unshared.kill()
            limiter.close()
    assert "pid:" not in str([*descriptors().values()])


def test_the_setter_refuses_its_own_namespace_and_what_is_no_namespace():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            command = [sys.executable, "-I", "-S", pid_setter.__file__, str(theirs.fileno())]
            setter = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        ours.settimeout(TEST_TIMEOUT_S)
        assert ours.recv(512) == pid_setter.NOTHING
        for path in ("/proc/self/ns/pid", "/proc/self/ns/user", "/dev/null"):
            fd = os.open(path, os.O_RDONLY)
            socket.send_fds(ours, [b"400"], [fd])
            os.close(fd)
            assert ours.recv(512) != pid_setter.NOTHING, path
    assert setter.wait(TEST_TIMEOUT_S) == 0


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason=because("others than root may write no setting of the machine anyway", "run the tests as root"),
)
def test_the_setter_could_not_write_the_machines_own_even_as_root():
    """Had it joined only the user namespace; that is also what an older kernel, with one setting for all, would ask."""
    code = (
        f"import runpy; setter = runpy.run_path({pid_setter.__file__!r}); setter['give_up_root']();"
        "assert setter['_libc'].unshare(setter['CLONE_NEWUSER']) == 0; open('/proc/sys/kernel/pid_max', 'r+b')"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, check=False)
    assert done.returncode == 1
    assert re.search(rb"PermissionError: .*pid_max", done.stderr)
