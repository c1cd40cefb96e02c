"""A custom sandbox provider, and a check of its contract: `python examples/provider.py [CHECK ...]`.

`unshare` of util-linux gives each sandbox processes, System V memory and its own network. The files are this
machine's, so it isolates less than bubblewrap, and reports that (`isolated = False`).

To use it on a node, declare it in your package under the entry-point group `prorl_trio.providers` (`unshare =
"my_package:UnshareProvider"`) and name it in node.toml: `[sandbox] provider = "unshare"`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import trio

from prorl_trio import ProviderReport, SandboxProvider, SandboxSpec, SandboxUnavailable
from prorl_trio.sandbox.providers.start import Launch, open_daemon_sandbox
from prorl_trio.sandbox.run_dir import RunDir, SandboxDir, open_shared_run_dir
from prorl_trio.sandbox.runtime.runtime import process_runtime
from prorl_trio.testing.sandbox_contract import CORE_CHECKS, NO_LAYER_CHECKS, PROCESS_CHECKS, Contract

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from prorl_trio import Sandbox
    from prorl_trio.config import SandboxConfig

NAMESPACES = ("--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--uts")


class UnshareProvider(SandboxProvider):
    """Sandboxes in namespaces of their own, over this machine's files."""

    name: ClassVar[str] = "unshare"
    isolated: ClassVar[bool] = False

    def __init__(self, runtime_dir: Path | None = None) -> None:
        self._runtime_dir = runtime_dir

    @classmethod
    def configured(cls, config: SandboxConfig) -> Self:
        return cls(config.run_path)

    async def probe(self) -> ProviderReport:
        """Start the smallest possible sandbox. Missing features are reported, never raised."""
        if shutil.which("unshare") is None:
            return ProviderReport(name=self.name, usable=False, problem="no unshare", remedy="install util-linux")
        tried = await trio.run_process(["unshare", *NAMESPACES, "true"], check=False, capture_stderr=True)
        if tried.returncode:
            return ProviderReport(
                name=self.name,
                usable=False,
                problem=tried.stderr.decode(errors="replace").strip(),
                remedy="allow user namespaces to this user",
            )
        return ProviderReport(name=self.name, usable=True)

    def open_shared(self) -> AbstractAsyncContextManager[None]:
        return open_shared_run_dir(self._runtime_dir)

    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Start the daemon inside. `open_daemon_sandbox` handles its folder, handshake, limits and end."""
        return open_daemon_sandbox(spec, self._runtime_dir, lambda run_dir, folder: plan(spec, run_dir, folder))


def plan(spec: SandboxSpec, run_dir: RunDir, folder: SandboxDir) -> Launch:
    """Return how to start one sandbox: a command before the daemon's, and the variables of daemon and tools."""
    if spec.image != "host" or spec.layers:
        raise SandboxUnavailable(f"{(spec.image, *spec.layers)}: the provider `unshare` has no images and no layers")
    runtime = process_runtime(str(run_dir.lib))
    tool_env = {**runtime.tool_env, "HOME": str(folder.home)}
    network = () if spec.network else ("--net",)
    return Launch(
        argv=("unshare", *NAMESPACES, *network, "--", *runtime.daemon_argv()),
        env={**runtime.env, **tool_env},
        tool_env=tool_env,
        cwd=str(folder.home),
        isolated=False,
    )


async def prove(names: list[str]) -> None:
    """Run the contract checks that every provider must pass. The first failure raises."""
    report = await UnshareProvider().probe()
    if not report.usable:
        sys.exit(f"unshare cannot be used here: {report.problem}; {report.remedy}")
    for check in (*CORE_CHECKS, *PROCESS_CHECKS, *NO_LAYER_CHECKS):
        name = check.__name__.removeprefix("check_")
        if not names or name in names:
            with tempfile.TemporaryDirectory(prefix="unshare-") as folder:
                await check(Contract(UnshareProvider(Path(folder)), Path(folder)))
            sys.stdout.write(f"ok {name}\n")


if __name__ == "__main__":
    trio.run(prove, sys.argv[1:])
