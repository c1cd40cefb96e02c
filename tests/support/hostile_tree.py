"""A program that leaves whatever a program can leave: run it where something else promises to clear up.

`python hostile_tree.py READY [--deaf]`: orphans in sessions of their own, a socket and files in TMPDIR, a segment in
/dev/shm that PRORL_TEST_MARK names. It makes the file READY once all that is there, and waits. With `--deaf` it takes
no notice of SIGTERM; without, it writes `drained` to READY and ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

ORPHANS = "(setsid sh -c 'trap \"\" TERM; sleep 3600 & sleep 3600' &) ; setsid setsid sleep 3600 &"
DRAIN_S = 0.3


def main(ready: Path, *, deaf: bool) -> None:
    """Leave things, say so, and wait for the end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: drain(ready))
    folder = Path(tempfile.gettempdir())
    (folder / "deep/er").mkdir(parents=True)
    (folder / "deep/er/file").write_bytes(bytes(100_000))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    segment = shared_memory.SharedMemory(f"{os.environ['PRORL_TEST_MARK']}-{os.getpid()}", create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined] # nobody shall unlink it
    subprocess.run(ORPHANS, shell=True, check=True)
    ready.write_text("ready")
    while True:
        time.sleep(3600)


def drain(ready: Path) -> None:
    """Take some time to end, and tell that it was granted."""
    time.sleep(DRAIN_S)
    ready.write_text("drained")
    sys.exit(0)


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]), deaf="--deaf" in sys.argv)
