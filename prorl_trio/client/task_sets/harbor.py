"""Folders of Harbor tasks, one folder a task, for the handler `shell`."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Final
from prorl_trio.types.errors import ConfigError
import re
from typing import TYPE_CHECKING, Any, Final
import msgspec
from prorl_trio.client.task_sets.harbor_build import Built, Files, image_of, read_dockerfile
from prorl_trio.client.task_sets.harbor_config import StepSection, artifact_paths, read_task_toml
from prorl_trio.handlers.shell.payload import HOME
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from pathlib import Path
    from collections.abc import Mapping
    from prorl_trio.client.task_sets.harbor_config import EnvironmentSection, TaskFileSections


TASK_TOML: Final = "task.toml"
TASK_YAML: Final = "task.yaml"
STEPS: Final = "steps"
SETUP: Final = "setup.sh"
VERIFIER_TIMEOUT_S: Final = 600.0
_CANARY: Final = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)

IMAGES_TOML: Final = "images.toml"


def read_stand_ins(folder: Path) -> dict[str, str]:
    """Return the table `[images]` of `images.toml` in a folder of tasks: an image of ours by the published name.

    Without the file there are none. Blocks on the disk.

    Raises:
        ConfigError: the file has something else.
    """
    path = folder / IMAGES_TOML
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    images = table.get("images")
    if set(table) != {"images"} or not isinstance(images, dict):
        raise ConfigError(f"{path}: one table, [images], is wanted")
    if bad := [name for name, image in images.items() if not isinstance(image, str)]:
        raise ConfigError(f"{path}: images.{bad[0]} is no text")
    return images


def load_harbor(folder: Path, *, solutions: bool = False) -> list[TaskInstance]:
    """Return the tasks of a folder, one for each folder in it that has a `task.toml`, or of a single such folder.

    `images.toml` beside them, if it is there, says in its table `[images]` which of the node's images stands for one of
    theirs. With `solutions`, each task brings its own, which is then run in place of the agent; else they are not read.
    Blocks on the disk.

    Raises:
        ConfigError: there is no task, or one of them cannot be read or asks for what is not done here; with its file.
    """
    single = (folder / TASK_TOML).is_file()
    tasks = [folder] if single else sorted(path.parent for path in folder.glob(f"*/{TASK_TOML}"))
    if not tasks:
        old = next(
            (path for path in (folder / TASK_YAML, *sorted(folder.glob(f"*/{TASK_YAML}"))) if path.is_file()), None
        )
        if old is not None:
            raise ConfigError(
                f"{old}: tasks of the first Terminal-Bench are not read; Harbor turns them into its own form: "
                "`harbor task migrate`"
            )
        raise ConfigError(f"{folder} has no folder with a {TASK_TOML}")
    images = read_stand_ins(folder)
    return [_load(task, images, solutions=solutions) for task in tasks]


def _load(task: Path, images: Mapping[str, str], *, solutions: bool) -> TaskInstance:
    sections = read_task_toml(task / TASK_TOML)
    steps = {task / STEPS / step.name: step for step in sections.steps} or {task: StepSection(name="task")}
    for path, why in (
        *((folder / "trajectory.json", "an agent begins with its instruction only") for folder in steps),
        (task / "environment" / "docker-compose.yaml", "there are no services beside a sandbox"),
    ):
        if path.exists():
            raise ConfigError(f"{path}: {why}")
    files = Files()
    environment = _environment(sections.environment, task / "environment", images, files)
    reader = _StepReader(task, sections, images, files, environment["workdir"] or HOME)
    timeouts = [step.agent.timeout_sec or sections.agent.timeout_sec for step in steps.values()]
    payload = {
        "steps": [reader.read(folder, step, with_solution=solutions) for folder, step in steps.items()],
        "environment": environment,
        "reward_strategy": sections.multi_step_reward_strategy or "mean",
        "agent_timeout_s": None if None in timeouts else sum(filter(None, timeouts)),
    }
    return TaskInstance(instance_id=task.resolve().name, handler="shell", payload=payload)


def _environment(section: EnvironmentSection, folder: Path, images: Mapping[str, str], files: Files) -> dict[str, Any]:
    if section.docker_image is not None:
        built = Built(image_of(section.docker_image, images), [], "", {})
    elif (folder / "Dockerfile").is_file():
        built = read_dockerfile(folder / "Dockerfile", images, files)
    else:
        raise ConfigError(f"{folder.parent / TASK_TOML}: no environment.docker_image, and no {folder / 'Dockerfile'}")
    return {
        "image": built.image,
        "build": built.build,
        "build_timeout_s": section.build_timeout_sec,
        "workdir": section.workdir or built.workdir,
        "env": built.env | section.env,
        "network": section.network,
        "memory_bytes": section.memory_bytes or None,
        "disk_bytes": section.disk_bytes or None,
    }


class _StepReader:
    """Reads the steps of one task. A task without steps is one, in the task's own folder."""

    def __init__(
        self, task: Path, sections: TaskFileSections, images: Mapping[str, str], files: Files, workdir: str
    ) -> None:
        self._task = task
        self._sections = sections
        self._images = images
        self._files = files
        self._workdir = workdir

    def read(self, folder: Path, step: StepSection, *, with_solution: bool) -> dict[str, Any]:
        """Return the payload of the step in `folder`. Raises ConfigError."""
        found = {
            "instruction": _without_canary(_text(folder / "instruction.md")),
            "verifier": self._verifier(folder, step),
            "min_reward": step.gates,
        }
        if folder != self._task:
            found["name"] = step.name
            command = f"bash {SETUP}" if (folder / "workdir" / SETUP).is_file() else ""
            files = self._files.folder(folder / "workdir", self._workdir)
            found["setup"] = {"files": files, "command": command, "cwd": self._workdir}
        if with_solution:
            found["solution"] = self._solution(folder)
        return found

    def _verifier(self, folder: Path, step: StepSection) -> dict[str, Any]:
        tests = dict.fromkeys((self._task / "tests", folder / "tests"))
        if not any((path / "test.sh").is_file() for path in tests):
            raise ConfigError(f"{folder / 'tests' / 'test.sh'} is not there, and nothing else says how it is graded")
        files: dict[str, Any] = {}
        for path in tests:
            files |= self._files.folder(path, "/tests")
        whole, own = self._sections.verifier, step.verifier
        said = [mode for mode in (own.separate, whole.separate) if mode is not None]
        separate = said[0] if said else False
        return {
            "files": files,
            "timeout_s": own.timeout_sec or whole.timeout_sec or VERIFIER_TIMEOUT_S,
            "env": whole.env | own.env,
            "separate": separate,
            "environment": self._own_environment(folder, step) if separate else None,
            "artifacts": artifact_paths([*self._sections.artifacts, *step.artifacts]),
        }

    def _own_environment(self, folder: Path, step: StepSection) -> dict[str, Any] | None:
        """Return the environment of a separate verifier; None for one like the agent's."""
        whole, own = self._sections.verifier.environment, step.verifier.environment
        asked, agents = own or whole, self._sections.environment
        places = {folder / "tests": own} | {self._task / "tests": whole}
        for tests, section in places.items():
            image = section.docker_image if section is not None else None
            if image is not None or (tests / "Dockerfile").is_file():
                asked = msgspec.structs.replace(asked or agents, docker_image=image)
                return _environment(asked, tests, self._images, self._files)
        if asked is None:
            return None
        asked = msgspec.structs.replace(asked, docker_image=agents.docker_image)
        return _environment(asked, self._task / "environment", self._images, self._files)

    def _solution(self, folder: Path) -> dict[str, Any]:
        places = [path for path in (folder / "solution", self._task / "solution") if path.is_dir()]
        script = (places[0] if places else folder / "solution") / "solve.sh"
        if not script.is_file():
            raise ConfigError(f"{script} is not there: the task does not bring its solution")
        env = self._sections.solution.env
        if name := next((name for name, value in env.items() if "${" in value), None):
            raise ConfigError(
                f"{self._task / TASK_TOML}: solution.env.{name}: variables of this machine are not passed on"
            )
        return {"files": self._files.folder(script.parent, "/solution"), "env": env}


def _without_canary(text: str) -> str:
    """Return an instruction without the lines at its beginning that mark it as a benchmark's; agents get no such."""
    lines = text.splitlines(keepends=True)
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
        while lines and not lines[0].strip():
            lines.pop(0)
    return "".join(lines)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
