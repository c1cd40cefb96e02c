"""Sandboxes by Apptainer (or Singularity): rootless, from the host's userland, a directory or a .sif file."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Self

from prorl_trio.sandbox.images.layers import CONTENT_NAME
from prorl_trio.sandbox.images.locate import check_host_layers, open_root
from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider
from prorl_trio.sandbox.providers.probe import (
    FOLDER_REMEDY,
    PROBE_DISK_BYTES,
    PROBE_TIMEOUT_S,
    REPLACE_IN_LAYER,
    make_probe_layer,
    report_of,
    run_probe,
)
from prorl_trio.sandbox.providers.start import Launch, open_daemon_sandbox
from prorl_trio.sandbox.providers.userns import user_namespace_remedy
from prorl_trio.sandbox.run_dir import open_run_dir, open_shared_run_dir
from prorl_trio.sandbox.runtime.runtime import HOME, LIB_DIR, Mount, host_runtime, image_runtime
from prorl_trio.sandbox.runtime.skeleton import USER, host_mounts, proc_mounts
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.run_dir import RunDir, SandboxDir
    from prorl_trio.sandbox.sandbox import Sandbox

_INSTALL: Final = "install it (`prorl-trio setup apptainer` on Debian and Ubuntu), or use the bubblewrap provider"
_OVERLAY_REMEDY: Final = (
    "install fuse-overlayfs (`prorl-trio setup apptainer` does), with a /dev/fuse that this user may open, and "
    "Apptainer without setuid; or use the bubblewrap provider, 0.11 or newer"
)
_LAUNCHER_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MIB: Final = 1024 * 1024
_OUR_SETTINGS: Final = re.compile(r"^\s*(sessiondir max size|enable overlay)\s*=.*$", re.MULTILINE)
_NO_FAKEROOT_AS_ROOT: Final = (
    "with sandbox.fakeroot on a node that runs as root, an image's start script could change the machine; run the node "
    "as another user, or use the image `host`"
)
_GUARD: Final = "CAP_SETPCAP"
"""A capability only for the daemon, see `prorl_daemon.limits`."""
_IDENTITY_FILES: Final = ("passwd", "group")


def find_apptainer() -> str | None:
    """Return the program in PATH: `apptainer`, else `singularity`, else None."""
    return shutil.which("apptainer") or shutil.which("singularity")


class ApptainerProvider(SandboxProvider):
    """`apptainer exec` in a user namespace, even for root, and even if it is installed setuid.

    It has its own PID, IPC, UTS and (without `spec.network`) network namespace, but neither the host's environment nor
    capabilities. /tmp, the home directory, /dev/shm and writes to an image other than `host` share one tmpfs, which is
    discarded. Its size is `spec.limits.disk_bytes`. For root, Apptainer makes it without a size, and the watchdog
    enforces the limit. If Apptainer is installed setuid, the size is its own `sessiondir max size`.

    With `fakeroot` the tools are user 0, with the few capabilities needed to install packages. They can give files to
    other users if this user has a range of users (/etc/subuid, /etc/subgid, newuidmap). An image's own start script
    runs before the daemon with all capabilities, so as root of the machine only the image `host` is allowed.
    """

    name: ClassVar[str] = "apptainer"
    isolated: ClassVar[bool] = True
    has_layers: ClassVar[bool] = True
    has_fakeroot: ClassVar[bool] = True

    def __init__(
        self,
        runtime_dir: Path | None = None,
        *,
        executable: str | None = None,
        fakeroot: bool = False,
        packages: tuple[str, ...] = (),
    ) -> None:
        """Use the program `executable` instead of `find_apptainer`'s.

        `runtime_dir`: see `run_dir.open_run_dir`. `packages`: see `host_python.require_host_python`.
        """
        self._packages = packages
        self._runtime_dir = runtime_dir
        self._fakeroot = fakeroot
        self._executable = executable or find_apptainer()

    @classmethod
    def configured(cls, config: SandboxConfig) -> Self:
        return cls(config.run_path, fakeroot=config.fakeroot, packages=config.packages)

    async def probe(self) -> ProviderReport:
        if self._executable is None:
            problem = "no apptainer or singularity program in PATH"
            return ProviderReport(name=self.name, usable=False, problem=problem, remedy=_INSTALL)
        env = {"PATH": _LAUNCHER_PATH}
        printed, problem = await run_probe((self._executable, "--version"), env)
        version = printed.rpartition(" ")[2]
        if problem:
            return ProviderReport(name=self.name, usable=False, problem=problem, remedy=_INSTALL)
        images_problem = ""
        try:
            async with open_run_dir(self._runtime_dir) as run_dir, run_dir.open_sandbox_dir() as folder:
                config = self._write_config(folder, PROBE_DISK_BYTES, overlay=True)
                started = _exec_argv(self._executable, network=False, config=config, fakeroot=self._fakeroot)
                mounts, env = _mount_argv(host_mounts(run_dir.root)), _launcher_env(folder)
                layer = make_probe_layer(folder.path)
                over = ("--writable-tmpfs", *_overlay_argv((layer,)), *mounts, str(run_dir.root), *REPLACE_IN_LAYER)
                _, images_problem = await run_probe((*started, *over), env)
                if images_problem:
                    _, problem = await run_probe((*started, *mounts, str(run_dir.root), "/bin/true"), env)
        except (SandboxUnavailable, OSError) as exc:
            return ProviderReport(name=self.name, usable=False, version=version, problem=str(exc), remedy=FOLDER_REMEDY)
        return report_of(
            self.name, version, problem, images_problem, user_namespace_remedy() if problem else _OVERLAY_REMEDY
        )

    def open_shared(self) -> AbstractAsyncContextManager[None]:
        return open_shared_run_dir(self._runtime_dir)

    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return open_daemon_sandbox(spec, self._runtime_dir, lambda run_dir, folder: self._plan(spec, run_dir, folder))

    def _plan(self, spec: SandboxSpec, run_dir: RunDir, folder: SandboxDir) -> Launch:
        if self._executable is None:
            raise SandboxUnavailable(f"no apptainer or singularity program in PATH; {_INSTALL}")
        if self._fakeroot and spec.image != "host" and os.geteuid() == 0:
            raise SandboxUnavailable(f"image {spec.image}: {_NO_FAKEROOT_AS_ROOT}")
        found = folder.held.enter_context(open_root(spec.image, spec.layers))
        has_overlay = found.base is not None or bool(found.layers)
        config = self._write_config(folder, spec.limits.disk_bytes, overlay=has_overlay)
        argv = [*_exec_argv(self._executable, network=spec.network, config=config, fakeroot=self._fakeroot)]
        mounts = [*proc_mounts(run_dir.root)]
        if found.base is None:
            check_host_layers(found.layers)
            runtime = host_runtime(self._packages)
            mounts += [*host_mounts(run_dir.root), *runtime.mounts]
            # Over Apptainer's own files, which would name the host's user and name servers.
            files = _IDENTITY_FILES if spec.network else (*_IDENTITY_FILES, "resolv.conf")
            mounts += [Mount(f"{run_dir.root}/etc/{name}", f"/etc/{name}") for name in files]
        else:
            runtime = image_runtime()
            mounts += runtime.mounts
        if has_overlay:
            mounts.append(Mount(str(run_dir.lib), LIB_DIR))
            argv += ["--writable-tmpfs", *_overlay_argv(found.layers)]
        argv += _mount_argv(mounts)
        for name, value in runtime.env.items():
            argv += ["--env", f"{name}={value}"]
        tool_env = {**runtime.tool_env, "HOME": HOME, "USER": USER}
        command = runtime.daemon_argv()
        return Launch(
            (*argv, str(found.base or run_dir.root), *command),
            _launcher_env(folder),
            tool_env,
            HOME,
            inherit_env=found.base is not None,
            fakeroot=self._fakeroot,
        )

    def _write_config(self, folder: SandboxDir, disk_bytes: int, *, overlay: bool) -> Path | None:
        """Write Apptainer's own configuration with our size of the tmpfs, if it accepts another file.

        With `overlay`, folders are laid over one another by fuse-overlayfs. Apptainer would use the kernel's overlay
        without the mount option `userxattr`, which without privileges cannot remove a folder of a lower layer (EIO).
        """
        text = None if self._executable is None else _installed_config(self._executable)
        if text is None:
            return None
        ours = [f"sessiondir max size = {max(1, disk_bytes // _MIB)}"]
        ours += ["enable overlay = driver"] if overlay else []
        path = folder.path / "apptainer.conf"
        path.write_text("\n".join([_OUR_SETTINGS.sub("", text), *ours, ""]), encoding="utf-8")
        return path


@functools.cache
def _installed_config(executable: str) -> str | None:
    """Return Apptainer's configuration; None if it cannot be replaced: Apptainer is setuid or does not answer."""
    try:
        asked = subprocess.run(
            (executable, "buildcfg"),
            env={"PATH": _LAUNCHER_PATH},
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
        )
        settings = dict(line.partition("=")[::2] for line in asked.stdout.decode().splitlines())
        name = "APPTAINER" if "APPTAINER_CONF_FILE" in settings else "SINGULARITY"
        if settings[f"{name}_SUID_INSTALL"] != "0":
            return None
        return Path(settings[f"{name}_CONF_FILE"]).read_text(encoding="utf-8")
    except (OSError, subprocess.SubprocessError, KeyError, UnicodeDecodeError):
        return None


def _exec_argv(
    executable: str, *, network: bool, config: Path | None = None, fakeroot: bool = False
) -> tuple[str, ...]:
    privileges = ("--no-privs",) if os.geteuid() == 0 else ()
    # Not by the host's `fakeroot` command: it would add a process above the daemon, and a library in every tool.
    root = ("--fakeroot", "--ignore-fakeroot-command") if fakeroot else ("--add-caps", _GUARD)
    net = () if network else ("--net", "--network", "none")
    isolation = ("--userns", *root, *privileges, "--containall", *net, "--no-mount", "sys,bind-paths", "--no-eval")
    inside = ("--no-umask", "--home", HOME, "--cwd", "/", "--hostname", "sandbox")
    configured = () if config is None else ("--config", str(config))
    # /dev/shm then belongs to the one tmpfs whose size the configuration limits, rather than to an unlimited one.
    return (executable, "--quiet", *configured, "exec", "--no-init", *isolation, *inside, "--scratch", "/dev/shm")


def _overlay_argv(layers: Iterable[Path]) -> list[str]:
    argv: list[str] = []
    for layer in layers:
        folder = layer.parent if layer.name == CONTENT_NAME else layer
        if (misread := folder / CONTENT_NAME).is_dir() and misread != layer:
            raise SandboxUnavailable(
                f"layer {layer} has /{CONTENT_NAME}, which Apptainer takes for the whole layer: store it "
                "(`prorl-trio image layer`), and name it by its digest"
            )
        if ":" in str(folder) or "," in str(folder):
            raise SandboxUnavailable(f"layer {layer}: Apptainer takes no layer whose path has a colon or a comma")
        argv += ["--overlay", f"{folder}:ro"]
    return argv


def _launcher_env(folder: SandboxDir) -> dict[str, str]:
    """Return the environment of Apptainer itself, which directs all its output files into the sandbox's folder."""
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
