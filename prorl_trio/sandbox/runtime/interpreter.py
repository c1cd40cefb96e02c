"""The path of this Python, to start it from another directory, or to find it among mounts."""

from __future__ import annotations

import os
import sys


def own_python() -> str:
    """Return the absolute path of this interpreter, in its environment's `bin` folder if it is there.

    `sys.executable` is relative if Python was found by a relative PATH, and keeps any `..` of its command line.
    """
    in_prefix = os.path.join(sys.prefix, "bin", os.path.basename(sys.executable))
    return in_prefix if os.path.exists(in_prefix) else os.path.abspath(sys.executable)
