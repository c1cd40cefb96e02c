"""Memory that no process has mapped, in a sandbox without a cgroup of its own: counted, given back, and named."""

from __future__ import annotations

import pytest
import trio

from prorl_ipc.limits import SandboxLimits
from prorl_trio.sandbox.provider import SandboxSpec

pytestmark = pytest.mark.alone

MIB = 1024 * 1024
LIMITS = SandboxLimits(memory_bytes=256 * MIB, max_file_bytes=1024 * MIB, disk_bytes=64 * MIB)
TEST_TIMEOUT_S = 120
ACTION_TIMEOUT_S = 60

SHARED = """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmdt.argtypes = [ctypes.c_void_p]
def fill(mib, attached=False):
    number = libc.shmget(0, mib << 20, 0o1600)
    assert number >= 0, ctypes.get_errno()
    address = libc.shmat(number, None, 0)
    for start in range(0, mib, 8):
        ctypes.memset(address + (start << 20), 1, 8 << 20)
    libc.shmdt(address)
    if attached:
        libc.shmat(number, None, 0)
"""
HOGS = {
    "detached segments": "for _ in range(6): fill(64)",
    "a segment that is attached, but not looked at": "fill(400, attached=True)\ntime.sleep(300)",
    "message queues": """
message = (1).to_bytes(8, "little") + bytes(8000)
for _ in range(30000):
    queue = libc.msgget(0, 0o1600)
    libc.msgsnd(queue, message, 8000, 0o4000)
    libc.msgsnd(queue, message, 8000, 0o4000)
""",
    "semaphores": "for _ in range(300): libc.semget(0, 32000, 0o1600)",
    "what processes would undo of semaphores": """
import os, struct
sets = [libc.semget(0, 32000, 0o1600) for _ in range(50)]
for _ in range(120):
    if os.fork() == 0:
        for number in sets: libc.semop(number, struct.pack("=Hhh", 0, 1, 0x1000), 1)
        time.sleep(4)
        os._exit(0)
time.sleep(4)
""",
}


SLOW = ("message queues", "semaphores")

HELD = """
def rows(kind):
    return [list(map(int, line.split())) for line in open(f"/proc/sysvipc/{kind}").readlines()[1:]]
shm, msg, sem = rows("shm"), rows("msg"), rows("sem")
print(sum(row[14] for row in shm) + sum(row[3] for row in msg) + 64 * sum(row[3] for row in sem))
"""


@pytest.fixture(autouse=True)
def _no_cgroup(monkeypatch):
    """As on a machine that delegates none."""
    monkeypatch.setattr(
        "prorl_trio.sandbox.providers.start.own_site", lambda: type("Site", (), {"path": None, "problem": "no"})
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in HOGS])
async def test_what_no_process_holds_is_removed_and_named(provider, name):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            result = await sandbox.exec(["python3", "-c", f"{SHARED}\n{HOGS[name]}"], timeout_s=ACTION_TIMEOUT_S)
            while not result.breach:  # the program may have ended before it was looked at
                result = await sandbox.bash("sleep 0.1", timeout_s=ACTION_TIMEOUT_S)
            assert result.breach == "memory", result
            assert "256 MiB are allowed" in result.breach_text
            # It may have gone on taking while the first of it was given back.
            while (
                int((await sandbox.exec(["python3", "-c", HELD], timeout_s=ACTION_TIMEOUT_S)).stdout)
                >= LIMITS.memory_bytes
            ):
                await sandbox.bash("sleep 0.1", timeout_s=ACTION_TIMEOUT_S)


async def test_the_shells_own_files_cannot_be_filled(provider):
    each = "for fd in /proc/$$/fd/*; do case $(readlink $fd) in /memfd:*) {};; esac; done; "
    fill = each.format("head -c 400M /dev/zero > $fd") + "sleep 0.5"
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            result = await sandbox.bash(fill, timeout_s=ACTION_TIMEOUT_S)
            while not result.breach:
                result = await sandbox.bash("sleep 0.1", timeout_s=ACTION_TIMEOUT_S)
            assert result.breach == "memory", result
            after = await sandbox.bash(each.format("stat -L -c %b $fd") + "echo alive", timeout_s=ACTION_TIMEOUT_S)
            *blocks, alive = after.output.split()
            assert alive == "alive"
            assert blocks
            assert sum(map(int, blocks)) * 512 < MIB


async def test_segments_in_use_are_counted_once_and_left_alone(provider):
    """Two processes look at every page of it: 160 MiB, where 256 are allowed."""
    code = f"""{SHARED}
import os
address = libc.shmat(libc.shmget(0, 160 << 20, 0o1600), None, 0)
ctypes.memset(address, 1, 160 << 20)
child = os.fork()
pages = memoryview((ctypes.c_char * (160 << 20)).from_address(address)).cast("B")[::4096]
print(sum(pages) >> 12, flush=True)
time.sleep(1)
child and os.wait()
"""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            result = await sandbox.exec(["python3", "-c", code], timeout_s=ACTION_TIMEOUT_S)
    assert (result.breach, result.exit_code) == ("", 0)
    assert result.stdout.split() == [b"10", b"10"]
