"""Sandboxes for tasks in a shell, and their preparation."""

from __future__ import annotations

import os
import posixpath
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.grading.verifier import ProgramKilled, check_end
from prorl_trio.tasks.handlers.shell.payload import HOME
from prorl_trio.types.errors import SandboxCallFailed, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.tasks.handlers.shell.payload import Build, Environment, Step

FOLDERS: Final = ("tests", "logs/agent", "logs/artifacts", "logs/verifier")
_FOLDERS_TIMEOUT_S: Final = 30.0
_SHELL_TIMEOUT_S: Final = 30.0
_SHOWN_CHARS: Final = 2000
CLEAR: Final = """\
for folder in /logs /logs/verifier /tests; do
    if [ -h $folder ] || [ ! -d $folder ]; then rm -f $folder; fi
    mkdir -p $folder || exit 1
done
rm -rf /tests/* /tests/.[!.]* /tests/..?*
rm -rf /logs/verifier/reward.json /logs/verifier/reward.txt
"""
"""Folders are emptied instead of removed, because a folder of a lower layer could not be created again."""
_CLEAR_ALL: Final = f"{CLEAR}rm -rf /logs/verifier/* /logs/verifier/.[!.]* /logs/verifier/..?*\n"


def make_root_layer() -> Path:
    """Create and return the folder that is laid over `host` and makes `/` writable. Blocks on the disk."""
    root = cache_dir() / "shell-root"
    os.makedirs(root / "srv", exist_ok=True)  # not used by tasks: paths in a layer cannot be replaced over it
    return root


def spec_of(environment: Environment, node: SandboxConfig, root_layer: Path) -> SandboxSpec:
    """Return the sandbox of an environment, with at most the memory, disk and network that the node provides."""
    limits, image = node.limits, environment.image or node.image
    memory, disk = environment.memory_bytes, environment.disk_bytes
    return SandboxSpec(
        image=image,
        layers=(str(root_layer),) if image == "host" else (),
        network=node.network and environment.network is not False,
        env=environment.env,
        start_timeout_s=node.start_timeout_s,
        limits=type(limits)(
            memory_bytes=min(limits.memory_bytes, memory or limits.memory_bytes),
            max_processes=limits.max_processes,
            max_open_files=limits.max_open_files,
            cpu_s=limits.cpu_s,
            max_file_bytes=limits.max_file_bytes,
            disk_bytes=min(limits.disk_bytes, disk or limits.disk_bytes),
            wall_s=limits.wall_s,
        ),
    )


async def make_ready(sandbox: Sandbox, environment: Environment) -> None:
    """Create the folders of a task and build its environment in an unused sandbox.

    Raises:
        SandboxUnavailable: a command fails, or a file cannot be placed. The policy is not involved.
    """
    workdir = environment.workdir or HOME
    folders = [f"/{folder}" for folder in FOLDERS]
    await _command(sandbox, ["mkdir", "-p", "--", workdir, *folders], _FOLDERS_TIMEOUT_S, "", "its folders")
    for number, step in enumerate(environment.build, start=1):
        await _build(sandbox, step, environment.build_timeout_s, f"build step {number}")


async def start_shell(sandbox: Sandbox, environment: Environment) -> None:
    """Change the shell to the working directory. Raises SandboxUnavailable."""
    workdir = environment.workdir or HOME
    try:
        result = await sandbox.bash(f"cd -- {shlex.quote(workdir)}", timeout_s=_SHELL_TIMEOUT_S)
    except (OSError, SandboxCallFailed) as exc:
        raise SandboxUnavailable(f"the shell does not start in {workdir}: {exc}") from exc
    if result.exit_code != 0:
        raise SandboxUnavailable(f"the shell does not start in {workdir}: {result.output!r}")


async def begin_step(sandbox: Sandbox, step: Step, environment: Environment, *, verified_here: bool) -> None:
    """Prepare a sandbox for a step; `verified_here`: the previous step's verifier ran in it.

    Raises:
        SandboxUnavailable: as `make_ready`. The agent may be the cause.
    """
    what = f"step {step.name}"
    if verified_here:
        await _command(sandbox, ["/bin/sh", "-c", _CLEAR_ALL], _FOLDERS_TIMEOUT_S, "", what)
        try:
            await sandbox.restart_bash()
        except (OSError, SandboxCallFailed) as exc:
            raise SandboxUnavailable(f"{what}: the shell does not start again: {exc}") from exc
        await start_shell(sandbox, environment)
    await _build(sandbox, step.setup, environment.build_timeout_s, what)


@contextmanager
def noticing_kills(*, last_try: bool) -> Iterator[None]:
    """Request another try if an unexplained kill of a program prevents the preparation of an environment.

    Raises:
        ProgramKilled: it was killed, and this is not the last try (`again_if_killed`).
    """
    try:
        yield
    except SandboxUnavailable as exc:
        if isinstance(exc.__cause__, ProgramKilled) and not last_try:
            raise exc.__cause__ from None
        raise


async def _build(sandbox: Sandbox, step: Build, timeout_s: float, what: str) -> None:
    for path, file in step.files.items():
        try:
            await sandbox.write_file(path, file.content, mode=file.mode)
        except (OSError, SandboxCallFailed) as exc:
            raise SandboxUnavailable(f"{what}: {path} cannot be written: {exc}") from exc
    if step.cwd:
        await _command(sandbox, ["mkdir", "-p", "--", step.cwd], _FOLDERS_TIMEOUT_S, "", what)
    if step.command:
        await _command(sandbox, ["/bin/sh", "-c", step.command], timeout_s, step.cwd, f"{what}, {step.command[:200]!r}")


async def _command(sandbox: Sandbox, argv: list[str], timeout_s: float, cwd: str, what: str) -> None:
    try:
        result = await sandbox.exec(argv, timeout_s=timeout_s, cwd=cwd and posixpath.normpath(cwd))
    except (OSError, SandboxCallFailed) as exc:
        raise SandboxUnavailable(f"the environment cannot be made: {what}: {exc}") from exc
    try:
        check_end(what, result)
    except ProgramKilled as exc:
        raise SandboxUnavailable(f"the environment cannot be made: {exc}") from exc
    if result.exit_code != 0:
        ended = f"no end in {timeout_s:g} s" if result.timed_out else f"exit code {result.exit_code}"
        said = (result.stderr or result.stdout).decode(errors="replace").strip()[-_SHOWN_CHARS:]
        raise SandboxUnavailable(f"the environment cannot be made: {what}: {ended}: {said}")
