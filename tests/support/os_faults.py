"""The operating system refuses a node one call, or several in a row: whichever calls of this process those are.

Calls of the client, of engines and of tests in the same process are left alone, and not counted.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from trio._core._io_epoll import EpollIOManager
from trio._core._thread_cache import ThreadCache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

DESCRIPTORS: Final = errno.EMFILE
FILES: Final = errno.ENFILE
SPACE: Final = errno.ENOSPC
QUOTA: Final = errno.EDQUOT
BROKEN: Final = errno.EIO
PROCESSES: Final = errno.EAGAIN
MEMORY: Final = errno.ENOMEM

_OPENS: Final[dict[str, tuple[Any, str]]] = {
    "io.open": (io, "open"),
    "os.open": (os, "open"),
    "os.pipe": (os, "pipe"),
    "os.pidfd_open": (os, "pidfd_open"),
    "os.listdir": (os, "listdir"),
    "os.scandir": (os, "scandir"),
    "socketpair": (socket, "socketpair"),
    "socket": (socket.socket, "__init__"),
    "accept": (socket.socket, "accept"),
}
_WRITES: Final[dict[str, tuple[Any, str]]] = {
    "os.mkdir": (os, "mkdir"),
    "os.rename": (os, "rename"),
    "os.replace": (os, "replace"),
}
_STARTS: Final[dict[str, tuple[Any, str]]] = {
    "process": (subprocess.Popen, "__init__"),
    "thread": (ThreadCache, "start_thread_soon"),
}
_WAITS: Final[dict[str, tuple[Any, str]]] = {"epoll": (EpollIOManager, "_epoll_wait")}
_CALLS: Final[dict[int, dict[str, tuple[Any, str]]]] = {
    DESCRIPTORS: {**_OPENS, "process": _STARTS["process"]},
    SPACE: {**_WRITES, "io.open": _OPENS["io.open"], **_WAITS},
    FILES: _OPENS,
    QUOTA: {**_WRITES, "io.open": _OPENS["io.open"]},
    BROKEN: {**_WRITES, "io.open": _OPENS["io.open"], "os.open": _OPENS["os.open"]},
    PROCESSES: _STARTS,
    MEMORY: {**_OPENS, **_STARTS, **_WAITS},
}
"""The calls that can fail with an error number."""
_FILENO: Final = 4
"""Which argument of `socket.__init__` the descriptor is."""
_OTHERS: Final = ("/prorl_trio/client/", "/prorl_trio/testing/", "/ipc/client", "/tests/", "/logging/")


class OsFaults:
    """Refuses calls number `first` to `last` that the node makes after `arm`, each with the same error.

    Attributes:
        calls: calls of the node since then.
        refused: names of those that were refused.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0
        self.refused: list[str] = []
        self._range = range(0)

    def arm(self, first: int, count: int = 1) -> None:
        """Refuse `count` calls, after `first - 1` of them have passed."""
        self.calls, self.refused, self._range = 0, [], range(first, first + count)

    def disarm(self) -> None:
        """Refuse nothing from now on."""
        self._range = range(0)

    def meet(self, name: str, mode: object = "r") -> None:
        """Count a call of the node; raise if it is to be refused."""
        if not self._range or not _is_of_node():
            return
        if self.number in (SPACE, QUOTA) and name == "io.open" and not set(str(mode)) & set("wax+"):
            return
        self.calls += 1
        if self.calls in self._range:
            self.refused.append(name)
            if name == "thread":
                raise RuntimeError("can't start new thread")
            raise OSError(self.number, os.strerror(self.number))


def _is_of_node() -> bool:
    frame: FrameType | None = sys._getframe(2)
    own = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__:
            if any(part in file for part in _OTHERS):
                return False
            own = own or "/prorl_trio/" in file or "/ipc/" in file
        frame = frame.f_back
    return own


@contextmanager
def os_faults(number: int) -> Iterator[OsFaults]:
    """Have faults with this error number at hand during the block."""
    faults = OsFaults(number)

    def wrapped(name: str, original: Any) -> Any:
        if name == "epoll":

            async def wait(*args: Any) -> Any:
                faults.meet(name)
                return await original(*args)

            return wait

        def call(*args: Any, **kwargs: Any) -> Any:
            # A socket of a descriptor makes nothing new; socketpair() itself would leave its descriptors behind.
            if not (name == "socket" and (kwargs.get("fileno") is not None or len(args) > _FILENO)):
                faults.meet(name, kwargs.get("mode", args[1] if len(args) > 1 else "r"))
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, (owner, attribute) in _CALLS[number].items():
            stack.enter_context(patch.object(owner, attribute, wrapped(name, getattr(owner, attribute))))
        yield faults
