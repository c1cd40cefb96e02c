"""System calls that tools do not need, and the answers to them. Numbers are the kernel's, which never change.

A call that a kernel may be built without is answered ENOSYS: programs then behave as on a kernel without it. An
administrator's call is answered EPERM, as the kernel itself answers other users.
"""

from __future__ import annotations

import errno
from typing import NamedTuple


class Architecture(NamedTuple):
    """An architecture in seccomp's terms.

    `audit`: the kernel's number for it in a filter's data. `column`: its column in the tables below. `foreign_bit`: set
    in the numbers of another convention of the same architecture (x32), which is unused in practice; 0 for none.
    """

    audit: int
    column: int
    foreign_bit: int
    seccomp: int
    keyctl: int


ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, 0, 0x40000000, seccomp=317, keyctl=250),
    "aarch64": Architecture(0xC00000B7, 1, 0, seccomp=277, keyctl=219),
}
"""By `os.uname().machine`. The kernel treats 32-bit programs as another architecture, even on the same machine."""


class Also(NamedTuple):
    """See `Rule`."""

    value: int
    argument: int
    unless: tuple[int, ...]
    error: int


class Rule(NamedTuple):
    """A call that is refused with `error`: always, or by the lower 32 bits of its argument `argument`.

    `flags`: if one of these bits is set. `above`: if it is larger. `equal`: if it is equal, and the next argument is
    one of `next_is`, where that has values. `unless`: if it is none of these; and for one of them, `also.value`, if the
    argument `also.argument` is none of `also.unless`, with `also.error`.
    """

    number: int
    error: int
    argument: int = 0
    flags: int = 0
    above: int | None = None
    equal: int | None = None
    next_is: tuple[int, ...] = ()
    unless: tuple[int, ...] = ()
    also: Also | None = None


ABSENT = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "fanotify_init": (300, 262),
    "io_setup": (206, 0),  # the machine limits its contexts for all users together
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),  # keyrings do not belong to a namespace
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),  # memory that no process has to map, and that only a cgroup counts
    "memfd_secret": (447, 447),
    "modify_ldt": (154, None),
    "perf_event_open": (298, 241),
    "request_key": (249, 218),
    "setxattrat": (463, 463),  # its size is in memory, which a filter cannot read
    "userfaultfd": (323, 282),
    "uselib": (134, None),
    "vmsplice": (278, 75),
}
FOR_ADMINISTRATORS = {
    "acct": (163, 89),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "vhangup": (153, 58),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
UNSHARE = (272, 97)
NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET."""
CLONE_NEWTIME = 0x00000080
"""Only for `unshare`: in `clone` these bits belong to a signal."""

SOCKET = (41, 198)
SOCKETPAIR = (53, 199)
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
NETLINK_ROUTE, NETLINK_SOCK_DIAG = 0, 4
"""The netlink families that list addresses and interfaces, and sockets. Every other family, such as the hypervisor's,
does not belong to a namespace, or is not for tools. The errors are the ones of a kernel without the family, which
libraries expect."""

SIGNALS = {
    "kill": (62, 129),
    "pidfd_open": (434, 434),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tgkill": (234, 131),
    "tkill": (200, 130),
}
"""Calls that are refused if their first argument is the daemon's id, with an error that the caller sees.

A filter cannot detect other references to it, such as a thread's id or a descriptor of its folder in /proc. There the
kernel withholds signals from the first process of a PID namespace, which only handles SIGCHLD.
"""
SCHEDULING = {
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
"""Calls that may only target the caller if no capability guards the daemon: their first argument is 0."""
PRIORITIES = {"setpriority": ((141, 140), 0), "ioprio_set": ((251, 30), 1)}
"""Further calls as in `SCHEDULING`, each with the first argument that makes the second one a process."""
FCNTL = (72, 25)
F_CANCELLK, F_DUPFD_CLOEXEC = 1029, 1030
FILE_COMMANDS = (
    *(1, 2, 3, 4, 0, F_DUPFD_CLOEXEC),
    *range(5, 18),  # locks of one process, and the receiver of input signals
    *(36, 37, 38),  # F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW
    *range(1025, F_CANCELLK + 1),  # F_GETLEASE, F_NOTIFY, comparison of two descriptors
    *range(F_DUPFD_CLOEXEC + 1, 1039),  # sizes of pipes, seals, hints
)
"""The commands of `fcntl` that do not affect other processes, most frequent first: not F_SETLEASE, nor any command of a
later kernel. A lease blocks other openers of the file for 45 s. A sandbox's user owns the node's own files, which the
sandboxes share, and so could lease them."""
SETSOCKOPT = (54, 208)
SOL_SOCKET, SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF, SO_ZEROCOPY = 1, 26, 51, 60
"""Filters of sockets, which only packet capture needs. The kernel compiles each, and limits the memory for that for all
users of the machine together (`net.core.bpf_jit_limit`). When it is used up, only root can set a filter of system
calls, so no sandbox starts. For `SO_ZEROCOPY` see `SPLICES`."""
SPLICES = {"splice": (275, 76), "tee": (276, 77)}
"""Calls that put foreign pages into a pipe or a socket by reference. Programs copy if a file does not support that.

The kernel counts the bytes, but keeps the pages, until they are read. One byte keeps a page of a file that was
truncated since, or, with `vmsplice` and `SO_ZEROCOPY`, an unmapped page of 2 MiB. Only a control group counts these.
"""
SETXATTR = {"fsetxattr": (190, 7), "lsetxattr": (189, 6), "setxattr": (188, 5)}
MAX_ATTRIBUTE_BYTES = 1024
"""Limit of an extended attribute, as on some disks. Access control lists are such attributes. The kernel stores a
tmpfs's in memory that none of the limits of the tmpfs count: up to 64 KiB for each file."""
MMAP, MAP_HUGETLB = (9, 222), 0x40000
SHMGET, SHM_HUGETLB = (29, 194), 0o4000
"""Pages of the machine's reserve (`vm.nr_hugepages`), which others have set aside, and which count as no process's
memory. The error is the one of a machine without a reserve."""
SECCOMP_NEW_LISTENER = 1 << 3
"""The flag that returns a descriptor for a filter of system calls, by which the filter outlives its processes."""
PRLIMIT64 = (302, 261)
SETRLIMIT = (160, 164)
RLIMIT_CORE = 4
"""1 for all tools, see `limits`: a program may set it without effect."""
RLIMIT_LOCKS = 10
"""The mark of the daemon's children (`children`), which must not be removed."""
OWN_LIMITS = tuple(number for number in range(16) if number not in (RLIMIT_CORE, RLIMIT_LOCKS))
"""The limits that a program may set for itself."""


def rules(architecture: Architecture, daemon_pid: int, *, guarded: bool) -> list[Rule]:
    """Return all rules except `prlimit64`'s, each for another call.

    Args:
        architecture: the architecture of the numbers.
        daemon_pid: as the tools see it.
        guarded: the kernel prevents tools from changing the daemon's priority, scheduling and processors: see `limits`.
    """
    column = architecture.column
    found = [
        Rule(number, error)
        for table, error in ((ABSENT, errno.ENOSYS), (FOR_ADMINISTRATORS, errno.EPERM))
        for numbers in table.values()
        if (number := numbers[column]) is not None
    ]
    found += [Rule(numbers[column], errno.EPERM, equal=daemon_pid) for numbers in SIGNALS.values()]
    found += [Rule(numbers[column], errno.EINVAL) for numbers in SPLICES.values()]
    found += [Rule(numbers[column], errno.ENOSPC, 3, above=MAX_ATTRIBUTE_BYTES) for numbers in SETXATTR.values()]
    if not guarded:
        found += [Rule(numbers[column], errno.EPERM, unless=(0,)) for numbers in SCHEDULING.values()]
        found += [
            Rule(numbers[column], errno.EPERM, unless=(process,), also=Also(process, 1, (0,), errno.EPERM))
            for numbers, process in PRIORITIES.values()
        ]
    return [
        *found,
        Rule(SETRLIMIT[column], errno.EPERM, unless=OWN_LIMITS),
        Rule(
            SETSOCKOPT[column],
            errno.ENOPROTOOPT,
            argument=1,
            equal=SOL_SOCKET,
            next_is=(SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF, SO_ZEROCOPY),
        ),
        Rule(MMAP[column], errno.ENOMEM, argument=3, flags=MAP_HUGETLB),
        Rule(SHMGET[column], errno.ENOMEM, argument=2, flags=SHM_HUGETLB),
        Rule(architecture.seccomp, errno.EINVAL, argument=1, flags=SECCOMP_NEW_LISTENER),
        Rule(FCNTL[column], errno.EINVAL, argument=1, unless=FILE_COMMANDS),
        # Its flags are in memory, which a filter cannot read: the C library then falls back to `clone`.
        Rule(CLONE3[column], errno.ENOSYS),
        Rule(CLONE[column], errno.EPERM, flags=NEW_NAMESPACES),
        Rule(UNSHARE[column], errno.EPERM, flags=NEW_NAMESPACES | CLONE_NEWTIME),
        Rule(SOCKETPAIR[column], errno.EAFNOSUPPORT, unless=(UNIX,)),
        Rule(
            SOCKET[column],
            errno.EAFNOSUPPORT,
            unless=(UNIX, INET, INET6, NETLINK),
            also=Also(NETLINK, 2, (NETLINK_ROUTE, NETLINK_SOCK_DIAG), errno.EPROTONOSUPPORT),
        ),
    ]
