"""Commands by which published rows of software engineering run their tests, as arguments of a runner.

Benchmarks run a shell command and read its log. Here results come from the runner itself, so such a command is taken
apart: what is before the runner becomes a script, and what follows it its arguments. A command that runs anything else
is refused.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from prorl_trio.grading.repository_tests import RunnerName

_PYTESTS: Final = ("pytest", "py.test")
_PYTHON: Final = re.compile(r"(?:.*/)?python[\d.]*")
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SHELL: Final = frozenset(";|&<>()`")
_PARALLEL: Final = re.compile(r"-n=?(\d+|auto|logical)|--(numprocesses|dist|maxprocesses)=.*")
_PARALLEL_NEXT: Final = frozenset({"-n", "--numprocesses", "--dist", "--maxprocesses"})
_STOPS: Final = re.compile(r"-x|--exitfirst|--sw|--stepwise|--maxfail=.*")
_SELECTS: Final = re.compile(r"--deselect=.*|-[km].+")
_SELECTS_NEXT: Final = frozenset({"-k", "-m", "--deselect"})
_TOX_OPTIONS: Final = re.compile(r"--current-env|-e.+|-[vq]+")
_DJANGO_VALUES: Final = {"--settings": True, "--verbosity": True, "-v": False, "--parallel": False}
"""Options with a value, and which are kept. Of `--parallel` there is none: 1 is set where Django knows of it."""
_DJANGO_IGNORED: Final = frozenset({"--noinput", "--failfast"})
_NO_CACHE: Final = frozenset({"-C", "--no-cache"})
_SYMPY_OPTIONS: Final = frozenset({*_NO_CACHE, "-v", "--verbose", "--no-colors"})

TOX_VARIABLES: Final = """\
eval "$(python3 - <<'END_OF_TOX'
import configparser, re, shlex
tox = configparser.RawConfigParser(strict=False)
tox.read("tox.ini", encoding="utf-8")
for option in ("setenv", "set_env"):
    for line in tox.get("testenv", option, fallback="").splitlines():
        pair = re.match(r"([A-Za-z_][A-Za-z0-9_]*)[ ]*=[ ]*([^{}]*)$", line.strip())
        if pair:
            print("export {}={}".format(pair.group(1), shlex.quote(pair.group(2))))
END_OF_TOX
)\""""
"""Exports what tox.ini sets for all environments. That file is the row's or the base's; values of its own language
(`{envdir}`) are left out."""


class RunnerCommand(NamedTuple):
    """A command that runs tests: a script of bash before it, the arguments of its runner, and which that is.

    `selects` says that it ran only a part of the tests in its files. All are run here: the names decide what counts,
    and tests that must fail are among them.
    """

    script: str
    arguments: list[str]
    selects: bool = False
    runner: RunnerName = "pytest"


def read_command(command: str) -> RunnerCommand:
    """Return what a command line that runs tests says: variables before it as a script, its runner and its arguments.

    Left out are options of pytest-xdist, for tests run one after the other in one process, and those by which pytest
    stops at a failure, or runs a part of the tests. Tox is taken for the pytest that it runs, with the variables that
    tox.ini sets.

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
    program, rest = _program(words)
    read = _READERS[program](rest) if program in _READERS else _read_pytest(words)
    if read is None or any("$" in word or (word and _SHELL.issuperset(word)) for word in read.arguments):
        raise ValueError(
            f"the test command {command.strip()[:200]!r} is not one of pytest, of Django's runtests.py or of SymPy's "
            "bin/test alone: other runners tell their results in a log, which the code that is tested can write as "
            "well. Leave such rows out"
        )
    return read._replace(script="\n".join(line for line in (*exports, read.script) if line))


def _program(words: list[str]) -> tuple[str, list[str]]:
    """Return the script of a repository that a command runs, or tox, and what follows."""
    at = 1 if words and _PYTHON.fullmatch(words[0]) else 0
    name = "".join(words[at : at + 1]).removeprefix("./")
    return "tox" if name.rsplit("/", 1)[-1] == "tox" else name, words[at + 1 :]


def _read_pytest(words: list[str]) -> RunnerCommand | None:
    warnings, rest = _after_pytest(words)
    if rest is None:
        return None
    arguments, selects = _all_in_one_process(rest)
    script = f"export PYTHONWARNINGS={shlex.quote(','.join(warnings))}" if warnings else ""
    return RunnerCommand(script, arguments, selects)


def _read_tox(words: list[str]) -> RunnerCommand:
    arguments, selects = _all_in_one_process(_after_tox(words))
    return RunnerCommand(TOX_VARIABLES, arguments, selects)


def _read_django(words: list[str]) -> RunnerCommand:
    """Each option in one word, before the labels. Tests run in one process, and none that fails ends them."""
    options: list[str] = []
    labels: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if not word.startswith("-"):
            labels.append(word)
        elif option in _DJANGO_VALUES:
            value = value if equals else next(rest, "")
            options += [f"{option}={value}"] if _DJANGO_VALUES[option] else []
        elif word not in _DJANGO_IGNORED:
            raise ValueError(f"the option {word!r} of Django's runtests.py is not taken. Leave such rows out")
    return RunnerCommand("", [*options, *labels], runner="django")


def _read_sympy(words: list[str]) -> RunnerCommand:
    """Files. Without its cache SymPy is as `-C` has it."""
    script = "export SYMPY_USE_CACHE=no" if _NO_CACHE.intersection(words) else ""
    files = [word for word in words if word not in _SYMPY_OPTIONS]
    if unknown := [word for word in files if word.startswith("-")]:
        raise ValueError(f"the option {unknown[0]!r} of SymPy's bin/test is not taken. Leave such rows out")
    return RunnerCommand(script, files, runner="sympy")


_READERS: Final = {"bin/test": _read_sympy, "tox": _read_tox, "tests/runtests.py": _read_django}


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


def _after_tox(words: list[str]) -> list[str]:
    """Return what tox hands on to pytest; tests of SWE-bench are run so in an environment that is there already.

    Raises:
        ValueError: tox would make an environment of its own, or do something else.
    """
    options = words[: words.index("--")] if "--" in words else words
    rest = iter(options)
    unknown = [word for word in rest if not (word == "-e" and next(rest, "")) and not _TOX_OPTIONS.fullmatch(word)]
    if unknown or "--current-env" not in options or "--" not in words:
        raise ValueError(
            f"the command `tox {shlex.join(words)[:200]}` is none of `tox --current-env -e NAME -v -- ARGUMENTS`: "
            f"{f'{unknown[0]} is not taken' if unknown else 'it would make an environment, or names no tests'}"
        )
    return words[len(options) + 1 :]


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
