"""The system call filter that the daemon sets for itself, and permanently for all its children.

A program for the kernel's classic BPF: it gets the architecture, the number of a call and its arguments as numbers, and
decides about the call. It works with every provider alike, and needs no privilege.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import struct
from typing import TYPE_CHECKING, NamedTuple

from prorl_daemon.syscall_rules import ARCHITECTURES, PRLIMIT64, RLIMIT_CORE, RLIMIT_LOCKS, Architecture, Rule, rules

if TYPE_CHECKING:
    from collections.abc import Callable

LOAD, JUMP_EQUAL, JUMP_ABOVE, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
"""BPF_LD|W|ABS, BPF_JMP|JEQ|K, JGT, JGE, JSET, BPF_RET|K."""
ALLOW = 0x7FFF0000
ERROR = 0x00050000
KILL_PROCESS = 0x80000000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Offsets in `struct seccomp_data`. Of a filtered 64-bit argument, the kernel uses only the lower 32 bits."""

PR_SET_NO_NEW_PRIVS = 38
SET_MODE_FILTER = 1
FLAG_SPEC_ALLOW = 1 << 2
"""Without it, older kernels would slow down every filtered process, against attacks that a filter does not stop."""
NO_KEY = b"\xa1key\xa2key\xa3key\xa4key"
"""A placeholder of a key, in a filter without one: four words that occur nowhere else in a filter."""
KEYCTL_JOIN_SESSION_KEYRING = 1
ENOSYS = 38
EINVAL = 22
KEY_BYTES = 16
"""The size of the daemon's key to `prlimit64`, in the two arguments of a call that the kernel does not read."""


class Instruction(NamedTuple):
    """An instruction of the filter: jumps are relative to the next one, and at most 255."""

    code: int
    value: int
    if_true: int = 0
    if_false: int = 0


def filter_program(architecture: Architecture, chosen: list[Rule]) -> list[Instruction]:
    """Return the beginning of a filter that refuses `chosen`; `filter_end` is its end.

    Code of other architectures is killed.
    """
    program = [
        Instruction(LOAD, ARCHITECTURE_AT),
        Instruction(JUMP_EQUAL, architecture.audit, 1, 0),
        Instruction(RETURN, KILL_PROCESS),
        Instruction(LOAD, NUMBER_AT),
    ]
    if architecture.foreign_bit:
        program += [Instruction(JUMP_AT_LEAST, architecture.foreign_bit, 0, 1), Instruction(RETURN, ERROR | ENOSYS)]
    for rule in chosen:
        body = _body(rule)
        program += [Instruction(JUMP_EQUAL, rule.number, 0, len(body)), *body]
    return program


def filter_end(architecture: Architecture, key: bytes | None) -> list[Instruction]:
    """Return the rule of `prlimit64`, and the end of a filter, which allows all other calls of this architecture.

    A program may read any limits that the kernel allows, and set its own except `RLIMIT_LOCKS`, with process 0 as in
    any C library's `setrlimit`. Setting `RLIMIT_CORE` succeeds without effect, because scripts set it, mostly to 0. The
    number of another process is not allowed, because each thread of the daemon has a number that the filter cannot
    know. A caller with the key in the fifth and sixth argument may set all limits: the daemon. If `key` is None, no
    caller may.

    Calls without a rule cost nothing: since Linux 5.11 the kernel caches that they are always allowed.
    """
    allow = Instruction(RETURN, ALLOW)
    by_key: list[Instruction] = []
    if key is not None:
        words = [
            step
            for index, word in enumerate(struct.unpack("=4I", key))
            for step in (
                Instruction(LOAD, ARGUMENTS_AT + 8 * 4 + 4 * index),
                Instruction(JUMP_EQUAL, word, 0, 2 * (3 - index) + 1),
            )
        ]
        by_key = [*words, allow]
    core = [*by_key, Instruction(RETURN, ERROR)]
    keyed = [*by_key, Instruction(RETURN, ERROR | errno.EPERM)]
    own = [
        Instruction(LOAD, ARGUMENTS_AT),
        Instruction(JUMP_EQUAL, 0, 0, 3 + len(core) + 1),
        Instruction(LOAD, ARGUMENTS_AT + 8),
        Instruction(JUMP_EQUAL, RLIMIT_LOCKS, 1 + len(core) + 1, 0),
        Instruction(JUMP_EQUAL, RLIMIT_CORE, 0, len(core)),
        *core,
        allow,
    ]
    reading = [
        Instruction(LOAD, ARGUMENTS_AT + 16),
        Instruction(JUMP_EQUAL, 0, 0, 3),
        Instruction(LOAD, ARGUMENTS_AT + 20),
        Instruction(JUMP_EQUAL, 0, 0, 1),
        allow,
    ]
    body = [*reading, *own, *keyed]
    return [Instruction(JUMP_EQUAL, PRLIMIT64[architecture.column], 0, len(body)), *body, allow]


def _body(rule: Rule) -> list[Instruction]:
    """Return the instructions of a rule, which end in a return for any arguments."""
    refuse, allow = Instruction(RETURN, ERROR | rule.error), Instruction(RETURN, ALLOW)
    load = Instruction(LOAD, ARGUMENTS_AT + 8 * rule.argument)
    if rule.flags:
        return [load, Instruction(JUMP_ANY_BIT, rule.flags, 0, 1), refuse, allow]
    if rule.above is not None:
        return [load, Instruction(JUMP_ABOVE, rule.above, 0, 1), refuse, allow]
    if rule.equal is not None and rule.next_is:
        these = [Instruction(JUMP_EQUAL, value, len(rule.next_is) - at, 0) for at, value in enumerate(rule.next_is)]
        load_next = Instruction(LOAD, ARGUMENTS_AT + 8 * (rule.argument + 1))
        return [load, Instruction(JUMP_EQUAL, rule.equal, 0, len(these) + 1), load_next, *these, allow, refuse]
    if rule.equal is not None:
        return [load, Instruction(JUMP_EQUAL, rule.equal, 0, 1), refuse, allow]
    if not rule.unless:
        return [refuse]
    more = []
    if rule.also is not None:
        value, argument, unless, error = rule.also
        more = [
            Instruction(JUMP_EQUAL, value, 1, 0),
            allow,
            Instruction(LOAD, ARGUMENTS_AT + 8 * argument),
            *_unless(unless, Instruction(RETURN, ERROR | error)),
        ]
    return [load, *_unless(rule.unless, refuse), *more, allow]


def _unless(values: tuple[int, ...], refuse: Instruction) -> list[Instruction]:
    """Return instructions that refuse the call unless the loaded value is one of `values`."""
    return [
        *(Instruction(JUMP_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)),
        refuse,
    ]


def assemble(program: list[Instruction]) -> bytes:
    """Encode a filter for the kernel: each instruction as a `struct sock_filter`."""
    return b"".join(struct.pack("=HBBI", part.code, part.if_true, part.if_false, part.value) for part in program)


@functools.cache
def filter_code(daemon_pid: int, *, guarded: bool, keyed: bool) -> bytes:
    """Return the filter of this machine, encoded; if it is `keyed`, with `NO_KEY` for the daemon's key. See `confine`.

    Raises:
        OSError: its architecture is not supported.
    """
    architecture = _architecture()
    begun = filter_program(architecture, rules(architecture, daemon_pid, guarded=guarded))
    return assemble([*begun, *filter_end(architecture, NO_KEY if keyed else None)])


def with_key(code: bytes, key: bytes) -> bytes:
    """Return the filter `code` with `key` instead of `NO_KEY`."""
    for at in range(0, KEY_BYTES, 4):
        code = code.replace(NO_KEY[at : at + 4], key[at : at + 4])
    return code


def _architecture() -> Architecture:
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(ENOSYS, f"there is no filter of system calls for {machine}")
    return ARCHITECTURES[machine]


_prlimit: Callable[[int, int, tuple[int, int]], None] | None = None
"""Set by `confine` in the daemon: sets limits with its key."""


def prlimit(pid: int, what: int, limits: tuple[int, int]) -> None:
    """Set soft and hard limit of a process (0: this one), like `resource.prlimit`; works under the daemon's filter.

    Raises:
        OSError: the process does not exist, or does not allow it.
    """
    if _prlimit is None:
        resource.prlimit(pid, what, limits)
    else:
        _prlimit(pid, what, limits)


def confine(*, daemon_pid: int, guarded: bool) -> None:
    """Leave the keyring of the node's session, and refuse all system calls that tools do not need, from now on.

    In the daemon itself, `prlimit` can still set all limits afterwards, with a key that only the daemon has in its
    memory. Other processes lack the key.

    Args:
        daemon_pid: the process that no process under this filter may signal.
        guarded: see `syscall_rules.rules`.

    Raises:
        OSError: it failed; no process may be started then.
    """
    global _prlimit
    import ctypes  # here, because the daemons of tests never need it

    architecture, is_daemon = _architecture(), os.getpid() == daemon_pid
    key = os.urandom(KEY_BYTES) if is_daemon else b""
    code = filter_code(daemon_pid, guarded=guarded, keyed=is_daemon)
    if is_daemon:
        code = with_key(code, key)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(architecture.keyctl, KEYCTL_JOIN_SESSION_KEYRING, None) < 0 and ctypes.get_errno() != ENOSYS:
        raise OSError(ctypes.get_errno(), "keyctl(KEYCTL_JOIN_SESSION_KEYRING)")
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    for flags in (FLAG_SPEC_ALLOW, 0):  # Linux before 4.17 lacks the flag
        if libc.syscall(architecture.seccomp, SET_MODE_FILTER, flags, described) == 0:
            break
        if ctypes.get_errno() != EINVAL or not flags:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
    if not is_daemon:
        return
    number, words = PRLIMIT64[architecture.column], [ctypes.c_uint64(word) for word in struct.unpack("=2Q", key)]

    def set_by_key(pid: int, what: int, limits: tuple[int, int]) -> None:
        new = struct.pack("=2Q", *(limit & 0xFFFFFFFFFFFFFFFF for limit in limits))
        if libc.syscall(number, pid, what, new, None, *words) != 0:
            raise OSError(ctypes.get_errno(), f"prlimit64 of process {pid}")

    _prlimit = set_by_key
