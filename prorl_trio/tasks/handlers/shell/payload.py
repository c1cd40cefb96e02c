"""The payload of a task in a shell: its environment, its instruction, and its verifier, with their files."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from prorl_trio.types.errors import malformed_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RewardStrategy = Literal["mean", "final"]
"""The reward of a task with several steps: the mean of their rewards by key, or the last step's."""

MAX_TASK_BYTES: Final = 16 * 1024 * 1024
"""Limit of all files of a task together, because they are part of its job."""
HOME: Final = "/home/agent"
"""Default working directory."""
_MIB: Final = 1024 * 1024

FOR_PROGRAMS: Final = "You work on a Linux machine by its shell. Do what is asked for."
SYSTEM_PROMPT: Final = f"{FOR_PROGRAMS} When it is done, call finish."


class TaskFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of a task. `content` is in base64 if the job is JSON. `mode` is as for chmod."""

    content: bytes
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o777)] = 0o644


class Build(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A build step of an environment: files by absolute path, followed by a command for `sh` in `cwd`."""

    files: dict[str, TaskFile] = {}
    command: str = ""
    cwd: str = ""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sandbox requested by a task.

    Attributes:
        image: see `SandboxSpec`; empty selects the node's default.
        build: steps run in every new sandbox, in order, before the agent or the verifier.
        build_timeout_s: for each command of `build`.
        workdir: start folder of shells and the verifier; empty selects the home directory.
        env: environment variables of the tools.
        network: False disables the network; True requires it, and the node must allow it; None accepts the node's
            setting.
        memory_bytes: of the sandbox, up to the node's limit; None selects that limit.
        disk_bytes: likewise.
    """

    image: str = ""
    build: list[Build] = []
    build_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 600.0
    workdir: str = ""
    env: dict[str, str] = {}
    network: bool | None = None
    memory_bytes: Annotated[int, msgspec.Meta(ge=64 * _MIB)] | None = None
    disk_bytes: Annotated[int, msgspec.Meta(ge=_MIB)] | None = None


class Verification(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The grading of a task: a script that writes `/logs/verifier/reward.json` or `reward.txt`.

    Attributes:
        files: by absolute path. They are placed only after the agent is done.
        script: the file to run.
        timeout_s: for the script.
        env: environment variables of the script.
        separate: run it in a sandbox that the agent has never used, with `artifacts` from the agent's.
        environment: of that sandbox; None selects one like the agent's.
        artifacts: files and folders of the agent's sandbox to copy; those in `/logs/artifacts` are always copied.
        answer_path: the file for the agent's final answer. Empty: no answer is required.
    """

    files: dict[str, TaskFile]
    script: str = "/tests/test.sh"
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 600.0
    env: dict[str, str] = {}
    separate: bool = False
    environment: Environment | None = None
    artifacts: list[str] = []
    answer_path: str = ""

    def __post_init__(self) -> None:
        if self.script not in self.files:
            raise ValueError(f"files has no {self.script}, which is to be run")
        if self.environment is not None and not self.separate:
            raise ValueError("environment is given, and separate is not set")


class Solution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The task's own solution, run instead of the agent: `script` is one of `files`, which are by absolute path."""

    files: dict[str, TaskFile]
    script: str = "/solution/solve.sh"
    env: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.script not in self.files:
            raise ValueError(f"files has no {self.script}, which is to be run")


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a task, shown to the agent when the previous part is over.

    Attributes:
        instruction: the agent's instruction for this step.
        verifier: grades the step after the agent has finished it.
        name: its name in the details of an outcome.
        setup: run in the agent's sandbox before the step begins.
        min_reward: minimal rewards by key for starting the following steps.
        solution: if given, nothing is sampled.
    """

    instruction: str
    verifier: Verification
    name: str = ""
    setup: Build = Build()
    min_reward: dict[str, float] = {}
    solution: Solution | None = None

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise ValueError("instruction is empty")


class ShellPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`TaskInstance.payload` of a task in a shell.

    Attributes:
        steps: of the task, in order; most tasks have one.
        environment: the agent's sandbox, the same for all steps.
        reward_strategy: combines the rewards of several steps.
        agent_timeout_s: for the agent's tools and tokens in all steps; None selects the job's `agent_s`.
        system_prompt: replaces the handler's own.
    """

    steps: Annotated[list[Step], msgspec.Meta(min_length=1)]
    environment: Environment = Environment()
    reward_strategy: RewardStrategy = "mean"
    agent_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=604_800)] | None = None
    system_prompt: str = SYSTEM_PROMPT

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise ValueError(f"two steps are called {twice!r}")
        if len({step.solution is None for step in self.steps}) > 1:
            raise ValueError("some steps have a solution, and some have none")
        total = 0
        for path, file in self._files():
            if not posixpath.isabs(path) or posixpath.normpath(path) != path or path == "/":
                raise ValueError(f"{path!r} is no plain absolute path")
            total += len(file.content)
            if total > MAX_TASK_BYTES:
                raise ValueError(f"with {path} its files have {total} bytes; the limit is {MAX_TASK_BYTES}")

    def _files(self) -> Iterator[tuple[str, TaskFile]]:
        builds = [*self.environment.build]
        for step in self.steps:
            builds.append(step.setup)
            if step.verifier.environment is not None:
                builds += step.verifier.environment.build
            yield from step.verifier.files.items()
            if step.solution is not None:
                yield from step.solution.files.items()
        for build in builds:
            yield from build.files.items()


def read_payload(payload: Mapping[str, Any]) -> ShellPayload:
    """Return the payload of an instance. Raises MalformedJob."""
    try:
        return msgspec.convert(payload, ShellPayload)
    except msgspec.ValidationError as exc:
        raise malformed_job(exc, prefix="$.instance.payload") from exc
