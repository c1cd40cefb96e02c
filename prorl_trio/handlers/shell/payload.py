"""The payload of a task in a shell: its environment, its instruction, and its verifier, with their files."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from prorl_trio.types.field_errors import malformed_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["MAX_TASK_BYTES", "Build", "Environment", "ShellPayload", "TaskFile", "Verification", "read_payload"]

MAX_TASK_BYTES: Final = 16 * 1024 * 1024
"""Limit of all files of a task together: they travel in its job."""
_MIB: Final = 1024 * 1024

SYSTEM_PROMPT: Final = "You work on a Linux machine by its shell. Do what is asked for. When it is done, call finish."


class TaskFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of a task. `content` is in base64 where the job is JSON. `mode` is that of chmod."""

    content: bytes
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o777)] = 0o644


class Build(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A step in which an environment is made: files by absolute path, and then a command for `sh` in `cwd`."""

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


class ShellPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`TaskInstance.payload` of a task in a shell.

    Attributes:
        instruction: the task, as the agent is told it.
        verifier: how it is graded.
        environment: the agent's sandbox.
        agent_timeout_s: for the agent's tools and tokens; None is the job's `agent_s`.
        system_prompt: replaces ours.
    """

    instruction: str
    verifier: Verification
    environment: Environment = Environment()
    agent_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=604_800)] | None = None
    system_prompt: str = SYSTEM_PROMPT

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise ValueError("instruction is empty")
        total = 0
        for path, file in self._files():
            if not posixpath.isabs(path) or posixpath.normpath(path) != path or path == "/":
                raise ValueError(f"{path!r} is no plain absolute path")
            total += len(file.content)
            if total > MAX_TASK_BYTES:
                raise ValueError(f"with {path} its files have {total} bytes; the limit is {MAX_TASK_BYTES}")

    def _files(self) -> Iterator[tuple[str, TaskFile]]:
        environments = [self.environment, *filter(None, [self.verifier.environment])]
        for environment in environments:
            for step in environment.build:
                yield from step.files.items()
        yield from self.verifier.files.items()


def read_payload(payload: Mapping[str, Any]) -> ShellPayload:
    """Return the payload of an instance. Raises MalformedJob."""
    try:
        return msgspec.convert(payload, ShellPayload)
    except msgspec.ValidationError as exc:
        raise malformed_job(exc, prefix="$.instance.payload") from exc
