"""The filter of system calls, run by an interpreter of the kernel's: what it says of every call."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from sandbox_daemon import seccomp
from sandbox_daemon.seccomp import ALLOW, ERROR, KILL_PROCESS, assemble, filter_program
from sandbox_daemon.syscall_rules import ABSENT, ARCHITECTURES, FOR_ADMINISTRATORS, ON_THE_DAEMON, rules

DAEMON = 7
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
            case seccomp.JUMP_AT_LEAST:
                at += if_true if accumulator >= value else if_false
            case seccomp.JUMP_ANY_BIT:
                at += if_true if accumulator & value else if_false


@pytest.fixture(params=sorted(ARCHITECTURES))
def machine(request):
    """Its name, and how it answers a call."""
    architecture = ARCHITECTURES[request.param]
    code = assemble(filter_program(architecture, rules(architecture, DAEMON)))
    return request.param, lambda *call: interpret(code, architecture.audit, *call)


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
    name, ask = machine
    architecture = ARCHITECTURES[name]
    named = {rule.number for rule in rules(architecture, DAEMON)}
    for number in set(range(NUMBERS)) - named:
        assert ask(number, DAEMON, 2**64 - 1, 40) == ALLOW, number
    assert len(named) == len(rules(architecture, DAEMON)), "the second rule of a call is never asked"


def test_other_conventions_and_architectures():
    architecture = ARCHITECTURES["x86_64"]
    code = assemble(filter_program(architecture, rules(architecture, DAEMON)))
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


def test_what_names_the_daemon(machine):
    name, ask = machine
    for call, (numbers, argument) in ON_THE_DAEMON.items():
        number = numbers[column_of(name)]
        others = [0] * argument
        assert ask(number, *others, DAEMON) == refused(errno.EPERM), call
        assert ask(number, *others, DAEMON | 1 << 32) == refused(errno.EPERM), call
        for other in (0, 1, DAEMON + 1, -1, -DAEMON):
            assert ask(number, *others, other, DAEMON) == ALLOW, (call, other)


def test_jumps_are_short_enough_and_end_inside(machine):
    name, _ = machine
    architecture = ARCHITECTURES[name]
    program = filter_program(architecture, rules(architecture, DAEMON))
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
    tables = {**ABSENT, **FOR_ADMINISTRATORS, **{call: numbers for call, (numbers, _) in ON_THE_DAEMON.items()}}
    tables |= {"clone": (56, 220), "clone3": (435, 435), "unshare": (272, 97), "socket": (41, 198)}
    tables |= {"socketpair": (53, 199)}
    for call, numbers in tables.items():
        if call in known:  # the headers may be older than the call
            assert known[call] == numbers[column_of(name)], call
    assert len(known.keys() & tables.keys()) > 45
    assert known["seccomp"] == ARCHITECTURES[name].seccomp
    assert known["keyctl"] == ARCHITECTURES[name].keyctl
