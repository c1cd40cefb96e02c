"""The hard limit of a sandbox's processes: `kernel.pid_max` of its PID namespace, which no overload can outrun.

The watchdog inside looks five times a second, if the machine lets it; a fork bomb on a busy machine makes thousands of
processes meanwhile. With this the kernel refuses them. Linux 6.14 and newer; where there is none, doctor says so.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Final

from prorl_trio.errors import SandboxUnavailable
from prorl_trio.sandbox import pid_setter
from prorl_trio.sandbox.interpreter import own_python
from prorl_trio.sandbox.reaper import identify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prorl_trio.sandbox.reaper import ProcessId

__all__ = ["PidLimiter", "pid_limit_problem"]

FIRST_REUSED_PID: Final = 300
"""The kernel uses pids from here on again. The lower ones go to the first processes of a namespace, once."""
OWN_TASKS: Final = 64
"""For the daemon and the launcher; the watchdog sees, and reports, that there are too many before there are so many."""
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

    def __repr__(self) -> str:
        return f"<PidLimiter: problem {self._problem!r}>"

    def start(self) -> None:
        """Start the process, if it is not running. It looks by itself whether the kernel offers this."""
        with self._lock:
            if self._process is not None:
                return
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channel.settimeout(ANSWER_TIMEOUT_S)
            with theirs:
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
        namespace = _own_namespace(members)
        if namespace is None:
            return
        try:
            pid_max = min(PID_MAX_LIMIT, FIRST_REUSED_PID + 1 + max_processes + OWN_TASKS)
            with self._lock:
                try:
                    problem = self._ask(namespace, pid_max)
                except OSError:  # somebody ended it; it takes no state with it
                    self.close()
                    problem = self.problem() or self._ask(namespace, pid_max)
        except OSError as exc:
            problem = f"{os.path.basename(pid_setter.__file__)} does not answer: {exc}"
        finally:
            os.close(namespace)
        if problem:
            raise SandboxUnavailable(f"its number of processes cannot be limited: {problem}")

    def _ask(self, namespace: int, pid_max: int) -> str:
        assert self._channel is not None, "it was started"
        socket.send_fds(self._channel, [b"%d" % pid_max], [namespace])
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


def pid_limit_problem() -> str:
    """Why the kernel cannot limit the processes of a sandbox here; empty if it can. Tries it; blocks, about 50 ms."""
    limiter = PidLimiter()
    try:
        return limiter.problem()
    finally:
        limiter.close()


def _own_namespace(members: Iterable[ProcessId]) -> int | None:
    """A descriptor of the PID namespace that the oldest of them outside of ours is in; None if all are in ours."""
    ours = os.stat("/proc/self/ns/pid").st_ino
    for process in sorted(members, key=lambda member: (member.start_time, member.pid)):
        try:
            namespace = os.open(f"/proc/{process.pid}/ns/pid", os.O_RDONLY)
        except OSError:  # it has ended, or may not be looked at
            continue
        # Only now is it certain whose it is: a pid may have been used again.
        if os.fstat(namespace).st_ino != ours and identify(process.pid) == process:
            return namespace
        os.close(namespace)
    return None
