"""The daemon from inside: no call that names a process, by whatever number, changes its limits, priority or end."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import trio

from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers import apptainer, bubblewrap
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.types.errors import SandboxLost
from support.forking import ForkingProvider
from support.processes import is_first

TEST_TIMEOUT_S = 120
ACTION_TIMEOUT_S = 60

ATTEMPTS = """
import ctypes, errno, fcntl, json, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    wide = [a if isinstance(a, (bytes, type(None), ctypes.Array)) else ctypes.c_long(a) for a in arguments]
    result = libc.syscall(number, *wide)
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "worked"
limits, idle = struct.pack("=2Q", 1, 1), struct.pack("=i", 0)
attributes = struct.pack("=IIQiIQQQ", 48, 5, 0, 0, 0, 0, 0, 0)
mask, words = struct.pack("=Q", 1), ctypes.create_string_buffer(64)
room = ctypes.create_string_buffer(8)
piece = struct.pack("=2Q", ctypes.addressof(room), 8)
threads = list(map(int, os.listdir("/proc/1/task")))
visible = {int(name) for name in os.listdir("/proc") if name.isdigit()}
others = {tid for pid in visible - {1} for tid in map(int, os.listdir(f"/proc/{pid}/task"))}
ids = sorted({*threads, *range(1, 32)} - others)
said = {}
def note(name, target, answer):
    said.setdefault(name, {}).setdefault(answer, []).append(target)
for pid in ids:
    for what in range(16):
        note("prlimit64", pid, call(302, pid, what, limits, None))
    for which in range(4):
        note("setpriority", pid, call(141, which, pid, 19))
        note("ioprio_set", pid, call(251, which, pid, 3 << 13))
    note("sched_setaffinity", pid, call(203, pid, 8, mask))
    note("sched_setparam", pid, call(142, pid, idle))
    for policy in (0, 3, 5):
        note("sched_setscheduler", pid, call(144, pid, policy, idle))
    note("sched_setattr", pid, call(314, pid, attributes, 0))
    for number in (1, 2, 3, 6, 9, 10, 12, 14, 15, 19, 20, 25, 34, 64):
        note("kill", pid, call(62, pid, number))
        note("tkill", pid, call(200, pid, number))
        note("tgkill", pid, call(234, 1, pid, number))
        info = struct.pack("=iii4xQ", number, 0, -1, 0) + bytes(104)
        note("rt_sigqueueinfo", pid, call(129, pid, number, info))
        note("rt_tgsigqueueinfo", pid, call(297, 1, pid, number, info))
    note("ptrace", pid, call(101, 16, pid, None, None))
    note("ptrace", pid, call(101, 0x4206, pid, None, None))
    note("process_vm_readv", pid, call(310, pid, piece, 1, piece, 1, 0))
    note("process_vm_writev", pid, call(311, pid, piece, 1, piece, 1, 0))
    note("kcmp", pid, call(312, pid, os.getpid(), 0, 0, 0))
    note("migrate_pages", pid, call(256, pid, 64, mask, mask))
    note("move_pages", pid, call(279, pid, 1, words, words, words, 2))
    note("get_robust_list", pid, call(274, pid, words, words))
    note("perf_event_open", pid, call(298, words, pid, -1, -1, 0))
    note("PR_SCHED_CORE", pid, call(157, 62, 2, pid, 1, 0))
    note("setpgid", pid, call(109, pid, 0))
    for flags in (0, 0x80):
        fd = libc.syscall(434, pid, flags)
        note("pidfd_open", pid, "worked" if fd >= 0 else errno.errorcode[ctypes.get_errno()])
        if fd >= 0:
            note("pidfd_getfd", pid, call(438, fd, 0, 0))
            os.close(fd)
    for path in (f"/proc/{pid}", f"/proc/1/task/{pid}"):
        try:
            fd = os.open(path, os.O_DIRECTORY)
        except OSError:
            continue
        for number in (2, 9, 15, 19):
            note("pidfd_send_signal", pid, call(424, fd, number, None, 0))
        note("process_madvise", pid, call(440, fd, words, 1, 20, 0))
        note("process_mrelease", pid, call(448, fd, 0))
        note("pidfd_getfd", pid, call(438, fd, 0, 0))
        note("setns", pid, call(308, fd, 0x20000000))
        os.close(fd)
        for name in os.listdir(path):
            for mode in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
                try:
                    os.close(os.open(f"{path}/{name}", mode))
                    note("files", f"{path}/{name}", "worked")
                except OSError:
                    pass
    for name in ("oom_score_adj", "oom_adj", "autogroup", "coredump_filter", "clear_refs", "sched", "timerslack_ns",
                 "comm", "mem", "uid_map", "setgroups", "loginuid", "attr/current"):
        for path in (f"/proc/{pid}/{name}", f"/proc/{pid}/task/{pid}/{name}", f"/proc/1/task/{pid}/{name}"):
            try:
                with open(path, "wb", 0) as file:
                    file.write(b"7")
                    note("files", path, "worked")
            except OSError:
                pass
    reader, writer = os.pipe()
    for number in (2, 9, 15, 19):
        # The kernel sends the signal: when there is something to read, to a process, a thread and a group.
        fcntl.fcntl(reader, fcntl.F_SETSIG, number)
        for kind in range(3):
            note("F_SETOWN_EX", pid, call(72, reader, 15, struct.pack("=ii", kind, pid)))
            fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
            os.write(writer, b"x")
    os.close(reader), os.close(writer)
note("setrlimit of the mark", 0, call(160, 10, limits))
note("prlimit64 of the mark", 0, call(302, 0, 10, limits, None))
note("setpriority of its user", 0, call(141, 2, 0, 1))
worked = {name: sorted(set(answers["worked"])) for name, answers in said.items() if "worked" in answers}
print("SAID" + json.dumps(worked))
"""
HARMLESS = {
    "F_SETOWN_EX",  # the first process of a namespace takes no signal
    *("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_send_signal"),
}
"""May be answered with success: by the kernel, which does nothing then."""

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers above are of x86-64")


def state_of(daemon):
    """What could be done to it, as it is seen from outside."""
    folder = Path(f"/proc/{daemon}")
    found = {name: (folder / name).read_text() for name in ("limits", "oom_score_adj", "coredump_filter")}
    if (folder / "autogroup").exists():
        found["autogroup"] = (folder / "autogroup").read_text().split()[-1]
    for task in (folder / "task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[task.name] = (
            *(fields[16], fields[38]),  # nice, policy
            re.search("Cpus_allowed:.*", (task / "status").read_text())[0],
        )
    return found


def handled_signals(daemon):
    caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{daemon}/status").read_text())[1], 16)
    return {number + 1 for number in range(64) if caught >> number & 1}


def daemon_in(before):
    (daemon,) = (process.pid for process in descendants(os.getpid()) - before if is_first(process.pid))
    return daemon


async def attack(provider, by):
    before = descendants(os.getpid())
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(prestart_ipython=True)) as sandbox:
            await sandbox.ipython("1", timeout_s=ACTION_TIMEOUT_S)
            await sandbox.write_file("/tmp/attempts.py", ATTEMPTS.encode())
            daemon = daemon_in(before)
            as_it_was = state_of(daemon)
            match by:
                case "bash":
                    done = (await sandbox.bash("python3 /tmp/attempts.py", timeout_s=ACTION_TIMEOUT_S)).output
                case _:
                    done = (await sandbox.ipython("%run /tmp/attempts.py", timeout_s=ACTION_TIMEOUT_S)).stdout
            worked = json.loads(done.partition("SAID")[2])
            assert {name: targets for name, targets in worked.items() if name not in HARMLESS} == {}
            now = state_of(daemon)
            assert {name: value for name, value in now.items() if value != as_it_was.get(name, value)} == {}
            assert handled_signals(daemon) <= {17, 32, 33}, "SIGCHLD, and two of the C library's own"
            assert (await sandbox.bash("echo alive", timeout_s=ACTION_TIMEOUT_S)).output == "alive\n"


@pytest.mark.parametrize("by", ["bash", "ipython"])
async def test_no_number_names_the_daemon(provider, by):
    await attack(provider, by)


@pytest.mark.parametrize("name", ["bubblewrap", "apptainer"])
async def test_nor_where_the_launcher_gives_no_capability(name, tmp_path, monkeypatch):
    without = tuple(word for word in bubblewrap._ISOLATION if word not in ("--cap-add", "CAP_SETPCAP"))
    monkeypatch.setattr(bubblewrap, "_ISOLATION", without)
    monkeypatch.setattr(apptainer, "_GUARD", "CAP_KILL")
    provider = PROVIDERS[name](tmp_path)
    report = await provider.probe()
    if not report.usable:
        pytest.skip(f"{name} cannot run here: {report.problem}. What to do: {report.remedy}")
    await attack(provider, "bash")


TAKES_ITS_MARK_OFF = """
import ctypes, os, resource, struct, sys, time
libc = ctypes.CDLL(None)
for limits in ((7, 7), (0, 0), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)):
    words = struct.pack("=2Q", *(limit & 2**64 - 1 for limit in limits))
    for number, *arguments in ((160, 10, words), (302, 0, 10, words, None), (302, os.getpid(), 10, words, None),
                               (160, 10 | 1 << 32, words), (302, 1 << 32, 10, words, None, 1, 2)):
        assert libc.syscall(number, *(a if isinstance(a, bytes) or a is None else ctypes.c_long(a) for a in arguments))
os.system("ulimit -x 5; ulimit -Hx 5; prlimit --locks=5:5 true")
for _ in range(3):
    if os.fork():
        os._exit(0)
    os.setsid()
os.closerange(0, 3)
open("/tmp/lives", "w").close()
time.sleep(100)
"""


async def test_a_program_cannot_outlive_its_exec(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            program = f"import os, time\nif not os.fork(): exec({TAKES_ITS_MARK_OFF!r})\n"
            program += "while not os.path.exists('/tmp/lives'): time.sleep(0.01)"
            done = await sandbox.exec(["python3", "-c", program], timeout_s=ACTION_TIMEOUT_S)
            assert done.exit_code == 0, done
            shown = await sandbox.bash("ps -eo pid,args", timeout_s=ACTION_TIMEOUT_S)
    assert "sleep(100)" not in shown.output, shown


SECRETS = (
    "cmdline config.gz iomem ioports kallsyms kcore key-users keys kmsg kpageflags "
    "sched_debug slabinfo timer_list vmallocinfo"
)
FOLDERS = "acpi asound scsi"
NEEDED = "cgroups cpuinfo filesystems loadavg meminfo mounts net stat sys uptime version vmstat"


async def test_of_the_machine_is_seen_what_programs_look_for(provider):
    look = f"cd /proc; cat {SECRETS} 2>/dev/null | wc -c; find {FOLDERS} -mindepth 1 2>/dev/null"
    look += (
        f"; for f in {NEEDED}; do test -d $f || grep -q . $f || echo no $f; done; free > /dev/null && ps > /dev/null"
    )
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            done = await sandbox.bash(look, timeout_s=ACTION_TIMEOUT_S)
    assert (done.output, done.exit_code) == ("0\n", 0)


@pytest.mark.parametrize("changed", ["limits", "adjustment", "nothing"])
async def test_a_killed_daemon_whose_bounds_were_changed_was_killed_from_inside(tmp_path, changed):
    provider = ForkingProvider(tmp_path)
    report = await provider.probe()
    if not report.usable:
        pytest.skip(f"bubblewrap cannot run here: {report.problem}. What to do: {report.remedy}")
    before = descendants(os.getpid())
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S)
            daemon = daemon_in(before)
            if changed == "limits":  # as a tool once could, by the id of a thread
                resource.prlimit(daemon, resource.RLIMIT_CPU, (1000, 1000))
            if changed == "adjustment":
                try:
                    Path(f"/proc/{daemon}/oom_score_adj").write_text("900")
                except PermissionError:
                    pytest.skip("only root can change the adjustment of a daemon")
            os.kill(daemon, signal.SIGKILL)
            with pytest.raises(SandboxLost) as lost:
                await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S)
    assert lost.value.from_inside == (changed != "nothing")
