"""What a tool can find out about, or do to, the daemon that runs it: they are one user in one PID namespace."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import pytest
import trio

from prorl_ipc.file_calls import EditFile
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers import start

ACTION_TIMEOUT_S = 60
TOKEN = "0123456789abcdef-planted-token"

ATTEMPTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
def by_errno(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
def attach(request):
    by_errno(libc.ptrace(request, daemon, None, None))
def read_memory(call):
    buffer = ctypes.create_string_buffer(8)
    ours, theirs = Piece(ctypes.addressof(buffer), 8), Piece(ctypes.addressof(buffer), 8)
    by_errno(call(daemon, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0))
def take_descriptor():
    by_errno(libc.syscall(438, os.pidfd_open(daemon), 0, 0))
attempts = {
    "PTRACE_ATTACH": lambda: attach(16), "PTRACE_SEIZE": lambda: attach(0x4206),
    "process_vm_readv": lambda: read_memory(libc.process_vm_readv),
    "process_vm_writev": lambda: read_memory(libc.process_vm_writev),
    "pidfd_getfd": take_descriptor,
}
for name in ("mem", "environ", "maps", "auxv", "syscall", "stack"):
    attempts[name] = lambda name=name: open(f"/proc/{daemon}/{name}", "rb").read(1)
for name in ("cwd", "root", "exe", "fd/0", "fd/1"):
    attempts[name] = lambda name=name: os.readlink(f"/proc/{daemon}/{name}")
attempts["write to fd 1"] = lambda: open(f"/proc/{daemon}/fd/1", "wb").write(b"x")
def refusal(attempt):
    try:
        attempt()
    except OSError as exc:
        return exc.errno in (1, 13) or exc
    return "worked"
print({name: answer for name, attempt in attempts.items() if (answer := refusal(attempt)) is not True})
"""

SEARCH = """
import os, re
halves = {halves}
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            if "".join(halves).encode() in open(f"/proc/{{pid}}/{{name}}", "rb").read():
                found.append((pid, name))
        except OSError:
            pass
    if int(pid) == os.getpid():
        continue
    try:
        maps, memory = open(f"/proc/{{pid}}/maps").read(), open(f"/proc/{{pid}}/mem", "rb", 0)
    except OSError:
        continue
    for start, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", maps, re.M):
        try:
            memory.seek(int(start, 16))
            if "".join(halves).encode() in memory.read(int(end, 16) - int(start, 16)):
                found.append((pid, "memory"))
        except (OSError, ValueError, OverflowError):
            pass
found
"""


async def test_the_daemon_can_be_neither_read_nor_traced_nor_spoken_for(provider):
    with trio.fail_after(120):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            cell = await sandbox.ipython(f"import os\ndaemon = os.getppid()\n{ATTEMPTS}", timeout_s=ACTION_TIMEOUT_S)
            assert (cell.stdout, cell.error) == ("{}\n", None)
            await sandbox.write_file("/tmp/attempts.py", f"import sys\ndaemon = int(sys.argv[1])\n{ATTEMPTS}".encode())
            result = await sandbox.bash("python3 /tmp/attempts.py $PPID", timeout_s=ACTION_TIMEOUT_S)
            assert (result.output, result.exit_code) == ("{}\n", 0)


@pytest.mark.parametrize("prestart", [False, True])
async def test_the_token_of_the_channel_is_in_no_memory_that_a_tool_can_read(provider, monkeypatch, prestart):
    others = count()
    monkeypatch.setattr(
        start.secrets,
        "token_hex",
        lambda size: TOKEN if size == start.TOKEN_BYTES else f"{next(others):0{2 * size}x}",
    )
    with trio.fail_after(120):
        async with provider.open_sandbox(SandboxSpec(prestart_ipython=prestart)) as sandbox:
            await sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S)
            code = SEARCH.format(halves=[TOKEN[:12], TOKEN[12:]])
            cell = await sandbox.ipython(code, timeout_s=ACTION_TIMEOUT_S)
            assert (cell.result, cell.error) == ("[]", None)


async def test_the_daemon_opens_nothing_for_a_tool_that_the_tool_may_not_open(provider):
    """Its own files in /proc, and what its descriptors lead to: one is of a /proc that is whole, and can be written."""
    own = ("environ", "maps", "limits", "task/1/maps", "fd", "cwd/etc/passwd", "root/etc/passwd")
    paths = [f"/proc/{name}/{file}" for name in ("self", "1") for file in own]
    paths += [f"/proc/self/fd/{fd}{below}" for fd in range(24) for below in ("", "/cmdline", "/1/oom_score_adj")]
    opened = []
    with trio.fail_after(120):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            await sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S)  # by now it has the descriptors that it will have
            await sandbox.exec(["mkdir", "/tmp/links"], timeout_s=ACTION_TIMEOUT_S)
            for number, path in enumerate(paths):
                link = f"/tmp/links/{number}"
                await sandbox.exec(["ln", "-s", path, link], timeout_s=ACTION_TIMEOUT_S)
                for at in (path, link):
                    edited = await sandbox.edit_file(EditFile(command="view", path=at))
                    if edited.ok and edited.output.partition(":\n")[2].strip() != at:  # no list of an empty folder
                        opened.append(("edit", at))
                    with suppress(OSError):
                        await sandbox.read_file(at)
                        opened.append(("read_file", at))
                    with suppress(OSError):
                        await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S, cwd=at)
                        opened.append(("exec", at))
    assert opened == []
