"""Descriptors 1 and 2 of an ipykernel: output of children is published before the cell that started them ends.

It runs in the kernel, from its source, in any Python. ipykernel's own capture is a thread that the end of a cell does
not wait for: on a busy machine a child's output would appear with the next cell.
"""

import codecs
import os
import select
import sys
import threading
from typing import Any

PIPE_BYTES = 1024 * 1024
"""At least the capacity of a pipe: one read of this size empties it."""


def publish_descriptors() -> None:
    """Publish output on descriptors 1 and 2 of this kernel, which was started with `capture_fd_output` off."""
    from IPython import get_ipython

    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        get_ipython().events.register("post_execute", _Descriptor(descriptor, stream).publish)


class _Descriptor:
    """A pipe that replaces `descriptor`. A reader writes its data to `stream` before another may read."""

    def __init__(self, descriptor: int, stream: Any) -> None:
        self._pipe, write_end = os.pipe()
        os.set_blocking(self._pipe, False)
        os.dup2(write_end, descriptor)
        os.close(write_end)
        stream.fileno = lambda: descriptor  # for `subprocess.run(..., stdout=sys.stdout)`
        self._pid = os.getpid()
        self._stream = stream
        self._lock = threading.Lock()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        threading.Thread(target=self._watch, daemon=True).start()

    def publish(self) -> bool:
        """Publish the pipe's content.

        Return False if it has ended: a cell closed the descriptor, or this is its child.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            try:
                written = os.read(self._pipe, PIPE_BYTES)
            except BlockingIOError:
                return True
            self._stream.write(self._decoder.decode(written))
            return bool(written)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while poll.poll() and self.publish():
            continue
