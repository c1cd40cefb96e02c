"""The filter of system calls, run by an interpreter of the kernel's: what it says of every call."""

from __future__ import annotations

import errno
import fcntl
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_daemon import seccomp
from prorl_daemon.seccomp import ALLOW, ERROR, KILL_PROCESS, assemble, filter_end, filter_program
from prorl_daemon.syscall_rules import ABSENT, ARCHITECTURES, FOR_ADMINISTRATORS, rules

DAEMON = 7
KEY = (0x1122334455667788, 0x99AABBCCDDEEFF00)
NUMBERS = 600
I386 = 0x40000003
NEW_USER = 0x10000000
SIGCHLD = 17
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def interpret(code, audit, number, *arguments):
    """What the kernel would do with this call: it runs the assembled bytes."""
    words = [*arguments, *(0 for _ in range(6 - len(arguments)))]
    memory = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, audit, 0, *(word & 0xFFFFFFFFFFFFFFFF for word in words))
    program = list(struct.iter_unpack("=HBBI", code))
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, value = program[at]
        at += 1
        match operation:
            case seccomp.LOAD:
                (accumulator,) = struct.unpack_from("=I", memory, value)
            case seccomp.RETURN:
                return value
            case seccomp.JUMP_EQUAL:
                at += if_true if accumulator == value else if_false
            case seccomp.JUMP_ABOVE:
                at += if_true if accumulator > value else if_false
            case seccomp.JUMP_AT_LEAST:
                at += if_true if accumulator >= value else if_false
            case seccomp.JUMP_ANY_BIT:
                at += if_true if accumulator & value else if_false


def program_of(architecture, *, guarded):
    end = filter_end(architecture, struct.pack("=2Q", *KEY))
    begun = filter_program(architecture, rules(architecture, DAEMON, guarded=guarded))
    waiting = assemble([*begun, *filter_end(architecture, seccomp.NO_KEY)])
    assert seccomp.with_key(waiting, struct.pack("=2Q", *KEY)) == assemble([*begun, *end])
    return [*begun, *end]


def asking(name, *, guarded=True):
    """How the filter of an architecture answers a call."""
    code = assemble(program_of(ARCHITECTURES[name], guarded=guarded))
    return lambda *call: interpret(code, ARCHITECTURES[name].audit, *call)


@pytest.fixture(params=sorted(ARCHITECTURES))
def machine(request):
    """Its name, and how it answers a call."""
    return request.param, asking(request.param)


def column_of(name):
    return ARCHITECTURES[name].column


def refused(error):
    return ERROR | error


def test_what_no_tool_needs_is_refused_whatever_its_arguments(machine):
    name, ask = machine
    for table, error in ((ABSENT, errno.ENOSYS), (FOR_ADMINISTRATORS, errno.EPERM)):
        for call, numbers in table.items():
            if (number := numbers[column_of(name)]) is not None:
                for arguments in ((), (1, 2, 3), (DAEMON,)):
                    assert ask(number, *arguments) == refused(error), call


def test_every_other_call_is_allowed(machine):
    name, _ = machine
    architecture = ARCHITECTURES[name]
    for guarded in (True, False):
        found = rules(architecture, DAEMON, guarded=guarded)
        named = {rule.number for rule in found} | {PRLIMIT64[column_of(name)]}
        ask = asking(name, guarded=guarded)
        for number in set(range(NUMBERS)) - named:
            assert ask(number, DAEMON, 2**64 - 1, 40) == ALLOW, number
        assert len(named) == len(found) + 1, "the second rule of a call is never asked"


def test_other_conventions_and_architectures():
    architecture = ARCHITECTURES["x86_64"]
    code = assemble(program_of(architecture, guarded=True))
    for number in range(NUMBERS):
        assert interpret(code, I386, number) == KILL_PROCESS
        assert interpret(code, ARCHITECTURES["aarch64"].audit, number) == KILL_PROCESS
        assert interpret(code, architecture.audit, number | 0x40000000) == refused(errno.ENOSYS)
    assert interpret(code, architecture.audit, -1) == refused(errno.ENOSYS)


def test_namespaces(machine):
    name, ask = machine
    clone, unshare, clone3 = ((56, 220), (272, 97), (435, 435))
    column = column_of(name)
    for bit in (0x00020000, 0x02000000, 0x04000000, 0x08000000, NEW_USER, 0x20000000, 0x40000000):
        assert ask(clone[column], bit | SIGCHLD) == refused(errno.EPERM)
        assert ask(unshare[column], bit) == refused(errno.EPERM)
        assert ask(unshare[column], bit | 1 << 40) == refused(errno.EPERM), "the kernel looks at the lower half only"
    assert ask(unshare[column], 0x80) == refused(errno.EPERM)
    assert ask(clone[column], 0x003D0F00) == ALLOW, "a thread"
    assert ask(clone[column], SIGCHLD) == ALLOW, "a fork"
    assert ask(clone[column], 0x80) == ALLOW, "a fork that ends with another signal"
    assert ask(unshare[column], 0x400 | 0x200) == ALLOW, "CLONE_FILES, CLONE_FS"
    assert ask(clone3[column]) == refused(errno.ENOSYS)


def test_nobody_waits_for_a_lease_of_a_file(machine):
    name, ask = machine
    number = (72, 25)[column_of(name)]
    commands = {
        getattr(fcntl, what)
        for what in dir(fcntl)
        if what.startswith("F_") and what[2:5] not in ("RDL", "WRL", "UNL", "OWN")
    }
    commands -= {fcntl.F_SETLEASE}
    assert {ask(number, 3, command) for command in commands | {0, 36, 37, 38, 1030}} == {ALLOW}
    for command in (fcntl.F_SETLEASE, 1039, 1040, 1 << 32 | fcntl.F_SETLEASE, -1):
        assert ask(number, 3, command) == refused(errno.EINVAL), command


def test_nothing_of_a_filter_is_left_when_its_processes_have_ended(machine):
    """Of the memory for compiled filters, those of sockets and those of system calls, the machine has one number."""
    name, ask = machine
    setsockopt, seccomp_call = (54, 208)[column_of(name)], ARCHITECTURES[name].seccomp
    for option in (26, 51, 60):
        assert ask(setsockopt, 3, socket.SOL_SOCKET, option) == refused(errno.ENOPROTOOPT)
        assert ask(setsockopt, 3, 1 << 32 | socket.SOL_SOCKET, 1 << 32 | option) == refused(errno.ENOPROTOOPT)
    others = {(socket.SOL_SOCKET, option) for option in {*range(100)} - {26, 51, 60}}
    others |= {(level, option) for level in (0, 6, 17, 41, 270) for option in range(100)}
    assert {ask(setsockopt, 3, level, option) for level, option in others} == {ALLOW}
    for flags in (8, 8 | 1, 8 | 16):
        assert ask(seccomp_call, 1, flags, 0) == refused(errno.EINVAL)
    assert {ask(seccomp_call, operation, flags, 0) for operation in range(4) for flags in (0, 1, 2, 4)} == {ALLOW}


def test_no_page_is_held_that_counts_for_nobody(machine):
    name, ask = machine
    column = column_of(name)
    for numbers in SPLICES.values():
        assert ask(numbers[column], 3, 0, 4, 0, 1) == refused(errno.EINVAL)
    for numbers in SETXATTR.values():
        for size in (0, 1, 36, 1024):
            assert ask(numbers[column], NEW, NEW, NEW, size, 0) == ALLOW, size
        for size in (1025, 65536, 2**32 - 1, 2**63 | 1025):
            assert ask(numbers[column], NEW, NEW, NEW, size, 2) == refused(errno.ENOSPC), size
    for flags in (0x22, 0x21, 0x20022, 0x100022, 0x4022, 0x10022):
        assert ask(MMAP[column], 0, 4096, 3, flags, 2**64 - 1, 0) == ALLOW, flags
        assert ask(MMAP[column], 0, 4096, 3, flags | 0x40000 | 21 << 26, 2**64 - 1, 0) == refused(errno.ENOMEM), flags
    for flags in (0o1600, 0o666):
        assert ask(SHMGET[column], 0, 4096, flags) == ALLOW
        assert ask(SHMGET[column], 0, 4096, flags | 0o4000) == refused(errno.ENOMEM)


def test_only_the_daemon_has_a_key_to_limits(machine):
    name, _ = machine
    architecture = ARCHITECTURES[name]
    code = assemble([*filter_program(architecture, []), *filter_end(architecture, None)])
    assert seccomp.with_key(code, struct.pack("=2Q", *KEY)) == code, "no place for one"
    (placeholder, other) = struct.unpack("=2Q", seccomp.NO_KEY)
    number = PRLIMIT64[column_of(name)]
    for key in ((0, 0), KEY, (placeholder, other)):
        assert interpret(code, architecture.audit, number, 1, 7, 99, 0, *key) == refused(errno.EPERM)
    assert interpret(code, architecture.audit, number, 0, 7, 99, 0) == ALLOW, "its own"
    assert interpret(code, architecture.audit, number, 1, 7, 0, 99) == ALLOW, "to read"


def test_no_other_process_than_the_daemon_ever_has_a_key_in_its_memory():
    program = (
        "import os\nfrom prorl_daemon import seccomp\nos.urandom = seccomp.with_key = None\n"
        "seccomp.confine(daemon_pid=os.getppid(), guarded=True)\nassert seccomp._prlimit is None"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_sockets(machine):
    name, ask = machine
    number, pair = (41, 198)[column_of(name)], (53, 199)[column_of(name)]
    for family in range(50):
        if family in (1, 2, 10):
            assert {ask(number, family, kind, 255) for kind in range(6)} == {ALLOW}
        elif family == 16:
            for protocol in range(30):
                expected = ALLOW if protocol in (0, 4) else refused(errno.EPROTONOSUPPORT)
                assert ask(number, family, 3, protocol) == expected
        else:
            assert ask(number, family, 1, 0) == refused(errno.EAFNOSUPPORT), family
            assert ask(number, family | 1 << 32, 1, 0) == refused(errno.EAFNOSUPPORT)
        assert ask(pair, family) == (ALLOW if family == 1 else refused(errno.EAFNOSUPPORT))


SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
}
PRLIMIT64, SETRLIMIT = (302, 261), (160, 164)
SPLICES = {"splice": (275, 76), "tee": (276, 77)}
SETXATTR = {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)}
MMAP, SHMGET = (9, 222), (29, 194)
SCHEDULING = {
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
SETPRIORITY, IOPRIO_SET = (141, 140), (251, 30)
CORE, LOCKS, NEW, OLD = 4, 10, 0x7FFFDEADBEE0, 0x7FFFDEADBEF0
OTHERS = (1, 2, DAEMON, DAEMON + 1, 2**32 - 1, -1, -DAEMON, 0x80000000)
"""Ids of others: processes, threads, groups and users alike. To the kernel 2**32 is 0: it looks at the lower half."""


def test_signals_that_name_the_daemon(machine):
    name, ask = machine
    for call, numbers in SIGNALS.items():
        number = numbers[column_of(name)]
        assert ask(number, DAEMON) == refused(errno.EPERM), call
        assert ask(number, DAEMON | 1 << 32, DAEMON, 9) == refused(errno.EPERM), call
        for other in (0, 1, DAEMON + 1, -1, -DAEMON):
            assert ask(number, other, DAEMON, DAEMON) == ALLOW, (call, other)


def test_limits_are_a_process_s_own(machine):
    name, ask = machine
    number = PRLIMIT64[column_of(name)]
    for what in range(16):
        own = {LOCKS: refused(errno.EPERM), CORE: refused(0)}.get(what, ALLOW)
        for new in (NEW, 1, 1 << 32):
            assert ask(number, 0, what, new, OLD) == own
            assert ask(number, 1 << 32, what, new, 0) == own
            assert ask(number, 0, what | 1 << 32, new, 0) == own
            for other in OTHERS:
                assert ask(number, other, what, new, OLD) == refused(errno.EPERM), (other, what, new)
                assert ask(number, other, what, new, 0, *KEY[::-1]) == refused(errno.EPERM)
                assert ask(number, other, what, new, 0, *KEY) == ALLOW, "the daemon"
            assert ask(number, 0, what, new, 0, *KEY) == ALLOW, "its own"
        for other in (0, *OTHERS):
            assert ask(number, other, what, 0, OLD) == ALLOW, "it only reads"
    for near in range(128):
        wrong = (KEY[0] ^ 1 << near, KEY[1]) if near < 64 else (KEY[0], KEY[1] ^ 1 << near - 64)
        assert ask(number, DAEMON, 7, NEW, 0, *wrong) == refused(errno.EPERM), near


def test_nobody_takes_the_mark_off(machine):
    name, ask = machine
    for what in range(16):
        own = refused(errno.EPERM) if what in (CORE, LOCKS) else ALLOW
        assert ask(SETRLIMIT[column_of(name)], what, LOCKS, LOCKS) == own
    assert ask(SETRLIMIT[column_of(name)], LOCKS | 1 << 32, NEW) == refused(errno.EPERM)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_where_no_capability_guards_the_daemon_only_the_caller_is_scheduled(name):
    column, ask, kernel = column_of(name), asking(name, guarded=False), asking(name)
    for call, numbers in SCHEDULING.items():
        assert ask(numbers[column], 0, 5, NEW) == ALLOW, call
        for other in OTHERS:
            assert ask(numbers[column], other, 0, 0) == refused(errno.EPERM), (call, other)
            assert kernel(numbers[column], other, 0, 0) == ALLOW, "the kernel's business"
    for numbers, process in ((SETPRIORITY, 0), (IOPRIO_SET, 1)):
        for which in (*range(5), -1):
            assert ask(numbers[column], which, 0, DAEMON) == (ALLOW if which == process else refused(errno.EPERM))
            for other in OTHERS:
                assert ask(numbers[column], which, other, 0) == refused(errno.EPERM), (numbers, which, other)
                assert kernel(numbers[column], which, other, 0) == ALLOW, "the kernel's business"


def test_jumps_are_short_enough_and_end_inside(machine):
    name, _ = machine
    program = program_of(ARCHITECTURES[name], guarded=False)
    assert len(program) < 4096, "the kernel's limit"
    for at, part in enumerate(program):
        if part.code not in (seccomp.LOAD, seccomp.RETURN):
            assert max(part.if_true, part.if_false) <= 255
            assert at + 1 + max(part.if_true, part.if_false) < len(program)


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_numbers_are_the_kernels(name):
    if not HEADERS[name].exists():
        pytest.skip(f"no {HEADERS[name]}: the kernel's headers are not installed (apt install linux-libc-dev)")
    text = HEADERS[name].read_text()
    known = {key: int(value) for key, value in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", text)}
    tables = {**ABSENT, **FOR_ADMINISTRATORS, **SIGNALS, **SCHEDULING, "prlimit64": PRLIMIT64, "setrlimit": SETRLIMIT}
    tables |= {**SPLICES, **SETXATTR, "mmap": MMAP, "shmget": SHMGET}
    tables |= {"setpriority": SETPRIORITY, "ioprio_set": IOPRIO_SET}
    tables |= {"clone": (56, 220), "clone3": (435, 435), "unshare": (272, 97), "socket": (41, 198)}
    tables |= {"socketpair": (53, 199)}
    for call, numbers in tables.items():
        if call in known:  # the headers may be older than the call
            assert known[call] == numbers[column_of(name)], call
    assert len(known.keys() & tables.keys()) > 45
    assert known["seccomp"] == ARCHITECTURES[name].seccomp
    assert known["keyctl"] == ARCHITECTURES[name].keyctl
