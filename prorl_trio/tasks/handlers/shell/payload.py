"""The payload of a task in a shell: its environment, its instruction, and its verifier, with their files."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from prorl_trio.types.errors import malformed_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RewardStrategy = Literal["mean", "final"]
"""The reward of a task of several steps: the mean of theirs, key by key, or that of the last."""

MAX_TASK_BYTES: Final = 16 * 1024 * 1024
"""Limit of all files of a task together: they travel in its job."""
HOME: Final = "/home/agent"
"""Working directory of a task that names none."""
_MIB: Final = 1024 * 1024

FOR_PROGRAMS: Final = "You work on a Linux machine by its shell. Do what is asked for."
SYSTEM_PROMPT: Final = f"{FOR_PROGRAMS} When it is done, call finish."


class TaskFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of a task. `content` is in base64 where the job is JSON. `mode` is that of chmod."""

    content: bytes
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o777)] = 0o644


class Build(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An action by which an environment is made: files by absolute path, and then a command for `sh` in `cwd`."""

    files: dict[str, TaskFile] = {}
    command: str = ""
    cwd: str = ""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sandbox that a task asks for.

    Attributes:
        image: see `SandboxSpec`; empty is the node's own.
        build: made in every new sandbox, in order, before the agent or the verifier comes.
        build_timeout_s: for each command of `build`.
        workdir: where shells and the verifier start; empty is the home directory.
        env: variables of the tools.
        network: False wants none, True one, which the node must allow; None takes what the node gives.
        memory_bytes: of the sandbox, up to what the node gives; None is that.
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
        files: by absolute path. None of them is in a sandbox before the agent is done.
        script: the one that is run.
        timeout_s: for the script.
        env: variables of the script.
        separate: run it in a sandbox in which the agent has never been, with `artifacts` of the agent's.
        environment: of that sandbox; None is one like the agent's.
        artifacts: files and folders of the agent's sandbox that are carried over; those in `/logs/artifacts` always.
        answer_path: the file that the agent's final answer is put into. Empty: no answer is wanted.
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
    """The task's own solution, run in place of the agent: `script` is one of `files`, which are by absolute path."""

    files: dict[str, TaskFile]
    script: str = "/solution/solve.sh"
    env: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.script not in self.files:
            raise ValueError(f"files has no {self.script}, which is to be run")


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a task: the agent hears of it when the one before is over.

    Attributes:
        instruction: of this step, as the agent is told it.
        verifier: how it is graded, when the agent has finished it.
        name: by which the details of an outcome have it.
        setup: made in the agent's sandbox before the step begins.
        min_reward: rewards by key without which the steps after it are not begun.
        solution: where one is given, nothing is sampled.
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
        steps: of the task, in order; most have one.
        environment: the agent's sandbox, the same for all steps.
        reward_strategy: of several steps.
        agent_timeout_s: for the agent's tools and tokens in all steps; None is the job's `agent_s`.
        system_prompt: replaces ours.
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
