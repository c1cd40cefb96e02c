"""Commands by which published rows of software engineering run their tests, as arguments of pytest.

Benchmarks run a shell command and read its log. Here results come from pytest itself, so such a command is taken apart:
what is before pytest becomes a script, and what follows it its arguments. A command that runs anything else is refused.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "RunnerCommand",
    "Specifications",
    "read_command",
    "read_eval_script",
    "read_specifications",
    "test_files_of",
]

START: Final = ">>>>> Start Test Output"
END: Final = ">>>>> End Test Output"
OFFLINE: Final = "export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1"
"""There is no network: pip does not try for it."""
NO_GIT: Final = "git() { :; }"
"""An evaluation script puts the repository and its tests in order. Here that is done, and from another history."""

_PYTESTS: Final = ("pytest", "py.test")
_PYTHON: Final = re.compile(r"(?:.*/)?python[\d.]*")
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SHELL: Final = frozenset(";|&<>()`")
_PARALLEL: Final = re.compile(r"-n=?(\d+|auto|logical)|--(numprocesses|dist|maxprocesses)=.*")
_PARALLEL_NEXT: Final = frozenset({"-n", "--numprocesses", "--dist", "--maxprocesses"})
_STOPS: Final = re.compile(r"-x|--exitfirst|--sw|--stepwise|--maxfail=.*")
_SELECTS: Final = re.compile(r"--deselect=.*|-[km].+")
_SELECTS_NEXT: Final = frozenset({"-k", "-m", "--deselect"})


class RunnerCommand(NamedTuple):
    """A command that runs tests: a script of bash before it, and arguments of pytest.

    `selects` says that it ran only a part of the tests in its files. All are run here: the names decide what counts,
    and tests that must fail are among them.
    """

    script: str
    arguments: list[str]
    selects: bool = False


def read_command(command: str) -> RunnerCommand:
    """Return what a command line that runs pytest says: variables before it as a script, and its arguments.

    Left out are options of pytest-xdist, for tests run one after the other in one process, and those by which pytest
    stops at a failure, or runs a part of the tests.

    Raises:
        ValueError: it runs something else, or more than one command.
    """
    try:
        lexer = shlex.shlex(command.strip(), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError as exc:
        raise ValueError(f"the test command {command!r} cannot be read: {exc}") from exc
    exports = []
    while words and _VARIABLE.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        exports.append(f"export {name}={shlex.quote(value)}")
    warnings, rest = _after_pytest(words)
    if rest is None or any("$" in word or (word and _SHELL.issuperset(word)) for word in rest):
        raise ValueError(
            f"the test command {command.strip()[:200]!r} is not one of pytest alone: other runners tell their results "
            "in a log, which the code that is tested can write as well. Leave such rows out"
        )
    if warnings:
        exports.append(f"export PYTHONWARNINGS={shlex.quote(','.join(warnings))}")
    arguments, selects = _all_in_one_process(rest)
    return RunnerCommand("\n".join(exports), arguments, selects)


def _after_pytest(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the values of Python's -W, and what follows `pytest` or `python -m pytest`; None if it is neither."""
    if not words:
        return [], None
    if words[0].rsplit("/", 1)[-1] in _PYTESTS:
        return [], words[1:]
    warnings: list[str] = []
    if _PYTHON.fullmatch(words[0]):
        rest = words[1:]
        while len(rest) > 1 and rest[0] == "-W":
            warnings, rest = [*warnings, rest[1]], rest[2:]
        if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _PYTESTS:
            return warnings, rest[2:]
    return [], None


def _all_in_one_process(arguments: list[str]) -> tuple[list[str], bool]:
    """Return the arguments that are kept, and whether a selection of tests was not."""
    kept: list[str] = []
    selects = False
    words = iter(arguments)
    for word in words:
        if word in _SELECTS_NEXT or _SELECTS.fullmatch(word):
            selects = True
        if word in _SELECTS_NEXT or word in _PARALLEL_NEXT:
            next(words, None)
        elif not any(option.fullmatch(word) for option in (_SELECTS, _PARALLEL, _STOPS)):
            kept.append(word)
    return kept, selects


def read_eval_script(script: str) -> RunnerCommand:
    """Return what SWE-bench's evaluation script does before its tests, and the tests' command.

    Its own resets and patches of test files do nothing: the files are the row's when it runs.

    Raises:
        ValueError: it has no marks around one command, or that is not pytest's.
    """
    before, start, rest = script.partition(START)
    between, end, _ = rest.partition(END)
    if not start or not end:
        raise ValueError(f"eval_script has no {START!r} with {END!r} after it: it is none of SWE-bench 5")
    before = before.rsplit("\n", 1)[0] if "\n" in before else ""
    commands = [line for line in between.split("\n")[1:-1] if line.strip()]
    if len(commands) != 1:
        raise ValueError(f"eval_script has {len(commands)} commands between its marks, where 1 is expected")
    command = read_command(commands[0])
    lines = [NO_GIT, OFFLINE, before, "unset -f git", command.script]
    return command._replace(script="\n".join(line for line in lines if line))


class _Specification(msgspec.Struct):
    """The way in which tests of a version are run, as tables of SWE-bench 4 and rows of SWE-rebench have it."""

    test_cmd: str | list[str]
    install: str | list[str] | None = None
    eval_commands: list[str] | None = None

    def command(self) -> RunnerCommand:
        """Return its test command, after what is installed anew. Raises ValueError: it is not pytest's."""
        commands = [self.test_cmd] if isinstance(self.test_cmd, str) else self.test_cmd
        if len(commands) != 1:
            raise ValueError(f"test_cmd has {len(commands)} commands, where 1 is expected")
        install = [self.install] if isinstance(self.install, str) else self.install or []
        command = read_command(commands[0])
        lines = [*(self.eval_commands or []), *([OFFLINE, *install] if install else []), command.script]
        return command._replace(script="\n".join(line for line in lines if line))


class Specifications:
    """The tests' commands by repository and version. `*` stands for any that is not named."""

    def __init__(self, table: dict[str, dict[str, _Specification]]) -> None:
        self._table = table

    def command(self, row: dict[str, Any]) -> RunnerCommand:
        """Return the command of a row's tests: by the row's own specification, else by the table.

        Raises:
            ValueError: neither has one, or it is not one of pytest.
        """
        own = row.get("install_config") or row
        if isinstance(own, str):
            own = json.loads(own)
        if own.get("test_cmd"):
            return msgspec.convert(
                {key: own.get(key) for key in _Specification.__struct_fields__}, _Specification
            ).command()
        repo, version = str(row.get("repo", "")), str(row.get("version", ""))
        versions = self._table.get(repo, self._table.get("*", {}))
        found = versions.get(version, versions.get("*"))
        if found is None:
            raise ValueError(
                f"nothing says how the tests of {repo} {version} are run: the row has no test_cmd or "
                "install_config.test_cmd, and the file of --specs has no such version; the smallest is "
                '{"*": {"*": {"test_cmd": "pytest"}}}'
            )
        return found.command()


def read_specifications(path: Path | None) -> Specifications:
    """Return the specifications of a JSON file: `{REPOSITORY: {VERSION: {"test_cmd": ...}}}`; none without a file.

    That is the form of SWE-bench 4's table `MAP_REPO_VERSION_TO_SPECS`. Blocks on the disk.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    if path is None:
        return Specifications({})
    try:
        table = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, dict[str, Any]]])
        read = {
            repo: {version: msgspec.convert(each, _Specification) for version, each in versions.items()}
            for repo, versions in table.items()
        }
    except OSError as exc:
        raise ConfigError(f"the file of specifications {path} cannot be read: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"the file of specifications {path} is not {{REPOSITORY: {{VERSION: ...}}}}: {exc}") from exc
    return Specifications(read)


def test_files_of(test_ids: list[str]) -> list[str]:
    """Return the files of pytest's node ids, each once.

    Raises:
        ValueError: one is no such id: it is of another runner.
    """
    files: dict[str, None] = {}
    for test_id in test_ids:
        file, colons, _ = test_id.partition("::")
        if not colons or not file.endswith(".py") or file.startswith("-"):
            raise ValueError(
                f"{test_id[:200]!r} is no id of pytest (FILE.py::NAME), so its tests have another runner, whose "
                "results are told in a log only. Leave such rows out"
            )
        files[file] = None
    return list(files)


test_files_of.__test__ = False  # type: ignore[attr-defined] # pytest is not to collect it where it is imported
