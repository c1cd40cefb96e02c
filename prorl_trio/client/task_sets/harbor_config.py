"""The part of Harbor's `task.toml` that the handler `shell` can do, and the reasons for which the rest is refused."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from prorl_trio.types.errors import ConfigError
from prorl_trio.types.field_errors import field_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["ArtifactSection", "EnvironmentSection", "TaskFileSections", "VerifierSection", "read_task_toml"]

NetworkMode = Literal["no-network", "public", "allowlist"]
User = str | int | None
Seconds = Annotated[float, msgspec.Meta(gt=0)]
_ROOT = (None, "root", 0, "0")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class AgentSection(_Section, frozen=True):
    """`[agent]`."""

    timeout_sec: Seconds | None = None
    user: User = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class EnvironmentSection(_Section, frozen=True):
    """`[environment]`, and `[verifier.environment]`. `cpus` is taken and not enforced."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None
    mcp_servers: list[dict[str, Any]] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None

    @property
    def network(self) -> bool | None:
        """Return what is asked for of the network; None if nothing is said, which is the node's to say."""
        if self.network_mode is None:
            return self.allow_internet
        return self.network_mode == "public"


class ArtifactSection(_Section, frozen=True):
    """`artifacts = [...]`, in the long form. `destination` is a folder of Harbor's own, of which there is none here."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class VerifierSection(_Section, frozen=True):
    """`[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentSection | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    collect: list[dict[str, Any]] = []

    def __post_init__(self) -> None:
        if self.environment is not None and self.environment_mode == "shared":
            raise ValueError("environment_mode is shared, and there is an environment of the verifier's own")

    @property
    def separate(self) -> bool:
        """Return whether the verifier has a sandbox of its own."""
        return self.environment_mode == "separate" or self.environment is not None


class SolutionSection(_Section, frozen=True):
    """`[solution]`."""

    env: dict[str, str] = {}


class TaskFileSections(_Section, frozen=True):
    """`task.toml`, schema 1.0 to 1.4. `task` and `metadata` describe the task, and change nothing."""

    schema_version: str = "1.4"
    version: str | None = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    source: str | None = None
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()
    artifacts: list[str | ArtifactSection] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[dict[str, Any]] | None = None


def read_task_toml(path: Path) -> TaskFileSections:
    """Return what a `task.toml` says. Blocks on the disk.

    Raises:
        ConfigError: it cannot be read, has an unknown key or a wrong type, or asks for what is not done here; with the
            file and the key.
    """
    try:
        sections = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), TaskFileSections)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    except msgspec.ValidationError as exc:
        problem, place, _ = field_error(exc)
        raise ConfigError(f"{path}: {problem} - at `{place}`") from exc
    if not (sections.version or sections.schema_version).startswith("1."):
        raise ConfigError(f"{path}: schema_version is {sections.schema_version!r}; 1.0 to 1.4 are read")
    refused = next(_refused(sections), None)
    if refused is not None:
        raise ConfigError(f"{path}: {refused}")
    return sections


def _refused(sections: TaskFileSections) -> Iterator[str]:
    """The keys that ask for something that is not done here, and why."""
    if sections.steps:
        yield "steps: tasks of several steps are not done here; make a folder of each step"
    for name, user in (("agent", sections.agent.user), ("verifier", sections.verifier.user)):
        if user not in _ROOT:
            yield f"{name}.user: {user!r}: a sandbox has one user, who is root in it or takes its place"
    if sections.verifier.collect:
        yield "verifier.collect: there are no services; let the agent's work be in files, and name them in artifacts"
    for name, phase in (("agent", sections.agent), ("verifier", sections.verifier)):
        if phase.network_mode is not None and phase.network_mode != sections.environment.network_mode:
            yield f"{name}.network_mode: a sandbox has one network; say it in [environment]"
    for artifact in sections.artifacts:
        if isinstance(artifact, ArtifactSection) and (artifact.exclude or artifact.service not in (None, "main")):
            yield f"artifacts, {artifact.source}: exclude and service are not done here"
    for name, own in (("environment", sections.environment), ("verifier.environment", sections.verifier.environment)):
        if own is not None:
            yield from (f"{name}.{problem}" for problem in _refused_in(own))


def _refused_in(own: EnvironmentSection) -> Iterator[str]:
    if own.os.lower() != "linux":
        yield f"os: {own.os}: sandboxes are Linux"
    if own.gpus or own.gpu_types or own.tpu:
        yield "gpus: a sandbox has no accelerator"
    if own.network_mode == "allowlist" or own.allowed_hosts:
        yield "network_mode: allowlist: a sandbox has a network, or none"
    if own.mcp_servers:
        yield "mcp_servers: an agent has the tools of its handler only"
    if own.skills_dir is not None:
        yield "skills_dir: an agent has no skills folder here; write what it needs into the instruction"
    if own.healthcheck is not None:
        yield "healthcheck: no service runs in a sandbox when it starts"
    for name, value in own.env.items():
        if "${" in value:
            yield f"env.{name}: {value!r}: variables of this machine are not passed on; write the value"
