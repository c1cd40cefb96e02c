"""The grading of SWE-bench's own package, of its wheel; its packages' own imports (Docker, data sets) are passed by."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from prorl_trio.tasks.sets.wheels import WheelFile, wheels_dir
from support.code_policy import fetch_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

SWEBENCH = WheelFile("swebench", "5.0.2", "3.11", "swebench/harness/grading.py")
UNIDIFF = WheelFile("unidiff", "0.7.5", "3.11", "unidiff/__init__.py")
"""All that its grading needs."""


@contextmanager
def import_swebench() -> Iterator[tuple[types.ModuleType, types.ModuleType]]:
    """Import the modules of the wheel that grade and that parse logs, until the block ends."""
    for each in (SWEBENCH, UNIDIFF):
        fetch_wheel(each)
    (wheel,), (unidiff,) = (wheels_dir().glob(f"{each.package}-{each.version}-*.whl") for each in (SWEBENCH, UNIDIFF))
    before = {*sys.modules}
    sys.path.append(str(unidiff))
    for name in ("swebench", "swebench.harness"):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
    try:
        yield import_module("swebench.harness.grading"), import_module("swebench.harness.log_parsers")
    finally:
        sys.path.remove(str(unidiff))
        for name in {name for name in sys.modules if name.partition(".")[0] in ("swebench", "unidiff")} - before:
            del sys.modules[name]
