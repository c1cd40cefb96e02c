"""An examination of this machine for what a rollout needs: a function per thing, with what to do about it."""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from prorl_launch import model, paths, venv
from prorl_launch.environments import engine_environment
from prorl_launch.userns import user_namespace_problem
from prorl_trio.sandbox.limits.cgroup import find_site
from prorl_trio.sandbox.limits.pid_limit import pid_limit_problem
from prorl_trio.sandbox.providers.registry import probe_providers
from prorl_trio.sandbox.providers.userns import user_namespace_remedy
from prorl_trio.sandbox.runtime.bundle import bundle_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_launch.environments import EngineKind
    from prorl_trio.sandbox.provider import ProviderReport

_GIB = 1024**3
_DISK_BYTES = 2 * _GIB
_SHM_BYTES = _GIB // 2
_ENGINE_MEMORY_BYTES = 6 * _GIB
_GPU_TIMEOUT_S = 15.0
_BY_WATCHDOG = (
    "each sandbox keeps to its limits by its own watchdog alone, a fifth of a second late, and seconds for what the "
    "kernel itself takes for it; parts of shared memory that were unmapped are not counted"
)
_BY_KERNEL = "the kernel limits memory, its own for the sandbox too, and processes of each sandbox"
_FORKS_BY_WATCHDOG = (
    "a sandbox's watchdog alone ends a fork bomb, late where the machine is busy; of root's processes the kernel keeps "
    "no count by user"
)
_DELEGATE = (
    "systemd: run the node as a service with Delegate=yes and DelegateSubgroup=node; elsewhere, before it starts, in a "
    "cgroup G that is yours: mkdir G/node; echo $$ > G/node/cgroup.procs; echo +memory +pids > G/cgroup.subtree_control"
)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the report.

    `missing`: something that a rollout here needs; `warning`: it runs, but something is lost, as `detail` says.
    `remedy` says what to do, and is empty when `state` is `ok`.
    """

    name: str
    state: Literal["ok", "warning", "missing"]
    detail: str
    remedy: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`usable`: a rollout can run here, with a sandbox and, unless it was left out, an engine of this machine."""

    usable: bool
    checks: list[Check]


async def examine(kind: EngineKind, *, with_engine: bool = True) -> Report:
    """Look at everything, starting the smallest possible sandbox of each kind. Takes 1 to 3 s; changes nothing.

    Never raises for a missing piece. Without `with_engine`, backends are elsewhere, and a missing engine is no fault.
    """
    engine: list[Callable[[], Check]] = [partial(_engine, kind), _model] if with_engine else []
    checks = [
        *await trio.to_thread.run_sync(_all_of, [_python, _user_namespaces]),
        *_sandboxes(await probe_providers()),
        *await trio.to_thread.run_sync(
            _all_of, [_runtime, _fuse, _fakeroot, *engine, _memory, _disk, _shared_memory, _cgroups, _process_limit]
        ),
        await _gpu(),
    ]
    return Report(usable=all(check.state != "missing" for check in checks), checks=checks)


def _all_of(checks: Sequence[Callable[[], Check]]) -> list[Check]:
    return [check() for check in checks]


def _python() -> Check:
    return Check(name="python", state="ok", detail=f"{platform.python_version()} ({sys.executable})")


def _user_namespaces() -> Check:
    if problem := user_namespace_problem():
        return Check(name="user namespaces", state="warning", detail=problem, remedy=user_namespace_remedy())
    return Check(name="user namespaces", state="ok", detail="this user can make them")


def _sandboxes(reports: list[ProviderReport]) -> list[Check]:
    """Examine each provider. One that does not work is a fault only if none does."""
    state: Literal["warning", "missing"] = "warning" if any(report.usable for report in reports) else "missing"
    return [_sandbox(report, state) for report in reports]


def _sandbox(report: ProviderReport, broken: Literal["warning", "missing"]) -> Check:
    if not report.usable:
        return Check(name=report.name, state=broken, detail=report.problem, remedy=report.remedy)
    if report.images_problem:
        detail = f"{report.version}: sandboxes of `host` start, those of other images and of layers do not work: "
        return Check(name=report.name, state="warning", detail=detail + report.images_problem, remedy=report.remedy)
    return Check(name=report.name, state="ok", detail=f"{report.version}: started a sandbox")


def _runtime() -> Check:
    if (path := bundle_path()).is_dir():
        return Check(name="image runtime", state="ok", detail=f"{path}: the daemon starts in any image")
    detail = f"not in {path}: sandboxes can have the image `host` only"
    return Check(name="image runtime", state="warning", detail=detail, remedy="prorl-trio setup runtime")


def _fuse(device: Path = Path("/dev/fuse")) -> Check:
    if os.access(device, os.R_OK | os.W_OK):
        return Check(name=str(device), state="ok", detail="SIF images can be mounted")
    found = "is not for this user" if device.exists() else "does not exist"
    remedy = (
        f"as root: chmod 666 {device}" if device.exists() else f"as root: modprobe fuse, or mknod {device} c 10 229"
    )
    return Check(name=str(device), state="warning", detail=f"{found}: no SIF images; other images work", remedy=remedy)


def _fakeroot(etc: Path = Path("/etc")) -> Check:
    """Examine what `sandbox.fakeroot` needs beyond Apptainer, for files of other users than root inside."""
    user = _user_name()
    lacking = [name for name in ("subuid", "subgid") if not _has_range(etc / name, user)]
    missing = [name for name in ("newuidmap", "newgidmap") if shutil.which(name) is None]
    if not lacking and not missing:
        return Check(name="fakeroot", state="ok", detail=f"{user} has a range of user and group ids for sandboxes")
    problems = [f"{etc / name} has no range for {user}" for name in lacking]
    problems += [f"there is no {name}" for name in missing]
    detail = f"{'; '.join(problems)}: with sandbox.fakeroot there is root inside, but no chown to anybody else"
    remedies = ["install them (`apt install uidmap`)"] if missing else []
    if lacking:
        remedies.append(f"as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}")
    return Check(name="fakeroot", state="warning", detail=detail, remedy="; ".join(remedies))


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _has_range(table: Path, user: str) -> bool:
    """Return whether a file like /etc/subuid gives this user, by name or number, ids."""
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(line.partition(":")[0] in (user, str(os.geteuid())) for line in lines)


def _engine(kind: EngineKind) -> Check:
    folder = paths.engine_dir(kind)
    if venv.is_complete(folder, engine_environment(kind).key(paths.checkout_dir())):
        return Check(name="engine", state="ok", detail=f"{kind}: {folder}")
    return Check(
        name="engine", state="missing", detail=f"no {kind} engine in {folder}", remedy="prorl-trio setup engine"
    )


def _model() -> Check:
    folder = paths.model_dir()
    if not folder.exists():
        return Check(name="model", state="missing", detail=f"no model in {folder}", remedy="prorl-trio setup engine")
    if broken := model.broken_files(folder):
        detail = f"{folder}: missing or changed: {', '.join(broken)}"
        return Check(name="model", state="missing", detail=detail, remedy=f"rm -r {folder} && prorl-trio setup engine")
    return Check(name="model", state="ok", detail=f"{folder}: all checksums agree")


def _memory(meminfo: Path = Path("/proc/meminfo")) -> Check:
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    detail = f"{available / _GIB:.1f} GiB available, {len(os.sched_getaffinity(0))} cores"
    if available >= _ENGINE_MEMORY_BYTES:
        return Check(name="memory", state="ok", detail=detail)
    remedy = (
        f"the CPU engine and a node want {_ENGINE_MEMORY_BYTES // _GIB} GiB: end other programs, or run vLLM elsewhere"
    )
    return Check(name="memory", state="warning", detail=detail, remedy=remedy)


def _disk() -> Check:
    folders = {"cache": _existing(paths.cache_dir()), "temporary": Path(tempfile.gettempdir())}
    free = {name: shutil.disk_usage(folder).free for name, folder in folders.items()}
    detail = ", ".join(f"{free[name] / _GIB:.1f} GiB free for {name} files ({folders[name]})" for name in folders)
    if min(free.values()) >= _DISK_BYTES:
        return Check(name="disk", state="ok", detail=detail)
    remedy = f"make {_DISK_BYTES // _GIB} GiB free, or set PRORL_CACHE_DIR or TMPDIR to another disk"
    return Check(name="disk", state="warning", detail=detail, remedy=remedy)


def _shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    size = shutil.disk_usage(folder).total if folder.is_dir() else 0
    detail = f"{size / _GIB:.2f} GiB"
    if size >= _SHM_BYTES:
        return Check(name=str(folder), state="ok", detail=detail)
    remedy = "Docker: --shm-size=1g; elsewhere, as root: mount -o remount,size=1g /dev/shm"
    return Check(name=str(folder), state="warning", detail=f"{detail}: vLLM may fail", remedy=remedy)


def _cgroups(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Check:
    """Examine whether the kernel can keep the limits of each sandbox as a whole."""
    site = find_site(mount, own)
    if site.path is not None:
        detail = f"{site.path}: {_BY_KERNEL}"
        return Check(name="cgroup v2", state="ok", detail=detail)
    return Check(name="cgroup v2", state="warning", detail=f"{site.problem}: {_BY_WATCHDOG}", remedy=_DELEGATE)


def _process_limit() -> Check:
    """Examine whether the kernel stops a fork bomb in a sandbox. A cgroup would; else its PID namespace may."""
    if find_site().path is not None:
        return Check(name="process limit", state="ok", detail="kept by the kernel in each sandbox's cgroup")
    problem = pid_limit_problem()
    if not problem:
        return Check(name="process limit", state="ok", detail="kept by the kernel in each sandbox's PID namespace")
    detail = f"{problem}: {_FORKS_BY_WATCHDOG}"
    return Check(name="process limit", state="warning", detail=detail, remedy="Linux 6.14 or newer, or cgroup v2")


async def _gpu() -> Check:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    found = ""
    try:
        with trio.move_on_after(_GPU_TIMEOUT_S):
            done = await trio.run_process(query, capture_stdout=True, stderr=subprocess.DEVNULL, check=False)
            found = done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""
    except OSError:
        await trio.lowlevel.checkpoint()
        return Check(name="GPU", state="ok", detail="no NVIDIA GPU: the engine runs on the CPU")
    if found:
        return Check(name="GPU", state="ok", detail=found.replace("\n", "; "))
    return Check(name="GPU", state="warning", detail="nvidia-smi finds none", remedy="see what `nvidia-smi` says")


def _existing(path: Path) -> Path:
    """`path`, or its nearest ancestor that exists."""
    while not path.exists():
        path = path.parent
    return path
