"""A pseudo-terminal with a process on it: what ptyprocess and the Linux pty do, behind trio's words."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import termios
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping

ROWS, COLUMNS = 24, 160
READ_BYTES = 64 * 1024
RESTORED_SIGNALS = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGCHLD,
)
"""Set to their default action in what is started: Python and shells ignore some of them, and that is inherited."""
TIOCGPTPEER = 0x5441
"""ioctl: opens the other end of a pty, wherever its name is mounted."""
_IFLAG, _OFLAG, _LFLAG = 0, 1, 3


class Terminal:
    """The controlling end of a pty. Owns its file descriptor; `close` hangs the terminal up."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._plain_mode = _plain_mode(fd)
        self._closed = False

    def __repr__(self) -> str:
        return f"<Terminal fd {self._fd}{', closed' if self._closed else ''}>"

    def reset_mode(self) -> None:
        """Undo what programs did to the terminal's mode: lines, signals by key, no echo, output untranslated."""
        if self._closed:
            return
        with suppress(termios.error):
            if termios.tcgetattr(self._fd) != self._plain_mode:  # to set it waits for what the terminal is doing
                termios.tcsetattr(self._fd, termios.TCSANOW, self._plain_mode)

    def foreground_group(self) -> int | None:
        """The process group that has the terminal, None if there is none (any more)."""
        if self._closed:
            return None
        try:
            return os.tcgetpgrp(self._fd) or None
        except OSError:
            return None

    def read_nowait(self) -> bytes | None:
        """Read what is there, about `READ_BYTES` at most.

        None if nothing is there; `b""` once every process has let go of it.
        """
        pieces: list[bytes] = []
        size_bytes = 0
        while size_bytes < READ_BYTES and not self._closed:
            try:
                piece = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return b"".join(pieces) or None
            except OSError as exc:
                if exc.errno != errno.EIO:  # the way a pty says end of file
                    raise
                break
            pieces.append(piece)
            size_bytes += len(piece)
        return b"".join(pieces)

    async def wait_readable(self) -> None:
        """Returns when `read_nowait` will not return None.

        Raises:
            trio.ClosedResourceError: it was closed meanwhile.
        """
        if self._closed:
            raise trio.ClosedResourceError
        await trio.lowlevel.wait_readable(self._fd)

    def drop_input(self) -> None:
        """Throw away what was typed and nobody has read."""
        if self._closed:
            return
        with suppress(OSError, termios.error):
            peer = fcntl.ioctl(self._fd, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                termios.tcflush(peer, termios.TCIFLUSH)
            finally:
                os.close(peer)

    async def write(self, keys: bytes) -> None:
        """Type `keys`. Waits while the terminal's input queue is full; a cancelled write may have typed a part.

        Raises:
            trio.ClosedResourceError: it was closed meanwhile.
            trio.BrokenResourceError: no process has the other end any more.
        """
        while keys:
            if self._closed:
                raise trio.ClosedResourceError
            try:
                keys = keys[os.write(self._fd, keys) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._fd)
            except OSError as exc:
                raise trio.BrokenResourceError from exc

    def close(self) -> None:
        """Hang up. Idempotent. Tasks that wait for it get `trio.ClosedResourceError`."""
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._fd)
            os.close(self._fd)


def spawn_on_terminal(
    argv: list[str], *, env: Mapping[str, str], cwd: str, inherited: Mapping[int, int], terminal_copy: int | None
) -> tuple[int, int]:
    """Start `argv` as leader of a new session with a new pty as its controlling terminal. Blocks: call it in a thread.

    Args:
        argv: program (looked up in this process's PATH unless it is a path) and arguments.
        env: its whole environment.
        cwd: its working directory; `/` if that is gone.
        inherited: file descriptor there -> file descriptor here.
        terminal_copy: one more file descriptor, there, for the terminal; None for none.

    Returns:
        The process id, and the pty's controlling end, which the caller owns.

    Raises:
        OSError: it could not be started.
    """
    from ptyprocess import PtyProcess

    def prepare() -> None:
        for number in RESTORED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # A failing chdir by ptyprocess itself would leave a second daemon running.
        os.chdir(cwd if os.path.isdir(cwd) else "/")
        termios.tcsetattr(0, termios.TCSANOW, _plain_mode(0))
        for there, here in inherited.items():
            os.dup2(here, there)
        if terminal_copy is not None:
            os.dup2(0, terminal_copy)

    process = PtyProcess.spawn(
        argv,
        env=dict(env),
        preexec_fn=prepare,
        dimensions=(ROWS, COLUMNS),
        pass_fds=tuple(inherited.values()),
    )
    # ptyprocess kills on garbage collection, and sleeps when it closes: we keep the numbers and end it ourselves.
    fd = os.dup(process.fd)
    process.fileobj.close()
    process.closed = True
    return process.pid, fd


def _plain_mode(fd: int) -> list[Any]:
    mode = termios.tcgetattr(fd)
    mode[_IFLAG] = (mode[_IFLAG] | termios.ICRNL) & ~(termios.IXON | termios.IXOFF | termios.ISTRIP | termios.INLCR)
    mode[_OFLAG] &= ~termios.OPOST
    mode[_LFLAG] |= termios.ICANON | termios.ISIG | termios.IEXTEN
    mode[_LFLAG] &= ~(termios.ECHO | termios.ECHOE | termios.ECHOK | termios.ECHONL | termios.TOSTOP)
    return mode
