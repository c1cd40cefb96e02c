"""Sandboxes that are forked: the same as those that bubblewrap makes, and no trouble when their server is gone."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from prorl_ipc.limits import SandboxLimits
from prorl_ipc.proc_files import READ_ONLY_PROC
from prorl_trio.sandbox import fork_server, process_tree
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider
from prorl_trio.sandbox.reaper import descendants, is_alive
from prorl_trio.types.errors import SandboxUnavailable
from support.forking import open_forking

TEST_TIMEOUT_S = 120
ACTION_TIMEOUT_S = 60

# What a tool can see of its sandbox, a line each: none may depend on how the sandbox was started.
LOOK = r"""
id; umask; pwd; hostname; env | grep -v ^_= | sort; ulimit -a; ulimit -aH; cat /proc/sys/kernel/pid_max
grep -E '^(Uid|Gid|Groups|Cap...|NoNewPrivs|Seccomp|Sig(Ign|Cgt|Blk)):' /proc/self/status
cat /proc/self/uid_map /proc/self/gid_map /proc/self/setgroups /proc/self/oom_score_adj /proc/self/attr/current
cat /proc/keys /proc/key-users | wc -c; ls /sys /srv /run /mnt /var; ls /proc | grep -v '^[0-9]*$'
ls -lAn --time-style=+ / /dev /dev/pts /dev/shm /tmp ~ /workspace/ /home | sed -E 's/ +/ /g; s/ [0-9]+ (.* proc)$/ \1/'
stat -f -c '%n %T %S %b' / /dev /dev/shm /tmp ~ /proc /dev/pts
for f in /x /etc/x /usr/x /dev/x /proc/sys/kernel/domainname /proc/sysrq-trigger; do echo >$f; done 2>&1
for f in /tmp/x /dev/shm/x ~/x /workspace/y; do echo >$f && ls $f; done 2>&1
for kind in cgroup ipc mnt net pid user uts; do test -e /proc/1/ns/$kind; echo $?; done
cat /proc/net/dev | cut -d: -f1; timeout 3 bash -c '</dev/tcp/127.0.0.1/1'; cat /proc/sys/net/ipv4/ip_forward
unshare -U true; unshare -n true; mount -t tmpfs x /mnt; umount /proc; chroot / true; mknod /tmp/d c 1 3; dmesg; true
ls /proc/1/exe /proc/1/root/; cat /proc/1/environ; kill -9 1; kill -STOP 1; cat /proc/1/comm
tr -s '\0' ' ' </proc/1/cmdline; ls /proc/self/fd | wc -l; tty
"""
CELL = """
import linecache, os, resource, signal, sys, threading
status = ("Cap", "NoNew", "Seccomp", "SigIgn", "SigBlk", "Groups")
state = {
    "flags": str(sys.flags), "path": sys.path, "argv": sys.argv, "main": sys.modules["__main__"].__name__,
    "orig": sys.orig_argv[1:3], "env": sorted(os.environ.items()), "cwd": os.getcwd(),
    "threads": threading.active_count(), "stack": threading.stack_size(), "umask": os.umask(0o22),
    "limits": [resource.getrlimit(number) for number in range(16)], "session": os.getsid(0) == os.getpid(),
    "fds": len(os.listdir("/proc/self/fd")),
    "parent": os.getppid(), "streams": [sys.stdin.encoding, sys.stdout.encoding],
    "handlers": [str(signal.getsignal(number)) for number in (2, 13, 15, 17)],
    "status": [line for line in open("/proc/self/status") if line.startswith(status)],
    "cells": [In, Out, get_ipython().execution_count, hasattr(sys, "last_value")],
    "sources": [name for name in linecache.cache if "attrs" not in name],
    "oom": open("/proc/self/oom_score_adj").read(), "hidden": os.access("/proc/self/mem", os.R_OK),
}
state
"""
FAILING = "def fail(x):\n    return x / 0\nfail(1)"


@pytest.fixture
async def provider(tmp_path):
    found = BubblewrapProvider(tmp_path)
    report = await found.probe()
    if not report.usable:
        pytest.skip(f"bubblewrap cannot run here: {report.problem}. What to do: {report.remedy}")
    return found


@asynccontextmanager
async def open_forked(provider, spec):
    async with open_forking(provider) as server:
        before = server.forked_total
        async with provider.open_sandbox(spec) as sandbox:
            assert server.forked_total == before + 1
            yield sandbox


async def looks(sandbox):
    """Return all that can be seen in there: lines of texts, and the options of what is mounted, by path."""
    script = await sandbox.exec(["bash", "-c", f"exec 2>&1; {LOOK}"], timeout_s=ACTION_TIMEOUT_S)
    own = "echo $PPID $- $SHLVL; trap; set +m; jobs; files=(/proc/$$/fd/*); echo ${#files[@]}"
    shell = await sandbox.bash(own, timeout_s=ACTION_TIMEOUT_S)
    cell = await sandbox.ipython(CELL, timeout_s=ACTION_TIMEOUT_S)
    assert cell.result is not None, cell
    failed = await sandbox.ipython(FAILING, timeout_s=ACTION_TIMEOUT_S)
    assert failed.error is not None, failed
    mountinfo = (await sandbox.exec(["cat", "/proc/self/mountinfo"], timeout_s=ACTION_TIMEOUT_S)).stdout.decode()
    mounts = {line.split()[4]: set(line.split()[5].split(",")) for line in mountinfo.splitlines()}  # the last is seen
    return [
        *script.stdout.decode().splitlines(),
        shell.output,
        *cell.result.split(", '"),
        failed.error.traceback,
    ], mounts


@pytest.mark.parametrize("prestart", [True, False])
async def test_it_is_the_same_sandbox(provider, prestart):
    spec = SandboxSpec(prestart_ipython=prestart, env={"OF_THE_TASK": "1"})
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(spec) as sandbox:
            expected, expected_mounts = await looks(sandbox)
        async with open_forked(provider, spec) as sandbox:
            found, mounts = await looks(sandbox)
    assert found == expected
    assert len(found) > 200
    # A launcher makes these read-only by themselves, before all of /proc is made so.
    for name in READ_ONLY_PROC:
        expected_mounts.pop(f"/proc/{name}", None)
    assert mounts.keys() == expected_mounts.keys()
    wider = {path: options for path, options in mounts.items() if not options >= expected_mounts[path]}
    assert wider == {}, "a mount with fewer restrictions than bubblewrap's"


async def test_each_has_files_and_names_of_its_own(provider):
    write = "echo mine > /tmp/a; echo mine > ~/a; echo mine > /dev/shm/a; ls /tmp ~ /dev/shm | grep -cx a"
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forked(provider, SandboxSpec()) as first, provider.open_sandbox(SandboxSpec()) as second:
            assert (await first.bash(write, timeout_s=ACTION_TIMEOUT_S)).output.strip() == "3"
            assert (await second.bash("ls -A /tmp ~ /dev/shm; ls /proc", timeout_s=ACTION_TIMEOUT_S)).exit_code == 0
            seen = await second.bash("ls -A /tmp ~ /dev/shm | grep -x a; ls -d /proc/[0-9]* | wc -l", timeout_s=60)
            assert int(seen.output.split()[-1]) < 10
            assert "a" not in seen.output.split()
            drawn = [await each.ipython("import random; random.random()", timeout_s=60) for each in (first, second)]
            assert drawn[0].result != drawn[1].result, "forks that draw the same numbers"


async def test_sizes_are_those_of_the_spec(provider):
    limits = SandboxLimits(disk_bytes=8 * 1024 * 1024)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forked(provider, SandboxSpec(limits=limits)) as sandbox:
            for folder in ("/tmp", "/dev/shm", "~"):
                full = await sandbox.bash(f"df --output=size -B1 {folder} | tail -n 1", timeout_s=ACTION_TIMEOUT_S)
                assert int(full.output) == limits.disk_bytes


async def test_an_ipython_that_was_killed_before_its_first_cell_is_replaced(provider):
    kill = "pkill -KILL -f prorl_daemon.ipython_child; echo $?; sleep 0.5"
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forked(provider, SandboxSpec(prestart_ipython=True)) as sandbox:
            assert (await sandbox.bash(kill, timeout_s=ACTION_TIMEOUT_S)).output.strip() == "0"
            cell = await sandbox.ipython("6 * 7", timeout_s=ACTION_TIMEOUT_S)
            assert cell.result == "42", cell
            await sandbox.restart_ipython()
            assert (await sandbox.ipython("6 * 7", timeout_s=ACTION_TIMEOUT_S)).result == "42"


async def test_sandboxes_live_on_without_their_server_and_it_is_replaced(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forked(provider, SandboxSpec()) as sandbox:
            server = provider.fork_server
            os.kill(server.pid, signal.SIGKILL)
            while provider.fork_server is server:
                await trio.sleep(0.01)
            assert (await sandbox.bash("echo here", timeout_s=ACTION_TIMEOUT_S)).output.strip() == "here"
            async with provider.open_sandbox(SandboxSpec()) as another:
                await another.ping()
            await provider.wait_fork_server()
            assert provider.fork_server is not server
            async with provider.open_sandbox(SandboxSpec()) as another:
                await another.ping()
            assert provider.fork_server.forked_total == 1


async def test_a_server_whose_folder_somebody_has_removed_is_replaced(tmp_path):
    """Its sandboxes have no /proc: a removed folder takes what is mounted on it along."""
    provider = BubblewrapProvider(tmp_path / "r")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forking(provider) as server:
            shutil.rmtree(tmp_path / "r")
            with pytest.raises(SandboxUnavailable, match="No such file or directory"):
                await ping_new(provider)  # which is how it is noticed
            with pytest.raises(SandboxUnavailable, match="it did not start"):
                await ping_new(provider)
            await ping_new(provider)
            await provider.wait_fork_server()
            assert provider.fork_server is not server
            await ping_new(provider)
            assert provider.fork_server.forked_total == 1


async def ping_new(provider):
    async with provider.open_sandbox(SandboxSpec()) as sandbox:
        await sandbox.ping()


async def test_a_server_that_does_not_answer_is_given_up(provider, monkeypatch):
    monkeypatch.setattr(fork_server, "FORK_TIMEOUT_S", 0.5)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forking(provider) as server:
            before = descendants(os.getpid())
            os.kill(server.pid, signal.SIGSTOP)
            async with provider.open_sandbox(SandboxSpec()) as sandbox:
                assert (await sandbox.bash("echo here", timeout_s=ACTION_TIMEOUT_S)).output.strip() == "here"
                assert provider.fork_server is not server
        assert not {process for process in before if is_alive(process)}
    assert children_left() == []


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, None])
async def test_it_ends_at_once_whatever_state_it_is_in_and_no_other_process_is_looked_at(provider, monkeypatch, number):
    def search(_session):
        raise AssertionError("all processes of the machine were looked at")

    monkeypatch.setattr(process_tree, "session_members", search)
    monkeypatch.setattr(process_tree, "GRACE_S", 10 * TEST_TIMEOUT_S)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forking(provider):
            before = descendants(os.getpid())
            async with provider.open_sandbox(SandboxSpec()) as sandbox:
                await sandbox.bash("sleep 1000 & setsid sleep 1000 &", timeout_s=ACTION_TIMEOUT_S)
                while len(family := descendants(os.getpid()) - before) < 4:  # the daemon, its shell and two others
                    await trio.sleep(0.01)
                first = min(family)
                if number is not None:
                    os.kill(first.pid, number)
                while number == signal.SIGKILL and is_alive(first):
                    await trio.sleep(0.01)
            assert not any(map(is_alive, family))
            monkeypatch.undo()  # the server is no first process: it may take its time
    assert children_left() == []


async def test_without_nsenter_each_is_started_by_bubblewrap(provider, monkeypatch, caplog):
    monkeypatch.setattr(fork_server.shutil, "which", lambda _: None)
    caplog.set_level("INFO")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_shared(), provider.open_sandbox(SandboxSpec()) as sandbox:
            assert (await sandbox.bash("echo here", timeout_s=ACTION_TIMEOUT_S)).output.strip() == "here"
            assert provider.fork_server is None
    assert "no nsenter program" in caplog.text


async def test_others_than_host_are_not_forked(provider, tmp_path):
    layer = tmp_path / "layer"
    (layer / "data").mkdir(parents=True)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forking(provider) as server:
            for spec in (SandboxSpec(network=True), SandboxSpec(layers=(str(layer),))):
                async with provider.open_sandbox(spec) as sandbox:
                    await sandbox.ping()
            assert server.forked_total == 0


async def test_nothing_is_left_of_a_start_that_is_cancelled_anywhere(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forking(provider) as server:
            before = descendants(os.getpid())
            for after_s in (0.0, 0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.024):
                with trio.move_on_after(after_s):
                    async with provider.open_sandbox(SandboxSpec(prestart_ipython=True)):
                        pass
            assert server.forked_total > 2
            assert descendants(os.getpid()) <= before
    assert children_left() == []


def children_left():
    """Children of this process that have ended and were not reaped, by pid."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            found += [pid] if state == "Z" else []
    return found
