"""The path of this Python, to start it from another directory, or to look for it among what is mounted."""

from __future__ import annotations

import os
import sys


def own_python() -> str:
    """The absolute path of this interpreter, in its environment's `bin` folder if it is there.

    `sys.executable` is relative where Python was found by a relative PATH, and keeps the `..` of how it was called.
    """
    in_prefix = os.path.join(sys.prefix, "bin", os.path.basename(sys.executable))
    return in_prefix if os.path.exists(in_prefix) else os.path.abspath(sys.executable)
