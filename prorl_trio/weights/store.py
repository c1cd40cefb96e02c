"""Private folders for weights: as many as are in use, and removed with the client, also after a kill."""

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
"""Time for which the folders of a killed trainer stay: longer than a node takes to give up its update, so that the
former weights can be loaded from them once more."""
PREFIX: Final = "prorl-weights-"
STOP_TIMEOUT_S: Final = 10.0

_WATCHDOG: Final = 'cat >/dev/null; sleep "$1"; rm -rf -- "$2"'
"""Ends its first wait when the trainer's end of the pipe is closed, however that comes."""


class WeightStore:
    """The folders of one client below one parent. Nothing is made before the first is asked for.

    A shell process, of a session of its own, waits for the end of this one: after a kill it removes what is left,
    `AFTER_KILL_S` later. Methods block; one thread at a time.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._root: Path | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._count = 0

    def new_folder(self) -> Path:
        """Make an empty folder and return it.

        Raises:
            WeightsRefused: the parent is no folder that can be written to.
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
        """Remove all folders but this one. None: all."""
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
    """Kill the process and what it runs, and reap it."""
    pipe: IO[bytes] | None = watchdog.stdin
    os.killpg(watchdog.pid, 9)  # not reaped yet, so the id is still its own
    watchdog.wait(STOP_TIMEOUT_S)
    if pipe is not None:
        pipe.close()


class WeightStores:
    """The stores of one client, by their parent. Methods block; one thread at a time."""

    def __init__(self) -> None:
        self._stores: dict[Path, WeightStore] = {}
        self._in_use: Path | None = None

    @property
    def used(self) -> bool:
        """Return whether there may be folders."""
        return bool(self._stores)

    def new_folder(self, parent: Path) -> Path:
        """See `WeightStore.new_folder`."""
        return self._stores.setdefault(parent, WeightStore(parent)).new_folder()

    def use(self, folder: Path | None) -> None:
        """Remove every folder but this one, which engines have from now on; None: every one."""
        self._in_use = folder
        self.discard_unused()

    def discard_unused(self) -> None:
        """Remove every folder but the one in use."""
        for store in self._stores.values():
            store.keep_only(self._in_use)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        for store in self._stores.values():
            store.close()
