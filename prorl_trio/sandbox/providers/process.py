"""No isolation at all: the daemon as a plain child process. For tests, and for looking at a daemon from outside."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar, Self

from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider
from prorl_trio.sandbox.providers.start import Launch, open_daemon_sandbox
from prorl_trio.sandbox.run_dir import open_shared_run_dir
from prorl_trio.sandbox.runtime.runtime import process_runtime
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.run_dir import RunDir, SandboxDir
    from prorl_trio.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)


class ProcessProvider(SandboxProvider):
    """Runs agents' code as the user of this process, with its files and its network. Only for code you trust.

    What it does promise: a clean environment, a home directory of its own that is removed, and that its processes end.
    """

    name: ClassVar[str] = "process"
    isolated: ClassVar[bool] = False

    def __init__(self, runtime_dir: Path | None = None) -> None:
        """`runtime_dir`: see `run_dir.open_run_dir`."""
        self._runtime_dir = runtime_dir
        logger.warning("the sandbox provider `process` isolates NOTHING: agents' code runs as you, with your files")

    @classmethod
    def configured(cls, config: SandboxConfig) -> Self:
        return cls(config.run_path)

    async def probe(self) -> ProviderReport:
        return ProviderReport(name=self.name, usable=True, version="no isolation")

    def open_shared(self) -> AbstractAsyncContextManager[None]:
        return open_shared_run_dir(self._runtime_dir)

    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return open_daemon_sandbox(spec, self._runtime_dir, lambda run_dir, folder: _plan(spec, run_dir, folder))


def _plan(spec: SandboxSpec, run_dir: RunDir, folder: SandboxDir) -> Launch:
    if spec.image != "host":
        raise SandboxUnavailable(f"image {spec.image}: the provider `process` has no images; use `host`")
    if spec.layers:
        raise SandboxUnavailable(
            f"layer {spec.layers[0]}: the provider `process` has no layers; use apptainer or bubblewrap"
        )
    runtime = process_runtime(str(run_dir.lib))
    tool_env = {**runtime.tool_env, "HOME": str(folder.home)}
    env = {**runtime.env, **tool_env}
    return Launch((*runtime.daemon_argv(), "--guard"), env, tool_env, str(folder.home), isolated=False)
