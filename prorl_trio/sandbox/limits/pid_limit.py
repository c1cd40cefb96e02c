"""Limits of a sandbox's namespaces: of its processes, which no overload can outrun, and of what all would share.

The watchdog inside looks five times a second, if the machine lets it; a fork bomb on a busy machine makes thousands of
processes meanwhile. With `kernel.pid_max` of its PID namespace the kernel refuses them, since Linux 6.14; where it does
not, doctor says so. Of terminals the machine has a number for all sandboxes together, of inotify instances the user.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from prorl_ipc.limits import NamespaceLimits
from prorl_trio.sandbox.limits import pid_setter
from prorl_trio.sandbox.reaper import identify
from prorl_trio.sandbox.runtime.interpreter import own_python
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prorl_trio.sandbox.reaper import ProcessId

FIRST_REUSED_PID: Final = 300
"""The kernel uses pids from here on again. The lower ones go to the first processes of a namespace, once."""
OWN_TASKS: Final = 64
"""For the daemon and the launcher; the watchdog sees, and reports, that there are too many before there are so many."""
MAX_PTYS: Final = 64
"""In one sandbox, its shell's among them. The machine has some 3,000 for all (`kernel.pty.max`, less the reserve)."""
MAX_INOTIFY_INSTANCES: Final = 16
MAX_INOTIFY_WATCHES: Final = 32_768
"""In one sandbox. The user has `fs.inotify.max_user_instances`, often 128, in all of them and outside."""
SHARED_LIMITS: Final = (0, MAX_INOTIFY_INSTANCES, MAX_INOTIFY_WATCHES, MAX_PTYS)
"""The arguments of `pid_setter.bound_shared`, and the fields of `NamespaceLimits` after the first. No further user
namespaces, as bubblewrap has it by itself."""
PID_MAX_LIMIT: Final = 4 * 1024 * 1024
ANSWER_TIMEOUT_S: Final = 10.0
END_TIMEOUT_S: Final = 1.0

logger = logging.getLogger(__name__)


class PidLimiter:
    """Limits PID namespaces, by a small process, one a node. Its methods block.

    May be used by several threads; one namespace is limited at a time, in about 2 ms.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._problem: str | None = None
        self._said = False

    def __repr__(self) -> str:
        return f"<PidLimiter: problem {self._problem!r}>"

    def start(self) -> None:
        """Start the process, if it is not running. It looks by itself whether the kernel offers this."""
        with self._lock:
            if self._process is not None:
                return
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ExitStack() as unless_started, theirs:
                unless_started.callback(ours.close)
                ours.settimeout(ANSWER_TIMEOUT_S)
                self._process = subprocess.Popen(
                    (own_python(), "-I", "-S", pid_setter.__file__, str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                    cwd="/",
                    env={},
                )
                unless_started.pop_all()
            self._channel = ours

    def problem(self) -> str:
        """Why there is no such limit on this machine; empty if there is."""
        self.start()
        with self._lock:
            if self._problem is None:
                try:
                    self._problem = self._receive()
                except OSError as exc:
                    self._problem = f"{os.path.basename(pid_setter.__file__)} does not answer: {exc}"
                if self._problem:
                    logger.info("the kernel does not limit the processes of a sandbox: %s", self._problem)
            return self._problem

    def limit(self, members: Iterable[ProcessId], max_processes: int) -> None:
        """Let the sandbox of these processes have about `max_processes`, if it has a PID namespace of its own.

        Its limit is some 64 to 364 above that: pids below 300 are given to the first processes only. Nothing happens
        where the kernel does not offer it.

        Raises:
            SandboxUnavailable: the kernel offers it, but it could not be set.
        """
        if self.problem():
            return
        if problem := self._set(members, b"%d" % _pid_max(max_processes), ("pid",)):
            raise SandboxUnavailable(f"its number of processes cannot be limited: {problem}")

    def bound_shared(self, members: Iterable[ProcessId]) -> None:
        """Let the sandbox of these processes have `SHARED_LIMITS`. Where that cannot be set, the log says so, once."""
        self.problem()
        problem = self._set(members, b" ".join(b"%d" % limit for limit in SHARED_LIMITS), ("pid", "mnt"))
        if problem and not self._said:
            self._said = True
            logger.warning("sandboxes share terminals and inotify instances without a limit for each: %s", problem)

    def _set(self, members: Iterable[ProcessId], request: bytes, kinds: tuple[str, ...]) -> str:
        """The problem, or nothing: also where there is no namespace to be limited.

        Raises:
            SandboxUnavailable: the machine does not let anybody set it now.
        """
        namespaces = _own_namespaces(members, kinds)
        if not namespaces:
            return ""
        try:
            with self._lock:
                try:
                    return self._ask(request, namespaces)
                except OSError:  # somebody ended it; it takes no state with it
                    self.close()
                    self.problem()
                    return self._ask(request, namespaces)
        except OSError as exc:
            what = f"{os.path.basename(pid_setter.__file__)}, which limits namespaces, does not answer"
            raise SandboxUnavailable.refused(what, exc) from exc
        finally:
            for namespace in namespaces:
                os.close(namespace)

    def _ask(self, request: bytes, namespaces: list[int]) -> str:
        assert self._channel is not None, "it was started"
        socket.send_fds(self._channel, [request], namespaces)
        return self._receive()

    def _receive(self) -> str:
        assert self._channel is not None, "it was started"
        answer = self._channel.recv(pid_setter.MAX_ANSWER_BYTES)
        if not answer:
            raise ConnectionResetError("it has ended")
        return "" if answer == pid_setter.NOTHING else answer.decode(errors="replace")

    def close(self) -> None:
        """End the process. It takes no state with it: what was limited stays so."""
        with self._lock:
            self._problem = None
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            if self._process is not None:
                try:
                    self._process.wait(END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                self._process = None


def namespace_limits(max_processes: int | None) -> NamespaceLimits:
    """Return what `PidLimiter.limit` and `bound_shared` set, for a sandbox that sets it itself, before it is one.

    `max_processes`: None where the kernel does not offer that limit, or a cgroup has it.
    """
    return NamespaceLimits(0 if max_processes is None else _pid_max(max_processes), *SHARED_LIMITS)


def _pid_max(max_processes: int) -> int:
    return min(PID_MAX_LIMIT, FIRST_REUSED_PID + 1 + max_processes + OWN_TASKS)


@contextmanager
def _closing_on_error(opened: list[int]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise


def pid_limit_problem() -> str:
    """Why the kernel cannot limit the processes of a sandbox here; empty if it can. Tries it; blocks, about 50 ms."""
    limiter = PidLimiter()
    try:
        return limiter.problem()
    finally:
        limiter.close()


def _own_namespaces(members: Iterable[ProcessId], kinds: tuple[str, ...]) -> list[int]:
    """Descriptors of the namespaces of the oldest of them with a PID namespace not ours; none if all are in ours."""
    ours = os.stat("/proc/self/ns/pid").st_ino
    for process in sorted(members, key=lambda member: (member.start_time, member.pid)):
        opened: list[int] = []
        with _closing_on_error(opened), suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            # It has ended, or may not be looked at.
            if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == ours:
                continue
            # The process may end between two of them. Those that are open by then are closed below. PERF401 does not
            # hold here: from a comprehension that raises, their numbers would be lost.
            for kind in kinds:
                opened.append(os.open(f"/proc/{process.pid}/ns/{kind}", os.O_RDONLY))  # noqa: PERF401
            # Only now is it certain whose they are: a pid may have been used again.
            if identify(process.pid) == process:
                return opened
        for namespace in opened:
            os.close(namespace)
    return []
