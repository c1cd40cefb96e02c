"""A test run of a repository from its driver's view: the evaluator's instructions, and the set of trusted code.

The evaluator writes one line of JSON to the driver's standard input. It contains the key of the report, the repository,
the paths changed and added by the patch, and further data for the pytest driver. The driver's own imports come only
from the environment; the repository is added to Python's path afterwards.

A skip or an expected failure counts only if the row requested it. Then every frame between the test and the exception
is code of the row or of the environment, and the raising frame names its action. Three kinds of code are not the row's:
code changed or added by the patch, code generated at run time, and files written since the start of the run.

Runs in sandboxes, in the tests' own process: it uses only the syntax and the standard library of Python 3.5.
"""

import ast
import builtins
import json
import os
import re
import sys
import unittest
from contextlib import contextmanager
from importlib.machinery import PathFinder, SourceFileLoader
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

from .report import open_report

_ASKS = re.compile("skip|xfail", re.IGNORECASE)
_IMPORT = "<frozen importlib"
_MAX_WRAPPERS = 100
_TEST = re.compile(r"(^|/)(tests?|testing)/|(^|/)(test[^/]*|[^/]*tests?|conftest)\.py$")


def open_session(report_path: str) -> Any:
    """Return the session described by the evaluator's line on standard input."""
    return Session(json.loads(sys.stdin.readline()), report_path)


class Session:
    """The run: its report, its repository, and the code that may request a skip.

    Attributes:
        write: writes a message to the report.
        job: the evaluator's instructions, without the key.
        raised: exceptions raised by a part of the current unittest test.
    """

    def __init__(self, job: Any, report_path: str) -> None:
        self.write = open_report(report_path, bytes.fromhex(job.pop("key")))
        self.job = job
        self._root = os.path.realpath(job["repository"])
        self._changed = {self._real(each) for each in job["changed"]}
        self._added = {self._real(each) for each in job["added"]}
        prefixes = {os.path.realpath(each) for each in (sys.prefix, sys.base_prefix, sys.exec_prefix) if each}
        self._inner = [each for each in prefixes if self._in_root(each)]
        self.outside = [each for each in sys.path if each and not self.is_in_repository(each)]
        standard = os.path.dirname(os.path.realpath(os.__file__))
        self._environment = [os.path.realpath(each) for each in self.outside] + [standard]
        self._runners = [os.path.dirname(os.path.realpath(__file__))]
        self._known = self._files()
        self._guarded = []  # type: Any
        self.raised = []  # type: Any

    def add_repository(self, *first: str) -> None:
        """Set Python's path to the repository with `first`, then the row's PYTHONPATH, then the original path.

        A module added by the patch never hides a module of the environment or the standard library.
        """
        said = os.environ.pop("GRADING_PYTHONPATH", "")
        if said:
            os.environ["PYTHONPATH"] = said
        rest = [each for each in sys.path if each]
        sys.path[:] = list(first) + [os.path.abspath(each) for each in said.split(os.pathsep) if each] + rest
        sys.meta_path.insert(0, _EnvironmentFirst(self))

    def add_runner(self, module: Any) -> None:
        """Treat a package as part of the runner: its frames act on behalf of a caller, a marker or a decorator."""
        path = os.path.realpath(module.__file__)
        self._runners.append(os.path.dirname(path) if os.path.basename(path) == "__init__.py" else path)

    def guard(self, names: Any) -> None:
        """Record the functions and classes defined in these modules, if loaded; see `replaced`."""
        for module in [sys.modules[name] for name in names if name in sys.modules]:
            own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
            for owner in [module] + [each for each in own if isinstance(each, type) and module is not builtins]:
                known = {name: value for name, value in vars(owner).items() if _is_code(value)}
                if owner is module:
                    known = {name: value for name, value in known.items() if any(value is each for each in own)}
                self._guarded.append([owner, known, len(vars(owner)), owner is module, ()])

    def replaced(self) -> str:
        """Return what code under test replaced, removed or added in guarded modules; empty if nothing.

        Changes by the row's own code or the environment are ignored.
        """
        for guarded in self._guarded:
            owner, known, size, is_module, seen = guarded
            now = vars(owner)
            if len(now) == len(seen) and all(map(is_, now.values(), seen)):  # the common case: nothing changed
                continue
            for name, value in known.items():
                if now.get(name) is not value and not self._is_made_by_row(now.get(name)):
                    return "{}.{}".format(owner.__name__, name)  # noqa: UP032 - Python 3.5
            if len(now) != size and not is_module:
                for name, value in list(now.items()):
                    if name not in known and _is_code(value) and not self._is_made_by_row(value):
                        return "{}.{}".format(owner.__name__, name)  # noqa: UP032 - Python 3.5
            guarded[4] = list(now.values())
        return ""

    def _is_made_by_row(self, value: Any) -> bool:
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if isinstance(function, type):
            module = sys.modules.get(function.__module__)
            filename = str(getattr(module, "__file__", None) or "")
        else:
            filename = str(getattr(getattr(function, "__code__", None), "co_filename", ""))
        return bool(filename) and (self.is_runner(filename) or self.trusts(filename))

    def watch_parts(self) -> None:
        """Record in `raised` the exceptions that leave a part of a unittest test, however unittest handles them.

        Some of its own exceptions count as a pass.
        """
        outcome = getattr(unittest.case, "_Outcome")  # noqa: B009 - it is private
        execute = outcome.testPartExecutor
        raised = self.raised
        running = []  # type: Any

        @contextmanager
        def execute_and_note(made: Any, test_case: Any, *arguments: Any, **options: Any) -> Any:
            running.append(test_case)
            try:
                with execute(made, test_case, *arguments, **options):
                    try:
                        yield
                    except BaseException as exc:
                        # A test may itself run tests; these are not its parts.
                        if running[0] in (test_case, getattr(test_case, "test_case", None)):
                            raised.extend([] if isinstance(exc, unittest.SkipTest) else [type(exc).__name__])
                        raise
            finally:
                running.pop()

        outcome.testPartExecutor = execute_and_note

    def is_added(self, path: str) -> bool:
        """Return whether the patch added a file."""
        return os.path.abspath(path) in self._added or os.path.realpath(path) in self._added

    def trusts(self, filename: str) -> bool:
        """Return whether a source file belongs to the row or the environment, and was not touched by the patch."""
        if filename.startswith("<frozen "):
            return True
        path = os.path.realpath(os.path.join(self._root, filename))
        if self.is_in_repository(path):
            return path in self._known and path not in self._changed and self._known[path] == _stamp_of(path)
        return any(_is_under(path, each) for each in self._environment + self._inner) and os.path.isfile(path)

    def trusts_frame(self, frame: Any) -> bool:
        """Return whether the code of a frame belongs to the row or the environment."""
        filename = _file_of(frame)
        return self.is_runner(filename) or self.trusts(filename)

    def is_runner(self, filename: str) -> bool:
        """Return whether a file is part of the test runner."""
        path = os.path.realpath(os.path.join(self._root, filename))
        return any(_is_under(path, each) for each in self._runners)

    def objection(self, frames: Any) -> Any:
        """Return why the code in these frames, outermost first, may not request a skip; empty if it may.

        None: the frames contain only the runner, which acts on a decorator or a marker.
        """
        asking = None
        for frame in frames:
            filename = _file_of(frame)
            if self.is_runner(filename):
                continue
            if not self.trusts(filename):
                return "{} is code that is tested".format(filename or "code made at run time")
            asking = frame.f_code
        if asking is None:
            return None
        names = asking.co_names + asking.co_freevars + asking.co_varnames
        if any(_ASKS.search(name) for name in names):
            return ""
        return "line {} of {} asks for none".format(asking.co_firstlineno, asking.co_filename)  # noqa: UP032 - Python 3.5

    def objection_to(self, exception: Any) -> Any:
        """Return why a raised exception may not skip a test; see `objection`."""
        found = []
        traceback = exception.__traceback__
        while traceback is not None:
            found.append(traceback.tb_frame)
            traceback = traceback.tb_next
        return self.objection(found)

    def callers(self) -> Any:
        """Return the frames, outermost first, from the runner's or an import's frames to the caller's caller."""
        found = []  # type: Any
        frame = sys._getframe(2)  # type: Any
        while frame is not None:
            if not self.is_runner(frame.f_code.co_filename):
                if found and frame.f_code.co_filename.startswith(_IMPORT):
                    break
                found.append(frame)
            elif found:
                break
            frame = frame.f_back
        return found[::-1]

    def is_decorated(self, holders: Any, attribute: str) -> bool:
        """Return whether the first function or class with this attribute belongs to the row's own code."""
        for holder in holders:
            if attribute in getattr(holder, "__dict__", ()):
                module = sys.modules.get(getattr(holder, "__module__", None) or "")
                filename = str(getattr(module, "__file__", None) or "")
                return bool(filename) and not self.is_runner(filename) and self.trusts(filename)
        return False

    def _real(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _in_root(self, path: str) -> bool:
        return _is_under(os.path.realpath(path), self._root)

    def is_in_repository(self, path: str) -> bool:
        """Return whether a path is in the repository, outside any environment within it."""
        path = os.path.realpath(path)
        return _is_under(path, self._root) and not any(_is_under(path, each) for each in self._inner)

    def _files(self) -> Any:
        found = {}  # type: Any
        for folder, names, files in os.walk(self._root):
            inside = [name for name in names if name != ".git" and os.path.join(folder, name) not in self._inner]
            names[:] = inside
            for path in [os.path.join(folder, name) for name in files]:
                found[path] = _stamp_of(path)
        return found

    def foreign(self, module: Any) -> Any:
        """Return something in a row's module that its source does not define; empty if nothing.

        Code under test has had access to the module.
        """
        with open(module.__file__, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        made = [each.name for each in tree.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))]
        for owner in [vars(module).get(name) for name in made]:
            members = [each for each in vars(owner).values() if _is_code(each)] if isinstance(owner, type) else []
            if not all(self._is_made_by_row(each) for each in [owner, *members]):
                return "{}.{}".format(module.__name__, getattr(owner, "__name__", owner))
        return ""

    def is_test(self, filename: str) -> bool:
        """Return whether the name of a row's file is that of a test or a test's support file."""
        path = os.path.realpath(filename)
        if path not in self._known or path in self._changed:
            return False
        return _TEST.search(os.path.relpath(path, self._root)) is not None

    def is_rewritten(self, filename: str) -> bool:
        """Return whether a row's file was written since the start of the run; it then no longer counts as a test."""
        path = os.path.realpath(os.path.join(self._root, filename))
        return path in self._known and path not in self._changed and self._known[path] != _stamp_of(path)

    def swapped(self, test: Any) -> str:
        """Return the file of a function with which code under test replaced a test; empty if none.

        A wrapper around a test may come from the environment.
        """
        for _ in range(_MAX_WRAPPERS):
            function = getattr(test, "__func__", test)
            code = getattr(function, "__code__", None)
            filename = str(getattr(code, "co_filename", ""))
            own = str(getattr(sys.modules.get(getattr(function, "__module__", None) or ""), "__file__", None) or "")
            if filename.startswith("<"):  # generated at run time by a plug-in or a decorator
                filename = own
            if filename and not self.is_runner(filename) and not self.trusts(filename):
                return filename
            test = getattr(function, "__wrapped__", None)
            if test is None:
                break
        return ""


class _EnvironmentFirst:
    """A module finder that prevents modules added by the patch from hiding modules of the environment.

    The row's tests are read from their sources.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the location of a module hidden by the patch, or of a test; else None."""
        del target
        beside = [os.path.join(str(each), name.rpartition(".")[2] + ".py") for each in path or ()]
        if path is not None and not any(_TEST.search(each) for each in beside):
            return None
        found = PathFinder.find_spec(name, path)
        if found is None or not found.origin:
            return None
        if path is None and self._session.is_added(found.origin):
            return PathFinder.find_spec(name, self._session.outside)
        if type(found.loader) is SourceFileLoader and self._session.is_test(found.origin):
            found.loader = _Unread(self._session, name, found.origin)
            return found
        return None


def _file_of(frame: Any) -> str:
    """Return the file of a frame's code; for code generated at run time, the file of the generating module."""
    name = frame.f_code.co_filename
    if name.startswith("<") and not name.startswith("<frozen "):
        return str(frame.f_globals.get("__file__") or "")
    return str(name)


def _stamp_of(path: str) -> Any:
    """Return a value that reveals writes to a file: unlike the modification time, the change time cannot be set."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime, found.st_ctime


class _Unread(SourceFileLoader):
    """A loader of a row's module. It ignores bytecode, and the source must be unchanged since the start of the run."""

    def __init__(self, session: Any, name: str, path: str) -> None:
        super().__init__(name, path)
        self._session = session

    def get_code(self, fullname: str) -> Any:
        """Return the compiled source."""
        path = self.get_filename(fullname)
        if self._session.is_rewritten(path):
            raise ImportError(path + " was written while tests ran: it is no test any more")
        return self.source_to_code(self.get_data(path), path)


def _is_code(value: Any) -> bool:
    return isinstance(value, (type, FunctionType, BuiltinFunctionType, classmethod, staticmethod, property))


def _is_under(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
