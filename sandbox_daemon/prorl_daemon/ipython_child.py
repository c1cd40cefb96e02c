"""The process of the persistent IPython shell: `python -m prorl_daemon.ipython_child CONTROL_FD BEGUN_FD`.

Blocking and single-threaded, so that user code finds an ordinary Python. Its descriptors 1 and 2 are pipes to the
daemon; all data that the cell and its children write there is the cell's output. It ends when the control socket does.
Copies that cells fork do not communicate with the daemon: see `forks`.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec

from prorl_daemon.child_wire import CONTROL_MAX_FRAME_BYTES, NO_MEMORY_EXIT, CellDone, ChildReady, RunCell, StartChild
from prorl_ipc.framing import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

INTERRUPTED = 130
"""Exit code of a program that SIGINT ended, as shells report it."""

_exit, _getpid = os._exit, os.getpid  # cells may replace them


class KernelProcess:
    """The original process, as opposed to its forked copies.

    Args:
        let_go: called in each copy that Python makes (`os.fork`, `os.forkpty`, `multiprocessing`, a `preexec_fn`): each
            closes a descriptor that belongs to the kernel. A `fork` that Python does not see keeps them, unused.
    """

    def __init__(self, *let_go: Callable[[], None]) -> None:
        self._pid = _getpid()
        self._let_go = let_go
        # Flush before the fork, so that buffered output appears only once.
        os.register_at_fork(before=flush_output, after_in_child=self._become_copy)

    @property
    def is_copy(self) -> bool:
        """Return whether the calling process is not the kernel."""
        return _getpid() != self._pid

    def _become_copy(self) -> None:
        for let_go in self._let_go:
            with suppress(OSError):  # a cell may have closed it
                let_go()


def end_copy(error: BaseException | None, traceback: str) -> NoReturn:
    """End this process as the child of a script ends at the script's end, with `error` if there was one.

    Its output is flushed; functions registered to run at exit belong to the kernel, and are not run.
    """
    code, said = _ending(error, traceback)
    with suppress(Exception):
        if said:
            sys.stderr.write(f"{said}\n")
        flush_output()
    _exit(code)


def _ending(error: BaseException | None, traceback: str) -> tuple[int, str]:
    match error:
        case None:
            return 0, ""
        case SystemExit(code=None):
            return 0, ""
        case SystemExit(code=int() as code):
            return code & 0xFF, ""
        case SystemExit(code=code):
            return 1, str(code)
        case KeyboardInterrupt():
            return INTERRUPTED, traceback.rstrip()
        case _:
            return 1, traceback.rstrip()


def is_session_leader() -> bool:
    """Return whether the daemon started this process.

    A forked process is not, unless it makes itself a session leader.
    """
    return _getpid() == os.getsid(0)


def flush_output() -> None:
    """Flush Python's output so far. Cells may close or replace the streams, and fork during a write."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError, RuntimeError):
            stream.flush()


RECEIVE_BYTES = 64 * 1024
THREAD_STACK_BYTES = 2 * 1024 * 1024
"""Stack of each Python thread. A whole stack counts as memory, used or not: at the usual 8 MiB, 256 sleeping threads
would take the 2 GiB that a process may have."""
_decoder: msgspec.msgpack.Decoder[StartChild | RunCell] = msgspec.msgpack.Decoder(StartChild | RunCell)


class ControlSocket:
    """The child's end of the control socket. Blocks."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._socket.setblocking(True)
        self._frames = FrameDecoder(CONTROL_MAX_FRAME_BYTES)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self) -> StartChild | RunCell | None:
        """Return the next message, or None when the daemon has closed its end."""
        while (payload := self._frames.next_frame()) is None:
            try:
                received = self._socket.recv(RECEIVE_BYTES)
            except ConnectionError:
                return None
            if not received:
                return None
            self._frames.feed(received)
        return _decoder.decode(payload)

    def send(self, message: ChildReady | CellDone) -> None:
        self._socket.sendall(encode_frame(self._encoder.encode(message), max_frame_bytes=CONTROL_MAX_FRAME_BYTES))

    def close(self) -> None:
        """Close this process's descriptor; other processes keep theirs."""
        self._socket.close()


def preload_shell() -> None:
    """Make the shell for all copies of this process, independent of the agent's environment and directory."""
    from prorl_daemon.ipython_shell import CellShell

    CellShell.instance().rehearse()


def main(control_fd: int, begun_fd: int) -> NoReturn:
    """Serve cells until the daemon closes the control socket, then end without running user code at exit.

    It writes a byte to `begun_fd` when a cell has begun: from then on SIGINT interrupts the cell.
    """
    if not is_session_leader():  # forked by code that Python runs at startup: a user's `sitecustomize`
        os._exit(0)
    signal.signal(signal.SIGINT, _ignore_interrupt)
    control = ControlSocket(control_fd)
    os.set_inheritable(begun_fd, False)
    try:
        _serve(control, begun_fd, KernelProcess(control.close, partial(os.close, begun_fd)))
    except (MemoryError, SystemError):
        # In our own code: the cell's variables or threads have used up all memory. Python raises SystemError
        # if it lacked the memory to report the failure.
        os._exit(NO_MEMORY_EXIT)
    os._exit(0)


def _serve(control: ControlSocket, begun_fd: int, process: KernelProcess) -> None:
    start = control.receive()
    if not isinstance(start, StartChild):
        return
    _take_environment(start)
    from prorl_daemon.ipython_shell import CellShell

    shell = CellShell.instance()
    gc.freeze()  # IPython's own objects need not be searched repeatedly
    control.send(ChildReady())
    while isinstance(cell := control.receive(), RunCell):
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(begun_fd, b".")
            done = shell.run(cell.code, number=cell.number, max_text_bytes=cell.max_text_bytes)
            flush_output()
            signal.signal(signal.SIGINT, _ignore_interrupt)
        except KeyboardInterrupt:  # it arrived just after the user's code; the daemon sends one for each cell
            signal.signal(signal.SIGINT, _ignore_interrupt)
            done = shell.interrupted(cell.number)
        finally:
            if process.is_copy:
                end_copy(shell.last_error, shell.last_traceback)
        control.send(done)


def _take_environment(start: StartChild) -> None:
    """Become like a tool's process: its environment, its directory, an import path that begins with the directory."""
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.cwd if os.path.isdir(start.cwd) else "/")
    sys.path[:0] = ["", *(entry for entry in start.env.get("PYTHONPATH", "").split(os.pathsep) if entry)]
    sys.argv = [""]
    threading.stack_size(THREAD_STACK_BYTES)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=False
        )


def _ignore_interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Ignore SIGINT between cells. Unlike SIG_IGN, this is not inherited by children of user code."""


if __name__ == "__main__":
    from prorl_daemon.ipython_child import main as imported_main  # IPython replaces sys.modules["__main__"]

    imported_main(int(sys.argv[1]), int(sys.argv[2]))
