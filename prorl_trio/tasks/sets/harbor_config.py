"""The part of Harbor's `task.toml` that the handler `shell` supports, and the reasons for refusing the rest."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from prorl_trio.types.errors import ConfigError, field_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

NetworkMode = Literal["no-network", "public", "allowlist"]
User = str | int | None
Seconds = Annotated[float, msgspec.Meta(gt=0)]
_ROOT: Final = (None, "root", 0, "0")
_STEP_NAME: Final = re.compile(r"(?!\.{1,2}$)[^/\x00-\x1f]{1,255}")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([GMKgmk])")
_UNITS_MIB: Final = {"G": 1024, "M": 1, "K": 1 / 1024}
_MIB: Final = 1024 * 1024
_NO_SERVICE: Final = "no service runs in a sandbox when it starts"
_NO_VARIABLES: Final = "variables of this machine are not passed on; write the value"


def _size_bytes(name: str, text: str | None) -> int | None:
    """Return a size of schema 1.0: a number with the suffix G, M or K in either case, which Harbor reads as MiB."""
    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f'{name} = {text!r} is no size such as "2G", "512M" or "1024K"')
    return int(float(found[1]) * _UNITS_MIB[found[2].upper()]) * _MIB


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class AgentSection(_Section, frozen=True):
    """`[agent]`."""

    timeout_sec: Seconds | None = None
    user: User = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class EnvironmentSection(_Section, frozen=True):
    """`[environment]` and `[verifier.environment]`. `cpus` is accepted but not enforced.

    `memory` and `storage` are the sizes of schema 1.0, as texts such as `2G`. Later schemas use `memory_mb` and
    `storage_mb`, in MiB.
    """

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    storage: str | None = None
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

    def __post_init__(self) -> None:
        for name, size_mb in (("memory", self.memory_mb), ("storage", self.storage_mb)):
            size_bytes = _size_bytes(name, getattr(self, name))
            if size_bytes is not None and size_mb is not None and size_bytes != size_mb * _MIB:
                raise ValueError(f"{name} = {getattr(self, name)!r} and {name}_mb = {size_mb} are not the same size")

    @property
    def memory_bytes(self) -> int | None:
        """Return the requested memory in either form; None if unspecified."""
        return _size_bytes("memory", self.memory) if self.memory_mb is None else self.memory_mb * _MIB

    @property
    def disk_bytes(self) -> int | None:
        """Return the requested disk in either form; None if unspecified."""
        return _size_bytes("storage", self.storage) if self.storage_mb is None else self.storage_mb * _MIB

    @property
    def network(self) -> bool | None:
        """Return whether a network is requested; None if unspecified: the node decides."""
        if self.network_mode is None:
            return self.allow_internet
        return self.network_mode == "public"


class ArtifactSection(_Section, frozen=True):
    """`artifacts = [...]` in the long form. `destination` is a folder of Harbor's own, which does not exist here."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


def artifact_paths(artifacts: Iterable[str | ArtifactSection]) -> list[str]:
    """Return the files and folders named in either form, without duplicates."""
    return list(dict.fromkeys(each.source if isinstance(each, ArtifactSection) else each for each in artifacts))


class VerifierSection(_Section, frozen=True):
    """`[verifier]`, of a task or a step."""

    timeout_sec: Seconds | None = None
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
    def separate(self) -> bool | None:
        """Return whether the verifier has its own sandbox; None if unspecified."""
        if self.environment_mode is not None:
            return self.environment_mode == "separate"
        return True if self.environment is not None else None


class SolutionSection(_Section, frozen=True):
    """`[solution]`."""

    env: dict[str, str] = {}


class StepSection(_Section, frozen=True):
    """`[[steps]]`. The files of a step are in `steps/NAME`, with its `name`."""

    name: str
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    min_reward: float | dict[str, float] | None = None
    healthcheck: dict[str, Any] | None = None
    artifacts: list[str | ArtifactSection] = []

    def __post_init__(self) -> None:
        if not _STEP_NAME.fullmatch(self.name):
            raise ValueError(f"the step's name {self.name!r} is no plain name of a folder")

    @property
    def gates(self) -> dict[str, float]:
        """Return the minimal rewards by key for starting the next step."""
        if isinstance(self.min_reward, dict):
            return self.min_reward
        return {} if self.min_reward is None else {"reward": self.min_reward}


class TaskFileSections(_Section, frozen=True):
    """`task.toml`, schema 1.0 to 1.4. `task` and `metadata` are descriptive and have no effect."""

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
    steps: list[StepSection] = []


def read_task_toml(path: Path) -> TaskFileSections:
    """Return the contents of a `task.toml`. Blocks on the disk.

    Raises:
        ConfigError: the file is unreadable, has an unknown key or a wrong type, or uses an unsupported feature; the
            message contains the file and the key.
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
    """Yield the keys that request unsupported features, and the reasons."""
    yield from _refused_phases("", sections.agent, sections.verifier, sections.environment.network_mode)
    yield from _refused_artifacts("", sections.artifacts)
    yield from (f"environment.{problem}" for problem in _refused_in(sections.environment))
    names = [step.name.casefold() for step in sections.steps]
    for number, step in enumerate(sections.steps):
        where = f"steps[{number}]."
        if step.name.casefold() in names[:number]:
            yield f"{where}name: {step.name!r}: another step has it"
        if step.healthcheck is not None:
            yield f"{where}healthcheck: {_NO_SERVICE}"
        yield from _refused_phases(where, step.agent, step.verifier, sections.environment.network_mode)
        yield from _refused_artifacts(where, step.artifacts)


def _refused_phases(
    where: str, agent: AgentSection, verifier: VerifierSection, network_mode: NetworkMode | None
) -> Iterator[str]:
    for name, phase in (("agent", agent), ("verifier", verifier)):
        if phase.user not in _ROOT:
            yield f"{where}{name}.user: {phase.user!r}: a sandbox has one user, who is root in it or takes its place"
        if phase.network_mode is not None and phase.network_mode != network_mode:
            yield f"{where}{name}.network_mode: a sandbox has one network; say it in [environment]"
    if verifier.collect:
        yield (
            f"{where}verifier.collect: there are no services; let the agent's work be in files, and name them in "
            "artifacts"
        )
    for name, value in verifier.env.items():
        if "${" in value:
            yield f"{where}verifier.env.{name}: {value!r}: {_NO_VARIABLES}"
    if verifier.environment is not None:
        yield from (f"{where}verifier.environment.{problem}" for problem in _refused_in(verifier.environment))


def _refused_artifacts(where: str, artifacts: Iterable[str | ArtifactSection]) -> Iterator[str]:
    for artifact in artifacts:
        if isinstance(artifact, ArtifactSection) and (artifact.exclude or artifact.service not in (None, "main")):
            yield f"{where}artifacts, {artifact.source}: exclude and service are not done here"


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
        yield f"healthcheck: {_NO_SERVICE}"
    for name, value in own.env.items():
        if "${" in value:
            yield f"env.{name}: {value!r}: {_NO_VARIABLES}"
