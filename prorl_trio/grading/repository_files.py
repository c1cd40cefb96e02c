"""Paths of a repository that decide on its tests: they are the row's or the base's, whatever a patch says. Pure."""

from __future__ import annotations

import re
from typing import Final

_TEST_DIRS: Final = frozenset({"test", "tests", "testing"})
_TEST_MODULE: Final = re.compile(r"(test_.*|.*_test|.*_tests|tests?)\.py", re.DOTALL)
_HOOKS: Final = frozenset({
    "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py",
    "usercustomize.py", "pytest.py", "_pytest.py", "unittest.py", "pluggy.py", "noxfile.py",
    "runtests.py",
})  # fmt: skip


_RUNNERS: Final = frozenset({"_pytest", "pytest", "unittest"})
_AT_START: Final = frozenset({"sitecustomize", "usercustomize"})
"""Modules that Python imports before any program, from wherever an installed package has its sources."""


def is_test_file(path: str) -> bool:
    """Return whether a path of a repository is a test's: by its name, or by that of a folder above it."""
    *_, name = names = path.split("/")
    return is_test_module(path) or name == "conftest.py" or bool(_TEST_DIRS.intersection(names))


def is_test_module(path: str) -> bool:
    """Return whether a path has the name of a module of tests."""
    return _TEST_MODULE.fullmatch(path.rpartition("/")[2]) is not None


def may_be_source(path: str) -> bool:
    """Return whether a path that `belongs_to_tests` may be source all the same: `django/test/client.py`.

    It is in a package that is called `test` or `testing`, and is neither a module of tests nor a hook.
    """
    folders, _, _ = path.rpartition("/")
    top, *inner = folders.split("/")
    if top in _TEST_DIRS or "tests" in inner or is_test_module(path) or is_hook(path):
        return False
    return bool(_TEST_DIRS.intersection(inner)) and path.endswith(".py")


def is_hook(path: str) -> bool:
    """Return whether a path is a file that runs a repository's tests, or tells Python what to do before any."""
    *folders, name = path.split("/")
    if name in _HOOKS or name.endswith((".pth", ".pyc")) or _RUNNERS.intersection(folders[:1]):
        return True
    return any(each.partition(".")[0] in _AT_START for each in (*folders, name))  # packages and extensions as well


def belongs_to_tests(path: str) -> bool:
    """Return whether no change of an agent to this path counts: it is a test, its data, or a hook."""
    return is_test_file(path) or is_hook(path)
