"""Folders of Harbor tasks, one folder per task, for the handler `shell`."""

from __future__ import annotations

import base64
import posixpath
import re
import shlex
import tomllib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_trio.sandbox.images.dockerfile import Instruction, json_words, read_instructions
from prorl_trio.sandbox.images.names import DOCKER
from prorl_trio.sandbox.images.store import is_reference
from prorl_trio.tasks.handlers.shell.payload import HOME, MAX_TASK_BYTES
from prorl_trio.tasks.sets.harbor_config import StepSection, artifact_paths, read_task_toml
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from prorl_trio.tasks.sets.harbor_config import EnvironmentSection, TaskFileSections


TASK_TOML: Final = "task.toml"
TASK_YAML: Final = "task.yaml"
STEPS: Final = "steps"
SETUP: Final = "setup.sh"
VERIFIER_TIMEOUT_S: Final = 600.0
_CANARY: Final = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)

IMAGES_TOML: Final = "images.toml"

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PUBLISHED: Final = re.compile(r"[^/][:/@]")
_VARIABLE: Final = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_ROOT: Final = ("root", "0", "root:root", "0:0")
_NO_EFFECT: Final = ("CMD", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL")
"""The harness starts a task's container with its own command, and its ports are unreachable."""
_OPTIONS: Final = "options of an instruction are the builder's"


class Files:
    """The files of one task for its payload, limited together to `MAX_TASK_BYTES`."""

    def __init__(self) -> None:
        self._size_bytes = 0

    def folder(self, source: Path, target: str) -> dict[str, Any]:
        """Return the files below `source` with paths below `target`. Raises ConfigError like `file`."""
        found = sorted(path for path in source.rglob("*") if path.is_symlink() or not path.is_dir())
        return {posixpath.join(target, path.relative_to(source).as_posix()): self.file(path, source) for path in found}

    def file(self, path: Path, within: Path) -> dict[str, Any]:
        """Return a file of the folder `within`, with its mode.

        Raises:
            ConfigError: it leads out of that folder, is unreadable, or exceeds the size limit; the message names the
                file.
        """
        if not path.resolve().is_relative_to(within.resolve()):
            raise ConfigError(f"{path} leads out of {within}")
        if not path.is_file():
            raise ConfigError(f"{path} is no file: links to folders, pipes and devices do not travel")
        try:
            self._size_bytes += path.stat().st_size
            if self._size_bytes > MAX_TASK_BYTES:
                raise ConfigError(
                    f"{path}: with it the task's files have {self._size_bytes} bytes; the limit is {MAX_TASK_BYTES}: "
                    "put large files into its image"
                )
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            return {"content": base64.b64encode(path.read_bytes()).decode(), "mode": mode}
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc}") from exc


class Built(NamedTuple):
    """An environment built from a Dockerfile."""

    image: str
    build: list[dict[str, Any]]
    workdir: str
    env: dict[str, str]


def image_of(name: str, images: Mapping[str, str]) -> str:
    """Return the node's name of an image: from `images`, else a registry reference if the name has a tag or a path.

    Any other name refers to the node's image store, and `host` to the node's own userland.
    """
    if name in images:
        return images[name]
    return f"{DOCKER}{name}" if _PUBLISHED.search(name) and not is_reference(name) else name


def read_dockerfile(path: Path, images: Mapping[str, str], files: Files) -> Built:
    """Return the steps of a Dockerfile with FROM, ARG, RUN, COPY, WORKDIR, ENV. Blocks on the disk.

    Instructions that start or describe a container (CMD, LABEL, EXPOSE, ...) have no effect on a task and are ignored.

    Raises:
        ConfigError: the file is unreadable, or an instruction is not supported; the message contains the file and the
            line.
    """
    try:
        instructions = read_instructions(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    reader = _Reader(path, files)
    first = next((number for number, it in enumerate(instructions) if it.name != "ARG"), len(instructions))
    if first == len(instructions) or instructions[first].name != "FROM":
        raise ConfigError(f"{path}: a Dockerfile begins with FROM")
    image = reader.base(instructions[first], instructions[:first])
    for it in instructions[first + 1 :]:
        reader.take(it)
    return Built(image_of(image, images), reader.build, reader.workdir, reader.env)


class _Reader:
    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files
        self.build: list[dict[str, Any]] = []
        self.workdir = ""
        self.env: dict[str, str] = {}
        self._global_args: dict[str, str] = {}
        self._args: dict[str, str] = {}

    def _refuse(self, it: Instruction, why: str) -> ConfigError:
        return ConfigError(f"{self._path}: {it.problem(why)}")

    def base(self, it: Instruction, args: Sequence[Instruction]) -> str:
        """Return the image of FROM, which may use variables of earlier ARGs."""
        for arg in args:
            self._global_args |= self._arg(arg, {})
        rest = _VARIABLE.sub(lambda found: self._global_args.get(found[1] or found[2], found[0]), it.rest)
        words = rest.split()
        if not words or words[0].startswith("--") or "$" in rest or len(words) not in (1, 3):
            raise self._refuse(it, "FROM takes an image, and AS a name; a variable needs an ARG with a value before it")
        return words[0]

    def _arg(self, it: Instruction, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of an ARG that have a value: its default, or the value of an ARG before FROM."""
        try:
            words = shlex.split(it.rest)
        except ValueError as exc:
            raise self._refuse(it, str(exc)) from exc
        found: dict[str, str] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not _NAME.fullmatch(name) or "$" in value:
                raise self._refuse(it, f"{word!r} is no NAME or NAME=VALUE without variables")
            if equals:
                found[name] = value
            elif name in inherited:
                found[name] = inherited[name]
        return found

    def take(self, it: Instruction) -> None:
        """Process an instruction after FROM."""
        if it.rest.startswith("--"):
            raise self._refuse(it, _OPTIONS)
        match it.name:
            case "RUN":
                words = json_words(it.rest)
                self.build.append(self._step(it, it.rest if words is None else shlex.join(words)))
            case "COPY":
                self.build.append({"files": self._copied(it)})
            case "WORKDIR":
                if not it.rest or "$" in it.rest:
                    raise self._refuse(it, "a plain path is wanted")
                self.workdir = posixpath.normpath(posixpath.join(self.workdir or "/", it.rest))
                self.build.append({"cwd": self.workdir})
            case "ENV":
                self._assign(it)
            case "ARG":
                self._args |= self._arg(it, self._global_args)
            case "USER" if it.rest in _ROOT:
                pass
            case name if name in _NO_EFFECT:
                pass
            case "FROM":
                raise self._refuse(it, "a build of several stages")
            case _:
                raise self._refuse(
                    it,
                    "a task's Dockerfile has FROM, RUN, COPY, WORKDIR and ENV; or name a docker_image",
                )

    def _step(self, it: Instruction, command: str) -> dict[str, Any]:
        if "<<" in command:
            raise self._refuse(it, "a here-document; put the script into a file and COPY it")
        if not command:
            raise self._refuse(it, "there is no command")
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in (self._args | self.env).items())
        return {"command": exports + command, "cwd": self.workdir or "/"}

    def _assign(self, it: Instruction) -> None:
        try:
            words = shlex.split(it.rest)
        except ValueError as exc:
            raise self._refuse(it, str(exc)) from exc
        if "=" not in (words or [""])[0]:
            words = [f"{words[0]}={it.rest.partition(' ')[2].strip()}"] if len(words) > 1 else []
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not _NAME.fullmatch(name) or "$" in value:
                raise self._refuse(it, f"{word!r} is no NAME=VALUE without variables")
            self.env[name] = value
        if not words:
            raise self._refuse(it, "a name and a value are wanted")

    def _copied(self, it: Instruction) -> dict[str, Any]:
        *sources, target = json_words(it.rest) or it.rest.split() or [""]
        if not sources or any(mark in it.rest for mark in "*?$<"):
            raise self._refuse(it, "sources and a target are wanted, without patterns and variables")
        into_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
        target = posixpath.normpath(posixpath.join(self.workdir or "/", target))
        found: dict[str, Any] = {}
        for source in sources:
            path = self._path.parent / source.lstrip("/")
            if not path.resolve().is_relative_to(self._path.parent.resolve()):
                raise self._refuse(it, f"{source} is outside of {self._path.parent}")
            if not path.exists():
                raise self._refuse(it, f"there is no {path}")
            if path.is_dir():
                found |= self._files.folder(path, target)
            else:
                found[posixpath.join(target, path.name) if into_folder else target] = self._files.file(
                    path, self._path.parent
                )
        return found


def read_stand_ins(folder: Path) -> dict[str, str]:
    """Return the table `[images]` of `images.toml` in a folder of tasks: our images by published name.

    Returns an empty table without the file. Blocks on the disk.

    Raises:
        ConfigError: the file contains something else.
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
    """Return the tasks of a folder, one per subfolder with a `task.toml`, or of a single such folder.

    An optional `images.toml` next to them maps published images to the node's images in its table `[images]`. With
    `solutions`, each task includes its own solution, which is run instead of the agent. Blocks on the disk.

    Raises:
        ConfigError: there are no tasks, or a task is unreadable or uses an unsupported feature; the message contains
            the file.
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
    """Reads the steps of one task. A task without steps has a single step in its own folder."""

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
        """Return the environment of a separate verifier; None if it is like the agent's."""
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
    """Return an instruction without the benchmark canary lines at its beginning, which agents must not see."""
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
