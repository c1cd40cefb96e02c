"""Runs the candidate's program after a preamble, both in `__main__`: `python -c ... SOLUTION_PATH PREAMBLE_PATH`.

The program sees the same arguments, `sys.path` and input as under `python3 SOLUTION_PATH`.

Runs in sandboxes: uses only the standard library of Python 3.8.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the preamble and then the program."""
    path, preamble_path = sys.argv[1:3]
    del sys.argv[0], sys.argv[1:]
    sys.path[:] = [os.path.dirname(path), *(each for each in sys.path if each)]
    module = sys.modules["__main__"]
    names = module.__dict__
    for name in [each for each in names if not each.startswith("__")]:
        del names[name]
    module.__file__ = path
    for each in (preamble_path, path):
        with open(each, encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, each, "exec", dont_inherit=True), names)
