"""The socket and the pipes between the daemon and an IPython child, before a process is started with them."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from prorl_daemon.children import open_pipe

if TYPE_CHECKING:
    from collections.abc import Iterator


class KernelEnds(NamedTuple):
    """The daemon's ends."""

    control: socket.socket
    stdout_fd: int
    stderr_fd: int
    begun_fd: int

    def close(self) -> None:
        self.control.close()
        for fd in self[1:]:
            os.close(fd)


class ChildEnds(NamedTuple):
    """The child's ends, as descriptors."""

    control_fd: int
    stdout_fd: int
    stderr_fd: int
    begun_fd: int


@contextmanager
def open_kernel_ends() -> Iterator[tuple[KernelEnds, ChildEnds]]:
    """Make the ends of both; the child's are closed on exit, and the daemon's as well on an error."""
    with ExitStack() as ours, ExitStack() as theirs:
        control, passed_control = socket.socketpair()
        ours.callback(control.close)
        theirs.callback(passed_control.close)
        stdout_read, stdout_write = open_pipe(ours, theirs)
        stderr_read, stderr_write = open_pipe(ours, theirs)
        begun_read, begun_write = open_pipe(ours, theirs, os.O_NONBLOCK)
        yield (
            KernelEnds(control, stdout_read, stderr_read, begun_read),
            ChildEnds(passed_control.fileno(), stdout_write, stderr_write, begun_write),
        )
        ours.pop_all()
