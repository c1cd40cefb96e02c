"""Runs pytest and reports each test's result: `python -c ... REPORT_PATH TEST_TIMEOUT_S ARGUMENTS`.

Each message is `{"test": NODE_ID, "status": ..., "message": ...}`. A test has results for its set-up, its call and its
tear-down; the worst is reported at its end. The evaluator passes the plug-ins of the row's environment and pytest's
configuration file, as found by `look` before the patch was applied. No others are loaded or read.

Runs in sandboxes, in the tests' own process: uses the standard library of Python 3.8, and pytest 5 or later.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import unittest
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .own_time import limited
from .session import open_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .session import Session

MAX_MESSAGE_CHARS = 2000
MAX_CHAIN = 10
"""Limit on the inspected chain of exceptions that were being handled when a skip was raised."""
GROUP = "pytest11"
GUARDED = (__name__, f"{__package__}.session", f"{__package__}.own_time", f"{__package__}.report")
OFF = ("cacheprovider", "randomly")
"""Plug-ins that leave files or change the order."""


class Reporter:
    """A plug-in of pytest."""

    def __init__(self, session: Session, test_timeout_s: float) -> None:
        self._session = session
        self._write = session.write
        self._test_timeout_s = test_timeout_s
        self._worst: dict[str, tuple[str, str]] = {}
        self._tampered = ""
        self._swapped: dict[str, str] = {}

    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Limit the test's time."""
        self._session.raised.clear()
        with limited(self._test_timeout_s):
            yield

    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        """Turn a skip that the row did not request, and a pass despite an exception, into a failure."""
        before = call.excinfo
        outcome: Any = yield
        report = outcome.get_result()
        self._look_at(item)
        raised = before or call.excinfo
        objection = ""
        if report.outcome == "skipped" and raised is not None:
            objection = self._objection(item, raised.value, expected=hasattr(report, "wasxfail"))
        elif report.outcome == "passed":
            names = [*(self._session.raised if call.when == "call" else ()), *([raised.typename] if raised else ())]
            objection = f"passed, although {names[0]} was raised" if names else ""
        if objection:
            report.outcome, report.longrepr = "failed", f"this does not count: {objection}"
            report.__dict__.pop("wasxfail", None)

    def _look_at(self, item: Any) -> None:
        """Record that a test no longer belongs to the row: its file was modified, or code under test replaced it."""
        path, session = str(item.fspath), self._session
        if session.is_rewritten(path):
            self._swapped[item.nodeid] = f"this does not count: {path} was written while tests ran"
        elif session.trusts(path) and (other := session.swapped(getattr(item, "obj", None))):
            self._swapped[item.nodeid] = f"this does not count: code of {other} is in the place of a test"

    def pytest_plugin_registered(self, plugin: Any, manager: Any) -> None:
        """Remove a plug-in that was created by code under test. Repositories of plug-ins may modify their own."""
        module = plugin if isinstance(plugin, ModuleType) else sys.modules.get(type(plugin).__module__)
        filename = str(getattr(module, "__file__", None) or "")
        if self._session.is_runner(filename) or self._session.trusts(filename) or self._is_of_plugins():
            return
        manager.unregister(plugin)

    def _is_of_plugins(self) -> bool:
        """Return whether a plug-in of the row's environment lives in the repository."""
        modules = {entry.partition("=")[2].partition(":")[0] for entry in self._session.job["plugins"]}
        files = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
        return any(self._session.is_in_repository(each) for each in files if each)

    # Equivalent to pytest.hookimpl; pytest is imported late.
    for hook in (pytest_runtest_protocol, pytest_runtest_makereport):
        setattr(hook, "pytest_impl", {"hookwrapper": True, "tryfirst": True})  # noqa: B010 - the type lacks the attribute

    def _objection(self, item: Any, exception: BaseException, *, expected: bool) -> str:
        """Return why a raised exception may not skip a test or make it fail as expected; empty if it may."""
        outcomes: Any = sys.modules["_pytest.outcomes"]
        skips = (outcomes.skip.Exception, outcomes.xfail.Exception, unittest.SkipTest)
        asked = False
        found: BaseException | None = exception if isinstance(exception, skips) else None
        for _ in range(MAX_CHAIN):  # pytest raises its own skip while it handles a unittest skip
            if isinstance(found, skips) and (said := self._session.objection_to(found)) is not None:
                if said:
                    return str(said)
                asked = True
            found = getattr(found, "__context__", None)
        names = ("xfail",) if expected else ("skip", "skipif")
        attribute = "__unittest_expecting_failure__" if expected else "__unittest_skip__"
        holders = [getattr(item, "obj", None), *getattr(getattr(item, "cls", None), "__mro__", ())]
        is_doctest = type(item).__module__ == "_pytest.doctest" and self._session.trusts(str(item.fspath))
        marked = any(getattr(mark, _TRUSTED, False) for name in names for mark in item.iter_markers(name))
        if asked or marked or is_doctest or self._session.is_decorated(holders, attribute):
            return ""
        return "no marker in the row's own files says so"

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the end of a phase."""
        status = _status(report)
        known = self._worst.get(report.nodeid)
        if known is None or _RANK[status] > _RANK[known[0]]:
            self._worst[report.nodeid] = (status, str(report.longrepr or "")[-MAX_MESSAGE_CHARS:])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the result of a test."""
        status, message = self._worst.pop(nodeid, ("missing", ""))
        if not self._tampered and (name := self._session.replaced()) and not self._is_of_plugins():
            self._tampered = f"this does not count: the code that is tested has replaced {name}"
        self._tampered = self._tampered or self._swapped.pop(nodeid, "")
        if self._tampered:
            status, message = "failed", self._tampered
        self._write({"test": nodeid, "status": status, "message": message})

    def pytest_collectreport(self, report: Any) -> None:
        """Report a file that cannot be collected; its tests will be missing."""
        if report.failed:
            self._write(
                {"test": report.nodeid, "status": "error", "message": str(report.longrepr)[-MAX_MESSAGE_CHARS:]}
            )

    def pytest_unconfigure(self) -> None:
        """Write the end of the report."""
        self._write({"end": True})


class _Finder:
    """A pytest plug-in that prints pytest's configuration file and the available plug-ins, and exits."""

    def __init__(self) -> None:
        self._stdout = os.dup(1)  # pytest captures the original descriptor

    def pytest_load_initial_conftests(self, early_config: Any) -> None:
        """Print and exit before any code of the repository is imported."""
        config = getattr(early_config, "inipath", None) or getattr(early_config, "inifile", None)
        root = getattr(early_config, "rootpath", None) or early_config.rootdir
        found = {
            "config": str(config or ""),
            "rootdir": str(root),
            "plugins": sorted({*_plugins()}),
            "options": _options(),
        }
        os.write(self._stdout, f"\n{json.dumps(found)}\n".encode())
        os._exit(0)

    setattr(pytest_load_initial_conftests, "pytest_impl", {"tryfirst": True})  # noqa: B010 - the type lacks the attribute


_RANK = {"missing": 0, "passed": 1, "xpassed": 2, "xfailed": 3, "skipped": 4, "timed_out": 5, "failed": 6, "error": 7}
_TRUSTED = "_grading_trusted"


def _status(report: Any) -> str:
    if report.failed:
        if "TestTimedOut" in str(report.longrepr):
            return "timed_out"
        return "failed" if report.when == "call" else "error"
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    if hasattr(report, "wasxfail"):
        return "xpassed"
    return "passed" if report.when == "call" else "missing"


def _plugins() -> Iterator[str]:
    for distribution in importlib.metadata.distributions():
        yield from _entries(distribution) or ()


def _entries(distribution: Any) -> list[str] | None:
    """Return the plug-ins of a distribution as `NAME=MODULE`; None if they cannot be read."""
    try:
        return [f"{each.name}={each.value}" for each in distribution.entry_points if each.group == GROUP]
    except Exception:  # a patch may have put anything into the file
        return None


def _limit_plugins(allowed: frozenset[str]) -> None:
    """Make pytest load only distributions whose plug-ins are all allowed."""
    import pluggy

    load = pluggy.PluginManager.load_setuptools_entrypoints

    def load_allowed(self: Any, group: str, name: str | None = None) -> int:
        sources: list[Any] = [importlib.metadata, *filter(None, [sys.modules.get("importlib_metadata")])]
        originals = [source.distributions for source in sources]

        def allowed_ones(original: Any) -> Any:
            return lambda **options: [
                each
                for each in original(**options)
                if (found := _entries(each)) is not None and allowed.issuperset(found)
            ]

        for source, original in zip(sources, originals):  # noqa: B905 - Python 3.8
            source.distributions = allowed_ones(original)
        try:
            return int(load(self, group, name))
        finally:
            for source, original in zip(sources, originals):  # noqa: B905 - Python 3.8
                source.distributions = original

    setattr(pluggy.PluginManager, "load_setuptools_entrypoints", load_allowed)  # noqa: B010 - not declared as a variable


def _watch_marks(session: Session) -> None:
    """Record, for each marker that skips a test or expects it to fail, whether the row's code created it."""
    mark = sys.modules["_pytest.mark.structures"].Mark
    make = mark.__init__

    def make_and_note(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        if self.name in ("skip", "skipif", "xfail"):
            callers = session.callers()
            object.__setattr__(self, _TRUSTED, bool(callers) and all(session.trusts_frame(each) for each in callers))

    mark.__init__ = make_and_note


def _read_sources(session: Session) -> None:
    """Make pytest read tests from their sources, as they were at the start of the run, and never from bytecode."""
    rewrite: Any = sys.modules["_pytest.assertion.rewrite"]
    compile_test = rewrite._rewrite_test

    def compile_unread(path: Any, config: Any) -> Any:
        if session.is_rewritten(str(path)):
            raise ImportError(f"{path} was written while tests ran: it is no test any more")
        return compile_test(path, config)

    rewrite._rewrite_test = compile_unread
    rewrite._read_pyc = lambda *_arguments: None


def _import_pytest(session: Session) -> None:
    """Import pytest and the modules it loads from the environment, or from the repository if it is pytest's."""
    path = sys.path[:]
    sys.path[:] = session.outside
    try:
        pytest = importlib.import_module("pytest")
    except ImportError:
        sys.path[:] = path
        session.add_repository(os.getcwd())
        pytest = importlib.import_module("pytest")
    else:
        sys.path[:] = path
        session.add_repository(os.getcwd())
    for name in sys.modules["_pytest.config"].default_plugins:
        importlib.import_module(f"_pytest.{name}")
    for module in (pytest, sys.modules["_pytest"], sys.modules["pluggy"], unittest):
        session.add_runner(module)


def _options() -> list[str]:
    off = [word for name in OFF for word in ("-p", f"no:{name}")]
    if find_spec("xdist") is not None:
        off.append("-n0")  # if disabled, it would not know the options that a repository may set for it
    return ["-q", *off]


def look() -> None:
    """Print pytest's configuration file for these arguments and the environment's plug-ins as the last line."""
    said = os.environ.pop("GRADING_PYTHONPATH", "")
    sys.path[:] = [os.getcwd(), *filter(None, said.split(os.pathsep)), *sys.path]
    pytest = importlib.import_module("pytest")
    sys.exit(pytest.main([*_options(), *sys.argv[1:]], plugins=[_Finder()]))


def main() -> None:
    """Run pytest in the current directory, from which its tests can import, as with `python -m pytest`."""
    path, test_timeout_s, *arguments = sys.argv[1:]
    session = open_session(path)
    _import_pytest(session)
    _limit_plugins(frozenset(session.job["plugins"]))
    _watch_marks(session)
    _read_sources(session)
    session.watch_parts()
    session.guard(
        ["builtins", *GUARDED, *(name for name in sys.modules if name.startswith(("_pytest.", "pluggy.", "unittest.")))]
    )
    reporter = Reporter(session, float(test_timeout_s))
    pytest: Any = sys.modules["pytest"]
    sys.exit(pytest.main([*session.job["options"], *arguments, "--maxfail=0"], plugins=[reporter]))
