"""Private folders for weights: only folders in use are kept, and all are removed with the client, even after a kill."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prorl_trio.weights.errors import WeightsRefused

if TYPE_CHECKING:
    from typing import IO

SHARED_MEMORY: Final = Path("/dev/shm")
AFTER_KILL_S: Final = 300
"""Seconds for which the folders of a killed trainer are kept. A node gives up the update earlier, so it can still
reload the former weights from them."""
PREFIX: Final = "prorl-weights-"
STOP_TIMEOUT_S: Final = 10.0

_WATCHDOG: Final = 'cat >/dev/null; sleep "$1"; rm -rf -- "$2"'
"""Waits until the trainer's end of the pipe closes, for whatever reason, and removes the folder after a delay."""


class WeightStore:
    """The folders of one client below one parent. Nothing is created before the first request.

    A shell process in its own session waits for this process to exit. After a kill it removes the remaining folders,
    `AFTER_KILL_S` later. Methods block; use one thread at a time.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._root: Path | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._count = 0

    def new_folder(self) -> Path:
        """Create an empty folder and return it.

        Raises:
            WeightsRefused: the parent is not a writable folder.
        """
        try:
            if self._root is None:
                self._root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
                self._watchdog = _watch(self._root)
            self._count += 1
            folder = self._root / str(self._count)
            folder.mkdir()
        except OSError as exc:
            raise WeightsRefused(f"{self._parent}: weights cannot be written there: {exc.strerror}") from exc
        return folder

    def keep_only(self, folder: Path | None) -> None:
        """Remove all folders except this one. None removes all."""
        if self._root is not None:
            for other in self._root.iterdir():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        if self._watchdog is not None:
            _stop(self._watchdog)
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._root = self._watchdog = None


def _watch(root: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCHDOG, "prorl-weights", str(AFTER_KILL_S), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _stop(watchdog: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, and reap it."""
    pipe: IO[bytes] | None = watchdog.stdin
    os.killpg(watchdog.pid, 9)  # not reaped yet, so the id is still its own
    watchdog.wait(STOP_TIMEOUT_S)
    if pipe is not None:
        pipe.close()


class WeightStores:
    """The stores of one client by parent folder. Methods block; use one thread at a time."""

    def __init__(self) -> None:
        self._stores: dict[Path, WeightStore] = {}
        self._in_use: Path | None = None

    @property
    def used(self) -> bool:
        """Return whether folders may exist."""
        return bool(self._stores)

    def new_folder(self, parent: Path) -> Path:
        return self._stores.setdefault(parent, WeightStore(parent)).new_folder()

    def use(self, folder: Path | None) -> None:
        """Remove every folder except this one, which the engines now use; None removes all."""
        self._in_use = folder
        self.discard_unused()

    def discard_unused(self) -> None:
        """Remove every folder except the one in use."""
        for store in self._stores.values():
            store.keep_only(self._in_use)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        for store in self._stores.values():
            store.close()
