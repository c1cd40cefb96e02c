"""System calls that no tool needs, and their answers. Numbers are the kernel's, which never change.

A call that a kernel may be built without is answered ENOSYS: programs then do as they did before there was such a call.
An administrator's call is answered EPERM, as the kernel itself answers those who are none.
"""

from __future__ import annotations

import errno
from typing import NamedTuple


class Architecture(NamedTuple):
    """An architecture in seccomp's terms.

    `audit`: the kernel's number for it in a filter's data. `column`: that of the tables below. `foreign_bit`: set in
    the numbers of another convention of the same architecture (x32), which nobody uses; 0 for none.
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
"""By `os.uname().machine`. 32-bit programs are of another architecture to the kernel, also on the same machine."""


class Also(NamedTuple):
    """See `Rule`."""

    value: int
    argument: int
    unless: tuple[int, ...]
    error: int


class Rule(NamedTuple):
    """A call that is refused with `error`: always, or by the lower 32 bits of its argument `argument`.

    `flags`: if one of these bits is set. `above`: if it is more. `equal`: if it is this, and the next argument one of
    `next_is`, where that has values. `unless`: if it is none of these; and for one of them, `also.value`, if the
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
    "io_setup": (206, 0),  # of its contexts the machine has a number, for all its users together
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),  # keyrings are not of a namespace
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),  # memory that no process has to map, and nothing but a cgroup counts
    "memfd_secret": (447, 447),
    "modify_ldt": (154, None),
    "perf_event_open": (298, 241),
    "request_key": (249, 218),
    "setxattrat": (463, 463),  # its size is in memory, where no filter can look
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
"""For `unshare` only: in `clone` these bits are a signal's."""

SOCKET = (41, 198)
SOCKETPAIR = (53, 199)
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
NETLINK_ROUTE, NETLINK_SOCK_DIAG = 0, 4
"""The netlink families that list addresses and interfaces, and sockets. Every other family, as that to the hypervisor,
is none of a namespace's, or not for tools; the errors are those of a kernel that does not have it, which libraries
expect."""

SIGNALS = {
    "kill": (62, 129),
    "pidfd_open": (434, 434),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tgkill": (234, 131),
    "tkill": (200, 130),
}
"""Calls that are refused where their first argument is the daemon's id, with an error that the caller sees.

No filter can tell what else may name it, as a thread's id or a descriptor of its folder in /proc. There the kernel
keeps signals from the first process of a PID namespace, which handles SIGCHLD only."""
SCHEDULING = {
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
"""Calls that are for the caller only where no capability guards the daemon: their first argument is 0."""
PRIORITIES = {"setpriority": ((141, 140), 0), "ioprio_set": ((251, 30), 1)}
"""Calls like those of `SCHEDULING`, each with the first argument that makes the second one a process."""
FCNTL = (72, 25)
F_CANCELLK, F_DUPFD_CLOEXEC = 1029, 1030
FILE_COMMANDS = (
    *(1, 2, 3, 4, 0, F_DUPFD_CLOEXEC),
    *range(5, 18),  # locks of one process, and who gets signals of input
    *(36, 37, 38),  # F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW
    *range(1025, F_CANCELLK + 1),  # F_GETLEASE, F_NOTIFY, what two descriptors have in common
    *range(F_DUPFD_CLOEXEC + 1, 1039),  # sizes of pipes, seals, hints
)
"""The commands of `fcntl` that wait for nobody else, those that are used most first: not F_SETLEASE, nor any that a
later kernel has. A lease makes whoever opens the file wait for 45 s, and its owner in a sandbox is that of the node's
own files, which the sandboxes share."""
SETSOCKOPT = (54, 208)
SOL_SOCKET, SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF, SO_ZEROCOPY = 1, 26, 51, 60
"""Filters of sockets, which only those who capture packets need. The kernel compiles each, and of the memory for that
the machine has a number, for all its users together (`net.core.bpf_jit_limit`): without any left, nobody but root can
put a filter of system calls on a process, so no sandbox starts. For `SO_ZEROCOPY` see `SPLICES`."""
SPLICES = {"splice": (275, 76), "tee": (276, 77)}
"""Calls that put pages of others into a pipe or a socket, by reference. Programs copy where a file cannot do that.

The kernel counts the bytes, and keeps the pages, for as long as nobody reads them: one byte keeps a page of a file that
was truncated since, or, with `vmsplice` and `SO_ZEROCOPY`, a page of 2 MiB that was unmapped. Nothing but a control
group counts those."""
SETXATTR = {"fsetxattr": (190, 7), "lsetxattr": (189, 6), "setxattr": (188, 5)}
MAX_ATTRIBUTE_BYTES = 1024
"""The most of an extended attribute, which some disks bound as well. Access control lists are such attributes, and the
kernel keeps those of a tmpfs in memory that counts for none of the limits of the tmpfs: up to 64 KiB for each file."""
MMAP, MAP_HUGETLB = (9, 222), 0x40000
SHMGET, SHM_HUGETLB = (29, 194), 0o4000
"""Pages out of the machine's reserve (`vm.nr_hugepages`), which others have set aside, and which count as no process's
memory. The error is that of a machine without a reserve."""
SECCOMP_NEW_LISTENER = 1 << 3
"""The flag that gives a descriptor for a filter of system calls, by which the filter outlives its processes."""
PRLIMIT64 = (302, 261)
SETRLIMIT = (160, 164)
RLIMIT_CORE = 4
"""1 for all tools, see `limits`: a program may set it, and nothing changes."""
RLIMIT_LOCKS = 10
"""The mark of what the daemon starts (`children`), which nobody may take off."""
OWN_LIMITS = tuple(number for number in range(16) if number not in (RLIMIT_CORE, RLIMIT_LOCKS))
"""What a program may set of its own."""


def rules(architecture: Architecture, daemon_pid: int, *, guarded: bool) -> list[Rule]:
    """All of them but that of `prlimit64`, each for another call.

    Args:
        architecture: whose numbers they have.
        daemon_pid: as the tools see it.
        guarded: the kernel keeps the tools from the daemon's priority, scheduling and processors: see `limits`.
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
        # Its flags are in memory, where no filter can look: the C library goes back to `clone` then.
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
