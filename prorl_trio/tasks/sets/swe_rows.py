"""Published rows of software engineering: SWE-bench up to 5, SWE-Gym, SWE-rebench, SWE-smith and R2E-Gym.

A row's gold patch is never part of the instance, except for SWE-smith, whose patch introduces the bug.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_trio.sandbox.images.names import swe_bench_image, swe_gym_image, swe_smith_image
from prorl_trio.tasks.grading.repository import may_be_source
from prorl_trio.tasks.grading.row_patches import read_patch
from prorl_trio.tasks.handlers.swe import SwePayload
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from prorl_trio.tasks.grading.repository_tests import RunnerName


REPO_DIR: Final = "/testbed"
TIMEOUT_S: Final = 1800.0
"""The time for all tests of a row, as in SWE-bench. A single test has the same limit."""

CONDA: Final = {
    "PATH": "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:"
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "CONDA_PREFIX": "/opt/miniconda3/envs/testbed",
    "CONDA_DEFAULT_ENV": "testbed",
}
"""Variables set by `conda activate testbed` in images of SWE-bench and similar sets."""

PROGRESS: Final = re.compile(r"\[\s*\d+%\]")

R2E_ENV: Final = {
    "PATH": f"{REPO_DIR}/.venv/bin:/root/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "VIRTUAL_ENV": f"{REPO_DIR}/.venv",
    "PYTHONWARNINGS": "ignore",
    "QT_QPA_PLATFORM": "minimal",
}
"""Variables of R2E-Gym's run_tests.sh, and of the environment that it calls by path."""
R2E_TESTS: Final = "r2e_tests"
R2E_HIDDEN: Final = (
    *(R2E_TESTS, "run_tests.sh", "syn_issue.json", "expected_test_output.json", "execution_result.json"),
    *("parsed_commit.json", "modified_files.json", "modified_entities.json"),
    *("/r2e_tests", "/root/r2e_tests", "/root/run_tests.sh"),
)
"""Files and folders that R2E-Gym hides from the agent, and their new locations."""

SWE_BENCH_REPOS: Final = frozenset({
    "astropy/astropy", "django/django", "matplotlib/matplotlib", "mwaskom/seaborn", "pallets/flask", "psf/requests",
    "pydata/xarray", "pylint-dev/pylint", "pytest-dev/pytest", "scikit-learn/scikit-learn", "sphinx-doc/sphinx",
    "sympy/sympy",
})  # fmt: skip
SWE_GYM_REPOS: Final = frozenset({
    "bokeh/bokeh", "conan-io/conan", "dask/dask", "facebookresearch/hydra", "getmoto/moto", "iterative/dvc",
    "modin-project/modin", "pandas-dev/pandas", "project-monai/monai", "pydantic/pydantic", "python/mypy",
})  # fmt: skip

START: Final = ">>>>> Start Test Output"
END: Final = ">>>>> End Test Output"
OFFLINE: Final = "export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1"
"""There is no network, so pip must not try to use it."""
NO_GIT: Final = "git() { :; }"
"""An evaluation script resets the repository and its tests with git. We do that ourselves, from another history."""


# Test commands of published software engineering rows, as arguments of a runner.
#
# Benchmarks run a shell command and parse its log. Our results come from the runner itself, so such a command is split:
# the part before the runner becomes a script, and the rest becomes the runner's arguments. A command that runs anything
# else is refused.

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
"""Options with a value, and whether they are kept. `--parallel` is dropped: it is set to 1 if Django supports it."""
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
"""Exports the variables that tox.ini sets for all environments. That file is the row's or the base's. Values in tox's
own syntax (`{envdir}`) are omitted."""


class RunnerCommand(NamedTuple):
    """A command that runs tests: a bash script before it, the runner's arguments, and the runner.

    `selects` means that it ran only a part of the tests in its files. We run all tests in these files, including the
    canaries; names decide which results count.
    """

    script: str
    arguments: list[str]
    selects: bool = False
    runner: RunnerName = "pytest"


def read_command(command: str) -> RunnerCommand:
    """Return the parts of a test command: a script with variables, the runner, and its arguments.

    Options are omitted if they belong to pytest-xdist (tests run sequentially in one process), stop pytest at a
    failure, or select a part of the tests. Tox is replaced by the pytest that it runs, with the variables from tox.ini.

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
    """Return the repository's script (or tox) that a command runs, and the remaining words."""
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
    """Return a command with each option in one word, before the labels. Tests run in one process without fail-fast."""
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
    """Return a command with files as arguments. `-C` is equivalent to running SymPy without its cache."""
    script = "export SYMPY_USE_CACHE=no" if _NO_CACHE.intersection(words) else ""
    files = [word for word in words if word not in _SYMPY_OPTIONS]
    if unknown := [word for word in files if word.startswith("-")]:
        raise ValueError(f"the option {unknown[0]!r} of SymPy's bin/test is not taken. Leave such rows out")
    return RunnerCommand(script, files, runner="sympy")


_READERS: Final = {"bin/test": _read_sympy, "tox": _read_tox, "tests/runtests.py": _read_django}


def _after_pytest(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the values of Python's -W, and the words after `pytest` or `python -m pytest`; None for other programs."""
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
    """Return the arguments that tox passes to pytest; SWE-bench uses tox with an existing environment.

    Raises:
        ValueError: tox would create its own environment, or do something else.
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
    """Return the arguments to keep, and whether a selection of tests was removed."""
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
    """Return the set-up of SWE-bench's evaluation script, and the test command.

    Its resets and patches of test files have no effect, because the files are already the row's when it runs.

    Raises:
        ValueError: it lacks the marks around one command, or the command does not use a supported runner.
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
    """The way to run the tests of a version, as in tables of SWE-bench 4 and rows of SWE-rebench."""

    test_cmd: str | list[str]
    install: str | list[str] | None = None
    eval_commands: list[str] | None = None

    def command(self) -> RunnerCommand:
        """Return its test command, preceded by reinstallations. Raises ValueError if the runner is not supported."""
        commands = [self.test_cmd] if isinstance(self.test_cmd, str) else self.test_cmd
        if len(commands) != 1:
            raise ValueError(f"test_cmd has {len(commands)} commands, where 1 is expected")
        install = [self.install] if isinstance(self.install, str) else self.install or []
        command = read_command(commands[0])
        lines = [*(self.eval_commands or []), *([OFFLINE, *install] if install else []), command.script]
        return command._replace(script="\n".join(line for line in lines if line))


class Specifications:
    """The test commands by repository and version. `*` stands for any other version."""

    def __init__(self, table: dict[str, dict[str, _Specification]]) -> None:
        self._table = table

    def command(self, row: dict[str, Any]) -> RunnerCommand:
        """Return the command of a row's tests from the row's own specification, else from the table.

        Raises:
            ValueError: neither contains one, or the runner is not supported.
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
    """Return the specifications in a JSON file: `{REPOSITORY: {VERSION: {"test_cmd": ...}}}`; empty without a file.

    The form is that of SWE-bench 4's table `MAP_REPO_VERSION_TO_SPECS`. Blocks on the disk.

    Raises:
        ConfigError: the file is unreadable, or contains something else.
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


def changed_tests(runner: RunnerName, test_patch: str) -> list[str]:
    """Return the modules changed by a row's test patch, as arguments of its runner.

    SWE-bench runs them if ids do not contain their files; we include only Python modules.
    """
    changed = dict.fromkeys(re.findall(r"^diff --git a/.* b/(.*\.py)$", test_patch, re.MULTILINE))
    if runner == "sympy":
        return [*changed]
    return [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in changed]


def test_files_of(test_ids: list[str]) -> list[str]:
    """Return the files of pytest's node ids, without duplicates.

    Raises:
        ValueError: an id is invalid because it was truncated, or, if all are invalid, because they belong to another
            runner.
    """
    files: dict[str, None] = {}
    others: list[str] = []
    for test_id in test_ids:
        file, colons, _ = test_id.partition("::")
        if not colons or not file.endswith(".py") or file.startswith("-"):
            others.append(test_id)
        files[file] = None
    if not others:
        return list(files)
    raise ValueError(
        f"{others[0][:200]!r} is no id of pytest (FILE.py::NAME), "
        + (
            "so its tests have another runner, whose results are told in a log only. Leave such rows out"
            if len(others) == len(test_ids)
            else f"but {len(test_ids) - len(others)} other names of the row are: mend it, or leave the row out"
        )
    )


test_files_of.__test__ = False  # type: ignore[attr-defined] # pytest is not to collect it where it is imported


def read_swe_row(
    row: dict[str, Any], name: str, specifications: Specifications, stand_ins: Callable[[], Mapping[str, str]]
) -> TaskInstance | None:
    """Return the instance for a published row; None if it matches none of these forms.

    Args:
        row: as published.
        name: the instance's name if the row lacks `instance_id`.
        specifications: test commands for rows that do not contain them.
        stand_ins: returns our images by published name (`docker://...`).

    Raises:
        ValueError: a field is missing or invalid, or the runner is not supported. The message contains the field.
    """
    if {"expected_output_json", "docker_image"} <= row.keys():
        payload = _r2e(row)
        name = str(row.get("instance_id") or f"{row.get('repo_name') or name}__{row.get('commit_hash') or name}")
    elif "FAIL_TO_PASS" in row and "problem_statement" in row:
        name = _text(row, "instance_id")
        payload = _smith(row, name) if _is_smith(row) else _swe_bench(row, name, specifications)
    else:
        return None
    payload["image"] = stand_ins().get(payload["image"], payload["image"])
    try:
        msgspec.convert(payload, SwePayload)
    except msgspec.ValidationError as exc:
        raise ValueError(f"row {name}: {exc}") from exc
    return TaskInstance(
        instance_id=name, handler="swe", payload=payload, family=str(row.get("repo") or row.get("repo_name") or "")
    )


def _swe_bench(row: dict[str, Any], name: str, specifications: Specifications) -> dict[str, Any]:
    """Convert SWE-bench 5, whose rows have a script, and the earlier form, also used by SWE-Gym and SWE-rebench."""
    tests = _tests(row)
    read_patch(str(row.get("patch") or ""), "patch")
    if "eval_script" in row:
        if (kind := row.get("eval_type", "pass_and_fail")) != "pass_and_fail":
            raise ValueError(f"eval_type is {kind!r}: it counts a test that is missing as passed. Leave such rows out")
        command = read_eval_script(_text(row, "eval_script"))
    else:
        command = specifications.command(row)
    arguments = command.arguments
    if command.runner == "pytest":
        files = test_files_of([*tests["fail_to_pass"], *tests["pass_to_pass"]])
        if "eval_script" not in row or command.selects:
            arguments = [*_options(command), *files]
    elif "eval_script" not in row:
        arguments = [*arguments, *changed_tests(command.runner, _text(row, "test_patch"))]
    if command.runner != "pytest" and all(word.startswith("-") for word in arguments):
        raise ValueError(f"neither the command of {command.runner} nor test_patch names a module of tests")
    return {
        "problem_statement": _text(row, "problem_statement"),
        "image": _image(row, name),
        "repo_dir": str(row.get("workdir") or REPO_DIR),
        "env": CONDA,
        "sources": _sources(str(row.get("patch") or ""), _text(row, "test_patch")),
        "test_patch": _text(row, "test_patch"),
        "tests": {**tests, "kind": command.runner, "script": command.script, "arguments": arguments},
        "source": _source(row),
    }


def _sources(gold: str, test_patch: str = "") -> list[str]:
    """Return the files in test folders that a correct patch changes."""
    changed, tests = (
        dict.fromkeys(re.findall(r"^diff --git a/.* b/(.*)$", patch, re.MULTILINE)) for patch in (gold, test_patch)
    )
    return [path for path in changed if path not in tests and may_be_source(path)]


def _smith(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Convert SWE-smith: the patch is the bug; files with tests that it breaks are hidden from the agent."""
    tests = _tests(row)
    broken = test_files_of(tests["fail_to_pass"])
    files = test_files_of([*tests["fail_to_pass"], *tests["pass_to_pass"]])
    return {
        "problem_statement": _text(row, "problem_statement"),
        "image": _reference(str(row["image_name"])) if "/" in str(row.get("image_name", "")) else swe_smith_image(name),
        "repo_dir": REPO_DIR,
        "env": CONDA,
        "setup_patch": _text(row, "patch"),
        "sources": _sources(_text(row, "patch")),
        "hidden": broken,
        "tests": {**tests, "arguments": files},
        "source": _source(row),
    }


def _r2e(row: dict[str, Any]) -> dict[str, Any]:
    """Convert R2E-Gym: the tests are in the row instead of the repository; their results are compared as a whole."""
    statement = _text(row, "problem_statement")
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
    told = _json(row, "execution_result_content", dict)
    names, codes = told.get("test_file_names"), told.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or not names or len(names) != len(codes):
        raise ValueError("execution_result_content has no test_file_names with as many test_file_codes")
    files = {f"{R2E_TESTS}/{file}": code for file, code in zip(names, codes, strict=True)}
    modules = [file for file in files if re.search(r"/(test_[^/]*|[^/]*_test)\.py$", file)]
    if not modules:
        raise ValueError(f"execution_result_content.test_file_names has no module of pytest: {names!r}")
    return {
        "problem_statement": (issue[1] if issue else statement).strip(),
        "image": _reference(_text(row, "docker_image")),
        "repo_dir": REPO_DIR,
        "env": R2E_ENV,
        "hidden": R2E_HIDDEN,
        "unversioned": [".venv"],
        "test_files": files,
        "tests": {
            "kind": "result_map",
            "arguments": modules,
            "expected": _json(row, "expected_output_json", dict),
            "test_timeout_s": TIMEOUT_S,
            "timeout_s": TIMEOUT_S,
        },
        "source": {key: row[key] for key in ("repo_name", "commit_hash") if key in row},
    }


def _tests(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "pytest",
        "fail_to_pass": _names(row, "FAIL_TO_PASS"),
        "pass_to_pass": _names(row, "PASS_TO_PASS"),
        "test_timeout_s": TIMEOUT_S,
        "timeout_s": TIMEOUT_S,
    }


def _names(row: dict[str, Any], field: str) -> list[str]:
    """Return the names of tests, without progress marks (`[100%]`) that a log parser mistook for names."""
    names = _json(row, field, list)
    if odd := [name for name in names if not isinstance(name, str) or not name.strip()]:
        raise ValueError(f"{field} has {odd[0]!r}, which is no name of a test: mend the row, or leave it out")
    return [name for name in names if not PROGRESS.fullmatch(name.strip())]


def _options(command: RunnerCommand) -> list[str]:
    """Return a command's arguments; its files come from the tests' names."""
    return [word for word in command.arguments if not word.partition("::")[0].endswith(".py")]


def _is_smith(row: dict[str, Any]) -> bool:
    return str(row.get("repo", "")).startswith("swesmith/") or "swesmith" in str(row.get("image_name", ""))


def _image(row: dict[str, Any], name: str) -> str:
    for field in ("image", "image_name", "docker_image", "image_ref"):
        if row.get(field):
            return _reference(str(row[field]))
    repo = str(row.get("repo", "")).lower()
    if repo in SWE_BENCH_REPOS:
        return swe_bench_image(name)
    if repo in SWE_GYM_REPOS:
        return swe_gym_image(name)
    raise ValueError(
        f"no image: the row names none in `image`, and {row.get('repo')!r} is no repository of SWE-bench or SWE-Gym, "
        "whose images are known by instance_id. Add the field `image`"
    )


def _reference(image: str) -> str:
    """Return an image reference: a name with a slash belongs to a registry, unless it is a path."""
    return image if "://" in image or "/" not in image or image[0] in "/." else f"docker://{image}"


def _text(row: dict[str, Any], field: str) -> str:
    if not isinstance(value := row.get(field), str) or not value.strip():
        raise ValueError(f"{field} is {'missing' if field not in row else 'no text, or empty'}: leave such rows out")
    return value


def _json(row: dict[str, Any], field: str, kind: type[Any]) -> Any:
    """Return a field that is a list or an object, or JSON text of one."""
    value = row.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as exc:
            raise ValueError(f"{field} is text, but no JSON: {exc}") from exc
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise ValueError(f"{field} is {'missing' if field not in row else f'not {wanted}, nor the JSON text of one'}")
    return value


def _source(row: dict[str, Any]) -> dict[str, Any]:
    source = {key: row[key] for key in ("repo", "base_commit", "version", "environment_setup_commit") if row.get(key)}
    asked_for = [name for field in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in _json(row, field, list)]
    dropped = [name for name in asked_for if PROGRESS.fullmatch(name.strip())]
    return {**source, "dropped_names": dropped} if dropped else source
