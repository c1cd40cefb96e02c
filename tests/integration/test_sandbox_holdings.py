"""What open files and mappings hold in the kernel, for which a user has one number: bounded in each, and named."""

from __future__ import annotations

import pytest
import trio

from prorl_ipc.limits import SandboxLimits
from prorl_trio.sandbox.provider import SandboxSpec

pytestmark = pytest.mark.alone

MIB = 1024 * 1024
LIMITS = SandboxLimits(memory_bytes=192 * MIB)
TEST_TIMEOUT_S = 240
ACTION_TIMEOUT_S = 60
WATCH = """
import os, select, time
def watch():
    events, instances, watched = [os.eventfd(0) for _ in range(500)], [], 0
    while watched < 150_000:
        instances.append(select.epoll())
        for event in events:
            instances[-1].register(event, select.EPOLLIN)
        watched += len(events)
    time.sleep(300)
"""
SEND = """
import os, socket, time
def send(count):
    out, kept = socket.socketpair()
    for _ in range(count):
        socket.send_fds(out, [b"x"], [0] * 253)
    return out, kept
"""
LOCK = """
import fcntl, os, struct, time
def hold(files, kept_open=True):
    locks = [struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * n, 1, 0) for n in range(600)]
    for file in files:
        for lock in locks:
            fcntl.fcntl(file, 37, lock)
        kept_open or os.close(file)
    time.sleep(300)
"""
CONNECT = """
import socket
def connect(count, receive_bytes, send_bytes, close=False):
    kept = []
    for n in range(count):
        if n % 1000 == 0:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            listener.bind(("127.0.0.1", 0))
            listener.listen(4096)
            kept.append(listener)
        end = socket.create_connection(listener.getsockname())
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        end.setblocking(False)
        try:
            while end.send(bytes(8192)): pass
        except BlockingIOError: pass
        end.close() if close else kept.append(end)
    return kept
"""
FILTER = """
import ctypes, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
allow = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("@HP", 1, ctypes.addressof(allow)))
libc.prctl(38, 1, 0, 0, 0)
threading.stack_size(256 * 1024)
def put_on(count):
    for _ in range(count):
        if libc.prctl(22, 2, program, 0, 0): raise OSError(ctypes.get_errno(), "no filter")
    time.sleep(300)  # they last as long as their thread, which is killed before
"""
TRIES = {
    "epoll watches": (f"{WATCH}watch()", "descriptors"),
    "epoll watches in a thread's own table of files": (
        f"{WATCH}import ctypes, threading\n"
        "threading.Thread(target=lambda: (ctypes.CDLL(None).unshare(0x400), watch())).start()",
        "descriptors",
    ),
    "epoll watches of a process that may not be looked at": (
        f"{WATCH}import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\nwatch()",
        "descriptors",
    ),
    "open files": (
        "import os, time\nfor _ in range(28):\n    if os.fork() == 0:\n"
        "        files = [os.dup(0) for _ in range(3000)]\n        time.sleep(300)\ntime.sleep(300)",
        "descriptors",
    ),
    "locks of pipes": (f"{LOCK}hold(os.pipe()[1] for _ in range(120))", "descriptors"),
    "locks of a process that may not be looked at": (
        f"{LOCK}import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
        "hold(os.open('/tmp/%d' % n, os.O_RDWR | os.O_CREAT) for n in range(120))",
        "descriptors",
    ),
    "locks of mapped files that are closed": (
        f"{LOCK}import mmap\nkept = []\ndef mapped(n):\n"
        "    file = os.open('/tmp/m%d' % n, os.O_RDWR | os.O_CREAT)\n    os.ftruncate(file, 4096)\n"
        "    kept.append(mmap.mmap(file, 4096))\n    return file\nhold(map(mapped, range(120)), kept_open=False)",
        "descriptors",
    ),
    "mapped files that are closed": (
        "import ctypes, os, time\nlibc = ctypes.CDLL(None)\nopen('/tmp/two', 'wb').write(bytes(8192))\n"
        "for _ in range(5):\n    if os.fork() == 0:\n        for n in range(60_000):\n"
        "            file = os.open('/tmp/two', os.O_RDONLY)\n"
        "            libc.mmap(None, ctypes.c_size_t(4096), 1, 2, file, ctypes.c_long(4096 * (n % 2)))\n"
        "            os.close(file)\n        break\ntime.sleep(300)",
        "descriptors",
    ),
    "closed connections": (
        f"{CONNECT}import time\nkept = connect(1200, 2304, 8192, close=True)\ntime.sleep(300)",
        "descriptors",
    ),
    "buffers of connections": (
        f"{CONNECT}import time\nkept = connect(60, 4 << 20, 4 << 20)\ntime.sleep(300)",
        "descriptors",
    ),
    "files in flight": (f"{SEND}ends = send(8)\ntime.sleep(300)", "descriptors"),
    "files in flight in sockets in flight": (
        f"{SEND}out, kept = socket.socketpair()\na, b = send(8)\n"
        "socket.send_fds(out, [b'x'], [a.fileno(), b.fileno()])\na.close()\nb.close()\ntime.sleep(300)",
        "descriptors",
    ),
    "filters of threads": (
        f"{FILTER}for _ in range(30):\n    threading.Thread(target=put_on, args=(40,)).start()",
        "descriptors",
    ),
    "filters of processes": (
        f"{FILTER}import os\nfor _ in range(30): os.fork() or put_on(40)\nput_on(0)",
        "descriptors",
    ),
    "page tables": (
        "import mmap, time\narea = mmap.mmap(-1, 120 << 30, flags=0x4022, prot=1)\narea.madvise(mmap.MADV_NOHUGEPAGE)\n"
        "for at in range(0, 120 << 30, 2 << 20): area[at]\ntime.sleep(300)",
        "memory",
    ),
    "buffers of sockets": (
        "import socket, time\npairs = [socket.socketpair() for _ in range(900)]\nfor end in sum(pairs, ()):\n"
        "    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)\n    end.setblocking(False)\n    try:\n"
        "        while end.send(bytes(32768)): pass\n    except BlockingIOError: pass\ntime.sleep(300)",
        "memory",
    ),
}


async def test_what_is_held_in_the_kernel_is_bounded_in_each_and_named(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            # The daemon is the same everywhere, and so is what it reads: once more elsewhere is enough.
            for name in TRIES if provider.name == "bubblewrap" else ("epoll watches", "page tables"):
                code, breach = TRIES[name]
                await sandbox.write_file("/tmp/try.py", code.encode())
                result = await sandbox.bash("python3 /tmp/try.py", timeout_s=ACTION_TIMEOUT_S)
                assert result.breach == breach, f"{name}: {result}"
                assert "killed" in result.breach_text, name
                after = await sandbox.bash("echo alive", timeout_s=ACTION_TIMEOUT_S)
                assert (after.output.strip().splitlines()[-1], after.breach) == ("alive", ""), name


async def test_a_program_with_some_filters_is_let_alone(provider):
    # 480 filters, for as long as four looks of the watchdog take.
    code = f"{FILTER}import os\nfor _ in range(60): os.fork() or put_on(8)\ntime.sleep(4)"
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            await sandbox.write_file("/tmp/some.py", code.encode())
            result = await sandbox.bash("python3 /tmp/some.py; echo $?", timeout_s=ACTION_TIMEOUT_S)
            assert (result.output.strip()[-1:], result.breach) == ("0", "")


async def test_a_busy_server_and_its_clients_are_let_alone(provider):
    code = """
import os, select, socket, threading, time
listener = socket.create_server(("127.0.0.1", 0), backlog=300)
poll, ends = select.epoll(), []
for _ in range(300):
    ends.append(socket.create_connection(listener.getsockname()))
    ends.append(listener.accept()[0])
    poll.register(ends[-1], select.EPOLLIN)
here, there = socket.socketpair()
threading.Thread(target=time.sleep, args=(4,)).start()
for _ in range(8):
    os.fork() or time.sleep(9)
for n in range(400):
    socket.send_fds(here, [b"x"], [ends[n].fileno()])
    for fd in socket.recv_fds(there, 1, 1)[1]: os.close(fd)
    time.sleep(0.01)
os._exit(0)
"""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            await sandbox.write_file("/tmp/server.py", code.encode())
            result = await sandbox.bash("python3 /tmp/server.py; echo $?", timeout_s=ACTION_TIMEOUT_S)
            assert (result.output.strip()[-1:], result.breach) == ("0", "")
