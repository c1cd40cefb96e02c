"""Published rows say how their tests are run: in a script, a field, or a table beside them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.client.task_sets.swe_commands import read_command
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_trio.client.task_sets.swe_commands import RunnerCommand
    from prorl_trio.grading.repository_tests import RunnerName

START: Final = ">>>>> Start Test Output"
END: Final = ">>>>> End Test Output"
OFFLINE: Final = "export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1"
"""There is no network: pip does not try for it."""
NO_GIT: Final = "git() { :; }"
"""An evaluation script puts the repository and its tests in order. Here that is done, and from another history."""


def read_eval_script(script: str) -> RunnerCommand:
    """Return what SWE-bench's evaluation script does before its tests, and the tests' command.

    Its own resets and patches of test files do nothing: the files are the row's when it runs.

    Raises:
        ValueError: it has no marks around one command, or that is none of a runner.
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
        """Return its test command, after what is installed anew. Raises ValueError: it is none of a runner."""
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
            ValueError: neither has one, or it is none of a runner.
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


def changed_tests(runner: RunnerName, test_patch: str) -> list[str]:
    """Return the modules that a row's change to its tests is in, as arguments of its runner.

    That is what SWE-bench runs where ids do not name their files; here only modules of Python.
    """
    changed = dict.fromkeys(re.findall(r"^diff --git a/.* b/(.*\.py)$", test_patch, re.MULTILINE))
    if runner == "sympy":
        return [*changed]
    return [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in changed]


def test_files_of(test_ids: list[str]) -> list[str]:
    """Return the files of pytest's node ids, each once.

    Raises:
        ValueError: one is no such id: it was cut, or, if all are none, they are of another runner.
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
