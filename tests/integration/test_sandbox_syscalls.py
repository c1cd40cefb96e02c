"""System calls from inside: what no tool needs is refused, in every kind of process; what tools do works as before."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys

import pytest
import trio

from prorl_trio.sandbox.provider import SandboxSpec

TEST_TIMEOUT_S = 120
ACTION_TIMEOUT_S = 60
KEYCTL, ADD_KEY = 250, 248
JOIN_SESSION_KEYRING, SESSION_KEYRING, REVOKE = 1, -3, 3

ATTEMPTS = """
import ctypes, errno, fcntl, mmap, os, socket, struct, tempfile
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
daemon = 1
attempts = {
    "add_key": lambda: call(248, b"user", b"planted", b"x", 1, -3),
    "keyctl": lambda: call(250, 0, -3, 0),
    "request_key": lambda: call(249, b"user", b"SECRET", None, 0),
    "bpf": lambda: call(321, 0, None, 0),
    "perf_event_open": lambda: call(298, None, 0, -1, -1, 0),
    "userfaultfd": lambda: call(323, 0),
    "io_uring_setup": lambda: call(425, 1, None),
    "io_setup": lambda: call(206, 1, None),
    "memfd_create": lambda: os.memfd_create("held"),
    "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
    "packet": lambda: socket.socket(17, socket.SOCK_RAW),
    "algorithms": lambda: socket.socket(38, socket.SOCK_SEQPACKET),
    "audit": lambda: socket.socket(16, socket.SOCK_RAW, 9),
    "user namespace": lambda: call(272, 0x10000000),
    "user namespace of a child": lambda: call(56, 0x10000000 | 17, None, None, None, None),
    "open_by_handle_at": lambda: call(304, -100, None, 0),
    "mount": lambda: call(165, b"none", b"/tmp", b"tmpfs", 0, None),
    "the daemon's limits": lambda: call(302, daemon, 7, (ctypes.c_ulong * 2)(3, 3), None),
    "the daemon's priority": lambda: os.setpriority(os.PRIO_PROCESS, daemon, 19),
    "the daemon's processors": lambda: os.sched_setaffinity(daemon, {0}),
    "a lease of a file": lambda: fcntl.fcntl(tempfile.TemporaryFile().fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK),
    "a filter of a socket": lambda: socket.socketpair()[0].setsockopt(1, 26, struct.pack("@HP", 1, 0)),
    "a filter that outlives its process": lambda: call(317, 1, 8, None),
    "pages of its memory in a pipe": lambda: call(278, os.pipe()[1], (ctypes.c_ulong * 2)(), 1, 0),
    "pages of a file in a pipe": lambda: call(275, os.open(__file__, os.O_RDONLY), None, os.pipe()[1], None, 1, 0),
    "pages of a pipe in another": lambda: call(276, os.pipe()[0], os.pipe()[1], 1, 0),
    "pages of its memory in a socket": lambda: socket.socket().setsockopt(1, 60, 1),
    "a long list of access control": lambda: os.setxattr(__file__, "system.posix_acl_access", bytes(1028)),
    "an attribute by a later call": lambda: call(463, -100, b"/tmp", 0, b"user.a", None, 16),
    "pages of the machine's reserve": lambda: mmap.mmap(-1, 2 << 20, flags=0x40022),
    "a segment of the machine's reserve": lambda: call(29, 0, 2 << 20, 0o5600),
    "an end of the daemon": lambda: os.kill(daemon, 15),
    "a stop of the daemon": lambda: call(234, daemon, daemon, 19),
}
for name, attempt in attempts.items():
    try:
        attempt()
        print(name, "worked", sep=": ")
    except OSError as error:
        print(name, errno.errorcode[error.errno], sep=": ")
"""
ANSWERS = {
    **dict.fromkeys(("add_key", "keyctl", "request_key", "bpf", "perf_event_open", "userfaultfd"), "ENOSYS"),
    **dict.fromkeys(("io_uring_setup", "io_setup", "memfd_create"), "ENOSYS"),
    **dict.fromkeys(("vsock", "packet", "algorithms"), "EAFNOSUPPORT"),
    "audit": "EPROTONOSUPPORT",
    "a lease of a file": "EINVAL",
    "a filter of a socket": "ENOPROTOOPT",
    "a filter that outlives its process": "EINVAL",
    "pages of its memory in a pipe": "ENOSYS",
    **dict.fromkeys(("pages of a file in a pipe", "pages of a pipe in another"), "EINVAL"),
    "pages of its memory in a socket": "ENOPROTOOPT",
    "a long list of access control": "ENOSPC",
    "an attribute by a later call": "ENOSYS",
    **dict.fromkeys(("pages of the machine's reserve", "a segment of the machine's reserve"), "ENOMEM"),
    **dict.fromkeys(("user namespace", "user namespace of a child", "open_by_handle_at", "mount"), "EPERM"),
    **dict.fromkeys(("the daemon's limits", "the daemon's priority", "the daemon's processors"), "EPERM"),
    **dict.fromkeys(("an end of the daemon", "a stop of the daemon"), "EPERM"),
}
USUAL = """
import ctypes, mmap, multiprocessing, os, resource, select, shutil, signal, socket, subprocess, sys, tempfile, threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
with multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]
memory = shared_memory.SharedMemory(create=True, size=4096); memory.close(); memory.unlink()
assert subprocess.run(["sh", "-c", "exit 3"]).returncode == 3
assert socket.if_nameindex()
a, b = socket.socketpair(); socket.send_fds(a, [b"x"], [0]); a.close(); b.close()
server = socket.create_server(("127.0.0.1", 0)) if False else socket.socket(socket.AF_UNIX)
child = os.posix_spawn("/bin/sleep", ["sleep", "100"], {})
os.sched_setaffinity(child, os.sched_getaffinity(0)); os.setpriority(os.PRIO_PROCESS, child, 19); os.nice(1)
resource.prlimit(child, resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
resource.prlimit(0, resource.RLIMIT_CPU, (60, 70))
sleeper = threading.Thread(target=signal.sigtimedwait, args=([signal.SIGUSR1], 0.2)); sleeper.start()
os.sched_setaffinity(sleeper.native_id, {0}); os.setpriority(os.PRIO_PROCESS, sleeper.native_id, 19); sleeper.join()
os.kill(os.pidfd_open(child) and child, signal.SIGTERM); assert os.waitpid(child, 0)[1] == signal.SIGTERM
mmap.mmap(-1, 1 << 20)
core = resource.getrlimit(resource.RLIMIT_CORE); resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
assert resource.getrlimit(resource.RLIMIT_CORE) == core and core in ((0, 0), (1, 1)), core
with tempfile.TemporaryDirectory() as folder:
    source, copy = folder + "/source", folder + "/copy"
    with open(source, "wb") as file: file.write(bytes(100_000))
    shutil.copy2(source, copy); assert os.path.getsize(copy) == 100_000
    a, b = socket.socketpair(); assert a.sendfile(open(source, "rb"), count=5000) == 5000; a.close(); b.close()
    assert subprocess.run(["cat", source], stdout=open(copy, "wb")).returncode == 0
    try: os.setxattr(copy, "user.note", bytes(1024))
    except OSError as error: assert error.errno == 95  # a kernel whose tmpfs has no such attributes
ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)()
import numpy; (numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum()
print("usual")
"""
IN_A_SHELL = """
set -e
(ulimit -S -n 64; ulimit -c 0; ulimit -t 60; ulimit -a > /dev/null)
nice -n 3 true; taskset 1 true; timeout 5 true; prlimit --nofile=64:64 true; prlimit --pid $$ > /dev/null
sleep 60 & renice -n 19 -p $! > /dev/null; taskset -p 1 $! > /dev/null; chrt -b -p 0 $!; ionice -c 2 -n 7 -p $!; kill %1
sleep 61 & kill -9 $!; wait $! || test $? = 137
sleep 62 & pkill -f 'sleep 62'; wait $! || test $? = 143
OMP_PROC_BIND=true OMP_NUM_THREADS=2 python3 -c 'import numpy; numpy.ones((200, 200)) @ numpy.ones((200, 200))'
echo usual
"""
THIRTY_TWO_BITS = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # getpid by the convention of 32-bit programs
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("answered", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers below are of x86-64")


async def test_what_no_tool_needs_is_refused_in_every_kind_of_process(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            await sandbox.write_file("/tmp/attempts.py", ATTEMPTS.encode())
            by_bash = await sandbox.bash("python3 /tmp/attempts.py", timeout_s=ACTION_TIMEOUT_S)
            by_cell = await sandbox.ipython("%run /tmp/attempts.py", timeout_s=ACTION_TIMEOUT_S)
            by_exec = await sandbox.exec(["python3", "/tmp/attempts.py"], timeout_s=ACTION_TIMEOUT_S)
    for printed in (by_bash.output, by_cell.stdout, by_exec.stdout.decode()):
        assert dict(line.split(": ") for line in printed.strip().splitlines()) == ANSWERS


async def test_what_tools_do_works(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            await sandbox.write_file("/tmp/usual.py", f"if __name__ == '__main__':\n exec({USUAL!r})".encode())
            result = await sandbox.bash("python3 /tmp/usual.py 2>&1", timeout_s=ACTION_TIMEOUT_S)
            await sandbox.write_file("/tmp/usual.sh", IN_A_SHELL.encode())
            shell = await sandbox.bash("bash -m /tmp/usual.sh 2>&1", timeout_s=ACTION_TIMEOUT_S)
            traced = await sandbox.bash("command -v strace && strace -f -o /dev/null true", timeout_s=ACTION_TIMEOUT_S)
            debugged = await sandbox.bash(
                "command -v gdb && gdb --batch -ex run -ex 'print 6*7' true 2>&1 | grep '= 42'",
                timeout_s=ACTION_TIMEOUT_S,
            )
    assert result.output.strip() == "usual"
    assert shell.output.strip().endswith("usual"), shell
    assert traced.exit_code == 0 or not traced.output.strip(), traced
    assert debugged.exit_code == 0 or not debugged.output.strip(), debugged


async def test_programs_of_32_bits_are_ended_by_name(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            done = await sandbox.exec(["python3", "-c", THIRTY_TWO_BITS], timeout_s=ACTION_TIMEOUT_S)
    assert done.stdout == b""
    assert done.exit_code in (128 + signal.SIGSYS, 128 + signal.SIGSEGV), "SIGSEGV: the kernel has no such programs"


@pytest.fixture
def planted_key():
    """A key in the session keyring of the process that starts sandboxes: its description and content are secrets."""
    libc = ctypes.CDLL(None, use_errno=True)
    secret = f"key-{secrets.token_hex(8)}"
    if libc.syscall(KEYCTL, JOIN_SESSION_KEYRING, None) < 0:
        pytest.skip("this kernel has no keyrings")
    key = libc.syscall(ADD_KEY, b"user", secret.encode(), secret.encode(), len(secret), SESSION_KEYRING)
    assert key > 0
    assert libc.syscall(KEYCTL, 5, key, 0x3F3F0000) == 0, "anybody of this user may look"
    yield secret
    libc.syscall(KEYCTL, REVOKE, key)


async def test_the_nodes_keyring_is_not_inside(provider, planted_key):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            shown = await sandbox.bash(
                "cat /proc/keys /proc/key-users; grep -c . /proc/keys", timeout_s=ACTION_TIMEOUT_S
            )
            attempts = ATTEMPTS.replace("SECRET", planted_key)
            asked = await sandbox.ipython(attempts, timeout_s=ACTION_TIMEOUT_S)
    assert shown.output.strip() == "0"
    assert planted_key not in shown.output
    assert "request_key: ENOSYS" in asked.stdout


def test_the_daemon_joins_a_keyring_of_its_own(planted_key):
    """Also what it did not refuse could not be read: the keyring is another one."""
    code = (
        "import ctypes; from prorl_daemon import seccomp; seccomp.filter_program = lambda *_: "
        "[seccomp.Instruction(seccomp.RETURN, seccomp.ALLOW)]; seccomp.confine(daemon_pid=1, guarded=True)\n"
        "libc = ctypes.CDLL(None)\n"
        f"print(libc.syscall({KEYCTL}, 10, {SESSION_KEYRING}, b'user', b'{planted_key}', 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == -1
