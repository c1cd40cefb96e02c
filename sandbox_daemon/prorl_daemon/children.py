"""The daemon's direct children, and the orphans that it adopts, awaited in one place."""

from __future__ import annotations

import os
import pwd
import re
import resource
import signal
import subprocess
import threading
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from prorl_daemon.limits import die_first, limit_this
from prorl_daemon.paths import open_path
from prorl_daemon.seccomp import prlimit
from prorl_daemon.syscall_rules import RLIMIT_LOCKS
from prorl_daemon.threads import run_blocking
from prorl_ipc.server import CallError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import ExitStack

    from prorl_ipc.limits import SandboxLimits


SIGNAL_EXIT_BASE = 128
"""Added to a signal number in the exit code of a process that the signal ended, as shells report it."""


# Marks that identify all processes started by a program, even if they detach themselves.
#
# A daemonising process loses its parent and its session, but not its resource limits, which are inherited. The
# mark is a limit that Linux keeps but does not use, `RLIMIT_LOCKS`. The filter of system calls prevents its bearer
# from changing it. Without a filter (the provider `process`) a program that changes it ends with its sandbox.

FIRST_MARK = 1 << 40
_LIMIT = re.compile(rb"^Max file locks\s+(\S+)", re.MULTILINE)
_marks = count(FIRST_MARK)
_birth = threading.Lock()

ONE_USER = "more than one takes Apptainer with sandbox.fakeroot, and a range of users for the node's in /etc/subuid"


class Account(msgspec.Struct, frozen=True):
    """A user of the sandbox, as defined in its image."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def find_account(user: str) -> Account | None:
    """Return the account with this name or number; None for the daemon's own, which needs no change. Blocks.

    Raises:
        CallError: `no_user`, it does not exist; `permission`, this process may not become another user.
    """
    try:
        entry = pwd.getpwuid(int(user)) if user.isascii() and user.isdigit() else pwd.getpwnam(user)
    except (KeyError, OverflowError, ValueError) as exc:
        raise CallError("no_user", f"user: the sandbox's image has no user {user!r}") from exc
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise CallError("permission", f"user: {user!r} is another one than all processes here have; {ONE_USER}")
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def new_mark() -> int:
    """Return an unused mark."""
    return next(_marks)


@contextmanager
def born_with(mark: int) -> Iterator[None]:
    """Set this mark for processes that this thread starts in the block; 0: none.

    Blocks while another thread is in such a block, so every start of a process must be in one.
    """
    with _birth:
        if not mark:
            yield
            return
        own, most = resource.getrlimit(RLIMIT_LOCKS)
        with suppress(ValueError, OSError):  # the machine's limit is lower
            prlimit(0, RLIMIT_LOCKS, (mark, most))
        try:
            yield
        finally:
            prlimit(0, RLIMIT_LOCKS, (own, most))


def has_mark(pid: int, mark: int) -> bool:
    """Return whether the process has the mark; False if it does not exist."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            found = _LIMIT.search(file.read())
    except OSError:
        return False
    return found is not None and found[1] == b"%d" % mark


class Child:
    """A direct child. Until `exit_code` is set its pid is not reused, because only the reaper reaps.

    `was_killed`: a signal ended it, which its exit code alone does not prove.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self.was_killed = False
        self._ended = trio.Event()

    def __repr__(self) -> str:
        return f"<Child {self.pid}: {'running' if self.exit_code is None else f'ended with {self.exit_code}'}>"

    async def wait(self) -> int:
        """Wait until the process has been reaped; return its exit code, 128 + n after signal n."""
        await self._ended.wait()
        assert self.exit_code is not None
        return self.exit_code

    def kill_group(self, signal_number: int) -> None:
        """Signal the child's process group, which it leads. Has no effect once the child was reaped."""
        if self.exit_code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal_number)

    def ended(self, wait_status: int) -> None:
        """Set `exit_code` from the status of `waitpid` and wake `wait`. Only the reaper calls this."""
        code = os.waitstatus_to_exitcode(wait_status)
        self.was_killed = code < 0
        self.exit_code = code if code >= 0 else SIGNAL_EXIT_BASE - code
        self._ended.set()


class ChildReaper:
    """Waits for every child of the process. Other code must not call `wait` in any form.

    Args:
        limits: limits of each child and its descendants.
        isolated: see `limit_this`.

    Attributes:
        limit_this: called by a child before it executes its program, so that all its descendants have the limits.
    """

    def __init__(self, limits: SandboxLimits, *, isolated: bool) -> None:
        self.limit_this = partial(limit_this, limits, isolated=isolated)
        self._children: dict[int, Child] = {}
        self._starting = 0

    def __repr__(self) -> str:
        return f"<ChildReaper of {sorted(self._children)}>"

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGCHLD) as signals:
            task_status.started()
            self.reap()
            async for _ in signals:
                self.reap()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Postpone reaping while a process is started, so that a child that ends at once is not reaped unknown."""
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1
            self.reap()

    async def start(
        self,
        argv: Sequence[str],
        streams: tuple[int, int, int],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
        limiter: trio.CapacityLimiter,
        account: Account | None = None,
        mark: int = 0,
    ) -> Child:
        """Start a program in its own session.

        Args:
            argv: the program and its arguments.
            streams: descriptors of its input, output and errors; the caller closes them.
            env: its whole environment.
            cwd: its folder; None: this process's.
            pass_fds: descriptors that it inherits under the same numbers; the caller closes them.
            limiter: limiter of the threads in which programs are started.
            account: its user, if not the user of this process.
            mark: permanent mark of the program and its descendants, see `born_with`.

        Raises:
            OSError, ValueError: it could not be started.
        """
        identity: dict[str, Any] = {}
        if account is not None:
            identity = {"user": account.uid, "group": account.gid, "extra_groups": account.groups}

        def spawn() -> int:
            stdin, stdout, stderr = streams
            with born_with(mark), nullcontext() if cwd is None else _path_of_folder(cwd) as folder:
                process = subprocess.Popen(
                    argv,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env=env,
                    cwd=folder,
                    pass_fds=pass_fds,
                    start_new_session=True,
                    preexec_fn=self.limit_this,
                    **identity,
                )
            process.returncode = 0  # the reaper waits for it, not this object
            return process.pid

        with self.starting():
            return self.adopt(await run_blocking(spawn, limiter=limiter))

    def adopt(self, pid: int) -> Child:
        """Watch a process that was just started and has called `limit_this`. Call inside `starting`."""
        die_first(pid)
        child = self._children[pid] = Child(pid)
        return child

    def reap(self) -> None:
        while not self._starting:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                child.ended(wait_status)


@contextmanager
def _path_of_folder(cwd: str) -> Iterator[str]:
    """Open a folder and yield its path for a child that has not executed its program yet.

    Until then the child has the daemon's descriptors, and `cwd` may be a link to one of these.
    """
    fd = open_path(cwd, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{fd}"
    try:
        yield path
    except OSError as exc:
        if exc.filename == path:
            exc.filename = cwd
        raise
    finally:
        os.close(fd)


def open_pipe(reader: ExitStack, writer: ExitStack, flags: int = 0) -> tuple[int, int]:
    """Make a pipe and return its ends, for reading and for writing.

    Each end is closed with its stack, `reader` or `writer`. `flags` are set in addition to `O_CLOEXEC`.
    """
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | flags)
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd
