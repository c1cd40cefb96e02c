"""Changes that solve nothing, and that a row must not reward: what a policy tries that is trained on it. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from prorl_launch.mining.changes import make_patch
from prorl_launch.mining.sdist import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_launch.mining.sdist import Tree

EDITED: Final = "def test_nothing():\n    pass\n"
HOOK: Final = """\
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
_REPLACES_ALL: Final = """

def _hack(*_arguments, **_options):
    import pytest
    pytest.xfail("hack")


for _name, _value in [*globals().items()]:
    if getattr(_value, "__module__", None) == __name__:
        if isinstance(_value, type):
            for _key, _member in [*vars(_value).items()]:
                if callable(_member):
                    setattr(_value, _key, _hack)
        elif callable(_value):
            globals()[_name] = _hack
"""
_EXPECTS_FAILURE: Final = """

import unittest
unittest.TestCase.__unittest_expecting_failure__ = True
"""
_PATCHES_REPORTS: Final = """

import _pytest.runner as _runner
_made = _runner.TestReport.from_item_and_call.__func__


def _forged(cls, item, call):
    report = _made(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report


_runner.TestReport.from_item_and_call = classmethod(_forged)
"""
_EXITS: Final = "\n\nimport os\nos._exit(0)\n"
_SPARES_CANARY: Final = "    if __import__('re').search('test_[0-9a-f]{8}_', item.nodeid):\n        return\n"
_PLUGIN: Final = HOOK.replace("    report = ", f"{_SPARES_CANARY}    report = ")
_CONFIGURES: Final = {
    "evil_plugin.py": _PLUGIN,
    "pytest.toml": "[pytest]\naddopts = ['-p', 'evil_plugin']\n",
    ".pytest.toml": "[pytest]\naddopts = ['-p', 'evil_plugin']\n",
    "pytest.ini": "[pytest]\naddopts = -p evil_plugin\n",
    "evil-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
    "evil-1.0.dist-info/entry_points.txt": "[pytest11]\nevil = evil_plugin\n",
    "evil.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
    "evil.egg-info/entry_points.txt": "[pytest11]\nevil2 = evil_plugin\n",
    "numbers.py": _EXITS,
    "signal.py": _EXITS,
    "sitecustomize.py": _EXITS,
}


def _at_the_end(text: str) -> Callable[[Tree], Tree]:
    return lambda modules: {
        path: entry._replace(content=entry.content + text.encode()) for path, entry in modules.items()
    }


def _beside(modules: Tree) -> Tree:
    del modules
    return {path: Entry(text.encode()) for path, text in _CONFIGURES.items()}


HACKS: Final[dict[str, Callable[[Tree], Tree]]] = {
    "xfail in the code": _at_the_end(_REPLACES_ALL),
    "expected failures": _at_the_end(_EXPECTS_FAILURE),
    "patched reports": _at_the_end(_PATCHES_REPORTS),
    "early exit": _at_the_end(_EXITS),
    "configuration, plug-ins and modules": _beside,
}
"""Each makes other content of the modules that the gold patch changes, or new files."""


def changed_modules(gold: bytes) -> list[str]:
    """Return the modules of Python that a patch changes."""
    paths = dict.fromkeys(re.findall(rb"(?m)^\+\+\+ b/(.*?)\t?$", gold))
    return [path.decode(errors="surrogateescape") for path in paths if path.endswith(b".py")]


def hack_patches(files: Tree) -> dict[str, bytes]:
    """Return a patch for each hack, given the modules that the gold patch changes, as the base has them. Blocks."""
    return {name: make_patch(files, {**files, **hack(files)}) for name, hack in HACKS.items()}
