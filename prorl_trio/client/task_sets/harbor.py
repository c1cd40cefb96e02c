"""Folders of Harbor tasks, one folder a task, for the handler `shell`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prorl_trio.client.task_sets.harbor_build import Built, Files, read_dockerfile
from prorl_trio.client.task_sets.harbor_config import ArtifactSection, TaskFileSections, read_task_toml
from prorl_trio.client.task_sets.stand_ins import read_stand_ins
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from prorl_trio.client.task_sets.harbor_config import EnvironmentSection

__all__ = ["load_harbor"]

TASK_TOML: Final = "task.toml"
_MIB: Final = 1024 * 1024


def load_harbor(folder: Path) -> list[TaskInstance]:
    """Return the tasks of a folder, one for each folder in it that has a `task.toml`, or of a single such folder.

    `images.toml` beside them, if it is there, says in its table `[images]` which of the node's images stands for one of
    theirs. The solutions are not read. Blocks on the disk.

    Raises:
        ConfigError: there is no task, or one of them cannot be read or asks for what is not done here; with its file.
    """
    single = (folder / TASK_TOML).is_file()
    tasks = [folder] if single else sorted(path.parent for path in folder.glob(f"*/{TASK_TOML}"))
    if not tasks:
        raise ConfigError(f"{folder} has no folder with a {TASK_TOML}")
    images = read_stand_ins(folder)
    return [_load(task, images) for task in tasks]


def _load(task: Path, images: Mapping[str, str]) -> TaskInstance:
    sections = read_task_toml(task / TASK_TOML)
    for name, why in (
        ("trajectory.json", "an agent begins with its instruction only"),
        ("environment/docker-compose.yaml", "there are no services beside a sandbox"),
    ):
        if (task / name).exists():
            raise ConfigError(f"{task / name}: {why}")
    files = Files()
    payload = {
        "instruction": _text(task / "instruction.md"),
        "environment": _environment(sections.environment, task / "environment", images, files),
        "verifier": _verifier(sections, task, images, files),
        "agent_timeout_s": sections.agent.timeout_sec,
    }
    return TaskInstance(instance_id=task.resolve().name, handler="shell", payload=payload)


def _environment(section: EnvironmentSection, folder: Path, images: Mapping[str, str], files: Files) -> dict[str, Any]:
    if section.docker_image is not None:
        built = Built(images.get(section.docker_image, section.docker_image), [], "", {})
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
        "memory_bytes": section.memory_mb and section.memory_mb * _MIB,
        "disk_bytes": section.storage_mb and section.storage_mb * _MIB,
    }


def _verifier(sections: TaskFileSections, task: Path, images: Mapping[str, str], files: Files) -> dict[str, Any]:
    section = sections.verifier
    if not (task / "tests" / "test.sh").is_file():
        raise ConfigError(f"{task / 'tests' / 'test.sh'} is not there, and nothing else says how the task is graded")
    for name, value in section.env.items():
        if "${" in value:
            raise ConfigError(
                f"{task / TASK_TOML}: verifier.env.{name}: {value!r}: variables of this machine are not passed on"
            )
    own = section.environment
    return {
        "files": files.folder(task / "tests", "/tests"),
        "timeout_s": section.timeout_sec,
        "env": section.env,
        "separate": section.separate,
        "environment": own and _environment(own, task / "tests", images, files),
        "artifacts": [each.source if isinstance(each, ArtifactSection) else each for each in sections.artifacts],
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
