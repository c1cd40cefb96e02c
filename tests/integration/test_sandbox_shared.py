"""What the machine, or the user, has one number of for all sandboxes: none of them can take it all."""

from __future__ import annotations

import ctypes
import os

import trio

from prorl_trio.sandbox.limits.pid_limit import MAX_INOTIFY_INSTANCES, MAX_PTYS
from prorl_trio.sandbox.provider import SandboxSpec

TEST_TIMEOUT_S = 120
ACTION_TIMEOUT_S = 60
PTYS_TRIED = 4200
INSTANCES_TRIED = 1100

TAKE = """
import ctypes, os, resource, subprocess, sys
libc = ctypes.CDLL(None)
instances = 0
while instances < %d and libc.inotify_init() >= 0:
    instances += 1
taken = []
try:
    while len(taken) < %d:
        taken.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError:
    pass
print(instances, len(taken), flush=True)
import time
time.sleep(600)
"""


async def test_terminals_and_inotify_instances_are_bounded_in_each(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as greedy, provider.open_sandbox(SandboxSpec()) as other:
            await greedy.write_file("/tmp/take.py", (TAKE % (INSTANCES_TRIED, PTYS_TRIED)).encode())
            command = "coproc python3 /tmp/take.py; read -u ${COPROC[0]} line; echo $line"
            result = await greedy.bash(command, timeout_s=ACTION_TIMEOUT_S)
            instances, terminals = map(int, result.output.split()[-2:])
            assert instances == MAX_INOTIFY_INSTANCES
            assert 0 < terminals < MAX_PTYS
            assert await works(other) == "fine"
            async with provider.open_sandbox(SandboxSpec()) as third:
                assert await works(third) == "fine"
    # And outside, while they had been held, and after.
    for fd in os.openpty():
        os.close(fd)
    instance = ctypes.CDLL(None).inotify_init()
    assert instance >= 0
    os.close(instance)


async def works(sandbox):
    """A shell on a terminal of its own, one more terminal, and an inotify instance."""
    code = "import ctypes, pty; pty.openpty(); assert ctypes.CDLL(None).inotify_init() >= 0; print('fine')"
    result = await sandbox.bash(f'python3 -c "{code}" 2>&1', timeout_s=ACTION_TIMEOUT_S)
    return result.output.strip()


async def test_nobody_inside_can_raise_the_bounds(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            for command in (
                "echo 100000 > /proc/sys/user/max_inotify_instances",
                "mount -o remount,max=4096 /dev/pts",
                "unshare --user --map-root-user true",
            ):
                result = await sandbox.bash(f"{command} 2>&1", timeout_s=ACTION_TIMEOUT_S)
                assert result.exit_code != 0, command
