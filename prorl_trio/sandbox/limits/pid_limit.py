"""Limits of a sandbox's namespaces: on its processes, even under overload, and on resources shared by the machine.

The watchdog inside checks five times a second, if the machine allows it. A fork bomb on a busy machine makes thousands
of processes in between. Since Linux 6.14 the kernel refuses them by `kernel.pid_max` of the PID namespace; on older
kernels, doctor reports that. All sandboxes share the machine's terminals and the user's inotify instances.
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
"""The lowest pid that the kernel reuses. Lower ones go once to the first processes of a namespace."""
OWN_TASKS: Final = 64
"""Allowance for the daemon and the launcher; the watchdog reports too many processes before this limit is reached."""
MAX_PTYS: Final = 64
"""Limit for one sandbox, including its shell's. The machine has some 3,000 (`kernel.pty.max`, less the reserve)."""
MAX_INOTIFY_INSTANCES: Final = 16
MAX_INOTIFY_WATCHES: Final = 32_768
"""Limit for one sandbox. The user has `fs.inotify.max_user_instances`, often 128, for all sandboxes and the host."""
SHARED_LIMITS: Final = (0, MAX_INOTIFY_INSTANCES, MAX_INOTIFY_WATCHES, MAX_PTYS)
"""The arguments of `pid_setter.bound_shared`, and the fields of `NamespaceLimits` after the first. Further user
namespaces are forbidden, as in bubblewrap."""
PID_MAX_LIMIT: Final = 4 * 1024 * 1024
ANSWER_TIMEOUT_S: Final = 10.0
END_TIMEOUT_S: Final = 1.0

logger = logging.getLogger(__name__)


class PidLimiter:
    """Limits PID namespaces with a small process, one for each node. Its methods block.

    Thread-safe; it limits one namespace at a time, in about 2 ms.
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
        """Start the process if it is not running. The process itself checks whether the kernel supports this."""
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
        """Return why this limit is not available on this machine; empty if it is."""
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
        """Limit the sandbox of these processes to about `max_processes`, if it has its own PID namespace.

        The actual limit is some 64 to 364 higher, because pids below 300 are only used once. Has no effect if the
        kernel does not support it.

        Raises:
            SandboxUnavailable: the kernel supports it, but the limit could not be set.
        """
        if self.problem():
            return
        if problem := self._set(members, b"%d" % _pid_max(max_processes), ("pid",)):
            raise SandboxUnavailable(f"its number of processes cannot be limited: {problem}")

    def bound_shared(self, members: Iterable[ProcessId]) -> None:
        """Apply `SHARED_LIMITS` to the sandbox of these processes. If that fails, it is logged once."""
        self.problem()
        problem = self._set(members, b" ".join(b"%d" % limit for limit in SHARED_LIMITS), ("pid", "mnt"))
        if problem and not self._said:
            self._said = True
            logger.warning("sandboxes share terminals and inotify instances without a limit for each: %s", problem)

    def _set(self, members: Iterable[ProcessId], request: bytes, kinds: tuple[str, ...]) -> str:
        """Return the problem, or an empty string, also if no namespace can be limited.

        Raises:
            SandboxUnavailable: the machine refuses to set it now.
        """
        namespaces = _own_namespaces(members, kinds)
        if not namespaces:
            return ""
        try:
            with self._lock:
                try:
                    return self._ask(request, namespaces)
                except OSError:  # the process was ended; it is stateless
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
        """End the process. The limits that it has set remain."""
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
    """Return the limits of `PidLimiter.limit` and `bound_shared`, for a sandbox that sets them itself before it starts.

    `max_processes`: None if the kernel does not support that limit, or a cgroup enforces it.
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
    """Return why the kernel cannot limit a sandbox's processes here; empty if it can. Blocks for about 50 ms."""
    limiter = PidLimiter()
    try:
        return limiter.problem()
    finally:
        limiter.close()


def _own_namespaces(members: Iterable[ProcessId], kinds: tuple[str, ...]) -> list[int]:
    """Return descriptors of the namespaces of the oldest process with another PID namespace than ours, if any."""
    ours = os.stat("/proc/self/ns/pid").st_ino
    for process in sorted(members, key=lambda member: (member.start_time, member.pid)):
        opened: list[int] = []
        with _closing_on_error(opened), suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            # The process has ended, or is not accessible.
            if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == ours:
                continue
            # The process may end between two of them; the descriptors opened by then are closed below. PERF401 does not
            # apply: if a comprehension raised, their numbers would be lost.
            for kind in kinds:
                opened.append(os.open(f"/proc/{process.pid}/ns/{kind}", os.O_RDONLY))  # noqa: PERF401
            # Only now is their owner certain, because a pid may have been reused.
            if identify(process.pid) == process:
                return opened
        for namespace in opened:
            os.close(namespace)
    return []
