"""Sandboxes by Apptainer (or Singularity): rootless, from the host's userland, a directory or a .sif file."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, ClassVar, Final

from prorl_trio.errors import SandboxUnavailable
from prorl_trio.sandbox.images import locate_image
from prorl_trio.sandbox.probe import run_probe
from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider
from prorl_trio.sandbox.run_dir import SOCKET_NAME, open_run_dir, open_shared_run_dir
from prorl_trio.sandbox.runtime import LIB_DIR, Mount, host_runtime, image_runtime
from prorl_trio.sandbox.skeleton import CONTROL_DIR, HOME, USER, host_mounts, read_only_proc
from prorl_trio.sandbox.start import Launch, open_daemon_sandbox
from prorl_trio.sandbox.userns import user_namespace_remedy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from prorl_trio.sandbox.provider import Sandbox, SandboxSpec
    from prorl_trio.sandbox.run_dir import RunDir, SandboxDir

__all__ = ["ApptainerProvider", "find_apptainer"]

_INSTALL: Final = "install it (`make apptainer` on Debian and Ubuntu), or use the bubblewrap provider"
_LAUNCHER_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_IDENTITY_FILES: Final = ("passwd", "group")


def find_apptainer() -> str | None:
    """The program in PATH: `apptainer`, else `singularity`, else None."""
    return shutil.which("apptainer") or shutil.which("singularity")


class ApptainerProvider(SandboxProvider):
    """`apptainer exec` in a user namespace, also for root, and also where it is installed setuid.

    Own PID, IPC, UTS and (without `spec.network`) network namespace, no host environment, no capabilities. /tmp and the
    home directory are tmpfs of Apptainer's `sessiondir max size` (64 MB together unless configured), whatever
    `spec.tmpfs_bytes` says; where the project itself is below them, they are folders on disk instead. A root other than
    `host` is writable, and what is written to it is thrown away.
    """

    name: ClassVar[str] = "apptainer"
    isolated: ClassVar[bool] = True

    def __init__(self, runtime_dir: Path | None = None, *, executable: str | None = None) -> None:
        """`executable`: another program than `find_apptainer`'s. `runtime_dir`: see `run_dir.open_run_dir`."""
        self._runtime_dir = runtime_dir
        self._executable = executable or find_apptainer()

    async def probe(self) -> ProviderReport:
        if self._executable is None:
            problem = "no apptainer or singularity program in PATH"
            return ProviderReport(name=self.name, usable=False, problem=problem, remedy=_INSTALL)
        env = {"PATH": _LAUNCHER_PATH}
        printed, problem = await run_probe((self._executable, "--version"), env)
        version = printed.rpartition(" ")[2]
        if problem:
            return ProviderReport(name=self.name, usable=False, problem=problem, remedy=_INSTALL)
        try:
            async with open_run_dir(self._runtime_dir) as run_dir, run_dir.open_sandbox_dir() as folder:
                mounts = [*host_mounts()]
                mounts += _mounts_with_mount_points(mounts, folder)
                exec_argv = (*_exec_argv(self._executable, network=False), *_mount_argv(mounts))
                _, problem = await run_probe((*exec_argv, str(run_dir.root), "/bin/true"), _launcher_env(folder))
        except SandboxUnavailable as exc:
            problem = str(exc)
        remedy = user_namespace_remedy() if problem else ""
        return ProviderReport(name=self.name, usable=not problem, version=version, problem=problem, remedy=remedy)

    def open_shared(self) -> AbstractAsyncContextManager[None]:
        return open_shared_run_dir(self._runtime_dir)

    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return open_daemon_sandbox(spec, self._runtime_dir, lambda run_dir, folder: self._plan(spec, run_dir, folder))

    def _plan(self, spec: SandboxSpec, run_dir: RunDir, folder: SandboxDir) -> Launch:
        if self._executable is None:
            raise SandboxUnavailable(f"no apptainer or singularity program in PATH; {_INSTALL}")
        argv = [*_exec_argv(self._executable, network=spec.network)]
        mounts = [Mount(path, path) for path in read_only_proc()]
        if spec.image == "host":
            image = str(run_dir.root)
            runtime = host_runtime()
            mounts += host_mounts()
            # Over those that Apptainer writes: they would name the host's user and name servers.
            files = _IDENTITY_FILES if spec.network else (*_IDENTITY_FILES, "resolv.conf")
            mounts += [Mount(f"{run_dir.root}/etc/{name}", f"/etc/{name}") for name in files]
        else:
            image = str(locate_image(spec.image))
            runtime = image_runtime()
            argv.append("--writable-tmpfs")
            mounts += [*runtime.mounts, Mount(str(run_dir.lib), LIB_DIR)]
        mounts.append(Mount(str(folder.control), CONTROL_DIR, writable=True))
        mounts += _mounts_with_mount_points(mounts, folder)
        argv += _mount_argv(mounts)
        for name, value in runtime.env.items():
            argv += ["--env", f"{name}={value}"]
        tool_env = {**runtime.tool_env, "HOME": HOME, "USER": USER}
        command = runtime.daemon_argv(f"{CONTROL_DIR}/{SOCKET_NAME}")
        return Launch((*argv, image, *command), _launcher_env(folder), tool_env, HOME, inherit_env=spec.image != "host")


def _exec_argv(executable: str, *, network: bool) -> tuple[str, ...]:
    privileges = ("--no-privs",) if os.geteuid() == 0 else ()
    net = () if network else ("--net", "--network", "none")
    isolation = ("--userns", *privileges, "--containall", *net, "--no-mount", "sys,bind-paths", "--no-eval")
    inside = ("--no-umask", "--home", HOME, "--cwd", "/", "--hostname", "sandbox")
    return (executable, "--quiet", "exec", *isolation, *inside)


def _launcher_env(folder: SandboxDir) -> dict[str, str]:
    """For Apptainer itself: whatever it writes goes into the sandbox's folder."""
    own = str(folder.home)
    return {"PATH": _LAUNCHER_PATH, "HOME": own, "TMPDIR": own, "APPTAINER_CONFIGDIR": own, "APPTAINER_CACHEDIR": own}


def _mount_argv(mounts: Iterable[Mount]) -> list[str]:
    argv: list[str] = []
    for mount in mounts:
        fields = ["type=bind", f"source={mount.source}", f"destination={mount.target}"]
        if not mount.writable:
            fields.append("ro")
        # The option is one line of CSV.
        argv += ["--mount", ",".join('"{}"'.format(field.replace('"', '""')) for field in fields)]
    return argv


def _mounts_with_mount_points(mounts: Iterable[Mount], folder: SandboxDir) -> list[Mount]:
    """Folders for /tmp and the home directory where something is to be mounted below: in its own tmpfs Apptainer makes
    no mount points. For a project that is itself in /tmp, say. They end with the sandbox's folder. Blocks."""
    needed: dict[str, Mount] = {}
    for mount in mounts:
        for place, mode in (("/tmp", 0o1777), (HOME, 0o700)):
            if mount.target.startswith(f"{place}/"):
                source = folder.path / "below" / os.path.basename(place)
                (source / os.path.relpath(mount.target, place)).mkdir(parents=True, exist_ok=True)
                source.chmod(mode)
                needed[place] = Mount(str(source), place, writable=True)
    return list(needed.values())
